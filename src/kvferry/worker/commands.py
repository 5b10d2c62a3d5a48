"""Commands that an engine sends to its transfer worker: typed, picklable and ordered.

The scheduler creates the commands, and the metadata of an engine step carries the commands to the
transfer worker of every rank. Plain data; pure.
"""

from dataclasses import dataclass

from kvferry.protocol.consumer.transfer import PushInfo
from kvferry.types import Address, BlockIds, EngineIncarnation, RequestId


class ConsumerCommand:
    """A command for the side of a transfer that needs the blocks."""

    __slots__ = ()


class ProducerCommand:
    """A command for the side of a transfer that holds the blocks."""

    __slots__ = ()


WorkerCommand = ConsumerCommand | ProducerCommand


@dataclass(frozen=True, slots=True)
class PrepareLoad(ConsumerCommand):
    """A request with a valid ticket has arrived: shake hands, attach, keep the lease alive."""

    request: RequestId
    ticket: str
    is_optional: bool = False
    """Whether the request can also be computed without the remote KV. Then the transfer worker
    reports whether the producer still holds the KV, before the engine allocates blocks.
    """


@dataclass(frozen=True, slots=True)
class RegisterForPush(ConsumerCommand):
    """A push request has arrived: shake hands and register with the producer.

    The consumer attaches once the producer has an offer for the request. The scheduler has verified
    the push ticket or, if the router signs nothing, has found the producer's address among the
    engine's configured `peers`; the epoch is then `UNKNOWN_EPOCH`, and the two legs are matched by
    their request id.
    """

    request: RequestId
    producer: EngineIncarnation
    address: Address
    """Address of the producer's side channel."""
    tp_size: int
    push_info: PushInfo


@dataclass(frozen=True, slots=True)
class StartLoad(ConsumerCommand):
    """The engine has allocated blocks: load the KV of tokens `first_token` to `end_token` - 1."""

    request: RequestId
    blocks: BlockIds
    first_token: int
    end_token: int
    needed_from: tuple[int, ...] = ()
    """First token that the engine will read, by group; empty means token 0."""


@dataclass(frozen=True, slots=True)
class SkipLoad(ConsumerCommand):
    """The engine needs nothing from the producer for this request."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class AbortLoad(ConsumerCommand):
    """The engine will not use the KV: stop the load and drop the request's state."""

    request: RequestId
    reason: str = "the request was aborted"


@dataclass(frozen=True, slots=True)
class RejectLoad(ConsumerCommand):
    """Report this request as failed, because the request's parameters cannot be honoured."""

    request: RequestId
    reason: str


@dataclass(frozen=True, slots=True)
class GrantLease(ProducerCommand):
    """Readers with ticket `serial` may read this request's blocks from now on."""

    request: RequestId
    serial: int
    blocks: BlockIds = ()
    """Used only with a host buffer, where the blocks are copied first."""
    lease_ttl_s: float | None = None
    """Set if the blocks are retained for a possible next turn: the lease lasts this long, or until
    the engine evicts the turn.
    """


@dataclass(frozen=True, slots=True)
class EvictTurn(ProducerCommand):
    """The engine needs the blocks of a retained turn. The transfer worker reports the end of the
    lease when every reader has detached.
    """

    request: RequestId


@dataclass(frozen=True, slots=True)
class ExpectPrefill(ProducerCommand):
    """A prefill leg has arrived at this engine, so consumers that register for it may wait.

    `FailPush`, or the end of the leg's lease, follows.
    """

    request: RequestId
    match_id: str


@dataclass(frozen=True, slots=True)
class OpenStream(ProducerCommand):
    """A prefill runs for a peer: readers with ticket `serial` may read the published blocks."""

    request: RequestId
    serial: int


@dataclass(frozen=True, slots=True)
class CloseStream(ProducerCommand):
    """The prefill of an open stream has ended; its blocks are now leased as by `GrantLease`."""

    request: RequestId
    blocks: BlockIds = ()
    """Blocks that are not in the host buffer yet; used only with a host buffer."""


@dataclass(frozen=True, slots=True)
class WithdrawStream(ProducerCommand):
    """A running prefill has lost its blocks and will be computed again.

    The engine sends this command before anything else is written into the lost blocks.
    """

    request: RequestId
    serial: int


@dataclass(frozen=True, slots=True)
class PublishTicket(ProducerCommand):
    """Offer this ticket, with `ready_tokens` tokens ready, to the registered consumer.

    The offer waits until a consumer registers. The request has a lease or an open stream.
    """

    request: RequestId
    match_id: str
    """Match id of the request's push ticket; empty if the request had no push ticket."""
    ticket: str
    ready_tokens: int
    blocks: BlockIds = ()
    """Blocks of an open stream that are copied before the offer; used only with a host buffer."""


@dataclass(frozen=True, slots=True)
class FailPush(ProducerCommand):
    """A prefill has ended without blocks to offer: fail the consumer that has registered."""

    request: RequestId
    match_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class AbandonLease(ProducerCommand):
    """No reader will come for this request's blocks, because no consumer received the ticket."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class RevokeLease(ProducerCommand):
    """The KV of this request is out of date: end the lease even if readers are attached."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class ReleaseTicket(ProducerCommand):
    """The holder of ticket `serial` of this request has released the ticket."""

    request: RequestId
    serial: int


@dataclass(frozen=True, slots=True)
class ReleasePushTicket(ProducerCommand):
    """A router has ended the decode leg of a push: no reader will come unless it has registered."""

    match_id: str
