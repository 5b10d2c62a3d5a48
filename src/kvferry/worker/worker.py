"""The transfer worker: passes inputs to the protocol and performs the resulting actions.

The decisions are made by the pure `Producer`, `Consumer` and `PushWriter` in `protocol/`. The
transfer worker passes commands and messages to these objects; `effects.py` performs the actions
that they return, and passes completions to them. Owned by one thread (`TransferWorkerThread`); a
test may call `step` directly. See docs/decisions/005-worker-thread.md.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from kvferry.errors import InvalidTicket, RemoteProtocolError
from kvferry.events import (
    BytesMoved,
    Event,
    HandshakeFailed,
    MessageDropped,
    PeerConnected,
    PrefillCompleted,
    RetainedBlocksFetched,
    TransferFailed,
)
from kvferry.protocol import messages as codec
from kvferry.protocol.consumer.consumer import Consumer
from kvferry.protocol.consumer.context import ConsumerSettings
from kvferry.protocol.consumer.transfer import Destination, Origin
from kvferry.protocol.messages import PushOffer, ToConsumer, ToProducer
from kvferry.protocol.outbox import Outbox
from kvferry.protocol.producer.producer import Producer
from kvferry.protocol.producer.push_writer import ProducerSettings, PushWriter
from kvferry.protocol.tickets import PushTicketKey, TicketKey
from kvferry.sleep import short_sleep
from kvferry.transports.base import (
    BlockStore,
    ControlTransport,
    DataTransport,
    Disconnected,
    Received,
)
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
    ProducerCommand,
    PublishTicket,
    RegisterForPush,
    RejectLoad,
    ReleasePushTicket,
    ReleaseTicket,
    RevokeLease,
    SkipLoad,
    StartLoad,
    WithdrawStream,
    WorkerCommand,
)
from kvferry.worker.effects import Effects
from kvferry.worker.thread import WorkerThread

MAX_WAIT_S = 1.0
CONTROL_RESOLUTION_S = 0.0005
"""Resolution of the control transport, which waits for whole milliseconds.

A data transport that polls its device may ask for a shorter wait; `step` then sleeps instead.
"""
EXPIRY_RESOLUTION_S = 0.05
"""How much later than the expiry of a lease its blocks may be freed.

An expired lease is refused to readers at once; only the freeing of blocks may be late.
"""
PROBE_AFTER_S = 1.0
"""An engine that sleeps while its transfers run is woken after this time, and so shows that it does
not hang.
"""
_STATS_ONLY_EVENTS = (
    BytesMoved,
    HandshakeFailed,
    RetainedBlocksFetched,
    MessageDropped,
    PeerConnected,
    PrefillCompleted,
)
"""Events that no request waits for, so the engine is not woken."""


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

    title = "transfer worker"

    def __init__(
        self,
        settings: TransferWorkerSettings,
        transports: Sequence[DataTransport],
        control: ControlTransport,
        store: BlockStore,
        clock: Callable[[], float],
    ) -> None:
        self._key = TicketKey(settings.secret)
        self._consumer = Consumer(settings.consumer)
        self._outbox = Outbox()
        writers = PushWriter(settings.producer, self._consumer.peers, self._outbox)
        self._consumer.add_peer_user(writers)
        self._producer = Producer(
            settings.producer, self._key, PushTicketKey(settings.secret), writers
        )
        self._effects = Effects(
            transports, control, store, self._producer, self._consumer, self._outbox
        )
        self._control = control
        self._clock = clock
        self._block_size = settings.consumer.peers.geometry.block_size
        self._postponed: deque[ConsumerCommand] = deque()
        """A command that must wait (`_must_wait`), and the commands after it."""

    def waits_for_mark(self, command: WorkerCommand) -> bool:
        return True

    def snapshot(self) -> TransferWorkerSnapshot:
        producer, consumer = self._producer, self._consumer
        return TransferWorkerSnapshot(
            leases=producer.num_leases,
            transfers=consumer.num_transfers,
            reads=self._effects.num_moves,
            peers=len(consumer.peers),
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
        self._effects.perform(now)
        self._effects.poll(now)
        while self._postponed and not self._must_wait(self._postponed[0]):
            self._execute_for_consumer(self._postponed.popleft(), now)
        self._producer.advance(now)
        self._consumer.advance(now, engine_seen_at)
        self._effects.perform(now)
        return self._outbox.take_events()

    def failed(self, error: Exception) -> None:
        """Nothing can vouch for the blocks any more, so the engine ends."""
        return None

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
        waits += self._effects.poll_intervals_s(now)
        return max(0.0, min([MAX_WAIT_S, *waits]))

    def wakes_engine(self, events: Sequence[Event], engine_seen_at: float) -> bool:
        """Whether a request waits for an event, or the engine sleeps while its transfers run."""
        if self._consumer.num_transfers and self._clock() > engine_seen_at + PROBE_AFTER_S:
            return True
        return not all(isinstance(event, _STATS_ONLY_EVENTS) for event in events)

    def wake(self) -> None:
        self._control.wake()

    def close(self) -> None:
        self._effects.close()

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
        elif self._postponed or self._must_wait(command):
            self._postponed.append(command)
        else:
            self._execute_for_consumer(command, now)

    def _must_wait(self, command: ConsumerCommand) -> bool:
        """Whether a load would write into blocks that are still being copied to the host buffer.

        An engine with a host buffer may preempt a prefill and give the blocks to a loading request
        at once, while the blocks are still being copied for readers.
        """
        if not isinstance(command, StartLoad):
            return False
        tokens = range(command.first_token, command.end_token)
        filled = Destination(command.blocks, tokens).filled_blocks(self._block_size)
        return self._producer.is_copying(set(chain.from_iterable(filled)))

    def _execute_for_producer(  # noqa: C901 - one case per command
        self, command: ProducerCommand, now: float
    ) -> None:
        match command:
            case GrantLease(request, serial, blocks, lease_ttl_s):
                self._producer.grant(request, serial, now, blocks, lease_ttl_s)
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
                self._producer.abandon(request, now)
            case RevokeLease(request):
                self._producer.revoke(request, now)
            case ReleaseTicket(request, serial):
                self._producer.release_ticket(request, serial, now)
            case ReleasePushTicket(match_id):
                self._producer.decline_push(match_id, now)

    def _execute_for_consumer(self, command: ConsumerCommand, now: float) -> None:
        match command:
            case PrepareLoad(request, ticket, is_optional):
                origin = Origin.of(self._key.open(ticket), ticket, is_optional=is_optional)
                self._consumer.track(request, origin, now)
            case RegisterForPush(request, producer, address, tp_size, push_info):
                origin = Origin(producer, address, tp_size, push_info=push_info)
                self._consumer.track(request, origin, now)
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


TransferWorkerThread = WorkerThread[WorkerCommand, Event, TransferWorkerSnapshot]
