"""Segments of the host pool: files in shared memory with rows of KV and a table of these rows.

Each rank of each engine owns one segment and is the only process that writes it; the owner holds an
flock on the file while it lives. All engines of the user read each other's segments.

    | header | order | checks | keys | index | states |  used  |  rows …
             one entry in each column for each row            page-aligned, from here on

    order     the number of the store that filled the row, ascending
    checks    the checksum of the row, mixed with its key
    index     finds the row of a key: a hash table with buckets of eight slots
    states    `RowState`: readers use READY entries only
    used      counts uses by other processes; the only column that readers write

There are no locks between owner and readers. A reader may see an entry while the owner changes it,
or copy a row while the owner overwrites it. Both are found after the copy: the checksum of the
bytes that arrived, mixed with the key that the reader wants, then differs from the entry's.

`segment_files.py` has the files.
"""

import mmap
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kvferry.tiers.base import KEY_BYTES, EntryKey, EntryKeys
from kvferry.transports.copy.native import native_or

MAGIC = b"KVFROWS\0"
SEGMENT_VERSION = 2
HEADER_BYTES = 16 * 1024
HEADER = struct.Struct("<8sIIQQ16sQ")
"""Magic, version, bytes of the namespace's text, row bytes, rows, namespace digest, owner's pid."""
LAST_STORE_AT = 72
TEXT_AT = 128
MAX_ROWS = (1 << 32) - 1
MAX_ROW_BYTES = 1 << 40
SLOTS = 8
"""In one bucket of the index. A slot holds 32 bits of a key and, in its lower half, the number of
the key's row + 1. There are at least as many buckets as rows, so about one row in a million finds
its bucket full. Readers do not find such a row.
"""
LOWER_HALF = (1 << 32) - 1
"""The bits of a slot that hold the row's number."""


class RowState(IntEnum):
    FREE = 0
    WRITING = 1
    READY = 2


READY = int(RowState.READY)
"""Comparing an integer with a member of an enum is slow."""


def mixed_with_key(checksum: int, key: EntryKey) -> int:
    """Combine a row's checksum with its key, so that an entry whose key and checksum belong to
    different rows does not match. A second call undoes the first.
    """
    a, b, c, d = struct.unpack("<4Q", key)
    return int(checksum ^ a ^ b ^ c ^ d)


# -- layout --


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """Where everything is in a segment, as offsets in the file."""

    row_bytes: int
    num_rows: int

    @property
    def row_stride(self) -> int:
        return _whole_pages(self.row_bytes)

    @property
    def num_buckets(self) -> int:
        """A power of two."""
        return 1 << (self.num_rows - 1).bit_length()

    @property
    def order_at(self) -> int:
        return HEADER_BYTES

    @property
    def checks_at(self) -> int:
        return self.order_at + 8 * self.num_rows

    @property
    def keys_at(self) -> int:
        return self.checks_at + 8 * self.num_rows

    @property
    def index_at(self) -> int:
        return self.keys_at + KEY_BYTES * self.num_rows

    @property
    def states_at(self) -> int:
        return self.index_at + 8 * SLOTS * self.num_buckets

    @property
    def used_at(self) -> int:
        return _whole_pages(self.states_at + self.num_rows)

    @property
    def rows_at(self) -> int:
        return _whole_pages(self.used_at + 4 * self.num_rows)

    @property
    def total_bytes(self) -> int:
        return self.rows_at + self.num_rows * self.row_stride


def _whole_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


@dataclass(frozen=True, slots=True)
class Header:
    layout: SegmentLayout
    namespace: bytes
    """The digest of the namespace."""
    namespace_text: str
    owner_pid: int

    def to_bytes(self) -> bytes:
        text = self.namespace_text.encode()[: HEADER_BYTES - TEXT_AT]
        layout = self.layout
        fields = HEADER.pack(
            MAGIC,
            SEGMENT_VERSION,
            len(text),
            layout.row_bytes,
            layout.num_rows,
            self.namespace,
            self.owner_pid,
        )
        return fields.ljust(TEXT_AT, b"\0") + text

    @classmethod
    def from_bytes(cls, data: bytes) -> "Header | None":
        """Read a header; None unless its fields are valid."""
        if len(data) < HEADER_BYTES:
            return None
        magic, version, text_bytes, row_bytes, num_rows, namespace, pid = HEADER.unpack_from(data)
        if (magic, version) != (MAGIC, SEGMENT_VERSION) or text_bytes > HEADER_BYTES - TEXT_AT:
            return None
        if not (0 < row_bytes <= MAX_ROW_BYTES and 0 < num_rows <= MAX_ROWS):
            return None
        text = data[TEXT_AT : TEXT_AT + text_bytes].decode(errors="replace")
        return cls(SegmentLayout(row_bytes, num_rows), namespace, text, pid)


