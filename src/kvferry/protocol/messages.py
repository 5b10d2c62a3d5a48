"""Every message that crosses the wire, as one tagged union.

Durations cross the wire, deadlines never do. A field added later has a default; each change bumps
`WIRE_VERSION` and adds a line here:

    1  first version: handshake, attach, heartbeat, confirm, detach, release
    2  unequal TP: `sibling_ranks` in Attach, `total_kv_heads` in RankLayout, `head_runs` in RegionInfo
    3  unequal blocks: `axes` and `layers` in RegionInfo, instead of `head_runs`; host buffers: Ready, `uses_host_buffer` in RankLayout
    4  push: PushRegistration, PushOffer, PushWithdrawal, PushCancel; `serial` in Confirm and Refused
    5  push by writing: WriteGrantInfo and `decode_epoch` in PushRegistration; Written, WriteFailed, Revoke, Revoked
    6  reuse: `wants_ready` in Attach; RetainedTurnRequest, RetainedTurnReply
    7  messages and fields have the names they have here; until 6 several had others
"""

from typing import Annotated, TypeVar

import msgspec

from kvferry.errors import LocalProtocolError, RemoteProtocolError
from kvferry.protocol.fingerprints import Fingerprint

__all__ = [
    "MAX_LEASES_PER_HEARTBEAT",
    "MAX_MESSAGE_BYTES",
    "MAX_NAME_CHARS",
    "WIRE_VERSION",
    "Attach",
    "Confirm",
    "Confirmed",
    "Detach",
    "Factor",
    "HandshakeRefused",
    "HandshakeReply",
    "HandshakeRequest",
    "Heartbeat",
    "HeartbeatReply",
    "Message",
    "OfferInfo",
    "PushCancel",
    "PushOffer",
    "PushRegistration",
    "PushWithdrawal",
    "RankLayout",
    "Ready",
    "Refused",
    "RegionInfo",
    "Release",
    "RetainedTurnReply",
    "RetainedTurnRequest",
    "Revoke",
    "Revoked",
    "ToConsumer",
    "ToProducer",
    "WriteFailed",
    "WriteGrantInfo",
    "Written",
    "decode",
    "decode_layout",
    "encode",
    "encode_layout",
]


WIRE_VERSION = 7

Factor = str | int | bool
"""One compatibility factor: compared for equality, shown in errors."""


MAX_NAME_CHARS = 1024
Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]
"""An id that a peer chose. Bounded, because answers echo it."""

MAX_LEASES_PER_HEARTBEAT = 1000
MAX_SIBLING_RANKS = 1000
MAX_AXES = 8
MAX_REGISTRATION_S = 1e6
MAX_GROUPS = 1000
MAX_TOKENS = 1 << 40
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
BlockNumber = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)]
"""-1: there is no block for these tokens."""


class HandshakeRequest(msgspec.Struct, frozen=True, tag=True):
    """Consumer to the producer's side channel: how do I reach your rank?"""

    nonce: int
    wire_version: int
    tp_rank: int


class HandshakeReply(msgspec.Struct, frozen=True, tag=True):
    """Factors first; `layout` is an encoded `RankLayout`, looked at only when the factors agree."""

    nonce: int
    wire_version: int
    engine: str
    epoch: str
    factors: dict[str, Factor]
    layout: msgspec.Raw


class HandshakeRefused(msgspec.Struct, frozen=True, tag=True):
    nonce: int
    reason: str


