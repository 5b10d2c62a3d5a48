"""Tests the dialect of vLLM's own NixlConnector between two real NIXL agents of this process, with
real sockets for the handshake and a clock that the tests advance.
"""

import errno
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import zmq
from tests.protocol.test_producer import make_producer

from kvferry.events import Event, LeaseEnded, MessageDropped, TransferFailed, TransferFinished
from kvferry.protocol.stock_dialect import (
    StockIdentity,
    StockSource,
    completion_note,
    describe_rank,
    encode_payload,
)
from kvferry.testing.local import ManualClock
from kvferry.transports.base import Completion, Handle, Segments
from kvferry.transports.nixl.transport import NixlTransport
from kvferry.transports.stock_channel import StockDialer, StockListener
from kvferry.types import Address, EngineId, Epoch, LeaseEnd, PeerId, Region, RequestId
from kvferry.worker.commands import (
    AbortLoad,
    GrantLease,
    PrepareStockLoad,
    SkipLoad,
    StartLoad,
    WorkerCommand,
)
from kvferry.worker.stock import LINGER_S, MAX_NOTES_PER_TICK, RETRY_S, StockDialect, StockSettings
from kvferry.worker.stock_side_channel import StockSideChannel

BLOCK_SIZE, BLOCK_BYTES, NUM_BLOCKS, LAYERS = 4, 4096, 16, 2
DEADLINE_S = 20.0
IDENTITY = StockIdentity("0123", "CPU_ATTN", "LBHNC", 1, BLOCK_SIZE)
P = EngineId("p")


class LateTransport(NixlTransport):
    """Reports the end of transfers late, or fails to start them, if asked to."""

    is_holding_back = False
    read_error: Exception | None = None

    def __init__(self) -> None:
        super().__init__()
        self._held: list[Completion] = []

    def read(self, peer: PeerId, segments: Sequence[Segments]) -> Handle:
        if self.read_error is not None:
            raise self.read_error
        return super().read(peer, segments)

    def poll_posted(self) -> list[Completion]:
        self._held += super().poll_posted()
        held = [] if self.is_holding_back else self._held
        self._held = self._held if self.is_holding_back else []
        return held


class PoorDialer(StockDialer):
    """Has no socket left if told so."""

    has_sockets = True

    def ask(self, address: Address, question: bytes) -> None:
        if not self.has_sockets:
            raise zmq.ZMQError(errno.EMFILE)
        super().ask(address, question)


class Cache:
    """A KV cache that NIXL can reach."""

    def __init__(self) -> None:
        self.memory = np.zeros((LAYERS, NUM_BLOCKS, BLOCK_BYTES), np.uint8)
        self.regions = tuple(
            Region(
                f"layer.{i}", int(self.memory[i].ctypes.data), BLOCK_BYTES, BLOCK_BYTES, NUM_BLOCKS
            )
            for i in range(LAYERS)
        )
        self.transport = LateTransport()
        assert self.transport.register(self.regions)


class StockProducer(Cache):
    """What a stock P has: a cache, a side channel, and the notifications that arrive."""

    def __init__(self, identity: StockIdentity = IDENTITY) -> None:
        super().__init__()
        for block in range(NUM_BLOCKS):
            self.memory[:, block] = block + 1
        metadata = describe_rank(P, self.transport.identity()[1], identity, self.regions)
        listener = StockListener("127.0.0.1", "127.0.0.1", 0)
        self.address = listener.address
        self.side_channel = StockSideChannel(listener, encode_payload(identity, metadata))
        self.side_channel.start()
        self.notes: list[bytes] = []

    def poll(self) -> None:
        self.notes += self.transport.take_notes()

    def close(self) -> None:
        self.side_channel.close()
        self.transport.close()


