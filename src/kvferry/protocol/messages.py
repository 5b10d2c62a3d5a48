"""Every message that crosses the wire, as one tagged union, and the codec for messages.

P is the producer (prefill side), D the consumer (decode side). A producer's transfer worker
receives `ToProducer`, a consumer's transfer worker receives `ToConsumer` and `PushOffer`. A side
channel, which runs in the process of an engine's scheduler, receives `HandshakeRequest`, `Release`,
`ReleaseLeg`, `RetainedTurnRequest` and `FailureRequest`. Pure.

Durations cross the wire, deadlines never do. A new field has a default. Each change bumps
`WIRE_VERSION`, keeps `OLDEST_WIRE_VERSION` one below it (docs/decisions/066-rolling-upgrades.md),
and adds an entry to the changelog's section "Wire versions".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec

from kvferry.errors import LocalProtocolError, RemoteProtocolError
from kvferry.protocol.fingerprints import Fingerprint
from kvferry.types import KVLayout, Region

WIRE_VERSION = 9
OLDEST_WIRE_VERSION = 8
"""The oldest version of a peer. Engines of two neighbouring versions work in one fleet, so that a
fleet can be upgraded one engine at a time.
"""
STATES_WIRE_VERSION = 9
"""The oldest version of a peer of a cache with states: an older peer would read states as KV."""

MAX_FACTORS = 2048
MAX_FACTOR_CHARS = 256
FactorText = Annotated[str, msgspec.Meta(max_length=MAX_FACTOR_CHARS)]
Factor = FactorText | int | float | bool
"""The value of one compatibility factor: compared for equality, shown in errors."""


MAX_NAME_CHARS = 1024
Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]
"""An id chosen by a peer. The length is bounded because replies echo the id."""

# Bounds on lists and numbers that a peer chooses.
MAX_LEASES_PER_HEARTBEAT = 1000
MAX_SIBLING_RANKS = 1000
MAX_REGISTRATION_S = 1e6
MAX_QUESTION_S = 60.0
MAX_GROUPS = 1000
MAX_TOKENS = 1 << 40
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
BlockNumber = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)]
"""A block id; -1 (`tickets.NO_BLOCK`) means that there is no block for these tokens."""


class HandshakeRequest(msgspec.Struct, frozen=True, tag=True):
    """A consumer asks a producer's side channel how to reach rank `tp_rank`. The consumer asks with
    its own wire version first and, if that is refused, with the version before.
    """

    nonce: int
    wire_version: int
    tp_rank: int


class HandshakeReply(msgspec.Struct, frozen=True, tag=True):
    """The side channel describes the engine and the requested rank. `wire_version` is that of the
    request. `layout` is an encoded `RankLayout`; the consumer decodes it only if the compatibility
    factors agree.
    """

    nonce: int
    wire_version: int
    engine: str
    epoch: str
    factors: Annotated[dict[FactorText, Factor], msgspec.Meta(max_length=MAX_FACTORS)]
    layout: msgspec.Raw


class HandshakeRefused(msgspec.Struct, frozen=True, tag=True):
    """The side channel rejects the handshake: another wire version, or an unknown rank."""

    nonce: int
    reason: str


class Attach(msgspec.Struct, frozen=True, tag=True):
    """A reader presents its ticket. The producer adds the reader to the lease and renews the lease,
    as a heartbeat would.
    """

    ticket: str
    reader: Name
    transport: Name = ""
    """The data transport that the reader will use. Some transports need the producer to poll while
    a read is in progress.
    """
    sibling_ranks: Annotated[list[Name], msgspec.Meta(max_length=MAX_SIBLING_RANKS)] = []
    """Readers of the consumer's other ranks that attach to this producer rank for the same request.
    Until its deadline, the lease waits for every sibling rank to attach and to finish.
    """
    wants_ready: bool = False
    """The reader does not read before `Ready` has arrived, whether or not the producer has a host
    buffer. Set for retained turns: the engine counts on the blocks only after `Ready`.
    """


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The lease is granted and its blocks can be read; in push, the blocks offered so far. A
    producer whose layout has `uses_host_buffer` sends `Ready` to every reader, any other producer
    only to a reader with `wants_ready`.
    """

    lease: Name
    reader: Name


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """The consumer renews the named leases and push registrations. The reply echoes `beat`. Beat 0
    is sent outside the regular interval and announces that a read begins.
    """

    epoch: Name
    beat: int
    leases: Annotated[list[Name], msgspec.Meta(max_length=MAX_LEASES_PER_HEARTBEAT)]


class HeartbeatReply(msgspec.Struct, frozen=True, tag=True):
    """The producer is alive. `gone` lists the leases in the heartbeat that the producer no longer
    holds.
    """

    epoch: Name
    beat: int
    gone: Annotated[list[Name], msgspec.Meta(max_length=MAX_LEASES_PER_HEARTBEAT)]


