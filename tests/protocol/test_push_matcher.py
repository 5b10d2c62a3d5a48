"""Tests that registrations and finished prefills match once, in either order, and that the matcher
forgets every entry in the end.
"""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvferry.protocol.messages import (
    PushCancel,
    PushOffer,
    PushRegistration,
    PushWithdrawal,
    Refused,
)
from kvferry.protocol.producer import matching
from kvferry.protocol.producer import push_matcher as push_desk
from kvferry.protocol.producer.matching import MatchKey
from kvferry.protocol.producer.push_matcher import (
    MatcherReply,
    MatcherResult,
    PrefillDeclined,
    PushMatcher,
    ReaderLeft,
)
from kvferry.types import RequestId, Route

LEASE_S = 30.0
D_ID, P_ID = "cmpl-x-0-0123abcd", RequestId("cmpl-x-0-ffffffff")


def registration(
    request: str = D_ID, rank: int = 0, match_id: str = "", engine: str = "d"
) -> PushRegistration:
    return PushRegistration(
        "e1", f"{engine}/{request}/{rank}", request, engine, "d-host", 5600, 2, LEASE_S, match_id
    )


def cancel(request: str, match_id: str = "", rank: int = 0) -> PushCancel:
    return PushCancel("e1", f"d/{request}/{rank}", request, "d", match_id)


def route(rank: int = 0) -> Route:
    return Route(b"%d" % rank)


def answers(matcher: PushMatcher) -> list[tuple[Route, PushOffer | PushWithdrawal | Refused]]:
    return [
        (result.route, result.message)
        for result in results(matcher)
        if isinstance(result, MatcherReply)
    ]


def results(matcher: PushMatcher) -> list[MatcherResult]:
    """Return the results since the last call."""
    taken, matcher.results = matcher.results, []
    return taken


def refusals(matcher: PushMatcher) -> list[str]:
    return [message.reason for _, message in answers(matcher) if isinstance(message, Refused)]


def offer(rank: int = 0, request: str = D_ID, ticket: str = "T") -> tuple[Route, PushOffer]:
    return route(rank), PushOffer(f"d/{request}/{rank}", ticket, 8)


def test_a_registration_is_offered_the_prefill_that_comes_later() -> None:
    matcher = PushMatcher(LEASE_S)
    matcher.register(route(0), registration(rank=0), now=0)
    matcher.register(route(1), registration(rank=1), now=0)
    assert answers(matcher) == []
    matcher.publish(P_ID, "", "T", 8)
    assert answers(matcher) == [offer(0), offer(1)]
    assert matcher.num_waiting == 0


def test_a_prefill_that_came_first_is_offered_to_every_rank_that_registers() -> None:
    matcher = PushMatcher(LEASE_S)
    matcher.publish(P_ID, "", "T", 8)
    matcher.register(route(0), registration(rank=0), now=1)
    assert answers(matcher) == [offer(0)]
    matcher.register(route(1), registration(rank=1), now=2)
    assert answers(matcher) == [offer(1)]
    matcher.end(P_ID, "over", now=3)
    assert matcher.num_entries == 0


def test_a_prefill_is_offered_to_one_request_only() -> None:
    matcher = PushMatcher(LEASE_S)
    matcher.publish(P_ID, "", "T", 8)
    matcher.register(route(), registration(), now=0)
    assert answers(matcher) == [offer()]
    matcher.register(route(), registration("cmpl-x-0-99999999"), now=0)
    assert answers(matcher) == []
    matcher.publish(RequestId("cmpl-x-0-eeeeeeee"), "", "T2", 8)
    assert answers(matcher) == [offer(0, "cmpl-x-0-99999999", "T2")]


def test_a_handover_brings_together_what_ids_would_not() -> None:
    matcher = PushMatcher(LEASE_S)
    matcher.register(route(), registration("a", match_id="h1"), now=0)
    matcher.register(route(), registration("b", match_id="h2"), now=0)
    matcher.publish(RequestId("a"), "h2", "T", 8)
    assert answers(matcher) == [offer(0, "b")]


