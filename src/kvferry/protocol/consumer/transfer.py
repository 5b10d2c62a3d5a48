"""The data of each transfer, and the table that finds a transfer by request, peer, reader or lease.

In pull a request arrives with the ticket for its KV. In push a request arrives with `PushInfo`,
which names the producer that will issue a ticket once KV is ready. Pure: the caller passes `now`
(local monotonic seconds).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from hashlib import blake2b

from kvferry.events import TransferTimes
from kvferry.protocol.consumer.states import BEFORE_READING, TransferEvent, TransferState
from kvferry.protocol.fingerprints import Fingerprint, shared_prefix
from kvferry.protocol.heartbeats import Deadlines
from kvferry.protocol.messages import MAX_NAME_CHARS
from kvferry.protocol.planning.plan import BlockPermutation
from kvferry.protocol.tickets import NO_BLOCK, Ticket
from kvferry.types import Address, BlockIds, EngineId, EngineIncarnation, RequestId

_BEGAN = (TransferState.MOVING, TransferState.FILLING)
_MOVED = (TransferState.CONFIRMING, TransferState.AWAITING_REVOKED)


@dataclass(slots=True)
class WriteGrant:
    """Permission for a producer to write into the blocks of one transfer."""

    grant_id: int
    transport: str
    is_fenced: bool
    """Whether our side of the transport can reject writes after the grant is revoked."""
    writers: set[int]
    """Producer ranks that may still write."""
    revoke_deadline: float | None = None
    """Time after which even a silent producer is assumed to write no more; None while the grant is
    not being revoked.
    """
    left_tokens: int = 0
    """Tokens that had not landed when the prefill ended; the maximum over all ranks."""
    early_bytes: int = 0
    """Bytes that had landed when the prefill ended; the sum over all ranks."""

    def note_end(self, left_tokens: int, early_bytes: int) -> None:
        """Add the figures from the last `Written` of one rank."""
        self.left_tokens = max(self.left_tokens, left_tokens)
        self.early_bytes += early_bytes


@dataclass(slots=True)
class Destination:
    """The blocks that a transfer fills, and the deadline and write grant of those blocks."""

    blocks: BlockIds = ()
    """Block table of each group, starting at token 0."""
    tokens: range = range(0)
    """Token positions whose KV the transfer fetches."""
    needed_from: Sequence[int] = ()
    """First token of each group that attention will read; empty means token 0 for every group."""
    give_up_at: float = 0.0
    """Time at which the whole transfer fails, whatever deadline its current state has."""
    permutations: tuple[BlockPermutation, ...] = ()
    """How to rearrange the blocks into our order once the bytes are confirmed."""
    write_grant: WriteGrant | None = None
    """The write grant on the blocks, in force in the states `GRANTED`. There is no second grant: if
    the writes fail, the consumer reads.
    """

    def filled_blocks(self, block_size: int) -> BlockIds:
        """Return, by group, the blocks that hold any of the tokens."""
        first, end = self.tokens.start // block_size, -(-self.tokens.stop // block_size)
        return tuple(
            tuple(block for block in group[first:end] if block != NO_BLOCK) for group in self.blocks
        )


@dataclass(slots=True)
class Arrival:
    """Progress, in tokens, of a transfer that may be read while the prefill still computes.

    0 ........ landed_until ........ read_until ........ min(ready) ........ prompt end
    |  in our blocks  |  read posted  |  ready at P   |  not computed yet   |
    """

    ready: dict[int, int] = field(default_factory=dict)
    """Number of tokens that may be read, by producer rank."""
    read_until: int = 0
    """End of the tokens for which a read was posted or has landed."""
    landed_until: int = 0
    """End of the tokens that are in our blocks."""
    posted_bytes: int = 0
    landed_bytes: int = 0
    is_complete: bool = False
    """Whether every token that the transfer wants may be read."""
    last_serial: int = 0
    """Serial of the last withdrawn offer; only offers with a higher serial are accepted."""
    max_ready: int = 0
    """Highest sum of ready tokens over all ranks, across withdrawals."""
    progressed_at: float = 0.0
    """Time when `max_ready` last rose. A producer that is preempted again and again and recomputes
    the same tokens does not extend the deadline.
    """

    def note(self, rank: int, ready: int, now: float) -> bool:
        """Record a rank's number of ready tokens; False if the number has not risen."""
        if rank in self.ready and ready <= self.ready[rank]:
            return False
        self.ready[rank] = ready
        total = sum(self.ready.values())
        if total > self.max_ready:
            self.max_ready, self.progressed_at = total, now
        return True

    def post(self, end: int, num_bytes: int) -> None:
        """Record a posted read of `num_bytes` bytes, up to token `end`."""
        self.read_until = end
        self.posted_bytes += num_bytes

    def land(self) -> None:
        """Record that every posted read has landed."""
        self.landed_until, self.landed_bytes = self.read_until, self.posted_bytes

    def restarted(self, serial: int) -> "Arrival":
        """Return the progress to start with after the offer with this serial was withdrawn."""
        return Arrival(
            last_serial=serial, max_ready=self.max_ready, progressed_at=self.progressed_at
        )


