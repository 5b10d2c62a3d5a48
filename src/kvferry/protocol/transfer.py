"""One pull's life as a table: state and event to next state. A missing entry is our own bug. Pure.

TRACKED ── peer ready ──> READY ── blocks ──> MOVING ── moved ──> CONFIRMING ── confirmed ──> PLACING ── placed ──> DONE
   └────── blocks ──> WAITING ── peer ready ──^  │                    └─ trouble ─> FAILED        │ aborted
                                                 └──── trouble ────> STOPPING ─ ended ─> FAILED   └─> STOPPING
In push the producer may write instead:  WAITING ── writes granted ──> FILLING ── moved ──> RECLAIMING ── confirmed ──> PLACING

FILLING: the producer may write into our blocks at any time, and says when it has written all.
RECLAIMING: it has; once it certainly cannot write any more, the bytes may be used. DOOMED: trouble
came before the engine had blocks for it; it fails as soon as they are there. RETURNING: the
producer has taken back what it offered (it preempted the prefill), or cannot write; once nothing
moves, we wait for the next offer. STOPPING: given up, but something may still write into our
blocks, so they are not handed back yet. PLACING: the bytes are good, whatever becomes of the
producer now; they are put into our own order. Over at once where there is no need. ENDED: over
without ever having had blocks, so there is nothing to report.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from hashlib import blake2b

from kvferry.errors import LocalProtocolError, RemoteProtocolError
from kvferry.events import TransferTimes
from kvferry.protocol.fingerprints import Fingerprint, shared_prefix
from kvferry.protocol.heartbeats import Deadlines
from kvferry.protocol.layout import Geometry
from kvferry.protocol.messages import MAX_NAME_CHARS
from kvferry.protocol.peers import Peer
from kvferry.protocol.planning import BlockPermutation, Segments, plan_permutations, plan_read
from kvferry.protocol.tickets import HOLE, Ticket
from kvferry.types import Address, EngineId, EngineIncarnation, RequestId

__all__ = [
    "FAILURE_EVENTS",
    "FINAL",
    "TRANSITIONS",
    "Arrival",
    "Destination",
    "Origin",
    "Outstanding",
    "PushInfo",
    "Transfer",
    "TransferEvent",
    "TransferState",
    "TransferTable",
    "TransferTimings",
    "WriteGrant",
    "is_complete",
    "next_state",
    "next_tokens",
    "plan_reads",
    "reader_name",
    "tokens_to_read",
]


class TransferState(StrEnum):
    TRACKED = "tracked"
    READY = "ready"
    WAITING = "waiting"
    MOVING = "moving"
    FILLING = "filling"
    RECLAIMING = "reclaiming"
    RETURNING = "returning"
    STOPPING = "stopping"
    CONFIRMING = "confirming"
    PLACING = "placing"
    DOOMED = "doomed"
    DONE = "done"
    FAILED = "failed"
    ENDED = "ended"


class TransferEvent(StrEnum):
    PEER_READY = "peer ready"
    BLOCKS_ALLOCATED = "blocks allocated"
    WRITES_GRANTED = "writes granted"
    BYTES_MOVED = "bytes moved"
    MOVE_FAILED = "move failed"
    CONFIRMED = "confirmed"
    PLACED = "placed"
    PLACING_FAILED = "placing failed"
    WITHDRAWN = "withdrawn"
    REFUSED = "refused"
    PEER_LOST = "peer lost"
    DEADLINE_PASSED = "deadline passed"
    ABORTED = "aborted"
    SETTLED = "settled"
    """The engine has everything already; nothing to load."""


_S, _E = TransferState, TransferEvent
FINAL = frozenset({_S.DONE, _S.FAILED, _S.ENDED})
_LOSS = (_E.REFUSED, _E.PEER_LOST, _E.DEADLINE_PASSED)
FAILURE_EVENTS = frozenset({*_LOSS, _E.ABORTED, _E.MOVE_FAILED, _E.PLACING_FAILED})
"""Events that are the reason why a transfer is not done."""

TRANSITIONS: dict[tuple[TransferState, TransferEvent], TransferState] = {
    (_S.TRACKED, _E.PEER_READY): _S.READY,
    (_S.TRACKED, _E.BLOCKS_ALLOCATED): _S.WAITING,
    (_S.READY, _E.BLOCKS_ALLOCATED): _S.MOVING,
    (_S.WAITING, _E.PEER_READY): _S.MOVING,
    (_S.MOVING, _E.BYTES_MOVED): _S.CONFIRMING,
    (_S.MOVING, _E.MOVE_FAILED): _S.FAILED,
    (_S.STOPPING, _E.BYTES_MOVED): _S.FAILED,
    (_S.STOPPING, _E.MOVE_FAILED): _S.FAILED,
    (_S.STOPPING, _E.PLACED): _S.FAILED,
    (_S.STOPPING, _E.PLACING_FAILED): _S.FAILED,
    (_S.CONFIRMING, _E.CONFIRMED): _S.PLACING,
    (_S.PLACING, _E.PLACED): _S.DONE,
    (_S.PLACING, _E.PLACING_FAILED): _S.FAILED,
    (_S.PLACING, _E.ABORTED): _S.STOPPING,
    (_S.DOOMED, _E.BLOCKS_ALLOCATED): _S.FAILED,
    (_S.WAITING, _E.WRITES_GRANTED): _S.FILLING,
    (_S.FILLING, _E.BYTES_MOVED): _S.RECLAIMING,
    (_S.FILLING, _E.MOVE_FAILED): _S.RETURNING,
    (_S.RECLAIMING, _E.CONFIRMED): _S.PLACING,
    (_S.RECLAIMING, _E.ABORTED): _S.STOPPING,
    **{(_S.RECLAIMING, event): _S.RECLAIMING for event in _LOSS},
    **{(_S.FILLING, event): _S.STOPPING for event in (*_LOSS, _E.ABORTED)},
    (_S.READY, _E.WITHDRAWN): _S.TRACKED,
    (_S.TRACKED, _E.WITHDRAWN): _S.TRACKED,
    (_S.WAITING, _E.WITHDRAWN): _S.WAITING,
    (_S.MOVING, _E.WITHDRAWN): _S.RETURNING,
    (_S.CONFIRMING, _E.WITHDRAWN): _S.RETURNING,
    (_S.RETURNING, _E.BYTES_MOVED): _S.WAITING,
    (_S.RETURNING, _E.MOVE_FAILED): _S.WAITING,
    **{(_S.RETURNING, event): _S.STOPPING for event in (*_LOSS, _E.ABORTED)},
    **{(_S.TRACKED, event): _S.DOOMED for event in _LOSS},
    **{(_S.READY, event): _S.DOOMED for event in _LOSS},
    **{(_S.DOOMED, event): _S.DOOMED for event in _LOSS},
    **{(_S.WAITING, event): _S.FAILED for event in (*_LOSS, _E.ABORTED)},
    **{(_S.MOVING, event): _S.STOPPING for event in (*_LOSS, _E.ABORTED)},
    **{(_S.STOPPING, event): _S.STOPPING for event in (*_LOSS, _E.ABORTED)},
    **{(_S.PLACING, event): _S.PLACING for event in _LOSS},
    **{(_S.CONFIRMING, event): _S.FAILED for event in (*_LOSS, _E.ABORTED)},
    **{
        (state, event): _S.ENDED
        for state in (_S.TRACKED, _S.READY, _S.DOOMED)
        for event in (_E.ABORTED, _E.SETTLED)
    },
}


def next_state(state: TransferState, event: TransferEvent) -> TransferState:
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise LocalProtocolError(f"a transfer that is {state} cannot meet: {event}") from None


# -------------------- stopwatches -------------------- When each pull came how far, for whoever
# wants to see where a request's time went. Decides nothing. Pure.


_BEGAN = (TransferState.MOVING, TransferState.FILLING)
_MOVED = (TransferState.CONFIRMING, TransferState.RECLAIMING)


@dataclass(slots=True)
class TransferTimings:
    """One per pull that is not over."""

    _times: dict[RequestId, TransferTimes] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        return len(self._times)

    def start(self, request: RequestId, now: float) -> None:
        self._times[request] = TransferTimes(now)

    def note(
        self, request: RequestId, event: TransferEvent, state: TransferState, now: float
    ) -> None:
        """It met this and is in that state now. Of what happens again, after a withdrawal, the last
        time counts; of reading the first.
        """
        times = self._times.get(request)
        if times is None:
            return
        if event is TransferEvent.PEER_READY:
            times = replace(times, attached_at=now)
        elif event is TransferEvent.BLOCKS_ALLOCATED:
            times = replace(times, allocated_at=now)
        if state in _BEGAN and times.began_at is None:
            times = replace(times, began_at=now)
        elif state in _MOVED and event is TransferEvent.BYTES_MOVED:
            times = replace(times, moved_at=now)
        elif event is TransferEvent.CONFIRMED:
            times = replace(times, confirmed_at=now)
        self._times[request] = times

    def stop(self, request: RequestId) -> TransferTimes | None:
        return self._times.pop(request, None)


# -------------------- pulls --------------------
# Requests whose KV is on its way here, and by which names they are found. Plain data; pure.
#
# In pull a request comes with the ticket for its KV. In push it comes with an invitation: whom to
# ask for a ticket once there is one.


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
        return tuple(
            tuple(block for block in group[first:end] if block != HOLE) for group in self.blocks
        )


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
    """When there was last more than ever before. A producer that only repeats itself is not waited
    for.
    """

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
        return Arrival(
            last_serial=serial, max_ready=self.max_ready, progressed_at=self.progressed_at
        )


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
    """The engine can do without: it wants to know whether it can be had before it has blocks for
    it.
    """

    @classmethod
    def of(cls, ticket: Ticket, text: str) -> "Origin":
        return cls(
            EngineIncarnation(ticket.engine_id, ticket.epoch_id),
            ticket.address,
            ticket.tp_size,
            ticket,
            text,
        )

    @property
    def shared_tokens(self) -> int | None:
        """So many tokens of our prompt are surely those the ticket was issued for; None: that was
        checked when it arrived.
        """
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
        """Whether this may be offered: the first ticket after the last withdrawal, or the same
        again.
        """
        is_ours = (
            self.origin.push_info is not None and self.is_attached and self.to.write_grant is None
        )
        if (ticket.engine_id, ticket.epoch_id) != (
            self.incarnation.engine,
            self.incarnation.epoch,
        ) or not is_ours:
            return False
        return (
            ticket.serial == self.ticket.serial
            if self.is_offered
            else ticket.serial > self.arrival.last_serial
        )

    def is_withdrawn(self, serial: int) -> bool:
        """What we said of an offer may have crossed its withdrawal; the answer to that is no
        news.
        """
        return (
            not self.is_offered
            or self.ticket.serial != serial
            or self.state is TransferState.RETURNING
        )


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
        return [
            self._transfers[request]
            for request in sorted(self._by_incarnation.get(incarnation, ()))
        ]

    def of_leases(self, incarnation: EngineIncarnation, leases: Collection[str]) -> list[Transfer]:
        """Those that read one of these. Looks at all of the life's when there are any, so only bad
        news costs.
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
    """A request on one of our ranks as the producer knows it: readable, and never longer than a
    name may be on the wire.
    """
    name = f"{engine}/{request}/{tp_rank}"
    if len(name) <= MAX_NAME_CHARS:
        return name
    return f"{engine[:64]}/{blake2b(name.encode(errors='replace'), digest_size=16).hexdigest()}"


