"""One bounce-buffer transfer of ours: how far it has come, and how far it may go. What is done with it: `staging_transfers.py`, its only
user.

Bytes of its stream are counted, from 0 to `total_bytes`. A read is gathered there (`reached`), read (`landed`) and scattered here; a write
is gathered here, written (`landed`) and scattered there (`reached`).
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvferry.planes.staging_lane import SlotCopier
from kvferry.planes.staging_ring import Slot
from kvferry.planes.staging_stream import SegmentStream
from kvferry.planes.staging_wire import SegmentPart
from kvferry.ports.data import Handle, Segments
from kvferry.types import PeerId

__all__ = ["BounceState", "BounceTransfer", "RemoteBounceBuffer"]


@dataclass(frozen=True, slots=True)
class RemoteBounceBuffer:
    """A peer's ring: whose agent has it, and where it is in the peer."""

    agent: str
    address: int
    size_bytes: int


class BounceState(Enum):
    QUEUED = "waits for a window here"
    ASKED = "waits for a window there"
    MOVING = "moving"
    STOPPING = "what is under way is waited for"
    CLOSING = "its owner is waited for"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class BounceTransfer:
    handle: Handle
    peer: PeerId
    is_read: bool
    segments: Sequence[Segments]
    total_bytes: int
    stream: SegmentStream
    bounce_buffer: RemoteBounceBuffer
    began_s: float
    state: BounceState = BounceState.QUEUED
    slot_copier: SlotCopier | None = None
    remote_slot: Slot | None = None
    parts: Iterator[SegmentPart] = field(default_factory=lambda: iter(()))
    reached: int = 0
    posted: int = 0
    landed: int = 0
    in_flight: deque[tuple[int, Handle]] = field(default_factory=deque)
    """What is on the wire: where each ends, in order."""
    arrived: set[Handle] = field(default_factory=set)
    advanced: int = 0
    sent_at: float = 0.0
    echoed_clock_s: float = 0.0
    """Our clock in the last message that the peer has certainly had."""
    since: float = 0.0
    """When it came into its state."""
    error: str | None = None
    is_certain: bool = True
    """Nothing that was posted can still arrive there."""
    has_peer_ended: bool = False
    descriptors: int = 0
    post_s: float = 0.0

    @property
    def post_limit(self) -> int:
        assert self.slot_copier is not None
        assert self.remote_slot is not None
        if self.is_read:
            return min(self.reached, self.slot_copier.done + self.slot_copier.slot.size_bytes)
        return min(self.slot_copier.done, self.reached + self.remote_slot.size_bytes)

    @property
    def copy_limit(self) -> int:
        assert self.slot_copier is not None
        return self.landed if self.is_read else min(self.total_bytes, self.landed + self.slot_copier.slot.size_bytes)

    @property
    def must_notify(self) -> bool:
        """Whether its owner waits for what has landed: to scatter it, to gather more in its place, or to have its window back."""
        if self.landed <= self.advanced or not self.is_read or self.landed == self.total_bytes:
            return self.landed > self.advanced
        assert self.remote_slot is not None
        room = self.remote_slot.size_bytes
        return self.advanced + room < self.total_bytes and (4 * (self.landed - self.advanced) >= room or self.landed == self.reached)

    @property
    def is_complete(self) -> bool:
        return self.slot_copier is not None and (self.slot_copier.done if self.is_read else self.reached) == self.total_bytes

    @property
    def can_move(self) -> bool:
        if self.state is BounceState.MOVING:
            assert self.slot_copier is not None
            return (
                bool(self.in_flight)
                or not self.slot_copier.is_idle
                or self.posted < self.post_limit
                or self.slot_copier.started < self.copy_limit
            )
        return self.state is BounceState.STOPPING
