"""One staged transfer of ours: how far it has come, and how far it may go. What is done with it: `staging_transfers.py`, its only user.

Bytes of its stream are counted, from 0 to `total_bytes`. A read is gathered there (`reached`), read (`landed`) and scattered here; a write
is gathered here, written (`landed`) and scattered there (`reached`).
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvferry.planes.staging_lane import CopyLane
from kvferry.planes.staging_ring import Window
from kvferry.planes.staging_stream import Stream
from kvferry.planes.staging_wire import Part
from kvferry.ports.data import Handle, Pieces
from kvferry.types import PeerId

__all__ = ["RingOf", "StagedTransfer", "State"]


@dataclass(frozen=True, slots=True)
class RingOf:
    """A peer's ring: whose agent has it, and where it is in the peer."""

    agent: str
    address: int
    size_bytes: int


class State(Enum):
    QUEUED = "waits for a window here"
    ASKED = "waits for a window there"
    MOVING = "moving"
    STOPPING = "what is under way is waited for"
    CLOSING = "its owner is waited for"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class StagedTransfer:
    handle: Handle
    peer: PeerId
    is_read: bool
    pieces: Sequence[Pieces]
    total_bytes: int
    stream: Stream
    ring: RingOf
    began_s: float
    state: State = State.QUEUED
    lane: CopyLane | None = None
    window_there: Window | None = None
    parts: Iterator[Part] = field(default_factory=lambda: iter(()))
    reached: int = 0
    posted: int = 0
    landed: int = 0
    wires: deque[tuple[int, Handle]] = field(default_factory=deque)
    """What is on the wire: where each ends, in order."""
    arrived: set[Handle] = field(default_factory=set)
    advanced: int = 0
    spoken_at: float = 0.0
    heard_s: float = 0.0
    """Our clock in the last message that the peer has certainly had."""
    since: float = 0.0
    """When it came into its state."""
    error: str | None = None
    is_certain: bool = True
    """Nothing that was posted can still arrive there."""
    is_ended_there: bool = False
    descriptors: int = 0
    post_s: float = 0.0

    @property
    def wire_limit(self) -> int:
        assert self.lane is not None
        assert self.window_there is not None
        if self.is_read:
            return min(self.reached, self.lane.done + self.lane.window.size_bytes)
        return min(self.lane.done, self.reached + self.window_there.size_bytes)

    @property
    def copy_limit(self) -> int:
        assert self.lane is not None
        return self.landed if self.is_read else min(self.total_bytes, self.landed + self.lane.window.size_bytes)

    @property
    def owes_word(self) -> bool:
        """Whether its owner waits for what has landed: to scatter it, to gather more in its place, or to have its window back."""
        if self.landed <= self.advanced or not self.is_read or self.landed == self.total_bytes:
            return self.landed > self.advanced
        assert self.window_there is not None
        room = self.window_there.size_bytes
        return self.advanced + room < self.total_bytes and (4 * (self.landed - self.advanced) >= room or self.landed == self.reached)

    @property
    def is_complete(self) -> bool:
        return self.lane is not None and (self.lane.done if self.is_read else self.reached) == self.total_bytes

    @property
    def can_move(self) -> bool:
        if self.state is State.MOVING:
            assert self.lane is not None
            return bool(self.wires) or not self.lane.is_idle or self.posted < self.wire_limit or self.lane.started < self.copy_limit
        return self.state is State.STOPPING
