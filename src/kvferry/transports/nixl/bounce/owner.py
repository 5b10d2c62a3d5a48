"""The owner's side of bounce-buffer transfers: grants slots to peers, gathers and scatters.

Peers ask for a slot of our bounce buffer. A reader reads the bytes that we gather into
the slot. A writer writes into the slot, and we scatter the bytes. Owned by the transport's thread,
which passes in messages and the time, and sends the messages in `outgoing`.

No message is trusted: segments are checked against our own regions, and counts against our own
progress. A transfer with an impossible message is ended with a reason. A slot is granted to another
transfer only when the previous peer cannot use the slot any more:

- A reader sends TransferStopped. A slot of a silent reader is reclaimed `reclaim_s` after the
  reader's last message. The reader sends timestamps all the time, gets the timestamps back, and
  uses nothing that arrived later than half of `reclaim_s` after the last echoed timestamp.
- A writer sends TransferStopped, with `is_certain` if no posted byte can arrive any more. If bytes
  may still arrive, or the link to the writer has failed, the slot is reclaimed after `reclaim_s`.
  If the writer is merely silent, the slot is never reclaimed, because posted bytes may still be in
  flight.

See docs/decisions/037-bounce-buffers.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.errors import RemoteProtocolError, TransportError
from kvferry.transports.copy.segments import are_within
from kvferry.transports.nixl.bounce.messages import (
    MAX_SEGMENTS,
    MAX_WHY,
    BounceMessage,
    InitiatorProgress,
    OutgoingMessages,
    OwnerProgress,
    SegmentPart,
    SlotGranted,
    SlotRequest,
    ToOwner,
    TransferEnded,
    TransferStopped,
)
from kvferry.transports.nixl.bounce.slots import (
    BounceBuffer,
    Direction,
    SegmentStream,
    SlotCopier,
    SlotTable,
    fair_slot_bytes,
    must_report,
)
from kvferry.types import Region

RECLAIM_S = 60.0
"""How long a slot is kept for a peer that has become silent."""
SILENCE_TIMEOUT_S = 5.0
"""A live initiator sends a message every second; after this silence an initiator counts as dead."""
KEEPALIVE_S = 5.0
"""How long a peer may be silent before the owner sends a message, which shows whether the link
works.
"""
STALL_S = 2.0
"""After a pause this long between two ticks, all running writes are ended.

