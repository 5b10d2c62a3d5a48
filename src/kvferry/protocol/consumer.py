"""The side that wants the blocks: tracks requests from their arrival, reads when there are blocks to fill, asks for confirmation,
reports. Pure.

A request may be used only after every rank it was read from has answered `Confirmed`: the lease was alive when the last byte had
arrived, so the bytes are those the ticket was issued for. Blocks that came in the producer's order are then put into ours. In push the
ticket comes later: the request is registered with the producer, which offers one when there is something to read; or the producer is lent
the blocks and writes (`lending.py`). Feed it commands, messages and completions; take actions and events.
"""

from collections.abc import Sequence
from dataclasses import replace

from kvferry.events import Event, HandshakeFailed, PullFailed, PullFinished
from kvferry.protocol.actions import Action, Place
from kvferry.protocol.consumer_parts import ConsumerParts
from kvferry.protocol.consumer_settings import ConsumerSettings
from kvferry.protocol.lending import TAKING_BACK, Lending
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
from kvferry.protocol.peers import LostPeer, Peer, PeerBook, PeerUser
from kvferry.protocol.promises import Promises
from kvferry.protocol.pulls import Destination, Invitation, Origin, Pull, PullTable, reader_name
from kvferry.protocol.reader_talk import ReaderTalk
from kvferry.protocol.reading import Reading
from kvferry.protocol.stopwatches import Stopwatches
from kvferry.protocol.tickets import Ticket
from kvferry.protocol.transfers import FINAL, TRANSITIONS, TROUBLE, TransferEvent, TransferState, next_state
from kvferry.types import Address, EngineLife, Epoch, PeerId, RequestId

__all__ = ["Consumer"]

_E = TransferEvent
_BEFORE_READING = (TransferState.TRACKED, TransferState.WAITING)