class Consumer(Cache):
    """A D that speaks the dialect."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self.clock = clock
        settings = StockSettings(
            identity=IDENTITY,
            regions=self.regions,
            lease_s=30.0,
            handshake_timeout_s=5.0,
            read_timeout_s=30.0,
            queue_timeout_s=480.0,
            step_timeout_s=60.0,
        )
        self.dialer = PoorDialer()
        self.dialect = StockDialect(settings, self.transport, self.dialer, clock)
        self.events: list[Event] = []

    def execute(self, *commands: WorkerCommand) -> None:
        for command in commands:
            assert self.dialect.execute(command, self.clock())

    def step(self) -> None:
        self.events += self.dialect.advance(self.clock(), self.clock())

    def ends(self) -> list[Event]:
        return [e for e in self.events if isinstance(e, TransferFinished | TransferFailed)]

    def reason(self) -> str:
        [end] = self.ends()
        assert isinstance(end, TransferFailed)
        return end.reason


@pytest.fixture
def producer() -> Iterator[StockProducer]:
    made = StockProducer()
    yield made
    made.close()


@pytest.fixture
def consumer() -> Iterator[Consumer]:
    made = Consumer(ManualClock())
    yield made
    made.dialect.close()


def run(producer: StockProducer, consumer: Consumer, until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not until():
        assert time.monotonic() < deadline, (producer.notes, consumer.events)
        consumer.step()
        producer.poll()


def source(producer: StockProducer, request: str = "r") -> StockSource:
    return StockSource(P, RequestId(request), producer.address, (3, 5, 7), 10)


def prepare(
    producer: StockProducer, name: str = "d", request: str = "r", arrived_at: float = math.inf
) -> PrepareStockLoad:
    """The command about a request that has arrived just now, unless told otherwise."""
    return PrepareStockLoad(RequestId(name), source(producer, request), arrived_at)


def start(name: str = "d", first_token: int = 0) -> StartLoad:
    return StartLoad(RequestId(name), ((1, 2, 4),), first_token, 10)


# -- loads --


def test_a_load_reads_the_blocks_and_then_notifies_the_producer(
    producer: StockProducer, consumer: Consumer
) -> None:
    consumer.execute(prepare(producer), start())
    run(producer, consumer, lambda: completion_note(RequestId("r")) in producer.notes)
    assert consumer.ends() == [TransferFinished(RequestId("d"))]
    assert [int(consumer.memory[layer, block, -1]) for layer in (0, 1) for block in (1, 2, 4)] == [
        4, 6, 8, 4, 6, 8,
    ]  # fmt: skip
    assert not consumer.memory[:, [0, 3, 5]].any()
    assert consumer.dialect.num_loads == 0


def test_a_load_behind_a_local_prefix_reads_only_the_rest(
    producer: StockProducer, consumer: Consumer
) -> None:
    consumer.execute(prepare(producer), start(first_token=8))
    run(producer, consumer, lambda: bool(consumer.ends()))
    assert [int(consumer.memory[0, block, 0]) for block in (1, 2, 4)] == [0, 0, 8]


@pytest.mark.parametrize("command", [SkipLoad(RequestId("d")), AbortLoad(RequestId("d"))])
def test_a_load_that_is_not_needed_only_notifies(
    producer: StockProducer, consumer: Consumer, command: WorkerCommand
) -> None:
    consumer.execute(prepare(producer), command)
    run(producer, consumer, lambda: completion_note(RequestId("r")) in producer.notes)
    assert consumer.ends() == []


def test_the_producer_is_notified_once_after_the_last_of_several_loads(
    producer: StockProducer, consumer: Consumer
) -> None:
    consumer.execute(prepare(producer, "d1"), prepare(producer, "d2"), start("d1"))
    run(producer, consumer, lambda: bool(consumer.ends()))
    consumer.clock.advance(5)  # the next heartbeat follows every note sent so far
    run(producer, consumer, lambda: producer.notes.count(b"HB:r") == 2)
    assert completion_note(RequestId("r")) not in producer.notes
    consumer.execute(SkipLoad(RequestId("d2")), prepare(producer, "d3", "later"))
    consumer.clock.advance(5)
    run(producer, consumer, lambda: b"HB:later" in producer.notes)
    assert producer.notes.count(completion_note(RequestId("r"))) == 1


def test_an_aborted_read_is_reported_when_nothing_writes_any_more(
    producer: StockProducer, consumer: Consumer
) -> None:
    consumer.execute(prepare(producer), start(), AbortLoad(RequestId("d"), "the client has left"))
    run(producer, consumer, lambda: completion_note(RequestId("r")) in producer.notes)
    assert consumer.reason() == "the client has left"


def test_an_id_that_comes_again_during_a_read_fails_with_that_read(
    producer: StockProducer, consumer: Consumer
) -> None:
    consumer.transport.is_holding_back = True
    consumer.execute(prepare(producer), start())
    run(producer, consumer, lambda: consumer.dialect.num_reads == 1)
    consumer.execute(AbortLoad(RequestId("d"), "the client has left"))
    other = replace(start(), blocks=((6, 8, 9),))
    consumer.execute(prepare(producer, request="again"), other)
    consumer.step()
    assert (consumer.dialect.num_reads, consumer.ends()) == (1, [])
    consumer.transport.is_holding_back = False
    run(producer, consumer, lambda: completion_note(RequestId("r")) in producer.notes)
    assert consumer.reason() == "the client has left"
    assert consumer.dialect.num_loads == consumer.dialect.num_reads == 0
    assert not consumer.memory[:, [6, 8, 9]].any()


def test_a_read_after_the_lease_may_have_run_out_has_failed(
    producer: StockProducer, consumer: Consumer
) -> None:
    consumer.execute(prepare(producer))
    run(producer, consumer, lambda: b"HB:r" in producer.notes)
    consumer.clock.advance(20)
    consumer.execute(start())
    run(producer, consumer, lambda: bool(consumer.ends()))
    assert "may have run out" in consumer.reason()
    assert not consumer.memory.any()


def test_the_time_from_the_arrival_to_the_transfer_worker_counts(
    producer: StockProducer, consumer: Consumer
) -> None:
    command = prepare(producer, arrived_at=consumer.clock())
    consumer.clock.advance(16)  # in the server, and on the way to the transfer worker
    consumer.execute(command, start())
    consumer.clock.advance(4)
    run(producer, consumer, lambda: bool(consumer.ends()))
    assert "may have run out" in consumer.reason()


def test_a_load_with_blocks_is_not_skipped(producer: StockProducer, consumer: Consumer) -> None:
    consumer.execute(prepare(producer), start(), SkipLoad(RequestId("d")))
    run(producer, consumer, lambda: bool(consumer.ends()))
    assert consumer.ends() == [TransferFinished(RequestId("d"))]


def test_a_read_that_ends_after_the_lease_may_have_run_out_has_failed(
    producer: StockProducer, consumer: Consumer
) -> None:
    """The bytes arrive, but too late to know whose bytes they are."""
    consumer.execute(prepare(producer))
    run(producer, consumer, lambda: b"HB:r" in producer.notes)
    consumer.transport.is_holding_back = True
    consumer.execute(start())
    run(producer, consumer, lambda: consumer.memory[1, 4].any())
    assert consumer.ends() == []
    consumer.clock.advance(20)
    consumer.transport.is_holding_back = False
    run(producer, consumer, lambda: bool(consumer.ends()))
    assert "may have run out" in consumer.reason()


def test_heartbeats_do_not_extend_the_trust_in_a_lease(
    producer: StockProducer, consumer: Consumer
) -> None:
    """NIXL only buffers a heartbeat, so after a loss of the network none may have arrived."""
    consumer.execute(prepare(producer))
    for beats in range(1, 5):
        run(producer, consumer, lambda beats=beats: producer.notes.count(b"HB:r") == beats)  # type: ignore[misc]
        consumer.clock.advance(5)
    consumer.execute(start())
    run(producer, consumer, lambda: bool(consumer.ends()))
    assert "may have run out" in consumer.reason()


# -- peers that cannot be used --


def test_a_peer_that_does_not_answer_fails_the_load_in_time(consumer: Consumer) -> None:
    silent = StockListener("127.0.0.1", "127.0.0.1", 0)
    nobody = StockSource(P, RequestId("r"), silent.address, (3, 5, 7), 10)
    consumer.execute(PrepareStockLoad(RequestId("d"), nobody, math.inf), start())
    consumer.step()
    assert consumer.ends() == []
    consumer.clock.advance(5.1)
    consumer.step()
    silent.close()
    assert consumer.reason() == "the side channel did not answer"


def test_a_process_without_sockets_fails_the_load_and_asks_again_later(
    producer: StockProducer, consumer: Consumer
) -> None:
    consumer.dialer.has_sockets = False
    consumer.execute(prepare(producer), start())
    consumer.step()
    assert "Too many open files" in consumer.reason()
    consumer.dialer.has_sockets = True
    consumer.clock.advance(RETRY_S)
    consumer.execute(prepare(producer, "later"), start("later"))
    run(producer, consumer, lambda: TransferFinished(RequestId("later")) in consumer.events)


def test_a_read_that_cannot_start_fails_its_load_only(
    producer: StockProducer, consumer: Consumer
) -> None:
    consumer.transport.read_error = OSError("no memory left")
    consumer.execute(prepare(producer), start())
    run(producer, consumer, lambda: bool(consumer.ends()))
    assert "no memory left" in consumer.reason()
    consumer.transport.read_error = None
    consumer.execute(prepare(producer, "later"), start("later"))
    run(producer, consumer, lambda: TransferFinished(RequestId("later")) in consumer.events)


@pytest.mark.parametrize(
    ("identity", "reason"),
    [
        (replace(IDENTITY, compatibility_hash="4567"), "compatibility_hash"),
        (replace(IDENTITY, layout="LBNHC"), "kv_cache_layout"),
    ],
)
def test_a_peer_of_another_form_fails_the_load_by_name(
    consumer: Consumer, identity: StockIdentity, reason: str
) -> None:
    producer = StockProducer(identity)
    consumer.execute(prepare(producer), start())
    run(producer, consumer, lambda: bool(consumer.ends()))
    producer.close()
    assert reason in consumer.reason()


def test_a_block_that_the_producer_does_not_have_fails_the_load(
    producer: StockProducer, consumer: Consumer
) -> None:
    wrong = replace(source(producer), block_ids=(3, 5, NUM_BLOCKS))
    consumer.execute(PrepareStockLoad(RequestId("d"), wrong, math.inf), start())
    run(producer, consumer, lambda: bool(consumer.ends()))
    assert "name block 16" in consumer.reason()


def test_a_restarted_engine_at_the_address_replaces_the_old_one(consumer: Consumer) -> None:
    first = StockProducer()
    consumer.execute(prepare(first), start())
    run(first, consumer, lambda: completion_note(RequestId("r")) in first.notes)
    other = replace(source(first), engine=EngineId("restarted"))
    consumer.execute(PrepareStockLoad(RequestId("d2"), other, math.inf), start("d2"))
    run(first, consumer, lambda: len(consumer.ends()) == 2)
    assert not consumer.transport.is_connected(PeerId(P, Epoch(f"stock {first.address}"), 0))
    first.close()
    failed = consumer.ends()[1]
    assert isinstance(failed, TransferFailed)
    assert "engine p answers at this address" in failed.reason


def test_an_engine_that_is_named_at_a_wrong_address_is_still_loaded_from(
    producer: StockProducer, consumer: Consumer
) -> None:
    silent = StockListener("127.0.0.1", "127.0.0.1", 0)
    wrong = replace(source(producer), address=silent.address)
    consumer.execute(PrepareStockLoad(RequestId("wrong"), wrong, math.inf), start("wrong"))
    consumer.execute(prepare(producer), start())
    run(producer, consumer, lambda: bool(consumer.ends()))
    assert consumer.ends() == [TransferFinished(RequestId("d"))]
    consumer.clock.advance(5.1)
    consumer.step()
    silent.close()
    assert TransferFailed(RequestId("wrong"), "the side channel did not answer") in consumer.ends()


def test_a_wrong_name_at_an_address_does_not_end_the_question_of_the_right_one(
    producer: StockProducer, consumer: Consumer
) -> None:
    wrong = replace(source(producer), engine=EngineId("another"))
    consumer.execute(PrepareStockLoad(RequestId("wrong"), wrong, math.inf), start("wrong"))
    consumer.clock.advance(3)
    consumer.execute(prepare(producer), start())
    # The deadline of the first question passes; the producer has not answered the second one yet.
    consumer.clock.advance(3)
    consumer.step()
    run(producer, consumer, lambda: len(consumer.ends()) == 2)
    assert TransferFinished(RequestId("d")) in consumer.ends()


# -- the producer's side --


class Asking:
    """What a stock D has: an agent that has connected to our P."""

    def __init__(self, ours: Cache) -> None:
        self.cache = Cache()
        self.peer = PeerId(EngineId("ours"), Epoch("1"), 0)
        self.cache.transport.connect_unnamed(self.peer, ours.transport.identity()[1], ours.regions)

    def notify(self, note: bytes) -> None:
        self.cache.transport.notify(self.peer, note)


def test_notifications_of_a_stock_consumer_renew_and_end_our_leases(consumer: Consumer) -> None:
    ours, clock, asking = make_producer(), consumer.clock, Asking(consumer)
    ours.grant(RequestId("r"), 1, clock())

    def serve(until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not until():
            assert time.monotonic() < deadline
            asking.cache.transport.poll_posted()
            consumer.dialect.serve(ours, clock())
            ours.advance(clock())

    clock.advance(25)
    asking.notify(b"HB:other,r")
    asking.notify(b"garbage")
    serve(lambda: _dropped(consumer))
    clock.advance(19)  # 44 s after the grant of 30 s
    ours.advance(clock())
    assert ours.num_leases == 1
    asking.notify(completion_note(RequestId("r")))
    asking.notify(b"more garbage")
    serve(lambda: _dropped(consumer))
    assert ours.num_leases == 1  # another choice of the same request may still read
    clock.advance(LINGER_S)
    consumer.dialect.serve(ours, clock())
    assert ours.outbox.take_events() == [LeaseEnded(RequestId("r"), LeaseEnd.RELEASED)]
    asking.cache.transport.close()


def _dropped(consumer: Consumer) -> bool:
    """Whether the garbage has arrived, and so everything that was sent before it."""
    return bool(consumer.dialect.advance(consumer.clock(), consumer.clock()))


def test_a_flood_of_notifications_is_handled_a_part_at_a_time(consumer: Consumer) -> None:
    ours, clock, asking = make_producer(), consumer.clock, Asking(consumer)
    for _ in range(3 * MAX_NOTES_PER_TICK):
        asking.notify(b"garbage")
    dropped: list[Event] = []
    deadline = time.monotonic() + DEADLINE_S
    while sum(map(_num_dropped, dropped)) < 3 * MAX_NOTES_PER_TICK:
        assert time.monotonic() < deadline, dropped
        asking.cache.transport.poll_posted()
        consumer.dialect.serve(ours, clock())
        events = consumer.dialect.advance(clock(), clock())
        assert len(events) <= 1
        dropped += events
    assert max(map(_num_dropped, dropped)) <= MAX_NOTES_PER_TICK
    asking.cache.transport.close()


def _num_dropped(event: Event) -> int:
    assert isinstance(event, MessageDropped)
    return int(event.reason.rpartition("(")[2].split()[0])


def test_two_ranks_of_a_consumer_must_both_have_read(consumer: Consumer) -> None:
    ours, clock, asking = make_producer(), consumer.clock, Asking(consumer)
    ours.grant(RequestId("r"), 1, clock())
    for expected in (1, 0):
        asking.notify(b"r:2")
        asking.notify(b"garbage")
        deadline = time.monotonic() + DEADLINE_S
        while not _dropped(consumer):
            assert time.monotonic() < deadline
            asking.cache.transport.poll_posted()
            consumer.dialect.serve(ours, clock())
        clock.advance(LINGER_S)
        consumer.dialect.serve(ours, clock())
        assert ours.num_leases == expected
    asking.cache.transport.close()


def test_commands_about_other_loads_are_left_to_the_consumer(consumer: Consumer) -> None:
    for command in (start("x"), SkipLoad(RequestId("x")), AbortLoad(RequestId("x"))):
        assert not consumer.dialect.execute(command, consumer.clock())
    assert not consumer.dialect.execute(GrantLease(RequestId("x"), 1), consumer.clock())


def test_a_listener_ignores_what_is_no_stock_handshake(producer: StockProducer) -> None:
    dialer = StockDialer()
    dialer.ask(producer.address, b"\x93\xc4\x0cget_meta_msg\x00\x01")
    other = Address("localhost", producer.address.port)
    dialer.ask(other, b"\x93\xc4\x0cget_meta_msg\x00\x00")
    replies: list[tuple[Address, bytes]] = []
    deadline = time.monotonic() + DEADLINE_S
    while not replies:
        assert time.monotonic() < deadline
        replies = dialer.poll()
    dialer.close()
    assert [address for address, _ in replies] == [other]
