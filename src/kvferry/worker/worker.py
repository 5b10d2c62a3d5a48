"""The transfer worker: passes inputs to the protocol and performs the resulting actions.

The decisions are made by the pure `Producer`, `Consumer` and `PushWriter` in `protocol/`. The
transfer worker passes commands, messages and completions to these objects and performs the
resulting actions on the transports, the block store and the control transport. Owned by one thread
(`TransferWorkerThread`); a test may call `step` directly. See docs/decisions/005-worker-thread.md.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain

from kvferry.errors import InvalidTicket, KVFerryError, RemoteProtocolError, TransportError
from kvferry.events import (
    BytesMoved,
    Event,
    MessageDropped,
    PeerConnected,
    TransferFailed,
)
from kvferry.protocol import messages as codec
from kvferry.protocol.actions import (
    Action,
    CloseConnection,
    ClosePeer,
    CopyToHostBuffer,
    GrantWrites,
    OpenPeer,
    PlaceBlocks,
    Reply,
    RevokeWrites,
    Send,
    StartRead,
    StartWrite,
    StopRead,
    StopWrite,
)
from kvferry.protocol.consumer.consumer import Consumer
from kvferry.protocol.consumer.context import ConsumerSettings
from kvferry.protocol.consumer.transfer import Destination, PushInfo
from kvferry.protocol.messages import PushOffer, ToConsumer, ToProducer
from kvferry.protocol.outbox import Outbox
from kvferry.protocol.peers import UNKNOWN_EPOCH
from kvferry.protocol.producer.producer import Producer
from kvferry.protocol.producer.push import ProducerSettings
from kvferry.protocol.producer.push_matcher import MAX_LEASES_WAITED
from kvferry.protocol.producer.push_writer import PushWriter, WriterSettings
from kvferry.protocol.tickets import PushTicketKey, TicketKey
from kvferry.sleep import short_sleep
from kvferry.transports.base import (
    BlockStore,
    Completion,
    ControlTransport,
    DataTransport,
    Disconnected,
    Handle,
    Received,
    StoreHandle,
    TransportOffer,
)
from kvferry.types import EngineId, EngineIncarnation
from kvferry.worker.commands import (
    AbandonLease,
    AbortLoad,
    CloseStream,
    ConsumerCommand,
    EvictTurn,
    ExpectPrefill,
    FailPush,
    GrantLease,
    OpenStream,
    PrepareLoad,
    PrepareOptionalLoad,
    ProducerCommand,
    PublishTicket,
    RegisterForPush,
    RegisterForPushByAddress,
    RejectLoad,
    ReleasePushTicket,
    ReleaseTicket,
    RetainTurn,
    RevokeLease,
    SkipLoad,
    StartLoad,
    WithdrawStream,
    WorkerCommand,
)

MAX_WAIT_S = 1.0
CONTROL_RESOLUTION_S = 0.0005
"""Resolution of the control transport, which waits for whole milliseconds.

A data transport that polls its device may ask for a shorter wait; `step` then sleeps instead.
"""
EXPIRY_RESOLUTION_S = 0.05
"""How much later than the expiry of a lease its blocks may be freed.

An expired lease is refused to readers at once; only the freeing of blocks may be late.
"""
READ_WATCH_INTERVAL_S = 0.01
"""How often a transport that needs `poll` to serve reads is polled while a read is likely."""
READ_START_INTERVAL_S = 0.001
"""How often a transport that needs `poll` to serve reads is polled while a read is beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferWorkerSettings:
    """Configuration of a transfer worker; `secret` signs the tickets of the cluster."""

    producer: ProducerSettings
    consumer: ConsumerSettings
    secret: bytes


@dataclass(frozen=True, slots=True)
class TransferWorkerSnapshot:
    """How many objects a transfer worker holds right now; all zero when quiescent."""

    leases: int = 0
    transfers: int = 0
    reads: int = 0
    peers: int = 0
    registrations: int = 0
    writes: int = 0


