"""Tests that the compiled offset arithmetic gives the same results as numpy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.transports.copy.segments import PLACE_NUMBERS, are_within, put_all, put_places

WIDE = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(WIDE, max_size=40), st.integers(-5, 2**62))
def test_offsets_are_within_exactly_when_each_is(numbers: list[int], last: int) -> None:
    offsets = np.array(numbers, np.int64)
    expected = all(0 <= number <= last for number in numbers)
    assert are_within(offsets, last) is expected
    assert are_within(np.repeat(offsets, 2)[::2], last) is expected, (
        "not contiguous: numpy looks at them"
    )


@given(st.lists(st.integers(0, 2**50), max_size=40), st.integers(0, 5))
def test_all_are_written_and_the_bits_of_all_are_told(numbers: list[int], first: int) -> None:
    table = np.full(50, -1, np.int64)
    bits = put_all(table, first, np.array(numbers, np.int64), 2**50)
    assert table.tolist() == [-1] * first + numbers + [-1] * (50 - first - len(numbers))
    assert bits == int(np.bitwise_or.reduce(np.array([0, *numbers], np.int64)))
    apart = np.full(50, -1, np.int64)
    assert put_all(apart, first, np.repeat(np.array(numbers, np.int64), 2)[::2], 2**50) == bits
    assert apart.tolist() == table.tolist()


def test_a_table_is_never_overrun() -> None:
    table = np.zeros(4, np.int64)
    with pytest.raises(ValueError, match=r"table|broadcast"):
        put_all(table, 2, np.arange(3, dtype=np.int64), 9)
    assert not table.any()


@given(st.lists(WIDE, min_size=1, max_size=40), st.integers(-1, 2**62))
def test_an_offset_that_leaves_its_region_is_told(numbers: list[int], last: int) -> None:
    table, offsets = np.zeros(50, np.int64), np.array(numbers, np.int64)
    if are_within(offsets, last):
        put_all(table, 0, offsets, last)
    else:
        with pytest.raises(IndexError):
            put_all(table, 0, offsets, last)


@given(
    st.lists(st.tuples(st.integers(0, 2**62), st.integers(0, 2**62)), max_size=8),
    st.integers(0, 10),
)
def test_places_are_written_one_after_the_other(pairs: list[tuple[int, int]], first: int) -> None:
    table = np.full(50, -1, np.int64)
    sources, targets = tuple(source for source, _ in pairs), tuple(target for _, target in pairs)
    bits = put_places(table, first, sources, targets, (7, 8, 9))
    written = [number for pair in pairs for number in (*pair, 7, 8, 9)]
    assert table.tolist() == [-1] * first + written + [-1] * (50 - first - len(written))
    assert len(written) == PLACE_NUMBERS * len(pairs)
    assert bits == int(np.bitwise_or.reduce(np.array([0, *sources, *targets], np.int64)))


def test_places_never_overrun_a_table_and_are_numbers_in_pairs() -> None:
    table = np.zeros(9, np.int64)
    for first, sources, targets in [
        (0, (1, 2), (3, 4)),
        (5, (1,), (2,)),
        (-1, (1,), (2,)),
        (0, (1,), (2, 3)),
    ]:
        with pytest.raises(ValueError, match=r"table|broadcast|shape"):
            put_places(table, first, sources, targets, (7, 8, 9))
    assert not table.any()
    with pytest.raises(OverflowError):
        put_places(table, 0, (1,), (1 << 64,), (7, 8, 9))
