"""Tests that the memory which producer and consumer hold for registrations does not grow with the
number of registrations: tens of thousands, half of them orphans.
"""

import gc
import sys
from types import FunctionType, ModuleType

import pytest
from tests.protocol.caches import no_writers, producer_settings, take_replies
from tests.protocol.test_consumer import CONTROL, connect, make_consumer, sent
from tests.protocol.test_consumer_push import OWN
from tests.sampling import exhaustive

from kvferry.protocol.actions import StartRead
from kvferry.protocol.consumer.transfer import Origin, PushInfo
from kvferry.protocol.fingerprints import fingerprint
from kvferry.protocol.messages import (
    Attach,
    Confirm,
    Confirmed,
    Heartbeat,
    HeartbeatReply,
    PushRegistration,
)
from kvferry.protocol.producer.producer import Producer
from kvferry.protocol.tickets import PushTicket, PushTicketKey, Ticket, TicketKey
from kvferry.types import Address, EngineId, EngineIncarnation, Epoch, PeerId, RequestId, Route

many = pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=exhaustive)])
PER_SECOND = 50
LOOK_EVERY = 50 * PER_SECOND
"""The number of registrations between two measurements. The interval is longer than the lifetime of
a registration, a lease or a tombstone.
"""
FEW_BYTES = 6
"""The allowed growth per registration: less than a pointer. A dict that grows once adds 4."""
ROUTE = Route(b"d")
TOKENS = fingerprint(range(8), 4, "")
KEY, PUSH_KEY = TicketKey(b"secret"), PushTicketKey(b"secret")


def ticket(number: int) -> Ticket:
    return Ticket("p", "e1", f"p{number}", number, "p-host", 5600, 1, 4, [[(3, 2)]], TOKENS, 30.0)


def registration(number: int, reader: str) -> PushRegistration:
    shown = PUSH_KEY.sign(PushTicket(f"h{number}", "p", "e1", "p-host", 5600, 1))
    return PushRegistration("e1", reader, f"d{number}", "d", "h", 1, 1, 30.0, f"h{number}", shown)


class Growth:
    """Measure the memory in use after every `every` registrations: objects in the whole process,
    and bytes reachable from `state`. The live state has already reached its steady size at the
    first measurement.
    """

    def __init__(self, state: object, every: int = LOOK_EVERY) -> None:
        self._state = state
        self._every = every
        self._objects: list[int] = []
        self._bytes: list[int] = []

    def look(self, number: int) -> None:
        if number % self._every == 0:
            gc.collect()
            # This count includes strings; gc does not track strings.
            self._objects.append(sys.getallocatedblocks())
            self._bytes.append(total_bytes(self._state))

    @property
    def objects(self) -> float:
        """The number of objects added per registration."""
        return self._each(self._objects)

    @property
    def bytes(self) -> float:
        return self._each(self._bytes)

    def _each(self, looks: list[int]) -> float:
        return (looks[-1] - looks[1]) / (len(looks) - 2) / self._every


def total_bytes(state: object) -> int:
    """Return the size of all objects reachable from `state`, except classes and code."""
    seen: dict[int, object] = {}
    found = [state]
    while found:
        reached = found.pop()
        if id(reached) not in seen and not isinstance(reached, type | ModuleType | FunctionType):
            seen[id(reached)] = reached
            found += gc.get_referents(reached)
    return sum(map(sys.getsizeof, seen.values()))


@many
def test_a_producer_remembers_no_more_of_the_last_registrations_than_of_the_first(
    count: int,
) -> None:
    producer = Producer(
        producer_settings(),
        KEY,
        PUSH_KEY,
        no_writers(),
    )
    growth = Growth(producer)
    _serve(producer, count, growth)
    assert growth.objects < 0.1
    assert growth.bytes < FEW_BYTES
    producer.advance(count / PER_SECOND + 100)
    producer.advance(count / PER_SECOND + 200)
    assert (producer.num_registrations, producer.num_leases, producer.next_deadline()) == (
        0,
        0,
        None,
    )