class Confirm(msgspec.Struct, frozen=True, tag=True):
    """The read has ended: the reader asks whether the lease was alive during the whole read."""

    epoch: Name
    lease: Name
    reader: Name
    serial: int = 0
    """Serial of the ticket that was read under. A request whose prefill is preempted has several
    leases with the same name, one after the other.
    """


class Confirmed(msgspec.Struct, frozen=True, tag=True):
    """The lease was alive during the whole read. The producer has detached the reader, and the
    consumer may use the bytes.
    """

    lease: Name
    reader: Name


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The producer rejects a ticket, a registration, or a `Confirm` whose lease has ended. The
    consumer must not use bytes that were read under the lease.
    """

    lease: Name
    reader: Name
    reason: str
    serial: int = 0
    """Serial of the refused ticket; 0: the refusal applies to any ticket of this reader."""


class Detach(msgspec.Struct, frozen=True, tag=True):
    """The reader leaves the lease without a confirmed read."""

    epoch: Name
    lease: Name
    reader: Name


class Release(msgspec.Struct, frozen=True, tag=True):
    """The holder of a ticket (a router) informs the side channel that no reader will present this
    ticket: a ticket of P, or the push ticket of two legs that ended before P had answered.
    """

    ticket: str


class ReleaseLeg(msgspec.Struct, frozen=True, tag=True):
    """A router has ended a prefill leg without having received P's answer, and so without a ticket:
    if P holds blocks for this leg, no reader will come. The router chose `leg_id`.
    """

    leg_id: Name


class RetainedTurnRequest(msgspec.Struct, frozen=True, tag=True):
    """A router asks a side channel for the retained blocks of a turn, when the engine's answer (a
    stream) does not carry `kv_transfer_params`. The router chose `turn_id`.
    """

    nonce: int
    turn_id: Name
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_QUESTION_S)] = 0.0
    """How long the side channel may wait for the end of the turn before it replies."""


class RetainedTurnReply(msgspec.Struct, frozen=True, tag=True):
    """The side channel returns the `kv_transfer_params` for the next turn's prefill."""

    nonce: int
    turn_id: Name
    params: str = ""
    """The parameters as JSON; empty if no blocks are retained, or the turn did not end in time."""


class FailureRequest(msgspec.Struct, frozen=True, tag=True):
    """A router asks a side channel why the transfer of a leg failed, when the engine's answer does
    not contain the reason. The router chose `leg_id`.
    """

    nonce: int
    leg_id: Name


class FailureReply(msgspec.Struct, frozen=True, tag=True):
    """The side channel returns the reason; empty if it knows of no failed transfer of this leg."""

    nonce: int
    leg_id: Name
    reason: str = ""


class WriteGrantInfo(msgspec.Struct, frozen=True):
    """A write grant, part of `PushRegistration`: the producer may write the request's KV into these
    blocks of the consumer while the consumer renews the registration, until `Revoke`.
    """

    grant_id: Annotated[int, msgspec.Meta(ge=1, le=1 << 62)]
    """Chosen by the consumer and used for one grant only. The consumer's transport admits writes
    that carry this id.
    """
    transport: Name
    tp_rank: Count
    """TP rank of the consumer's worker that owns the blocks."""
    local_block_ids: Annotated[Sequence[Sequence[BlockNumber]], msgspec.Meta(max_length=MAX_GROUPS)]
    """Block ids of the consumer: the block table of each KV-cache group, from token 0."""
    first_token: Count
    end_token: Count
    needed_from: Annotated[list[Count], msgspec.Meta(max_length=MAX_GROUPS)]
    """First token of each group that attention will ever read; empty: every token is needed."""
    tokens: Fingerprint
    """Fingerprint of the consumer's prompt. The producer writes no KV of a different prompt."""


class PushRegistration(msgspec.Struct, frozen=True, tag="PUSH_REG"):
    """A consumer registers for a request whose KV the producer has not computed yet. The producer
    will send `PushOffer`, or write the KV if the registration has a write grant.
    """

    epoch: Name
    reader: Name
    """The reader's name, as in Attach. Heartbeats renew the registration under this name."""
    request_id: Name
    """The consumer's request id."""
    decode_engine_id: Name
    decode_host: Name
    decode_port: int
    decode_tp_size: int
    lease_ttl_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_REGISTRATION_S)] = msgspec.field(
        name="lease_s"
    )
    """How long the producer keeps the registration without a heartbeat, in seconds."""
    match_id: Name = ""
    """Match id from the push ticket that both legs carry; empty if the legs carry none."""
    push_ticket: str = ""
    """The signed push ticket: proves that a router sent this consumer here for this match id."""
    decode_epoch: Name = ""
    write: WriteGrantInfo | None = None
    """The write grant; None if the consumer has no blocks yet or will read the KV itself."""


