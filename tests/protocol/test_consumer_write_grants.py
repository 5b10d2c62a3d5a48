"""Tests a consumer that grants a producer writes into its blocks: the blocks are used or freed only
when the producer certainly cannot write into them any more.
"""

import msgspec
import pytest
from tests.protocol import test_consumer_ranks as ranks
from tests.protocol.test_consumer import (
    CONTROL,
    PEER,
    R1,
    R2,
    SIDE,
    connect,
    failures,
    make_consumer,
    of,
    reply,
    sent,
    ticket,
)
from tests.protocol.test_consumer_push import (
    CANCEL,
    OWN,
    READER,
    REGISTRATION,
    expect,
    offer,
    pushed_by,
)

from kvferry.errors import RemoteProtocolError
from kvferry.events import PrefillCompleted, TransferAbandoned, TransferFailed, TransferFinished
from kvferry.protocol import messages as codec
from kvferry.protocol.actions import GrantWrites, RevokeWrites, StartRead
from kvferry.protocol.consumer.consumer import Consumer
from kvferry.protocol.consumer.transfer import PushInfo
from kvferry.protocol.consumer.write_grants import MAX_GRANTED_BLOCKS
from kvferry.protocol.fingerprints import fingerprint
from kvferry.protocol.messages import (
    HandshakeRequest,
    Heartbeat,
    HeartbeatReply,
    PushCancel,
    PushRegistration,
    Refused,
    Revoke,
    Revoked,
    WriteFailed,
    WriteGrantInfo,
    Written,
)
from kvferry.protocol.planning.plan import BlockPermutation

LEASE_S = 30
TAKE_BACK = RevokeWrites(R1, "memory", 1)
REVOKE = Revoke("e1", READER, 1)


def lender(is_fenced: bool = True) -> Consumer:
    """Return a registered and connected consumer; blocks 5 and 6 are granted under grant id 1."""
    consumer = make_consumer(
        writable_transports=frozenset({"memory"}), fenced=frozenset({"memory"} if is_fenced else ())
    )
    expect(consumer)
    connect(consumer)
    consumer.start(R1, [[5, 6]], range(0, 8), now=1)
    return consumer


def written(consumer: Consumer, now: float = 2) -> None:
    consumer.receive(
        CONTROL, Written(READER, 1, 8, is_last=True, left_tokens=4, early_bytes=64), now
    )


def test_blocks_are_lent_as_soon_as_there_are_some_and_used_once_they_are_back() -> None:
    consumer = lender()
    actions = consumer.outbox.take_actions()
    assert of(actions, GrantWrites) == [GrantWrites("memory", 1, ((5, 6),))]
    [registration] = sent(actions, PushRegistration)
    assert isinstance(registration, PushRegistration)
    assert registration.write is not None
    assert (registration.write.grant_id, registration.write.local_block_ids) == (1, [[5, 6]])
    consumer.receive(CONTROL, Written(READER, 1, 4, is_last=False), now=2)
    assert (consumer.outbox.take_actions(), consumer.outbox.take_events()) == ([], [])
    written(consumer)
    assert consumer.outbox.take_actions() == [TAKE_BACK]
    assert consumer.outbox.take_events() == [PrefillCompleted(R1, 8, 4, 64)]
    consumer.writes_revoked(R1, 1, now=3)
    assert consumer.outbox.take_events() == [TransferFinished(R1)]
    assert (consumer.num_transfers, consumer.next_deadline()) == (0, None)


def test_what_was_written_without_a_fence_is_used_at_once_for_the_producer_has_said_that_it_was_the_last() -> (  # noqa: E501
    None
):
    consumer = lender(is_fenced=False)
    written(consumer)
    assert consumer.outbox.take_events() == [PrefillCompleted(R1, 8, 4, 64), TransferFinished(R1)]


