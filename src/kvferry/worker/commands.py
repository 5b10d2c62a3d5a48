"""What an engine tells its transfer worker: typed, picklable, in order. The scheduler writes them,
a step carries them to every rank.
"""

from dataclasses import dataclass

from kvferry.protocol.fingerprints import Fingerprint
from kvferry.types import Address, RequestId

__all__ = [
    "AbandonLease",
    "AbortLoad",
    "CloseStream",
    "ConsumerCommand",
    "EvictTurn",
    "FailPush",
    "GrantLease",
    "OpenStream",
    "PrepareLoad",
    "PrepareOptionalLoad",
    "ProducerCommand",
    "PublishTicket",
    "RegisterForPush",
    "RegisterForPushByAddress",
    "RejectLoad",
    "ReleaseTicket",
    "RetainTurn",
    "SkipLoad",
    "StartLoad",
    "WithdrawStream",
    "WorkerCommand",
]


@dataclass(frozen=True, slots=True)
class PrepareLoad:
    """A request with a genuine ticket has arrived: shake hands, attach, keep the lease alive."""

    request: RequestId
    ticket: str


@dataclass(frozen=True, slots=True)
class PrepareOptionalLoad:
    """The same for a request that can do without: say whether the producer has what the ticket is
    for, before there are blocks.
    """

    request: RequestId
    ticket: str


@dataclass(frozen=True, slots=True)
class RegisterForPush:
    """A request with a genuine push ticket has arrived: shake hands, register, attach once there is
    something.
    """

    request: RequestId
    push_ticket: str
    tokens: Fingerprint
    """Of its prompt."""
    own_address: Address
    """Of our side channel."""


@dataclass(frozen=True, slots=True)
class RegisterForPushByAddress:
    """The same without a push ticket: a router that signs nothing has named a producer that we
    believe. Its life is asked for first, and the two legs meet by their request id.
    """

    request: RequestId
    engine: str
    address: Address
    """Of its side channel."""
    tp_size: int
    tokens: Fingerprint
    own_address: Address


@dataclass(frozen=True, slots=True)
class StartLoad:
    """Blocks are there: fill them with the KV of token positions `first_token` to `end_token`
    (exclusive).
    """

    request: RequestId
    blocks: tuple[tuple[int, ...], ...]
    first_token: int
    end_token: int
    needed_from: tuple[int, ...] = ()
    """By group: the first token that is ever looked at; empty: token 0."""


@dataclass(frozen=True, slots=True)
class SkipLoad:
    """Nothing is needed from the producer after all."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class AbortLoad:
    """The request is over."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class RejectLoad:
    """Report this request as failed: its parameters cannot be honoured."""

    request: RequestId
    reason: str


@dataclass(frozen=True, slots=True)
class GrantLease:
    """Readers with ticket `serial` may read this request's blocks from now on."""

    request: RequestId
    serial: int
    blocks: tuple[tuple[int, ...], ...] = ()
    """Each group's table, where readers read a copy of them: they are copied first."""


@dataclass(frozen=True, slots=True)
class RetainTurn:
    """As Grant, but for so long, or until they are let go, for whoever might come."""

    request: RequestId
    serial: int
    ttl_s: float
    blocks: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class EvictTurn:
    """The engine needs blocks that are kept: it has them back when nobody reads them."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class OpenStream:
    """A request is being computed for a peer: what is published of it may be read by those with
    ticket `serial`.
    """

    request: RequestId
    serial: int


@dataclass(frozen=True, slots=True)
class CloseStream:
    """An open request has been computed; its blocks are kept for readers from now on, as if it had
    been granted.
    """

    request: RequestId
    blocks: tuple[tuple[int, ...], ...] = ()
    """By group, where readers read a copy of them: those that are not copied yet."""


@dataclass(frozen=True, slots=True)
class WithdrawStream:
    """An open request has lost its blocks and is computed again. Sent before anything else is
    written into them.
    """

    request: RequestId
    serial: int


@dataclass(frozen=True, slots=True)
class PublishTicket:
    """A request that is granted or open is for whoever registers for it: offer this ticket, of
    which so many tokens are ready.
    """

    request: RequestId
    match_id: str
    """Of its push ticket; empty: it had none."""
    ticket: str
    ready_tokens: int
    blocks: tuple[tuple[int, ...], ...] = ()
    """By group, where readers read a copy of them: those of an open request to be copied before it
    is offered.
    """


@dataclass(frozen=True, slots=True)
class FailPush:
    """A request has ended without blocks to hand over: whoever has registered for it waits in
    vain.
    """

    request: RequestId
    match_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class AbandonLease:
    """Nobody will come for this request's blocks: its ticket reached nobody."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class ReleaseTicket:
    """The holder of ticket `serial` of this request has given it up."""

    request: RequestId
    serial: int


ConsumerCommand = (
    PrepareLoad
    | PrepareOptionalLoad
    | RegisterForPush
    | RegisterForPushByAddress
    | StartLoad
    | SkipLoad
    | AbortLoad
    | RejectLoad
)
ProducerCommand = (
    GrantLease
    | RetainTurn
    | EvictTurn
    | OpenStream
    | CloseStream
    | WithdrawStream
    | PublishTicket
    | FailPush
    | AbandonLease
    | ReleaseTicket
)
WorkerCommand = ConsumerCommand | ProducerCommand
