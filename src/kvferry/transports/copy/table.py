"""The table that tells a kernel which segments to copy. Pure.

A place is a pair of base addresses, mostly those of one layer. A row is one source offset and one
target offset. Layers mostly move the same blocks, so places with equal offsets share one list of
rows in the table:

    place 0: source base, target base, index of first source, index of first target, number of rows
    place 1: ...
    sources, then targets, of the first places that share rows; of the next places; ...
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvferry.errors import TransportError
from kvferry.transports.copy.gather import AddressCopies
from kvferry.transports.copy.segments import (
    MAX_PLACES,
    PLACE_NUMBERS,
    Offsets,
    put_all,
    put_places,
)

TABLE_NUMBERS = 131_072
"""Numbers of 64 bits in one table: 1 MiB. torch rounds pinned allocations up, and reserves large
segments of device memory for allocations above this size.
"""
TABLE_ROWS = (TABLE_NUMBERS - PLACE_NUMBERS * MAX_PLACES) // 2
"""Most rows of offsets in one table."""
FIRST_ROWS = 8192
"""Rows of a long transfer in its first tick. Each further tick has `GROWTH_PER_TICK` times as many,
so that the device has work while the next table is being written.
"""
GROWTH_PER_TICK = 4
TICK_BYTES = 1 << 30
"""Most bytes in one tick, unless one row alone is larger: other transfers wait meanwhile."""
MAX_IDLE_FACTOR = 2
"""The kernel starts as many programs for every place as for the place with the most rows. A launch
may start at most this many times as many programs as its segments need.
"""


class TableLayout(NamedTuple):
    """How much of a table is used, and by what."""

    num_places: int
    most_rows: int
    """Number of rows of the place with the most rows."""
    num_numbers: int
    """Number of table entries in use."""
    bits: int
    """Bitwise OR of all addresses: its lowest bits show the alignment of every address."""


def is_one_launch(part: AddressCopies) -> bool:
    """Whether one tick and one kernel can copy everything, as with most transfers."""
    return (
        0 < part.num_rows <= FIRST_ROWS
        and 0 < part.total_bytes <= TICK_BYTES
        and part.num_places <= MAX_PLACES
    )


def split_by_tick(copies: Sequence[AddressCopies]) -> Iterator[list[AddressCopies]]:
    """Cut the copies of a transfer into ticks."""
    if len(copies) == 1 and is_one_launch(copies[0]):
        yield [copies[0]]
        return
    most_rows = FIRST_ROWS
    waiting, rows, room = list[AddressCopies](), most_rows, TICK_BYTES
    for part in copies:
        first, row_bytes = 0, part.size_bytes * part.num_places
        while first < part.num_rows:
            fitting = min(rows, max(room // row_bytes, 0 if waiting else 1))
            if fitting <= 0:
                yield waiting
                most_rows = min(GROWTH_PER_TICK * most_rows, TABLE_ROWS)
                waiting, rows, room = [], most_rows, TICK_BYTES
                continue
            taken = part.rows(first, first + fitting)
            waiting.append(taken)
            first, rows = first + taken.num_rows, rows - taken.num_rows
            room -= taken.total_bytes
    if waiting:
        yield waiting


def split_by_launch(copies: Sequence[AddressCopies]) -> Iterator[list[AddressCopies]]:
    """Cut copies into launches: each copies segments of one size, fits into one table, and has
    places with similar numbers of rows.
    """
    if len(copies) == 1 and is_one_launch(copies[0]):
        yield [copies[0]]
        return
    waiting, room, num_places, num_segments, most_rows = list[AddressCopies](), TABLE_ROWS, 0, 0, 0
    for part in copies:
        first = 0
        while first < part.num_rows and part.size_bytes:
            taken = part.rows(first, first + (room or TABLE_ROWS))
            places = num_places + part.num_places
            segments = num_segments + taken.num_rows * part.num_places
            most = max(most_rows, taken.num_rows)
            fits = room and places <= MAX_PLACES and most * places <= MAX_IDLE_FACTOR * segments
            if waiting and (not fits or waiting[0].size_bytes != part.size_bytes):
                yield waiting
                waiting, room, num_places, num_segments, most_rows = [], TABLE_ROWS, 0, 0, 0
                continue
            waiting.append(taken)
            first, room = first + taken.num_rows, room - taken.num_rows
            num_places, num_segments, most_rows = places, segments, most
    if waiting:
        yield waiting


def write_table(table: Offsets, parts: Sequence[AddressCopies]) -> TableLayout:
    """Write the table of one launch. TransportError if a segment leaves its region."""
    num_places = sum(part.num_places for part in parts)
    first, at, bits = 0, PLACE_NUMBERS * num_places, 0
    try:
        for part in parts:
            rows = part.num_rows
            bits |= put_all(table, at, part.sources, part.source_last) | put_all(
                table, at + rows, part.targets, part.target_last
            )
            bits |= put_places(
                table, first, part.source_bases, part.target_bases, (at, at + rows, rows)
            )
            first, at = first + PLACE_NUMBERS * part.num_places, at + 2 * rows
    except IndexError as error:
        raise TransportError("a segment of this transfer leaves its region") from error
    return TableLayout(num_places, max(part.num_rows for part in parts), at, bits)


def flat_addresses(table: Offsets, layout: TableLayout) -> tuple[Offsets, Offsets]:
    """Return the sources and targets of all segments, for copies without a kernel."""
    places = table[: PLACE_NUMBERS * layout.num_places].reshape(-1, PLACE_NUMBERS).tolist()
    sources = [table[at:][:num_rows] + base for base, _, at, _, num_rows in places]
    targets = [table[at:][:num_rows] + base for _, base, _, at, num_rows in places]
    return np.concatenate(sources), np.concatenate(targets)
