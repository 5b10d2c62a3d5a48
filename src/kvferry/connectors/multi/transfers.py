"""What one rank still waits for: the children that load for a request, and the children that still
read a finished request's blocks.

Pure. The scheduler's role announces every load and every delayed free with the children that take
part; a report of a child that was not announced, or that reports twice, changes nothing. So no
block is freed or used while a child may still write into it or read it.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class FinishedLoad:
    """A request for which no child of this rank loads any more."""

    request: str
    failures: Mapping[int, str]
    """The children whose part failed, with the reasons; empty if all of it has arrived."""


@dataclass(slots=True)
class _Load:
    waiting: set[int]
    blocks: frozenset[int] = frozenset()
    failures: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class RankTransfers:
    """The loads and sends of all children on one rank."""

    _loads: dict[str, _Load] = field(default_factory=dict, init=False)
    _sends: dict[str, set[int]] = field(default_factory=dict, init=False)
    _loaded: list[FinishedLoad] = field(default_factory=list, init=False)
    _sent: set[str] = field(default_factory=set, init=False)

    def __len__(self) -> int:
        return len(self._loads) + len(self._sends)

    def begin_load(
        self, request: str, children: Iterable[int], blocks: frozenset[int] = frozenset()
    ) -> None:
        load = self._loads.setdefault(request, _Load(set()))
        load.waiting |= set(children)
        load.blocks = blocks

    def begin_send(self, request: str, children: Iterable[int]) -> None:
        """Wait for the children that asked the engine to keep a finished request's blocks."""
        self._sends.setdefault(request, set()).update(children)

    def is_loading(self, child: int, request: str) -> bool:
        return request in self._loads and child in self._loads[request].waiting

    def end_load(self, child: int, request: str, failure: str | None = None) -> bool:
        """Record that a child has finished its part. False if the child was not loading."""
        load = self._loads.get(request)
        if load is None or child not in load.waiting:
            return False
        load.waiting.remove(child)
        if failure is not None:
            load.failures[child] = failure
        if not load.waiting:
            del self._loads[request]
            self._loaded.append(FinishedLoad(request, load.failures))
        return True

    def fail_blocks(self, child: int, blocks: Collection[int], failure: str) -> set[int]:
        """Let the loads fail that a child makes into these blocks, once the child has reported
        them. Returns the blocks of no such load.
        """
        left = set(blocks)
        for load in self._loads.values():
            if child in load.waiting and not load.blocks.isdisjoint(blocks):
                load.failures[child] = failure
                left -= load.blocks
        return left

    def end_send(self, child: int, request: str) -> bool:
        """Record that a child has read a finished request's blocks. False if the child did not ask
        for them.
        """
        waiting = self._sends.get(request)
        if waiting is None or child not in waiting:
            return False
        waiting.remove(child)
        if not waiting:
            del self._sends[request]
            self._sent.add(request)
        return True

    def drop_child(self, child: int, reason: str) -> None:
        """Settle everything that a child still owes: its loads fail, its sends count as done. Call
        it when the child can no longer touch the cache.
        """
        for request in list(self._loads):
            self.end_load(child, request, reason)
        for request in list(self._sends):
            self.end_send(child, request)

    def take_loaded(self) -> list[FinishedLoad]:
        loaded, self._loaded = self._loaded, []
        return loaded

    def take_sent(self) -> set[str]:
        sent, self._sent = self._sent, set()
        return sent