def test_two_registrations_that_match_one_prefill_are_both_refused() -> None:
    matcher = PushMatcher(LEASE_S)
    matcher.register(route(), registration("x-00000000"), now=0)
    matcher.register(route(), registration("x-11111111"), now=0)
    matcher.publish(RequestId("x-22222222"), "", "T", 8)
    assert refusals(matcher) == ["2 requests of decode engines match prefill x-22222222"] * 2
    assert matcher.num_waiting == 0


def test_a_registration_that_two_prefills_match_is_refused() -> None:
    matcher = PushMatcher(LEASE_S)
    matcher.publish(RequestId("x-22222222"), "", "T", 8)
    matcher.publish(RequestId("x-33333333"), "", "T", 8)
    matcher.register(route(), registration("x-00000000"), now=0)
    assert refusals(matcher) == ["2 prefills match this request: x-22222222, x-33333333"]


def test_who_waits_for_a_prefill_that_failed_is_told_why_and_so_is_who_comes_later() -> None:
    matcher = PushMatcher(LEASE_S)
    matcher.register(route(), registration(match_id="h1"), now=0)
    matcher.fail(P_ID, "h1", "it was aborted", now=1)
    assert refusals(matcher) == ["it was aborted"]
    matcher.register(route(1), registration(rank=1, match_id="h1"), now=2)
    assert refusals(matcher) == ["it was aborted"]
    matcher.advance(now=1 + LEASE_S)
    assert matcher.num_entries == 0


def test_a_registration_whose_prefill_leg_never_arrives_is_refused_although_it_is_renewed() -> None:
    """A router may have failed to send the leg, or the engine's front-end may have rejected it."""
    matcher = PushMatcher(LEASE_S, leg_wait_s=20)
    matcher.register(route(), registration(match_id="h1"), now=0)
    matcher.renew([f"d/{D_ID}/0"], now=10)
    assert matcher.next_deadline() == 20
    matcher.advance(now=19.9)
    assert refusals(matcher) == []
    matcher.advance(now=20)
    [reason] = refusals(matcher)
    assert reason.startswith("no prefill leg for this request arrived within 20 s")
    assert matcher.num_entries == 0


@pytest.mark.parametrize("match_id", ["h1", ""])
@pytest.mark.parametrize("is_leg_first", [True, False])
def test_a_registration_whose_prefill_leg_has_arrived_waits_for_it(
    match_id: str, is_leg_first: bool
) -> None:
    matcher = PushMatcher(LEASE_S, leg_wait_s=20)
    if is_leg_first:
        matcher.expect(P_ID, match_id)
    matcher.register(route(), registration(match_id=match_id), now=0)
    if not is_leg_first:
        matcher.expect(P_ID, match_id)
    matcher.advance(now=21)
    assert refusals(matcher) == []
    matcher.publish(P_ID, match_id, "T", 8)
    assert answers(matcher) == [offer()]
    matcher.end(P_ID, "over", now=3)
    matcher.advance(now=LEASE_S + 1)
    matcher.advance(now=2 * LEASE_S + 1)
    assert matcher.num_entries == 0


def test_a_client_that_tries_again_with_its_old_id_is_not_refused_for_the_first_time() -> None:
    matcher = PushMatcher(LEASE_S)
    matcher.fail(RequestId("x-22222222"), "", "it was aborted", now=0)
    matcher.register(route(), registration("x-00000000"), now=1)
    assert answers(matcher) == []


def test_a_consumer_that_needs_nothing_has_the_prefill_freed_whenever_it_ends() -> None:
    matcher = PushMatcher(LEASE_S)
    matcher.cancel(cancel("x-00000000", "h1"), now=0)
    matcher.publish(RequestId("x-22222222"), "h1", "T", 8)
    assert results(matcher) == [PrefillDeclined(RequestId("x-22222222"))]
    matcher.publish(RequestId("y-22222222"), "h2", "T", 8)
    assert results(matcher) == []
    matcher.cancel(cancel("y-00000000", "h2"), now=0)
    assert results(matcher) == [PrefillDeclined(RequestId("y-22222222"))]


