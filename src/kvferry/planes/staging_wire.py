"""What the two sides of a staged transfer tell each other, as NIXL notifications. Pure.

The *initiator* has asked for the transfer, by `read` or `write`, and posts everything to NIXL. The *owner* lends it a window of its ring:

    initiator                             owner
    Ask, Part ...          ────▶          queued until there is a window
                           ◀────          Granted
    read:                  ◀────          Reached n        gathered into the window up to byte n
          READ, then       ────▶          Advanced n       read up to byte n: that much of the window may be filled again
    write: WRITE, then     ────▶          Advanced n       written into the window up to byte n
                           ◀────          Reached n        at its place up to byte n
    Stopped                ────▶          gives the transfer up
                           ◀────          Ended            touches no byte of it any more; also when it refuses one, or does not know it

`n` counts from the beginning of the transfer, so that one message stands for all before it. The initiator puts its own clock into what it
says, and the owner repeats the last it has heard: so the initiator knows how long its window is kept for certain, whatever was delayed.

A notification is a tag (HMAC-SHA256 over the receiver's agent and the rest, with a key of the cluster) and an `Envelope`. Senders count
their envelopes; one that is not above all before it is dropped. Whoever has not the key can send nothing that is looked into.
"""

import hashlib
import hmac
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
import numpy as np

from kvferry.errors import RemoteProtocolError
from kvferry.planes.runs import Offsets
from kvferry.ports.data import Pieces

__all__ = [
    "MAX_ENVELOPE_BYTES",
    "MAX_METADATA_BYTES",
    "MAX_PIECES",
    "STAGING_VERSION",
    "Advanced",
    "Ask",
    "Ended",
    "Envelope",
    "Granted",
    "Group",
    "Message",
    "OffsetTable",
    "Part",
    "Postmark",
    "Reached",
    "Stopped",
    "cut_into_parts",
]

STAGING_VERSION = 1
MAX_ENVELOPE_BYTES = 256 * 1024
"""NIXL takes 75 µs for a notification of 64 KiB, and 2 ms for one of 1 MiB."""
MAX_METADATA_BYTES = 192 * 1024
FEW_MESSAGES = 256
PART_OFFSETS = 8192
"""Offsets of one part: the owner begins with the first while the others are written."""
PART_GROUPS = 1024
MAX_PIECES = 1 << 22
"""Of one transfer."""
MAX_SENDERS = 1024
TAG_BYTES = 32
MAX_NUMBER = (1 << 62) - 1

