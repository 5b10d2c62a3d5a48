"""The wire format of the `tcp` transport. Pure.

Both sides prove that they know the token in the offer: the producer (the listening side) made the
token, and the dialler received it in the handshake. A stranger that listens or dials knows no
token. Requests follow, and are answered in order:

    greeting   MAGIC, 16 bytes nonce                                         producer
    proof      16 bytes nonce; HMAC-SHA256 of the role and both nonces       dialler
    proof      HMAC-SHA256 of the role and both nonces                       producer
    request    operation, number of segments, total bytes, grant id of a
               write (0 for a read); then for each segment its address in
               the producer and its size (a write: then its bytes)           dialler
    reply      status, length of a text (0 if the request succeeded)
               (a read: then its bytes)                                      producer

The producer refuses a write under an inactive grant id at once, before the bytes of the write have
arrived. If the grant is revoked while the bytes arrive, the producer refuses the write in the
middle. In both cases the producer goes on reading for a while, so that the refusal can reach the
dialler, and then closes; the dialler closes when it has read the refusal.

All integers are little-endian.
"""

import hashlib
import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.errors import RemoteProtocolError, TransportError
from kvferry.transports.base import Operation, TransportOffer
from kvferry.transports.copy.segments import MAX_ADDRESS, merged_ranges
from kvferry.transports.linked import decoded_offer
from kvferry.types import PeerId, Region

MAGIC = b"kvferry\x02"
NONCE_BYTES, TOKEN_BYTES, PROOF_BYTES = 16, 32, 32
"""`PROOF_BYTES` is the proof alone; a dialler sends its nonce before the proof."""
GREETING_BYTES = len(MAGIC) + NONCE_BYTES
MAX_BATCH_DESCRIPTORS = 1024
"""Most segments in one request: as many buffers as one system call takes."""
MAX_BATCH_BYTES = 16 * 1024 * 1024
MAX_TEXT_BYTES = 1024

_HEADER = struct.Struct("<BxxxIQQ")
_REPLY = struct.Struct("<BxxxI")
HEADER_BYTES, REPLY_BYTES = _HEADER.size, _REPLY.size

Rows = npt.NDArray[np.int64]
"""One row for each segment: address in the producer, size in bytes."""


_OPERATION_CODES = {Operation.READ: 1, Operation.WRITE: 2}
_OPERATIONS = {code: operation for operation, code in _OPERATION_CODES.items()}


class ReplyStatus(IntEnum):
    OK = 0
    REFUSED = 1
    NOT_GRANTED = 2
    """Only this write is refused; the peer's other transfers go on."""


class HandshakeRole(Enum):
    PRODUCER = b"producer"
    DIALLER = b"dialler"


class TcpOffer(msgspec.Struct, frozen=True, array_like=True):
    """Where a transport listens, and the token that a dialler must prove to know."""

    host: str
    port: int
    token: bytes


OfferT = TypeVar("OfferT", bound=TcpOffer)


def checked_offer(peer: PeerId, offer: TransportOffer, content: type[OfferT]) -> OfferT:
    """The content of a peer's offer. TransportError unless it can be dialled."""
    decoded = decoded_offer(peer, offer, content)
    if not decoded.host or not 0 < decoded.port < 1 << 16 or len(decoded.token) != TOKEN_BYTES:
        raise TransportError(
            f"the {offer.transport} offer of {peer} names no address that can be dialled; drop "
            "this peer"
        )
    return decoded


@dataclass(frozen=True, slots=True)
class Header:
    """The fixed part of a request."""

    operation: Operation
    num_descriptors: int
    total_bytes: int
    grant_id: int