class Attach(msgspec.Struct, frozen=True, tag=True):
    """A reader's first heartbeat: presents the ticket and registers the reader with the lease."""

    ticket: str
    reader: Name
    transport: Name = ""
    """The data transport the reader will use; some need our help while they are read."""
    sibling_ranks: Annotated[list[Name], msgspec.Meta(max_length=MAX_SIBLING_RANKS)] = []
    """Readers of the other ranks that come here for the same request: the lease is theirs too,
    though they may come later.
    """
    wants_ready: bool = False
    """The reader asks for nothing before it has heard `Ready`."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The lease is granted and its blocks, or those that were offered of it, are where readers read
    them. Said by producers whose layout `uses_host_buffer`, and to readers that want to know.
    """

    lease: Name
    reader: Name


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Renews every lease named. `beat` is echoed in the reply; 0 is outside the rhythm and says
    that a read begins.
    """

    epoch: Name
    beat: int
    leases: Annotated[list[Name], msgspec.Meta(max_length=MAX_LEASES_PER_HEARTBEAT)]


class HeartbeatReply(msgspec.Struct, frozen=True, tag=True):
    """The producer lives; these of the renewed leases it no longer holds."""

    epoch: Name
    beat: int
    gone: Annotated[list[Name], msgspec.Meta(max_length=MAX_LEASES_PER_HEARTBEAT)]


class Confirm(msgspec.Struct, frozen=True, tag=True):
    """The bytes are here: was the lease alive all the time?"""

    epoch: Name
    lease: Name
    reader: Name
    serial: int = 0
    """Of the ticket they were read with. A request has several leases, one after the other, where
    its prefill is preempted.
    """


class Confirmed(msgspec.Struct, frozen=True, tag=True):
    """It was. The reader is detached and the bytes may be used."""

    lease: Name
    reader: Name


class Refused(msgspec.Struct, frozen=True, tag=True):
    """It was not, or the ticket is not good here. Nothing read under it may be used."""

    lease: Name
    reader: Name
    reason: str
    serial: int = 0
    """Of the ticket that it is about; 0: whatever was presented."""


class Detach(msgspec.Struct, frozen=True, tag=True):
    """The reader needs the blocks no more and has not used them."""

    epoch: Name
    lease: Name
    reader: Name


class Release(msgspec.Struct, frozen=True, tag=True):
    """To a side channel, from whoever holds the ticket (a router): no reader will come for it."""

    ticket: str


class RetainedTurnRequest(msgspec.Struct, frozen=True, tag=True):
    """To a side channel, from a router that cannot see it in the answer: what has been kept of the
    turn that was given this word?
    """

    nonce: int
    turn_id: Name


class RetainedTurnReply(msgspec.Struct, frozen=True, tag=True):
    """The answer: `kv_transfer_params` for the next turn's prefill."""

    nonce: int
    turn_id: Name
    params: str = ""
    """JSON; empty: nothing is kept, or the turn is not over."""


class WriteGrantInfo(msgspec.Struct, frozen=True):
    """Part of a registration: the producer may write this request's KV into these blocks of the
    consumer's, for as long as the registration is renewed, until it is revoked.
    """

    grant_id: Annotated[int, msgspec.Meta(ge=1, le=1 << 62)]
    """The consumer's own, one for each lease it gives: its transport lets in what is written under
    it.
    """
    transport: Name
    tp_rank: Count
    """Of the consumer's worker whose blocks they are."""
    local_block_ids: Annotated[list[list[BlockNumber]], msgspec.Meta(max_length=MAX_GROUPS)]
    """The consumer's: each group's table from token 0."""
    first_token: Count
    end_token: Count
    needed_from: Annotated[list[Count], msgspec.Meta(max_length=MAX_GROUPS)]
    """By group: no token before this one is ever looked at; empty: all are."""
    tokens: Fingerprint
    """Of the consumer's prompt: no other prompt's KV is written."""


class PushRegistration(msgspec.Struct, frozen=True, tag="PUSH_REG"):
    """Consumer to producer, before there is anything to hand over: tell me when this request's KV
    is there, or write it.
    """

    epoch: Name
    reader: Name
    """This rank's request, as in Attach; renewed under this name by heartbeats."""
    request_id: Name
    """The consumer's own."""
    decode_engine_id: Name
    decode_host: Name
    decode_port: int
    decode_tp_size: int
    lease_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_REGISTRATION_S)]
    """How long it is remembered without a heartbeat."""
    match_id: Name = ""
    """Of the push ticket that both legs carry."""
    push_ticket: str = ""
    """Shows that whoever registers was sent here for this handover."""
    decode_epoch: Name = ""
    write: WriteGrantInfo | None = None
    """None: the consumer has no blocks yet, or will read them itself."""


class PushOffer(msgspec.Struct, frozen=True, tag=True):
    """What was registered for is there, and may be read under this ticket. Said again whenever
    there is more of it.
    """

    reader: Name
    ticket: str
    ready_tokens: int
    """Of the ticket's tokens, so many may be read. The ticket has holes where the others are to
    come.
    """


class PushWithdrawal(msgspec.Struct, frozen=True, tag=True):
    """The producer has taken back what it offered (it preempted the prefill) and will compute it
    again. What was read of it is worthless.
    """

    reader: Name
    serial: int
    """Of the ticket that was offered."""


class PushCancel(msgspec.Struct, frozen=True, tag=True):
    """This reader needs nothing any more, or never did: if nobody else does, free the blocks, or do
    not keep them once computed.
    """

    epoch: Name
    reader: Name
    request_id: Name
    decode_engine_id: Name
    match_id: Name = ""
    push_ticket: str = ""
    """As in PushRegistration."""


