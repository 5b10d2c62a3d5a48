"""The producer's writes in push: writes prefills into the blocks of readers, and tracks progress.

A registration with a write grant makes the producer write for the reader. The producer performs a
handshake with the reader's engine, as with every peer. When the matcher has joined the registration
with a prefill, the producer writes the ready tokens, one write at a time:

    registered ── offered ──> writing <──> waiting for tokens ── all landed ──> done
                                 └─ withdrawn: start again with the next offer,
                                    or fail if a write was in flight
    from any state: revoked, not renewed, failed ──> gone

A write that was cut off may land later, so the producer writes nothing into the same blocks again
before the consumer has revoked the grant. If a write is impossible, the producer sends
`WriteFailed`; the consumer then revokes the grant and reads.

Landed writes are confirmed in a later tick, after the engine's commands of the later tick were
executed: if the engine has reused the blocks during the write, a command has revoked the lease by
then. See docs/decisions/030-push.md.

Pure: the caller passes `now` and performs the actions.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.errors import RemoteProtocolError
from kvferry.protocol.actions import StartWrite, StopWrite
from kvferry.protocol.consumer.transfer import next_tokens, reader_name
from kvferry.protocol.fingerprints import shared_prefix
from kvferry.protocol.heartbeats import Deadlines, earliest
from kvferry.protocol.messages import (
    PushRegistration,
    Revoke,
    Revoked,
    WriteFailed,
    WriteGrantInfo,
    Written,
)
from kvferry.protocol.outbox import Outbox
from kvferry.protocol.peers import UNKNOWN_EPOCH, LostPeer, Peer, PeerTable
from kvferry.protocol.planning.heads import RankMapping, can_divide, rank_mappings
from kvferry.protocol.planning.plan import Segments, check_prefill, plan_read
from kvferry.protocol.producer.push_matcher import MAX_LEASES_WAITED
from kvferry.protocol.tickets import MAX_TP_SIZE, Ticket
from kvferry.types import Address, EngineId, EngineIncarnation, Epoch, PeerId, RequestId, Route

MAX_WRITERS = 20_000
"""Maximum number of readers that we write for; further ones get `WriteFailed` and read instead."""


class Landed(NamedTuple):
    """A reader whose wanted tokens have all landed in its blocks."""

    request: RequestId
    reader: str


@dataclass(slots=True)
class _Progress:
    """Progress, in tokens, of writing one prefill into the blocks of one reader."""

    ticket: Ticket
    ready: int
    """Number of tokens that the prefill has computed and published."""
    posted_until: int
    """End of the tokens for which a write was posted."""
    landed_until: int
    """End of the tokens that are in the reader's blocks."""
    landed_bytes: int = 0
    at_end: tuple[int, int] | None = None
    """Tokens that had not landed, and bytes that had landed, when the prefill ended; None while
    the prefill computes.
    """


@dataclass(slots=True)
class _Writing:
    """One reader that we write for, with its write grant."""

    reader: str
    route: Route
    incarnation: EngineIncarnation
    lease: WriteGrantInfo
    """The write grant from the registration."""
    lease_ttl_s: float
    """How long the grant lasts without a heartbeat."""
    sibling_ranks: tuple[str, ...]
    progress: _Progress | None = None
    posted: int = 0
    """Number of the write in flight; 0 if there is none."""

    @property
    def wanted(self) -> range:
        return range(self.lease.first_token, self.lease.end_token)


class _Posted(NamedTuple):
    """A write in flight."""

    writing: _Writing
    progress: _Progress
    until: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerSettings:
    """Settings of a producer."""

    engine: EngineId
    epoch: Epoch
    lease_ttl_s: float
    """Duration of a new lease."""
    lease_extension_s: float
    """How far an attach or a heartbeat extends a lease."""
    grant_wait_s: float
    """How long a reader with a genuine ticket waits for the grant of the lease."""
    write_timeout_s: float = 30.0
    """Maximum duration of one write in push."""
    leg_wait_s: float = 30.0
    """How long a registration waits for its prefill leg to arrive at the engine."""
    uses_host_buffer: bool = False
    """Whether readers read a copy of the blocks in host memory."""
    peer_addresses: frozenset[str] = frozenset()
    """Side channels (host:port) of push consumers that may register by request id, without a push
    ticket.
    """


