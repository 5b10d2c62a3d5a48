"""Tests the lease table with short scenarios at fixed times, and with state machines that compare
it with simple models.
"""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from tests.operations import count_instructions

from kvferry.errors import LocalProtocolError
from kvferry.events import LeaseEnded
from kvferry.protocol.producer.leases import MAX_READERS, LeaseTable, TicketStatus
from kvferry.types import LeaseEnd, RequestId

A, B = RequestId("a"), RequestId("b")


def make_table() -> LeaseTable:
    return LeaseTable(lease_ttl_s=30, extension_s=20)


def test_a_renewed_lease_does_not_shield_a_stale_one() -> None:
    leases = make_table()
    leases.grant(A, 1, now=0)
    leases.grant(B, 2, now=1)
    assert leases.renew_all([A], now=20) == []
    assert leases.expire(now=39) == [LeaseEnded(B, LeaseEnd.EXPIRED)]
    assert leases.expire(now=40) == [LeaseEnded(A, LeaseEnd.EXPIRED)]


def test_a_renewal_never_shortens() -> None:
    leases = make_table()
    leases.grant(A, 1, now=0)
    assert leases.renew_all([A], now=1) == []
    assert leases.expire(now=29.9) == []


def test_a_lease_ends_when_somebody_confirmed_and_nobody_is_attached() -> None:
    leases = make_table()
    leases.grant(A, 1, now=0)
    assert leases.attach(A, "x", now=1)
    assert leases.attach(A, "y", now=1)
    assert leases.confirm(A, "x", now=2)
    assert leases.take_ended() == []
    assert leases.confirm(A, "y", now=3)
    assert leases.take_ended() == [LeaseEnded(A, LeaseEnd.CONFIRMED)]
    assert len(leases) == 0


def test_only_an_attached_reader_of_a_live_lease_is_confirmed() -> None:
    leases = make_table()
    assert not leases.confirm(A, "x", now=0)
    leases.grant(A, 1, now=0)
    assert not leases.confirm(A, "x", now=1)
    leases.attach(A, "x", now=1)
    assert not leases.confirm(A, "x", now=30)


def test_giving_up_ends_a_lease_nobody_reads() -> None:
    leases = make_table()
    leases.grant(A, 1, now=0)
    assert leases.abandon(A)
    assert leases.take_ended() == [LeaseEnded(A, LeaseEnd.RELEASED)]
    assert not leases.abandon(A)
    assert not leases.detach(A, "x")


def test_a_detached_reader_settles_the_lease() -> None:
    leases = make_table()
    leases.grant(A, 1, now=0)
    leases.attach(A, "x", now=0)
    assert leases.take_ended() == []
    assert leases.detach(A, "x")
    assert leases.take_ended() == [LeaseEnded(A, LeaseEnd.RELEASED)]


def test_serials_tell_a_grant_that_is_on_its_way_from_a_lease_that_is_over() -> None:
    leases = make_table()
    assert leases.ticket_status(A, 1) is TicketStatus.PENDING
    leases.grant(A, 1, now=0)
    assert leases.ticket_status(A, 1) is TicketStatus.HELD
    leases.expire(now=30)
    assert leases.ticket_status(A, 1) is TicketStatus.GONE
    assert leases.ticket_status(B, 2) is TicketStatus.PENDING


def test_granting_twice_is_our_own_bug() -> None:
    leases = make_table()
    leases.grant(A, 1, now=0)
    with pytest.raises(LocalProtocolError):
        leases.grant(A, 2, now=0)
    with pytest.raises(LocalProtocolError):
        leases.grant(B, 1, now=0)


def test_readers_are_counted_by_the_transport_they_read_by() -> None:
    leases = make_table()
    leases.grant(A, 1, now=0)
    leases.grant(B, 2, now=0)
    leases.attach(A, "x", now=0, transport="nixl")
    leases.attach(A, "x", now=1, transport="nixl")
    leases.attach(A, "y", now=0, transport="shm")
    leases.attach(B, "z", now=0, transport="nixl")
    assert (leases.num_readers("nixl"), leases.num_readers("shm")) == (2, 1)
    leases.confirm(A, "x", now=1)
    leases.detach(A, "y")
    assert (leases.num_readers("nixl"), leases.num_readers("shm")) == (1, 0)
    leases.expire(now=30)
    assert leases.num_readers("nixl") == 0


