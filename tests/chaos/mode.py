"""How the engines transfer KV: pull (P computes first, then D reads), push (both legs start
together and P pushes), or a mix. Pure.
"""

from enum import StrEnum

PULL, PUSH = "NixlConnector", "NixlPushConnector"


class Mode(StrEnum):
    PULL = "pull"
    PUSH = "push"
    BOTH = "both"

    def prefill_connectors(self, index: int) -> tuple[str, ...]:
        """Return the connectors of one P's incarnations. With `BOTH`, neighbouring P differ, and
        each P restarts with the other connector: the router must not rely on what it learned from
        the previous incarnation.
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
        """Return D's connectors. The push connector also pulls if P asks for it."""
        return (PULL,) if self is Mode.PULL else (PUSH,)