class Consumer:
    def __init__(self, settings: ConsumerSettings) -> None:
        self._settings = settings
        self._actions: list[Action] = []
        self._peers = PeerBook(settings.peers, self._actions)
        self._pulls = PullTable()
        self._talk = ReaderTalk(
            EngineLife(settings.engine, settings.epoch or Epoch("")), self._peers, settings.registration_s, self._actions
        )
        self._sharers: list[PeerUser] = []
        self._events: list[Event] = []
        self._stopwatches = Stopwatches()
        parts = ConsumerParts(settings, self._peers, self._pulls, self._talk, self._actions, self._events, self._meet)
        self._reading, self._lending, self._promises = Reading(parts), Lending(parts), Promises(parts)

    @property
    def num_pulls(self) -> int:
        return len(self._pulls)

    def may_be_written(self, plane: str) -> bool:
        """Whether a producer may be writing into our blocks by this plane."""
        return len(self._pulls) > 0 and plane in self._settings.lends_by

    @property
    def num_peers(self) -> int:
        return len(self._peers)

    @property
    def peers(self) -> PeerBook:
        return self._peers

    def share_peers(self, user: PeerUser) -> None:
        """It is told of peers that are ready or lost, and keeps those it uses from being forgotten."""
        self._sharers.append(user)

    # -- commands of the engine ------------------------------------------------------------------------------------

    def track(self, request: RequestId, ticket: Ticket, ticket_text: str, now: float) -> None:
        """A request with a good ticket has entered the engine: keep the lease alive from now on. Known requests are ignored."""
        self._begin(request, Origin.of(ticket, ticket_text), now)

    def try_to_track(self, request: RequestId, ticket: Ticket, ticket_text: str, now: float) -> None:
        """The same, for a request that can do without. `PullPromised` or `PullRefused` follows, before it is given blocks."""
        self._begin(request, replace(Origin.of(ticket, ticket_text), is_optional=True), now)

    def expect(self, request: RequestId, life: EngineLife, address: Address, tp_size: int, invitation: Invitation, now: float) -> None:
        """A request has entered the engine whose KV that producer is about to compute. Known requests are ignored."""
        self._begin(request, Origin(life, address, tp_size, invitation=invitation), now)

    def _begin(self, request: RequestId, origin: Origin, now: float) -> None:
        if self._pulls.get(request) is not None:
            return
        origin.life = self._peers.recognise(origin.life, origin.address)
        pull = Pull(request, reader_name(self._settings.engine, request, self._settings.peers.geometry.tp_rank), origin)
        self._pulls.add(pull)
        self._stopwatches.start(request, now)
        peer = self._peers.ensure(pull.life, origin.address, origin.tp_size, now)
        if isinstance(peer, LostPeer):
            self._meet(pull, _E.PEER_LOST, now, peer.reason)
        elif peer.is_ready:
            self._greet(pull, peer, now)

    def start(
        self, request: RequestId, blocks: Sequence[Sequence[int]], tokens: range, now: float, needed_from: Sequence[int] = ()
    ) -> None:
        """The engine has blocks: fill them with the KV of these token positions. `blocks` holds each group's table from token 0;
        `needed_from` each group's first token that is ever looked at, or nothing, for token 0."""
        pull = self._pulls.get(request)
        if pull is None:
            self._events.append(PullFailed(request, "the transfer was not announced before its blocks"))
            return
        pull.to = Destination(blocks, tokens, needed_from)
        pull.arrival.grown_at = now
        self._reading.be_patient(pull, now)
        self._meet(pull, _E.BLOCKS_ALLOCATED, now, pull.reason)
        peer = self._peers.get(pull.life)
        if pull.state is TransferState.WAITING and peer is not None and peer.is_ready and self._lending.can_lend(pull, peer):
            self._lending.lend(pull, peer, now)

    def settle(self, request: RequestId, now: float) -> None:
        """The engine needs nothing from the producer: let it free its blocks."""
        self._leave(request, _E.SETTLED, now)

    def abort(self, request: RequestId, now: float) -> None:
        """The request is over. If it has blocks, `PullFailed` follows once nothing can write into them any more."""
        self._leave(request, _E.ABORTED, now)

    def _leave(self, request: RequestId, event: TransferEvent, now: float) -> None:
        pull = self._pulls.get(request)
        if pull is not None and (event is _E.ABORTED or not pull.has_blocks):
            self._meet(pull, event, now, "the request was aborted")

    # -- news from the world ---------------------------------------------------------------------------------------

    def receive(self, address: str, message: ToConsumer, now: float) -> None:
        match message:
            case HandshakeReply() | HandshakeRefused():
                lost = self._peers.receive(message, now)
                self._follow_names(now)
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
                self._lending.receive(address, message, now)

    def offered(self, address: str, reader: str, ticket: Ticket, ticket_text: str, ready_tokens: int, now: float) -> None:
        """A rank of the producer has so much of what a request was registered for. Each says so for itself, again and again while it
        computes; the first to do so has us attach."""
        pull, peer_id = self._pulls.of_reader(reader), self._peers.at(address)
        if pull is None or peer_id is None or pull.life != peer_id.life or not pull.expects(ticket):
            return
        peer = self._peers.get(pull.life)
        assert peer is not None
        if not pull.arrival.note(peer_id.tp_rank, ready_tokens, now):
            return
        is_first = not pull.is_offered
        if is_first:
            self._talk.stop_beats(pull)
        pull.origin.ticket, pull.origin.ticket_text = ticket, ticket_text
        self._reading.be_patient(pull, now)
        if is_first:
            self._attach(pull, peer, now)
        elif pull.state is TransferState.MOVING and not pull.outstanding.reads:
            self._reading.start(pull, now)

    def disconnected(self, address: str, now: float) -> None:
        for lost in self._peers.disconnected(address, now):
            self._lost(lost, now)

    def peer_opened(self, peer_id: PeerId, plane: str, now: float) -> None:
        peer = self._peers.opened(peer_id, plane)
        if peer is None:
            return
        for pull in self._pulls.of_life(peer.life):
            if pull.state in _BEFORE_READING:
                self._greet(pull, peer, now)
            elif pull.to.loan is not None and not pull.to.loan.is_fenced:
                self._lending.ask_back(pull, now)
        # After the others have attached: a farewell settles the lease they may share.
        self._talk.say_late_farewells(peer)
        for user in self._sharers:
            user.peer_ready(peer, now)

    def peer_unreachable(self, peer_id: PeerId, reason: str, now: float) -> None:
        self._lost(self._peers.lose(peer_id.life, reason, now), now)

    def read_ended(self, request: RequestId, peer_id: PeerId, error: str | None, now: float) -> None:
        """A read started for this request has ended; its memory is no longer touched."""
        pull = self._pulls.get(request)
        if pull is None or peer_id.tp_rank not in pull.outstanding.reads:
            return
        pull.outstanding.reads.discard(peer_id.tp_rank)
        if error is None and not pull.outstanding.reads:
            pull.arrival.land()
        reason = f"reading from the producer failed: {error}"
        if error is not None and pull.state is TransferState.MOVING:
            pull.broken = reason
        if pull.outstanding.reads:
            if error is not None and pull.state is TransferState.MOVING:
                self._meet(pull, _E.REFUSED, now, reason)
        elif error is None and pull.state is TransferState.MOVING and pull.arrival.read_until < pull.to.tokens.stop:
            self._reading.start(pull, now)
        else:
            self._meet(pull, _E.BYTES_MOVED if error is None else _E.MOVE_FAILED, now, reason)
        if pull.broken and not pull.outstanding.reads:
            # The plane may have given up the connection for good; the next request shakes hands anew.
            self._lost(self._peers.lose(pull.life, pull.broken, now), now)

    def taken_back(self, request: RequestId, number: int, now: float) -> None:
        """What `TakeBack` asked for has ended: nothing that was written under this number lands any more."""
        pull = self._pulls.get(request)
        if pull is not None and pull.to.loan is not None and pull.to.loan.number == number:
            self._lending.back(pull, now)

    def placed(self, request: RequestId, error: str | None, now: float) -> None:
        """What `Place` asked for has ended; the request's blocks are no longer touched."""
        pull = self._pulls.get(request)
        if pull is not None:
            event = _E.PLACED if error is None else _E.PLACING_FAILED
            self._meet(pull, event, now, f"putting the blocks into our order failed: {error}")

    def advance(self, now: float) -> None:
        """Act on every deadline that has passed."""
        for lost in self._peers.advance(now):
            self._lost(lost, now)
        for peer_id in self._talk.silent_peers(now):
            self._lost(self._peers.lose(peer_id.life, "the producer no longer answers heartbeats", now), now)
        for pull in self._pulls.take_overdue(now):
            if pull.to.loan is not None and pull.state in TAKING_BACK:
                self._lending.ask_back(pull, now)
                continue
            self._meet(pull, _E.DEADLINE_PASSED, now, self._settings.overdue_reason(pull, now))
        self._talk.send_beats(now)
        self._peers.evict_idle(now, self._pulls.lives().union(*(user.lives() for user in self._sharers)))

    def next_deadline(self) -> float | None:
        deadlines = (self._pulls.next_deadline(), self._peers.next_deadline(), self._talk.next_deadline())
        return min((at for at in deadlines if at is not None), default=None)

    def take_actions(self) -> list[Action]:
        """In the order they are to be performed. The peers' own are among them."""
        actions = list(self._actions)
        self._actions.clear()
        return actions

    def take_events(self) -> list[Event]:
        events = list(self._events)
        self._events.clear()
        return events

    # -- inside ----------------------------------------------------------------------------------------------------

    def _meet(self, pull: Pull, event: TransferEvent, now: float, reason: str) -> None:
        """Move a pull on and do what its new state asks for."""
        before, pull.state = pull.state, next_state(pull.state, event)
        self._stopwatches.note(pull.request, event, pull.state, now)
        if event in TROUBLE and pull.state not in (TransferState.PLACING, TransferState.RECLAIMING):
            pull.reason = pull.reason or reason
        self._promises.note(pull, before, now)
        match pull.state:
            case TransferState.MOVING:
                self._reading.start(pull, now)
            case state if state in TAKING_BACK and pull.to.loan is not None:
                self._lending.take_back(pull, before, now)
            case TransferState.STOPPING if before is not TransferState.STOPPING:
                self._reading.give_up(pull, now)
            case TransferState.CONFIRMING:
                self._reading.ask_confirmation(pull, now)
            case TransferState.PLACING if before is not TransferState.PLACING:
                self._place(pull, now)
            case TransferState.DOOMED if before is not TransferState.DOOMED:
                # It may wait long for its blocks, to fail then: no rank need keep its own for it.
                self._talk.say_farewell(pull)
            case TransferState.RETURNING if not pull.outstanding.reads:
                self._meet(pull, _E.BYTES_MOVED, now, "")
            case TransferState.RETURNING:
                self._reading.stop(pull)
            case state if state in _BEFORE_READING and (event is _E.WITHDRAWN or before is TransferState.RETURNING):
                self._start_again(pull, now)
            case state if state in FINAL:
                self._end(pull)

    def _follow_names(self, now: float) -> None:
        """Producers that were known by their address only have said which life they are; perhaps one that we know well."""
        for old, new in self._peers.take_renamed():
            self._talk.rename(old, new)
            peer = self._peers.get(new)
            for pull in self._pulls.of_life(old):
                self._pulls.move(pull, new)
                if peer is not None and peer.is_ready and pull.state in _BEFORE_READING:
                    self._greet(pull, peer, now)
            if peer is not None and peer.is_ready:
                self._talk.say_late_farewells(peer)

    def _greet(self, pull: Pull, peer: Peer, now: float) -> None:
        if pull.is_offered:
            self._attach(pull, peer, now)
        elif pull.state is TransferState.WAITING and self._lending.can_lend(pull, peer):
            self._lending.lend(pull, peer, now)
        else:
            self._talk.register(pull, peer, self._settings.peers.geometry.tp_size, now)

    def _attach(self, pull: Pull, peer: Peer, now: float) -> None:
        self._talk.attach(pull, peer, now)
        pull.outstanding.exposures = {rank for rank in peer.visits if peer.layouts[rank].is_staged}
        self._promises.await_answers(pull, peer, now)
        if not pull.outstanding.exposures:
            self._meet(pull, _E.PEER_READY, now, "")

    def _start_again(self, pull: Pull, now: float) -> None:
        """What was offered is withdrawn: wait for the next offer, as if there had been none."""
        peer = self._peers.get(pull.life)
        assert peer is not None
        self._talk.stop_beats(pull)
        pull.arrival = pull.arrival.begun_again(pull.ticket.serial if pull.is_offered else pull.arrival.last_serial)
        pull.outstanding.exposures.clear()
        pull.origin.ticket, pull.origin.ticket_text = None, ""
        # That the reads were cancelled is not why it may fail later.
        pull.reason = ""
        self._reading.be_patient(pull, now)
        self._greet(pull, peer, now)

    def _place(self, pull: Pull, now: float) -> None:
        # The bytes are ours and the producer is through with us. What is left is our own work, so no deadline ends it: blocks are handed
        # back when nothing writes into them.
        pull.is_confirmed = True
        self._pulls.set_deadline(pull, None)
        self._talk.stop_beats(pull)
        if pull.to.placements or self._settings.is_staged:
            blocks = pull.to.filled_blocks(self._settings.peers.geometry.block_size) if self._settings.is_staged else ()
            self._actions.append(Place(pull.request, pull.to.placements, blocks))
        else:
            self._meet(pull, _E.PLACED, now, "")

    def _end(self, pull: Pull) -> None:
        self._pulls.remove(pull)
        times = self._stopwatches.stop(pull.request)
        if pull.state is TransferState.DONE:
            self._events.append(PullFinished(pull.request, times))
            return
        if not pull.is_confirmed:
            self._talk.say_farewell(pull)
        if pull.has_blocks:
            self._events.append(PullFailed(pull.request, pull.reason or "the request was aborted", times))

    def _lost(self, lost: LostPeer | None, now: float) -> None:
        if lost is None:
            return
        self._events.append(HandshakeFailed(lost.life.engine, lost.reason))
        self._talk.forget(lost)
        for pull in self._pulls.of_life(lost.life):
            pull.is_attached = False
            self._meet(pull, _E.PEER_LOST, now, lost.reason)
            if lost.is_over and pull.to.loan is not None and not pull.to.loan.is_fenced and pull.state in TAKING_BACK:
                # Whoever could have written is gone for good. What it had sent may be on its way, so a fence is waited for.
                self._lending.back(pull, now)
        for user in self._sharers:
            user.peer_lost(lost)

    def _receive_heartbeat_reply(self, address: str, message: HeartbeatReply, now: float) -> None:
        peer_id = self._peers.at(address)
        if peer_id is None or peer_id.epoch != message.epoch:
            return
        self._talk.note_answer(peer_id, message.beat)
        for pull in self._pulls.of_leases(peer_id.life, set(message.gone)):
            # What a rank has not offered yet it may still have to grant.
            is_ahead = pull.is_offered and pull.origin.invitation is not None and peer_id.tp_rank not in pull.arrival.ready
            # While confirming, Confirmed or Refused is on its way and is the better answer. What was withdrawn is gone, and we know it.
            is_through = pull.to.loan is not None and peer_id.tp_rank not in pull.to.loan.writers
            if pull.state not in (TransferState.CONFIRMING, TransferState.RETURNING) and not is_ahead and not is_through:
                lost = "the producer's lease ran out" if pull.is_offered else "the producer has forgotten the registration"
                self._meet(pull, _E.REFUSED, now, lost)

    def _receive_ready(self, address: str, message: Ready, now: float) -> None:
        pull = self._pulls.of_reader(message.reader)
        if pull is None or not pull.is_offered or pull.state not in _BEFORE_READING or pull.lease != message.lease:
            return
        rank = self._peers.rank_at(pull.life, address, pull.outstanding.exposures)
        if rank is None:
            return
        pull.outstanding.exposures.discard(rank)
        if not pull.outstanding.exposures:
            self._meet(pull, _E.PEER_READY, now, "")

    def _receive_refused(self, message: Refused, now: float) -> None:
        pull = self._pulls.of_reader(message.reader)
        if pull is None or (message.serial and pull.is_withdrawn(message.serial)):
            return
        self._meet(pull, _E.REFUSED, now, f"the producer refused: {message.reason}")

    def _receive_withdrawal(self, message: PushWithdrawal, now: float) -> None:
        pull = self._pulls.of_reader(message.reader)
        can_return = pull is not None and (pull.state, _E.WITHDRAWN) in TRANSITIONS
        if pull is not None and can_return and pull.is_offered and pull.ticket.serial == message.serial:
            self._meet(pull, _E.WITHDRAWN, now, "")
