"""How the fleet hands KV over: P is asked first and D pulls, both legs start together and P pushes,
or some of each. Pure.
"""

from enum import StrEnum

__all__ = ["Mode"]

PULL, PUSH = "NixlConnector", "NixlPushConnector"


class Mode(StrEnum):
    PULL = "pull"
    PUSH = "push"
    BOTH = "both"

    def prefill_connectors(self, index: int) -> tuple[str, ...]:
        """Of one P's lives. With both, neighbours differ, and each comes back as the other kind:
        the router must not go by what it knew.
        """
        match self:
            case Mode.PULL:
                return (PULL,)
            case Mode.PUSH:
                return (PUSH,)
            case Mode.BOTH:
                return (PUSH, PULL) if index % 2 == 0 else (PULL, PUSH)

    @property
    def decode_connectors(self) -> tuple[str, ...]:
        """One that takes part in push pulls too, where a P asks for it."""
        return (PULL,) if self is Mode.PULL else (PUSH,)
