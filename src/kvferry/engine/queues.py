"""Where every sequence of a scheduler is: waiting, loading remote KV, ready, running, or finished with blocks still held.

Pure. Queues are ordered by arrival, so whatever happens to a sequence in between, who came first is served first.
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from kvferry.connectors.contract import RequestStatus
from kvferry.engine.sequence import Hold, Sequence

__all__ = ["SequenceQueues"]

_ARRIVAL = attrgetter("arrival")


@dataclass(slots=True)
class SequenceQueues:
    """Each known sequence is in exactly one place, except that an aborted one may be both `loading` and `held`."""

    known: dict[str, Sequence] = field(default_factory=dict)
    """Everything below, by request id."""
    waiting: list[Sequence] = field(default_factory=list)
    """Not admitted, or preempted: hold no blocks."""
    ready: list[Sequence] = field(default_factory=list)
    """Their remote KV is there; they hold blocks but do not compute yet."""
    running: list[Sequence] = field(default_factory=list)
    loading: dict[str, Sequence] = field(default_factory=dict)
    """A load writes into their blocks. Aborted ones stay until it has ended."""
    held: dict[str, Sequence] = field(default_factory=dict)
    """Finished, but a load or a peer still touches their blocks."""

    def wait(self, seq: Sequence, status: RequestStatus = RequestStatus.WAITING) -> None:
        seq.status = status
        insort(self.waiting, seq, key=_ARRIVAL)

    def make_ready(self, seq: Sequence) -> None:
        seq.status = RequestStatus.WAITING
        insort(self.ready, seq, key=_ARRIVAL)

    def run(self, seq: Sequence) -> None:
        seq.status = RequestStatus.RUNNING
        insort(self.running, seq, key=_ARRIVAL)

    def load(self, seq: Sequence) -> None:
        seq.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        seq.hold |= Hold.RECEIVING
        self.loading[seq.request_id] = seq

    def leave(self, seq: Sequence) -> None:
        """Take a sequence out of the queue it stands in."""
        for queue in (self.running, self.ready, self.waiting):
            if seq in queue:
                queue.remove(seq)
                return

    def youngest_holder(self) -> Sequence:
        """Who gives up blocks first: the last to arrive of those that run or are ready."""
        return max((*self.running[-1:], *self.ready[-1:]), key=_ARRIVAL)

    @property
    def num_holders(self) -> int:
        return len(self.running) + len(self.ready)

    @property
    def num_loading(self) -> int:
        """Requests, not yet aborted, that wait for remote KV."""
        return sum(not seq.status.is_finished for seq in self.loading.values())

    @property
    def has_blocks_in_transfer(self) -> bool:
        """Whether blocks will come back when a transfer ends."""
        return bool(self.loading or self.held)

    def held_blocks(self) -> Iterator[list[int]]:
        """The blocks of every sequence, for `BlockPool.check`."""
        return (table.held for seq in self.known.values() for table in seq.tables)