_Natural = Annotated[int, msgspec.Meta(ge=0, le=MAX_NUMBER)]
_Count = Annotated[int, msgspec.Meta(gt=0, le=MAX_NUMBER)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
_Why = Annotated[str, msgspec.Meta(max_length=400)]


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    transfer: _Natural
    clock_s: float
    is_read: bool
    total_bytes: _Count
    window_bytes: _Count
    """The largest window that is of use."""
    grain: _Count
    metadata: Annotated[bytes, msgspec.Meta(max_length=MAX_METADATA_BYTES)]
    """Of the sender's agent, for the answer; empty when it was told lately."""


class OffsetTable(msgspec.Struct, frozen=True, array_like=True):
    """Offsets, divided by `2 ** shift`, as little-endian numbers of `width` bytes."""

    width: Annotated[int, msgspec.Meta(ge=4, le=8)]
    shift: Annotated[int, msgspec.Meta(ge=0, le=31)]
    numbers: bytes

    def __len__(self) -> int:
        return len(self.numbers) // self.width

    @classmethod
    def of(cls, offsets: Offsets) -> "OffsetTable":
        bits = int(np.bitwise_or.reduce(offsets)) if len(offsets) else 0
        shift = min(31, (bits & -bits).bit_length() - 1) if bits else 0
        if bits >> shift < 1 << 32:
            return cls(4, shift, (offsets >> shift).astype("<u4").tobytes())
        return cls(8, 0, offsets.astype("<i8").tobytes())

    def offsets(self) -> Offsets:
        """RemoteProtocolError when these are no numbers. They may be negative, or lie anywhere: the caller checks them."""
        if self.width not in (4, 8) or len(self.numbers) % self.width or (self.width == 8 and self.shift):
            raise RemoteProtocolError(f"{len(self.numbers)} bytes are no offsets of {self.width} bytes, shifted by {self.shift}")
        found = np.frombuffer(self.numbers, "<u4" if self.width == 4 else "<i8").astype(np.int64)
        return found << self.shift


class Group(msgspec.Struct, frozen=True, array_like=True):
    """Pieces of one size in one of the owner's regions. Layers mostly move the same blocks: their groups share a table."""

    region: _Natural
    piece_bytes: _Count
    table: _Natural


class Part(msgspec.Struct, frozen=True, array_like=True, tag="part"):
    """Some of the pieces of a transfer. They come in order."""

    transfer: _Natural
    number: _Natural
    tables: Annotated[tuple[OffsetTable, ...], msgspec.Meta(max_length=PART_OFFSETS)]
    groups: Annotated[tuple[Group, ...], msgspec.Meta(max_length=PART_GROUPS)]

    @property
    def num_pieces(self) -> int:
        """RemoteProtocolError when a group names a table that is not there."""
        if any(group.table >= len(self.tables) for group in self.groups):
            raise RemoteProtocolError("a part of a staged transfer names offsets that it does not have")
        return sum(len(self.tables[group.table]) for group in self.groups)


class Advanced(msgspec.Struct, frozen=True, array_like=True, tag="adv"):
    transfer: _Natural
    upto: _Natural
    clock_s: float


class Stopped(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    transfer: _Natural
    is_certain: bool
    """Nothing that was posted can still arrive in the window."""


class Granted(msgspec.Struct, frozen=True, array_like=True, tag="grant"):
    transfer: _Natural
    first: _Natural
    """The window, by its offset in the owner's ring."""
    size_bytes: _Count
    heard_s: float


class Reached(msgspec.Struct, frozen=True, array_like=True, tag="reach"):
    transfer: _Natural
    upto: _Natural
    heard_s: float


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    transfer: _Natural
    why: _Why


Message = Ask | Part | Advanced | Stopped | Granted | Reached | Ended


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    version: int
    sender: _Name
    """The serving agent of the sender's plane."""
    count: _Natural
    messages: Annotated[tuple[Message, ...], msgspec.Meta(max_length=FEW_MESSAGES)]


class Postmark:
    """Closes and opens the notifications of one plane."""

    def __init__(self, secret: bytes, own_agent: str) -> None:
        self._key = hmac.digest(secret, b"kvferry staged nixl notifications", hashlib.sha256)
        self._own = own_agent
        self._sent = 0
        self._counts: dict[str, int] = {}

    def close(self, receiver: str, messages: Sequence[Message]) -> Iterator[bytes]:
        """As many notifications as it takes. Long messages travel alone."""
        short = [message for message in messages if not isinstance(message, Ask | Part)]
        for message in messages:
            if isinstance(message, Ask | Part):
                yield self._close(receiver, (message,))
        for first in range(0, len(short), FEW_MESSAGES):
            yield self._close(receiver, tuple(short[first : first + FEW_MESSAGES]))

    def _close(self, receiver: str, messages: tuple[Message, ...]) -> bytes:
        self._sent += 1
        payload = msgspec.msgpack.encode(Envelope(STAGING_VERSION, self._own, self._sent, messages))
        return self._tag(receiver, payload) + payload

    def open(self, notification: bytes) -> Envelope:
        """RemoteProtocolError for whatever is not a new message of the cluster for us. Takes anything."""
        tag, payload = notification[:TAG_BYTES], notification[TAG_BYTES:]
        if len(notification) > MAX_ENVELOPE_BYTES or not hmac.compare_digest(tag, self._tag(self._own, payload)):
            raise RemoteProtocolError("a notification is too long, or not of this cluster")
        try:
            envelope = _DECODER.decode(payload)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise RemoteProtocolError(f"a notification cannot be understood ({error})") from error
        if envelope.version != STAGING_VERSION or envelope.count <= self._counts.get(envelope.sender, 0):
            raise RemoteProtocolError(f"a notification of {envelope.sender} is of another version, or came before")
        self._note(envelope)
        return envelope

    def _note(self, envelope: Envelope) -> None:
        self._counts.pop(envelope.sender, None)
        self._counts[envelope.sender] = envelope.count
        if len(self._counts) > MAX_SENDERS:
            del self._counts[next(iter(self._counts))]

    def _tag(self, receiver: str, payload: bytes) -> bytes:
        return hmac.digest(self._key, receiver.encode() + b"\0" + payload, hashlib.sha256)


def cut_into_parts(transfer: int, pieces: Sequence[Pieces]) -> Iterator[Part]:
    """What an owner must know of a transfer. Each is written when it is asked for."""
    number = num_offsets = 0
    tables: dict[bytes, int] = {}
    encoded: list[OffsetTable] = []
    groups: list[Group] = []
    for pieces_of_region in pieces:
        for first in range(0, len(pieces_of_region.remote_offsets), PART_OFFSETS):
            offsets = pieces_of_region.remote_offsets[first : first + PART_OFFSETS]
            key = offsets.tobytes()
            if len(groups) == PART_GROUPS or (key not in tables and groups and num_offsets + len(offsets) > PART_OFFSETS):
                yield Part(transfer, number, tuple(encoded), tuple(groups))
                number, num_offsets = number + 1, 0
                tables, encoded, groups = {}, [], []
            if key not in tables:
                tables[key] = len(encoded)
                encoded.append(OffsetTable.of(offsets))
                num_offsets += len(offsets)
            groups.append(Group(pieces_of_region.remote_region, pieces_of_region.piece_bytes, tables[key]))
    if groups:
        yield Part(transfer, number, tuple(encoded), tuple(groups))


_DECODER = msgspec.msgpack.Decoder(Envelope)