class Ranges:
    """The registered memory, which peers may read and write."""

    def __init__(self, regions: Sequence[Region]) -> None:
        merged = np.array(merged_ranges(regions), np.int64).reshape(-1, 2)
        self._starts, self._ends = merged[:, 0], merged[:, 0] + merged[:, 1]

    @property
    def first(self) -> int:
        return int(self._starts[0]) if len(self._starts) else 0

    @property
    def size_bytes(self) -> int:
        return int(self._ends[-1]) - self.first if len(self._ends) else 0

    def check(self, rows: Rows, total_bytes: int) -> None:
        """RemoteProtocolError unless every segment lies in one of the ranges, and their sizes add
        up to `total_bytes`.
        """
        addresses, sizes = rows[:, 0], rows[:, 1]
        at = np.searchsorted(self._starts, addresses, side="right") - 1
        is_inside = (at >= 0) & (sizes > 0) & (sizes <= MAX_BATCH_BYTES)
        # Sizes are at most MAX_BATCH_BYTES here. The bound on the addresses keeps the sum
        # `addresses + sizes` below from overflowing 64 bits.
        if not len(self._starts) or not bool(
            np.all(is_inside & (addresses < MAX_ADDRESS - MAX_BATCH_BYTES))
        ):
            raise RemoteProtocolError(
                "a segment is outside the memory that was offered, or has an impossible size"
            )
        if not bool(np.all(addresses + sizes <= self._ends[at])):
            raise RemoteProtocolError("a segment leaves the memory that was offered")
        if int(sizes.sum()) != total_bytes:
            raise RemoteProtocolError(
                f"the segments have {int(sizes.sum())} bytes, but the request says {total_bytes}"
            )


def greeting(nonce: bytes) -> bytes:
    return MAGIC + nonce


def nonce_in(received: bytes) -> bytes:
    if not received.startswith(MAGIC):
        raise RemoteProtocolError("the other side is not kvferry, or is another version of kvferry")
    return received[len(MAGIC) :]


def prove(token: bytes, role: HandshakeRole, nonces: bytes) -> bytes:
    """Compute the proof of one side. `nonces`: the producer's nonce, then the dialler's."""
    return hmac.digest(token, role.value + nonces, hashlib.sha256)


def is_proof(received: bytes, token: bytes, role: HandshakeRole, nonces: bytes) -> bool:
    return hmac.compare_digest(received, prove(token, role, nonces))


def pack_header(operation: Operation, rows: Rows, grant_id: int = 0) -> bytes:
    return _HEADER.pack(_OPERATION_CODES[operation], len(rows), int(rows[:, 1].sum()), grant_id)


def unpack_header(received: bytes) -> Header:
    code, num_descriptors, total_bytes, grant_id = _HEADER.unpack(received)
    operation = _OPERATIONS.get(code)
    if (
        operation is None
        or not 0 < num_descriptors <= MAX_BATCH_DESCRIPTORS
        or not 0 < total_bytes <= MAX_BATCH_BYTES
    ):
        raise RemoteProtocolError(
            f"a request of kind {code} for {num_descriptors} segments and "
            f"{total_bytes} bytes is not possible"
        )
    if grant_id and operation is Operation.READ:
        raise RemoteProtocolError(
            f"a read with grant id {grant_id} is not possible: only writes have a grant id"
        )
    return Header(operation, num_descriptors, total_bytes, grant_id)


def pack_reply(refusal: str = "", status: ReplyStatus = ReplyStatus.REFUSED) -> bytes:
    """Encode a reply: a refusal if there is a reason, otherwise success."""
    text = refusal.encode(errors="replace")[:MAX_TEXT_BYTES]
    return _REPLY.pack(status if text else ReplyStatus.OK, len(text)) + text


def text_bytes_in(received: bytes) -> int:
    """Return the length of the text of a refusal that follows the reply; 0 on success."""
    status, length = _REPLY.unpack(received)
    if status not in list(ReplyStatus) or length > MAX_TEXT_BYTES or bool(status) != bool(length):
        raise RemoteProtocolError(
            f"a reply with status {status} and {length} bytes of text is not possible"
        )
    return int(length)


def is_not_granted(received: bytes) -> bool:
    """Whether a reply that refuses a request refuses only the grant id."""
    return bool(_REPLY.unpack(received)[0] == ReplyStatus.NOT_GRANTED)
