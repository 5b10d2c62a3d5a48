"""Tests that the copy table describes exactly the requested copies, by reading the table as the
kernel does.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import TransportError
from kvferry.transports.base import Segments
from kvferry.transports.copy.gather import AddressCopies
from kvferry.transports.copy.segments import Offsets, group_by_offsets
from kvferry.transports.copy.table import (
    FIRST_ROWS,
    TABLE_NUMBERS,
    TABLE_ROWS,
    TICK_BYTES,
    TableLayout,
    flat_addresses,
    split_by_launch,
    split_by_tick,
    write_table,
)

Moved = set[tuple[int, int, int]]
"""(size, source, target) of every segment."""


def offsets(*numbers: int) -> Offsets:
    return np.array(numbers, np.int64)


def asked(copies: list[AddressCopies]) -> Moved:
    return {
        (part.size_bytes, source_base + source, target_base + target)
        for part in copies
        for source_base, target_base in zip(part.source_bases, part.target_bases, strict=True)
        for source, target in zip(part.sources.tolist(), part.targets.tolist(), strict=True)
    }


def by_size(copies: list[AddressCopies]) -> list[AddressCopies]:
    return sorted(copies, key=lambda part: (part.size_bytes, part.num_rows))


def read(table: Offsets, layout: TableLayout, size_bytes: int) -> Moved:
    """Read the table as the kernel does: it visits as many rows for each place as the longest place
    has, and skips the rows that a place does not have.
    """
    numbers, moved = table.tolist(), Moved()
    for place in range(layout.num_places):
        source_base, target_base, first_source, first_target, num_rows = numbers[
            5 * place : 5 * place + 5
        ]
        for row in range(layout.most_rows):
            if row < num_rows:
                moved.add(
                    (
                        size_bytes,
                        source_base + numbers[first_source + row],
                        target_base + numbers[first_target + row],
                    )
                )
    sources, targets = flat_addresses(table, layout)
    assert moved == {
        (size_bytes, *pair) for pair in zip(sources.tolist(), targets.tolist(), strict=True)
    }, "without a kernel it is the same"
    return moved


parts = st.builds(
    lambda size, rows, places, seed: AddressCopies(
        size,
        np.arange(rows, dtype=np.int64) * size + seed,
        np.arange(rows, dtype=np.int64)[::-1] * size + seed,
        tuple(seed * 10**6 + n * 10**9 for n in range(places)),
        tuple(10**15 + seed * 10**6 + n * 10**9 for n in range(places)),
    ),
    st.sampled_from([16, 4096]),
    st.sampled_from([0, 1, 7, 300]),
    st.integers(1, 5),
    st.integers(0, 100),
)


@settings(max_examples=50)
@given(st.lists(parts, max_size=12))
def test_launches_move_what_was_asked_for(copies: list[AddressCopies]) -> None:
    table, moved = np.zeros(TABLE_NUMBERS, np.int64), set[tuple[int, int, int]]()
    for launch in split_by_launch(by_size(copies)):
        layout = write_table(table, launch)
        (size_bytes,) = {part.size_bytes for part in launch}
        moved |= read(table, layout, size_bytes)
        assert layout.num_places == sum(part.num_places for part in launch)
        assert layout.most_rows == max(part.num_rows for part in launch)
        assert layout.most_rows * layout.num_places <= 2 * sum(
            part.num_rows * part.num_places for part in launch
        ), "most programs idle"
    assert moved == asked(copies)


def test_what_shares_its_offsets_is_written_down_once() -> None:
    bases = range(1, 33)
    layers = AddressCopies(
        64,
        offsets(0, 64),
        offsets(64, 0),
        tuple(1000 * n for n in bases),
        tuple(5000 * n for n in bases),
    )
    apart = AddressCopies(64, offsets(0, 64), offsets(64, 0), (1,), (2,))
    (launch,) = split_by_launch([layers, apart])
    table = np.zeros(TABLE_NUMBERS, np.int64)
    layout = write_table(table, launch)
    assert layout.num_numbers == 33 * 5 + 2 * 4
    assert read(table, layout, 64) == asked([layers, apart])


def test_layers_that_move_the_same_blocks_are_found() -> None:
    near, far, none = offsets(0, 64), offsets(64, 0), offsets()
    layers = [Segments(n, n + 1, 64, near, far) for n in range(5)]
    assert group_by_offsets(layers) == [layers]
    apart = [
        Segments(0, 0, 64, near, far.copy()),
        Segments(1, 1, 64, near.copy(), far),
        Segments(2, 2, 32, near, far),
    ]
    empty = Segments(3, 3, 16, none, none)
    found = group_by_offsets([layers[0], apart[0], empty, layers[1], apart[1], apart[2], layers[2]])
    assert [[id(part) for part in group] for group in found] == [
        [id(apart[2])],
        [id(part) for part in layers[:3]],
        [id(apart[0])],
        [id(apart[1])],
    ]
    assert group_by_offsets([]) == group_by_offsets([empty]) == []
    assert [len(group) for group in group_by_offsets(layers * 1000)] == [2048, 2048, 904]


def test_more_rows_than_a_table_has_and_other_sizes_are_other_launches() -> None:
    rows = np.arange(TABLE_ROWS + 10, dtype=np.int64) * 16
    copies = [
        AddressCopies(16, rows, rows, (0,), (1 << 40,)),
        AddressCopies(32, rows[:10], rows[:10], (0,), (1 << 41,)),
    ]
    launches = list(split_by_launch(by_size(copies)))
    assert sorted(sum(part.num_rows for part in launch) for launch in launches) == [
        10,
        10,
        TABLE_ROWS,
    ]


def test_a_place_with_many_rows_does_not_make_idle_programs_for_those_with_few() -> None:
    few = [AddressCopies(16, offsets(0), offsets(0), (n,), (1000 + n,)) for n in range(40)]
    many = AddressCopies(
        16,
        np.arange(5000, dtype=np.int64) * 16,
        np.arange(5000, dtype=np.int64) * 16,
        (1 << 40,),
        (1 << 41,),
    )
    assert [
        sum(part.num_places for part in launch) for launch in split_by_launch(by_size([many, *few]))
    ] == [40, 1]


def test_many_parts_that_share_nothing_are_few_launches() -> None:
    copies = [AddressCopies(16, offsets(n), offsets(n), (0,), (1 << 40,)) for n in range(5000)]
    launches = list(split_by_launch(by_size(copies)))
    assert [len(launch) for launch in launches] == [2048, 2048, 904]


def test_the_bits_of_all_addresses_are_told() -> None:
    table = np.zeros(TABLE_NUMBERS, np.int64)
    for sources, bases, bits in (
        (offsets(0, 32), (64,), 96),
        (offsets(0, 8), (64,), 72),
        (offsets(0, 32), (64, 3), 99),
    ):
        targets = offsets(*[0] * len(sources))
        assert (
            write_table(
                table, [AddressCopies(8, sources, targets, bases, tuple(0 for _ in bases))]
            ).bits
            == bits
        )


@pytest.mark.parametrize(("source", "target"), [(57, 0), (0, 57), (-1, 0)])
def test_what_leaves_its_region_is_refused(source: int, target: int) -> None:
    with pytest.raises(TransportError, match="leaves its region"):
        write_table(
            np.zeros(TABLE_NUMBERS, np.int64),
            [AddressCopies(8, offsets(source), offsets(target), source_last=56, target_last=56)],
        )


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize(
    ("size", "rows", "places"),
    [(16, 10, 3), (4096, 40_000, 2), (1 << 20, 600, 4), (1 << 30, 2, 3), (4096, FIRST_ROWS + 1, 1)],
)
def test_a_transfer_is_handed_over_in_parts_that_together_are_all_of_it(
    size: int, rows: int, places: int, times: int
) -> None:
    numbers = np.arange(rows, dtype=np.int64)
    part = AddressCopies(
        size, numbers, numbers[::-1].copy(), tuple(range(places)), tuple(range(100, 100 + places))
    )
    turns = list(split_by_tick([part] * times))
    for turn in turns:
        assert sum(each.num_rows for each in turn) <= TABLE_ROWS
        assert sum(each.total_bytes for each in turn) <= max(TICK_BYTES, size * places)
    assert sum(each.num_rows for each in turns[0]) <= FIRST_ROWS
    assert (
        np.concatenate([each.sources for turn in turns for each in turn]).tolist()
        == [*numbers.tolist()] * times
    )
    assert sum(each.total_bytes for turn in turns for each in turn) == times * size * rows * places
