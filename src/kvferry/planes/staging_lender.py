"""The owner's side of staged transfers: peers ask, get a window of our ring, and read what we gather there, or have us scatter what they
wrote. Owned by the thread of its plane, which brings messages and the time, and sends what `take_mail` gives.

Nothing a peer says is trusted: pieces are checked against our own regions, counts against what has happened. What cannot be is ended,
with the reason. A window is given to somebody else only when nobody can be using it any more:

- a reader says when it has stopped. One that is silent is waited for `reclaim_s` after its last message. It repeats its clock all the
  time, hears it back, and uses nothing that it read later than half of `reclaim_s` after what it has heard back;
- a writer says when it has stopped and nothing of it can arrive any more. One that cannot say that, or whose link has failed, is waited
  for `reclaim_s`; one that is merely silent for ever, since what it has sent may be on its way.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvferry.errors import RemoteProtocolError, TransportError
from kvferry.planes.offsets import are_within
from kvferry.planes.staging_lane import CopyLane, StagingRing
from kvferry.planes.staging_ring import Window, WindowTable, fair_window
from kvferry.planes.staging_stream import Segment, Stream
from kvferry.planes.staging_wire import MAX_PIECES, Advanced, Ask, Ended, Granted, Message, Part, Reached, Stopped
from kvferry.types import Region

__all__ = ["RECLAIM_S", "ToOwner", "WindowLender"]

RECLAIM_S = 60.0
"""How long a window is kept for a peer that has become silent."""
SILENT_S = 5.0
"""A peer that lives says something each second."""
WORD_S = 5.0
"""A writer that has been silent for so long is spoken to: that shows whether it lives."""
STALL_S = 2.0
"""Not called for so long, we write nothing any more that was on its way here: the blocks may be somebody else's by now."""
MAX_SERVED = 1024
MAX_QUEUED_PIECES = 2 * MAX_PIECES
"""Of all transfers together: 8 bytes each."""

ToOwner = Ask | Part | Advanced | Stopped


@dataclass(slots=True, eq=False)
class _Served:
    """One transfer of a peer."""

    sender: str
    ask: Ask
    heard_at: float
    clock_s: float
    stream: Stream = field(default_factory=Stream)
    num_parts: int = 0
    num_pieces: int = 0
    lane: CopyLane | None = None
    """With the window, once it is granted."""
    advanced: int = 0
    told: int = 0
    is_granted: bool = False
    """Its peer has been told of its window."""
    owes_word: bool = False
    is_ended: bool = False
    """Nothing more is copied. Its window is kept until its peer has stopped."""
    spoken_at: float = 0.0
    lost_at: float | None = None
    """The link to its peer has failed, and nothing has been heard of it since."""
    free_at: float | None = None
    """Its peer has stopped, and nothing of it arrives after that."""

    @property
    def key(self) -> tuple[str, int]:
        return self.sender, self.ask.transfer

    @property
    def is_complete(self) -> bool:
        if self.lane is None:
            return False
        return (self.advanced if self.ask.is_read else self.lane.done) == self.ask.total_bytes

    @property
    def copy_limit(self) -> int:
        assert self.lane is not None
        room = self.advanced + self.lane.window.size_bytes if self.ask.is_read else self.advanced
        return min(self.stream.total_bytes, room)

    @property
    def has_news(self) -> bool:
        """Whether its peer waits for what has been copied: to read it, to write more in its place, or to be through."""
        assert self.lane is not None
        done, room = self.lane.done, self.lane.window.size_bytes
        if done <= self.told or self.ask.is_read or done == self.ask.total_bytes:
            return done > self.told
        return self.told + room < self.ask.total_bytes and (4 * (done - self.told) >= room or done == self.advanced)

    def is_forsaken(self, now: float, reclaim_s: float) -> bool:
        """Nobody can be using its window any more."""
        if self.is_ended and not self.is_granted and not self.owes_word:
            return True
        if self.free_at is not None:
            return now >= self.free_at
        if self.ask.is_read or self.lane is None:
            return now > self.heard_at + reclaim_s
        return self.lost_at is not None and now > self.lost_at + reclaim_s


