"""Host buffer of a producer: the order of copies, and what waits for each copy.

Readers of a producer with a host buffer read a copy of the blocks. The blocks of a granted lease
are copied once. The blocks of an open lease (on a prefill that still computes) are copied segment
by segment, and a segment is offered when this segment and all earlier segments have been copied. A
reader with an offer reads the offered tokens. A reader without an offer reads all blocks, and gets
`Ready` when all copies have ended.

    copy       queued ──> running ──> ended. A running copy is never stopped; only a queued copy can
               be dropped.
    lease      Blocks are copied while the lease is held. When the lease ends, running copies still
               read the blocks, so the end of the lease is reported after the last copy.
    withdrawn  The engine has reused the blocks already, so no end is reported. A running copy then
               belongs to no lease, and the result of the copy is ignored.

See docs/decisions/020-host-buffers-and-order-on-arrival.md and docs/decisions/030-push.md.
Pure: the caller performs the copies and reports their end.
"""

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from kvferry.events import LeaseEnded
from kvferry.protocol.actions import CopyToHostBuffer
from kvferry.protocol.outbox import Outbox
from kvferry.protocol.tickets import NO_BLOCK
from kvferry.types import BlockIds, RequestId, Route

# -- copy queue --
# If two copies share a block, the later copy waits until the earlier copy has ended. After a
# preemption the engine reuses blocks at once, while a copy for their previous owner may still run.
# The old copy must not overwrite the copy for the next owner in the host buffer.


@dataclass(slots=True)
class HostCopyQueue:
    """One queue of copies for each block; a copy runs when the copy is first in all its queues.

    Blocks are identified by number alone, whatever their group: groups may share memory.
    """

    _blocks: dict[int, frozenset[int]] = field(default_factory=dict, init=False)
    """Blocks of each copy."""
    _queues: dict[int, list[int]] = field(default_factory=dict, init=False)
    """Copies that want each block, in order; no queue is empty."""
    _num_ahead: dict[int, int] = field(default_factory=dict, init=False)
    """Number of queues in which each copy is not the first."""

    def __len__(self) -> int:
        return len(self._blocks)

    def join(self, copy: int, blocks: Collection[int]) -> bool:
        """Enqueue a copy; returns whether the copy may begin at once.

        If not, a later `leave` of another copy returns this copy as ready to begin.
        """
        self._blocks[copy] = frozenset(blocks)
        self._num_ahead[copy] = 0
        for block in self._blocks[copy]:
            queue = self._queues.setdefault(block, [])
            self._num_ahead[copy] += bool(queue)
            queue.append(copy)
        return self.is_running(copy)

    def leave(self, copy: int) -> list[int]:
        """Remove a copy that has ended or is dropped; returns the copies that may begin now."""
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
        """Return whether a copy of one of these blocks is running or queued."""
        return not self._queues.keys().isdisjoint(blocks)


# -- copies of leases --
# Tracks, for each lease, its copies and the offers, readers and lease end that wait for the copies.


@dataclass(frozen=True, slots=True)
class Publication:
    """What an offer of a leased prefill contains."""

    match_id: str
    ticket: str
    ready_tokens: int


@dataclass(frozen=True, slots=True)
class CopyResult:
    """What the caller must do after a copy has ended."""

    request: RequestId
    publication: Publication | None = None
    """The publication that may be offered now."""
    readers: Mapping[str, Route] = field(default_factory=dict)
    """Readers to answer: with `Ready` or, after a failure, with `Refused`."""
    end: LeaseEnded | None = None
    """The end of the lease, to be reported now."""
    failure: str = ""
    """Why the copy failed; empty after a success."""
    is_open: bool = False
    """After a failure: whether the engine still computes the request."""
    match_id: str = ""
    """After a failure: the match id of a published request."""


@dataclass(slots=True)
class _LeaseCopy:
    """The copies of one lease, until all its blocks are copied."""

    request: RequestId
    is_streamed: bool
    """Whether the lease was opened while the prefill computed, and is copied by segments."""
    is_open: bool
    """Whether the engine still computes the request, so that more blocks will follow."""
    copies: dict[int, BlockIds] = field(default_factory=dict)
    """Running and queued copies, by copy number."""
    publications: deque[tuple[int, Publication]] = field(default_factory=deque)
    """Publications in order, each with the number of the last copy to wait for."""
    waiting: dict[str, Route] = field(default_factory=dict)
    """Readers that wait for `Ready`, which is sent when all blocks are copied."""
    match_id: str = ""
    failure: str = ""
    """Why a copy of the lease failed; empty if none did."""
    end: LeaseEnded | None = None
    """The end of the lease, if the lease has ended while copies were running."""


