"""The consumer fetches the KV blocks of a request from a producer and reports the result.

The consumer tracks a request from its arrival in the engine, reads when the engine has allocated
blocks, asks the producer for confirmation, and reports the transfer. The engine may use the blocks
only after every producer rank that was read from has answered `Confirmed`. The answer means that
the lease was alive when the last byte arrived, so the bytes belong to the ticket
(docs/decisions/002-confirm-after-read.md). Blocks that arrived in the producer's order are then
rearranged into our order.

In push the ticket arrives later. The consumer registers the request with the producer. Then
either the producer offers a ticket when KV is ready to read, or the consumer grants the producer
write access to the blocks and the producer writes (`receiving.py`,
docs/decisions/030-push.md).

Every input (a command, a message, a completion, a passed deadline) posts events of transfers to one
queue. One loop, `_process_events`, takes the events from the queue, looks up the next state in
`TRANSITIONS` and calls the `ON_ENTER` function of that state, which may post further events.

Pure: the caller feeds commands, messages and completions, passes `now` (local monotonic seconds),
and takes actions and events.
"""

import math
from collections.abc import Sequence

from kvferry.events import TransferFailed, TransferTimes
from kvferry.protocol.consumer.context import ConsumerContext, ConsumerSettings, ProducerClient
from kvferry.protocol.consumer.receiving import (
    ON_ENTER,
    attach,
    contact_producer,
    extend_deadline,
    lose_peer,
)
from kvferry.protocol.consumer.states import (
    BEFORE_READING,
    FAILURE_EVENTS,
    GRANTED,
    IGNORED,
    REVOKING_STATES,
    TRANSITIONS,
    TransferEvent,
    TransferState,
    next_state,
)
from kvferry.protocol.consumer.transfer import (
    Destination,
    Origin,
    ReaderStatus,
    Transfer,
    reader_name,
)
from kvferry.protocol.consumer.write_grants import receive_write_report, revoke
from kvferry.protocol.heartbeats import earliest
from kvferry.protocol.messages import (
    Confirmed,
    HandshakeRefused,
    HandshakeReply,
    HeartbeatReply,
    PushWithdrawal,
    Ready,
    Refused,
    Revoked,
    ToConsumer,
    WriteFailed,
    Written,
)
from kvferry.protocol.outbox import Outbox
from kvferry.protocol.peers import LostPeer, PeerTable, PeerUser
from kvferry.protocol.tickets import Ticket
from kvferry.types import BlockIds, EngineIncarnation, Epoch, PeerId, RequestId

_E = TransferEvent
# In CONFIRMING, `Confirmed` or `Refused` is in flight and is the more precise answer. In the other
# two the producer has withdrawn the lease or dropped the registration, as expected.
_LEASE_MAY_END = (TransferState.CONFIRMING, TransferState.RETURNING, TransferState.RETURNING_BLOCKS)


