"""Fuzzes a producer and a consumer with random messages from honest and dishonest peers: neither
raises, and no state remains.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec
import pytest
from tests.protocol import test_consumer_ranks as ranks
from tests.protocol.caches import no_writers, producer_settings, take_ended, take_replies
from tests.protocol.test_consumer import R1, SIDE, sent
from tests.protocol.test_consumer_push import OWN, READER
from tests.protocol.test_producer_push import KEY, PUSH_KEY, push_ticket

from kvferry.events import TransferFailed, TransferFinished
from kvferry.protocol.actions import Action, StartRead
from kvferry.protocol.consumer.transfer import Origin, PushInfo
from kvferry.protocol.fingerprints import fingerprint
from kvferry.protocol.messages import (
    Attach,
    Confirm,
    Confirmed,
    Detach,
    HandshakeRequest,
    Heartbeat,
    HeartbeatReply,
    PushCancel,
    PushRegistration,
    PushWithdrawal,
    RankLayout,
    Ready,
    Refused,
    encode_layout,
)
from kvferry.protocol.producer.producer import Producer
from kvferry.protocol.tickets import NO_BLOCK, Ticket
from kvferry.types import Address, EngineId, EngineIncarnation, Epoch, PeerId, RequestId, Route

NUM_LIVES, NUM_STEPS = 150, 150
TOKENS = fingerprint(range(8), 4, "")
HANDOVERS = {name: push_ticket(name) for name in ("h1", "h2", "h3")}


def ticket(request: str, serial: int, ready: int = 8) -> Ticket:
    runs = [(3, ready // 4)] * (ready >= 4) + [(NO_BLOCK, 2 - ready // 4)] * (ready < 8)
    return Ticket("p", "e1", request, serial, "p-host", 5600, 2, 4, [runs], TOKENS, 30.0)


@dataclass
class Prefill:
    serial: int
    match_id: str
    is_open: bool


@dataclass
class ProducerLife:
    """An engine that computes, preempts, aborts and retains prefills, and consumers that send any
    message in any order.
    """

    chance: random.Random
    is_honest: bool
    producer: Producer = field(init=False)
    prefills: dict[RequestId, Prefill] = field(default_factory=dict)
    now: float = 0.0
    serial: int = 0

    def __post_init__(self) -> None:
        settings = producer_settings()
        self.producer = Producer(
            replace(settings, peer_addresses=frozenset() if self.is_honest else frozenset({"h:1"})),
            KEY,
            PUSH_KEY,
            no_writers(),
        )

    def publish(self, request: RequestId, ready: int) -> None:
        prefill = self.prefills[request]
        self.producer.publish(
            request,
            prefill.match_id,
            KEY.sign(ticket(request, prefill.serial, ready)),
            ready,
            now=0,
        )

    def begin(self) -> None:
        self.serial += 1
        request = RequestId(f"q-0-{self.serial:08x}")
        prefill = self.prefills[request] = Prefill(
            self.serial, self.chance.choice([*HANDOVERS, ""]), self.chance.random() < 0.6
        )
        (self.producer.open if prefill.is_open else self.producer.grant)(
            request, prefill.serial, self.now
        )
        self.publish(request, 4 if prefill.is_open else 8)

    def go_on(self) -> None:
        if not self.prefills:
            return
        request = self.chance.choice(list(self.prefills))
        prefill = self.prefills[request]
        match self.chance.choice(["more", "withdraw", "close", "withhold", "abandon"]):
            case "abandon":
                self.producer.abandon(request, self.now)
            case "more":
                self.publish(request, 8)
            case _ if not prefill.is_open:
                return
            case "close":
                self.producer.close(request, self.now)
                prefill.is_open = False
                self.publish(request, 8)
            case "withdraw":
                self.producer.withdraw(request, prefill.serial, self.now)
                self.serial += 1
                prefill.serial = self.serial
                self.producer.open(request, prefill.serial, self.now)
                self.publish(request, 4)
            case "withhold":
                self.producer.fail_prefill(request, prefill.match_id, "aborted", self.now)
                del self.prefills[request]

    def hear(self) -> None:
        chance, engine = self.chance, self.chance.choice(["d1", "d2"])
        match_id = chance.choice([*HANDOVERS] if self.is_honest else [*HANDOVERS, ""])
        known = list(self.prefills)
        request = (
            f"{match_id} {engine}"
            if self.is_honest
            else chance.choice(["q-0-00000001", "q-0-11111111", *known[-2:]])
        )
        reader = (
            f"{engine}/{request}/{chance.randrange(2)}" if self.is_honest else chance.choice("abcd")
        )
        shown = HANDOVERS.get(match_id if self.is_honest else chance.choice([*HANDOVERS, ""]), "")
        lease = chance.choice(known or [RequestId("z")])
        serial = self.prefills[lease].serial if lease in self.prefills else 1
        text = KEY.sign(ticket(lease, serial + chance.choice([0, 0, 0, 1])))
        register = PushRegistration("e1", reader, request, engine, "h", 1, 1, 30.0, match_id, shown)
        said: list[Attach | Heartbeat | Confirm | Detach | PushRegistration | PushCancel] = [
            *[register] * 3,
            PushCancel("e1", reader, request, engine, match_id, shown),
            Attach(text, reader, "x", [f"{reader[:-1]}1"]),
            Detach("e1", lease, reader),
            Confirm("e1", lease, reader, chance.choice([0, serial])),
            Heartbeat("e1", 1, [lease, reader]),
        ]
        self.producer.receive(Route(engine.encode()), chance.choice(said), self.now)

    def settle(self) -> None:
        self.producer.advance(self.now)
        take_replies(self.producer.outbox)
        for ended in take_ended(self.producer.outbox):
            assert not self.prefills.pop(ended.request).is_open, (
                "blocks that are being filled are not given back"
            )

    def end(self) -> None:
        for request, prefill in self.prefills.items():
            if prefill.is_open:
                self.producer.close(request, self.now)
                prefill.is_open = False
        for wait_s in (1e4, 2e4, 3e4):
            self.now += wait_s
            self.settle()
        assert (
            self.producer.num_leases,
            self.producer.num_registrations,
            self.producer.next_deadline(),
        ) == (0, 0, None)
        assert self.prefills == {}


@pytest.mark.parametrize("is_honest", [True, False])
def test_no_order_of_messages_breaks_a_producer_and_nothing_is_kept_for_ever(
    is_honest: bool,
) -> None:
    for seed in range(NUM_LIVES):
        incarnation = ProducerLife(random.Random(seed), is_honest)
        for _ in range(NUM_STEPS):
            incarnation.now += incarnation.chance.choice([0, 0, 1, 10, 40])
            incarnation.chance.choices(
                [incarnation.begin, incarnation.go_on, incarnation.hear], [1, 2, 7]
            )[0]()
            incarnation.settle()
        incarnation.end()


class ConsumerLife:
    """A request that reads from two ranks of a producer which sends any message in any order."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.consumer = ranks.make_consumer()
        self.uses_host_buffer = self.chance.random() < 0.3
        self.reads: list[PeerId] = []
        self.over: list[object] = []
        self.has_blocks = False
        self.now = 0.0
        incarnation = EngineIncarnation(EngineId("p"), Epoch("e1"))
        self.consumer.track(
            R1,
            Origin(
                incarnation, Address("p-host", 5600), 2, push_info=PushInfo("h1", TOKENS, OWN, "PT")
            ),
            0,
        )
        for request in sent(self.consumer.outbox.take_actions(), HandshakeRequest):
            assert isinstance(request, HandshakeRequest)
            answer = ranks.answer(request, 2)
            layout = msgspec.structs.replace(
                msgspec.msgpack.decode(answer.layout, type=RankLayout),
                uses_host_buffer=self.uses_host_buffer,
            )
            self.consumer.receive(
                SIDE,
                msgspec.structs.replace(answer, layout=msgspec.Raw(encode_layout(layout))),
                now=0,
            )
            self.consumer.peer_opened(ranks.peer(request.tp_rank), "memory", now=0)

    def look(self) -> None:
        actions: list[Action] = self.consumer.outbox.take_actions()
        self.reads += [action.peer for action in actions if isinstance(action, StartRead)]
        self.over += [
            event
            for event in self.consumer.outbox.take_events()
            if isinstance(event, TransferFinished | TransferFailed)
        ]
        assert not (self.over and self.reads), (
            "blocks were given back while something may write into them"
        )

    def step(self) -> None:
        chance, consumer = self.chance, self.consumer
        self.now += chance.choice([0, 0, 1, 6])
        address, serial, ready = (
            ranks.control(chance.randrange(2)),
            chance.choice([1, 1, 2, 3]),
            chance.choice([4, 8]),
        )
        said: list[Callable[[], None]] = [
            lambda: consumer.offered(
                address,
                READER,
                ticket("a", serial, ready),
                "T",
                chance.choice([ready, 4, 8]),
                self.now,
            ),
            lambda: consumer.offered(
                address, READER, ticket("a", serial, ready), "T", ready, self.now
            ),
            self.start,
            lambda: consumer.receive(address, PushWithdrawal(READER, serial), self.now),
            self.end_read,
            lambda: consumer.receive(address, Confirmed("a", READER), self.now),
            lambda: consumer.receive(
                address, Ready(chance.choice(["a", READER]), READER), self.now
            ),
            lambda: consumer.receive(
                address, HeartbeatReply("e1", 1, [chance.choice(["a", READER, "z"])]), self.now
            ),
            lambda: consumer.receive(address, Refused("a", READER, "no", serial), self.now),
            lambda: consumer.advance(self.now),
        ]
        chance.choices(said, [4, 4, 4, 4, 6, 4, 4, 1, 1, 4])[0]()
        self.look()

    def start(self) -> None:
        if not self.has_blocks:
            self.has_blocks = True
            self.consumer.start(R1, [[5, 6]], range(8), self.now)

    def end_read(self) -> None:
        if self.reads:
            peer = self.reads.pop(self.chance.randrange(len(self.reads)))
            self.consumer.read_ended(R1, peer, self.chance.choice([None, None, "broken"]), self.now)

    def end(self) -> None:
        self.consumer.abort(R1, self.now)
        self.look()
        while self.reads:
            self.consumer.read_ended(R1, self.reads.pop(), "cancelled", self.now)
            self.look()
        assert self.consumer.num_transfers == 0
        assert len(self.over) == self.has_blocks, (
            "a request with blocks ends once, any other in silence"
        )


def test_no_order_of_messages_breaks_a_consumer_and_its_blocks_come_back_once() -> None:
    for seed in range(10 * NUM_LIVES):
        incarnation = ConsumerLife(seed)
        for _ in range(40):
            incarnation.step()
        incarnation.end()