class HostBufferCopies:
    """Copies of leased blocks to the host buffer, and the readers and offers behind the copies."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._lease_copies: dict[RequestId, _LeaseCopy] = {}
        self._owners: dict[int, _LeaseCopy] = {}
        """The lease of each copy. A copy that runs for a withdrawn lease has no entry."""
        self._queue = HostCopyQueue()
        self._last_copy = 0

    @property
    def num_unreported(self) -> int:
        """Number of leases that have ended while copies of their blocks still run."""
        return sum(lease_copy.end is not None for lease_copy in self._lease_copies.values())

    def is_copying(self, blocks: Collection[int]) -> bool:
        """Return whether a copy of one of these blocks is running or queued."""
        return self._queue.has_any(blocks)

    # -- calls from the engine --

    def grant(self, request: RequestId, blocks: BlockIds) -> None:
        self._lease_copies[request] = lease_copy = _LeaseCopy(
            request, is_streamed=False, is_open=False
        )
        self._enqueue(lease_copy, blocks)

    def open(self, request: RequestId) -> None:
        self._lease_copies[request] = _LeaseCopy(request, is_streamed=True, is_open=True)

    def close(self, request: RequestId, blocks: BlockIds) -> None:
        """Enqueue the copy of the last blocks of an open lease."""
        lease_copy = self._lease_copies.get(request)
        if lease_copy is not None:
            lease_copy.is_open = False
            self._enqueue(lease_copy, blocks)

    def publish(
        self, request: RequestId, publication: Publication, blocks: BlockIds
    ) -> Publication | None:
        """Copy the new blocks of an open lease, and publish when all copies so far have ended.

        Returns the publication if the caller may offer the tokens now, otherwise None.
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
        """Forget a lease whose blocks the engine has reused; running copies count for no reader."""
        lease_copy = self._lease_copies.pop(request, None)
        if lease_copy is not None:
            self._drop_waiting(lease_copy)
            for copy in lease_copy.copies:
                del self._owners[copy]

    def end(self, ended: LeaseEnded) -> bool:
        """Handle the end of a lease; returns whether the end may be reported now.

        If not, `copied` returns the end when the last running copy has ended.
        """
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
        """Return why a copy of a lease failed; empty if none did."""
        lease_copy = self._lease_copies.get(request)
        return "" if lease_copy is None else lease_copy.failure

    # -- readers --

    def attach(self, request: RequestId, reader: str, route: Route, *, is_offered: bool) -> bool:
        """Return whether a reader may read now; if not, the reader gets `Ready` later."""
        lease_copy = self._lease_copies.get(request)
        if lease_copy is None or (lease_copy.is_streamed and is_offered):
            return True
        lease_copy.waiting[reader] = route
        return False

    def offer(self, request: RequestId, reader: str) -> bool:
        """Note that a reader gets an offer; returns whether the reader was waiting for `Ready`."""
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
        """Handle the end of a copy, which no longer reads the engine's blocks.

        Returns None if the caller has nothing to do.
        """
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

    def _progress(self, lease_copy: _LeaseCopy) -> CopyResult:
        publication, readers = None, {}
        # Copies may end out of order: only copies below the oldest unfinished copy count, so that
        # a publication is complete up to its last token.
        oldest = min(lease_copy.copies, default=self._last_copy + 1)
        while lease_copy.publications and lease_copy.publications[0][0] < oldest:
            _, publication = lease_copy.publications.popleft()
        if not lease_copy.copies and not lease_copy.is_open:
            readers = lease_copy.waiting
            del self._lease_copies[lease_copy.request]
        return CopyResult(lease_copy.request, publication, readers)

    def _enqueue(self, lease_copy: _LeaseCopy, blocks: BlockIds) -> None:
        self._last_copy += 1
        lease_copy.copies[self._last_copy] = blocks
        self._owners[self._last_copy] = lease_copy
        if self._queue.join(
            self._last_copy, {block for group in blocks for block in group if block != NO_BLOCK}
        ):
            self._begin([self._last_copy])

    def _begin(self, copies: list[int]) -> None:
        for copy in copies:
            lease_copy = self._owners[copy]
            self._outbox.perform(
                CopyToHostBuffer(lease_copy.request, lease_copy.copies[copy], copy)
            )

    def _drop_waiting(self, lease_copy: _LeaseCopy) -> None:
        """Drop the queued copies, the waiting readers and the publications of a lease."""
        lease_copy.publications.clear()
        lease_copy.waiting = {}
        # Drop the latest copy first: otherwise leaving a queue could start another copy of the same
        # lease.
        for copy in [
            copy for copy in reversed(lease_copy.copies) if not self._queue.is_running(copy)
        ]:
            del lease_copy.copies[copy], self._owners[copy]
            self._begin(self._queue.leave(copy))