class TransferWorker:
    """Runs the protocol of one rank on the given transports. `step` is one tick."""

    def __init__(
        self,
        settings: TransferWorkerSettings,
        transports: Sequence[DataTransport],
        control: ControlTransport,
        store: BlockStore,
        clock: Callable[[], float],
    ) -> None:
        self._key = TicketKey(settings.secret)
        self._push_key = PushTicketKey(settings.secret)
        self._consumer = Consumer(settings.consumer)
        self._outbox = Outbox()
        writers = _writers(settings, self._consumer, self._outbox)
        self._producer = Producer(settings.producer, self._key, self._push_key, writers)
        self._transports = {transport.name: transport for transport in transports}
        self._control = control
        self._store = store
        self._clock = clock
        self._moves: dict[tuple[str, Handle], StartRead | StartWrite | RevokeWrites] = {}
        """The action that each transport handle belongs to, by transport name and handle."""
        self._stored: dict[StoreHandle, PlaceBlocks | CopyToHostBuffer] = {}
        self._postponed = PostponedCommands(
            settings.consumer.peers.geometry.block_size, self._producer.is_copying
        )

    def snapshot(self) -> TransferWorkerSnapshot:
        producer, consumer = self._producer, self._consumer
        return TransferWorkerSnapshot(
            leases=producer.num_leases,
            transfers=consumer.num_transfers,
            reads=len(self._moves),
            peers=consumer.num_peers,
            registrations=producer.num_registrations,
            writes=len(producer.writers) + producer.writers.num_posted,
        )

    def step(
        self,
        commands: Sequence[WorkerCommand],
        *,
        wait_s: float | None = None,
        late_commands: Callable[[], Sequence[WorkerCommand]] = tuple,
        engine_seen_at: float = math.inf,
    ) -> list[Event]:
        """Run one tick: wait for input, process the input, perform actions, return events.

        The wait lasts at most `wait_s`, or until the next deadline if `wait_s` is None. There is no
        wait if `commands` is not empty.

        `late_commands` is called after the wait, and the late commands run before the received
        messages. A peer that asks whether blocks were valid until now is therefore answered with
        everything the engine had submitted by that time.

        `engine_seen_at` is the time of the engine's last sign of life.
        """
        timeout = 0.0 if commands else self.idle_s() if wait_s is None else wait_s
        if 0.0 < timeout < CONTROL_RESOLUTION_S:
            short_sleep(timeout)
            timeout = 0.0
        received = self._control.poll(timeout)
        now = self._clock()
        for command in (*commands, *late_commands()):
            self._execute(command, now)
        # A push write that landed before these commands is correct only if no command has withdrawn
        # the blocks, so writes are confirmed after the commands have run.
        self._producer.confirm_writes(now)
        for control_event in received:
            self._receive(control_event, now)
        # Actions are performed before the transports are polled: a read that starts now may
        # complete in this very poll.
        self._perform(now)
        for transport in self._transports.values():
            for completion in transport.poll():
                self._take_completion(transport.name, completion, now)
        for stored in self._store.poll():
            self._finish_store(self._stored.pop(stored.handle), stored.error, now)
        for command in self._postponed.take_due():
            self._execute_for_consumer(command, now)
        self._producer.advance(now)
        self._consumer.advance(now, engine_seen_at)
        self._perform(now)
        return self._outbox.take_events()

    def idle_s(self) -> float:
        """Return how many seconds the worker may sleep if no input arrives."""
        now = self._clock()
        if self._producer.writers.has_landed:
            return 0.0
        producer_at, consumer_at = self._producer.next_deadline(), self._consumer.next_deadline()
        waits = [] if consumer_at is None else [consumer_at - now]
        if producer_at is not None:
            # Thousands of leases have thousands of deadlines. Leases with close deadlines
            # (EXPIRY_RESOLUTION_S) are processed in one tick.
            waits.append(max(EXPIRY_RESOLUTION_S, producer_at - now))
        waits += [interval for interval in (self._store.poll_interval_s(),) if interval is not None]
        for transport in self._transports.values():
            intervals = [transport.poll_interval_s()]
            if self._producer.num_readers(transport.name) or self._consumer.may_be_written(
                transport.name
            ):
                intervals.append(self._serving_interval_s(transport, now))
            waits += [interval for interval in intervals if interval is not None]
        return max(0.0, min([MAX_WAIT_S, *waits]))

    def _serving_interval_s(self, transport: DataTransport, now: float) -> float | None:
        """Return how often to poll this transport so that peers can read our memory."""
        interval = transport.serving_interval_s()
        if interval is None or not self._producer.is_reading_likely(now):
            return interval
        return min(
            interval,
            READ_START_INTERVAL_S
            if self._producer.is_read_beginning(now)
            else READ_WATCH_INTERVAL_S,
        )

    def close(self) -> None:
        with ExitStack() as stack:  # every close runs, even after an earlier close has raised
            for close in (
                self._control.close,
                self._store.close,
                *(transport.close for transport in self._transports.values()),
            ):
                stack.callback(close)

    # -- inputs --

    def _receive(self, control_event: Received | Disconnected, now: float) -> None:
        if isinstance(control_event, Disconnected):
            self._consumer.disconnected(control_event.address, now)
            return
        try:
            message = codec.decode(control_event.frame)
        except RemoteProtocolError as error:
            self._outbox.report(MessageDropped(str(error)))
            return
        # A connection that we dialled leads to a producer; an accepted connection, to a consumer.
        is_inbound = not control_event.route.dialled
        if is_inbound and isinstance(message, ToProducer):
            self._producer.receive(control_event.route, message, now)
        elif not is_inbound and isinstance(message, ToConsumer):
            self._consumer.receive(control_event.route.dialled, message, now)
        elif not is_inbound and isinstance(message, PushOffer):
            self._take_offer(control_event.route.dialled, message, now)
        else:
            self._outbox.report(
                MessageDropped(f"the worker does not expect a {type(message).__name__} here")
            )

    def _take_offer(self, address: str, offer: PushOffer, now: float) -> None:
        try:
            self._consumer.offered(
                address,
                offer.reader,
                self._key.open(offer.ticket),
                offer.ticket,
                offer.ready_tokens,
                now,
            )
        except InvalidTicket as error:
            self._outbox.report(MessageDropped(f"an offer has no valid ticket: {error}"))

    def _execute(self, command: WorkerCommand, now: float) -> None:
        if isinstance(command, ProducerCommand):
            self._execute_for_producer(command, now)
        elif not self._postponed.postpones(command):
            self._execute_for_consumer(command, now)

    def _execute_for_producer(  # noqa: C901 - one case per command
        self, command: ProducerCommand, now: float
    ) -> None:
        match command:
            case GrantLease(request, serial, blocks):
                self._producer.grant(request, serial, now, blocks)
            case RetainTurn(request, serial, lease_ttl_s, blocks):
                self._producer.retain(request, serial, now, lease_ttl_s, blocks)
            case EvictTurn(request):
                self._producer.evict(request, now)
            case ExpectPrefill(request, match_id):
                self._producer.expect_prefill(request, match_id)
            case OpenStream(request, serial):
                self._producer.open(request, serial, now)
            case CloseStream(request, blocks):
                self._producer.close(request, now, blocks)
            case WithdrawStream(request, serial):
                self._producer.withdraw(request, serial, now)
            case PublishTicket(request, match_id, ticket, ready_tokens, blocks):
                self._producer.publish(request, match_id, ticket, ready_tokens, now, blocks)
            case FailPush(request, match_id, reason):
                self._producer.fail_prefill(request, match_id, reason, now)
            case AbandonLease(request):
                self._producer.abandon(request)
            case RevokeLease(request):
                self._producer.revoke(request)
            case ReleaseTicket(request, serial):
                self._producer.release_ticket(request, serial)
            case ReleasePushTicket(match_id):
                self._producer.decline_push(match_id, now)

    def _execute_for_consumer(self, command: ConsumerCommand, now: float) -> None:
        match command:
            case PrepareLoad(request, ticket):
                self._consumer.track(request, self._key.open(ticket), ticket, now)
            case PrepareOptionalLoad(request, ticket):
                self._consumer.track_optional(request, self._key.open(ticket), ticket, now)
            case RegisterForPush(request, text, tokens, own_address):
                push_ticket = self._push_key.open(text)
                push_info = PushInfo(push_ticket.match_id, tokens, own_address, text)
                self._consumer.expect(
                    request,
                    push_ticket.incarnation,
                    push_ticket.address,
                    push_ticket.tp_size,
                    push_info,
                    now,
                )
            case RegisterForPushByAddress(request, engine, address, tp_size, tokens, own_address):
                incarnation = EngineIncarnation(EngineId(engine), UNKNOWN_EPOCH)
                self._consumer.expect(
                    request,
                    incarnation,
                    address,
                    tp_size,
                    PushInfo("", tokens, own_address, ""),
                    now,
                )
            case StartLoad(request, blocks, first_token, end_token, needed_from):
                self._consumer.start(
                    request, blocks, range(first_token, end_token), now, needed_from
                )
            case SkipLoad(request):
                self._consumer.settle(request, now)
            case AbortLoad(request, reason):
                self._consumer.abort(request, now, reason)
            case RejectLoad(request, reason):
                self._outbox.report(TransferFailed(request, reason))

    def _take_completion(self, transport: str, completion: Completion, now: float) -> None:
        move = self._moves.pop((transport, completion.handle), None)
        if isinstance(move, RevokeWrites):
            self._consumer.writes_revoked(move.request, move.grant_id, now)
            return
        moved, used = completion.total_bytes, completion.segments
        planned = used if move is None else sum(len(part.local_offsets) for part in move.segments)
        request = move.request if isinstance(move, StartRead) else None
        self._outbox.report(
            BytesMoved(
                transport,
                moved,
                used,
                planned,
                completion.post_s,
                completion.transfer_s,
                completion.ok,
                request,
            )
        )
        if move is not None:
            self._report_end(move, completion.error, now)

    def _report_end(self, move: StartRead | StartWrite, error: str | None, now: float) -> None:
        if isinstance(move, StartRead):
            self._consumer.read_ended(move.request, move.peer, error, now)
        else:
            self._producer.writers.write_ended(move.write, error, now)

    def _finish_store(
        self, action: PlaceBlocks | CopyToHostBuffer, error: str | None, now: float
    ) -> None:
        if isinstance(action, PlaceBlocks):
            self._consumer.placed(action.request, error, now)
        else:
            self._producer.copied_to_host_buffer(action.copy, error, now)

    # -- effects --

    def _perform(self, now: float) -> None:
        # Performing an action may produce further actions, so the loop runs until there are none.
        while actions := [*self._consumer.outbox.take_actions(), *self._outbox.take_actions()]:
            for action in actions:
                self._perform_one(action, now)
        self._outbox.events += self._consumer.outbox.take_events()

    def _perform_one(self, action: Action, now: float) -> None:
        match action:
            case Send(address, message):
                self._send(address, codec.encode(message), now)
            case Reply(route, message):
                self._control.reply(route, codec.encode(message))
            case CloseConnection(address):
                self._control.forget(address)
            case OpenPeer():
                self._open(action, now)
            case ClosePeer(peer, control_address):
                for transport in self._transports.values():
                    transport.disconnect(peer)
                self._control.forget(control_address)
            case StartRead() | StartWrite():
                self._start_move(action, now)
            case StopRead() | StopWrite():
                self._cancel(action)
            case GrantWrites(transport, grant_id, blocks):
                self._transports[transport].grant_writes(grant_id, blocks)
            case RevokeWrites(_, transport, grant_id):
                self._moves[transport, self._transports[transport].revoke_writes(grant_id)] = action
            case PlaceBlocks() | CopyToHostBuffer():
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
            offer = next(o for o in action.offers if o.transport == choice.transport)
            try:
                made = TransportOffer(offer.transport, offer.reach, offer.blob, offer.near)
                self._transports[choice.transport].connect(
                    action.peer, made, action.geometry.regions
                )
            # Boundary for one peer: an offer is decoded by third-party libraries, which may raise
            # any exception.
            except Exception as error:
                problems.append(f"{choice.transport}: {_described(error)}")
                continue
            reason = "; ".join([choice.reason, *problems])
            self._outbox.report(PeerConnected(action.peer.engine, choice.transport, reason))
            self._consumer.peer_opened(action.peer, choice.transport, now)
            return
        self._consumer.peer_unreachable(
            action.peer, f"no transport reaches the producer ({'; '.join(problems)})", now
        )

    def _start_move(self, action: StartRead | StartWrite, now: float) -> None:
        if not action.segments:
            self._report_end(action, None, now)
            return
        transport = self._transports[action.transport]
        try:
            if isinstance(action, StartRead):
                handle = transport.read(action.peer, action.segments)
            else:
                handle = transport.write(action.peer, action.segments, action.grant_id)
        except Exception as error:  # boundary for one transfer: libraries may raise anything
            self._report_end(action, _described(error), now)
            if isinstance(action, StartWrite):
                # The transport has dropped the connection; the next request starts a new handshake.
                self._consumer.peer_unreachable(action.peer, _described(error), now)
            return
        self._moves[action.transport, handle] = action

    def _cancel(self, stop: StopRead | StopWrite) -> None:
        for (name, handle), move in self._moves.items():
            if _is_stopped(move, stop):
                self._transports[name].cancel(handle)

    def _store_blocks(self, action: PlaceBlocks | CopyToHostBuffer, now: float) -> None:
        store = self._store
        try:
            handle = (
                store.place(action.permutations, action.blocks)
                if isinstance(action, PlaceBlocks)
                else store.copy_to_host_buffer(action.blocks)
            )
        except Exception as error:  # boundary for one transfer: libraries may raise anything
            self._finish_store(action, _described(error), now)
            return
        self._stored[handle] = action


