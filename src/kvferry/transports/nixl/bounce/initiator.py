"""Our own bounce-buffer transfers: the initiator's side of `messages.py`.

Each transfer waits for a slot of our bounce buffer, asks the peer for a slot of the peer's bounce
buffer, and then moves chunk by chunk:

    read     owner gathers ──▶ READ into our slot ──▶ we scatter
    write    we gather ──▶ WRITE into the owner's slot ──▶ owner scatters

Owned by the transport's thread, which passes in messages, the time and the completions of posted
chunks, and sends the messages in `outgoing` and `parts`.

A transfer takes a local slot before asking for a remote slot, and a part of each bounce buffer is
reserved for slots granted to peers. So two transports never deadlock. See
docs/decisions/037-bounce-buffers.md.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

from kvferry.errors import KVFerryError, TransportError
from kvferry.transports.base import Completion, Handle, Operation, Segments
from kvferry.transports.copy.segments import Descriptors
from kvferry.transports.nixl.agent import NixlLink
from kvferry.transports.nixl.bounce.messages import (
    InitiatorProgress,
    OutgoingMessages,
    SegmentPart,
    SlotGranted,
    SlotRequest,
    ToInitiator,
    TransferEnded,
    TransferStopped,
    cut_into_parts,
)
from kvferry.transports.nixl.bounce.owner import RECLAIM_S
from kvferry.transports.nixl.bounce.slots import (
    BounceBuffer,
    Direction,
    Slot,
    SlotCopier,
    SlotTable,
    common_granularity,
    fair_slot_bytes,
)
from kvferry.transports.nixl.bounce.transfer import BounceState, BounceTransfer
from kvferry.types import PeerId, Region

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

The peer keeps the metadata longer (`mailbox.IDLE_S`).
"""


