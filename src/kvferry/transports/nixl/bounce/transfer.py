"""One of our own bounce-buffer transfers: its state, its progress and its limits. Pure.

Progress is counted in bytes of the transfer's stream, from 0 to `size_bytes`. A read is gathered
by the owner up to `reached`, has been read up to `landed`, and is then scattered here. A write is
gathered here, has been written up to `landed`, and has been scattered by the owner up to `reached`.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from kvferry.transports.base import Handle, Operation, Segments
from kvferry.transports.copy.segments import Descriptors
from kvferry.transports.linked import LinkedTransfer
from kvferry.transports.nixl.agent import NixlLink
from kvferry.transports.nixl.bounce.messages import SegmentPart
from kvferry.transports.nixl.bounce.slots import (
    SegmentStream,
    Slot,
    SlotCopier,
    chunk_end,
    max_chunk_bytes,
    must_report,
)


class BounceState(Enum):
    QUEUED = "waits for a slot of our bounce buffer"
    ASKED = "waits for a slot of the owner's bounce buffer"
    MOVING = "moving"
    STOPPING = "waits for posted chunks and running copies"
    CLOSING = "waits for the owner"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class BounceTransfer(LinkedTransfer[NixlLink]):
    """One of our bounce-buffer transfers, with progress and limits."""

    plan: Sequence[Segments] = field(kw_only=True)
    stream: SegmentStream = field(default_factory=SegmentStream)
    state: BounceState = BounceState.QUEUED
    slot_copier: SlotCopier | None = None
    remote_slot: Slot | None = None
    """The owner's slot, by its address in the owner's process."""
    parts: Iterator[SegmentPart] = field(default_factory=lambda: iter(()))
    reached: int = 0
    """Bytes gathered (read) or scattered (write) by the owner, as reported by the owner."""
    posted: int = 0
    """Bytes handed to NIXL."""
    landed: int = 0
    """Bytes that NIXL has moved."""
    in_flight: deque[tuple[int, Handle]] = field(default_factory=deque)
    """Chunks in flight: end position in the stream and handle of each, in order."""
    arrived: set[Handle] = field(default_factory=set)
    """Handles of completed chunks that wait for an earlier chunk."""
    advanced: int = 0
    """The `landed` that the owner was last sent."""
    sent_at: float = 0.0
    echoed_clock_s: float = 0.0
    """Our clock in the last of our messages that the peer has certainly received."""
    since: float = 0.0
    """When the transfer entered the current state (`enter`)."""
    is_certain: bool = True
    """False if bytes of a posted chunk may still arrive in the peer's slot."""
    has_peer_ended: bool = False

    @property
    def is_read(self) -> bool:
        return self.operation is Operation.READ

    @property
    def size_bytes(self) -> int:
        return self.stream.total_bytes

    @property
    def next_end(self) -> int:
        """Return the end of the chunk that can be posted now; `posted` if there is none."""
        ours, there, total = self.slot_copier, self.remote_slot, self.size_bytes
        assert ours is not None
        assert there is not None
        limit = (
            min(self.reached, ours.done + ours.slot.size_bytes)
            if self.is_read
            else min(ours.done, self.reached + there.size_bytes)
        )
        # The end of the stream is posted in one chunk. Before that, a chunk is at most half a slot,
        # so that gathering fills one half while NIXL empties the next.
        share = min(max_chunk_bytes(slot, total) for slot in (ours.slot, there))
        most = total if limit == total else max(ours.granularity, share)
        return chunk_end(self.posted, limit, most, ours.granularity, total)

    def descriptors(self, end: int) -> Descriptors:
        """Return descriptors of the chunk from `posted` to `end`, cut where either slot wraps."""
        ours, there, start, places = self.slot_copier, self.remote_slot, self.posted, []
        assert ours is not None
        assert there is not None
        while start < end:
            offset, size = next(ours.slot.places(start, end))
            remote_address, remote_size = next(there.places(start, end))
            address = ours.bounce_buffer.address + offset
            places.append((address, remote_address, min(size, remote_size)))
            start += places[-1][2]
        return Descriptors(*np.array(list(zip(*places, strict=True)), np.int64))

    @property
    def must_notify(self) -> bool:
        """Whether the owner waits for a report of `landed`."""
        if not self.is_read or self.remote_slot is None:
            return self.landed > self.advanced
        return must_report(
            self.landed,
            self.advanced,
            self.size_bytes,
            self.remote_slot.size_bytes,
            is_waiting=self.landed == self.reached,
        )

    @property
    def can_move(self) -> bool:
        if self.state is BounceState.MOVING:
            assert self.slot_copier is not None
            return (
                bool(self.in_flight)
                or self.slot_copier.has_work(self.landed)
                or self.posted < self.next_end
            )
        return self.state is BounceState.STOPPING

    def enter(self, state: BounceState, now: float) -> None:
        self.state, self.since = state, now
