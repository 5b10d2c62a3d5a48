"""The consumer fetches the KV blocks of a request from a producer and reports the result.

The consumer tracks a request from its arrival in the engine, reads when the engine has allocated
blocks, asks the producer for confirmation, and reports the transfer. The engine may use the blocks
only after every producer rank that was read from has answered `Confirmed`. The answer means that
the lease was alive when the last byte arrived, so the bytes belong to the ticket
(docs/decisions/002-confirm-after-read.md). Blocks that arrived in the producer's order are then
rearranged into our order.

In push the ticket arrives later. The consumer registers the request with the producer. Then
either the producer offers a ticket when KV is ready to read, or the consumer grants the producer
write access to the blocks and the producer writes (`protocol/receiving.py`,
docs/decisions/030-push.md).

Pure: the caller feeds commands, messages and completions, passes `now` (local monotonic seconds),
and takes actions and events.
"""

from collections.abc import Sequence
from dataclasses import replace

from kvferry.events import Event, HandshakeFailed, TransferFailed, TransferFinished
from kvferry.protocol.actions import Action, PlaceBlocks
from kvferry.protocol.consumer_context import ConsumerContext, ConsumerSettings, ProducerClient
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
from kvferry.protocol.peers import LostPeer, Peer, PeerTable, PeerUser
from kvferry.protocol.receiving import REVOKING, Reading, Reservations, WriteGrants
from kvferry.protocol.tickets import Ticket
from kvferry.protocol.transfer import (
    FAILURE_EVENTS,
    FINAL,
    TRANSITIONS,
    Destination,
    Origin,
    PushInfo,
    Transfer,
    TransferEvent,
    TransferState,
    TransferTable,
    TransferTimings,
    next_state,
    reader_name,
)
from kvferry.types import Address, EngineIncarnation, Epoch, PeerId, RequestId

__all__ = ["Consumer"]

_E = TransferEvent
_BEFORE_READING = (TransferState.TRACKED, TransferState.WAITING)