class SegmentTable:
    """The columns of a mapped segment. The mapping stays as long as the table, one of its views, or
    an object that holds `pages`.
    """

    def __init__(
        self, pages: mmap.mmap, layout: SegmentLayout, used: mmap.mmap | None = None
    ) -> None:
        count = layout.num_rows
        self.pages = pages
        self.layout = layout
        self.order = np.frombuffer(pages, np.uint64, count, layout.order_at)
        self.states = np.frombuffer(pages, np.uint8, count, layout.states_at)
        # A reader maps this column alone with permission to write.
        self.used = (
            np.frombuffer(pages, np.uint32, count, layout.used_at)
            if used is None
            else np.frombuffer(used, np.uint32, count)
        )
        self.rows_address = int(self.order.ctypes.data) - layout.order_at + layout.rows_at
        self._row_stride = layout.row_stride
        # Single entries are read and written through memoryviews: several times faster than numpy.
        whole = memoryview(pages)
        self._checks = whole[layout.checks_at : layout.keys_at].cast("Q")
        self._keys = whole[layout.keys_at : layout.index_at]
        self._slots = whole[layout.index_at : layout.states_at].cast("Q")
        self._states = whole[layout.states_at : layout.states_at + count]
        self._num_stores = 0
        self._last_store = whole[LAST_STORE_AT : LAST_STORE_AT + 8].cast("d")

    @property
    def last_store_s(self) -> float:
        """When the owner last stored a row, in seconds since 1970."""
        return self._last_store[0]

    @property
    def num_ready(self) -> int:
        return int(np.count_nonzero(self.states == READY))

    def address(self, row: int) -> int:
        return self.rows_address + row * self._row_stride

    def key(self, row: int) -> EntryKey:
        return EntryKey(bytes(self._keys[KEY_BYTES * row : KEY_BYTES * (row + 1)]))

    def is_ready(self, row: int) -> bool:
        return self._states[row] == READY

    def checksum(self, row: int, key: EntryKey) -> int:
        """The checksum of a row that holds the entry of this key."""
        return mixed_with_key(self._checks[row], key)

    # -- the index --

    def find_row(self, key: EntryKey) -> int | None:
        """The READY row with this key."""
        for slot in self._bucket(key):
            row = (self._slots[slot] & LOWER_HALF) - 1
            # Another process has written the slot, so the row may not exist.
            if 0 <= row < self.layout.num_rows and self.is_ready(row) and self.key(row) == key:
                return row
        return None

    def mark_stored(self, keys: EntryKeys, found: bytearray) -> None:
        """Set `found[i]` to 1 if the index has key i. `find_row` may disagree, once in billions of
        keys. Takes some nanoseconds for each key.
        """
        _mark_stored(self._slots, keys.joined, found)

    def add_to_index(self, row: int, key: EntryKey) -> None:
        for slot in self._bucket(key):
            if not self._slots[slot]:
                self._slots[slot] = _slot(row, key)
                return

    def drop_from_index(self, row: int, key: EntryKey) -> None:
        for slot in self._bucket(key):
            if self._slots[slot] == _slot(row, key):
                self._slots[slot] = 0
                return

    def clear_index(self) -> None:
        np.frombuffer(self._slots, np.uint64)[:] = 0

    def _bucket(self, key: EntryKey) -> range:
        """The slots in which the row of a key is looked for."""
        number = int.from_bytes(key[:8], sys.byteorder) % self.layout.num_buckets
        first = number * SLOTS
        return range(first, first + SLOTS)

    # -- changes, by the owner alone --

    def count_stores(self, rows: npt.NDArray[np.intp]) -> None:
        """Number the rows that an earlier owner has left, the oldest first. Its numbers are not
        continued: they may be damaged.
        """
        self.order[rows] = np.arange(1, len(rows) + 1, dtype=np.uint64)
        self._num_stores = len(rows)

    def set_state(self, row: int, state: RowState) -> None:
        self._states[row] = int(state)

    def write_entry(self, row: int, key: EntryKey, checksum: int, now_s: float) -> None:
        """Fill in a row's entry and make it visible to readers. The index comes last, and in
        `hide_entry` first: if the owner is killed in between, readers do not find the row.
        """
        self._keys[KEY_BYTES * row : KEY_BYTES * (row + 1)] = key
        self._checks[row] = mixed_with_key(checksum, key)
        self._num_stores += 1
        self.order[row] = self._num_stores
        self._last_store[0] = now_s
        self._states[row] = READY
        self.add_to_index(row, key)

    def hide_entry(self, row: int, key: EntryKey, state: RowState) -> None:
        """Take a READY row away from readers."""
        self.drop_from_index(row, key)
        self._states[row] = int(state)


def mark_stored_by_numpy(slots: memoryview, keys: bytes, found: bytearray) -> None:
    """Set `found[i]` to 1 if these slots have key i."""
    words = np.frombuffer(keys, np.uint64).reshape(-1, KEY_BYTES // 8)
    buckets = np.frombuffer(slots, np.uint64).reshape(-1, SLOTS)
    numbers = words[:, 0] & np.uint64(len(buckets) - 1)
    is_match = (buckets.take(numbers.view(np.int64), axis=0) ^ words[:, 1:2]) <= LOWER_HALF
    np.frombuffer(found, np.bool_)[:] |= is_match.any(axis=1)


_mark_stored: Callable[[memoryview, bytes, bytearray], None] = native_or(
    "mark_stored", mark_stored_by_numpy
)


def _slot(row: int, key: EntryKey) -> int:
    """What a slot of the index holds for a row."""
    return int.from_bytes(key[8:16], sys.byteorder) & ~LOWER_HALF | (row + 1)


def private_segment(row_bytes: int, num_rows: int) -> SegmentTable:
    """A segment in private memory, which no other process sees."""
    layout = SegmentLayout(row_bytes, num_rows)
    pages = mmap.mmap(-1, layout.total_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return SegmentTable(pages, layout)
