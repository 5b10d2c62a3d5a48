"""Tests that `Deadlines` finds the earliest deadline without scanning the others, and soon forgets
deadlines that were moved or dropped.
"""

from hypothesis import given
from hypothesis import strategies as st
from tests.operations import count_instructions

from kvferry.protocol.heartbeats import Deadlines

KEYS = st.sampled_from("abcde")
CHANGES = st.lists(
    st.one_of(
        st.tuples(KEYS, st.integers(0, 9)),
        st.tuples(KEYS, st.none()),
        st.tuples(st.none(), st.integers(0, 9)),
    )
)


@given(CHANGES)
def test_it_says_what_a_plain_table_says(changes: list[tuple[str | None, int | None]]) -> None:
    deadlines: Deadlines[str] = Deadlines()
    plain: dict[str, int] = {}
    for key, at in changes:
        if key is None:
            assert at is not None
            due = deadlines.take_due(at)
            assert sorted(due) == sorted(name for name, time in plain.items() if time <= at)
            assert due == sorted(due, key=lambda name: (plain[name], name))
            plain = {name: time for name, time in plain.items() if time > at}
        elif at is None:
            deadlines.drop(key)
            plain.pop(key, None)
        else:
            deadlines.set(key, at)
            plain[key] = at
        assert deadlines.next() == min(plain.values(), default=None)
        assert len(deadlines) == len(plain)


def test_a_moved_deadline_counts_once() -> None:
    deadlines: Deadlines[str] = Deadlines()
    deadlines.set("a", 1)
    deadlines.set("a", 5)
    deadlines.set("a", 1)
    assert deadlines.take_due(3) == ["a"]
    assert deadlines.take_due(9) == []


def test_what_was_moved_or_dropped_is_forgotten() -> None:
    deadlines: Deadlines[str] = Deadlines()
    for number in range(10_000):
        deadlines.set("kept", 1_000_000 + number)
        deadlines.set(f"ended {number}", 500_000 + number)
        deadlines.drop(f"ended {number}")
    assert len(deadlines) == 1
    assert deadlines.num_entries < 100


def many(count: int) -> Deadlines[str]:
    deadlines: Deadlines[str] = Deadlines()
    for number in range(count):
        deadlines.set(str(number), 100 + number)
    return deadlines


def test_asking_costs_the_same_for_ten_and_for_ten_thousand() -> None:
    few, lots = many(10), many(10_000)

    def ask(deadlines: Deadlines[str]) -> None:
        assert deadlines.take_due(99) == []
        assert deadlines.next() == 100

    assert count_instructions(lambda: ask(few)) == count_instructions(lambda: ask(lots))
    idle = count_instructions(lambda: ask(lots))
    assert count_instructions(lambda: lots.take_due(5000)) > 100 * idle, (
        "work that is there is counted"
    )
