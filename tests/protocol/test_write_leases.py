"""Two clocks that were never compared: the writer stops before the blocks come back, whatever messages took and whichever were lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import LocalProtocolError
from kvferry.protocol.write_leases import GivenLeases, HeldLease, margin_s


def test_a_lease_counts_from_before_it_was_asked_for() -> None:
    held = HeldLease()
    assert not held.has_time(0, now=0)
    number = held.ask(now=10)
    assert held.answer(number, 30)
    assert held.until == 10 + 30 - margin_s(30)
    assert held.has_time(5, now=30)
    assert not held.has_time(8, now=30)


def test_only_what_was_asked_is_answered_and_once() -> None:
    held = HeldLease()
    number = held.ask(now=0)
    assert not held.answer(number + 1, 30)
    assert held.answer(number, 30)
    assert not held.answer(number, 1000)


def test_a_late_answer_never_shortens() -> None:
    held = HeldLease()
    first, second = held.ask(now=0), held.ask(now=20)
    held.answer(second, 30)
    held.answer(first, 30)
    assert held.until == 20 + 30 - margin_s(30)


def test_an_answer_on_its_way_does_not_bring_a_revoked_lease_back() -> None:
    held = HeldLease()
    held.answer(held.ask(now=0), 30)
    number = held.ask(now=1)
    held.revoke()
    assert not held.answer(number, 30)
    assert not held.has_time(0, now=1)


def test_blocks_that_were_never_lent_are_ours_at_once() -> None:
    given_out = GivenLeases(30)
    assert (given_out.take_back(), given_out.is_out, given_out.next_deadline()) == ([], False, None)


def test_blocks_come_back_rank_by_rank_or_by_time() -> None:
    given_out = GivenLeases(30)
    given_out.give(0, now=0)
    given_out.give(1, now=5)
    assert given_out.take_back() == [0, 1]
    given_out.returned(0)
    assert (given_out.is_out, given_out.have_run_out(34), given_out.next_deadline()) == (True, False, 35)
    assert given_out.have_run_out(35)
    given_out.returned(1)
    given_out.returned(7)
    assert not given_out.is_out


def test_what_is_being_taken_back_is_not_lent_again() -> None:
    given_out = GivenLeases(30)
    given_out.take_back()
    with pytest.raises(LocalProtocolError, match="taken back"):
        given_out.give(0, now=0)


delays = st.floats(0, 100)


@given(
    rate=st.floats(0.95, 1.05),
    offset=st.floats(-1e6, 1e6),
    duration=st.floats(1, 100),
    exchanges=st.lists(st.tuples(st.floats(0, 50), delays, delays, st.booleans()), min_size=1, max_size=6),
)
def test_the_writer_stops_before_the_blocks_come_back(
    rate: float, offset: float, duration: float, exchanges: list[tuple[float, float, float, bool]]
) -> None:
    """True time is the consumer's; the producer's clock runs at another rate from another start. Questions and answers take their time,
    some answers are lost."""
    held, given_out, now = HeldLease(), GivenLeases(duration), 0.0
    for pause, to_consumer, to_producer, is_lost in exchanges:
        now += pause
        number = held.ask(offset + rate * now)
        given_out.give(0, now + to_consumer)
        if not is_lost:
            held.answer(number, duration)
            # However long the answer took: what it is good for does not depend on that.
            assert to_producer >= 0
    back_at = given_out.next_deadline()
    assert back_at is not None
    last_post = (held.until - offset) / rate
    assert last_post < back_at
