"""Copies to where peers see blocks, in turn: of two that have a block in common the later waits
until the earlier has ended. Pure.

An engine that preempts a request uses its blocks again at once, while a copy of them may be under
way; the copy that the next owner asks for must not be overtaken by it. Blocks are known by their
number alone, whatever their group: groups may share memory.
"""

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from kvferry.protocol.actions import CopyToHostBuffer
from kvferry.protocol.leases import EndedLease
from kvferry.protocol.tickets import HOLE
from kvferry.types import RequestId, Route

__all__ = ["BlockTables", "CopyResult", "HostBufferCopies", "HostCopyQueue", "Publication"]


@dataclass(slots=True)
class HostCopyQueue:
    """Copies stand in line at each of their blocks; one that is first in all its lines is under
    way.
    """

    _blocks: dict[int, frozenset[int]] = field(default_factory=dict, init=False)
    """By copy."""
    _queues: dict[int, list[int]] = field(default_factory=dict, init=False)
    """By block, none of them empty."""
    _num_ahead: dict[int, int] = field(default_factory=dict, init=False)
    """By copy, in how many lines it is not the first."""

    def __len__(self) -> int:
        return len(self._blocks)

    def join(self, copy: int, blocks: Collection[int]) -> bool:
        """Whether it may begin at once; if not, `leave` of another says when."""
        self._blocks[copy] = frozenset(blocks)
        self._num_ahead[copy] = 0
        for block in self._blocks[copy]:
            queue = self._queues.setdefault(block, [])
            self._num_ahead[copy] += bool(queue)
            queue.append(copy)
        return self.is_running(copy)

    def leave(self, copy: int) -> list[int]:
        """It has ended, or is not wanted before it has begun. Returns those that may begin now."""
        begun = []
        for block in self._blocks.pop(copy):
            queue = self._queues[block]
            was_first = queue[0] == copy
            queue.remove(copy)
            if not queue:
                del self._queues[block]
            elif was_first:
                self._num_ahead[queue[0]] -= 1
                if self.is_running(queue[0]):
                    begun.append(queue[0])
        del self._num_ahead[copy]
        return sorted(begun)

    def is_running(self, copy: int) -> bool:
        return not self._num_ahead[copy]

    def has_any(self, blocks: Collection[int]) -> bool:
        """Whether one of these blocks is being copied, or will be."""
        return not self._queues.keys().isdisjoint(blocks)


# -------------------- exposures --------------------
# What a producer with a host buffer has copied of its leases, and what waits for that. Pure.
#
# Readers of a producer with a host buffer read a copy of the blocks. A granted lease is copied
# once; an open one (a prefill that is handed over while it is computed) segment by segment, and
# each segment is offered when it, and all before it, has been copied.
#
#     copy      waiting for its turn ──> under way ──> ended            never stopped halfway; dropped only before it has begun
#     lease     copied while it is held; when it ends, the copies that are under way still read its blocks, so its end is reported after them
#     withdrawn by the engine: the blocks are gone already, so nothing is reported; what is under way ends as nobody's, and counts for nobody
#
# A reader that was offered a segment reads what it was offered; any other reads all, and is told
# when all is there.


BlockTables = tuple[tuple[int, ...], ...]
"""By group."""


@dataclass(frozen=True, slots=True)
class Publication:
    """What may be offered of a lease."""

    match_id: str
    ticket: str
    ready_tokens: int


@dataclass(frozen=True, slots=True)
class CopyResult:
    """What the end of a copy brings about."""

    request: RequestId
    publication: Publication | None = None
    """May be offered now."""
    readers: Mapping[str, Route] = field(default_factory=dict)
    """They are to be told: that all is there or, if it failed, why it will not be."""
    end: EndedLease | None = None
    """To be reported."""
    failure: str = ""
    is_open: bool = False
    """Of what has failed: the engine goes on with it."""
    match_id: str = ""
    """Likewise, as far as it was published."""


@dataclass(slots=True)
class _LeaseCopy:
    """One lease, until all of it is copied."""

    request: RequestId
    is_streamed: bool
    is_open: bool
    """There is more to come."""
    copies: dict[int, BlockTables] = field(default_factory=dict)
    """Under way or waiting for their turn."""
    publications: deque[tuple[int, Publication]] = field(default_factory=deque)
    """Behind the last copy that each waits for."""
    waiting: dict[str, Route] = field(default_factory=dict)
    """Readers to be told when all is there."""
    match_id: str = ""
    failure: str = ""
    """Why it is no good."""
    end: EndedLease | None = None
    """How the lease has ended meanwhile."""