def test_a_cancelled_registration_is_gone_and_a_taken_prefill_is_freed() -> None:
    matcher = PushMatcher(LEASE_S)
    matcher.register(route(), registration(match_id="h1"), now=0)
    matcher.cancel(cancel(D_ID, "h1"), now=0)
    matcher.publish(P_ID, "h1", "T", 8)
    assert results(matcher) == [PrefillDeclined(P_ID)]
    other = RequestId("cmpl-y-0-ffffffff")
    matcher.publish(other, "", "T", 8)
    matcher.register(route(), registration("cmpl-y-0-0123abcd"), now=0)
    assert answers(matcher) == [offer(0, "cmpl-y-0-0123abcd")]
    matcher.cancel(cancel("cmpl-y-0-0123abcd"), now=0)
    assert results(matcher) == [ReaderLeft(other, "d/cmpl-y-0-0123abcd/0")]


def test_requests_that_share_a_handover_share_a_prefill_and_one_may_leave() -> None:
    matcher = PushMatcher(LEASE_S)
    for request in ("a", "b", "c"):
        matcher.register(route(), registration(request, match_id="h1"), now=0)
    matcher.cancel(cancel("b", "h1"), now=0)
    matcher.publish(P_ID, "h1", "T", 8)
    assert answers(matcher) == [offer(0, "a"), offer(0, "c")]
    matcher.register(route(), registration("d", match_id="h1"), now=1)
    assert answers(matcher) == [offer(0, "d")]
    matcher.cancel(cancel("c", "h1"), now=2)
    assert results(matcher) == [ReaderLeft(P_ID, "d/c/0")]


def test_a_request_that_comes_after_its_sibling_has_declined_is_served() -> None:
    matcher = PushMatcher(LEASE_S)
    matcher.cancel(cancel("a", "h1"), now=0)
    matcher.register(route(), registration("b", match_id="h1"), now=0)
    matcher.publish(P_ID, "h1", "T", 8)
    assert [type(result) for result in matcher.results] == [MatcherReply]
    assert answers(matcher) == [offer(0, "b")]


@pytest.mark.parametrize("is_p_first", [True, False])
def test_a_prefill_whose_router_has_given_it_up_is_free_at_once(is_p_first: bool) -> None:
    """Also if P computes it only afterwards. A D that has registered decides for itself."""
    matcher = PushMatcher(LEASE_S)
    if is_p_first:
        matcher.publish(P_ID, "h1", "T", 8)
    matcher.decline("h1", now=0)
    if not is_p_first:
        matcher.publish(P_ID, "h1", "T", 8)
    assert results(matcher) == [PrefillDeclined(P_ID)]
    matcher.register(route(), registration("a", match_id="h2"), now=0)
    matcher.decline("h2", now=0)
    matcher.publish(RequestId("other"), "h2", "T", 8)
    assert answers(matcher) == [offer(0, "a")]
    matcher.decline("h2", now=1)
    assert results(matcher) == []


def test_a_registration_lives_by_its_heartbeats() -> None:
    matcher = PushMatcher(LEASE_S, leg_wait_s=100)
    matcher.register(route(), registration(), now=0)
    name = f"d/{D_ID}/0"
    assert matcher.renew([name, "nobody"], now=20) == {name}
    matcher.advance(now=49)
    assert (matcher.num_waiting, matcher.next_deadline()) == (1, 50)
    matcher.advance(now=50)
    assert (matcher.num_waiting, matcher.renew([name], now=50), matcher.next_deadline()) == (
        0,
        set(),
        None,
    )
    matcher.publish(P_ID, "", "T", 8)
    assert answers(matcher) == []


def test_who_comes_after_the_lease_of_its_prefill_has_run_out_is_told() -> None:
    matcher = PushMatcher(LEASE_S)
    matcher.publish(P_ID, "h1", "T", 8)
    matcher.end(P_ID, "the prefill's lease expired before the reader arrived", now=30)
    matcher.advance(now=30)
    matcher.register(route(), registration(match_id="h1"), now=31)
    assert refusals(matcher) == ["the prefill's lease expired before the reader arrived"]