def _writers(settings: TransferWorkerSettings, consumer: Consumer, outbox: Outbox) -> PushWriter:
    producer = settings.producer
    ours = WriterSettings(
        engine=producer.engine,
        write_timeout_s=settings.consumer.read_timeout_s,
        max_lease_ttl_s=MAX_LEASES_WAITED * producer.lease_ttl_s,
        can_write=not producer.uses_host_buffer,
    )
    writers = PushWriter(ours, consumer.peers, outbox)
    consumer.add_peer_user(writers)
    return writers


def _is_stopped(move: StartRead | StartWrite | RevokeWrites, stop: StopRead | StopWrite) -> bool:
    match move, stop:
        case StartRead(request, peer), StopRead():
            return (request, peer) == (stop.request, stop.peer)
        case StartWrite(write), StopWrite():
            return write == stop.write
    return False


def _described(error: Exception) -> str:
    return str(error) if isinstance(error, KVFerryError) else f"{type(error).__name__}: {error}"


# -- postponed commands --
# Consumer commands that wait because their target blocks are still being copied to the host buffer.
#
# An engine with a host buffer may preempt a prefill and give the blocks to a loading request at
# once, while the blocks are still being copied for readers. The load would write into the same
# blocks, so the load starts after the copy has ended. Later commands wait too, so that the order of
# commands is kept.


class PostponedCommands:
    """Queue of consumer commands that wait for a copy to the host buffer."""

    def __init__(self, block_size: int, is_copying: Callable[[Collection[int]], bool]) -> None:
        self._block_size = block_size
        self._is_copying = is_copying
        self._commands: deque[ConsumerCommand] = deque()

    def postpones(self, command: ConsumerCommand) -> bool:
        """Return True, and queue the command, if the command must not run yet."""
        if not self._commands and not self._must_wait(command):
            return False
        self._commands.append(command)
        return True

    def take_due(self) -> Iterator[ConsumerCommand]:
        while self._commands and not self._must_wait(self._commands[0]):
            yield self._commands.popleft()

    def _must_wait(self, command: ConsumerCommand) -> bool:
        if not isinstance(command, StartLoad):
            return False
        filled = Destination(
            command.blocks, range(command.first_token, command.end_token)
        ).filled_blocks(self._block_size)
        return self._is_copying(set(chain.from_iterable(filled)))
