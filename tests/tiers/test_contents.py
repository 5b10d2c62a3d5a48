"""Tests the reports of what a rank's tiers hold."""

from hypothesis import given
from hypothesis import strategies as st

from kvferry.tiers.base import EntryKey
from kvferry.tiers.commands import ContentsChanged
from kvferry.tiers.jobs.contents import TierContents

A, B, C = (EntryKey(name * 32) for name in (b"a", b"b", b"c"))


def test_a_report_names_what_has_changed_since_the_last_one() -> None:
    contents = TierContents()
    assert contents.take_change() is None
    contents.add("cpu", A)
    contents.add("disk", A)
    assert contents.take_change() == ContentsChanged({"cpu": (A,), "disk": (A,)})
    contents.add("cpu", A)
    assert contents.take_change() is None
    contents.remove("cpu", A)
    contents.remove("cpu", B)
    assert contents.take_change() == ContentsChanged(removed={"cpu": (A,)})


def test_an_object_that_comes_and_goes_between_two_reports_is_not_mentioned() -> None:
    contents = TierContents()
    contents.add("cpu", A)
    contents.remove("cpu", A)
    assert contents.take_change() is None


def test_of_too_many_objects_the_least_recently_used_is_reported_as_removed() -> None:
    contents = TierContents(max_entries=2)
    contents.add("object", A)
    contents.add("object", B)
    contents.add("object", A)
    contents.take_change()
    contents.add("object", C)
    assert contents.take_change() == ContentsChanged({"object": (C,)}, {"object": (B,)})


ACTIONS = st.tuples(
    st.sampled_from(["add", "add", "remove", "clear", "report"]),
    st.sampled_from(["cpu", "disk"]),
    st.sampled_from([A, B, C]),
)


@given(st.lists(ACTIONS))
def test_a_reader_of_the_reports_knows_what_the_tiers_hold(
    actions: list[tuple[str, str, EntryKey]],
) -> None:
    contents = TierContents()
    held: set[tuple[str, EntryKey]] = set()
    known: set[tuple[str, EntryKey]] = set()
    for action, tier, key in [*actions, ("report", "", A)]:
        match action:
            case "add":
                contents.add(tier, key)
                held.add((tier, key))
            case "remove":
                contents.remove(tier, key)
                held.discard((tier, key))
            case "clear":
                contents.clear()
                held.clear()
            case "report":
                change = contents.take_change() or ContentsChanged()
                known = set() if change.is_cleared else known
                known -= {(tier, key) for tier, keys in change.removed.items() for key in keys}
                known |= {(tier, key) for tier, keys in change.stored.items() for key in keys}
                assert known == held