class DescriptorMover(Protocol):
    """Moves chunks between two bounce buffers. Implemented by the plain NIXL transport."""

    def start(
        self, peer: PeerId, segments: Sequence[Segments], operation: Operation, handle: Handle
    ) -> Handle:
        """Start a whole transfer under a handle of the mover, without bounce buffers."""

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
        self.outgoing = OutgoingMessages()
        self._ended: list[Completion] = []
        self._reachable: set[str] = set()
        """Agents whose metadata with the bounce buffer we have loaded."""
        self._last_message_at: dict[str, float] = {}
        self._backoff_until: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._transfers) + len(self._ended)

    @property
    def can_move(self) -> bool:
        """Whether the next tick may have work to do."""
        return bool(self._ended or self.outgoing or self._writing) or any(
            each.can_move for each in self._transfers.values()
        )

    def start(
        self,
        handle: Handle,
        link: NixlLink,
        operation: Operation,
        segments: Sequence[Segments],
        regions: Sequence[Region],
    ) -> None:
        """Start a transfer. The caller has checked the segments against both sides' regions.

        There is at least one segment.
        """
        transfer = BounceTransfer(handle, link, operation, plan=segments)
        for part in segments:
            address = regions[part.local_region].address
            transfer.stream.append(address, part.segment_bytes, part.local_offsets)
        self._transfers[handle] = transfer
        self._queue.append(transfer)

    def can_request(self, agent: str, now: float) -> bool:
        """Whether this agent may be asked for a slot: False for a while after a missing answer."""
        return now >= self._backoff_until.get(agent, now)

    def peers(self) -> set[PeerId]:
        """Return the peers of all transfers."""
        return {transfer.link.peer for transfer in self._transfers.values()}

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
        for transfer in [each for each in self._transfers.values() if each.link.peer == peer]:
            # A live peer may still be scattering a write that was reported before: the write then
            # waits for the peer's TransferEnded, or until the peer must have stopped.
            transfer.has_peer_ended |= transfer.is_read or transfer.advanced == 0
            self._stop(transfer, why, now)
            if transfer.state in (BounceState.STOPPING, BounceState.CLOSING):
                self._finish_stopping(transfer, now)

    def receive(self, sender: str, message: ToInitiator, now: float) -> None:
        transfer = self._transfers.get(Handle(message.transfer))
        if transfer is None or transfer.link.agent != sender:
            # The owner must free a slot that we no longer wait for. If it moves bytes, our
            # TransferStopped was lost, and posted bytes may still arrive.
            if not isinstance(message, TransferEnded):
                is_certain = isinstance(message, SlotGranted)
                self.outgoing.put(sender, TransferStopped(message.transfer, is_certain))
            return
        peer = transfer.link.peer
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
        elif message.upto > (transfer.size_bytes if transfer.is_read else transfer.landed):
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
        transfer.segments += completion.segments
        transfer.post_s += completion.post_s
        transfer.arrived.add(completion.handle)
        if completion.error is not None:
            transfer.is_certain = transfer.is_certain and transfer.is_read
            self._stop(transfer, completion.error, now)
        elif transfer.is_read and self._is_silent(transfer, now):
            self._stop(transfer, f"peer {transfer.link.peer} has been silent for too long", now)
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
        budget = self._bounce_buffer.tick_bytes
        for transfer in list(self._transfers.values()):
            if transfer.state is BounceState.MOVING:
                budget -= self._move(transfer, now, may_start=budget > 0)
            if transfer.state in (BounceState.STOPPING, BounceState.CLOSING):
                self._finish_stopping(transfer, now)
            elif transfer.state in (BounceState.ASKED, BounceState.MOVING):
                self._keep_alive(transfer, now)
        if len(self._transfers) > 1:  # the next tick starts with another transfer
            first = next(iter(self._transfers))
            self._transfers[first] = self._transfers.pop(first)

    def parts(self) -> Iterator[tuple[str, SegmentPart]]:
        """Yield further segments for the owners, with the receiving agents. Long lists of segments
        are encoded only on demand.
        """
        for _ in range(PARTS_PER_TICK):
            while self._writing:
                transfer = self._writing[0]
                is_wanted = transfer.state in (BounceState.ASKED, BounceState.MOVING)
                if is_wanted and (part := next(transfer.parts, None)) is not None:
                    yield transfer.link.agent, part
                    break
                self._writing.popleft()

    def take_ended(self) -> list[Completion]:
        ended, self._ended = self._ended, []
        return ended

    # -- one transfer --

    def _admit(self, now: float) -> None:
        """Give slots of our bounce buffer to queued transfers, in the order of their start."""
        most, least = fair_slot_bytes(self._table.size_bytes)
        while self._queue:
            transfer = self._queue[0]
            granularity = common_granularity([part.segment_bytes for part in transfer.plan], least)
            slot = self._table.take(min(transfer.size_bytes, most), least, granularity)
            if slot is None:
                return
            self._queue.popleft()
            direction = Direction.SCATTER if transfer.is_read else Direction.GATHER
            transfer.slot_copier = SlotCopier(
                self._bounce_buffer, transfer.stream, slot, direction, granularity
            )
            transfer.parts = cut_into_parts(transfer.handle, transfer.plan)
            transfer.echoed_clock_s = transfer.sent_at = now
            transfer.enter(BounceState.ASKED, now)
            known_at = self._last_message_at.get(transfer.link.agent, -METADATA_TTL_S)
            ask = SlotRequest(
                transfer.handle,
                now,
                transfer.is_read,
                transfer.size_bytes,
                slot.size_bytes,
                granularity,
                b"" if now < known_at + METADATA_TTL_S else self._metadata,
                transfer.link.agent not in self._reachable,
            )
            # The owner starts with the first part while the others are encoded.
            self.outgoing.put(transfer.link.agent, ask, next(transfer.parts))
            self._writing.append(transfer)

    def _take_slot(self, transfer: BounceTransfer, granted: SlotGranted, now: float) -> None:
        """Use the granted slot.

        NIXL refuses to post to an address outside of the memory that the owner has registered.
        """
        slot_copier = transfer.slot_copier
        if transfer.state is not BounceState.ASKED or slot_copier is None:
            return
        if granted.metadata:
            try:
                self._mover.update_metadata(transfer.link.peer, granted.metadata)
            except TransportError as error:
                self._stop(transfer, str(error), now)
                return
            self._reachable.add(transfer.link.agent)
        if granted.size_bytes > slot_copier.slot.size_bytes:
            self._stop(
                transfer,
                f"peer {transfer.link.peer} granted {granted.size_bytes} bytes, but "
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
        transfer.enter(BounceState.MOVING, now)

    def _move(self, transfer: BounceTransfer, now: float, *, may_start: bool) -> int:
        """Copy and post up to the limits; return the number of bytes whose copy has started."""
        slot_copier, total, begun = transfer.slot_copier, transfer.size_bytes, 0
        assert slot_copier is not None
        try:
            begun = slot_copier.advance(transfer.landed, total, may_start=may_start)
            self._post(transfer, now)
        except TransportError as error:
            self._stop(transfer, str(error), now)
            return begun
        if (slot_copier.done if transfer.is_read else transfer.reached) == total:
            if transfer.landed > transfer.advanced:
                self._report_progress(transfer, now)
            self._end(transfer)
        return begun

    def _post(self, transfer: BounceTransfer, now: float) -> None:
        """Post the chunks that are ready. TransportError if the peer is no longer connected."""
        while not self._is_silent(transfer, now) and len(transfer.in_flight) < MAX_POSTED:
            end = transfer.next_end
            if end <= transfer.posted:
                return
            chunk = transfer.descriptors(end)
            handle = self._mover.move(transfer.link.peer, transfer.operation, chunk)
            transfer.in_flight.append((end, handle))
            transfer.posted = end
            self._by_posted_handle[handle] = transfer

    def _is_silent(self, transfer: BounceTransfer, now: float) -> bool:
        """Whether the owner may have given the slot to another transfer by now."""
        return now > transfer.echoed_clock_s + self._reclaim_s / 2

    def _keep_alive(self, transfer: BounceTransfer, now: float) -> None:
        """Stop the transfer if the owner is silent; otherwise send due progress messages."""
        if self._is_silent(transfer, now):
            self._stop(transfer, f"peer {transfer.link.peer} has been silent for too long", now)
        elif transfer.state is BounceState.ASKED and now > transfer.since + GRANT_TIMEOUT_S:
            self.outgoing.put(
                transfer.link.agent, TransferStopped(transfer.handle, is_certain=True)
            )
            if self._last_message_at.get(transfer.link.agent, -1.0) < transfer.since:
                self._backoff_until[transfer.link.agent] = now + BACKOFF_S
            self._fall_back(transfer)
        elif transfer.must_notify or now > transfer.sent_at + PING_S:
            self._report_progress(transfer, now)

    def _report_progress(self, transfer: BounceTransfer, now: float) -> None:
        transfer.advanced, transfer.sent_at = transfer.landed, now
        self.outgoing.put(
            transfer.link.agent, InitiatorProgress(transfer.handle, transfer.landed, now)
        )

    def _stop(self, transfer: BounceTransfer, why: str, now: float) -> None:
        """Stop a transfer. Only the first reason is kept."""
        if transfer.error is not None or transfer.state is BounceState.ENDED:
            return
        transfer.error = why
        if transfer.state is BounceState.QUEUED:
            self._end(transfer)
            return
        transfer.enter(BounceState.STOPPING, now)
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
            self.outgoing.put(
                transfer.link.agent, TransferStopped(transfer.handle, transfer.is_certain)
            )
            transfer.enter(BounceState.CLOSING, now)
        is_told = transfer.is_read or transfer.advanced == 0 or transfer.has_peer_ended
        # An owner that is silent for this long has stalled. A stalled owner ends all writes on
        # resuming (`owner.STALL_S`), and scatters nothing more.
        if is_told or now > transfer.since + self._reclaim_s / 2:
            self._end(transfer)

    def _cancel_in_flight(self, transfer: BounceTransfer) -> None:
        for _, handle in transfer.in_flight:
            self._mover.cancel(handle)

    def _fall_back(self, transfer: BounceTransfer) -> None:
        """Let the transfer go directly through NIXL, without bounce buffers."""
        try:
            self._mover.start(
                transfer.link.peer, transfer.plan, transfer.operation, transfer.handle
            )
        except KVFerryError as error:
            transfer.error = str(error)
            self._end(transfer)
        else:
            self._release(transfer)

    def _end(self, transfer: BounceTransfer) -> None:
        transfer.total_bytes = transfer.size_bytes if transfer.error is None else transfer.landed
        self._ended.append(transfer.completion())
        self._release(transfer)

    def _release(self, transfer: BounceTransfer) -> None:
        transfer.state = BounceState.ENDED
        if transfer.slot_copier is not None:
            self._table.release(transfer.slot_copier.slot)
        else:
            self._queue.remove(transfer)
        del self._transfers[transfer.handle]
