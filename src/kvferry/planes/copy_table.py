"""The table by which a kernel finds the pieces that it copies. Pure.

Layers mostly move the same blocks, so offsets are written down once for all places that have them in common:

    place 0: source base, target base, where its sources begin, where its targets begin, how many
    place 1: ...
    sources and targets of the first places in common, of the next, ...
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvferry.errors import TransportError
from kvferry.planes.address_copy import AddressCopies
from kvferry.planes.offsets import put_all
from kvferry.planes.runs import Offsets

__all__ = [
    "FIRST_ROWS",
    "TABLE_NUMBERS",
    "TABLE_ROWS",
    "TURN_BYTES",
    "Place",
    "TableLayout",
    "by_launch",
    "in_turns",
    "places_of",
    "together",
    "write_table",
]

TABLE_ROWS = 65_536
"""Rows of offsets in one table. Writing down so many takes about 0.1 ms."""
FIRST_ROWS = 8192
"""Rows of a long transfer that are handed over first. Then it is twice as many each time, so that the device has work while the next are
written down."""
TURN_BYTES = 1 << 30
"""What is handed over at a time at most: others want their turn."""
MAX_PLACES = 2048
PLACE_NUMBERS = 5
TABLE_NUMBERS = 2 * TABLE_ROWS + PLACE_NUMBERS * MAX_PLACES
MOST_IDLE = 2
"""Every place gets as many programs as the one with the most rows; so many times what all of them need are too many."""


class Place(NamedTuple):
    """Numbers `first_source + i` and `first_target + i` of the table are offsets from these addresses."""

    source_base: int
    target_base: int
    first_source: int
    first_target: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class TableLayout:
    num_places: int
    most_rows: int
    """Of any place."""
    num_numbers: int
    """What of the table is in use."""
    bits: int
    """All addresses, or-ed: what their lowest bits say of every one."""


def together(copies: Iterable[AddressCopies]) -> list[AddressCopies]:
    """The same copies, those with the same offsets as one, by size and length. Offsets are the same if they are the same array."""
    alike: dict[tuple[int, int, int], list[AddressCopies]] = {}
    for part in copies:
        if part.num_rows and part.size_bytes:
            alike.setdefault((part.size_bytes, id(part.sources), id(part.targets)), []).append(part)
    joined = [_joined(parts[first : first + MAX_PLACES]) for parts in alike.values() for first in range(0, len(parts), MAX_PLACES)]
    return sorted(joined, key=lambda part: (part.size_bytes, part.num_rows))


def in_turns(copies: Sequence[AddressCopies]) -> Iterator[list[AddressCopies]]:
    """What is handed over at a time."""
    most_rows = FIRST_ROWS
    waiting, rows, room = list[AddressCopies](), most_rows, TURN_BYTES
    for part in copies:
        first, row_bytes = 0, part.size_bytes * part.num_places
        while first < part.num_rows:
            fitting = min(rows, max(room // row_bytes, 0 if waiting else 1))
            if fitting <= 0:
                yield waiting
                most_rows = min(2 * most_rows, TABLE_ROWS)
                waiting, rows, room = [], most_rows, TURN_BYTES
                continue
            taken = part.rows(first, first + fitting)
            waiting.append(taken)
            first, rows, room = first + taken.num_rows, rows - taken.num_rows, room - taken.total_bytes
    if waiting:
        yield waiting


def by_launch(copies: Sequence[AddressCopies]) -> Iterator[list[AddressCopies]]:
    """What one kernel copies: pieces of one size, at most a table's worth, places of about as many rows."""
    waiting, room, num_places, num_pieces = list[AddressCopies](), TABLE_ROWS, 0, 0
    for part in copies:
        first = 0
        while first < part.num_rows and part.size_bytes:
            taken = part.rows(first, first + (room or TABLE_ROWS))
            places, pieces = num_places + part.num_places, num_pieces + taken.num_rows * part.num_places
            most = max(taken.num_rows, *(each.num_rows for each in waiting), 0)
            fits = room and places <= MAX_PLACES and most * places <= MOST_IDLE * pieces
            if waiting and (not fits or waiting[0].size_bytes != part.size_bytes):
                yield waiting
                waiting, room, num_places, num_pieces = [], TABLE_ROWS, 0, 0
                continue
            waiting.append(taken)
            first, room, num_places, num_pieces = first + taken.num_rows, room - taken.num_rows, places, pieces
    if waiting:
        yield waiting


def write_table(table: Offsets, parts: Sequence[AddressCopies]) -> TableLayout:
    """TransportError when a piece leaves its region."""
    at = PLACE_NUMBERS * sum(part.num_places for part in parts)
    numbers, bits, most = list[int](), 0, 0
    try:
        for part in parts:
            rows = part.num_rows
            bits |= put_all(table, at, part.sources, part.source_last) | put_all(table, at + rows, part.targets, part.target_last)
            for source_base, target_base in zip(part.source_bases, part.target_bases, strict=True):
                bits |= source_base | target_base
                numbers += (source_base, target_base, at, at + rows, rows)
            at, most = at + 2 * rows, max(most, rows)
    except IndexError as error:
        raise TransportError("a piece of this transfer leaves its region") from error
    table[: len(numbers)] = numbers
    return TableLayout(len(numbers) // PLACE_NUMBERS, most, at, bits)


def places_of(table: Offsets, layout: TableLayout) -> list[Place]:
    """For whoever copies without a kernel."""
    return [Place(*numbers) for numbers in table[: PLACE_NUMBERS * layout.num_places].reshape(-1, PLACE_NUMBERS).tolist()]


def _joined(parts: Sequence[AddressCopies]) -> AddressCopies:
    if len(parts) == 1:
        return parts[0]
    return AddressCopies(
        parts[0].size_bytes,
        parts[0].sources,
        parts[0].targets,
        tuple(base for part in parts for base in part.source_bases),
        tuple(base for part in parts for base in part.target_bases),
        min(part.source_last for part in parts),
        min(part.target_last for part in parts),
    )
