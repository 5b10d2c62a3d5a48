"""Requests whose KV is on its way here, and by which names they are found. Plain data; pure.

In pull a request comes with the ticket for its KV. In push it comes with an invitation: whom to ask for a ticket once there is one.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from kvferry.protocol.deadlines import Deadlines
from kvferry.protocol.fingerprints import Fingerprint, shared_prefix
from kvferry.protocol.messages import MAX_NAME_CHARS
from kvferry.protocol.placement import BlockPermutation
from kvferry.protocol.tickets import HOLE, Ticket
from kvferry.protocol.transfers import TransferState
from kvferry.types import Address, EngineId, EngineIncarnation, RequestId

__all__ = ["Arrival", "Destination", "Origin", "Outstanding", "PushInfo", "Transfer", "TransferTable", "WriteGrant", "reader_name"]


@dataclass(slots=True)
class WriteGrant:
    """Blocks that a producer may write into."""

    grant_id: int
    transport: str
    is_fenced: bool
    """The transport ends it when it is told to."""
    writers: set[int]
    """Ranks of the producer that may still write."""
    revoke_deadline: float | None = None
    """From when on nobody can be writing, whoever is silent; None: it is not being taken back."""
    left_tokens: int = 0
    early_bytes: int = 0
    """How much was left, and had come, when the prefill was over."""

    def note_end(self, left_tokens: int, early_bytes: int) -> None:
        """What one rank says of that."""
        self.left_tokens = max(self.left_tokens, left_tokens)
        self.early_bytes += early_bytes


@dataclass(slots=True)
class Destination:
    """The blocks a pull fills."""

    blocks: Sequence[Sequence[int]] = ()
    """Each group's table from token 0."""
    tokens: range = range(0)
    needed_from: Sequence[int] = ()
    """By group: no token before this one is ever looked at. Empty: all are."""
    give_up_at: float = 0.0
    permutations: tuple[BlockPermutation, ...] = ()
    """What is left to do with the blocks once their bytes are confirmed."""
    write_grant: WriteGrant | None = None
    """While the producer may write into them."""
    was_granted: bool = False
    """They are not lent a second time: what could not be written is read."""

    def filled_blocks(self, block_size: int) -> tuple[tuple[int, ...], ...]:
        """By group: the blocks that hold any of the tokens."""
        first, end = self.tokens.start // block_size, -(-self.tokens.stop // block_size)
        return tuple(tuple(block for block in group[first:end] if block != HOLE) for group in self.blocks)


@dataclass(slots=True)
class Arrival:
    """How far a prompt's KV has come that is read while it is computed, in tokens."""

    ready: dict[int, int] = field(default_factory=dict)
    """By rank of the producer: so many may be read there."""
    read_until: int = 0
    """So far it is here, or on its way."""
    landed_until: int = 0
    """So far it is here."""
    posted_bytes: int = 0
    landed_bytes: int = 0
    is_complete: bool = False
    """All that is wanted may be read."""
    last_serial: int = 0
    """Of an offer that was withdrawn: no earlier one counts any more."""
    max_ready: int = 0
    """Ready at all ranks together, before a withdrawal or after it."""
    progressed_at: float = 0.0
    """When there was last more than ever before. A producer that only repeats itself is not waited for."""

    def note(self, rank: int, ready: int, now: float) -> bool:
        """What a rank says is ready; False when it has said as much before."""
        if rank in self.ready and ready <= self.ready[rank]:
            return False
        self.ready[rank] = ready
        total = sum(self.ready.values())
        if total > self.max_ready:
            self.max_ready, self.progressed_at = total, now
        return True

    def post(self, end: int, num_bytes: int) -> None:
        """So many bytes more, which bring it up to this token, are on their way."""
        self.read_until = end
        self.posted_bytes += num_bytes

    def land(self) -> None:
        """All that was on its way is here."""
        self.landed_until, self.landed_bytes = self.read_until, self.posted_bytes

    def restarted(self, serial: int) -> "Arrival":
        """After what was offered with this serial was withdrawn."""
        return Arrival(last_serial=serial, max_ready=self.max_ready, progressed_at=self.progressed_at)


@dataclass(slots=True)
class Outstanding:
    """Ranks of the producer that we wait for."""

    ready_replies: set[int] = field(default_factory=set)
    """These have yet to say that their blocks are there to be read."""
    reads: set[int] = field(default_factory=set)
    """Bytes of these are on their way."""
    confirmations: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class PushInfo:
    """What a request has instead of a ticket while its KV is yet to be computed."""

    match_id: str
    tokens: Fingerprint
    """Of our prompt."""
    own_address: Address
    """Of our side channel."""
    push_ticket: str
    """As the router signed it: the producer looks at it too."""