Bytes scattered now may come too late: the blocks may belong to another request.
"""
MAX_SERVED = 1024
MAX_QUEUED_SEGMENTS = 2 * MAX_SEGMENTS
"""Limit on the segments of all transfers together; each takes 8 bytes."""


@dataclass(slots=True, eq=False)
class _PeerTransfer:
    """One transfer that a peer has started, as seen by the owner."""

    sender: str
    ask: SlotRequest
    last_message_at: float
    clock_s: float
    stream: SegmentStream = field(default_factory=SegmentStream)
    num_parts: int = 0
    num_segments: int = 0
    slot_copier: SlotCopier | None = None
    """Holds the slot, once a slot is allocated."""
    advanced: int = 0
    """Bytes that the peer has read or written, as reported by the peer."""
    reported: int = 0
    """The progress that the peer was last sent."""
    is_granted: bool = False
    """True once SlotGranted has been sent."""
    must_notify: bool = False
    is_ended: bool = False
    """True if nothing more is copied. The slot is kept until the peer has stopped."""
    sent_at: float = 0.0
    lost_at: float | None = None
    """When the link to the peer failed; None after the next message of the peer."""
    reclaim_at: float | None = None
    """When the slot may be reused, set when the peer has stopped."""

    @property
    def key(self) -> tuple[str, int]:
        return self.sender, self.ask.transfer

    def has_unreported_progress(self, slot_copier: SlotCopier) -> bool:
        """Whether the peer waits for a report of the copied bytes."""
        if self.ask.is_read:
            return slot_copier.done > self.reported
        return must_report(
            slot_copier.done,
            self.reported,
            self.ask.total_bytes,
            slot_copier.slot.size_bytes,
            is_waiting=slot_copier.done == self.advanced,
        )

    def is_reclaimable(self, now: float, reclaim_s: float) -> bool:
        """Whether the peer certainly cannot use the slot any more."""
        if self.is_ended and not self.is_granted and not self.must_notify:
            return True
        if self.reclaim_at is not None:
            return now >= self.reclaim_at
        if self.ask.is_read or self.slot_copier is None:
            return now > self.last_message_at + reclaim_s
        return self.lost_at is not None and now > self.lost_at + reclaim_s


class SlotServer:
    """Grants slots of our bounce buffer to peers and copies for their transfers."""

    def __init__(
        self,
        bounce_buffer: BounceBuffer,
        table: SlotTable,
        regions: Sequence[Region],
        metadata: bytes,
        reclaim_s: float = RECLAIM_S,
    ) -> None:
        self._bounce_buffer = bounce_buffer
        self._metadata = metadata
        """Metadata of our agent that includes the bounce buffer."""
        self._table = table
        self._regions = tuple(regions)
        self._reclaim_s = reclaim_s
        self._served: dict[tuple[str, int], _PeerTransfer] = {}
        """Transfers without a slot are in the order of their requests."""
        self.outgoing = OutgoingMessages()
        self._ticked_at: float | None = None

    @property
    def is_serving(self) -> bool:
        return bool(self._served)

    @property
    def can_move(self) -> bool:
        """Whether the next tick certainly has work to do."""
        return any(
            slot_copier.has_work(served.advanced)
            for served, slot_copier in self._holders()
            if not served.is_ended
        )

    def senders(self) -> set[str]:
        """Return the agents that have a transfer here."""
        return {sender for sender, _ in self._served}

    def receive(self, sender: str, message: ToOwner, now: float) -> None:
        served = self._served.get((sender, message.transfer))
        if isinstance(message, SlotRequest):
            if served is None:
                self._admit(sender, message, now)
            return
        if served is None:
            # A completed read gets no further messages, so this transfer was given up or never
            # known.
            why = "the owner does not know this transfer, or no longer"
            self.outgoing.put(sender, TransferEnded(message.transfer, why))
            return
        served.last_message_at, served.lost_at = now, None
        if isinstance(message, TransferStopped):
            self._end(served, "stopped")
            is_certain = served.ask.is_read or message.is_certain
            served.reclaim_at = now if is_certain else now + self._reclaim_s
            return
        if served.is_ended:
            return
        try:
            if isinstance(message, SegmentPart):
                self._take_part(served, message)
            else:
                self._take_progress(served, message)
        except RemoteProtocolError as error:
            self._end(served, str(error))

    def lost(self, sender: str, now: float) -> None:
        """The link to a peer has failed; the peer may be dead."""
        for served in self._served.values():
            if served.sender == sender and served.lost_at is None:
                served.lost_at = now

    def advance(self, now: float) -> None:
        """Run one tick of bounded work: end stalled writes, reclaim and grant slots, copy."""
        if self._ticked_at is not None and now - self._ticked_at > STALL_S:
            for served, _ in self._holders():
                if not served.ask.is_read:
                    self._end(served, "the owner stalled, and may have freed the blocks since")
        self._ticked_at = now
        for served in list(self._served.values()):
            if served.is_reclaimable(now, self._reclaim_s):
                self._release(served)
        self._grant(now)
        budget, holders = self._bounce_buffer.tick_bytes, self._holders()
        for served, slot_copier in holders:
            budget -= self._move(served, slot_copier, now, may_start=budget > 0)
        if len(holders) > 1:  # the next tick starts with another transfer
            first = holders[0][0]
            if self._served.pop(first.key, None) is not None:
                self._served[first.key] = first

    def _holders(self) -> list[tuple[_PeerTransfer, SlotCopier]]:
        """Return the transfers that have a slot."""
        return [
            (each, each.slot_copier)
            for each in self._served.values()
            if each.slot_copier is not None
        ]

    def _admit(self, sender: str, ask: SlotRequest, now: float) -> None:
        if len(self._served) >= MAX_SERVED:
            why = "too many transfers are queued at the owner"
            self.outgoing.put(sender, TransferEnded(ask.transfer, why))
            return
        served = _PeerTransfer(sender, ask, now, ask.clock_s)
        self._served[served.key] = served

    def _take_part(self, served: _PeerTransfer, part: SegmentPart) -> None:
        num_segments = served.num_segments + part.num_segments
        if part.number != served.num_parts or num_segments > MAX_SEGMENTS:
            raise RemoteProtocolError(
                f"part {part.number} with {part.num_segments} segments is out of order, "
                "or has too many segments"
            )
        num_queued = sum(each.num_segments for each in self._served.values())
        if num_queued + part.num_segments > MAX_QUEUED_SEGMENTS:
            raise RemoteProtocolError("too many segments are queued at the owner")
        self._append(part, served.stream)
        served.num_parts, served.num_segments = served.num_parts + 1, num_segments
        if served.stream.total_bytes > served.ask.total_bytes:
            raise RemoteProtocolError(
                f"the segments have {served.stream.total_bytes} bytes, but the transfer "
                f"has {served.ask.total_bytes}"
            )

    def _append(self, part: SegmentPart, stream: SegmentStream) -> None:
        """Append a part's segments. RemoteProtocolError if one lies outside of our regions."""
        tables = [table.offsets() for table in part.tables]
        for group in part.groups:
            offsets, room = tables[group.table], -1
            if group.region < len(self._regions):
                room = self._regions[group.region].size_bytes - group.segment_bytes
            if room < 0 or not are_within(offsets, room):
                raise RemoteProtocolError(
                    f"segments of {group.segment_bytes} bytes leave region "
                    f"{group.region}, or the region does not exist"
                )
            stream.append(self._regions[group.region].address, group.segment_bytes, offsets)

    def _take_progress(self, served: _PeerTransfer, message: InitiatorProgress) -> None:
        slot_copier, reach = served.slot_copier, served.advanced
        if slot_copier is not None and served.ask.is_read:
            reach = max(reach, served.reported)
        elif slot_copier is not None:
            # A writer may have moved more bytes than segments are known here. No byte is copied
            # before the segments have arrived.
            room = slot_copier.done + slot_copier.slot.size_bytes
            reach = max(reach, min(room, served.ask.total_bytes))
        if message.upto > reach:
            raise RemoteProtocolError(f"progress up to byte {message.upto} is not possible yet")
        served.clock_s = message.clock_s
        if slot_copier is None:
            self._put(served, OwnerProgress(served.ask.transfer, 0, served.clock_s))
        served.must_notify |= message.upto <= served.advanced
        served.advanced = max(served.advanced, message.upto)

    def _end(self, served: _PeerTransfer, why: str) -> None:
        """Copy nothing more. TransferEnded means that no byte of the transfer is touched any more,
        so copies that have started must complete first.
        """
        if served.is_ended:
            return
        served.is_ended = True
        if served.slot_copier is None:
            del self._served[served.key]
        elif not served.slot_copier.is_idle:
            served.must_notify = True
            return
        self._put(served, TransferEnded(served.ask.transfer, why[:MAX_WHY]))

    def _grant(self, now: float) -> None:
        """Allocate slots for waiting transfers, in the order of their requests."""
        most, least = fair_slot_bytes(self._table.size_bytes)
        waiting = [each for each in self._served.values() if each.slot_copier is None]
        for served in waiting:
            ask = served.ask
            wanted = min(ask.slot_bytes, ask.total_bytes, most)
            slot = self._table.take(wanted, least, ask.granularity)
            if slot is None:
                break
            served.slot_copier = SlotCopier(
                self._bounce_buffer,
                served.stream,
                slot,
                Direction.GATHER if ask.is_read else Direction.SCATTER,
                ask.granularity if slot.size_bytes % ask.granularity == 0 else 1,
            )
        else:
            return
        # If silent peers hold all slots, the others go directly through NIXL instead of waiting.
        if all(now > each.last_message_at + SILENCE_TIMEOUT_S for each, _ in self._holders()):
            for served in waiting:
                if served.slot_copier is None:
                    self._end(served, "silent peers hold all slots of the owner")

    def _move(
        self, served: _PeerTransfer, slot_copier: SlotCopier, now: float, *, may_start: bool
    ) -> int:
        """Copy up to the limits and report progress; return how many bytes were started."""
        begun, transfer, total_bytes = 0, served.ask.transfer, served.ask.total_bytes
        try:
            may_start = may_start and not served.is_ended
            begun = slot_copier.advance(served.advanced, total_bytes, may_start=may_start)
        except TransportError as error:
            self._end(served, str(error))
        must_notify = (
            served.must_notify or now > max(served.last_message_at, served.sent_at) + KEEPALIVE_S
        )
        if served.is_ended:
            # TransferEnded is repeated while the slot is kept: a failure to send shows that the
            # peer's link has failed.
            if slot_copier.is_idle and must_notify:
                served.must_notify, served.sent_at = False, now
                self._put(served, TransferEnded(transfer, "stopped"))
            return begun
        # The grant is delayed until bytes are gathered: one notification then carries both.
        if not served.is_granted and (slot_copier.is_idle or slot_copier.done):
            served.is_granted = True
            address = self._bounce_buffer.address + slot_copier.slot.first
            metadata = self._metadata if served.ask.needs_metadata else b""
            size_bytes, clock_s = slot_copier.slot.size_bytes, served.clock_s
            self._put(served, SlotGranted(transfer, address, size_bytes, clock_s, metadata))
        if must_notify or served.has_unreported_progress(slot_copier):
            served.reported, served.must_notify, served.sent_at = slot_copier.done, False, now
            self._put(served, OwnerProgress(transfer, slot_copier.done, served.clock_s))
        if (served.advanced if served.ask.is_read else slot_copier.done) == total_bytes:
            self._release(served)
        return begun

    def _put(self, served: _PeerTransfer, message: BounceMessage) -> None:
        self.outgoing.put(served.sender, message)

    def _release(self, served: _PeerTransfer) -> None:
        """Free the slot and forget the transfer; with running copies, a later tick does it."""
        slot_copier = served.slot_copier
        if slot_copier is not None and not slot_copier.is_idle:
            served.is_ended = True
            return
        if slot_copier is not None:
            self._table.release(slot_copier.slot)
        del self._served[served.key]