def test_who_comes_when_the_end_of_its_prefill_is_forgotten_is_told_that_this_may_be_so() -> None:
    """A D that was paused for longer than the lease registers late."""
    matcher = PushMatcher(LEASE_S, leg_wait_s=20)
    matcher.publish(P_ID, "h1", "T", 8)
    matcher.end(P_ID, "the lease has expired", now=0)
    matcher.advance(now=0)
    matcher.advance(now=LEASE_S)
    assert matcher.num_entries == 0
    matcher.register(route(), registration(match_id="h1"), now=LEASE_S)
    matcher.advance(now=LEASE_S + 20)
    [reason] = refusals(matcher)
    assert "or its blocks were freed long before the decode side registered" in reason


def test_registrations_past_the_bound_are_refused_and_endings_past_it_forgotten() -> None:
    matcher = PushMatcher(LEASE_S)
    for number in range(push_desk.MAX_READERS):
        matcher.register(route(), registration(f"r{number}"), now=0)
    matcher.register(route(), registration("one more"), now=0)
    assert refusals(matcher) == [
        f"more than {push_desk.MAX_READERS} readers are registered with this engine"
    ]
    matcher.register(route(), registration("r0"), now=0)
    assert (answers(matcher), matcher.num_waiting) == ([], push_desk.MAX_READERS)
    for number in range(matching.MAX_TOMBSTONES + 100):
        matcher.fail(RequestId(f"f{number}"), f"h{number}", "aborted", now=0)
    assert matcher.num_entries == push_desk.MAX_READERS + matching.MAX_TOMBSTONES


def test_there_is_more_of_a_prefill_and_whoever_was_offered_it_is_told() -> None:
    matcher = PushMatcher(LEASE_S)
    matcher.register(route(0), registration(rank=0), now=0)
    matcher.publish(P_ID, "", "T", 4)
    matcher.register(route(1), registration(rank=1), now=0)
    assert [
        message.ready_tokens for _, message in answers(matcher) if isinstance(message, PushOffer)
    ] == [4, 4]
    matcher.publish(P_ID, "", "T2", 8)
    assert answers(matcher) == [offer(0, ticket="T2"), offer(1, ticket="T2")]
    matcher.leave(f"d/{D_ID}/0")
    matcher.publish(P_ID, "", "T", 8)
    assert answers(matcher) == [offer(1)]


def test_readers_of_a_withdrawn_prefill_wait_for_the_next() -> None:
    matcher = PushMatcher(LEASE_S)
    matcher.register(route(), registration(), now=0)
    matcher.publish(P_ID, "", "T", 4)
    answers(matcher)
    matcher.withdraw(P_ID, 7, now=10)
    assert answers(matcher) == [(route(), PushWithdrawal(f"d/{D_ID}/0", 7))]
    assert (matcher.num_waiting, matcher.next_deadline()) == (1, 40)
    matcher.publish(P_ID, "", "T", 8)
    assert answers(matcher) == [offer()]


def test_a_prefill_that_fails_halfway_is_refused_to_those_who_read_it() -> None:
    matcher = PushMatcher(LEASE_S)
    matcher.register(route(), registration(), now=0)
    matcher.publish(P_ID, "", "T", 4)
    answers(matcher)
    matcher.fail(P_ID, "", "it was aborted", now=1)
    assert refusals(matcher) == ["it was aborted"]


NAMES = st.sampled_from(["x-00000000", "x-11111111", "y-00000000", "z"])
HANDOVERS = st.sampled_from(["", "h1", "h2"])


