"""One bounce-buffer transfer of ours: how far it has come, and how far it may go. What is done with
it: `staging_transfers.py`, its only user.

Bytes of its stream are counted, from 0 to `total_bytes`. A read is gathered there (`reached`), read
(`landed`) and scattered here; a write is gathered here, written (`landed`) and scattered there
(`reached`).
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Protocol

import numpy as np

from kvferry.errors import TransportError
from kvferry.transports.base import Completion, Handle, Segments
from kvferry.transports.copy.segments import Descriptors
from kvferry.transports.nixl.bounce.messages import (
    BounceMessage,
    InitiatorProgress,
    OwnerProgress,
    SegmentPart,
    SlotGranted,
    SlotRequest,
    TransferEnded,
    TransferStopped,
    cut_into_parts,
)
from kvferry.transports.nixl.bounce.owner import RECLAIM_S
from kvferry.transports.nixl.bounce.slots import (
    BounceBuffer,
    RegionSegments,
    SegmentStream,
    Slot,
    SlotCopier,
    SlotTable,
    chunk_end,
    common_granularity,
    fair_slot_bytes,
    max_chunk_bytes,
)
from kvferry.types import PeerId, Region

__all__ = [
    "BounceState",
    "BounceTransfer",
    "BounceTransfers",
    "DescriptorMover",
    "OutgoingMessages",
    "RemoteBounceBuffer",
    "ToInitiator",
]


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
        return (
            self.landed
            if self.is_read
            else min(self.total_bytes, self.landed + self.slot_copier.slot.size_bytes)
        )

    @property
    def must_notify(self) -> bool:
        """Whether its owner waits for what has landed: to scatter it, to gather more in its place,
        or to have its window back.
        """
        if self.landed <= self.advanced or not self.is_read or self.landed == self.total_bytes:
            return self.landed > self.advanced
        assert self.remote_slot is not None
        room = self.remote_slot.size_bytes
        return self.advanced + room < self.total_bytes and (
            4 * (self.landed - self.advanced) >= room or self.landed == self.reached
        )

    @property
    def is_complete(self) -> bool:
        return (
            self.slot_copier is not None
            and (self.slot_copier.done if self.is_read else self.reached) == self.total_bytes
        )

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


# -------------------- staging transfers -------------------- Our own bounce-buffer transfers: each
# waits for a slot of our bounce buffer, asks its peer for one there, and then moves chunk by chunk.
#
#     read     they gather ──▶ READ into our window ──▶ we scatter
#     write    we gather ──▶ WRITE into their window ──▶ they scatter
#
# Owned by the thread of its transport, which brings messages, the time and what has become of what
# was posted, and sends what there is to be sent. The window here is had before the one there is
# asked for, and a part of each ring is for windows that are lent alone: so two transports never
# wait for each other.


MAX_POSTED = 2
"""Stretches of one transfer on the wire at once."""
PING_S = 1.0
"""A transfer that has nothing to say says so, and is answered: both know that the other is
there.
"""
GRANT_TIMEOUT_S = 5.0
"""How long a transfer waits for a window of its peer. Then it goes without."""
STOP_TIMEOUT_S = 5.0
"""How long a stopped write waits for what is on the wire, before that is given up too."""
PARTS_PER_TICK = 8
BACKOFF_S = 60.0
"""A peer that did not answer at all is not asked again for so long."""
METADATA_TTL_S = 20.0
"""A peer that has answered so lately knows how to answer: it is not told again. It remembers for
longer.
"""

ToInitiator = SlotGranted | OwnerProgress | TransferEnded
OutgoingMessages = tuple[str, tuple[BounceMessage, ...]]
"""What is to be sent as one notification, and to which agent."""


class DescriptorMover(Protocol):
    """What moves stretches between two rings."""

    def move(self, peer: PeerId, operation: str, descriptors: Descriptors) -> Handle:
        """READ or WRITE, by addresses here and there."""

    def cancel(self, handle: Handle) -> None: ...


class BounceTransfers:
    def __init__(
        self,
        bounce_buffer: BounceBuffer,
        table: SlotTable,
        mover: DescriptorMover,
        metadata: bytes,
        reclaim_s: float = RECLAIM_S,
    ) -> None:
        self._bounce_buffer = bounce_buffer
        self._table = table
        self._mover = mover
        self._metadata = metadata
        self._reclaim_s = reclaim_s
        self._transfers: dict[Handle, BounceTransfer] = {}
        self._queue: deque[BounceTransfer] = deque()
        self._writing: deque[BounceTransfer] = deque()
        """Those whose segments have not all been told."""
        self._by_posted_handle: dict[Handle, BounceTransfer] = {}
        self._outgoing: list[tuple[str, BounceMessage]] = []
        self._ended: list[Completion] = []
        self._fallbacks: list[tuple[Handle, PeerId, Sequence[Segments], bool]] = []
        self._last_message_at: dict[str, float] = {}
        self._backoff_until: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._transfers) + len(self._ended) + len(self._fallbacks)

    @property
    def can_move(self) -> bool:
        """Whether the next turn may have something to do."""
        return bool(self._ended or self._fallbacks or self.has_outgoing) or any(
            each.can_move for each in self._transfers.values()
        )

    @property
    def has_outgoing(self) -> bool:
        return bool(self._outgoing or self._writing)

    def start(
        self,
        handle: Handle,
        peer: PeerId,
        bounce_buffer: RemoteBounceBuffer,
        segments: Sequence[Segments],
        regions: Sequence[Region],
        *,
        is_read: bool,
    ) -> None:
        """The segments have been checked against both sides' regions, and are not empty."""
        stream = SegmentStream()
        for part in segments:
            stream.append(
                RegionSegments(
                    regions[part.local_region].address, part.segment_bytes, part.local_offsets
                )
            )
        transfer = BounceTransfer(
            handle,
            peer,
            is_read,
            segments,
            stream.total_bytes,
            stream,
            bounce_buffer,
            time.perf_counter(),
        )
        self._transfers[handle] = transfer
        self._queue.append(transfer)

    def can_request(self, agent: str, now: float) -> bool:
        return now >= self._backoff_until.get(agent, now)

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
        for known in (self._last_message_at, self._backoff_until):
            known.clear()  # whoever is met again is told anew
        for transfer in self._of(peer):
            # A peer that lives may be putting into place what it was told of: a write waits for as
            # long as that may take.
            transfer.has_peer_ended |= transfer.is_read or transfer.advanced == 0
            self._stop(transfer, why, now)
            if transfer.state in (BounceState.STOPPING, BounceState.CLOSING):
                self._finish_stopping(transfer, now)

    def receive(self, sender: str, message: ToInitiator, now: float) -> None:
        transfer = self._transfers.get(Handle(message.transfer))
        if transfer is None or transfer.bounce_buffer.agent != sender:
            if isinstance(
                message, SlotGranted
            ):  # it went without, and a window would be kept for it
                self._outgoing.append((sender, TransferStopped(message.transfer, is_certain=True)))
            elif isinstance(
                message, OwnerProgress
            ):  # our last word about it was lost; what it had sent may be on its way
                self._outgoing.append((sender, TransferStopped(message.transfer, is_certain=False)))
            return
        peer = transfer.peer
        self._last_message_at[sender] = now
        if isinstance(message, TransferEnded):
            transfer.has_peer_ended = True
            if transfer.state is BounceState.ASKED:
                self._fall_back(transfer)
            else:
                self._stop(transfer, f"peer {peer} ended it: {message.why}", now)
            return
        if transfer.echoed_clock_s < message.echoed_clock_s <= now:
            transfer.echoed_clock_s = message.echoed_clock_s
        if isinstance(message, SlotGranted):
            self._take_slot(transfer, message, now)
        elif message.upto > (transfer.total_bytes if transfer.is_read else transfer.landed):
            self._stop(
                transfer,
                f"peer {peer} says that byte {message.upto} has been moved, which cannot be",
                now,
            )
        else:
            transfer.reached = max(transfer.reached, message.upto)

    def settle(self, completion: Completion, now: float) -> bool:
        """Take note of what has become of something posted. False when it is not of a bounce-buffer
        transfer.
        """
        transfer = self._by_posted_handle.pop(completion.handle, None)
        if transfer is None:
            return False
        transfer.descriptors += completion.segments
        transfer.post_s += completion.post_s
        transfer.arrived.add(completion.handle)
        if completion.error is not None:
            transfer.is_certain = transfer.is_certain and transfer.is_read
            self._stop(transfer, completion.error, now)
        elif transfer.is_read and now > transfer.echoed_clock_s + self._reclaim_s / 2:
            # What was read may be of somebody else by now.
            self._stop(transfer, f"peer {transfer.peer} has not been heard of for too long", now)
        while transfer.in_flight and transfer.in_flight[0][1] in transfer.arrived:
            end, posted_handle = transfer.in_flight.popleft()
            transfer.arrived.discard(posted_handle)
            if transfer.error is None:
                transfer.landed = end
        return True

    def advance(self, now: float) -> None:
        """One turn of bounded work: begin, post, copy, and see what is over."""
        self._admit(now)
        budget = self._bounce_buffer.limits.tick_bytes
        for transfer in list(self._transfers.values()):
            if transfer.state is BounceState.MOVING:
                budget -= self._move(transfer, now, may_begin=budget > 0)
            if transfer.state in (BounceState.STOPPING, BounceState.CLOSING):
                self._finish_stopping(transfer, now)
            elif transfer.state in (BounceState.ASKED, BounceState.MOVING):
                self._keep_alive(transfer, now)
        if len(self._transfers) > 1:  # the next turn begins with another
            first = next(iter(self._transfers))
            self._transfers[first] = self._transfers.pop(first)

    def take_outgoing(self) -> Iterator[OutgoingMessages]:
        """What is to be sent, in order. Long lists of segments are written as they are taken, the
        first with what asks for the transfer.
        """
        outgoing, self._outgoing = self._outgoing, []
        by_agent: dict[str, list[BounceMessage]] = {}
        for agent, message in outgoing:
            by_agent.setdefault(agent, []).append(message)
        parts = islice(self._next_parts(), PARTS_PER_TICK)
        for agent, part in islice(parts, 1):
            by_agent.setdefault(agent, []).append(part)
        for agent, messages in by_agent.items():
            yield agent, tuple(messages)
        for agent, part in parts:
            yield agent, (part,)

    def take_ended(self) -> list[Completion]:
        ended, self._ended = self._ended, []
        return ended

    def take_fallbacks(self) -> list[tuple[Handle, PeerId, Sequence[Segments], bool]]:
        """Those that are to go without a ring: handle, peer, segments, whether it is a read. They
        are ours no more.
        """
        fallbacks, self._fallbacks = self._fallbacks, []
        return fallbacks

    # -- one transfer --

    def _admit(self, now: float) -> None:
        """In the order in which they were started."""
        most, least = fair_slot_bytes(self._table.size_bytes)
        while self._queue:
            transfer = self._queue[0]
            granularity = common_granularity(
                [part.segment_bytes for part in transfer.segments], least
            )
            slot = self._table.take(min(transfer.total_bytes, most), least, granularity)
            if slot is None:
                return
            self._queue.popleft()
            transfer.slot_copier = SlotCopier(
                self._bounce_buffer, transfer.stream, slot, not transfer.is_read, granularity
            )
            transfer.parts = cut_into_parts(transfer.handle, transfer.segments)
            transfer.echoed_clock_s = transfer.sent_at = now
            self._become(transfer, BounceState.ASKED, now)
            metadata = (
                b""
                if now
                < self._last_message_at.get(transfer.bounce_buffer.agent, -METADATA_TTL_S)
                + METADATA_TTL_S
                else self._metadata
            )
            ask = SlotRequest(
                transfer.handle,
                now,
                transfer.is_read,
                transfer.total_bytes,
                slot.size_bytes,
                granularity,
                metadata,
            )
            self._outgoing.append((transfer.bounce_buffer.agent, ask))
            self._writing.append(transfer)

    def _next_parts(self) -> Iterator[tuple[str, SegmentPart]]:
        while self._writing:
            transfer = self._writing[0]
            part = (
                next(transfer.parts, None)
                if transfer.state in (BounceState.ASKED, BounceState.MOVING)
                else None
            )
            if part is None:
                self._writing.popleft()
            else:
                yield transfer.bounce_buffer.agent, part

    def _take_slot(self, transfer: BounceTransfer, granted: SlotGranted, now: float) -> None:
        slot_copier = transfer.slot_copier
        if transfer.state is not BounceState.ASKED or slot_copier is None:
            return
        slot = Slot(granted.first, granted.size_bytes)
        if (
            slot.end > transfer.bounce_buffer.size_bytes
            or slot.size_bytes > slot_copier.slot.size_bytes
        ):
            self._stop(transfer, f"peer {transfer.peer} lends {slot}, which cannot be", now)
            return
        transfer.remote_slot = slot
        if (
            slot.size_bytes % slot_copier.granularity
            or slot_copier.slot.size_bytes % slot_copier.granularity
        ):
            slot_copier.granularity = 1
        self._become(transfer, BounceState.MOVING, now)

    def _move(self, transfer: BounceTransfer, now: float, *, may_begin: bool) -> int:
        """What it has begun to copy, in bytes."""
        slot_copier, begun = transfer.slot_copier, 0
        assert slot_copier is not None
        try:
            slot_copier.collect()
            if may_begin:
                begun = slot_copier.advance(transfer.copy_limit, transfer.total_bytes)
                slot_copier.collect()
            self._post(transfer, now)
        except TransportError as error:
            self._stop(transfer, str(error), now)
            return begun
        if transfer.is_complete:
            if transfer.landed > transfer.advanced:
                self._report_progress(transfer, now)
            self._end(transfer)
        return begun

    def _post(self, transfer: BounceTransfer, now: float) -> None:
        """Hand what is ready to the wire. TransportError when the peer is not there any more."""
        slot_copier, there = transfer.slot_copier, transfer.remote_slot
        assert slot_copier is not None
        assert there is not None
        share = max(
            slot_copier.granularity,
            min(max_chunk_bytes(slot, transfer.total_bytes) for slot in (slot_copier.slot, there)),
        )
        while (
            now <= transfer.echoed_clock_s + self._reclaim_s / 2
            and len(transfer.in_flight) < MAX_POSTED
        ):
            # The last of it goes at once. Before that, one part is filled while the other is
            # emptied.
            most = transfer.total_bytes if transfer.post_limit == transfer.total_bytes else share
            end = chunk_end(
                transfer.posted,
                transfer.post_limit,
                most,
                slot_copier.granularity,
                transfer.total_bytes,
            )
            if end <= transfer.posted:
                return
            descriptors = _slot_descriptors(slot_copier.slot, there, transfer.posted, end).moved(
                self._bounce_buffer.address, transfer.bounce_buffer.address
            )
            handle = self._mover.move(
                transfer.peer, "READ" if transfer.is_read else "WRITE", descriptors
            )
            transfer.in_flight.append((end, handle))
            transfer.posted = end
            self._by_posted_handle[handle] = transfer

    def _keep_alive(self, transfer: BounceTransfer, now: float) -> None:
        if now > transfer.echoed_clock_s + self._reclaim_s / 2:
            self._stop(transfer, f"peer {transfer.peer} has not been heard of for too long", now)
        elif transfer.state is BounceState.ASKED and now > transfer.since + GRANT_TIMEOUT_S:
            self._outgoing.append(
                (transfer.bounce_buffer.agent, TransferStopped(transfer.handle, is_certain=True))
            )
            if self._last_message_at.get(transfer.bounce_buffer.agent, -1.0) < transfer.since:
                self._backoff_until[transfer.bounce_buffer.agent] = now + BACKOFF_S
            self._fall_back(transfer)
        elif transfer.must_notify or now > transfer.sent_at + PING_S:
            self._report_progress(transfer, now)

    def _report_progress(self, transfer: BounceTransfer, now: float) -> None:
        transfer.advanced, transfer.sent_at = transfer.landed, now
        self._outgoing.append(
            (transfer.bounce_buffer.agent, InitiatorProgress(transfer.handle, transfer.landed, now))
        )

    def _stop(self, transfer: BounceTransfer, why: str, now: float) -> None:
        """The first reason counts."""
        if transfer.error is not None or transfer.state is BounceState.ENDED:
            return
        transfer.error = why
        if transfer.state is BounceState.QUEUED:
            self._end(transfer)
            return
        self._become(transfer, BounceState.STOPPING, now)
        if transfer.is_read:
            self._cancel_in_flight(transfer)

    def _finish_stopping(self, transfer: BounceTransfer, now: float) -> None:
        """A stopped transfer has ended once nothing of ours is touched any more; a write waits for
        the peer to say the same.
        """
        assert transfer.slot_copier is not None
        if transfer.state is BounceState.STOPPING:
            if not transfer.is_read and now > transfer.since + STOP_TIMEOUT_S:
                self._cancel_in_flight(transfer)
            try:
                transfer.slot_copier.collect()
            except TransportError:  # the device has failed: nothing runs on it any more
                transfer.is_certain = False
            if transfer.in_flight or not transfer.slot_copier.is_idle:
                return
            self._outgoing.append(
                (
                    transfer.bounce_buffer.agent,
                    TransferStopped(transfer.handle, transfer.is_certain),
                )
            )
            self._become(transfer, BounceState.CLOSING, now)
        is_told = transfer.is_read or transfer.advanced == 0 or transfer.has_peer_ended
        # An owner that is silent for so long stalled, and writes nothing when it wakes up.
        if is_told or now > transfer.since + self._reclaim_s / 2:
            self._end(transfer)

    def _cancel_in_flight(self, transfer: BounceTransfer) -> None:
        for _, handle in transfer.in_flight:
            self._mover.cancel(handle)

    def _fall_back(self, transfer: BounceTransfer) -> None:
        self._fallbacks.append(
            (transfer.handle, transfer.peer, transfer.segments, transfer.is_read)
        )
        self._release(transfer)

    def _end(self, transfer: BounceTransfer) -> None:
        elapsed_s = time.perf_counter() - transfer.began_s
        done = transfer.total_bytes if transfer.error is None else transfer.landed
        self._ended.append(
            Completion(
                transfer.handle,
                transfer.error,
                done,
                transfer.descriptors,
                transfer.post_s,
                elapsed_s,
            )
        )
        self._release(transfer)

    def _release(self, transfer: BounceTransfer) -> None:
        transfer.state = BounceState.ENDED
        if transfer.slot_copier is not None:
            self._table.release(transfer.slot_copier.slot)
        else:
            self._queue.remove(transfer)
        del self._transfers[transfer.handle]

    def _of(self, peer: PeerId) -> list[BounceTransfer]:
        return [transfer for transfer in self._transfers.values() if transfer.peer == peer]

    @staticmethod
    def _become(transfer: BounceTransfer, state: BounceState, now: float) -> None:
        transfer.state, transfer.since = state, now


def _slot_descriptors(here: Slot, there: Slot, start: int, end: int) -> Descriptors:
    """The same bytes in both windows, cut where one of them ends."""
    places = []
    while start < end:
        (offset, size), (remote_offset, remote_size) = (
            next(here.places(start, end)),
            next(there.places(start, end)),
        )
        places.append((offset, remote_offset, min(size, remote_size)))
        start += places[-1][2]
    return Descriptors(*np.array(list(zip(*places, strict=True)), np.int64))
