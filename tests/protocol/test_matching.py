"""Two legs of one request find each other by handover, id, or id without its tail; never by a guess."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.matching import MatchName, Shelf


def shelf_of(**names: MatchName) -> Shelf[str]:
    shelf: Shelf[str] = Shelf()
    for key, name in names.items():
        shelf.add(key, name)
    return shelf


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (MatchName("cmpl-x-0-0123abcd"), ["same"]),
        (MatchName("cmpl-x-0-ffffffff"), ["same", "twin"]),
        (MatchName("cmpl-x-1-ffffffff"), ["other"]),
        (MatchName("cmpl-x"), []),
        (MatchName("cmpl-x-0"), ["same", "twin"]),
        (MatchName("cmpl-x-0-FFFFFFFF"), []),
    ],
)
def test_equal_ids_come_before_ids_without_their_tails(asked: MatchName, found: list[str]) -> None:
    shelf = shelf_of(same=MatchName("cmpl-x-0-0123abcd"), twin=MatchName("cmpl-x-0-99999999"), other=MatchName("cmpl-x-1-0123abcd"))
    assert shelf.find(asked) == found


def test_a_handover_decides_whatever_the_ids_are() -> None:
    shelf = shelf_of(mine=MatchName("a", "h1"), same_id=MatchName("b", "h2"), without=MatchName("b"))
    assert shelf.find(MatchName("b", "h1")) == ["mine"]
    assert shelf.find(MatchName("b", "h3")) == [], "a request with a handover is nobody else's, whatever its id"
    assert shelf.find(MatchName("b")) == ["without"]


def test_endings_are_not_found_by_ids_without_their_tails() -> None:
    shelf = shelf_of(a=MatchName("x-00000000"))
    assert shelf.find_exactly(MatchName("x-11111111")) == []
    assert shelf.find(MatchName("x-11111111")) == ["a"]


NAMES = st.builds(MatchName, st.sampled_from(["x", "x-00000000", "x-11111111", "y-00000000"]), st.sampled_from(["", "h1", "h2"]))


@given(st.lists(st.tuples(st.integers(0, 5), st.one_of(st.none(), NAMES)), max_size=30), NAMES)
def test_what_is_found_is_what_a_look_at_everything_finds(steps: list[tuple[int, MatchName | None]], asked: MatchName) -> None:
    shelf: Shelf[int] = Shelf()
    known: dict[int, MatchName] = {}
    for key, name in steps:
        if name is None:
            shelf.drop(key)
            known.pop(key, None)
        else:
            shelf.add(key, name)
            known[key] = name
    same_handover = {key for key, name in known.items() if asked.handover and name.handover == asked.handover}
    possible = {key: name for key, name in known.items() if not asked.handover and not name.handover}
    same_id = {key for key, name in possible.items() if name.request == asked.request}
    same_base = {key for key, name in possible.items() if name.base == asked.base}
    assert set(shelf.find(asked)) == (same_handover or same_id or same_base)
    assert len(shelf) == len(known)
    assert all(key in shelf for key in known)
