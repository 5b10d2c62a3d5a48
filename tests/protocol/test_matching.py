"""Tests that the two legs of a request find each other by match id, by request id, or by request id
without its suffix, and never by guessing.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.producer.matching import MatchIndex, MatchKey


def shelf_of(**names: MatchKey) -> MatchIndex[str]:
    match_index: MatchIndex[str] = MatchIndex()
    for key, name in names.items():
        match_index.add(key, name)
    return match_index


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (MatchKey("cmpl-x-0-0123abcd"), ["same"]),
        (MatchKey("cmpl-x-0-ffffffff"), ["same", "twin"]),
        (MatchKey("cmpl-x-1-ffffffff"), ["other"]),
        (MatchKey("cmpl-x"), []),
        (MatchKey("cmpl-x-0"), ["same", "twin"]),
        (MatchKey("cmpl-x-0-FFFFFFFF"), []),
    ],
)
def test_equal_ids_come_before_ids_without_their_tails(asked: MatchKey, found: list[str]) -> None:
    match_index = shelf_of(
        same=MatchKey("cmpl-x-0-0123abcd"),
        twin=MatchKey("cmpl-x-0-99999999"),
        other=MatchKey("cmpl-x-1-0123abcd"),
    )
    assert match_index.find(asked) == found


def test_a_handover_decides_whatever_the_ids_are() -> None:
    match_index = shelf_of(
        mine=MatchKey("a", "h1"), same_id=MatchKey("b", "h2"), without=MatchKey("b")
    )
    assert match_index.find(MatchKey("b", "h1")) == ["mine"]
    assert match_index.find(MatchKey("b", "h3")) == [], (
        "a request with a handover is nobody else's, whatever its id"
    )
    assert match_index.find(MatchKey("b")) == ["without"]


def test_endings_are_not_found_by_ids_without_their_tails() -> None:
    match_index = shelf_of(a=MatchKey("x-00000000"))
    assert match_index.find_exactly(MatchKey("x-11111111")) == []
    assert match_index.find(MatchKey("x-11111111")) == ["a"]


NAMES = st.builds(
    MatchKey,
    st.sampled_from(["x", "x-00000000", "x-11111111", "y-00000000"]),
    st.sampled_from(["", "h1", "h2"]),
)


@given(st.lists(st.tuples(st.integers(0, 5), st.one_of(st.none(), NAMES)), max_size=30), NAMES)
def test_what_is_found_is_what_a_look_at_everything_finds(
    steps: list[tuple[int, MatchKey | None]], asked: MatchKey
) -> None:
    match_index: MatchIndex[int] = MatchIndex()
    known: dict[int, MatchKey] = {}
    for key, name in steps:
        if name is None:
            match_index.drop(key)
            known.pop(key, None)
        else:
            match_index.add(key, name)
            known[key] = name
    same_handover = {
        key for key, name in known.items() if asked.match_id and name.match_id == asked.match_id
    }
    possible = {
        key: name for key, name in known.items() if not asked.match_id and not name.match_id
    }
    same_id = {key for key, name in possible.items() if name.request == asked.request}
    same_base = {key for key, name in possible.items() if name.base == asked.base}
    assert set(match_index.find(asked)) == (same_handover or same_id or same_base)
    assert len(match_index) == len(known)
    assert all(key in match_index for key in known)
