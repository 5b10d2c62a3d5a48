"""What the two sides of a bounce-buffer transfer tell each other, as NIXL notifications. Pure.

The *initiator* has asked for the transfer, by `read` or `write`, and posts everything to NIXL. The
*owner* lends it a slot of its bounce buffer:

    initiator                             owner
    Ask, Part ...          ────▶          queued until there is a window
                           ◀────          Granted
    read:                  ◀────          Reached n        gathered into the window up to byte n
          READ, then       ────▶          Advanced n       read up to byte n: that much of the window may be filled again
    write: WRITE, then     ────▶          Advanced n       written into the window up to byte n
                           ◀────          Reached n        at its place up to byte n
    Stopped                ────▶          gives the transfer up
                           ◀────          Ended            touches no byte of it any more; also when it refuses one, or does not know it

`n` counts from the beginning of the transfer, so that one message stands for all before it. The
initiator puts its own clock into what it says, and the owner repeats the last it has heard: so the
initiator knows how long its window is kept for certain, whatever was delayed.

A notification is a tag (HMAC-SHA256 over the receiver's agent and the rest, with a key of the
cluster) and an `Envelope`. Senders count their envelopes; one that is not above all before it is
dropped. Whoever has not the key can send nothing that is looked into.
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

__all__ = [
    "BOUNCE_VERSION",
    "MAX_ENVELOPE_BYTES",
    "MAX_METADATA_BYTES",
    "MAX_SEGMENTS",
    "BounceMessage",
    "Envelope",
    "InitiatorProgress",
    "NotificationCodec",
    "OffsetTable",
    "OwnerProgress",
    "SegmentGroup",
    "SegmentPart",
    "SlotGranted",
    "SlotRequest",
    "TransferEnded",
    "TransferStopped",
    "cut_into_parts",
]

BOUNCE_VERSION = 1
MAX_ENVELOPE_BYTES = 256 * 1024
"""NIXL takes 75 µs for a notification of 64 KiB, and 2 ms for one of 1 MiB."""
MAX_METADATA_BYTES = 192 * 1024
FEW_MESSAGES = 256
FIRST_PART_OFFSETS, PART_OFFSETS = 8192, 24_576
"""Offsets of one part: the owner begins with the first while the others are written. Of 8 bytes
each they still fit.
"""
PART_GROUPS = 1024
MAX_SEGMENTS = 1 << 22
"""Of one transfer."""
MAX_SENDERS = 1024
TAG_BYTES = 32
SHORT_BYTES, TABLE_BYTES, GROUP_BYTES = 256, 16, 32
"""What a message, a table and a group take at most, without what may be long in them."""
MAX_INTEGER = (1 << 62) - 1

_Natural = Annotated[int, msgspec.Meta(ge=0, le=MAX_INTEGER)]
_Count = Annotated[int, msgspec.Meta(gt=0, le=MAX_INTEGER)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
_Why = Annotated[str, msgspec.Meta(max_length=400)]


class SlotRequest(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    transfer: _Natural
    clock_s: float
    is_read: bool
    total_bytes: _Count
    slot_bytes: _Count
    """The largest window that is of use."""
    granularity: _Count
    metadata: Annotated[bytes, msgspec.Meta(max_length=MAX_METADATA_BYTES)]
    """Of the sender's agent, for the answer; empty when it was told lately."""


_NUMBERS = {2: "<u2", 4: "<u4", 8: "<i8"}


class OffsetTable(msgspec.Struct, frozen=True, array_like=True):
    """Offsets, divided by `2 ** shift`, as little-endian numbers of `width` bytes."""

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
        """RemoteProtocolError when these are no numbers. They may be negative, or lie anywhere: the
        caller checks them.
        """
        if (
            self.width not in _NUMBERS
            or len(self.numbers) % self.width
            or (self.width == 8 and self.shift)
        ):
            raise RemoteProtocolError(
                f"{len(self.numbers)} bytes are no offsets of {self.width} bytes, shifted by "
                f"{self.shift}"
            )
        found: Offsets = np.left_shift(
            np.frombuffer(self.numbers, _NUMBERS[self.width]), self.shift, dtype=np.int64
        )
        return found


class SegmentGroup(msgspec.Struct, frozen=True, array_like=True):
    """Segments of one size in one of the owner's regions. Layers mostly move the same blocks: their
    groups share a table.
    """

    region: _Natural
    segment_bytes: _Count
    table: _Natural


class SegmentPart(msgspec.Struct, frozen=True, array_like=True, tag="part"):
    """Some of the segments of a transfer. They come in order."""

    transfer: _Natural
    number: _Natural
    tables: Annotated[tuple[OffsetTable, ...], msgspec.Meta(max_length=PART_OFFSETS)]
    groups: Annotated[tuple[SegmentGroup, ...], msgspec.Meta(max_length=PART_GROUPS)]

    @property
    def num_segments(self) -> int:
        """RemoteProtocolError when a group names a table that is not there."""
        if any(group.table >= len(self.tables) for group in self.groups):
            raise RemoteProtocolError(
                "a part of a bounce-buffer transfer names offsets that it does not have"
            )
        return sum(len(self.tables[group.table]) for group in self.groups)


class InitiatorProgress(msgspec.Struct, frozen=True, array_like=True, tag="adv"):
    transfer: _Natural
    upto: _Natural
    clock_s: float