@dataclass(slots=True)
class Outstanding:
    """Producer ranks that the transfer waits for."""

    ready_replies: set[int] = field(default_factory=set)
    """Ranks that have not sent `Ready` yet."""
    reads: set[int] = field(default_factory=set)
    """Ranks with a read in flight."""
    confirmations: set[int] = field(default_factory=set)
    """Ranks that have not answered `Confirm` yet."""


@dataclass(frozen=True, slots=True)
class PushInfo:
    """What a push request carries instead of a ticket until the producer has computed KV."""

    match_id: str
    tokens: Fingerprint
    """Fingerprint of our prompt."""
    own_address: Address
    """Address of our side channel."""
    push_ticket: str
    """The push ticket as the router signed it; the producer verifies the signature as well."""


@dataclass(slots=True)
class Origin:
    """The producer that a transfer's KV comes from, and the ticket or push info for the KV."""

    incarnation: EngineIncarnation
    address: Address
    """Address of the producer's side channel."""
    tp_size: int
    ticket: Ticket | None = None
    """The ticket for the KV; None in push until the producer's offer has arrived."""
    ticket_text: str = ""
    push_info: PushInfo | None = None
    """Set in push, where the producer offers the ticket later; None in pull."""
    is_optional: bool = False
    """Whether the engine can compute the KV itself. Then the engine waits for a reservation or a
    refusal before it allocates blocks.
    """

    @classmethod
    def of(cls, ticket: Ticket, text: str, *, is_optional: bool = False) -> "Origin":
        return cls(
            ticket.incarnation,
            ticket.address,
            ticket.tp_size,
            ticket,
            text,
            is_optional=is_optional,
        )

    @property
    def shared_tokens(self) -> int | None:
        """Number of leading tokens that our prompt certainly shares with the ticket's prompt.

        None in pull, where the prompt was checked when the ticket arrived.
        """
        if self.push_info is None or self.ticket is None:
            return None
        return shared_prefix(self.ticket.tokens, self.push_info.tokens)


class ReaderStatus(StrEnum):
    """How the producer knows the reader of a transfer.

    The status is no part of `TransferState`: a lost connection resets the status in any state.
    """

    UNKNOWN = "unknown"
    """Not registered and not attached yet, or the connection was lost since."""
    REGISTERED = "registered"
    """The producer will offer a ticket. Heartbeats renew the registration."""
    ATTACHED = "attached"
    """The producer has accepted the ticket. Heartbeats renew the lease."""
    RELEASED = "released"
    """The producer has detached the reader, because the transfer has all bytes."""


@dataclass(slots=True)
class Transfer:
    """One request's KV on its way into our blocks."""

    request: RequestId
    reader: str
    origin: Origin
    times: TransferTimes
    """When the transfer reached each stage, for metrics and logs. Affects no decision."""
    state: TransferState = TransferState.TRACKED
    reader_status: ReaderStatus = ReaderStatus.UNKNOWN
    announced_at: float = 0.0
    """Time of the last `Attach` or read announcement to the producer."""
    to: Destination = field(default_factory=Destination)
    outstanding: Outstanding = field(default_factory=Outstanding)
    arrival: Arrival = field(default_factory=Arrival)
    read_error: str = ""
    """Error of a read that the transport failed, as opposed to a read that we stopped."""
    reason: str = ""
    """Why the transfer fails; the first reason wins."""

    @property
    def incarnation(self) -> EngineIncarnation:
        return self.origin.incarnation

    @property
    def ticket(self) -> Ticket:
        assert self.origin.ticket is not None
        return self.origin.ticket

    @property
    def is_offered(self) -> bool:
        """Whether the transfer has a ticket."""
        return self.origin.ticket is not None

    @property
    def is_known_to_producer(self) -> bool:
        """Whether the producer holds a registration or a lease for this reader."""
        return self.reader_status in (ReaderStatus.REGISTERED, ReaderStatus.ATTACHED)

    @property
    def lease(self) -> RequestId:
        """The name that heartbeats renew: the producer's lease or, without a ticket, our
        registration.
        """
        return self.ticket.lease if self.is_offered else RequestId(self.reader)

    @property
    def has_blocks(self) -> bool:
        return len(self.to.blocks) > 0

    def note_time(self, event: TransferEvent, now: float) -> None:
        """Record the time of `event`, which put the transfer into its state.

        After a withdrawal a stage happens again. Then the last time counts, except for `began_at`
        and `allocated_at`, which keep the first.
        """
        times = self.times
        if event is TransferEvent.PEER_READY:
            times = replace(times, attached_at=now)
        elif event is TransferEvent.BLOCKS_ALLOCATED and times.allocated_at is None:
            times = replace(times, allocated_at=now)
        if self.state in _BEGAN and times.began_at is None:
            times = replace(times, began_at=now)
        elif self.state in _MOVED and event is TransferEvent.BYTES_MOVED:
            times = replace(times, moved_at=now)
        elif self.state is TransferState.PLACING:
            times = replace(times, confirmed_at=now)
        self.times = times

    def expects(self, ticket: Ticket) -> bool:
        """Return whether an offer of this ticket is acceptable.

        Acceptable are the first ticket after the last withdrawal, and later offers of that ticket.
        """
        if self.origin.push_info is None or ticket.incarnation != self.incarnation:
            return False
        match self.reader_status:
            case ReaderStatus.REGISTERED:
                return self.state in BEFORE_READING and ticket.serial > self.arrival.last_serial
            case ReaderStatus.ATTACHED:
                return ticket.serial == self.ticket.serial
            case _:
                return False

    def is_withdrawn(self, serial: int) -> bool:
        """Return whether the ticket with this serial is no longer current.

        Our message about an offer may cross the withdrawal of that offer; the producer then
        refuses the message, and the caller must ignore the refusal.
        """
        return (
            not self.is_offered
            or self.ticket.serial != serial
            or self.state is TransferState.RETURNING
        )