# -------------------- read plans --------------------
# What one pull reads from each of its producer's ranks. Pure.


def next_tokens(wanted: range, done_until: int, ready: int, granularity: int) -> range:
    """What can be moved now and has not been. Where there is more to come, whole blocks of both
    sides: so many tokens.
    """
    if ready < wanted.stop:
        ready = ready // granularity * granularity
    start = max(wanted.start, done_until)
    return range(start, max(start, min(ready, wanted.stop)))


def tokens_to_read(ours: Geometry, transfer: Transfer, peer: Peer) -> range:
    """What can be read now and has not been."""
    if transfer.origin.push_info is None:
        return transfer.to.tokens
    granularity = max(ours.block_size, transfer.ticket.block_size)
    return next_tokens(
        transfer.to.tokens, transfer.arrival.read_until, _ready_tokens(transfer, peer), granularity
    )


def is_complete(transfer: Transfer, peer: Peer) -> bool:
    """Whether all that is wanted may be read, or all that there will ever be."""
    if transfer.origin.push_info is None or not transfer.is_offered:
        return transfer.origin.push_info is None
    return _ready_tokens(transfer, peer) >= min(transfer.to.tokens.stop, transfer.ticket.num_tokens)


def _ready_tokens(transfer: Transfer, peer: Peer) -> int:
    """Each rank says for itself how far it has come."""
    return min((transfer.arrival.ready.get(rank, 0) for rank in peer.rank_mappings), default=0)


def plan_reads(
    ours: Geometry, transfer: Transfer, peer: Peer, tokens: range
) -> dict[int, list[Segments]]:
    """By rank, the KV of these tokens. The pull is told what is to be put in order once all is
    here. RemoteProtocolError when the ticket does not fit.
    """
    to, ticket = transfer.to, transfer.ticket
    visited = {rank: peer.geometries[rank] for rank in peer.rank_mappings}
    for geometry in visited.values():
        if geometry.block_size != ticket.block_size:
            raise RemoteProtocolError(
                f"the ticket counts blocks of {ticket.block_size} tokens, its engine's hold "
                f"{geometry.block_size}"
            )
    shared = transfer.origin.shared_tokens
    if shared is not None and shared < to.tokens.stop:
        raise RemoteProtocolError(
            f"the prefill was of another prompt: {shared} tokens are known to be the same, "
            f"{to.tokens.stop} are needed"
        )
    to.permutations = tuple(plan_permutations(ours, list(visited.values()), to.blocks, to.tokens))
    return {
        rank: plan_read(
            ours,
            geometry,
            peer.rank_mappings[rank].heads,
            to.blocks,
            ticket.block_ids(),
            tokens,
            to.needed_from,
        )
        for rank, geometry in visited.items()
    }
