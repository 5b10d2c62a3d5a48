"""Finished requests whose blocks are kept for peers, and which of them belong together. Pure."""

from dataclasses import dataclass, field

from kvferry.types import RequestId

__all__ = ["HeldBlocks"]


@dataclass(frozen=True, slots=True)
class _Held:
    num_blocks: int
    family: str | None


@dataclass(slots=True)
class HeldBlocks:
    num_blocks: int = 0
    _held: dict[RequestId, _Held] = field(default_factory=dict)
    _families: dict[str, set[RequestId]] = field(default_factory=dict)

    def hold(self, request: RequestId, num_blocks: int, family: str | None) -> None:
        self._held[request] = _Held(num_blocks, family)
        self.num_blocks += num_blocks
        if family is not None:
            self._families.setdefault(family, set()).add(request)

    def free(self, request: RequestId) -> set[RequestId]:
        """Its lease has ended. Returns those nobody will come for any more.

        Of the requests that answer one client's request together, one's parameters have reached somebody; the others' have not.
        """
        held = self._held.pop(request, None)
        if held is None:
            return set()
        self.num_blocks -= held.num_blocks
        return self._families.pop(held.family, set()) - {request} if held.family is not None else set()