class Consumer:
    """State machine of every transfer into this rank, and of the peers the transfers come from."""

    def __init__(self, settings: ConsumerSettings) -> None:
        self._settings = settings
        self._actions: list[Action] = []
        self._peers = PeerTable(settings.peers, self._actions)
        self._transfers = TransferTable()
        self._client = ProducerClient(
            EngineIncarnation(settings.engine, settings.epoch or Epoch("")),
            self._peers,
            settings.registration_s,
            self._actions,
        )
        self._peer_users: list[PeerUser] = []
        self._events: list[Event] = []
        self._timings = TransferTimings()
        context = ConsumerContext(
            settings,
            self._peers,
            self._transfers,
            self._client,
            self._actions,
            self._events,
            self._handle_event,
        )
        self._reading, self._write_grants, self._reservations = (
            Reading(context),
            WriteGrants(context),
            Reservations(context),
        )

    @property
    def num_transfers(self) -> int:
        return len(self._transfers)

    def may_be_written(self, transport: str) -> bool:
        """Return whether a producer may be writing into our blocks with this transport."""
        return len(self._transfers) > 0 and transport in self._settings.writable_transports

    @property
    def num_peers(self) -> int:
        return len(self._peers)

    @property
    def peers(self) -> PeerTable:
        return self._peers

    def add_peer_user(self, user: PeerUser) -> None:
        """Notify `user` of ready and lost peers, and never evict a peer that `user` still uses."""
        self._peer_users.append(user)

    # -- commands from the engine --

    def track(self, request: RequestId, ticket: Ticket, ticket_text: str, now: float) -> None:
        """Attach a request that arrived with a valid ticket and keep its lease alive from now on.

        A request that is tracked already is ignored.
        """
        self._begin(request, Origin.of(ticket, ticket_text), now)

    def track_optional(
        self, request: RequestId, ticket: Ticket, ticket_text: str, now: float
    ) -> None:
        """Track a request that can also be computed locally if the KV is not available.

        `ReservationGranted` or `ReservationRefused` follows before the engine allocates blocks.
        """
        self._begin(request, replace(Origin.of(ticket, ticket_text), is_optional=True), now)

    def expect(
        self,
        request: RequestId,
        incarnation: EngineIncarnation,
        address: Address,
        tp_size: int,
        push_info: PushInfo,
        now: float,
    ) -> None:
        """Register a push request whose KV the producer at `address` is about to compute.

        A request that is tracked already is ignored.
        """
        self._begin(request, Origin(incarnation, address, tp_size, push_info=push_info), now)

    def _begin(self, request: RequestId, origin: Origin, now: float) -> None:
        if self._transfers.get(request) is not None:
            return
        origin.incarnation = self._peers.resolve_incarnation(origin.incarnation, origin.address)
        transfer = Transfer(
            request,
            reader_name(self._settings.engine, request, self._settings.peers.geometry.tp_rank),
            origin,
        )
        self._transfers.add(transfer)
        self._timings.start(request, now)
        peer = self._peers.ensure(transfer.incarnation, origin.address, origin.tp_size, now)
        if isinstance(peer, LostPeer):
            self._handle_event(transfer, _E.PEER_LOST, now, peer.reason)
        elif peer.is_ready:
            self._attach_or_register(transfer, peer, now)

    def start(
        self,
        request: RequestId,
        blocks: Sequence[Sequence[int]],
        tokens: range,
        now: float,
        needed_from: Sequence[int] = (),
    ) -> None:
        """Fill the engine's newly allocated blocks with the KV of the token positions `tokens`.

        `blocks` holds the block table of each group, starting at token 0. `needed_from` holds the
        first token of each group that attention will read; an empty sequence means token 0 for
        every group.
        """
        transfer = self._transfers.get(request)
        if transfer is None:
            self._events.append(
                TransferFailed(request, "the transfer was not announced before its blocks")
            )
            return
        transfer.to = Destination(blocks, tokens, needed_from)
        transfer.arrival.progressed_at = now
        self._reading.extend_deadline(transfer, now)
        self._handle_event(transfer, _E.BLOCKS_ALLOCATED, now, transfer.reason)
        peer = self._peers.get(transfer.incarnation)
        if (
            transfer.state is TransferState.WAITING
            and peer is not None
            and peer.is_ready
            and self._write_grants.can_grant(transfer, peer)
        ):
            self._write_grants.grant_writes(transfer, peer, now)

    def settle(self, request: RequestId, now: float) -> None:
        """Tell the producer to free its blocks, because the engine needs no KV from the producer.

        A request that has blocks already is ignored.
        """
        self._leave(request, _E.SETTLED, now)

    def abort(self, request: RequestId, now: float) -> None:
        """End a request that the engine has aborted.

        If the request has blocks, `TransferFailed` follows once nothing can write into the blocks.
        """
        self._leave(request, _E.ABORTED, now)

    def _leave(self, request: RequestId, event: TransferEvent, now: float) -> None:
        transfer = self._transfers.get(request)
        if transfer is not None and (event is _E.ABORTED or not transfer.has_blocks):
            self._handle_event(transfer, event, now, "the request was aborted")

    # -- messages and completions --

    def receive(self, address: str, message: ToConsumer, now: float) -> None:
        match message:
            case HandshakeReply() | HandshakeRefused():
                lost = self._peers.receive(message, now)
                self._apply_renames(now)
                self._lost(lost, now)
            case Ready():
                self._receive_ready(address, message, now)
            case HeartbeatReply():
                self._receive_heartbeat_reply(address, message, now)
            case Confirmed():
                self._reading.receive_confirmed(address, message, now)
            case Refused():
                self._receive_refused(message, now)
            case PushWithdrawal():
                self._receive_withdrawal(message, now)
            case Written() | WriteFailed() | Revoked():
                self._write_grants.receive(address, message, now)

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
        transfer, peer_id = self._transfers.of_reader(reader), self._peers.at(address)
        if (
            transfer is None
            or peer_id is None
            or transfer.incarnation != peer_id.incarnation
            or not transfer.expects(ticket)
        ):
            return
        peer = self._peers.get(transfer.incarnation)
        assert peer is not None
        if not transfer.arrival.note(peer_id.tp_rank, ready_tokens, now):
            return
        is_first = not transfer.is_offered
        if is_first:
            self._client.stop_heartbeats(transfer)
        transfer.origin.ticket, transfer.origin.ticket_text = ticket, ticket_text
        self._reading.extend_deadline(transfer, now)
        if is_first:
            self._attach(transfer, peer, now)
        elif transfer.state is TransferState.MOVING and not transfer.outstanding.reads:
            self._reading.start(transfer, now)

    def disconnected(self, address: str, now: float) -> None:
        for lost in self._peers.disconnected(address, now):
            self._lost(lost, now)

    def peer_opened(self, peer_id: PeerId, transport: str, now: float) -> None:
        peer = self._peers.opened(peer_id, transport)
        if peer is None:
            return
        for transfer in self._transfers.of_incarnation(peer.incarnation):
            if transfer.state in _BEFORE_READING:
                self._attach_or_register(transfer, peer, now)
            elif transfer.to.write_grant is not None and not transfer.to.write_grant.is_fenced:
                self._write_grants.revoke(transfer, now)
        # Detach only after the waiting transfers have attached: a detach message settles the lease,
        # and the waiting transfers may share that lease.
        self._client.send_deferred_detaches(peer)
        for user in self._peer_users:
            user.peer_ready(peer, now)

    def peer_unreachable(self, peer_id: PeerId, reason: str, now: float) -> None:
        self._lost(self._peers.lose(peer_id.incarnation, reason, now), now)

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
        if error is not None and transfer.state is TransferState.MOVING:
            transfer.read_error = reason
        if transfer.outstanding.reads:
            if error is not None and transfer.state is TransferState.MOVING:
                self._handle_event(transfer, _E.REFUSED, now, reason)
        elif (
            error is None
            and transfer.state is TransferState.MOVING
            and transfer.arrival.read_until < transfer.to.tokens.stop
        ):
            self._reading.start(transfer, now)
        else:
            self._handle_event(
                transfer, _E.BYTES_MOVED if error is None else _E.MOVE_FAILED, now, reason
            )
        if transfer.read_error and not transfer.outstanding.reads:
            # The transport may have closed the connection for good. Drop the peer, so that the next
            # request starts a new handshake.
            self._lost(self._peers.lose(transfer.incarnation, transfer.read_error, now), now)

    def writes_revoked(self, request: RequestId, grant_id: int, now: float) -> None:
        """Handle the end of a `RevokeWrites` action: no write under this grant id can land now."""
        transfer = self._transfers.get(request)
        if (
            transfer is not None
            and transfer.to.write_grant is not None
            and transfer.to.write_grant.grant_id == grant_id
        ):
            self._write_grants.finish_revoke(transfer, now)

    def placed(self, request: RequestId, error: str | None, now: float) -> None:
        """Handle the end of a `PlaceBlocks` action; nothing writes into the blocks any more."""
        transfer = self._transfers.get(request)
        if transfer is not None:
            event = _E.PLACED if error is None else _E.PLACING_FAILED
            self._handle_event(
                transfer, event, now, f"putting the blocks into our order failed: {error}"
            )

    def advance(self, now: float) -> None:
        """Act on every deadline that has passed."""
        for lost in self._peers.advance(now):
            self._lost(lost, now)
        for peer_id in self._client.silent_peers(now):
            self._lost(
                self._peers.lose(
                    peer_id.incarnation, "the producer no longer answers heartbeats", now
                ),
                now,
            )
        for transfer in self._transfers.take_overdue(now):
            if transfer.to.write_grant is not None and transfer.state in REVOKING:
                self._write_grants.revoke(transfer, now)
                continue
            self._handle_event(
                transfer, _E.DEADLINE_PASSED, now, self._settings.overdue_reason(transfer, now)
            )
        self._client.send_heartbeats(now)
        self._peers.evict_idle(
            now,
            self._transfers.incarnations().union(
                *(user.incarnations() for user in self._peer_users)
            ),
        )

    def next_deadline(self) -> float | None:
        deadlines = (
            self._transfers.next_deadline(),
            self._peers.next_deadline(),
            self._client.next_deadline(),
        )
        return min((at for at in deadlines if at is not None), default=None)

    def take_actions(self) -> list[Action]:
        """Return the pending actions, including the peer table's, in the order to perform them."""
        actions = list(self._actions)
        self._actions.clear()
        return actions

    def take_events(self) -> list[Event]:
        events = list(self._events)
        self._events.clear()
        return events

    # -- internals --

    def _handle_event(
        self, transfer: Transfer, event: TransferEvent, now: float, reason: str
    ) -> None:
        """Advance the state machine of a transfer and perform the entry action of the new state."""
        before, transfer.state = transfer.state, next_state(transfer.state, event)
        self._timings.note(transfer.request, event, transfer.state, now)
        # In PLACING and RECLAIMING every byte has arrived, so a lost peer or a refusal is harmless
        # there and must not become the reason of a later failure.
        if event in FAILURE_EVENTS and transfer.state not in (
            TransferState.PLACING,
            TransferState.RECLAIMING,
        ):
            transfer.reason = transfer.reason or reason
        self._reservations.note(transfer, before, now)
        match transfer.state:
            case TransferState.MOVING:
                self._reading.start(transfer, now)
            case state if state in REVOKING and transfer.to.write_grant is not None:
                self._write_grants.begin_revoke(transfer, before, now)
            case TransferState.STOPPING if before is not TransferState.STOPPING:
                self._reading.give_up(transfer, now)
            case TransferState.CONFIRMING:
                self._reading.ask_confirmation(transfer, now)
            case TransferState.PLACING if before is not TransferState.PLACING:
                self._place(transfer, now)
            case TransferState.DOOMED if before is not TransferState.DOOMED:
                # A doomed transfer may wait a long time for its blocks, only to fail then. Detach
                # now, so that no producer rank holds blocks for the transfer meanwhile.
                self._client.send_detach(transfer)
            case TransferState.RETURNING if not transfer.outstanding.reads:
                self._handle_event(transfer, _E.BYTES_MOVED, now, "")
            case TransferState.RETURNING:
                self._reading.stop(transfer)
            case state if state in _BEFORE_READING and (
                event is _E.WITHDRAWN or before is TransferState.RETURNING
            ):
                self._restart(transfer, now)
            case state if state in FINAL:
                self._end(transfer)

    def _apply_renames(self, now: float) -> None:
        """Move transfers from a peer known only by address to the incarnation the handshake named.

        The incarnation may belong to a peer that is connected already; then attach at once.
        """
        for old, new in self._peers.take_renamed():
            self._client.rename(old, new)
            peer = self._peers.get(new)
            for transfer in self._transfers.of_incarnation(old):
                self._transfers.move(transfer, new)
                if peer is not None and peer.is_ready and transfer.state in _BEFORE_READING:
                    self._attach_or_register(transfer, peer, now)
            if peer is not None and peer.is_ready:
                self._client.send_deferred_detaches(peer)

    def _attach_or_register(self, transfer: Transfer, peer: Peer, now: float) -> None:
        if transfer.is_offered:
            self._attach(transfer, peer, now)
        elif transfer.state is TransferState.WAITING and self._write_grants.can_grant(
            transfer, peer
        ):
            self._write_grants.grant_writes(transfer, peer, now)
        else:
            self._client.register(transfer, peer, self._settings.peers.geometry.tp_size, now)

    def _attach(self, transfer: Transfer, peer: Peer, now: float) -> None:
        self._client.attach(transfer, peer, now)
        transfer.outstanding.ready_replies = {
            rank for rank in peer.rank_mappings if peer.layouts[rank].uses_host_buffer
        }
        self._reservations.await_answers(transfer, peer, now)
        if not transfer.outstanding.ready_replies:
            self._handle_event(transfer, _E.PEER_READY, now, "")

    def _restart(self, transfer: Transfer, now: float) -> None:
        """Reset a transfer whose offer was withdrawn and register it again for the next offer."""
        peer = self._peers.get(transfer.incarnation)
        assert peer is not None
        self._client.stop_heartbeats(transfer)
        transfer.arrival = transfer.arrival.restarted(
            transfer.ticket.serial if transfer.is_offered else transfer.arrival.last_serial
        )
        transfer.outstanding.ready_replies.clear()
        transfer.origin.ticket, transfer.origin.ticket_text = None, ""
        # The reads were cancelled because of the withdrawal; a later failure has another reason.
        transfer.reason = ""
        self._reading.extend_deadline(transfer, now)
        self._attach_or_register(transfer, peer, now)

    def _place(self, transfer: Transfer, now: float) -> None:
        # The bytes are confirmed and the producer is no longer involved. The rest is local work
        # without a deadline: the blocks go back to the engine when nothing writes into them.
        transfer.is_confirmed = True
        self._transfers.set_deadline(transfer, None)
        self._client.stop_heartbeats(transfer)
        if transfer.to.permutations or self._settings.uses_host_buffer:
            blocks = (
                transfer.to.filled_blocks(self._settings.peers.geometry.block_size)
                if self._settings.uses_host_buffer
                else ()
            )
            self._actions.append(PlaceBlocks(transfer.request, transfer.to.permutations, blocks))
        else:
            self._handle_event(transfer, _E.PLACED, now, "")

    def _end(self, transfer: Transfer) -> None:
        self._transfers.remove(transfer)
        times = self._timings.stop(transfer.request)
        if transfer.state is TransferState.DONE:
            self._events.append(TransferFinished(transfer.request, times))
            return
        if not transfer.is_confirmed:
            self._client.send_detach(transfer)
        if transfer.has_blocks:
            self._events.append(
                TransferFailed(
                    transfer.request, transfer.reason or "the request was aborted", times
                )
            )

    def _lost(self, lost: LostPeer | None, now: float) -> None:
        if lost is None:
            return
        self._events.append(HandshakeFailed(lost.incarnation.engine, lost.reason))
        self._client.forget(lost)
        for transfer in self._transfers.of_incarnation(lost.incarnation):
            transfer.is_attached = False
            self._handle_event(transfer, _E.PEER_LOST, now, lost.reason)
            if (
                lost.is_over
                and transfer.to.write_grant is not None
                and not transfer.to.write_grant.is_fenced
                and transfer.state in REVOKING
            ):
                # The process that could have written has ended. A fenced grant still waits for its
                # transport, because bytes that the process had sent may be in flight.
                self._write_grants.finish_revoke(transfer, now)
        for user in self._peer_users:
            user.peer_lost(lost)

    def _receive_heartbeat_reply(self, address: str, message: HeartbeatReply, now: float) -> None:
        peer_id = self._peers.at(address)
        if peer_id is None or peer_id.epoch != message.epoch:
            return
        self._client.note_answer(peer_id, message.beat)
        for transfer in self._transfers.of_leases(peer_id.incarnation, set(message.gone)):
            # A rank that has not sent its own offer yet may not have opened the lease yet either.
            is_ahead = (
                transfer.is_offered
                and transfer.origin.push_info is not None
                and peer_id.tp_rank not in transfer.arrival.ready
            )
            # A rank that has sent its last `Written` has dropped the registration by design.
            is_through = (
                transfer.to.write_grant is not None
                and peer_id.tp_rank not in transfer.to.write_grant.writers
            )
            # In CONFIRMING, `Confirmed` or `Refused` is in flight and is the more precise answer.
            # In RETURNING, the lease was withdrawn, so a missing lease is expected.
            if (
                transfer.state not in (TransferState.CONFIRMING, TransferState.RETURNING)
                and not is_ahead
                and not is_through
            ):
                lost = (
                    "the producer's lease ran out"
                    if transfer.is_offered
                    else "the producer has forgotten the registration"
                )
                self._handle_event(transfer, _E.REFUSED, now, lost)

    def _receive_ready(self, address: str, message: Ready, now: float) -> None:
        transfer = self._transfers.of_reader(message.reader)
        if (
            transfer is None
            or not transfer.is_offered
            or transfer.state not in _BEFORE_READING
            or transfer.lease != message.lease
        ):
            return
        rank = self._peers.rank_at(
            transfer.incarnation, address, transfer.outstanding.ready_replies
        )
        if rank is None:
            return
        transfer.outstanding.ready_replies.discard(rank)
        if not transfer.outstanding.ready_replies:
            self._handle_event(transfer, _E.PEER_READY, now, "")

    def _receive_refused(self, message: Refused, now: float) -> None:
        transfer = self._transfers.of_reader(message.reader)
        if transfer is None or (message.serial and transfer.is_withdrawn(message.serial)):
            return
        self._handle_event(transfer, _E.REFUSED, now, f"the producer refused: {message.reason}")

    def _receive_withdrawal(self, message: PushWithdrawal, now: float) -> None:
        transfer = self._transfers.of_reader(message.reader)
        can_return = transfer is not None and (transfer.state, _E.WITHDRAWN) in TRANSITIONS
        if (
            transfer is not None
            and can_return
            and transfer.is_offered
            and transfer.ticket.serial == message.serial
        ):
            self._handle_event(transfer, _E.WITHDRAWN, now, "")