class DeskMachine(RuleBasedStateMachine):
    """All operations in random order: no prefill is offered to two requests, no reader gets a
    message that is meant for another, and the matcher is empty in the end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.matcher = PushMatcher(LEASE_S)
        self.now = 0.0
        self.number = 0
        self.published: dict[RequestId, MatchKey] = {}
        self.names: dict[str, MatchKey] = {}
        self.match_ids: dict[str, str] = {}
        self.waiting: set[str] = set()
        self.offered: dict[str, RequestId] = {}

    @rule(request=NAMES, match_id=HANDOVERS, rank=st.integers(0, 1))
    def register(self, request: str, match_id: str, rank: int) -> None:
        # All ranks of a request carry the same ticket.
        match_id = self.match_ids.setdefault(request, match_id)
        message = registration(request, rank, match_id)
        self.names[message.reader] = MatchKey(request, match_id)
        self.waiting.add(message.reader)
        self.matcher.register(route(rank), message, self.now)

    @rule(request=NAMES, match_id=HANDOVERS)
    def publish(self, request: str, match_id: str) -> None:
        """Publish a prefill, or more of one that is already published."""
        name = RequestId(request)
        if name not in self.published:
            self.number += 1
            self.published[name] = MatchKey(request, match_id)
        self.matcher.publish(name, self.published[name].match_id, f"{request} {self.number}", 8)

    @rule(request=NAMES)
    def withdraw(self, request: str) -> None:
        if RequestId(request) in self.published:
            self.matcher.withdraw(RequestId(request), 1, self.now)
            self.look()
            self.forget(request)

    @rule(request=NAMES, match_id=HANDOVERS)
    def fail(self, request: str, match_id: str) -> None:
        self.matcher.fail(RequestId(request), match_id, "failed", self.now)
        self.look()
        self.forget(request)

    @rule(request=NAMES, match_id=HANDOVERS, rank=st.integers(0, 1))
    def cancel(self, request: str, match_id: str, rank: int) -> None:
        match_id = self.match_ids.setdefault(request, match_id)
        self.matcher.cancel(cancel(request, match_id, rank), self.now)
        self.waiting.discard(f"d/{request}/{rank}")
        self.offered.pop(f"d/{request}/{rank}", None)

    @rule(seconds=st.sampled_from([1.0, 29.0, 31.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.matcher.advance(self.now)

    @rule(request=NAMES)
    def end_lease(self, request: str) -> None:
        self.matcher.end(RequestId(request), "over", self.now)
        self.forget(request)

    def forget(self, request: str) -> None:
        self.published.pop(RequestId(request), None)
        self.offered = {reader: lease for reader, lease in self.offered.items() if lease != request}

    @invariant()
    def look(self) -> None:
        assert all(
            result.request in self.published
            for result in self.matcher.results
            if not isinstance(result, MatcherReply)
        )
        for _, message in answers(self.matcher):
            reader = message.reader
            assert reader in self.waiting or reader in self.offered, (
                "told something without having asked"
            )
            if isinstance(message, PushOffer):
                self.take_offer(reader, message.ticket)
            elif isinstance(message, PushWithdrawal):
                del self.offered[reader]
                self.waiting.add(reader)
            else:
                self.waiting.discard(reader)
                self.offered.pop(reader, None)

    def take_offer(self, reader: str, ticket: str) -> None:
        lease, name = RequestId(ticket.split()[0]), self.names[reader]
        prefill = self.published[lease]
        siblings = [
            other
            for other in self.names.values()
            if other == name or (name.match_id and other.match_id == name.match_id)
        ]
        assert any(
            prefill.base == other.base or prefill.match_id == other.match_id for other in siblings
        )
        assert self.offered.get(reader, lease) == lease, "offered two prefills"
        self.waiting.discard(reader)
        self.offered[reader] = lease
        takers = {
            self.names[other].match_id or other.rpartition("/")[0]
            for other, taken in self.offered.items()
            if taken == lease
        }
        assert len(takers) == 1, "a prefill went to two requests"

    def teardown(self) -> None:
        for request in list(self.published):
            self.matcher.end(request, "over", self.now)
        self.matcher.advance(self.now)
        self.matcher.advance(self.now + 10 * LEASE_S)
        assert self.matcher.num_entries == 0
        assert self.matcher.next_deadline() is None


TestDeskMachine = DeskMachine.TestCase