def test_readers_of_one_lease_are_bounded() -> None:
    leases = make_table()
    leases.grant(A, 1, now=0)
    assert all(leases.attach(A, f"r{i}", now=0) for i in range(MAX_READERS))
    assert not leases.attach(A, "one more", now=0)
    assert leases.attach(A, "r0", now=0)
    assert not leases.attach(B, "x", now=0)


def test_a_lease_waits_for_the_companions_of_its_first_reader() -> None:
    leases = make_table()
    leases.grant(A, 1, now=0)
    assert leases.attach(A, "x", now=0, sibling_ranks=["y", "z"])
    assert leases.confirm(A, "x", now=1)
    assert leases.take_ended() == []
    assert leases.attach(A, "y", now=2, sibling_ranks=["x", "z"])
    assert leases.confirm(A, "y", now=2)
    assert leases.take_ended() == []
    assert leases.attach(A, "z", now=3, sibling_ranks=["x", "y"])
    assert leases.take_ended() == []
    assert leases.confirm(A, "z", now=3)
    assert leases.take_ended() == [LeaseEnded(A, LeaseEnd.CONFIRMED)]


def test_only_those_who_have_attached_are_confirmed_not_those_awaited() -> None:
    leases = make_table()
    leases.grant(A, 1, now=0)
    leases.attach(A, "x", now=0, sibling_ranks=["y"])
    assert not leases.confirm(A, "y", now=0)


def test_an_awaited_companion_may_send_word_that_it_will_not_come() -> None:
    leases = make_table()
    leases.grant(A, 1, now=0)
    leases.attach(A, "x", now=0, sibling_ranks=["y"])
    assert leases.detach(A, "y")
    assert leases.confirm(A, "x", now=1)
    assert leases.take_ended() == [LeaseEnded(A, LeaseEnd.CONFIRMED)]


def test_attaching_twice_is_attaching_once() -> None:
    leases = make_table()
    leases.grant(A, 1, now=0)
    for _ in range(2):
        assert leases.attach(A, "x", now=0, sibling_ranks=["y"])
    for _ in range(2):
        assert leases.attach(A, "y", now=0, sibling_ranks=["x"])
    assert leases.confirm(A, "x", now=0)
    assert leases.attach(A, "y", now=0, sibling_ranks=["x"])
    assert leases.confirm(A, "y", now=0)
    assert leases.take_ended() == [LeaseEnded(A, LeaseEnd.CONFIRMED)]


def test_a_ticket_handed_back_does_not_cheat_those_who_are_awaited() -> None:
    leases = make_table()
    leases.grant(A, 1, now=0)
    leases.attach(A, "x", now=0, sibling_ranks=["y"])
    leases.abandon(A)
    assert leases.confirm(A, "x", now=0)
    assert leases.take_ended() == []
    leases.attach(A, "y", now=0, sibling_ranks=["x"])
    assert leases.confirm(A, "y", now=0)
    assert leases.take_ended() == [LeaseEnded(A, LeaseEnd.CONFIRMED)]


def test_a_companion_that_never_comes_is_waited_for_no_longer_than_the_lease() -> None:
    leases = make_table()
    leases.grant(A, 1, now=0)
    leases.attach(A, "x", now=0, sibling_ranks=["y"])
    leases.confirm(A, "x", now=1)
    assert leases.expire(now=29) == []
    assert leases.expire(now=30) == [LeaseEnded(A, LeaseEnd.CONFIRMED)]


def test_companions_count_among_the_readers_that_are_bounded() -> None:
    leases = make_table()
    leases.grant(A, 1, now=0)
    assert not leases.attach(A, "x", now=0, sibling_ranks=[f"c{i}" for i in range(MAX_READERS)])
    assert leases.attach(A, "x", now=0, sibling_ranks=[f"c{i}" for i in range(MAX_READERS - 1)])
    assert not leases.attach(A, "y", now=0)
    assert leases.attach(A, "c0", now=0)