@dataclass(slots=True)
class PushWriter:
    """Writes prefills into the blocks of the readers that have granted write access."""

    settings: ProducerSettings
    peers: PeerTable
    """All peers of this transfer worker. The table's owner calls `peer_ready` and `peer_lost`."""
    outbox: Outbox
    _writings: dict[str, _Writing] = field(default_factory=dict, init=False)
    _by_incarnation: dict[EngineIncarnation, set[str]] = field(default_factory=dict, init=False)
    _posted: dict[int, _Posted] = field(default_factory=dict, init=False)
    """Writes in flight by number, including writes for readers that we no longer write for."""
    _last_write: int = field(default=0, init=False)
    _write_deadlines: Deadlines[int] = field(default_factory=Deadlines, init=False)
    _stopping: dict[tuple[str, int], Route | None] = field(default_factory=dict, init=False)
    """Dropped readers with a write in flight, by reader and grant id. The value is the route for
    `Revoked`, or None while the consumer has not asked.
    """
    _landed: dict[str, None] = field(default_factory=dict, init=False)
    _renewals: Deadlines[str] = field(default_factory=Deadlines, init=False)

    def __len__(self) -> int:
        return len(self._writings)

    @property
    def num_posted(self) -> int:
        return len(self._posted)

    # -- registrations --

    def register(self, route: Route, message: PushRegistration, now: float) -> None:
        """Handle a registration, with or without a write grant; an earlier grant of the reader
        ends.
        """
        self.drop(message.reader)
        lease = message.write
        if lease is None:
            return
        incarnation = EngineIncarnation(
            EngineId(message.decode_engine_id), Epoch(message.decode_epoch)
        )
        rank_mapping = self._rank_mapping(message)
        if (
            self.settings.uses_host_buffer
            or rank_mapping is None
            or incarnation.engine == self.settings.engine
            or len(self._writings) >= MAX_WRITERS
        ):
            reason = "this producer cannot write to the decode engine"
            self.outbox.reply(route, WriteFailed(message.reader, lease.grant_id, reason))
            return
        names = (
            reader_name(incarnation.engine, RequestId(message.request_id), rank)
            for rank in rank_mapping.consumer_ranks
        )
        sibling_ranks = tuple(name for name in names if name != message.reader)
        lease_ttl_s = min(message.lease_ttl_s, MAX_LEASES_WAITED * self.settings.lease_ttl_s)
        self._writings[message.reader] = _Writing(
            message.reader, route, incarnation, lease, lease_ttl_s, sibling_ranks
        )
        self._by_incarnation.setdefault(incarnation, set()).add(message.reader)
        self._renewals.set(message.reader, now + lease_ttl_s)
        peer = self.peers.ensure(
            incarnation,
            Address(message.decode_host, message.decode_port),
            message.decode_tp_size,
            now,
        )
        if isinstance(peer, LostPeer):
            self.fail(message.reader, f"the decode engine cannot be reached: {peer.reason}")

    def _rank_mapping(self, message: PushRegistration) -> RankMapping | None:
        """Return what this reader needs from our rank; None if we cannot write for this reader.

        The reader applies the same rule to find the producer ranks to register with.
        """
        lease, tp_size = message.write, message.decode_tp_size
        if (
            lease is None
            or not lease.tp_rank < tp_size <= MAX_TP_SIZE
            or not all(can_divide(count, tp_size) for count in self.peers.geometry.head_counts)
            or message.decode_epoch == UNKNOWN_EPOCH
        ):
            return None
        try:
            lease.tokens.check()
        except RemoteProtocolError:
            return None
        return self._rank_mapping_of(lease.tp_rank, tp_size)

    def _rank_mapping_of(self, rank: int, tp_size: int) -> RankMapping | None:
        ours = self.peers.geometry
        return next(
            (
                each
                for each in rank_mappings(rank, tp_size, ours.tp_size, *ours.head_counts)
                if each.rank == ours.tp_rank
            ),
            None,
        )

    def has(self, reader: str) -> bool:
        return reader in self._writings

    def sibling_ranks_of(self, reader: str) -> tuple[str, ...]:
        return self._writings[reader].sibling_ranks

    def renew(self, readers: Iterable[str], now: float) -> list[RequestId]:
        """Renew the grants of readers; returns the requests being written for the readers."""
        known = [self._writings[reader] for reader in readers if reader in self._writings]
        for writing in known:
            self._renewals.set(writing.reader, now + writing.lease_ttl_s)
        return [writing.progress.ticket.lease for writing in known if writing.progress is not None]

    def revoke(self, route: Route, message: Revoke) -> None:
        """Stop writing under a grant; answer `Revoked` now, or when the write in flight ends."""
        writing = self._writings.get(message.reader)
        if writing is not None and writing.lease.grant_id == message.grant_id:
            self.drop(message.reader)
        key = message.reader, message.grant_id
        if key in self._stopping:
            self._stopping[key] = route
        else:
            self.outbox.reply(route, Revoked(*key))

    def drop(self, reader: str) -> None:
        """Stop writing for a reader; an unknown reader is ignored."""
        writing = self._writings.pop(reader, None)
        if writing is None:
            return
        members = self._by_incarnation[writing.incarnation]
        members.discard(reader)
        if not members:
            del self._by_incarnation[writing.incarnation]
        self._renewals.drop(reader)
        self._landed.pop(reader, None)
        if writing.posted:
            self._stopping[reader, writing.lease.grant_id] = None
            self.outbox.perform(StopWrite(writing.posted))

    # -- prefills --

    def offer(self, reader: str, ticket: Ticket, ready: int, is_over: bool, now: float) -> None:
        """Write the `ready` tokens of a prefill; `is_over` says that the prefill has ended."""
        writing = self._writings[reader]
        progress = writing.progress
        if progress is None or progress.ticket.serial != ticket.serial:
            start = writing.lease.first_token
            progress = writing.progress = _Progress(ticket, ready, start, start)
        progress.ticket, progress.ready = ticket, ready
        if is_over and progress.at_end is None:
            progress.at_end = writing.lease.end_token - progress.landed_until, progress.landed_bytes
        self._write_next(writing, now)

    def withdraw(self, reader: str) -> None:
        """Reset the progress of a reader whose prefill was preempted and will be computed again.

        A write in flight reads blocks that the engine reuses, so the reader then gets
        `WriteFailed`.
        """
        writing = self._writings[reader]
        writing.progress = None
        self._landed.pop(reader, None)
        if writing.posted:
            self.fail(reader, "the prefill was preempted while its blocks were being written")

    # -- peers and completions --

    def peer_ready(self, peer: Peer, now: float) -> None:
        for reader in sorted(self._by_incarnation.get(peer.incarnation, ())):
            self._write_next(self._writings[reader], now)

    def peer_lost(self, lost: LostPeer) -> None:
        for reader in sorted(self._by_incarnation.get(lost.incarnation, ())):
            self.fail(reader, f"the decode engine cannot be reached: {lost.reason}")

    def incarnations(self) -> set[EngineIncarnation]:
        return set(self._by_incarnation)

    def write_ended(self, write: int, error: str | None, now: float) -> None:
        """Handle the end of a write; the write no longer touches our memory or the peer's."""
        posted = self._posted.pop(write)
        self._write_deadlines.drop(write)
        writing, progress = posted.writing, posted.progress
        writing.posted = 0
        key = writing.reader, writing.lease.grant_id
        if self._writings.get(writing.reader) is not writing:
            route = self._stopping.pop(key, None)
            if route is not None:
                self.outbox.reply(route, Revoked(*key))
        elif error is not None:
            self.fail(writing.reader, f"the write failed: {error}")
        else:
            progress.landed_until = posted.until
            progress.landed_bytes += posted.num_bytes
            if posted.until < writing.lease.end_token:
                self.outbox.reply(writing.route, Written(*key, tokens=posted.until, is_last=False))
            self._write_next(writing, now)

    def advance(self, now: float) -> list[str]:
        """Stop overdue writes, and drop the readers that have not renewed their grant.

        Returns the dropped readers.
        """
        for write in self._write_deadlines.take_due(now):
            self.outbox.perform(StopWrite(write))
        silent = self._renewals.take_due(now)
        for reader in silent:
            self.drop(reader)
        return silent

    def take_landed(self) -> list[Landed]:
        """Return the readers whose last write had landed by the end of the previous tick.

        The caller must execute the engine's commands of this tick first.
        """
        landed = [self._writings[reader] for reader in self._landed]
        self._landed.clear()
        return [
            Landed(each.progress.ticket.lease, each.reader)
            for each in landed
            if each.progress is not None
        ]

    @property
    def has_landed(self) -> bool:
        return bool(self._landed)

    def finish(self, reader: str) -> None:
        """Send the last `Written`: the lease was held until now, so the landed bytes are valid."""
        writing = self._writings[reader]
        progress = writing.progress
        assert progress is not None
        left, early = progress.at_end or (0, progress.landed_bytes)
        message = Written(
            reader,
            writing.lease.grant_id,
            writing.lease.end_token,
            is_last=True,
            left_tokens=left,
            early_bytes=early,
        )
        self.outbox.reply(writing.route, message)
        self.drop(reader)

    def fail(self, reader: str, reason: str) -> None:
        """Send `WriteFailed` to the consumer and stop writing for the reader."""
        writing = self._writings.get(reader)
        if writing is not None:
            self.outbox.reply(writing.route, WriteFailed(reader, writing.lease.grant_id, reason))
            self.drop(reader)

    def next_deadline(self) -> float | None:
        return earliest(self._renewals.next(), self._write_deadlines.next())

    # -- internals --

    def _write_next(self, writing: _Writing, now: float) -> None:
        """Write the tokens that are ready and not written yet.

        Does nothing while the peer is not ready or a write for this reader is in flight.
        """
        progress, peer = writing.progress, self.peers.get(writing.incarnation)
        if progress is None or writing.posted or peer is None or not peer.is_ready:
            return
        if progress.posted_until >= writing.lease.end_token:
            self._landed[writing.reader] = None
            return
        try:
            tokens, segments = self._plan(writing, progress, peer)
        except RemoteProtocolError as error:
            self.fail(writing.reader, str(error))
            return
        if not tokens:
            return
        progress.posted_until = tokens.stop
        self._last_write += 1
        writing.posted = write = self._last_write
        self._posted[write] = _Posted(
            writing, progress, tokens.stop, sum(part.total_bytes for part in segments)
        )
        self._write_deadlines.set(write, now + self.settings.write_timeout_s)
        lease = writing.lease
        target = PeerId(writing.incarnation.engine, writing.incarnation.epoch, lease.tp_rank)
        self.outbox.perform(
            StartWrite(write, target, lease.transport, tuple(segments), lease.grant_id)
        )

    def _plan(
        self, writing: _Writing, progress: _Progress, peer: Peer
    ) -> tuple[range, list[Segments]]:
        """Return the tokens and segments to write now.

        Raises RemoteProtocolError if the grant does not fit the peer or the prefill.
        """
        lease, ticket, ours = writing.lease, progress.ticket, self.peers.geometry
        theirs = peer.geometries.get(lease.tp_rank)
        if theirs is None or peer.transports.get(lease.tp_rank) != lease.transport:
            raise RemoteProtocolError(
                f"{lease.transport} does not reach rank {lease.tp_rank} of the decode engine"
            )
        last_group = max(region.group for region in theirs.regions)
        if (
            lease.needed_from
            and not len(lease.needed_from) == len(lease.local_block_ids) > last_group
        ):
            raise RemoteProtocolError("the write grant names other groups than it has blocks for")
        shared = shared_prefix(ticket.tokens, lease.tokens)
        check_prefill(ours, ticket.num_tokens, shared, lease.end_token)
        tokens = next_tokens(
            writing.wanted,
            progress.posted_until,
            progress.ready,
            max(ours.block_size, theirs.block_size),
        )
        if self._rank_mapping_of(lease.tp_rank, theirs.tp_size) is None:
            raise RemoteProtocolError(
                f"rank {lease.tp_rank} of the decode engine shares no heads with rank "
                f"{ours.tp_rank}"
            )
        # Plan the consumer's read with the consumer's planner, then swap the two sides.
        plan = plan_read(
            theirs,
            ours,
            lease.local_block_ids,
            ticket.block_ids(),
            tokens,
            lease.needed_from,
        )
        return tokens, [part.swapped() for part in plan]