@pytest.mark.parametrize("is_fenced", [True, False])
def test_an_aborted_request_keeps_its_blocks_until_nothing_can_be_written_into_them(
    is_fenced: bool,
) -> None:
    consumer = lender(is_fenced)
    consumer.outbox.take_actions()
    consumer.abort(R1, now=2)
    actions = consumer.outbox.take_actions()
    assert (of(actions, RevokeWrites), sent(actions, Revoke)) == ([TAKE_BACK] * is_fenced, [REVOKE])
    assert consumer.outbox.take_events() == [TransferAbandoned(R1, "the request was aborted")]
    if is_fenced:
        consumer.receive(CONTROL, Revoked(READER, 1), now=3)
        assert consumer.outbox.take_events() == [], "its own fence is the better witness"
        consumer.writes_revoked(R1, 1, now=3)
    else:
        consumer.receive(CONTROL, Revoked(READER, 2), now=3)
        assert consumer.outbox.take_events() == []
        consumer.receive(CONTROL, Revoked(READER, 1), now=3)
    assert consumer.outbox.take_events() == [TransferFailed(R1, "the request was aborted")]
    assert sent(consumer.outbox.take_actions(), PushCancel) == [CANCEL]
    assert (consumer.num_transfers, consumer.next_deadline()) == (0, None)


def test_without_a_fence_a_silent_producer_is_asked_again_and_waited_for_ten_leases_more() -> None:
    consumer = lender(is_fenced=False)
    consumer.abort(R1, now=2)
    consumer.outbox.take_actions()
    consumer.advance(now=3)
    assert sent(consumer.outbox.take_actions(), Revoke) == [REVOKE]
    consumer.outbox.take_events()
    consumer.advance(now=2 + 11 * LEASE_S - 0.1)
    assert failures(consumer) == []
    consumer.advance(now=2 + 11 * LEASE_S + 1)
    assert failures(consumer) == ["the request was aborted"]


def test_without_a_fence_a_producer_that_lives_anew_has_surely_stopped() -> None:
    consumer = lender(is_fenced=False)
    consumer.outbox.take_actions()
    consumer.disconnected(CONTROL, now=2)
    assert failures(consumer) == []
    [request] = sent(consumer.outbox.take_actions(), HandshakeRequest)
    assert isinstance(request, HandshakeRequest)
    consumer.receive(SIDE, msgspec.structs.replace(reply(request.nonce), epoch="e2"), now=5)
    assert failures(consumer) == [f"the connection to {CONTROL} was lost"]


def test_a_report_that_arrives_while_the_handshake_runs_again_is_ignored() -> None:
    consumer = lender(is_fenced=False)
    consumer.disconnected(CONTROL, now=2)
    consumer.outbox.take_actions()
    consumer.receive(CONTROL, Revoked(READER, 1), now=3)
    assert (consumer.outbox.take_actions(), failures(consumer)) == ([], [])


def test_with_a_fence_the_bytes_of_a_producer_that_lives_anew_are_waited_for_too() -> None:
    """The old incarnation has ended, but the transport may still be receiving the bytes it sent."""
    consumer = lender()
    consumer.outbox.take_actions()
    consumer.disconnected(CONTROL, now=2)
    expect(consumer, R2, now=2)
    [request] = sent(consumer.outbox.take_actions(), HandshakeRequest)
    assert isinstance(request, HandshakeRequest)
    consumer.receive(SIDE, msgspec.structs.replace(reply(request.nonce), epoch="e2"), now=3)
    assert failures(consumer) == []
    consumer.writes_revoked(R1, 1, now=4)
    assert failures(consumer) == [f"the connection to {CONTROL} was lost"]


@pytest.mark.parametrize("is_fenced", [True, False])
def test_a_producer_that_gives_back_what_it_was_not_asked_for_has_not_written_it(
    is_fenced: bool,
) -> None:
    consumer = lender(is_fenced)
    consumer.outbox.take_actions()
    consumer.receive(CONTROL, Revoked(READER, 1), now=2)
    written(consumer)
    consumer.writes_revoked(R1, 1, now=3)
    assert consumer.outbox.take_events() == []
    assert sent(consumer.outbox.take_actions(), PushRegistration) == [REGISTRATION]


def test_a_request_whose_blocks_fill_more_than_a_message_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvferry.protocol.consumer.write_grants.MAX_GRANTED_BLOCKS", 1)
    consumer = lender()
    assert of(consumer.outbox.take_actions(), GrantWrites) == []


def test_as_many_blocks_as_are_lent_at_most_fit_into_a_message() -> None:
    lease = WriteGrantInfo(
        1,
        "memory",
        0,
        [[(1 << 31) - 1] * MAX_GRANTED_BLOCKS],
        0,
        4,
        [],
        fingerprint(range(8), 4, ""),
    )
    message = PushRegistration(
        "e1", READER, "r1", "d", "host", 1, 1, 30.0, "h1", "T" * 1024 * 1024, "e2", lease
    )
    assert codec.decode(codec.encode(message)) == message