def _serve(producer: Producer, count: int, growth: Growth) -> None:
    """Half of the registrations find no prefill, and a third of the prefills find no reader."""
    for number in range(1, count + 1):
        now = number / PER_SECOND
        request, reader = RequestId(f"p{number}"), f"d/d{number}/0"
        producer.receive(ROUTE, registration(number, reader), now)
        if number % 4 != 3:
            is_lonely = number % 4 == 1
            text = KEY.sign(ticket(number))
            producer.grant(request, number, now)
            producer.publish(
                request, f"lonely {number}" if is_lonely else f"h{number}", text, 8, now
            )
            if not is_lonely:
                producer.receive(ROUTE, Attach(text, reader), now)
                producer.receive(ROUTE, Confirm("e1", request, reader), now)
        producer.advance(now)
        take_replies(producer.outbox)
        producer.outbox.take_events()
        assert producer.num_registrations + producer.num_leases <= 30 * PER_SECOND
        growth.look(number)


class Decoder:
    """A consumer that makes 50 registrations per second; every second registration is an orphan.
    Its producer answers every heartbeat.
    """

    def __init__(self) -> None:
        self.consumer = make_consumer(push_registration_timeout_s=20)
        self.incarnation, self.peer = (
            EngineIncarnation(EngineId("p"), Epoch("e1")),
            PeerId(EngineId("p"), Epoch("e1"), 0),
        )
        self.expect("first", 0)
        connect(self.consumer)
        self.consumer.settle(RequestId("first"), 0)

    def expect(self, name: str, now: float) -> RequestId:
        invited = PushInfo(f"handover {name}", TOKENS, OWN, f"push ticket {name}")
        self.consumer.track(
            RequestId(name),
            Origin(self.incarnation, Address("p-host", 5600), 1, push_info=invited),
            now,
        )
        return RequestId(name)

    def register(self, number: int, now: float) -> None:
        request = self.expect(f"r{number}", now)
        if number % 8 != 2:
            self.consumer.start(request, [[5, 6]], range(0, 8), now)
        if number % 2:
            self.receive_all(number, request, now)

    def receive_all(self, number: int, request: RequestId, now: float) -> None:
        reader = f"d/{request}/0"
        self.consumer.offered(CONTROL, reader, ticket(number), f"ticket {number}", 8, now)
        assert any(isinstance(action, StartRead) for action in self.consumer.outbox.take_actions())
        self.consumer.read_ended(request, self.peer, None, now)
        self.consumer.receive(CONTROL, Confirmed(f"p{number}", reader), now)

    def pass_second(self, latest: int, now: float) -> None:
        """End the orphans of 20 seconds ago: some abort, with and without blocks, some have been
        forgotten by the producer, and some reach their deadline.
        """
        leaving = range(latest - 21 * PER_SECOND, latest - 20 * PER_SECOND)
        for number in leaving:
            if number % 8 in (2, 4):
                self.consumer.abort(RequestId(f"r{number}"), now)
        self.consumer.advance(now)
        gone = [f"d/r{number}/0" for number in leaving if number % 8 == 6]
        for beat in sent(self.consumer.outbox.take_actions(), Heartbeat):
            assert isinstance(beat, Heartbeat)
            self.consumer.receive(CONTROL, HeartbeatReply("e1", beat.beat, gone), now)


def _ask(decoder: Decoder, count: int, growth: Growth) -> None:
    consumer = decoder.consumer
    for number in range(1, count + 1):
        now = number / PER_SECOND
        decoder.register(number, now)
        if number % PER_SECOND == 0:
            decoder.pass_second(number, now)
        consumer.outbox.take_actions()
        consumer.outbox.take_events()
        assert consumer.num_transfers <= 12 * PER_SECOND
        growth.look(number)


@many
def test_a_consumer_remembers_no_more_of_the_last_registrations_than_of_the_first(
    count: int,
) -> None:
    decoder, end_s = Decoder(), count / PER_SECOND
    growth = Growth(decoder.consumer)
    _ask(decoder, count, growth)
    assert growth.objects < 0.1
    assert growth.bytes < FEW_BYTES
    for later in range(1, 40):
        decoder.pass_second(count + later * PER_SECOND, end_s + later)
    assert decoder.consumer.num_transfers == 0


@pytest.mark.parametrize("is_string", [True, False])
def test_one_short_string_or_number_kept_of_each_registration_is_seen(is_string: bool) -> None:
    """The negative control of the two tests above."""
    kept: list[object] = []
    growth = Growth(kept, 100)
    for number in range(1, 2001):
        kept.append(f"r{number}" if is_string else 1)
        growth.look(number)
    assert (growth.objects > 0.9) == is_string
    assert growth.bytes > FEW_BYTES
