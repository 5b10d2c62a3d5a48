"""Our own staged transfers: each waits for a window of our ring, asks its peer for one there, and then moves chunk by chunk.

    read     they gather ──▶ READ into our window ──▶ we scatter
    write    we gather ──▶ WRITE into their window ──▶ they scatter

Owned by the thread of its plane, which brings messages, the time and what has become of what was posted, and sends what there is to be
sent. The window here is had before the one there is asked for, and a part of each ring is for windows that are lent alone: so two planes
never wait for each other.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Protocol

import numpy as np

from kvferry.errors import TransportError
from kvferry.planes.runs import Runs
from kvferry.planes.staged_transfer import RingOf, StagedTransfer, State
from kvferry.planes.staging_lane import CopyLane, StagingRing, share_of, stretch_end
from kvferry.planes.staging_lender import RECLAIM_S
from kvferry.planes.staging_ring import Window, WindowTable, fair_window
from kvferry.planes.staging_stream import Segment, Stream, common_grain
from kvferry.planes.staging_wire import Advanced, Ask, Ended, Granted, Message, Part, Reached, Stopped, cut_into_parts
from kvferry.ports.data import Completion, Handle, Pieces
from kvferry.types import PeerId, Region

__all__ = ["Mail", "RingOf", "StagedTransfers", "ToInitiator", "Wire"]

MAX_POSTED = 2
"""Stretches of one transfer on the wire at once."""
PING_S = 1.0
"""A transfer that has nothing to say says so, and is answered: both know that the other is there."""
GRANT_PATIENCE_S = 5.0
"""How long a transfer waits for a window of its peer. Then it goes without."""
STOP_PATIENCE_S = 5.0
"""How long a stopped write waits for what is on the wire, before that is given up too."""
PARTS_PER_TURN = 8
SHUN_S = 60.0
"""A peer that did not answer at all is not asked again for so long."""
KNOWN_S = 20.0
"""A peer that has answered so lately knows how to answer: it is not told again. It remembers for longer."""

ToInitiator = Granted | Reached | Ended
Mail = tuple[str, tuple[Message, ...]]
"""What is to be sent as one notification, and to which agent."""


class Wire(Protocol):
    """What moves stretches between two rings."""

    def move(self, peer: PeerId, operation: str, runs: Runs) -> Handle:
        """READ or WRITE, by addresses here and there."""

    def cancel(self, handle: Handle) -> None: ...


class StagedTransfers:
    def __init__(self, ring: StagingRing, table: WindowTable, wire: Wire, metadata: bytes, reclaim_s: float = RECLAIM_S) -> None:
        self._ring = ring
        self._table = table
        self._wire = wire
        self._metadata = metadata
        self._reclaim_s = reclaim_s
        self._transfers: dict[Handle, StagedTransfer] = {}
        self._queue: deque[StagedTransfer] = deque()
        self._writing: deque[StagedTransfer] = deque()
        """Those whose pieces have not all been told."""
        self._by_wire: dict[Handle, StagedTransfer] = {}
        self._outgoing: list[tuple[str, Message]] = []
        self._ended: list[Completion] = []
        self._unstaged: list[tuple[Handle, PeerId, Sequence[Pieces], bool]] = []
        self._heard_at: dict[str, float] = {}
        self._shunned_until: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._transfers) + len(self._ended) + len(self._unstaged)

    @property
    def can_move(self) -> bool:
        """Whether the next turn may have something to do."""
        return bool(self._ended or self._unstaged or self.has_mail) or any(each.can_move for each in self._transfers.values())

    @property
    def has_mail(self) -> bool:
        return bool(self._outgoing or self._writing)

    def start(
        self, handle: Handle, peer: PeerId, ring: RingOf, pieces: Sequence[Pieces], regions: Sequence[Region], *, is_read: bool
    ) -> None:
        """The pieces have been checked against both sides' regions, and are not empty."""
        stream = Stream()
        for part in pieces:
            stream.append(Segment(regions[part.local_region].address, part.piece_bytes, part.local_offsets))
        transfer = StagedTransfer(handle, peer, is_read, pieces, stream.total_bytes, stream, ring, time.perf_counter())
        self._transfers[handle] = transfer
        self._queue.append(transfer)

    def can_ask(self, agent: str, now: float) -> bool:
        return now >= self._shunned_until.get(agent, now)

    def peers(self) -> set[PeerId]:
        """Those that something is moved with."""
        return {transfer.peer for transfer in self._transfers.values()}

    def stop_all(self, why: str, now: float) -> None:
        for transfer in list(self._transfers.values()):
            self._stop(transfer, why, now)

    def cancel(self, handle: Handle, now: float) -> None:
        transfer = self._transfers.get(handle)
        if transfer is not None:
            self._stop(transfer, "cancelled", now)

    def fail_peer(self, peer: PeerId, why: str, now: float) -> None:
        """The peer cannot be spoken to any more, or in a moment."""
        for known in (self._heard_at, self._shunned_until):
            known.clear()  # whoever is met again is told anew
        for transfer in self._of(peer):
            # A peer that lives may be putting into place what it was told of: a write waits for as long as that may take.
            transfer.is_ended_there |= transfer.is_read or transfer.advanced == 0
            self._stop(transfer, why, now)
            if transfer.state in (State.STOPPING, State.CLOSING):
                self._wind_up(transfer, now)

    def receive(self, sender: str, message: ToInitiator, now: float) -> None:
        transfer = self._transfers.get(Handle(message.transfer))
        if transfer is None or transfer.ring.agent != sender:
            if isinstance(message, Granted):  # it went without, and a window would be kept for it
                self._outgoing.append((sender, Stopped(message.transfer, is_certain=True)))
            elif isinstance(message, Reached):  # our last word about it was lost; what it had sent may be on its way
                self._outgoing.append((sender, Stopped(message.transfer, is_certain=False)))
            return
        peer = transfer.peer
        self._heard_at[sender] = now
        if isinstance(message, Ended):
            transfer.is_ended_there = True
            if transfer.state is State.ASKED:
                self._go_without(transfer)
            else:
                self._stop(transfer, f"peer {peer} ended it: {message.why}", now)
            return
        if transfer.heard_s < message.heard_s <= now:
            transfer.heard_s = message.heard_s
        if isinstance(message, Granted):
            self._take_window(transfer, message, now)
        elif message.upto > (transfer.total_bytes if transfer.is_read else transfer.landed):
            self._stop(transfer, f"peer {peer} says that byte {message.upto} has been moved, which cannot be", now)
        else:
            transfer.reached = max(transfer.reached, message.upto)

    def settle(self, completion: Completion, now: float) -> bool:
        """Take note of what has become of something posted. False when it is not of a staged transfer."""
        transfer = self._by_wire.pop(completion.handle, None)
        if transfer is None:
            return False
        transfer.descriptors += completion.pieces
        transfer.post_s += completion.post_s
        transfer.arrived.add(completion.handle)
        if completion.error is not None:
            transfer.is_certain = transfer.is_certain and transfer.is_read
            self._stop(transfer, completion.error, now)
        elif transfer.is_read and now > transfer.heard_s + self._reclaim_s / 2:
            # What was read may be of somebody else by now.
            self._stop(transfer, f"peer {transfer.peer} has not been heard of for too long", now)
        while transfer.wires and transfer.wires[0][1] in transfer.arrived:
            end, wired = transfer.wires.popleft()
            transfer.arrived.discard(wired)
            if transfer.error is None:
                transfer.landed = end
        return True

    def advance(self, now: float) -> None:
        """One turn of bounded work: begin, post, copy, and see what is over."""
        self._admit(now)
        budget = self._ring.pace.turn_bytes
        for transfer in list(self._transfers.values()):
            if transfer.state is State.MOVING:
                budget -= self._move(transfer, now, may_begin=budget > 0)
            if transfer.state in (State.STOPPING, State.CLOSING):
                self._wind_up(transfer, now)
            elif transfer.state in (State.ASKED, State.MOVING):
                self._keep_up(transfer, now)
        if len(self._transfers) > 1:  # the next turn begins with another
            first = next(iter(self._transfers))
            self._transfers[first] = self._transfers.pop(first)

    def take_mail(self) -> Iterator[Mail]:
        """What is to be sent, in order. Long lists of pieces are written as they are taken, the first with what asks for the transfer."""
        outgoing, self._outgoing = self._outgoing, []
        letters: dict[str, list[Message]] = {}
        for agent, message in outgoing:
            letters.setdefault(agent, []).append(message)
        parts = islice(self._next_parts(), PARTS_PER_TURN)
        for agent, part in islice(parts, 1):
            letters.setdefault(agent, []).append(part)
        for agent, messages in letters.items():
            yield agent, tuple(messages)
        for agent, part in parts:
            yield agent, (part,)

    def take_ended(self) -> list[Completion]:
        ended, self._ended = self._ended, []
        return ended

    def take_unstaged(self) -> list[tuple[Handle, PeerId, Sequence[Pieces], bool]]:
        """Those that are to go without a ring: handle, peer, pieces, whether it is a read. They are ours no more."""
        unstaged, self._unstaged = self._unstaged, []
        return unstaged

    # -- one transfer ----------------------------------------------------------------------------------------------

    def _admit(self, now: float) -> None:
        """In the order in which they were started."""
        most, least = fair_window(self._table.size_bytes)
        while self._queue:
            transfer = self._queue[0]
            grain = common_grain([part.piece_bytes for part in transfer.pieces], least)
            window = self._table.take(min(transfer.total_bytes, most), least, grain)
            if window is None:
                return
            self._queue.popleft()
            transfer.lane = CopyLane(self._ring, transfer.stream, window, not transfer.is_read, grain)
            transfer.parts = cut_into_parts(transfer.handle, transfer.pieces)
            transfer.heard_s = transfer.spoken_at = now
            self._become(transfer, State.ASKED, now)
            metadata = b"" if now < self._heard_at.get(transfer.ring.agent, -KNOWN_S) + KNOWN_S else self._metadata
            ask = Ask(transfer.handle, now, transfer.is_read, transfer.total_bytes, window.size_bytes, grain, metadata)
            self._outgoing.append((transfer.ring.agent, ask))
            self._writing.append(transfer)

    def _next_parts(self) -> Iterator[tuple[str, Part]]:
        while self._writing:
            transfer = self._writing[0]
            part = next(transfer.parts, None) if transfer.state in (State.ASKED, State.MOVING) else None
            if part is None:
                self._writing.popleft()
            else:
                yield transfer.ring.agent, part

    def _take_window(self, transfer: StagedTransfer, granted: Granted, now: float) -> None:
        lane = transfer.lane
        if transfer.state is not State.ASKED or lane is None:
            return
        window = Window(granted.first, granted.size_bytes)
        if window.end > transfer.ring.size_bytes or window.size_bytes > lane.window.size_bytes:
            self._stop(transfer, f"peer {transfer.peer} lends {window}, which cannot be", now)
            return
        transfer.window_there = window
        if window.size_bytes % lane.grain or lane.window.size_bytes % lane.grain:
            lane.grain = 1
        self._become(transfer, State.MOVING, now)

    def _move(self, transfer: StagedTransfer, now: float, *, may_begin: bool) -> int:
        """What it has begun to copy, in bytes."""
        lane, begun = transfer.lane, 0
        assert lane is not None
        try:
            lane.collect()
            if may_begin:
                begun = lane.advance(transfer.copy_limit, transfer.total_bytes)
                lane.collect()
            self._post(transfer, now)
        except TransportError as error:
            self._stop(transfer, str(error), now)
            return begun
        if transfer.is_complete:
            if transfer.landed > transfer.advanced:
                self._say(transfer, now)
            self._end(transfer)
        return begun

    def _post(self, transfer: StagedTransfer, now: float) -> None:
        """Hand what is ready to the wire. TransportError when the peer is not there any more."""
        lane, there = transfer.lane, transfer.window_there
        assert lane is not None
        assert there is not None
        share = max(lane.grain, min(share_of(window, transfer.total_bytes) for window in (lane.window, there)))
        while now <= transfer.heard_s + self._reclaim_s / 2 and len(transfer.wires) < MAX_POSTED:
            # The last of it goes at once. Before that, one part is filled while the other is emptied.
            most = transfer.total_bytes if transfer.wire_limit == transfer.total_bytes else share
            end = stretch_end(transfer.posted, transfer.wire_limit, most, lane.grain, transfer.total_bytes)
            if end <= transfer.posted:
                return
            runs = _between(lane.window, there, transfer.posted, end).moved(self._ring.address, transfer.ring.address)
            handle = self._wire.move(transfer.peer, "READ" if transfer.is_read else "WRITE", runs)
            transfer.wires.append((end, handle))
            transfer.posted = end
            self._by_wire[handle] = transfer

    def _keep_up(self, transfer: StagedTransfer, now: float) -> None:
        if now > transfer.heard_s + self._reclaim_s / 2:
            self._stop(transfer, f"peer {transfer.peer} has not been heard of for too long", now)
        elif transfer.state is State.ASKED and now > transfer.since + GRANT_PATIENCE_S:
            self._outgoing.append((transfer.ring.agent, Stopped(transfer.handle, is_certain=True)))
            if self._heard_at.get(transfer.ring.agent, -1.0) < transfer.since:
                self._shunned_until[transfer.ring.agent] = now + SHUN_S
            self._go_without(transfer)
        elif transfer.owes_word or now > transfer.spoken_at + PING_S:
            self._say(transfer, now)

    def _say(self, transfer: StagedTransfer, now: float) -> None:
        transfer.advanced, transfer.spoken_at = transfer.landed, now
        self._outgoing.append((transfer.ring.agent, Advanced(transfer.handle, transfer.landed, now)))

    def _stop(self, transfer: StagedTransfer, why: str, now: float) -> None:
        """The first reason counts."""
        if transfer.error is not None or transfer.state is State.ENDED:
            return
        transfer.error = why
        if transfer.state is State.QUEUED:
            self._end(transfer)
            return
        self._become(transfer, State.STOPPING, now)
        if transfer.is_read:
            self._cancel_wires(transfer)

    def _wind_up(self, transfer: StagedTransfer, now: float) -> None:
        """A stopped transfer has ended once nothing of ours is touched any more; a write waits for the peer to say the same."""
        assert transfer.lane is not None
        if transfer.state is State.STOPPING:
            if not transfer.is_read and now > transfer.since + STOP_PATIENCE_S:
                self._cancel_wires(transfer)
            try:
                transfer.lane.collect()
            except TransportError:  # the device has failed: nothing runs on it any more
                transfer.is_certain = False
            if transfer.wires or not transfer.lane.is_idle:
                return
            self._outgoing.append((transfer.ring.agent, Stopped(transfer.handle, transfer.is_certain)))
            self._become(transfer, State.CLOSING, now)
        is_told = transfer.is_read or transfer.advanced == 0 or transfer.is_ended_there
        # An owner that is silent for so long stood still, and writes nothing when it wakes up.
        if is_told or now > transfer.since + self._reclaim_s / 2:
            self._end(transfer)

    def _cancel_wires(self, transfer: StagedTransfer) -> None:
        for _, handle in transfer.wires:
            self._wire.cancel(handle)

    def _go_without(self, transfer: StagedTransfer) -> None:
        self._unstaged.append((transfer.handle, transfer.peer, transfer.pieces, transfer.is_read))
        self._release(transfer)

    def _end(self, transfer: StagedTransfer) -> None:
        elapsed_s = time.perf_counter() - transfer.began_s
        done = transfer.total_bytes if transfer.error is None else transfer.landed
        self._ended.append(Completion(transfer.handle, transfer.error, done, transfer.descriptors, transfer.post_s, elapsed_s))
        self._release(transfer)

    def _release(self, transfer: StagedTransfer) -> None:
        transfer.state = State.ENDED
        if transfer.lane is not None:
            self._table.give_back(transfer.lane.window)
        else:
            self._queue.remove(transfer)
        del self._transfers[transfer.handle]

    def _of(self, peer: PeerId) -> list[StagedTransfer]:
        return [transfer for transfer in self._transfers.values() if transfer.peer == peer]

    @staticmethod
    def _become(transfer: StagedTransfer, state: State, now: float) -> None:
        transfer.state, transfer.since = state, now


def _between(here: Window, there: Window, start: int, end: int) -> Runs:
    """The same bytes in both windows, cut where one of them ends."""
    places = []
    while start < end:
        (offset, size), (offset_there, size_there) = next(here.places(start, end)), next(there.places(start, end))
        places.append((offset, offset_there, min(size, size_there)))
        start += places[-1][2]
    return Runs(*np.array(list(zip(*places, strict=True)), np.int64))