def test_what_cannot_be_written_is_read_once_the_blocks_are_back() -> None:
    consumer = lender()
    consumer.outbox.take_actions()
    consumer.receive(CONTROL, WriteFailed(READER, 1, "no way"), now=2)
    assert of(consumer.outbox.take_actions(), RevokeWrites) == [TAKE_BACK]
    offer(consumer, ticket(), "T1", now=2)
    assert consumer.outbox.take_actions() == []
    consumer.writes_revoked(R1, 1, now=3)
    assert sent(consumer.outbox.take_actions(), PushRegistration) == [REGISTRATION]
    offer(consumer, ticket(), "T1", now=4)
    assert of(consumer.outbox.take_actions(), StartRead)
    assert consumer.outbox.take_events() == [PrefillCompleted(R1, 8, 8, 0)]


def test_an_offer_that_crosses_the_loan_is_not_read() -> None:
    consumer = lender()
    consumer.outbox.take_actions()
    offer(consumer, ticket(), "T1", now=2)
    assert consumer.outbox.take_actions() == []


def test_a_request_that_was_offered_its_kv_before_it_had_blocks_reads_it() -> None:
    consumer = make_consumer(
        writable_transports=frozenset({"memory"}), fenced=frozenset({"memory"})
    )
    expect(consumer)
    connect(consumer)
    offer(consumer, ticket(), "T1", now=1)
    consumer.start(R1, [[5, 6]], range(0, 8), now=2)
    actions = consumer.outbox.take_actions()
    assert of(actions, StartRead)
    assert of(actions, GrantWrites) == []


@pytest.mark.parametrize("trouble", ["lost", "refused", "deadline", "gone"])
def test_whatever_goes_wrong_the_blocks_are_taken_back_before_they_are_given_up(
    trouble: str,
) -> None:
    consumer = lender()
    consumer.outbox.take_actions()
    match trouble:
        case "lost":
            consumer.disconnected(CONTROL, now=2)
        case "refused":
            consumer.receive(CONTROL, Refused("", READER, "it failed"), now=2)
        case "gone":
            consumer.receive(CONTROL, HeartbeatReply("e1", 1, [READER]), now=2)
        case "deadline":
            for now in range(5, 487, 5):
                consumer.advance(now)
                for beat in sent(consumer.outbox.take_actions(), Heartbeat):
                    assert isinstance(beat, Heartbeat)
                    consumer.receive(CONTROL, HeartbeatReply("e1", beat.beat, []), now)
    if trouble != "deadline":
        assert of(consumer.outbox.take_actions(), RevokeWrites) == [TAKE_BACK]
    assert failures(consumer) == []
    consumer.writes_revoked(R1, 1, now=500)
    assert len(failures(consumer)) == 1
    assert consumer.num_transfers == 0


@pytest.mark.parametrize("what", ["written", "failed", "revoked"])
def test_words_about_another_loan_or_from_somebody_else_are_ignored(what: str) -> None:
    consumer = lender()
    consumer.outbox.take_actions()
    for address, grant_id in ((CONTROL, 2), ("tcp://elsewhere:1", 1)):
        messages: dict[str, Written | WriteFailed | Revoked] = {
            "written": Written(READER, grant_id, 8, is_last=True),
            "failed": WriteFailed(READER, grant_id, "no"),
            "revoked": Revoked(READER, grant_id),
        }
        message = messages[what]
        consumer.receive(address, message, now=2)
    assert (consumer.outbox.take_actions(), consumer.outbox.take_events()) == ([], [])


def test_an_abort_while_the_last_bytes_are_fenced_ends_it_once_they_are() -> None:
    consumer = lender()
    written(consumer)
    consumer.outbox.take_actions()
    consumer.outbox.take_events()
    consumer.abort(R1, now=3)
    assert consumer.outbox.take_events() == [TransferAbandoned(R1, "the request was aborted")]
    assert of(consumer.outbox.take_actions(), RevokeWrites) == [], "it is being taken back already"
    consumer.writes_revoked(R1, 1, now=4)
    assert failures(consumer) == ["the request was aborted"]


