"""Our own bounce-buffer transfers: the initiator's side of `messages.py`.

Each transfer waits for a slot of our bounce buffer, asks the peer for a slot of the peer's bounce
buffer, and then moves chunk by chunk:

    read     owner gathers ──▶ READ into our slot ──▶ we scatter
    write    we gather ──▶ WRITE into the owner's slot ──▶ owner scatters

Owned by the transport's thread, which passes in messages, the time and the completions of posted
chunks, and sends the messages of `take_outgoing`. Progress is counted in bytes of the transfer's
stream, from 0 to `total_bytes`. A read is gathered by the owner up to `reached`, has been read up
to `landed`, and is then scattered here. A write is gathered here, has been written up to `landed`,
and has been scattered by the owner up to `reached`.

A transfer takes a local slot before asking for a remote slot, and a part of each bounce buffer is
reserved for slots granted to peers. So two transports never deadlock. See
docs/decisions/037-bounce-buffers.md.
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
from kvferry.transports.base import Completion, Handle, Operation, Segments
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


class BounceState(Enum):
    QUEUED = "waits for a slot of our bounce buffer"
    ASKED = "waits for a slot of the owner's bounce buffer"
    MOVING = "moving"
    STOPPING = "waits for posted chunks and running copies"
    CLOSING = "waits for the owner"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class BounceTransfer:
    """One of our bounce-buffer transfers, with progress and limits."""

    handle: Handle
    peer: PeerId
    is_read: bool
    segments: Sequence[Segments]
    total_bytes: int
    stream: SegmentStream
    agent: str
    """Name of the peer's serving agent."""
    began_s: float
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
    """When the transfer entered the current state."""
    error: str | None = None
    is_certain: bool = True
    """False if bytes of a posted chunk may still arrive in the peer's slot."""
    has_peer_ended: bool = False
    descriptors: int = 0
    post_s: float = 0.0

    @property
    def post_limit(self) -> int:
        """Stream position up to which chunks may be posted now."""
        assert self.slot_copier is not None
        assert self.remote_slot is not None
        if self.is_read:
            return min(self.reached, self.slot_copier.done + self.slot_copier.slot.size_bytes)
        return min(self.slot_copier.done, self.reached + self.remote_slot.size_bytes)

    @property
    def copy_limit(self) -> int:
        """Stream position up to which bytes may be copied to or from our slot now."""
        assert self.slot_copier is not None
        return (
            self.landed
            if self.is_read
            else min(self.total_bytes, self.landed + self.slot_copier.slot.size_bytes)
        )

    @property
    def must_notify(self) -> bool:
        """Whether the owner waits for a report of `landed`.

        The owner needs the report to scatter the bytes, to gather more bytes into the same place,
        or to free the slot.
        """
        if self.landed <= self.advanced or not self.is_read or self.landed == self.total_bytes:
            return self.landed > self.advanced
        assert self.remote_slot is not None
        room = self.remote_slot.size_bytes
        # A read whose rest fits the slot reports only at the end. Otherwise the read reports a
        # quarter of the slot at a time, or when everything gathered so far has been read.
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


# -- all transfers of one transport --


MAX_POSTED = 2
"""Largest number of chunks of one transfer in flight."""
PING_S = 1.0
"""How often an idle transfer sends a progress message.

The owner answers, so that both sides know that the link is alive.
"""
GRANT_TIMEOUT_S = 5.0
"""How long a transfer waits for a slot of the peer before going directly through NIXL."""
STOP_TIMEOUT_S = 5.0
"""How long a stopped write waits for chunks in flight before cancelling the chunks."""
PARTS_PER_TICK = 8
BACKOFF_S = 60.0
"""How long a peer that did not answer at all is not asked again."""
METADATA_TTL_S = 20.0
"""How long after an answer a peer still knows our agent's metadata, so that the next request can
omit the metadata.

The peer keeps the metadata longer (`transport.IDLE_S`).
"""

