"""What one rank still waits for: the children that load for a request, and the children that still
read a finished request's blocks.

Pure. The scheduler's role announces every load and every delayed free with the children that take
part; a report of a child that was not announced, or that reports twice, changes nothing. So no
block is freed or used while a child may still write into it or read it.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Load:
    """A load of one request by one or more children."""

    request: str
    waiting: set[int] = field(default_factory=set)
    """The children that have not finished."""
    blocks: frozenset[int] = frozenset()
    failures: dict[int, str] = field(default_factory=dict)
    """The children whose part has failed, with the reasons."""
    optional_failures: set[int] = field(default_factory=set)
    """The children whose part has failed although the request need not fail."""


@dataclass(slots=True)
class RankTransfers:
    """The loads and sends of all children on one rank."""

    _loads: dict[str, Load] = field(default_factory=dict, init=False)
    _sends: dict[str, set[int]] = field(default_factory=dict, init=False)
    _loaded: list[Load] = field(default_factory=list, init=False)
    _sent: set[str] = field(default_factory=set, init=False)

    def __len__(self) -> int:
        return len(self._loads) + len(self._sends)

    def begin_load(
        self, request: str, children: Iterable[int], blocks: frozenset[int] = frozenset()
    ) -> None:
        load = self._loads.setdefault(request, Load(request))
        load.waiting |= set(children)
        load.blocks = blocks

    def begin_send(self, request: str, children: Iterable[int]) -> None:
        """Wait for the children that asked the engine to keep a finished request's blocks."""
        self._sends.setdefault(request, set()).update(children)

    def is_loading(self, child: int, request: str) -> bool:
        return request in self._loads and child in self._loads[request].waiting

    def end_load(
        self, child: int, request: str, failure: str | None = None, *, is_optional: bool = False
    ) -> None:
        """Record that a child has finished its part, and why the part failed."""
        if not self.is_loading(child, request):
            return
        load = self._loads[request]
        load.waiting.remove(child)
        if failure is not None:
            load.failures[child] = failure
        if is_optional:
            load.optional_failures.add(child)
        if not load.waiting:
            self._loaded.append(self._loads.pop(request))

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

    def end_send(self, child: int, request: str) -> None:
        """Record that a child has read a finished request's blocks."""
        waiting = self._sends.get(request, set())
        if child in waiting:
            waiting.remove(child)
            if not waiting:
                del self._sends[request]
                self._sent.add(request)

    def drop_child(self, child: int, reason: str) -> None:
        """Settle everything that a child still owes: its loads fail, its sends count as done. Call
        it when the child can no longer touch the cache.
        """
        for request in list(self._loads):
            self.end_load(child, request, reason)
        for request in list(self._sends):
            self.end_send(child, request)

    def take_loaded(self) -> list[Load]:
        """The loads in which no child takes part any more."""
        loaded, self._loaded = self._loaded, []
        return loaded

    def take_sent(self) -> set[str]:
        sent, self._sent = self._sent, set()
        return sent