class HostBufferCopies:
    def __init__(self) -> None:
        self._lease_copies: dict[RequestId, _LeaseCopy] = {}
        self._owners: dict[int, _LeaseCopy] = {}
        """By copy. One that is under way for what was withdrawn has none."""
        self._queue = HostCopyQueue()
        self._last_copy = 0
        self._actions: list[CopyToHostBuffer] = []

    @property
    def num_unreported(self) -> int:
        """Leases that have ended, whose blocks are still copied."""
        return sum(lease_copy.end is not None for lease_copy in self._lease_copies.values())

    def is_copying(self, blocks: Collection[int]) -> bool:
        """Whether one of these blocks is being copied, or will be."""
        return self._queue.has_any(blocks)

    # -- what the engine does with a lease --

    def grant(self, request: RequestId, blocks: BlockTables) -> None:
        self._lease_copies[request] = lease_copy = _LeaseCopy(
            request, is_streamed=False, is_open=False
        )
        self._enqueue(lease_copy, blocks)

    def open(self, request: RequestId) -> None:
        self._lease_copies[request] = _LeaseCopy(request, is_streamed=True, is_open=True)

    def close(self, request: RequestId, blocks: BlockTables) -> None:
        """These are the last."""
        lease_copy = self._lease_copies.get(request)
        if lease_copy is not None:
            lease_copy.is_open = False
            self._enqueue(lease_copy, blocks)

    def publish(
        self, request: RequestId, publication: Publication, blocks: BlockTables
    ) -> Publication | None:
        """So much may be offered once these blocks, and those before, are copied. Returns it if
        that is now.
        """
        lease_copy = self._lease_copies.get(request)
        if lease_copy is None or not lease_copy.is_streamed:
            return publication
        lease_copy.match_id = publication.match_id
        if lease_copy.failure:
            return None
        if blocks:
            self._enqueue(lease_copy, blocks)
        if not lease_copy.copies:
            return publication
        lease_copy.publications.append((self._last_copy, publication))
        return None

    def withdraw(self, request: RequestId) -> None:
        """The engine has taken the blocks back. Nobody hears of what is copied of them."""
        lease_copy = self._lease_copies.pop(request, None)
        if lease_copy is not None:
            self._drop_waiting(lease_copy)
            for copy in lease_copy.copies:
                del self._owners[copy]

    def end(self, ended: EndedLease) -> bool:
        """A lease has ended. Whether that may be reported now; if not, `copied` says when."""
        lease_copy = self._lease_copies.get(ended.request)
        if lease_copy is None:
            return True
        self._drop_waiting(lease_copy)
        if lease_copy.copies:
            lease_copy.end = ended
            return False
        del self._lease_copies[ended.request]
        return True

    def failure_of(self, request: RequestId) -> str:
        """Why a lease is no good; empty: it is."""
        lease_copy = self._lease_copies.get(request)
        return "" if lease_copy is None else lease_copy.failure

    # -- readers --

    def attach(self, request: RequestId, reader: str, route: Route, *, is_offered: bool) -> bool:
        """Whether it may read; if not, it is told later."""
        lease_copy = self._lease_copies.get(request)
        if lease_copy is None or (lease_copy.is_streamed and is_offered):
            return True
        lease_copy.waiting[reader] = route
        return False

    def offer(self, request: RequestId, reader: str) -> bool:
        """It is offered what is published. Whether it waits to be told that it may read."""
        lease_copy = self._lease_copies.get(request)
        return (
            lease_copy is not None
            and lease_copy.is_streamed
            and lease_copy.waiting.pop(reader, None) is not None
        )

    def leave(self, request: RequestId, reader: str) -> None:
        if request in self._lease_copies:
            self._lease_copies[request].waiting.pop(reader, None)

    def is_waiting(self, request: RequestId, reader: str) -> bool:
        return request in self._lease_copies and reader in self._lease_copies[request].waiting

    # -- copies --

    def copied(self, copy: int, error: str | None) -> CopyResult | None:
        """A copy has ended; it no longer reads the engine's blocks. None: nothing comes of it."""
        self._begin(self._queue.leave(copy))
        lease_copy = self._owners.pop(copy, None)
        if lease_copy is None:
            return None
        del lease_copy.copies[copy]
        if lease_copy.end is not None:
            return (
                None
                if lease_copy.copies
                else CopyResult(
                    lease_copy.request, end=self._lease_copies.pop(lease_copy.request).end
                )
            )
        if lease_copy.failure:
            return None
        if error is not None:
            lease_copy.failure = f"the blocks could not be copied to the host buffer: {error}"
            readers = lease_copy.waiting
            self._drop_waiting(lease_copy)
            return CopyResult(
                lease_copy.request,
                None,
                readers,
                None,
                lease_copy.failure,
                lease_copy.is_open,
                lease_copy.match_id,
            )
        return self._progress(lease_copy)

    def take_actions(self) -> list[CopyToHostBuffer]:
        actions, self._actions = self._actions, []
        return actions

    def _progress(self, lease_copy: _LeaseCopy) -> CopyResult:
        publication, readers = None, {}
        oldest = min(lease_copy.copies, default=self._last_copy + 1)
        while lease_copy.publications and lease_copy.publications[0][0] < oldest:
            _, publication = lease_copy.publications.popleft()
        if not lease_copy.copies and not lease_copy.is_open:
            readers = lease_copy.waiting
            del self._lease_copies[lease_copy.request]
        return CopyResult(lease_copy.request, publication, readers)

    def _enqueue(self, lease_copy: _LeaseCopy, blocks: BlockTables) -> None:
        self._last_copy += 1
        lease_copy.copies[self._last_copy] = blocks
        self._owners[self._last_copy] = lease_copy
        if self._queue.join(
            self._last_copy, {block for group in blocks for block in group if block != HOLE}
        ):
            self._begin([self._last_copy])

    def _begin(self, copies: list[int]) -> None:
        for copy in copies:
            lease_copy = self._owners[copy]
            self._actions.append(
                CopyToHostBuffer(lease_copy.request, lease_copy.copies[copy], copy)
            )

    def _drop_waiting(self, lease_copy: _LeaseCopy) -> None:
        """Everybody and everything that waits for this lease's blocks to be copied."""
        lease_copy.publications.clear()
        lease_copy.waiting = {}
        # The latest first, so that none of ours begins instead.
        for copy in [
            copy for copy in reversed(lease_copy.copies) if not self._queue.is_running(copy)
        ]:
            del lease_copy.copies[copy], self._owners[copy]
            self._begin(self._queue.leave(copy))