def test_a_producer_that_dies_after_its_last_word_does_no_harm() -> None:
    consumer = lender()
    written(consumer)
    consumer.outbox.take_events()
    consumer.disconnected(CONTROL, now=3)
    consumer.writes_revoked(R1, 1, now=4)
    assert TransferFinished(R1) in consumer.outbox.take_events()


def test_a_staged_producer_is_not_lent_anything() -> None:
    consumer = make_consumer(
        writable_transports=frozenset({"memory"}), fenced=frozenset({"memory"})
    )
    expect(consumer)
    [request] = sent(consumer.outbox.take_actions(), HandshakeRequest)
    assert isinstance(request, HandshakeRequest)
    consumer.receive(SIDE, reply(request.nonce, uses_host_buffer=True), now=0)
    consumer.peer_opened(PEER, "memory", now=0)
    consumer.start(R1, [[5, 6]], range(0, 8), now=1)
    assert of(consumer.outbox.take_actions(), GrantWrites) == []


def test_transports_are_looked_at_for_writers_only_while_something_is_waited_for_by_one_that_is_lent_by() -> (  # noqa: E501
    None
):
    consumer = make_consumer(writable_transports=frozenset({"memory"}))
    assert not consumer.may_be_written("memory")
    consumer = lender()
    assert consumer.may_be_written("memory")
    assert not consumer.may_be_written("nixl")


def test_without_a_fence_a_producer_that_can_be_reached_again_is_asked_again() -> None:
    consumer = lender(is_fenced=False)
    consumer.outbox.take_actions()
    consumer.disconnected(CONTROL, now=2)
    actions = connect(consumer, now=2)
    assert (sent(actions, Revoke), sent(actions, PushRegistration)) == ([REVOKE], [])
    consumer.receive(CONTROL, Revoked(READER, 1), now=3)
    assert failures(consumer) == [f"the connection to {CONTROL} was lost"]


def test_blocks_whose_order_cannot_be_planned_are_not_lent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def disagree(*_: object) -> list[BlockPermutation]:
        raise RemoteProtocolError("the ranks disagree")

    monkeypatch.setattr("kvferry.protocol.consumer.write_grants.plan_permutations", disagree)
    consumer = lender()
    assert failures(consumer) == ["the ranks disagree"]
    assert of(consumer.outbox.take_actions(), GrantWrites) == []
    assert consumer.num_transfers == 0


def test_a_prefill_that_stands_still_between_two_writes_is_given_up() -> None:
    consumer = lender(is_fenced=False)
    consumer.receive(CONTROL, Written(READER, 1, 4, is_last=False), now=10)
    consumer.receive(CONTROL, Written(READER, 1, 4, is_last=False), now=100)
    consumer.outbox.take_events()
    for now in range(101, 491):
        consumer.advance(now)
        for beat in sent(consumer.outbox.take_actions(), Heartbeat):
            assert isinstance(beat, Heartbeat)
            consumer.receive(CONTROL, HeartbeatReply("e1", beat.beat, []), now)
    reason = "the prefill made no progress within 480 s"
    assert consumer.outbox.take_events() == [TransferAbandoned(R1, reason)], (
        "no progress, no more time"
    )
    consumer.receive(CONTROL, WriteFailed(READER, 1, "too late to matter"), now=491)
    consumer.receive(CONTROL, Written(READER, 1, 8, is_last=False), now=491)
    assert failures(consumer) == []
    consumer.receive(CONTROL, Revoked(READER, 1), now=491)
    assert failures(consumer) == [reason]
    consumer.outbox.take_actions()
    written(consumer, now=492)
    assert (consumer.outbox.take_actions(), consumer.outbox.take_events()) == ([], [])


def test_blocks_that_two_ranks_write_into_are_used_when_both_have_written() -> None:
    consumer = ranks.make_consumer(writable_transports=frozenset({"memory"}))
    push_info = PushInfo("h1", fingerprint(range(8), 4, ""), OWN, "PT")
    consumer.track(R1, pushed_by(PEER.epoch, push_info, tp_size=2), 0)
    ranks.connect(consumer, 2)
    consumer.start(R1, [[5, 6]], range(0, 8), now=1)
    for rank in (0, 1):
        assert consumer.outbox.take_events() == []
        consumer.receive(ranks.control(rank), Written(READER, 1, 8, is_last=True), now=2)
    assert consumer.outbox.take_events() == [PrefillCompleted(R1, 8, 0, 0), TransferFinished(R1)]
