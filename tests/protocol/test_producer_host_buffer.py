"""Tests a producer whose readers read from its host buffer: no reader may read or is confirmed
before the copy to the host buffer is complete, and no block is freed while it is being copied.
"""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule
from tests.protocol.caches import (
    no_writers,
    producer_settings,
    take_actions,
    take_copies,
    take_ended,
    take_replies,
)
from tests.protocol.test_producer import KEY, A, D, ProducerMachine, ended, make_producer, ticket

from kvferry.protocol.actions import CopyToHostBuffer, Reply
from kvferry.protocol.messages import (
    Attach,
    Confirm,
    Confirmed,
    Detach,
    Heartbeat,
    HeartbeatReply,
    Ready,
    Refused,
)
from kvferry.protocol.producer.producer import Producer
from kvferry.protocol.tickets import PushTicketKey
from kvferry.types import LeaseEnd, RequestId, Route

E = Route(b"e")
BLOCKS = ((3, 4), (7,))


def make_staged() -> Producer:
    settings = producer_settings(uses_host_buffer=True)
    return Producer(settings, KEY, PushTicketKey(b"secret"), no_writers())


def granted() -> Producer:
    producer = make_staged()
    producer.grant(A, 1, 0, BLOCKS)
    assert take_actions(producer.outbox) == [CopyToHostBuffer(A, BLOCKS, 1)]
    assert take_actions(producer.outbox) == []
    return producer


def refusals(producer: Producer) -> list[str]:
    replies = take_replies(producer.outbox)
    assert all(isinstance(reply.message, Refused) for reply in replies)
    return [reply.message.reason for reply in replies if isinstance(reply.message, Refused)]


def test_readers_are_told_when_the_copy_is_there() -> None:
    producer = granted()
    producer.receive(D, Attach(ticket(), "d/1"), now=1)
    producer.receive(E, Attach(ticket(), "e/1"), now=1)
    assert take_replies(producer.outbox) == []
    producer.copied_to_host_buffer(1, None, now=2)
    assert take_replies(producer.outbox) == [
        Reply(D, Ready("a", "d/1")),
        Reply(E, Ready("a", "e/1")),
    ]
    producer.receive(D, Confirm("e1", "a", "d/1"), now=2)
    assert take_replies(producer.outbox) == [Reply(D, Confirmed("a", "d/1"))]


def test_a_reader_that_comes_after_the_copy_is_told_at_once() -> None:
    producer = granted()
    producer.copied_to_host_buffer(1, None, now=2)
    producer.receive(D, Attach(ticket(), "d/1"), now=1)
    assert take_replies(producer.outbox) == [Reply(D, Ready("a", "d/1"))]


def test_a_reader_that_overtook_the_grant_is_told_after_grant_and_copy() -> None:
    producer = make_staged()
    producer.receive(D, Attach(ticket(), "d/1"), now=0)
    producer.receive(D, Heartbeat("e1", 1, ["a"]), now=1)
    assert take_replies(producer.outbox) == [Reply(D, HeartbeatReply("e1", 1, []))]
    producer.grant(A, 1, 1, BLOCKS)
    assert take_replies(producer.outbox) == []
    producer.copied_to_host_buffer(1, None, now=2)
    assert take_replies(producer.outbox) == [Reply(D, Ready("a", "d/1"))]


def test_nobody_is_confirmed_before_the_copy_is_there() -> None:
    producer = make_staged()
    producer.receive(D, Attach(ticket(), "d/1"), now=0)
    producer.receive(D, Confirm("e1", "a", "d/1"), now=0)
    assert refusals(producer) == ["the blocks were not ready to be read"]
    producer.grant(A, 1, 0, BLOCKS)
    producer.receive(D, Confirm("e1", "a", "d/1"), now=0)
    assert refusals(producer) == ["the blocks were not ready to be read"]


def test_a_producer_that_is_not_staged_copies_nothing_and_tells_nobody() -> None:
    producer = make_producer()
    producer.grant(A, 1, now=0)
    producer.receive(D, Attach(ticket(), "d/1"), now=1)
    assert (take_actions(producer.outbox), take_replies(producer.outbox)) == ([], [])


@pytest.mark.parametrize("how", ["abandoned", "expired", "all left"])
def test_the_end_of_a_lease_is_not_reported_while_its_blocks_are_copied(how: str) -> None:
    producer = granted()
    producer.receive(D, Attach(ticket(), "d/1"), now=0)
    if how == "expired":
        producer.advance(now=31)
    else:
        producer.receive(D, Detach("e1", "a", "d/1"), now=1)
    if how == "abandoned":
        producer.abandon(A, now=0)
    assert (ended(producer), producer.num_leases) == ([], 1)
    producer.copied_to_host_buffer(1, None, now=2)
    assert ended(producer) == [("a", LeaseEnd.EXPIRED if how == "expired" else LeaseEnd.RELEASED)]
    assert (take_replies(producer.outbox), producer.num_leases) == ([], 0)


def test_one_that_left_before_the_grant_does_not_free_blocks_that_are_copied() -> None:
    producer = make_staged()
    producer.receive(D, Attach(ticket(), "d/1"), now=0)
    producer.receive(D, Detach("e1", "a", "d/1"), now=0)
    producer.grant(A, 1, 1, BLOCKS)
    assert ended(producer) == []
    producer.copied_to_host_buffer(1, None, now=2)
    assert ended(producer) == [("a", LeaseEnd.RELEASED)]


def test_a_copy_that_fails_is_told_to_the_readers_and_frees_the_blocks() -> None:
    producer = granted()
    producer.receive(D, Attach(ticket(), "d/1", "", ["d/1/1"]), now=1)
    producer.copied_to_host_buffer(1, "no memory", now=2)
    assert refusals(producer) == ["the blocks could not be copied to the host buffer: no memory"]
    assert ended(producer) == [("a", LeaseEnd.RELEASED)]
    producer.receive(D, Attach(ticket(), "d/1/1"), now=2)
    assert refusals(producer) == ["the lease has ended"]
    assert producer.num_leases == 0


class StagedMachine(ProducerMachine):
    """`ProducerMachine` with copies that end at random times: no lease ends while its blocks are
    being copied, and no read is confirmed before its `Ready`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.producer = make_staged()
        self.copying: dict[RequestId, int] = {}
        self.told: set[tuple[str, str]] = set()

    @rule(serial=st.integers(1, 6), error=st.sampled_from([None, None, "broken"]))
    def end_copy(self, serial: int, error: str | None) -> None:
        request = RequestId(f"r{serial}")
        if request in self.copying:
            self.producer.copied_to_host_buffer(self.copying.pop(request), error, self.now)

    def confirmations_come_before_the_end(self) -> None:
        for action in take_copies(self.producer.outbox):
            self.copying[action.request] = action.copy
        for reply in take_replies(self.producer.outbox):
            match reply.message:
                case Ready(lease, reader):
                    assert RequestId(lease) not in self.copying
                    self.told.add((lease, reader))
                case Confirmed(lease, reader):
                    assert lease not in self.free
                    assert (lease, reader) in self.told
        for end in take_ended(self.producer.outbox):
            assert end.request not in self.free | self.copying.keys()
            self.free.add(end.request)

    def finish(self) -> None:
        self.confirmations_come_before_the_end()
        for request in sorted(self.copying):
            self.end_copy(int(request[1:]), None)


TestStagedMachine = StagedMachine.TestCase
