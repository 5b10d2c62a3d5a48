"""Tests a consumer that reads the KV of a prompt block by block while the producer computes it,
also when the producer must restart the prefill.
"""

import numpy as np
import pytest
from tests.protocol.test_consumer import (
    CONTROL,
    PEER,
    R1,
    connect,
    failures,
    make_consumer,
    of,
    sent,
    ticket,
)
from tests.protocol.test_consumer_push import READER, expect, registered

from kvferry.events import PrefillCompleted, TransferAbandoned, TransferFinished
from kvferry.protocol.actions import StartRead, StopRead
from kvferry.protocol.consumer.consumer import Consumer
from kvferry.protocol.fingerprints import fingerprint
from kvferry.protocol.messages import (
    Attach,
    Confirm,
    Confirmed,
    Detach,
    Heartbeat,
    HeartbeatReply,
    PushCancel,
    PushRegistration,
    PushWithdrawal,
    Refused,
)
from kvferry.protocol.tickets import NO_BLOCK, Ticket

WHOLE = fingerprint(range(16), 4, "")


def partial(ready: int, serial: int = 1) -> Ticket:
    """Return a ticket for 16 tokens in blocks 3, 4, 5, 6, with holes for blocks not ready yet."""
    runs = [(3, ready // 4)] * (ready > 0) + [(NO_BLOCK, 4 - ready // 4)] * (ready < 16)
    return Ticket("p", "e1", "a", serial, "p-host", 5600, 1, 4, [runs], WHOLE, 30.0)


def offer(consumer: Consumer, ready: int, now: float = 0, serial: int = 1) -> None:
    consumer.offered(CONTROL, READER, partial(ready, serial), f"T{serial}", ready, now)


def waiting() -> Consumer:
    """Return a consumer with one registered request, which has blocks 1, 2, 3, 4 for 16 tokens."""
    consumer = make_consumer()
    expect(consumer, tokens=WHOLE)
    connect(consumer)
    consumer.start(R1, [[1, 2, 3, 4]], range(0, 16), now=0)
    consumer.outbox.take_actions()
    return consumer


def blocks_read(consumer: Consumer) -> list[tuple[list[int], list[int]]]:
    """Return the local and the remote blocks of each read that the consumer started."""
    reads = [
        action
        for action in of(consumer.outbox.take_actions(), StartRead)
        if isinstance(action, StartRead)
    ]
    return [
        (
            [int(at) // 64 for segments in read.segments for at in segments.local_offsets],
            [int(at) // 64 for segments in read.segments for at in segments.remote_offsets],
        )
        for read in reads
    ]


def ended(consumer: Consumer, error: str | None = None, now: float = 1) -> None:
    consumer.read_ended(R1, PEER, error, now)


def test_each_block_is_read_once_as_it_comes_and_confirmed_at_the_end() -> None:
    consumer = waiting()
    offer(consumer, 4)
    assert blocks_read(consumer) == [([1], [3])]
    ended(consumer)
    assert consumer.outbox.take_actions() == []
    offer(consumer, 12)
    assert blocks_read(consumer) == [([2, 3], [4, 5])]
    offer(consumer, 16)
    assert blocks_read(consumer) == [], "one after the other"
    ended(consumer)
    assert blocks_read(consumer) == [([4], [6])]
    ended(consumer)
    assert sent(consumer.outbox.take_actions(), Confirm) == [Confirm("e1", "a", READER, 1)]
    consumer.receive(CONTROL, Confirmed("a", READER), now=2)
    assert consumer.outbox.take_events() == [
        PrefillCompleted(R1, num_tokens=16, num_left=12, landed_bytes=64),
        TransferFinished(R1),
    ]


def test_late_blocks_catch_up_in_one_read() -> None:
    consumer = make_consumer()
    expect(consumer, tokens=WHOLE)
    connect(consumer)
    for ready in (4, 8, 12):
        offer(consumer, ready)
    assert len(sent(consumer.outbox.take_actions(), Attach)) == 1
    consumer.start(R1, [[1, 2, 3, 4]], range(0, 16), now=0)
    assert blocks_read(consumer) == [([1, 2, 3], [3, 4, 5])]


def test_what_we_have_already_is_not_read_and_what_lies_before_it_is_not_waited_for() -> None:
    consumer = make_consumer()
    expect(consumer, tokens=WHOLE)
    connect(consumer)
    consumer.start(R1, [[1, 2, 3, 4]], range(8, 16), now=0)
    offer(consumer, 8)
    assert blocks_read(consumer) == []
    offer(consumer, 12)
    assert blocks_read(consumer) == [([3], [5])]


def test_a_prefill_that_goes_on_is_not_given_up_and_one_that_stands_still_is() -> None:
    consumer = waiting()
    offer(consumer, 4, now=0)
    ended(consumer, now=0)
    offer(consumer, 8, now=470)
    ended(consumer, now=470)
    consumer.outbox.take_actions()
    for second in range(471, 951):
        consumer.advance(now=second)
        for beat in sent(consumer.outbox.take_actions(), Heartbeat):
            assert isinstance(beat, Heartbeat)
            consumer.receive(CONTROL, HeartbeatReply("e1", beat.beat, []), now=second)
    assert failures(consumer) == ["the prefill made no progress within 480 s"]


@pytest.mark.parametrize("is_reading", [True, False])
def test_a_withdrawn_prefill_is_read_anew_from_the_start(is_reading: bool) -> None:
    consumer = waiting()
    offer(consumer, 8)
    blocks_read(consumer)
    if not is_reading:
        ended(consumer)
    consumer.receive(CONTROL, PushWithdrawal(READER, 1), now=2)
    actions = consumer.outbox.take_actions()
    if is_reading:
        assert of(actions, StopRead) == [StopRead(R1, PEER)]
        assert sent(actions, PushRegistration) == [], (
            "not before nothing writes into the blocks any more"
        )
        offer(consumer, 4, now=2, serial=1)
        ended(consumer, "cancelled", now=3)
        actions = consumer.outbox.take_actions()
    assert len(sent(actions, PushRegistration)) == 1
    assert consumer.outbox.take_events() == []
    offer(consumer, 16, now=3, serial=1)
    assert consumer.outbox.take_actions() == [], "an offer of before"
    offer(consumer, 16, now=4, serial=2)
    actions = consumer.outbox.take_actions()
    assert len(sent(actions, Attach)) == 1
    [read] = of(actions, StartRead)
    assert isinstance(read, StartRead)
    assert [list(segments.local_offsets // 64) for segments in read.segments] == [[1, 2, 3, 4]]
    ended(consumer, now=5)
    consumer.receive(CONTROL, Confirmed("a", READER), now=6)
    assert TransferFinished(R1) in consumer.outbox.take_events()


def test_a_withdrawal_before_there_are_blocks_is_waited_out() -> None:
    consumer = make_consumer()
    registered(consumer)
    consumer.offered(CONTROL, READER, ticket(), "T1", 4, 0)
    consumer.outbox.take_actions()
    consumer.receive(CONTROL, PushWithdrawal(READER, 1), now=1)
    assert len(sent(consumer.outbox.take_actions(), PushRegistration)) == 1
    consumer.abort(R1, now=2)
    assert len(sent(consumer.outbox.take_actions(), PushCancel)) == 1
    assert consumer.next_deadline() is None


def test_a_withdrawal_of_another_offer_changes_nothing() -> None:
    consumer = waiting()
    consumer.receive(CONTROL, PushWithdrawal(READER, 1), now=0)
    offer(consumer, 16)
    assert blocks_read(consumer) == [([1, 2, 3, 4], [3, 4, 5, 6])]
    consumer.receive(CONTROL, PushWithdrawal(READER, 7), now=0)
    assert consumer.outbox.take_actions() == []


@pytest.mark.parametrize("is_reading", [True, False])
def test_an_answer_that_crossed_the_withdrawal_changes_nothing(is_reading: bool) -> None:
    """The producer had already withdrawn the offer when our `Attach` or our request for
    confirmation arrived.
    """
    consumer = waiting()
    offer(consumer, 8)
    if not is_reading:
        ended(consumer)
    consumer.receive(CONTROL, PushWithdrawal(READER, 1), now=1)
    consumer.receive(CONTROL, Refused("a", READER, "the lease has ended", 1), now=1)
    if is_reading:
        ended(consumer, "cancelled", now=2)
    consumer.receive(CONTROL, Refused("a", READER, "the lease has ended", 1), now=3)
    offer(consumer, 16, now=4, serial=2)
    consumer.receive(
        CONTROL, Refused("a", READER, "the lease ended before the read was confirmed", 1), now=5
    )
    ended(consumer, now=6)
    assert sent(consumer.outbox.take_actions(), Confirm) == [Confirm("e1", "a", READER, 2)]
    consumer.receive(CONTROL, Refused("a", READER, "the lease has ended", 2), now=7)
    assert failures(consumer) == ["the producer refused: the lease has ended"]


def test_a_prefill_that_failed_after_it_was_withdrawn_fails_us_for_its_own_reason() -> None:
    consumer = waiting()
    offer(consumer, 8)
    consumer.receive(CONTROL, PushWithdrawal(READER, 1), now=1)
    ended(consumer, "cancelled", now=2)
    consumer.receive(CONTROL, Refused("", READER, "it was aborted"), now=3)
    assert failures(consumer) == ["the producer refused: it was aborted"]


def test_a_shorter_prompt_than_ours_is_not_waited_for() -> None:
    consumer = waiting()
    short = Ticket(
        "p", "e1", "a", 1, "p-host", 5600, 1, 4, [[(3, 1)]], fingerprint(range(3), 4, ""), 30.0
    )
    consumer.offered(CONTROL, READER, short, "T1", 3, 0)
    assert failures(consumer) == [
        "the prefill was of another prompt or of other weights: 0 tokens are known to be the same, "
        "but 16 are needed"
    ]


def test_an_abort_while_what_was_withdrawn_is_still_being_read_waits_for_its_end() -> None:
    consumer = waiting()
    offer(consumer, 8)
    consumer.receive(CONTROL, PushWithdrawal(READER, 1), now=1)
    consumer.abort(R1, now=2)
    assert consumer.outbox.take_events() == [TransferAbandoned(R1, "the request was aborted")]
    ended(consumer, "cancelled", now=3)
    assert failures(consumer) == ["the request was aborted"]
    assert consumer.num_transfers == 0


def test_a_failure_between_two_blocks_is_one_at_once() -> None:
    consumer = waiting()
    offer(consumer, 8)
    ended(consumer)
    consumer.outbox.take_actions()
    consumer.receive(CONTROL, Refused("a", READER, "it was aborted"), now=2)
    assert failures(consumer) == ["the producer refused: it was aborted"]
    assert sent(consumer.outbox.take_actions(), Detach) == [Detach("e1", "a", READER)]


def test_segments_cover_every_byte_once_however_the_offers_come() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        consumer, seen = waiting(), []
        steps = sorted({*rng.integers(1, 5, size=rng.integers(0, 4)).tolist(), 4})
        for step in steps:
            offer(consumer, step * 4)
            while reads := blocks_read(consumer):
                seen += [pair for ours, theirs in reads for pair in zip(ours, theirs, strict=True)]
                ended(consumer)
        assert seen == [(1, 3), (2, 4), (3, 5), (4, 6)]


def silent_until(consumer: Consumer, seconds: range) -> list[str]:
    """Return the failures while the producer answers heartbeats and sends no other message."""
    for second in seconds:
        consumer.advance(now=second)
        for beat in sent(consumer.outbox.take_actions(), Heartbeat):
            assert isinstance(beat, Heartbeat)
            consumer.receive(CONTROL, HeartbeatReply("e1", beat.beat, []), now=second)
    return failures(consumer)


def test_blocks_that_come_after_the_first_offer_leave_the_producer_as_much_time() -> None:
    consumer = make_consumer()
    expect(consumer, tokens=WHOLE)
    connect(consumer)
    offer(consumer, 4)
    consumer.start(R1, [[1, 2, 3, 4]], range(16), now=10)
    ended(consumer, now=10)
    consumer.outbox.take_actions()
    assert silent_until(consumer, range(11, 490)) == []
    assert silent_until(consumer, range(490, 492)) == ["the prefill made no progress within 480 s"]


def test_a_producer_that_only_repeats_itself_is_given_up() -> None:
    consumer = waiting()
    offer(consumer, 4)
    ended(consumer)
    for again in (100, 200, 300):
        offer(consumer, 4, now=again)
    for serial, again in ((1, 350), (2, 450)):
        consumer.receive(CONTROL, PushWithdrawal(READER, serial), now=again)
        offer(consumer, 4, now=again, serial=serial + 1)
        ended(consumer, now=again)
    consumer.outbox.take_actions()
    assert silent_until(consumer, range(451, 482)) == ["the prefill made no progress within 480 s"]


def test_an_offer_while_we_ask_for_confirmation_gives_the_producer_no_more_time() -> None:
    consumer = waiting()
    offer(consumer, 16)
    ended(consumer)
    offer(consumer, 20, now=2)
    consumer.advance(now=6)
    assert failures(consumer) == ["the producer did not confirm the read within 5 s"]


def test_an_older_offer_sets_nothing_back() -> None:
    consumer = make_consumer()
    expect(consumer, tokens=WHOLE)
    connect(consumer)
    for ready in (4, 16, 4):
        offer(consumer, ready)
    consumer.outbox.take_actions()
    consumer.start(R1, [[1, 2, 3, 4]], range(16), now=0)
    assert blocks_read(consumer) == [([1, 2, 3, 4], [3, 4, 5, 6])]


def test_what_is_left_when_the_prefill_is_over_is_what_has_not_landed() -> None:
    consumer = waiting()
    offer(consumer, 12)
    offer(consumer, 16)
    assert consumer.outbox.take_events() == [
        PrefillCompleted(R1, num_tokens=16, num_left=16, landed_bytes=0)
    ]
    consumer = make_consumer()
    expect(consumer, tokens=WHOLE)
    connect(consumer)
    offer(consumer, 16)
    consumer.start(R1, [[1, 2, 3, 4]], range(16), now=0)
    assert consumer.outbox.take_events() == [
        PrefillCompleted(R1, num_tokens=16, num_left=16, landed_bytes=0)
    ], "also when the blocks come last"