@dataclass(slots=True)
class Origin:
    """Where a pull's KV comes from."""

    incarnation: EngineIncarnation
    address: Address
    """Of the producer's side channel."""
    tp_size: int
    ticket: Ticket | None = None
    ticket_text: str = ""
    push_info: PushInfo | None = None
    """There is one in push. Then the ticket is offered later."""
    is_optional: bool = False
    """The engine can do without: it wants to know whether it can be had before it has blocks for it."""

    @classmethod
    def of(cls, ticket: Ticket, text: str) -> "Origin":
        return cls(EngineIncarnation(ticket.engine_id, ticket.epoch_id), ticket.address, ticket.tp_size, ticket, text)

    @property
    def shared_tokens(self) -> int | None:
        """So many tokens of our prompt are surely those the ticket was issued for; None: that was checked when it arrived."""
        if self.push_info is None or self.ticket is None:
            return None
        return shared_prefix(self.ticket.tokens, self.push_info.tokens)


@dataclass(slots=True)
class Transfer:
    """One request's KV on its way here."""

    request: RequestId
    reader: str
    origin: Origin
    state: TransferState = TransferState.TRACKED
    is_attached: bool = False
    """Or registered, while there is no ticket."""
    announced_at: float = 0.0
    """When the producer was last told that we read, or are about to."""
    is_confirmed: bool = False
    to: Destination = field(default_factory=Destination)
    outstanding: Outstanding = field(default_factory=Outstanding)
    arrival: Arrival = field(default_factory=Arrival)
    read_error: str = ""
    """What made a read fail on its own."""
    reason: str = ""

    @property
    def incarnation(self) -> EngineIncarnation:
        return self.origin.incarnation

    @property
    def ticket(self) -> Ticket:
        assert self.origin.ticket is not None
        return self.origin.ticket

    @property
    def is_offered(self) -> bool:
        """Whether there is a ticket."""
        return self.origin.ticket is not None

    @property
    def lease(self) -> RequestId:
        """What heartbeats renew: the producer's lease, or our registration."""
        return self.ticket.lease if self.is_offered else RequestId(self.reader)

    @property
    def has_blocks(self) -> bool:
        return len(self.to.blocks) > 0

    def expects(self, ticket: Ticket) -> bool:
        """Whether this may be offered: the first ticket after the last withdrawal, or the same again."""
        is_ours = self.origin.push_info is not None and self.is_attached and self.to.write_grant is None
        if (ticket.engine_id, ticket.epoch_id) != (self.incarnation.engine, self.incarnation.epoch) or not is_ours:
            return False
        return ticket.serial == self.ticket.serial if self.is_offered else ticket.serial > self.arrival.last_serial

    def is_withdrawn(self, serial: int) -> bool:
        """What we said of an offer may have crossed its withdrawal; the answer to that is no news."""
        return not self.is_offered or self.ticket.serial != serial or self.state is TransferState.RETURNING


class TransferTable:
    """Every pull that is not over, by its request, its producer's life and its name as a reader."""

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
        return [self._transfers[request] for request in sorted(self._by_incarnation.get(incarnation, ()))]

    def of_leases(self, incarnation: EngineIncarnation, leases: Collection[str]) -> list[Transfer]:
        """Those that read one of these. Looks at all of the life's when there are any, so only bad news costs."""
        return [transfer for transfer in self.of_incarnation(incarnation) if transfer.lease in leases] if leases else []

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
        """Its producer was known by its address only, and has said which life it is."""
        self._leave_incarnation(transfer)
        transfer.origin.incarnation = incarnation
        self._by_incarnation.setdefault(incarnation, set()).add(transfer.request)

    def set_deadline(self, transfer: Transfer, at: float | None) -> None:
        """One that is over has none."""
        if at is None or self._transfers.get(transfer.request) is not transfer:
            self._deadlines.drop(transfer.request)
        else:
            self._deadlines.set(transfer.request, at)

    def take_overdue(self, now: float) -> list[Transfer]:
        """Those whose deadline has passed; they have none afterwards."""
        return [self._transfers[request] for request in self._deadlines.take_due(now)]

    def next_deadline(self) -> float | None:
        return self._deadlines.next()


def reader_name(engine: EngineId, request: RequestId, tp_rank: int) -> str:
    """A request on one of our ranks as the producer knows it: readable, and never longer than a name may be on the wire."""
    name = f"{engine}/{request}/{tp_rank}"
    if len(name) <= MAX_NAME_CHARS:
        return name
    return f"{engine[:64]}/{blake2b(name.encode(errors='replace'), digest_size=16).hexdigest()}"
