"""Messages between the two sides of a bounce-buffer transfer, sent as NIXL notifications. Pure.

The *initiator* has started the transfer, by `read` or `write`, and posts all chunks to NIXL. The
*owner* grants the initiator a slot of the owner's bounce buffer:

    initiator                              owner
    SlotRequest, SegmentPart ...   ────▶   queued until a slot is free
                                   ◀────   SlotGranted           with the owner's new NIXL
                                           metadata, if the initiator has no key of the buffer
    read:                          ◀────   OwnerProgress n       gathered up to byte n
           READ, then              ────▶   InitiatorProgress n   read up to byte n:
                                           so much of the slot may be filled again
    write: WRITE, then             ────▶   InitiatorProgress n   written up to byte n
                                   ◀────   OwnerProgress n       scattered up to byte n
    TransferStopped                ────▶   gives the transfer up
                                   ◀────   TransferEnded         touches none of its bytes any
                                           more; also sent to refuse a request, and for a
                                           transfer that the owner does not know

`n` counts from the start of the transfer, so that one message covers all before it. SlotRequest and
InitiatorProgress carry a timestamp of the initiator's clock, and the owner echoes the last received
timestamp. So the initiator knows how long the slot is certainly kept, however long a message was
delayed.

A notification is a tag (HMAC-SHA256 over the receiver's agent and the payload, with a key of the
cluster) followed by an `Envelope`. Senders count their envelopes, and a receiver drops an envelope
whose count is not higher than all before. A sender without the key can send nothing that is
decoded.
"""

import hashlib
import hmac
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
import numpy as np

from kvferry.errors import RemoteProtocolError
from kvferry.transports.base import Segments
from kvferry.transports.copy.segments import Offsets

BOUNCE_VERSION = 2
"""Version of these messages, part of every offer and every envelope.

Peers of different versions move everything directly. History:

- 1: the offer carries the address of the bounce buffer.
- 2: bounce buffers are allocated on demand, so SlotGranted carries the address of the slot.
"""
MAX_ENVELOPE_BYTES = 256 * 1024
"""NIXL takes 75 µs for a notification of 64 KiB, and 2 ms for a notification of 1 MiB."""
MAX_METADATA_BYTES = 192 * 1024
FEW_MESSAGES = 256
FIRST_PART_OFFSETS, PART_OFFSETS = 8192, 24_576
"""Numbers of offsets in the first part and in each later part.

The owner starts with the first part while the later parts are encoded. Offsets of 8 bytes each
still fit into an envelope.
"""
PART_GROUPS = 1024
MAX_SEGMENTS = 1 << 22
"""Largest number of segments of one transfer."""
MAX_SENDERS = 1024
"""Number of senders whose last envelope count is remembered; beyond this the oldest is forgotten.
"""
TAG_BYTES = 32
HEADER_BYTES = 256
"""Upper bound, in bytes, on a notification without its messages."""
MAX_WHY = 400
"""Largest number of characters of the reason in TransferEnded."""
MAX_INTEGER = (1 << 62) - 1