class TransferTable:
    """Every transfer that has not ended, by request, by producer incarnation and by reader name."""

    def __init__(self) -> None:
        self._transfers: dict[RequestId, Transfer] = {}
        self._by_incarnation: dict[EngineIncarnation, set[RequestId]] = {}
        self._by_reader: dict[str, RequestId] = {}
        self._deadlines: Deadlines[RequestId] = Deadlines()

    def __len__(self) -> int:
        return len(self._transfers)

    def get(self, request: RequestId) -> Transfer | None:
        return self._transfers.get(request)

    def of_reader(self, reader: str) -> Transfer | None:
        request = self._by_reader.get(reader)
        return None if request is None else self._transfers[request]

    def of_incarnation(self, incarnation: EngineIncarnation) -> list[Transfer]:
        return [
            self._transfers[request]
            for request in sorted(self._by_incarnation.get(incarnation, ()))
        ]

    def of_leases(self, incarnation: EngineIncarnation, leases: Collection[str]) -> list[Transfer]:
        """Return the transfers of this incarnation that read one of these leases.

        The scan over the incarnation's transfers runs only when `leases` is not empty, so a
        heartbeat reply that reports no lost lease costs nothing.
        """
        return (
            [transfer for transfer in self.of_incarnation(incarnation) if transfer.lease in leases]
            if leases
            else []
        )

    def incarnations(self) -> set[EngineIncarnation]:
        return set(self._by_incarnation)

    def add(self, transfer: Transfer) -> None:
        self._transfers[transfer.request] = transfer
        self._by_reader[transfer.reader] = transfer.request
        self._by_incarnation.setdefault(transfer.incarnation, set()).add(transfer.request)

    def remove(self, transfer: Transfer) -> None:
        del self._transfers[transfer.request], self._by_reader[transfer.reader]
        self._leave_incarnation(transfer)
        self._deadlines.drop(transfer.request)

    def _leave_incarnation(self, transfer: Transfer) -> None:
        members = self._by_incarnation[transfer.incarnation]
        members.discard(transfer.request)
        if not members:
            del self._by_incarnation[transfer.incarnation]

    def move(self, transfer: Transfer, incarnation: EngineIncarnation) -> None:
        """File a transfer under the incarnation of a producer that was known only by address."""
        self._leave_incarnation(transfer)
        transfer.origin.incarnation = incarnation
        self._by_incarnation.setdefault(incarnation, set()).add(transfer.request)

    def set_deadline(self, transfer: Transfer, at: float | None) -> None:
        """Set or clear the deadline of a transfer; a transfer that has ended gets no deadline."""
        if at is None or self._transfers.get(transfer.request) is not transfer:
            self._deadlines.drop(transfer.request)
        else:
            self._deadlines.set(transfer.request, at)

    def take_overdue(self, now: float) -> list[Transfer]:
        """Return the transfers whose deadline has passed, and clear those deadlines."""
        return [self._transfers[request] for request in self._deadlines.take_due(now)]

    def next_deadline(self) -> float | None:
        return self._deadlines.next()


def reader_name(engine: EngineId, request: RequestId, tp_rank: int) -> str:
    """Return the name by which the producer knows a request on one of our ranks.

    The name is readable, unless that would exceed the maximum length on the wire; then it is a
    hash.
    """
    name = f"{engine}/{request}/{tp_rank}"
    if len(name) <= MAX_NAME_CHARS:
        return name
    return f"{engine[:64]}/{blake2b(name.encode(errors='replace'), digest_size=16).hexdigest()}"


def next_tokens(wanted: range, done_until: int, ready: int, granularity: int) -> range:
    """Return the wanted tokens that are ready and have not been moved yet.

    While the prefill is incomplete, the range ends at a multiple of `granularity` tokens, so that
    only whole blocks of both sides are moved.
    """
    if ready < wanted.stop:
        ready = ready // granularity * granularity
    start = max(wanted.start, done_until)
    return range(start, max(start, min(ready, wanted.stop)))