class TransferStopped(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    transfer: _Natural
    is_certain: bool
    """Nothing that was posted can still arrive in the window."""


class SlotGranted(msgspec.Struct, frozen=True, array_like=True, tag="grant"):
    transfer: _Natural
    first: _Natural
    """The window, by its offset in the owner's ring."""
    size_bytes: _Count
    echoed_clock_s: float


class OwnerProgress(msgspec.Struct, frozen=True, array_like=True, tag="reach"):
    transfer: _Natural
    upto: _Natural
    echoed_clock_s: float


class TransferEnded(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    transfer: _Natural
    why: _Why


BounceMessage = (
    SlotRequest
    | SegmentPart
    | InitiatorProgress
    | TransferStopped
    | SlotGranted
    | OwnerProgress
    | TransferEnded
)


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    version: int
    sender: _Name
    """The serving agent of the sender's transport."""
    count: _Natural
    messages: Annotated[tuple[BounceMessage, ...], msgspec.Meta(max_length=FEW_MESSAGES)]


class NotificationCodec:
    """Closes and opens the notifications of one transport."""

    def __init__(self, secret: bytes, own_agent: str) -> None:
        self._key = hmac.digest(secret, b"kvferry staged nixl notifications", hashlib.sha256)
        self._own = own_agent
        self._sent = 0
        self._counts: dict[str, int] = {}

    def close(self, receiver: str, messages: Sequence[BounceMessage]) -> Iterator[bytes]:
        """In order, in as few notifications as it takes."""
        waiting, weight = list[BounceMessage](), 0
        for message in messages:
            if waiting and (
                len(waiting) == FEW_MESSAGES
                or weight + _weight(message) > MAX_ENVELOPE_BYTES - SHORT_BYTES
            ):
                yield self._close(receiver, tuple(waiting))
                waiting, weight = [], 0
            waiting.append(message)
            weight += _weight(message)
        if waiting:
            yield self._close(receiver, tuple(waiting))

    def _close(self, receiver: str, messages: tuple[BounceMessage, ...]) -> bytes:
        self._sent += 1
        payload = msgspec.msgpack.encode(Envelope(BOUNCE_VERSION, self._own, self._sent, messages))
        return b"".join((self._tag(receiver, payload), payload))

    def open(self, notification: bytes) -> Envelope:
        """RemoteProtocolError for whatever is not a new message of the cluster for us. Takes
        anything.
        """
        tag, payload = notification[:TAG_BYTES], memoryview(notification)[TAG_BYTES:]
        if len(notification) > MAX_ENVELOPE_BYTES or not hmac.compare_digest(
            tag, self._tag(self._own, payload)
        ):
            raise RemoteProtocolError("a notification is too long, or not of this cluster")
        try:
            envelope = _DECODER.decode(payload)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise RemoteProtocolError(f"a notification cannot be understood ({error})") from error
        if envelope.version != BOUNCE_VERSION or envelope.count <= self._counts.get(
            envelope.sender, 0
        ):
            raise RemoteProtocolError(
                f"a notification of {envelope.sender} is of another version, or came before"
            )
        self._note(envelope)
        return envelope

    def _note(self, envelope: Envelope) -> None:
        self._counts.pop(envelope.sender, None)
        self._counts[envelope.sender] = envelope.count
        if len(self._counts) > MAX_SENDERS:
            del self._counts[next(iter(self._counts))]

    def _tag(self, receiver: str, payload: bytes | memoryview) -> bytes:
        return hmac.digest(self._key, b"".join((receiver.encode(), b"\0", payload)), hashlib.sha256)


def _weight(message: BounceMessage) -> int:
    """How many bytes it takes, about, and never fewer."""
    if isinstance(message, SegmentPart):
        return (
            SHORT_BYTES
            + sum(TABLE_BYTES + len(table.numbers) for table in message.tables)
            + GROUP_BYTES * len(message.groups)
        )
    return SHORT_BYTES + (
        len(message.metadata)
        if isinstance(message, SlotRequest)
        else 4 * len(message.why)
        if isinstance(message, TransferEnded)
        else 0
    )


def cut_into_parts(transfer: int, segments: Sequence[Segments]) -> Iterator[SegmentPart]:
    """What an owner must know of a transfer. Each is written when it is asked for."""
    number = num_offsets = 0
    tables: list[Offsets] = []
    groups: list[SegmentGroup] = []
    for segments_of_region in segments:
        rest = segments_of_region.remote_offsets
        while len(rest):
            most = PART_OFFSETS if number else FIRST_PART_OFFSETS
            known = _same(rest[:most], tables)
            if len(groups) == PART_GROUPS or (known is None and num_offsets == most):
                yield SegmentPart(
                    transfer,
                    number,
                    tuple(OffsetTable.of(table) for table in tables),
                    tuple(groups),
                )
                number, num_offsets = number + 1, 0
                tables, groups = [], []
                continue
            if known is None:
                known = len(tables)
                tables.append(rest[: most - num_offsets])
                num_offsets += len(tables[-1])
            groups.append(
                SegmentGroup(
                    segments_of_region.remote_region, segments_of_region.segment_bytes, known
                )
            )
            rest = rest[len(tables[known]) :]
    if groups:
        yield SegmentPart(
            transfer, number, tuple(OffsetTable.of(table) for table in tables), tuple(groups)
        )


def _same(offsets: Offsets, tables: Sequence[Offsets]) -> int | None:
    """Which of the tables has these very offsets. Most that differ do so at once."""
    for number, table in enumerate(reversed(tables)):
        if len(table) == len(offsets) and table[0] == offsets[0] and np.array_equal(table, offsets):
            return len(tables) - 1 - number
    return None


_DECODER = msgspec.msgpack.Decoder(Envelope)