_Natural = Annotated[int, msgspec.Meta(ge=0, le=MAX_INTEGER)]
_Count = Annotated[int, msgspec.Meta(gt=0, le=MAX_INTEGER)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
_Why = Annotated[str, msgspec.Meta(max_length=MAX_WHY)]


class SlotRequest(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """Initiator to owner: asks for a slot for one transfer."""

    transfer: _Natural
    clock_s: float
    is_read: bool
    total_bytes: _Count
    slot_bytes: _Count
    """Size of the largest slot that the initiator can use."""
    granularity: _Count
    metadata: Annotated[bytes, msgspec.Meta(max_length=MAX_METADATA_BYTES)]
    """Metadata of the initiator's agent, for the reply; empty if sent recently."""
    needs_metadata: bool = True
    """True if the initiator has no metadata of the owner's agent with the bounce buffer."""


_NUMBERS = {2: "<u2", 4: "<u4", 8: "<i8"}


class OffsetTable(msgspec.Struct, frozen=True, array_like=True):
    """Offsets divided by `2 ** shift`, as little-endian integers of `width` bytes."""

    width: Annotated[int, msgspec.Meta(ge=2, le=8)]
    shift: Annotated[int, msgspec.Meta(ge=0, le=31)]
    numbers: bytes

    def __len__(self) -> int:
        return len(self.numbers) // self.width

    @classmethod
    def of(cls, offsets: Offsets) -> "OffsetTable":
        bits = int(np.bitwise_or.reduce(offsets)) if len(offsets) else 0
        shift = min(31, (bits & -bits).bit_length() - 1) if bits else 0
        width = 2 if bits >> shift < 1 << 16 else 4
        if bits >> shift < 1 << 32:
            return cls(width, shift, (offsets >> shift).astype(_NUMBERS[width]).tobytes())
        return cls(8, 0, offsets.astype(_NUMBERS[8]).tobytes())

    def offsets(self) -> Offsets:
        """Decode the offsets. RemoteProtocolError if the bytes are malformed.

        Offsets may be negative or arbitrarily large: the caller checks the offsets against the
        regions.
        """
        if (
            self.width not in _NUMBERS
            or len(self.numbers) % self.width
            or (self.width == 8 and self.shift)
        ):
            raise RemoteProtocolError(
                f"{len(self.numbers)} bytes are not a table of offsets of {self.width} "
                f"bytes, shifted by {self.shift}"
            )
        found: Offsets = np.left_shift(
            np.frombuffer(self.numbers, _NUMBERS[self.width]), self.shift, dtype=np.int64
        )
        return found


class SegmentGroup(msgspec.Struct, frozen=True, array_like=True):
    """Segments of one size in one of the owner's regions.

    Layers usually move the same blocks, so their groups share a table.
    """

    region: _Natural
    segment_bytes: _Count
    table: _Natural


class SegmentPart(msgspec.Struct, frozen=True, array_like=True, tag="part"):
    """Initiator to owner: some of the segments of a transfer. Parts arrive in order."""

    transfer: _Natural
    number: _Natural
    tables: Annotated[tuple[OffsetTable, ...], msgspec.Meta(max_length=PART_OFFSETS)]
    groups: Annotated[tuple[SegmentGroup, ...], msgspec.Meta(max_length=PART_GROUPS)]

    @property
    def num_segments(self) -> int:
        """Count the segments. RemoteProtocolError if a group refers to a missing table."""
        if any(group.table >= len(self.tables) for group in self.groups):
            raise RemoteProtocolError(
                "a part of a bounce-buffer transfer names a table of offsets that it "
                "does not contain"
            )
        return sum(len(self.tables[group.table]) for group in self.groups)


class InitiatorProgress(msgspec.Struct, frozen=True, array_like=True, tag="adv"):
    """Initiator to owner: bytes up to `upto` have been read or written."""

    transfer: _Natural
    upto: _Natural
    clock_s: float


class TransferStopped(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Initiator to owner: the transfer has been given up."""

    transfer: _Natural
    is_certain: bool
    """False if posted bytes may still arrive in the slot."""


class SlotGranted(msgspec.Struct, frozen=True, array_like=True, tag="grant"):
    """Owner to initiator: the slot at `address` belongs to the transfer."""

    transfer: _Natural
    address: _Natural
    """Address of the slot in the owner's process."""
    size_bytes: _Count
    echoed_clock_s: float
    metadata: Annotated[bytes, msgspec.Meta(max_length=MAX_METADATA_BYTES)] = b""
    """Metadata of the owner's agent that includes the bounce buffer; empty unless asked for."""


class OwnerProgress(msgspec.Struct, frozen=True, array_like=True, tag="reach"):
    """Owner to initiator: bytes up to `upto` have been gathered or scattered."""

    transfer: _Natural
    upto: _Natural
    echoed_clock_s: float


class TransferEnded(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """Owner to initiator: the owner touches no byte of the transfer any more."""

    transfer: _Natural
    why: _Why


ToOwner = SlotRequest | SegmentPart | InitiatorProgress | TransferStopped
ToInitiator = SlotGranted | OwnerProgress | TransferEnded
BounceMessage = ToOwner | ToInitiator


class OutgoingMessages:
    """Messages that wait to be sent, by receiving agent."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[BounceMessage]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, agent: str, *messages: BounceMessage) -> None:
        self._waiting.setdefault(agent, []).extend(messages)

    def drain(self) -> list[tuple[str, list[BounceMessage]]]:
        waiting, self._waiting = self._waiting, {}
        return list(waiting.items())


# -- notifications --


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """Some messages of one sender to one receiver."""

    version: int
    sender: _Name
    """Name of the serving agent of the sender's transport."""
    count: _Natural
    messages: Annotated[tuple[BounceMessage, ...], msgspec.Meta(max_length=FEW_MESSAGES)]


_DECODER = msgspec.msgpack.Decoder(Envelope)


class NotificationCodec:
    """Encodes, signs and verifies the notifications of one transport."""

    def __init__(self, secret: bytes, own_agent: str) -> None:
        self._key = hmac.digest(secret, b"kvferry staged nixl notifications", hashlib.sha256)
        self._own = own_agent
        self._sent = 0
        self._counts: dict[str, int] = {}

    def encode(self, receiver: str, messages: Sequence[BounceMessage]) -> Iterator[bytes]:
        """Encode messages in order, in as few notifications as possible."""
        waiting, room = list[msgspec.Raw](), MAX_ENVELOPE_BYTES - HEADER_BYTES
        for message in messages:
            encoded = msgspec.msgpack.encode(message)
            if waiting and (len(waiting) == FEW_MESSAGES or len(encoded) > room):
                yield self._encode(receiver, waiting)
                waiting, room = [], MAX_ENVELOPE_BYTES - HEADER_BYTES
            waiting.append(msgspec.Raw(encoded))
            room -= len(encoded)
        if waiting:
            yield self._encode(receiver, waiting)

    def _encode(self, receiver: str, messages: list[msgspec.Raw]) -> bytes:
        self._sent += 1
        # An `Envelope`, with messages that are encoded already.
        payload = msgspec.msgpack.encode((BOUNCE_VERSION, self._own, self._sent, messages))
        return b"".join((self._tag(receiver, payload), payload))

    def decode(self, notification: bytes) -> Envelope:
        """Verify and decode a notification; accepts arbitrary bytes.

        RemoteProtocolError unless the notification is new, from the cluster and for us.
        """
        tag, payload = notification[:TAG_BYTES], memoryview(notification)[TAG_BYTES:]
        if len(notification) > MAX_ENVELOPE_BYTES or not hmac.compare_digest(
            tag, self._tag(self._own, payload)
        ):
            raise RemoteProtocolError(
                "a notification is too long, or not signed with this cluster's secret"
            )
        try:
            envelope = _DECODER.decode(payload)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise RemoteProtocolError(f"a notification cannot be decoded ({error})") from error
        if envelope.version != BOUNCE_VERSION or envelope.count <= self._counts.get(
            envelope.sender, 0
        ):
            raise RemoteProtocolError(
                f"a notification of {envelope.sender} has another version, or was received before"
            )
        # Re-inserted at the end, so that the first entry is the sender that was quiet longest.
        self._counts.pop(envelope.sender, None)
        self._counts[envelope.sender] = envelope.count
        if len(self._counts) > MAX_SENDERS:
            del self._counts[next(iter(self._counts))]
        return envelope

    def _tag(self, receiver: str, payload: bytes | memoryview) -> bytes:
        return hmac.digest(self._key, b"".join((receiver.encode(), b"\0", payload)), hashlib.sha256)


# -- segments on the wire --


def cut_into_parts(transfer: int, segments: Sequence[Segments]) -> Iterator[SegmentPart]:
    """Cut the segments of a transfer into parts for the owner; each part is built on demand."""
    number = num_offsets = 0
    tables: list[Offsets] = []
    groups: list[SegmentGroup] = []

    def part() -> SegmentPart:
        return SegmentPart(transfer, number, tuple(map(OffsetTable.of, tables)), tuple(groups))

    for same_size in segments:
        rest = same_size.remote_offsets
        while len(rest):
            most = PART_OFFSETS if number else FIRST_PART_OFFSETS
            known = _same(rest[:most], tables)
            if len(groups) == PART_GROUPS or (known is None and num_offsets == most):
                yield part()
                number, num_offsets, tables, groups = number + 1, 0, [], []
                continue
            if known is None:
                known = len(tables)
                tables.append(rest[: most - num_offsets])
                num_offsets += len(tables[-1])
            groups.append(SegmentGroup(same_size.remote_region, same_size.segment_bytes, known))
            rest = rest[len(tables[known]) :]
    if groups:
        yield part()


def _same(offsets: Offsets, tables: Sequence[Offsets]) -> int | None:
    """Return the index of the table with exactly these offsets, or None.

    Tables that differ mostly differ in the first offset, which is compared first.
    """
    for number, table in enumerate(reversed(tables)):
        if len(table) == len(offsets) and table[0] == offsets[0] and np.array_equal(table, offsets):
            return len(tables) - 1 - number
    return None