ToInitiator = SlotGranted | OwnerProgress | TransferEnded
OutgoingMessages = tuple[str, tuple[BounceMessage, ...]]
"""Messages to send as one notification, with the name of the receiving agent."""


class DescriptorMover(Protocol):
    """Moves chunks between two bounce buffers. Implemented by the plain NIXL transport."""

    def update_metadata(self, peer: PeerId, metadata: bytes) -> None:
        """Load the metadata that makes the peer's bounce buffer reachable."""

    def move(self, peer: PeerId, operation: Operation, descriptors: Descriptors) -> Handle:
        """Start a READ or WRITE of descriptors with local and remote addresses."""

    def cancel(self, handle: Handle) -> None: ...


class BounceTransfers:
    """All bounce-buffer transfers that this transport has started."""

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
        """Transfers whose segments have not all been sent to the owner."""
        self._by_posted_handle: dict[Handle, BounceTransfer] = {}
        self._outgoing: list[tuple[str, BounceMessage]] = []
        self._ended: list[Completion] = []
        self._fallbacks: list[tuple[Handle, PeerId, Sequence[Segments], bool]] = []
        self._reachable: set[str] = set()
        """Agents whose metadata with the bounce buffer we have loaded."""
        self._last_message_at: dict[str, float] = {}
        self._backoff_until: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._transfers) + len(self._ended) + len(self._fallbacks)

    @property
    def can_move(self) -> bool:
        """Whether the next tick may have work to do."""
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
        agent: str,
        segments: Sequence[Segments],
        regions: Sequence[Region],
        *,
        is_read: bool,
    ) -> None:
        """Start a transfer. The caller has checked the segments against both sides' regions.

        `segments` is not empty.
        """
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
            agent,
            time.perf_counter(),
        )
        self._transfers[handle] = transfer
        self._queue.append(transfer)

    def can_request(self, agent: str, now: float) -> bool:
        """Whether this agent may be asked for a slot: False for a while after a missing answer."""
        return now >= self._backoff_until.get(agent, now)

    def peers(self) -> set[PeerId]:
        """Return the peers of all transfers."""
        return {transfer.peer for transfer in self._transfers.values()}

    def stop_all(self, why: str, now: float) -> None:
        for transfer in list(self._transfers.values()):
            self._stop(transfer, why, now)

    def cancel(self, handle: Handle, now: float) -> None:
        transfer = self._transfers.get(handle)
        if transfer is not None:
            self._stop(transfer, "cancelled", now)

    def fail_peer(self, peer: PeerId, why: str, now: float) -> None:
        """Stop all transfers with a peer whose connection has failed or is about to be dropped."""
        for known in (self._last_message_at, self._backoff_until, self._reachable):
            known.clear()  # the two agents exchange their metadata again after a new connection
        for transfer in self._of(peer):
            # A live peer may still be scattering a write that was reported before: the write then
            # waits for the peer's TransferEnded, or until the peer must have stopped.
            transfer.has_peer_ended |= transfer.is_read or transfer.advanced == 0
            self._stop(transfer, why, now)
            if transfer.state in (BounceState.STOPPING, BounceState.CLOSING):
                self._finish_stopping(transfer, now)

    def receive(self, sender: str, message: ToInitiator, now: float) -> None:
        transfer = self._transfers.get(Handle(message.transfer))
        if transfer is None or transfer.agent != sender:
            if isinstance(
                message, SlotGranted
            ):  # we no longer wait for this slot; the owner must free the slot
                self._outgoing.append((sender, TransferStopped(message.transfer, is_certain=True)))
            elif isinstance(
                message, OwnerProgress
            ):  # our TransferStopped was lost, and posted bytes may still arrive
                self._outgoing.append((sender, TransferStopped(message.transfer, is_certain=False)))
            return
        peer = transfer.peer
        self._last_message_at[sender] = now
        if isinstance(message, TransferEnded):
            transfer.has_peer_ended = True
            if transfer.state is BounceState.ASKED:
                self._fall_back(transfer)
            else:
                self._stop(transfer, f"peer {peer} ended the transfer: {message.why}", now)
            return
        if transfer.echoed_clock_s < message.echoed_clock_s <= now:
            transfer.echoed_clock_s = message.echoed_clock_s
        if isinstance(message, SlotGranted):
            self._take_slot(transfer, message, now)
        elif message.upto > (transfer.total_bytes if transfer.is_read else transfer.landed):
            self._stop(
                transfer,
                f"peer {peer} reports progress up to byte {message.upto}, which is impossible",
                now,
            )
        else:
            transfer.reached = max(transfer.reached, message.upto)

    def settle(self, completion: Completion, now: float) -> bool:
        """Process the completion of a chunk. False if the handle belongs to no transfer of ours."""
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
            # The owner may have given the slot to another transfer during our read.
            self._stop(transfer, f"peer {transfer.peer} has been silent for too long", now)
        # Chunks may complete in any order; `landed` advances over a gapless prefix only.
        while transfer.in_flight and transfer.in_flight[0][1] in transfer.arrived:
            end, posted_handle = transfer.in_flight.popleft()
            transfer.arrived.discard(posted_handle)
            if transfer.error is None:
                transfer.landed = end
        return True

    def advance(self, now: float) -> None:
        """Run one tick of bounded work: admit transfers, copy, post, finish stopped ones."""
        self._admit(now)
        budget = self._bounce_buffer.limits.tick_bytes
        for transfer in list(self._transfers.values()):
            if transfer.state is BounceState.MOVING:
                budget -= self._move(transfer, now, may_begin=budget > 0)
            if transfer.state in (BounceState.STOPPING, BounceState.CLOSING):
                self._finish_stopping(transfer, now)
            elif transfer.state in (BounceState.ASKED, BounceState.MOVING):
                self._keep_alive(transfer, now)
        if len(self._transfers) > 1:  # the next tick starts with another transfer
            first = next(iter(self._transfers))
            self._transfers[first] = self._transfers.pop(first)

    def take_outgoing(self) -> Iterator[OutgoingMessages]:
        """Yield the messages to send, in order.

        Long lists of segments are encoded only on demand. The first part travels with the request
        for the slot.
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
        """Take the transfers that must go directly: handle, peer, segments, whether it is a read.

        The caller owns the returned transfers from now on.
        """
        fallbacks, self._fallbacks = self._fallbacks, []
        return fallbacks

    # -- one transfer --

    def _admit(self, now: float) -> None:
        """Give slots of our bounce buffer to queued transfers, in the order of their start."""
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
                if now < self._last_message_at.get(transfer.agent, -METADATA_TTL_S) + METADATA_TTL_S
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
                transfer.agent not in self._reachable,
            )
            self._outgoing.append((transfer.agent, ask))
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
                yield transfer.agent, part

    def _take_slot(self, transfer: BounceTransfer, granted: SlotGranted, now: float) -> None:
        """Use the granted slot.

        NIXL refuses to post to an address outside of the memory that the owner has registered.
        """
        slot_copier = transfer.slot_copier
        if transfer.state is not BounceState.ASKED or slot_copier is None:
            return
        if granted.metadata:
            try:
                self._mover.update_metadata(transfer.peer, granted.metadata)
            except TransportError as error:
                self._stop(transfer, str(error), now)
                return
            self._reachable.add(transfer.agent)
        if granted.size_bytes > slot_copier.slot.size_bytes:
            self._stop(
                transfer,
                f"peer {transfer.peer} granted {granted.size_bytes} bytes, but "
                f"{slot_copier.slot.size_bytes} were asked for",
                now,
            )
            return
        transfer.remote_slot = Slot(granted.address, granted.size_bytes)
        if (
            granted.size_bytes % slot_copier.granularity
            or slot_copier.slot.size_bytes % slot_copier.granularity
        ):
            slot_copier.granularity = 1
        self._become(transfer, BounceState.MOVING, now)

    def _move(self, transfer: BounceTransfer, now: float, *, may_begin: bool) -> int:
        """Copy and post up to the limits; return the number of bytes whose copy has started."""
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
        """Post the chunks that are ready. TransportError if the peer is no longer connected."""
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
            # The end of the stream is posted in one chunk. Before that, a chunk is at most half a
            # slot, so that gathering fills one half while NIXL empties the next.
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
                self._bounce_buffer.address, 0
            )
            handle = self._mover.move(
                transfer.peer, Operation.READ if transfer.is_read else Operation.WRITE, descriptors
            )
            transfer.in_flight.append((end, handle))
            transfer.posted = end
            self._by_posted_handle[handle] = transfer

    def _keep_alive(self, transfer: BounceTransfer, now: float) -> None:
        """Stop the transfer if the owner is silent; otherwise send due progress messages."""
        if now > transfer.echoed_clock_s + self._reclaim_s / 2:
            self._stop(transfer, f"peer {transfer.peer} has been silent for too long", now)
        elif transfer.state is BounceState.ASKED and now > transfer.since + GRANT_TIMEOUT_S:
            self._outgoing.append(
                (transfer.agent, TransferStopped(transfer.handle, is_certain=True))
            )
            if self._last_message_at.get(transfer.agent, -1.0) < transfer.since:
                self._backoff_until[transfer.agent] = now + BACKOFF_S
            self._fall_back(transfer)
        elif transfer.must_notify or now > transfer.sent_at + PING_S:
            self._report_progress(transfer, now)

    def _report_progress(self, transfer: BounceTransfer, now: float) -> None:
        transfer.advanced, transfer.sent_at = transfer.landed, now
        self._outgoing.append(
            (transfer.agent, InitiatorProgress(transfer.handle, transfer.landed, now))
        )

    def _stop(self, transfer: BounceTransfer, why: str, now: float) -> None:
        """Stop a transfer. Only the first reason is kept."""
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
        """End a stopped transfer once no memory of the transfer is touched any more.

        Our own slot and blocks are idle when no chunk is in flight and no copy runs. A write also
        waits until the owner no longer scatters.
        """
        assert transfer.slot_copier is not None
        if transfer.state is BounceState.STOPPING:
            if not transfer.is_read and now > transfer.since + STOP_TIMEOUT_S:
                self._cancel_in_flight(transfer)
            try:
                transfer.slot_copier.collect()
            except TransportError:  # the device has failed, so no copy runs any more
                transfer.is_certain = False
            if transfer.in_flight or not transfer.slot_copier.is_idle:
                return
            self._outgoing.append(
                (
                    transfer.agent,
                    TransferStopped(transfer.handle, transfer.is_certain),
                )
            )
            self._become(transfer, BounceState.CLOSING, now)
        is_told = transfer.is_read or transfer.advanced == 0 or transfer.has_peer_ended
        # An owner that is silent for this long has stalled. A stalled owner ends all writes on
        # resuming (`owner.STALL_S`), and scatters nothing more.
        if is_told or now > transfer.since + self._reclaim_s / 2:
            self._end(transfer)

    def _cancel_in_flight(self, transfer: BounceTransfer) -> None:
        for _, handle in transfer.in_flight:
            self._mover.cancel(handle)

    def _fall_back(self, transfer: BounceTransfer) -> None:
        """Hand the transfer over to be moved directly through NIXL, without bounce buffers."""
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
    """Return descriptors of one range of the stream in both slots, cut where either slot wraps."""
    places = []
    while start < end:
        (offset, size), (remote_offset, remote_size) = (
            next(here.places(start, end)),
            next(there.places(start, end)),
        )
        places.append((offset, remote_offset, min(size, remote_size)))
        start += places[-1][2]
    return Descriptors(*np.array(list(zip(*places, strict=True)), np.int64))