class Written(msgspec.Struct, frozen=True, tag=True):
    """Producer to consumer: the KV of so many tokens is in your blocks. When it is the last, all of
    it is, and it was right: the blocks it was copied from were held all the time.
    """

    reader: Name
    grant_id: int
    tokens: Count
    is_last: bool
    left_tokens: Count = 0
    """Of the last: so many had not been written when the prefill was over."""
    early_bytes: Count = 0
    """Of the last: so many bytes had been."""


class WriteFailed(msgspec.Struct, frozen=True, tag=True):
    """The producer writes no more under this lease. What it has may still be read."""

    reader: Name
    grant_id: int
    reason: str


class Revoke(msgspec.Struct, frozen=True, tag=True):
    """Consumer to producer: write no more under this lease, and say so when nothing of it is on its
    way.
    """

    epoch: Name
    reader: Name
    grant_id: int


class Revoked(msgspec.Struct, frozen=True, tag=True):
    """Nothing that was written under this lease lands any more."""

    reader: Name
    grant_id: int


class RegionInfo(msgspec.Struct, frozen=True):
    name: str
    address: int
    block_bytes: int
    stride_bytes: int
    num_blocks: int
    memory: str
    device: int
    group: int = 0
    axes: Annotated[list[tuple[str, int, int]], msgspec.Meta(max_length=MAX_AXES)] | None = None
    """Of a block, outermost first: what it counts (`layer`, `token`, `head`), how many, how many
    bytes apart. None: not known.
    """
    layers: list[str] = []
    """That share its blocks, in the order of the layer axis; none: the one it is named after."""


class OfferInfo(msgspec.Struct, frozen=True):
    """One transport of a worker. Fields as in `ports.data.TransportOffer`."""

    transport: str
    reach: str
    blob: bytes
    near: str = ""


class RankLayout(msgspec.Struct, frozen=True):
    """How one worker's cache lies in memory and how to reach it."""

    tp_rank: int
    tp_size: int
    block_size: int
    num_blocks: int
    layout: str
    num_kv_heads: int
    head_dim: int
    control_address: str
    regions: list[RegionInfo]
    offers: list[OfferInfo]
    total_kv_heads: int = 0
    uses_host_buffer: bool = False
    """Readers read a copy that is made for each lease: they wait for `Ready`."""


Message = (
    HandshakeRequest
    | HandshakeReply
    | HandshakeRefused
    | Attach
    | Ready
    | Heartbeat
    | HeartbeatReply
    | Confirm
    | Confirmed
    | Refused
    | Detach
    | Release
    | RetainedTurnRequest
    | RetainedTurnReply
    | PushRegistration
    | PushOffer
    | PushWithdrawal
    | PushCancel
    | Written
    | WriteFailed
    | Revoke
    | Revoked
)

ToConsumer = (
    HandshakeReply
    | HandshakeRefused
    | Ready
    | HeartbeatReply
    | Confirmed
    | Refused
    | PushWithdrawal
    | Written
    | WriteFailed
    | Revoked
)
"""What a consumer understands as it is; an offer's ticket is looked at first."""

ToProducer = Attach | Heartbeat | Confirm | Detach | PushRegistration | PushCancel | Revoke


# -------------------- codec -------------------- Bytes to messages and back. Anything malformed
# becomes RemoteProtocolError; nothing from a peer is ever unpickled. Pure.


MAX_MESSAGE_BYTES = 4 * 1024 * 1024

_T = TypeVar("_T")
_encoder = msgspec.msgpack.Encoder()
_message_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_layout_decoder: msgspec.msgpack.Decoder[RankLayout] = msgspec.msgpack.Decoder(RankLayout)


def encode(message: Message) -> bytes:
    frame = _encoder.encode(message)
    if len(frame) > MAX_MESSAGE_BYTES:
        raise LocalProtocolError(
            f"a {type(message).__name__} of {len(frame)} bytes is over the limit of "
            f"{MAX_MESSAGE_BYTES}"
        )
    return frame


def decode(frame: bytes) -> Message:
    return _decode(frame, _message_decoder, "message")


def encode_layout(layout: RankLayout) -> bytes:
    return _encoder.encode(layout)


def decode_layout(data: bytes | memoryview) -> RankLayout:
    return _decode(data, _layout_decoder, "layout")


def _decode(data: bytes | memoryview, decoder: msgspec.msgpack.Decoder[_T], what: str) -> _T:
    if len(data) > MAX_MESSAGE_BYTES:
        raise RemoteProtocolError(
            f"a {what} of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}"
        )
    try:
        return decoder.decode(data)
    except (
        msgspec.DecodeError,
        msgspec.ValidationError,
        RecursionError,
        UnicodeDecodeError,
    ) as error:
        raise RemoteProtocolError(f"a {what} that cannot be read: {error}") from None