class PushOffer(msgspec.Struct, frozen=True, tag=True):
    """The producer offers the KV that a reader registered for, under this ticket. The producer
    sends `PushOffer` again whenever more tokens have been computed.
    """

    reader: Name
    ticket: str
    ready_tokens: int
    """How many of the ticket's tokens may be read now. The ticket has holes in place of the blocks
    that have not been computed.
    """


class PushWithdrawal(msgspec.Struct, frozen=True, tag=True):
    """The producer preempted the prefill, withdraws the offer, and will compute the prefill again.
    The reader must discard everything read under the withdrawn ticket.
    """

    reader: Name
    serial: int
    """Serial of the withdrawn ticket."""


class PushCancel(msgspec.Struct, frozen=True, tag=True):
    """The reader does not need the KV. If no other reader needs the KV either, the producer frees
    the blocks at once, or as soon as the prefill has ended.
    """

    epoch: Name
    reader: Name
    request_id: Name
    decode_engine_id: Name
    match_id: Name = ""
    push_ticket: str = ""
    """The signed push ticket, as in PushRegistration."""


class Written(msgspec.Struct, frozen=True, tag=True):
    """The producer has written the KV of the first `tokens` tokens into the consumer's blocks.
    `is_last` also states that the KV is valid: the producer's blocks were leased all the time.
    """

    reader: Name
    grant_id: int
    tokens: Count
    is_last: bool
    left_tokens: Count = 0
    """In the last message: tokens that had not been written when the prefill ended."""
    early_bytes: Count = 0
    """In the last message: bytes that had been written when the prefill ended."""


class WriteFailed(msgspec.Struct, frozen=True, tag=True):
    """The producer stops writing under this write grant. The consumer can still read the KV; writes
    already sent may still land.
    """

    reader: Name
    grant_id: int
    reason: str


class Revoke(msgspec.Struct, frozen=True, tag=True):
    """The consumer revokes a write grant. The producer stops writing and replies `Revoked` when no
    write under the grant is in flight.
    """

    epoch: Name
    reader: Name
    grant_id: int


class Revoked(msgspec.Struct, frozen=True, tag=True):
    """The producer has no write in flight under this write grant: no more bytes will land."""

    reader: Name
    grant_id: int


@dataclass(frozen=True, slots=True)
class TransportOffer:
    """What one side tells the other about a transport during the handshake."""

    transport: str
    reach: str
    """Where the transport works: two sides can use the transport together only if both have the
    same `reach`. Empty means no restriction. (shm: host, user and pid namespace.)
    """
    blob: bytes
    """Data that only the transport itself can read: the other side passes it to `connect`."""
    near: str = ""
    """Where the transport is a good choice: two sides with different `near` use the transport
    together only if no other transport connects them. Empty means good anywhere. (nixl without
    RDMA: the host.)
    """


class RankLayout(msgspec.Struct, frozen=True):
    """The memory layout of one worker's cache, and how to reach the worker."""

    # Regions and offers cross the wire as they are, under the names of their fields.

    tp_rank: int
    tp_size: int
    block_size: int
    num_blocks: int
    layout: KVLayout
    num_kv_heads: int
    head_dim: int
    control_address: str
    regions: list[Region]
    offers: list[TransportOffer]
    total_kv_heads: int = 0
    uses_host_buffer: bool = False
    """Readers read a copy in host memory, made for each lease, and must wait for `Ready`."""


RankReply = (
    Ready | HeartbeatReply | Confirmed | Refused | PushWithdrawal | Written | WriteFailed | Revoked
)
ToConsumer = HandshakeReply | HandshakeRefused | RankReply
"""Messages passed to the consumer unchanged. `PushOffer` is not among them: the transfer worker
verifies the ticket first and passes on the opened ticket.
"""

ToProducer = Attach | Heartbeat | Confirm | Detach | PushRegistration | PushCancel | Revoke

Message = (
    HandshakeRequest
    | ToProducer
    | ToConsumer
    | PushOffer
    | Release
    | ReleaseLeg
    | RetainedTurnRequest
    | RetainedTurnReply
    | FailureRequest
    | FailureReply
)


# -- codec --
# Messages to msgpack bytes and back. A malformed frame raises RemoteProtocolError. Data from a peer
# is never unpickled.


MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""Largest encoded message. A control transport drops longer frames."""

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
        # A peer can nest values deeply enough to exhaust the stack, or send invalid UTF-8.
        RecursionError,
        UnicodeDecodeError,
    ) as error:
        raise RemoteProtocolError(f"a {what} cannot be decoded: {error}") from None