class Consumer:
    """State machine of every transfer into this rank, and of the peers the transfers come from."""

    def __init__(self, settings: ConsumerSettings) -> None:
        self.outbox = Outbox()
        """Actions and events of the consumer and all its parts."""
        self.peers = PeerTable(settings.peers, self.outbox)
        self._client = ProducerClient(
            EngineIncarnation(settings.engine, settings.epoch or Epoch("")),
            self.peers,
            settings.lease_ttl_s,
            self.outbox,
        )
        self._context = ConsumerContext(settings, self.peers, self._client, self.outbox)
        self._settings = settings
        self._transfers = self._context.transfers

    @property
    def num_transfers(self) -> int:
        return len(self._transfers)

    def may_be_written(self, transport: str) -> bool:
        """Return whether a producer may be writing into our blocks with this transport."""
        return len(self._transfers) > 0 and transport in self._settings.writable_transports

    def add_peer_user(self, user: PeerUser) -> None:
        """Notify `user` of ready and lost peers, and never evict a peer that `user` still uses."""
        self._context.peer_users.append(user)

    # -- commands from the engine --

    def track(self, request: RequestId, origin: Origin, now: float) -> None:
        """Attach a request that arrived with a valid ticket and keep its lease alive from now on;
        or register a push request, whose KV the producer is about to compute.

        A request that is tracked already is ignored. For an optional request, `ReservationGranted`
        or `ReservationRefused` follows before the engine allocates blocks.
        """
        if self._transfers.get(request) is not None:
            return
        origin.incarnation = self.peers.resolve_incarnation(origin.incarnation, origin.address)
        transfer = Transfer(
            request,
            reader_name(self._settings.engine, request, self._settings.peers.geometry.tp_rank),
            origin,
            TransferTimes(now),
        )
        self._transfers.add(transfer)
        self._transfers.set_deadline(transfer, now + self._settings.queue_timeout_s)
        peer = self.peers.ensure(transfer.incarnation, origin.address, origin.tp_size, now)
        if isinstance(peer, LostPeer):
            self._context.post(transfer, _E.PEER_LOST, peer.reason)
        else:
            contact_producer(self._context, transfer, now)
        self._process_events(now)

    def start(
        self,
        request: RequestId,
        blocks: BlockIds,
        tokens: range,
        now: float,
        needed_from: Sequence[int] = (),
    ) -> None:
        """Fill the engine's newly allocated blocks; see `Destination` for the arguments."""
        transfer = self._transfers.get(request)
        if transfer is None:
            self.outbox.report(
                TransferFailed(
                    request, "the transfer was not announced before its blocks were allocated"
                )
            )
            return
        transfer.to = Destination(blocks, tokens, needed_from)
        transfer.arrival.progressed_at = now
        extend_deadline(self._context, transfer, now)
        self._context.post(transfer, _E.BLOCKS_ALLOCATED)
        self._process_events(now)

    def settle(self, request: RequestId, now: float) -> None:
        """Tell the producer to free its blocks, because the engine needs no KV from the producer.

        A request that has blocks already is ignored.
        """
        self._leave(request, _E.SETTLED, now)

    def abort(
        self, request: RequestId, now: float, reason: str = "the request was aborted"
    ) -> None:
        """End a transfer whose KV the engine will not use.

        If the request has blocks, `TransferFailed` follows once nothing can write into the blocks.
        """
        self._leave(request, _E.ABORTED, now, reason)

    def _leave(
        self, request: RequestId, event: TransferEvent, now: float, reason: str = ""
    ) -> None:
        transfer = self._transfers.get(request)
        if transfer is not None and (event is _E.ABORTED or not transfer.has_blocks):
            self._context.post(transfer, event, reason)
            self._process_events(now)

    # -- messages and completions --

    def receive(self, address: str, message: ToConsumer, now: float) -> None:
        match message:
            case HandshakeReply() | HandshakeRefused():
                lost = self.peers.receive(message, now)
                self._apply_renames(now)
                self._lose(lost)
            case Ready():
                self._receive_ready(address, message)
            case HeartbeatReply():
                self._receive_heartbeat_reply(address, message)
            case Confirmed():
                self._receive_confirmed(address, message)
            case Refused():
                self._receive_refused(message)
            case PushWithdrawal():
                self._receive_withdrawal(message)
            case Written() | WriteFailed() | Revoked():
                receive_write_report(self._context, address, message, now)
        self._process_events(now)

    def offered(
        self,
        address: str,
        reader: str,
        ticket: Ticket,
        ticket_text: str,
        ready_tokens: int,
        now: float,
    ) -> None:
        """Handle a `PushOffer`: one producer rank has `ready_tokens` tokens ready to read.

        Every producer rank sends its own offers, and repeats them while the prefill computes. The
        first offer from any rank makes the consumer attach.
        """
        transfer, peer_id = self._transfers.of_reader(reader), self.peers.at(address)
        if (
            transfer is None
            or peer_id is None
            or transfer.incarnation != peer_id.incarnation
            or not transfer.expects(ticket)
        ):
            return
        peer = self.peers.get(transfer.incarnation)
        assert peer is not None
        if not transfer.arrival.note(peer_id.tp_rank, ready_tokens, now):
            return
        is_first = transfer.reader_status is ReaderStatus.REGISTERED
        if is_first:
            self._client.stop_heartbeats(transfer)
        transfer.origin.ticket, transfer.origin.ticket_text = ticket, ticket_text
        extend_deadline(self._context, transfer, now)
        if is_first:
            attach(self._context, transfer, peer, now)
        elif transfer.state is TransferState.CAUGHT_UP:
            self._context.post(transfer, _E.TOKENS_READY)
        self._process_events(now)

    def disconnected(self, address: str, now: float) -> None:
        for lost in self.peers.disconnected(address, now):
            self._lose(lost)
        self._process_events(now)

    def peer_opened(self, peer_id: PeerId, transport: str, now: float) -> None:
        peer = self.peers.opened(peer_id, transport)
        if peer is None:
            return
        for transfer in self._transfers.of_incarnation(peer.incarnation):
            grant = transfer.to.write_grant
            if transfer.state in BEFORE_READING:
                contact_producer(self._context, transfer, now)
            elif transfer.state in REVOKING_STATES and grant is not None and not grant.is_fenced:
                revoke(self._context, transfer, now)
        self._process_events(now)
        # Detach only after the waiting transfers have attached: a detach message settles the lease,
        # and the waiting transfers may share that lease.
        self._client.send_deferred_detaches(peer)
        for user in self._context.peer_users:
            user.peer_ready(peer, now)

    def peer_unreachable(self, peer_id: PeerId, reason: str, now: float) -> None:
        self._lose(self.peers.lose(peer_id.incarnation, reason, now))
        self._process_events(now)

    def read_ended(
        self, request: RequestId, peer_id: PeerId, error: str | None, now: float
    ) -> None:
        """Handle the end of one read; the transport no longer writes into the blocks of the read.

        With several producer ranks, the transfer advances when the last read has ended.
        """
        transfer = self._transfers.get(request)
        if transfer is None or peer_id.tp_rank not in transfer.outstanding.reads:
            return
        transfer.outstanding.reads.discard(peer_id.tp_rank)
        if error is None and not transfer.outstanding.reads:
            transfer.arrival.land()
        reason = f"reading from the producer failed: {error}"
        is_moving = transfer.state is TransferState.MOVING
        if error is not None and is_moving:
            transfer.read_error = reason
        event = None
        if not transfer.outstanding.reads:
            is_part = is_moving and transfer.arrival.read_until < transfer.to.tokens.stop
            moved = _E.PART_MOVED if is_part else _E.BYTES_MOVED
            event = moved if error is None else _E.MOVE_FAILED
        elif error is not None and is_moving:
            event = _E.READ_FAILED
        if event is not None:
            self._context.post(transfer, event, reason)
            self._process_events(now)

    def writes_revoked(self, request: RequestId, grant_id: int, now: float) -> None:
        """Handle the end of a `RevokeWrites` action: no write under this grant id can land now."""
        transfer = self._transfers.get(request)
        if (
            transfer is not None
            and transfer.state in REVOKING_STATES
            and transfer.to.write_grant is not None
            and transfer.to.write_grant.grant_id == grant_id
        ):
            self._context.post(transfer, _E.WRITES_REVOKED)
            self._process_events(now)

    def placed(self, request: RequestId, error: str | None, now: float) -> None:
        """Handle the end of a `PlaceBlocks` action; nothing writes into the blocks any more."""
        transfer = self._transfers.get(request)
        if transfer is not None:
            event = _E.PLACED if error is None else _E.PLACING_FAILED
            self._context.post(
                transfer, event, f"rearranging the blocks into this engine's layout failed: {error}"
            )
            self._process_events(now)

    def advance(self, now: float, engine_seen_at: float = math.inf) -> None:
        """Act on every deadline that has passed.

        `engine_seen_at` is when our engine last showed that it is alive. Heartbeats hold blocks of
        a producer for the engine, so an engine that hangs must not have them renewed for ever.
        """
        for lost in self.peers.advance(now):
            self._lose(lost)
        for peer_id in self._client.heartbeats.lost(now):
            reason = "the producer no longer answers heartbeats"
            self._lose(self.peers.lose(peer_id.incarnation, reason, now))
        # The deadline of a transfer whose producer is lost may no longer apply.
        self._process_events(now)
        for transfer in self._transfers.take_overdue(now):
            if transfer.state in REVOKING_STATES:
                revoke(self._context, transfer, now)
            else:
                reason = self._settings.overdue_reason(transfer, now)
                self._context.post(transfer, _E.DEADLINE_PASSED, reason)
        self._process_events(now)
        if now < engine_seen_at + self._settings.step_timeout_s:
            self._client.send_heartbeats(now)
        else:
            # The leases run out: the engine that needs the KV may never use it.
            self._client.heartbeats.skip_due(now)
        self.peers.evict_idle(
            now,
            self._transfers.incarnations().union(
                *(user.incarnations() for user in self._context.peer_users)
            ),
        )

    def next_deadline(self) -> float | None:
        return earliest(
            self._transfers.next_deadline(),
            self.peers.next_deadline(),
            self._client.heartbeats.next_deadline(),
        )

    # -- internals --

    def _process_events(self, now: float) -> None:
        """Apply every queued event to its transfer, in order, including events posted meanwhile.

        An input posts at most one event per transfer, and an `ON_ENTER` function at most one for
        the transfer that has entered the state. So no event waits while its transfer advances.
        """
        context = self._context
        while context.queue:
            transfer, event, reason = context.queue.popleft()
            if (transfer.state, event) in IGNORED:
                continue
            transfer.state = next_state(transfer.state, event)
            transfer.note_time(event, now)
            if event in FAILURE_EVENTS:
                transfer.reason = transfer.reason or reason
            ON_ENTER[transfer.state](context, transfer, now)

    def _lose(self, lost: LostPeer | None) -> None:
        if lost is not None:
            lose_peer(self._context, lost)

    def _apply_renames(self, now: float) -> None:
        """Move transfers from a peer known only by address to the incarnation the handshake named.

        The incarnation may belong to a peer that is connected already; then attach at once.
        """
        for old, new in self.peers.take_renamed():
            peer = self.peers.get(new)
            for transfer in self._transfers.of_incarnation(old):
                self._transfers.move(transfer, new)
                if peer is not None and transfer.state in BEFORE_READING:
                    contact_producer(self._context, transfer, now)
            self._client.rename(old, new)
            self._process_events(now)
            if peer is not None and peer.is_ready:
                self._client.send_deferred_detaches(peer)

    def _receive_heartbeat_reply(self, address: str, message: HeartbeatReply) -> None:
        peer_id = self.peers.at(address)
        if peer_id is None or peer_id.epoch != message.epoch:
            return
        self._client.heartbeats.answered(peer_id, message.beat)
        for transfer in self._transfers.of_leases(peer_id.incarnation, set(message.gone)):
            # A rank that has not sent its own offer yet may not have opened the lease yet either.
            is_ahead = (
                transfer.is_offered
                and transfer.origin.push_info is not None
                and peer_id.tp_rank not in transfer.arrival.ready
            )
            # A rank that has sent its last `Written` has dropped the registration by design.
            is_through = (
                transfer.state in GRANTED
                and transfer.to.write_grant is not None
                and peer_id.tp_rank not in transfer.to.write_grant.writers
            )
            if transfer.state not in _LEASE_MAY_END and not is_ahead and not is_through:
                lost = (
                    "the producer's lease ran out"
                    if transfer.is_offered
                    else "the producer no longer has the registration"
                )
                self._context.post(transfer, _E.REFUSED, lost)

    def _receive_ready(self, address: str, message: Ready) -> None:
        transfer = self._transfers.of_reader(message.reader)
        if transfer is not None and transfer.state in BEFORE_READING and transfer.is_offered:
            waited_for = transfer.outstanding.ready_replies
            self._receive_last(address, message, transfer, waited_for, _E.PEER_READY)

    def _receive_confirmed(self, address: str, message: Confirmed) -> None:
        transfer = self._transfers.of_reader(message.reader)
        if transfer is not None and transfer.state is TransferState.CONFIRMING:
            waited_for = transfer.outstanding.confirmations
            self._receive_last(address, message, transfer, waited_for, _E.CONFIRMED)

    def _receive_last(
        self,
        address: str,
        message: Ready | Confirmed,
        transfer: Transfer,
        waited_for: set[int],
        event: TransferEvent,
    ) -> None:
        """Post the event when the last of the ranks `waited_for` has answered."""
        rank = self.peers.rank_at(transfer.incarnation, address, waited_for)
        if rank is None or transfer.lease != message.lease:
            return
        waited_for.discard(rank)
        if not waited_for:
            self._context.post(transfer, event)

    def _receive_refused(self, message: Refused) -> None:
        transfer = self._transfers.of_reader(message.reader)
        if transfer is None or (message.serial and transfer.is_withdrawn(message.serial)):
            return
        self._context.post(transfer, _E.REFUSED, f"the producer refused: {message.reason}")

    def _receive_withdrawal(self, message: PushWithdrawal) -> None:
        transfer = self._transfers.of_reader(message.reader)
        if (
            transfer is not None
            and (transfer.state, _E.WITHDRAWN) in TRANSITIONS
            and transfer.origin.push_info is not None
            and transfer.is_offered
            and transfer.ticket.serial == message.serial
        ):
            self._context.post(transfer, _E.WITHDRAWN)
