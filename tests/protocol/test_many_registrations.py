"""A hundred thousand registrations, half of them orphans: what is remembered of them does not grow."""

import gc

from tests.protocol.caches import no_writers
from tests.protocol.test_consumer import CONTROL, connect, make_consumer
from tests.protocol.test_consumer_push import OWN

from kvferry.protocol.actions import StartRead
from kvferry.protocol.fingerprints import fingerprint
from kvferry.protocol.messages import Attach, Confirm, Confirmed, HeartbeatReply, PushRegistration
from kvferry.protocol.producer import Producer, ProducerSettings
from kvferry.protocol.pulls import Invitation
from kvferry.protocol.push_tickets import PushTicket, PushTicketKey
from kvferry.protocol.tickets import Ticket, TicketKey
from kvferry.types import Address, EngineId, EngineLife, Epoch, PeerId, RequestId, Route

COUNT = 100_000
PER_SECOND = 100
ROUTE = Route(b"d")
TOKENS = fingerprint(range(8), 4, "")
KEY, PUSH_KEY = TicketKey(b"secret"), PushTicketKey(b"secret")


def ticket(number: int) -> Ticket:
    return Ticket("p", "e1", f"p{number}", number, "p-host", 5600, 1, 4, [[(3, 2)]], TOKENS, 30.0)


def registration(number: int, reader: str) -> PushRegistration:
    shown = PUSH_KEY.sign(PushTicket(f"h{number}", "p", "e1", "p-host", 5600, 1))
    return PushRegistration("e1", reader, f"d{number}", "d", "h", 1, 1, 30.0, f"h{number}", shown)


def num_objects() -> int:
    gc.collect()
    return len(gc.get_objects())


def test_a_producer_remembers_no_more_of_a_hundred_thousand_than_of_the_first() -> None:
    producer, held = Producer(ProducerSettings(EngineId("p"), Epoch("e1"), 30, 20, 5), KEY, PUSH_KEY, no_writers()), []
    for number in range(1, COUNT + 1):
        now = number / PER_SECOND
        request, reader = RequestId(f"p{number}"), f"d/d{number}/0"
        if number % 4 != 1:
            producer.receive(ROUTE, registration(number, reader), now)
        if number % 4 != 3:
            text = KEY.sign(ticket(number))
            producer.grant(request, number, now)
            producer.publish(request, f"h{number}", text, 8, now=0)
            if number % 4 != 1:
                producer.receive(ROUTE, Attach(text, reader), now)
                producer.receive(ROUTE, Confirm("e1", request, reader), now)
        producer.advance(now)
        producer.take_replies()
        producer.take_ended()
        assert producer.num_registrations + producer.num_leases <= 30 * PER_SECOND
        if number % (COUNT // 5) == 0:
            held.append(num_objects())
    assert max(held[1:]) - min(held[1:]) < COUNT // 100, held
    producer.advance(COUNT / PER_SECOND + 100)
    producer.advance(COUNT / PER_SECOND + 200)
    assert (producer.num_registrations, producer.num_leases, producer.next_deadline()) == (0, 0, None)


def test_a_consumer_remembers_no_more_of_many_than_of_the_first() -> None:
    consumer, held, now = make_consumer(), [], 0.0
    life, peer = EngineLife(EngineId("p"), Epoch("e1")), PeerId(EngineId("p"), Epoch("e1"), 0)
    invited = Invitation("h", TOKENS, OWN, "PT")
    consumer.expect(RequestId("first"), life, Address("p-host", 5600), 1, invited, now)
    connect(consumer)
    consumer.settle(RequestId("first"), now)
    for number in range(1, COUNT // 4 + 1):
        now = number / PER_SECOND
        request, reader = RequestId(f"r{number}"), f"d/r{number}/0"
        consumer.expect(request, life, Address("p-host", 5600), 1, invited, now)
        consumer.start(request, [[5, 6]], range(0, 8), now)
        if number % 2:
            consumer.offered(CONTROL, reader, ticket(number), "T", 8, now)
            assert any(isinstance(action, StartRead) for action in consumer.take_actions())
            consumer.read_ended(request, peer, None, now)
            consumer.receive(CONTROL, Confirmed(f"p{number}", reader), now)
        elif number > 2000:
            # Orphans of twenty seconds ago leave; those that stay would end by their deadline.
            consumer.abort(RequestId(f"r{number - 2000}"), now)
        consumer.receive(CONTROL, HeartbeatReply("e1", int(now), []), now)
        consumer.take_actions()
        consumer.take_events()
        assert consumer.num_pulls <= 1001
        if number % (COUNT // 20) == 0:
            held.append(num_objects())
    assert max(held[1:]) - min(held[1:]) < COUNT // 400, held