class WindowLender:
    def __init__(self, ring: StagingRing, table: WindowTable, regions: Sequence[Region], reclaim_s: float = RECLAIM_S) -> None:
        self._ring = ring
        self._table = table
        self._regions = tuple(regions)
        self._reclaim_s = reclaim_s
        self._served: dict[tuple[str, int], _Served] = {}
        self._queue: deque[_Served] = deque()
        self._moving: deque[_Served] = deque()
        self._outgoing: list[tuple[str, Message]] = []
        self._turned_at: float | None = None

    @property
    def is_serving(self) -> bool:
        return bool(self._served)

    @property
    def has_mail(self) -> bool:
        return bool(self._outgoing)

    @property
    def can_move(self) -> bool:
        """Whether the next turn has something to do for certain."""
        return any(
            served.lane is not None and (not served.lane.is_idle or served.lane.started < served.copy_limit)
            for served in self._moving
            if not served.is_ended
        )

    def senders(self) -> set[str]:
        """Those we have something of."""
        return {sender for sender, _ in self._served}

    def receive(self, sender: str, message: ToOwner, now: float) -> None:
        served = self._served.get((sender, message.transfer))
        if isinstance(message, Ask):
            if served is None:
                self._admit(sender, message, now)
            return
        if served is None:
            # A read that we have seen to its end is not heard of again; this one we have given up, or never knew.
            self._outgoing.append((sender, Ended(message.transfer, "it is not known here (any more)")))
            return
        served.heard_at, served.lost_at = now, None
        try:
            if isinstance(message, Part):
                self._take_part(served, message)
            elif isinstance(message, Advanced):
                self._take_advance(served, message)
            else:
                self._take_stop(served, message, now)
        except RemoteProtocolError as error:
            self._end(served, str(error))

    def lost(self, sender: str, now: float) -> None:
        """The link to a peer has failed: it may be dead."""
        for served in self._served.values():
            if served.sender == sender and served.lost_at is None:
                served.lost_at = now

    def advance(self, now: float) -> None:
        """One turn of bounded work."""
        if self._turned_at is not None and now - self._turned_at > STALL_S:
            for served in self._moving:
                if not served.ask.is_read:
                    self._end(served, "its owner stood still, and may have given the blocks away")
        self._turned_at = now
        for served in [each for each in self._served.values() if each.is_forsaken(now, self._reclaim_s)]:
            self._let_go(served)
        self._grant(now)
        budget = self._ring.pace.turn_bytes
        self._moving.rotate(-1)
        for served in list(self._moving):
            budget -= self._move(served, now, may_begin=budget > 0)

    def take_mail(self) -> Iterator[tuple[str, tuple[Message, ...]]]:
        """What is to be sent as one notification each, and to which agent."""
        outgoing, self._outgoing = self._outgoing, []
        letters: dict[str, list[Message]] = {}
        for sender, message in outgoing:
            letters.setdefault(sender, []).append(message)
        for sender, messages in letters.items():
            yield sender, tuple(messages)

    def _admit(self, sender: str, ask: Ask, now: float) -> None:
        if len(self._served) >= MAX_SERVED:
            self._outgoing.append((sender, Ended(ask.transfer, "too many transfers wait here")))
            return
        served = _Served(sender, ask, now, ask.clock_s)
        self._served[served.key] = served
        self._queue.append(served)

    def _take_part(self, served: _Served, part: Part) -> None:
        if served.is_ended:
            return
        num_pieces = served.num_pieces + part.num_pieces
        if part.number != served.num_parts or num_pieces > MAX_PIECES:
            raise RemoteProtocolError(f"part {part.number} with {part.num_pieces} pieces is not the next of this transfer, or too many")
        if sum(each.num_pieces for each in self._served.values()) + part.num_pieces > MAX_QUEUED_PIECES:
            raise RemoteProtocolError("too many pieces wait here")
        for segment in self._segments(part):
            served.stream.append(segment)
        served.num_parts, served.num_pieces = served.num_parts + 1, num_pieces
        if served.stream.total_bytes > served.ask.total_bytes:
            raise RemoteProtocolError(f"pieces of {served.stream.total_bytes} bytes were named for a transfer of {served.ask.total_bytes}")

    def _segments(self, part: Part) -> Iterator[Segment]:
        """RemoteProtocolError when a piece is not in the region that it is said to be in."""
        tables = [table.offsets() for table in part.tables]
        for group in part.groups:
            offsets = tables[group.table]
            room = self._regions[group.region].size_bytes - group.piece_bytes if group.region < len(self._regions) else -1
            if room < 0 or not are_within(offsets, room):
                raise RemoteProtocolError(f"pieces of {group.piece_bytes} bytes leave region {group.region}, or there is none")
            yield Segment(self._regions[group.region].address, group.piece_bytes, offsets)

    def _take_advance(self, served: _Served, message: Advanced) -> None:
        if served.is_ended:
            return
        lane, read = served.lane, served.ask.is_read
        # What a writer has moved may be ahead of the pieces it belongs to; nothing is copied before those are known.
        reach = 0 if lane is None else served.told if read else min(lane.done + lane.window.size_bytes, served.ask.total_bytes)
        if message.upto > max(reach, served.advanced):
            raise RemoteProtocolError(f"byte {message.upto} cannot have been moved yet")
        served.clock_s = message.clock_s
        if lane is None:
            self._outgoing.append((served.sender, Reached(served.ask.transfer, 0, served.clock_s)))
        served.owes_word |= message.upto <= served.advanced
        served.advanced = max(served.advanced, message.upto)

    def _take_stop(self, served: _Served, message: Stopped, now: float) -> None:
        self._end(served, "stopped")
        served.free_at = now if served.ask.is_read or message.is_certain else now + self._reclaim_s

    def _end(self, served: _Served, why: str) -> None:
        if not served.is_ended:
            served.is_ended = True
            # What has begun to be copied is let end first: then nothing of it is touched any more.
            if served.lane is None:
                self._queue.remove(served)
                self._forget(served)
            if served.lane is None or served.lane.is_idle:
                self._outgoing.append((served.sender, Ended(served.ask.transfer, why[:400])))
            else:
                served.owes_word = True

    def _grant(self, now: float) -> None:
        """In the order in which they asked."""
        most, least = fair_window(self._table.size_bytes)
        while self._queue:
            served = self._queue[0]
            wanted = min(served.ask.window_bytes, served.ask.total_bytes, most)
            window = self._table.take(wanted, least, served.ask.grain)
            if window is None:
                self._turn_away(now)
                return
            self._queue.popleft()
            served.lane = CopyLane(self._ring, served.stream, window, served.ask.is_read, _usable_grain(window, served.ask.grain))
            self._moving.append(served)

    def _turn_away(self, now: float) -> None:
        """Those who wait for windows that nobody will give back soon are better served plainly."""
        if all(now > served.heard_at + SILENT_S for served in self._moving):
            for served in list(self._queue):
                self._end(served, "its ring is held by peers that are silent")

    def _move(self, served: _Served, now: float, *, may_begin: bool) -> int:
        """What it has begun to copy, in bytes."""
        lane, begun = served.lane, 0
        assert lane is not None
        try:
            lane.collect()
            if may_begin and not served.is_ended:
                begun = lane.advance(served.copy_limit, served.ask.total_bytes)
                lane.collect()
        except TransportError as error:
            self._end(served, str(error))
        if served.is_ended:
            # Said again as long as its window is kept: that shows whether its peer lives.
            if lane.is_idle and (served.owes_word or now > max(served.heard_at, served.spoken_at) + WORD_S):
                served.owes_word, served.spoken_at = False, now
                self._outgoing.append((served.sender, Ended(served.ask.transfer, "stopped")))
            return begun
        if not served.is_granted and (lane.is_idle or lane.done):  # not before there is something to read, if that is soon
            served.is_granted, window = True, lane.window
            self._outgoing.append((served.sender, Granted(served.ask.transfer, window.first, window.size_bytes, served.clock_s)))
        if served.has_news or served.owes_word or now > max(served.heard_at, served.spoken_at) + WORD_S:
            served.told, served.owes_word, served.spoken_at = lane.done, False, now
            self._outgoing.append((served.sender, Reached(served.ask.transfer, lane.done, served.clock_s)))
        if served.is_complete:
            self._let_go(served)
        return begun

    def _let_go(self, served: _Served) -> None:
        if served.lane is None:
            self._queue.remove(served)
        elif served.lane.is_idle:
            self._moving.remove(served)
            self._table.give_back(served.lane.window)
        else:
            served.is_ended = True
            return  # once what is being copied is done
        self._forget(served)

    def _forget(self, served: _Served) -> None:
        self._served.pop(served.key, None)


def _usable_grain(window: Window, grain: int) -> int:
    return grain if window.size_bytes % grain == 0 else 1