PARTIES = {"p": 1, "q": 2, "r": 3}


def test_a_revoked_lease_is_over_for_all_its_readers() -> None:
    leases = make_table()
    assert leases.revoke(A) is None
    leases.grant(A, 1, now=0)
    leases.attach(A, "x", now=0, transport="nixl")
    assert leases.revoke(A) == LeaseEnded(A, LeaseEnd.RELEASED)
    assert (len(leases), leases.num_readers("nixl"), leases.ticket_status(A, 1)) == (
        0,
        0,
        TicketStatus.GONE,
    )
    assert not leases.confirm(A, "x", now=0)


class PartyMachine(RuleBasedStateMachine):
    """Groups of sibling ranks, each of which attaches once and leaves once, in random order. The
    lease ends when the last member of every group that has appeared leaves, and not before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = make_table()
        self.table.grant(A, 1, 0)
        self.came: set[tuple[str, int]] = set()
        self.left: set[tuple[str, int]] = set()
        self.is_abandoned = False
        self.has_ended = False

    members = st.sampled_from(
        [(party, member) for party, size in PARTIES.items() for member in range(size)]
    )

    @rule(member=members)
    def attach(self, member: tuple[str, int]) -> None:
        if member in self.left:
            return
        party, own = member
        sibling_ranks = [f"{party}{other}" for other in range(PARTIES[party]) if other != own]
        assert (
            self.table.attach(A, f"{party}{own}", 0, sibling_ranks=sibling_ranks) != self.has_ended
        )
        if not self.has_ended:
            self.came.add(member)

    @rule(member=members, is_good=st.booleans())
    def leave(self, member: tuple[str, int], is_good: bool) -> None:
        if member not in self.came - self.left:
            return
        name = f"{member[0]}{member[1]}"
        assert self.table.confirm(A, name, 0) if is_good else self.table.detach(A, name)
        self.left.add(member)

    @rule()
    def abandon(self) -> None:
        assert self.table.abandon(A) != self.has_ended
        self.is_abandoned = True

    @invariant()
    def it_ends_with_the_last_of_those_that_came_and_their_companions(self) -> None:
        shown = {party for party, _ in self.came}
        expected = {(party, member) for party in shown for member in range(PARTIES[party])}
        is_over = (self.is_abandoned or bool(self.left)) and expected == self.left
        if not self.has_ended:
            assert [ended.request for ended in self.table.take_ended()] == [A] * is_over
            self.has_ended = is_over


TestPartyMachine = PartyMachine.TestCase


class LeaseMachine(RuleBasedStateMachine):
    """Compare the table with the simplest possible model: a dict that is scanned completely."""

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.table = make_table()
        self.deadlines: dict[RequestId, float] = {}
        self.now = 0.0
        self.serial = 0

    @rule(target=requests)
    def grant(self) -> RequestId:
        self.serial += 1
        request = RequestId(f"r{self.serial}")
        self.table.grant(request, self.serial, self.now)
        self.deadlines[request] = self.now + 30
        return request

    @rule(request=requests, reader=st.sampled_from("xyz"))
    def attach(self, request: RequestId, reader: str) -> None:
        assert self.table.attach(request, reader, self.now) == (request in self.deadlines)
        self.extend(request)

    @rule(request=requests)
    def renew(self, request: RequestId) -> None:
        assert self.table.renew_all([request], self.now) == (
            [] if request in self.deadlines else [request]
        )
        self.extend(request)

    @rule(request=consumes(requests))
    def abandon(self, request: RequestId) -> None:
        for reader in "xyz":
            self.table.detach(request, reader)
        assert self.table.abandon(request) == (request in self.deadlines)
        was_held = self.deadlines.pop(request, None) is not None
        assert [ended.request for ended in self.table.take_ended()] == [request] * was_held

    @rule(seconds=st.floats(0, 25))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        due = {request for request, at in self.deadlines.items() if at <= self.now}
        assert {ended.request for ended in self.table.expire(self.now)} == due
        for request in due:
            del self.deadlines[request]

    def extend(self, request: RequestId) -> None:
        if request in self.deadlines:
            self.deadlines[request] = max(self.deadlines[request], self.now + 20)

    @invariant()
    def no_deadline_is_slept_through(self) -> None:
        assert len(self.table) == len(self.deadlines)
        wake = self.table.next_deadline()
        assert (wake is None) == (not self.deadlines)
        assert wake is None or wake <= min(self.deadlines.values())


TestLeaseMachine = LeaseMachine.TestCase


def test_deadlines_of_ended_leases_are_not_kept_for_long() -> None:
    leases = LeaseTable(lease_ttl_s=600, extension_s=400)
    for number in range(10_000):
        request = RequestId(str(number))
        leases.grant(request, serial=number + 1, now=number / 100)
        leases.abandon(request)
        assert leases.take_ended() == [LeaseEnded(request, LeaseEnd.RELEASED)]
    assert len(leases) == 0
    assert leases.num_entries < 100


def test_expiry_costs_the_same_for_ten_leases_and_for_ten_thousand_while_none_is_due() -> None:
    def granted(count: int) -> LeaseTable:
        leases = LeaseTable(lease_ttl_s=30, extension_s=20)
        for number in range(count):
            leases.grant(RequestId(str(number)), serial=number + 1, now=number / count)
        return leases

    def turn(leases: LeaseTable, now: float) -> None:
        leases.expire(now)
        leases.next_deadline()

    few, many = granted(10), granted(10_000)
    assert count_instructions(lambda: turn(few, 20)) == count_instructions(lambda: turn(many, 20))
    for leases in (few, many):
        leases.renew_all([RequestId(str(number)) for number in range(10_000)], now=25)
        assert leases.expire(now=31) == []
    assert (len(few), len(many)) == (10, 10_000)
    assert count_instructions(lambda: turn(few, 40)) == count_instructions(
        lambda: turn(many, 40)
    ), "all are due anew together, later"
    assert count_instructions(lambda: turn(many, 46)) > 1000 * count_instructions(
        lambda: turn(many, 47)
    ), "work that is there is counted"


def test_an_open_lease_neither_ends_nor_runs_out_before_it_is_closed() -> None:
    leases = LeaseTable(30, 20)
    leases.open(A, 1)
    assert leases.next_deadline() is None
    assert leases.attach(A, "r", now=0)
    assert leases.confirm(A, "r", now=1000)
    assert (leases.take_ended(), leases.expire(now=10_000)) == ([], [])
    leases.close(A, now=10_000)
    assert leases.take_ended() == [LeaseEnded(A, LeaseEnd.CONFIRMED)]
    leases.open(B, 2)
    leases.close(B, now=0)
    assert leases.next_deadline() == 30
    assert leases.expire(now=30) == [LeaseEnded(B, LeaseEnd.EXPIRED)]


def test_a_lease_that_is_not_open_cannot_be_closed() -> None:
    leases = LeaseTable(30, 20)
    leases.grant(A, 1, now=0)
    for request in (A, B):
        with pytest.raises(LocalProtocolError, match="open"):
            leases.close(request, now=0)


def test_a_revoked_lease_may_be_opened_anew_and_its_old_readers_are_not_confirmed() -> None:
    leases = LeaseTable(30, 20)
    leases.open(A, 1)
    leases.attach(A, "r", now=0)
    leases.revoke(A)
    leases.open(A, 2)
    assert not leases.confirm(A, "r", now=1)
    assert (leases.ticket_status(A, 1), leases.ticket_status(A, 2)) == (
        TicketStatus.GONE,
        TicketStatus.HELD,
    )


def test_a_lease_waits_for_those_it_was_offered_to() -> None:
    leases = LeaseTable(30, 20)
    leases.grant(A, 1, now=0)
    for reader in ("r", "s"):
        leases.note_offer(A, reader)
    leases.note_offer(B, "r")
    leases.attach(A, "r", now=0)
    assert leases.confirm(A, "r", now=1)
    assert leases.take_ended() == []
    assert leases.detach(A, "s")
    assert leases.take_ended() == [LeaseEnded(A, LeaseEnd.CONFIRMED)]
