"""The ferry: feeds the pure producer and consumer with commands, messages and completions, and performs what they ask for.

Owned by one thread (`FerryThread`), or stepped by a test. It has no opinion about the protocol.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from kvferry.breath import breathe
from kvferry.errors import InvalidTicket, KVFerryError, RemoteProtocolError, TransportError
from kvferry.events import BytesMoved, Event, LeaseEnded, LeaseLingers, MessageDropped, PeerConnected, PullFailed
from kvferry.ferry.commands import (
    Abandon,
    Abort,
    Close,
    Command,
    Expect,
    ExpectFrom,
    Grant,
    HandBack,
    Keep,
    LetGo,
    OfConsumer,
    OfProducer,
    Open,
    Publish,
    Reject,
    Settle,
    Start,
    Track,
    TryToTrack,
    Withdraw,
    Withhold,
)
from kvferry.ferry.postponed import Postponed
from kvferry.ports.block_store import BlockStore, StoreHandle
from kvferry.ports.control import ControlPlane, Disconnected, Received
from kvferry.ports.data import Completion, DataPlane, Handle, PlaneOffer
from kvferry.protocol import codec
from kvferry.protocol.actions import (
    Action,
    ClosePeer,
    Expose,
    HangUp,
    Lend,
    OpenPeer,
    Place,
    Send,
    StartRead,
    StartWrite,
    StopRead,
    StopWrite,
    TakeBack,
)
from kvferry.protocol.consumer import Consumer
from kvferry.protocol.consumer_settings import ConsumerSettings
from kvferry.protocol.messages import PushOffer, ToConsumer, ToProducer
from kvferry.protocol.peers import UNKNOWN_EPOCH
from kvferry.protocol.producer import Producer, ProducerSettings
from kvferry.protocol.pulls import Invitation
from kvferry.protocol.push_desk import MAX_LEASES_WAITED
from kvferry.protocol.push_tickets import PushTicketKey
from kvferry.protocol.tickets import TicketKey
from kvferry.protocol.writers import Writers, WriterSettings
from kvferry.types import EngineId, EngineLife

__all__ = ["Ferry", "FerrySettings", "FerrySnapshot"]

MAX_WAIT_S = 1.0
CONTROL_GRAIN_S = 0.0005
"""The control plane waits for whole milliseconds. A plane that watches its device wants less."""
EXPIRY_GRAIN_S = 0.05
"""A lease that has run out is no longer good at once; its blocks may be freed this much later."""
READ_WATCH_INTERVAL_S = 0.01
"""How often planes that need our help are looked at while a read is likely to begin."""
READ_START_INTERVAL_S = 0.001
"""The same while one is beginning."""


@dataclass(frozen=True, slots=True)
class FerrySettings:
    producer: ProducerSettings
    consumer: ConsumerSettings
    secret: bytes


@dataclass(frozen=True, slots=True)
class FerrySnapshot:
    """What a ferry holds right now; all zero when quiescent."""

    leases: int = 0
    pulls: int = 0
    reads: int = 0
    peers: int = 0
    registrations: int = 0
    writings: int = 0


class Ferry:
    def __init__(
        self,
        settings: FerrySettings,
        planes: Sequence[DataPlane],
        control: ControlPlane,
        store: BlockStore,
        clock: Callable[[], float],
    ) -> None:
        self._key = TicketKey(settings.secret)
        self._push_key = PushTicketKey(settings.secret)
        self._consumer = Consumer(settings.consumer)
        self._writers = _writers(settings, self._consumer)
        self._producer = Producer(settings.producer, self._key, self._push_key, self._writers)
        self._planes = {plane.name: plane for plane in planes}
        self._control = control
        self._store = store
        self._clock = clock
        self._moves: dict[tuple[str, Handle], StartRead | StartWrite | TakeBack] = {}
        """By plane: what its handles are about."""
        self._stored: dict[StoreHandle, Place | Expose] = {}
        self._postponed = Postponed(settings.consumer.peers.geometry.block_size, self._producer.is_copying)
        self._events: deque[Event] = deque()

    def snapshot(self) -> FerrySnapshot:
        producer, consumer, num_writings = self._producer, self._consumer, len(self._writers) + self._writers.num_posted
        num_moves, num_registrations = len(self._moves), producer.num_registrations
        return FerrySnapshot(producer.num_leases, consumer.num_pulls, num_moves, consumer.num_peers, num_registrations, num_writings)

    def step(
        self,
        commands: Sequence[Command],
        *,
        wait_s: float | None = None,
        late_commands: Callable[[], Sequence[Command]] = tuple,
    ) -> list[Event]:
        """One turn: wait for news (at most `wait_s`, or until the next deadline), take it in, act. Returns what happened.

        What the engine says meanwhile (`late_commands`) is asked for after the news has come and obeyed before it: whoever asks whether
        blocks were good until now is answered by what the engine had said until then."""
        timeout = 0.0 if commands else self.idle_s() if wait_s is None else wait_s
        if 0.0 < timeout < CONTROL_GRAIN_S:
            breathe(timeout)
            timeout = 0.0
        received = self._control.poll(timeout)
        now = self._clock()
        for command in (*commands, *late_commands()):
            self._obey(command, now)
        # What was written before the engine said this is right only if the engine did not take its blocks back.
        self._producer.settle_writes(now)
        for news in received:
            self._take_news(news, now)
        # Before the planes are asked: a read that begins now may be over at once.
        self._perform(now)
        for plane in self._planes.values():
            for completion in plane.poll():
                self._take_completion(plane.name, completion, now)
        for stored in self._store.poll():
            self._take_stored(self._stored.pop(stored.handle), stored.error, now)
        for command in self._postponed.take_due():
            self._obey_as_consumer(command, now)
        self._producer.advance(now)
        self._consumer.advance(now)
        self._perform(now)
        events = list(self._events)
        self._events.clear()
        return events

    def idle_s(self) -> float:
        """How long nothing needs to be done, unless news comes in."""
        now = self._clock()
        if self._writers.has_landed:
            return 0.0
        producer_at, consumer_at = self._producer.next_deadline(), self._consumer.next_deadline()
        waits = [] if consumer_at is None else [consumer_at - now]
        if producer_at is not None:
            # Thousands of leases have thousands of deadlines; whatever is due within a moment is dealt with together.
            waits.append(max(EXPIRY_GRAIN_S, producer_at - now))
        waits += [interval for interval in (self._store.poll_interval_s(),) if interval is not None]
        for plane in self._planes.values():
            intervals = [plane.poll_interval_s()]
            if self._producer.num_readers(plane.name) or self._consumer.may_be_written(plane.name):
                intervals.append(self._serving_interval_s(plane, now))
            waits += [interval for interval in intervals if interval is not None]
        return max(0.0, min([MAX_WAIT_S, *waits]))

    def _serving_interval_s(self, plane: DataPlane, now: float) -> float | None:
        interval = plane.serving_interval_s()
        if interval is None or not self._producer.is_reading_likely(now):
            return interval
        return min(interval, READ_START_INTERVAL_S if self._producer.is_read_beginning(now) else READ_WATCH_INTERVAL_S)

    def close(self) -> None:
        with ExitStack() as stack:  # what comes after one that cannot be closed is closed all the same
            for close in (self._control.close, self._store.close, *(plane.close for plane in self._planes.values())):
                stack.callback(close)

    # -- inputs ----------------------------------------------------------------------------------------------------

    def _take_news(self, news: Received | Disconnected, now: float) -> None:
        if isinstance(news, Disconnected):
            self._consumer.disconnected(news.address, now)
            return
        try:
            message = codec.decode(news.frame)
        except RemoteProtocolError as error:
            self._events.append(MessageDropped(str(error)))
            return
        is_inbound = not news.route.dialled
        if is_inbound and isinstance(message, ToProducer):
            self._producer.receive(news.route, message, now)
        elif not is_inbound and isinstance(message, ToConsumer):
            self._consumer.receive(news.route.dialled, message, now)
        elif not is_inbound and isinstance(message, PushOffer):
            self._take_offer(news.route.dialled, message, now)
        else:
            self._events.append(MessageDropped(f"a {type(message).__name__} is not expected here"))

    def _take_offer(self, address: str, offer: PushOffer, now: float) -> None:
        try:
            self._consumer.offered(address, offer.reader, self._key.open(offer.ticket), offer.ticket, offer.ready_tokens, now)
        except InvalidTicket as error:
            self._events.append(MessageDropped(f"an offer without a good ticket: {error}"))

    def _obey(self, command: Command, now: float) -> None:
        if isinstance(command, OfProducer):
            self._obey_as_producer(command, now)
        elif not self._postponed.keeps(command):
            self._obey_as_consumer(command, now)

    def _obey_as_producer(self, command: OfProducer, now: float) -> None:
        match command:
            case Grant(request, serial, blocks):
                self._producer.grant(request, serial, now, blocks)
            case Keep(request, serial, ttl_s, blocks):
                self._producer.keep(request, serial, now, ttl_s, blocks)
            case LetGo(request):
                if self._producer.let_go(request, now):
                    self._events.append(LeaseLingers(request))
            case Open(request, serial):
                self._producer.open(request, serial, now)
            case Close(request, blocks):
                self._producer.close(request, now, blocks)
            case Withdraw(request, serial):
                self._producer.withdraw(request, serial, now)
            case Publish(request, handover, ticket, ready_tokens, blocks):
                self._producer.publish(request, handover, ticket, ready_tokens, now, blocks)
            case Withhold(request, handover, reason):
                self._producer.withhold(request, handover, reason, now)
            case Abandon(request):
                self._producer.abandon(request)
            case HandBack(request, serial):
                self._producer.hand_back(request, serial)

    def _obey_as_consumer(self, command: OfConsumer, now: float) -> None:
        match command:
            case Track(request, ticket):
                self._consumer.track(request, self._key.open(ticket), ticket, now)
            case TryToTrack(request, ticket):
                self._consumer.try_to_track(request, self._key.open(ticket), ticket, now)
            case Expect(request, text, tokens, own_address):
                invited = self._push_key.open(text)
                invitation = Invitation(invited.handover, tokens, own_address, text)
                self._consumer.expect(request, invited.life, invited.address, invited.tp_size, invitation, now)
            case ExpectFrom(request, engine, address, tp_size, tokens, own_address):
                life = EngineLife(EngineId(engine), UNKNOWN_EPOCH)
                self._consumer.expect(request, life, address, tp_size, Invitation("", tokens, own_address, ""), now)
            case Start(request, blocks, first_token, end_token, needed_from):
                self._consumer.start(request, blocks, range(first_token, end_token), now, needed_from)
            case Settle(request):
                self._consumer.settle(request, now)
            case Abort(request):
                self._consumer.abort(request, now)
            case Reject(request, reason):
                self._events.append(PullFailed(request, reason))

    def _take_completion(self, plane: str, completion: Completion, now: float) -> None:
        move = self._moves.pop((plane, completion.handle), None)
        if isinstance(move, TakeBack):
            self._consumer.taken_back(move.request, move.number, now)
            return
        moved, used = completion.total_bytes, completion.pieces
        planned = used if move is None else sum(len(part.local_offsets) for part in move.pieces)
        request = move.request if isinstance(move, StartRead) else None
        self._events.append(BytesMoved(plane, moved, used, planned, completion.post_s, completion.transfer_s, completion.ok, request))
        if move is not None:
            self._tell_end(move, completion.error, now)

    def _tell_end(self, move: StartRead | StartWrite, error: str | None, now: float) -> None:
        if isinstance(move, StartRead):
            self._consumer.read_ended(move.request, move.peer, error, now)
        else:
            self._writers.write_ended(move.write, error, now)

    def _take_stored(self, action: Place | Expose, error: str | None, now: float) -> None:
        if isinstance(action, Place):
            self._consumer.placed(action.request, error, now)
        else:
            self._producer.exposed(action.copy, error, now)

    # -- effects ---------------------------------------------------------------------------------------------------

    def _perform(self, now: float) -> None:
        while actions := [*self._consumer.take_actions(), *self._producer.take_actions(), *self._writers.take_actions()]:
            for action in actions:
                self._perform_one(action, now)
        for reply in self._producer.take_replies():
            self._control.reply(reply.route, codec.encode(reply.message))
        self._events.extend(LeaseEnded(ended.request, ended.end) for ended in self._producer.take_ended())
        self._events.extend(self._consumer.take_events())

    def _perform_one(self, action: Action, now: float) -> None:
        match action:
            case Send(address, message):
                self._send(address, codec.encode(message), now)
            case HangUp(address):
                self._control.forget(address)
            case OpenPeer():
                self._open(action, now)
            case ClosePeer(peer, control_address):
                for plane in self._planes.values():
                    plane.disconnect(peer)
                self._control.forget(control_address)
            case StartRead() | StartWrite():
                self._start_move(action, now)
            case StopRead(request, peer):
                self._cancel(lambda move: isinstance(move, StartRead) and (move.request, move.peer) == (request, peer))
            case StopWrite(write):
                self._cancel(lambda move: isinstance(move, StartWrite) and move.write == write)
            case Lend(plane, number, blocks):
                self._planes[plane].lend(number, blocks)
            case TakeBack(_, plane, number):
                self._moves[plane, self._planes[plane].take_back(number)] = action
            case Place() | Expose():
                self._store_blocks(action, now)

    def _send(self, address: str, frame: bytes, now: float) -> None:
        try:
            self._control.send(address, frame)
        except TransportError:
            self._control.forget(address)
            self._consumer.disconnected(address, now)

    def _open(self, action: OpenPeer, now: float) -> None:
        problems = []
        for choice in action.candidates:
            offer = next(o for o in action.offers if o.plane == choice.plane)
            try:
                made = PlaneOffer(offer.plane, offer.reach, offer.blob, offer.near)
                self._planes[choice.plane].connect(action.peer, made, action.geometry.regions)
            except Exception as error:  # top of a peer: what it offers goes through libraries that raise whatever they like
                problems.append(f"{choice.plane}: {_described(error)}")
                continue
            reason = "; ".join([choice.reason, *problems])
            self._events.append(PeerConnected(action.peer.engine, choice.plane, reason))
            self._consumer.peer_opened(action.peer, choice.plane, now)
            return
        self._consumer.peer_unreachable(action.peer, f"no plane reaches the producer ({'; '.join(problems)})", now)

    def _start_move(self, action: StartRead | StartWrite, now: float) -> None:
        if not action.pieces:
            self._tell_end(action, None, now)
            return
        plane = self._planes[action.plane]
        try:
            if isinstance(action, StartRead):
                handle = plane.read(action.peer, action.pieces)
            else:
                handle = plane.write(action.peer, action.pieces, action.number)
        except Exception as error:  # top of a transfer, likewise
            self._tell_end(action, _described(error), now)
            if isinstance(action, StartWrite):
                # The plane has given up the connection; the next request shakes hands anew.
                self._consumer.peer_unreachable(action.peer, _described(error), now)
            return
        self._moves[action.plane, handle] = action

    def _cancel(self, is_meant: Callable[[StartRead | StartWrite | TakeBack], bool]) -> None:
        for (name, handle), move in self._moves.items():
            if is_meant(move):
                self._planes[name].cancel(handle)

    def _store_blocks(self, action: Place | Expose, now: float) -> None:
        store = self._store
        try:
            handle = store.place(action.placements, action.blocks) if isinstance(action, Place) else store.expose(action.blocks)
        except Exception as error:  # top of a transfer, likewise
            self._take_stored(action, _described(error), now)
            return
        self._stored[handle] = action


def _writers(settings: FerrySettings, consumer: Consumer) -> Writers:
    producer = settings.producer
    max_lease_s = MAX_LEASES_WAITED * producer.lease_ttl_s
    ours = WriterSettings(producer.engine, settings.consumer.read_timeout_s, max_lease_s, can_write=not producer.is_staged)
    writers = Writers(ours, consumer.peers)
    consumer.share_peers(writers)
    return writers


def _described(error: Exception) -> str:
    return str(error) if isinstance(error, KVFerryError) else f"{type(error).__name__}: {error}"
