"""Finds rows in the segments of all engines on this host, without locks and without asking them.

For schedulers, which look keys up; for the owner of a segment, which also reads the segments of
other engines; and for `kvferry store`. One thread makes all calls on a reader.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvferry.tiers.base import EntryKey, EntryKeys
from kvferry.tiers.keys import Namespace
from kvferry.tiers.pool.segment import Header, SegmentTable
from kvferry.tiers.pool.segment_files import is_locked, open_for_reading, segment_paths

LISTING_INTERVAL_S = 0.5
"""How often a reader looks for new segments."""
LAST_USE = (1 << 32) - 1
"""After so many uses, the counter of a row starts again at 0."""


@dataclass(frozen=True, slots=True)
class StoredRow:
    """Where the bytes of one entry are, as of now.

    The row of another engine can be overwritten at any time, also during a copy. The copy has the
    entry's bytes only if `RowCopier.load` returned exactly `checksum`; otherwise the entry is
    missing. The memory stays mapped as long as this object exists.
    """

    address: int
    size_bytes: int
    checksum: int
    row: int | None
    """The row of our own segment; None if another engine owns the segment."""
    pages: object = field(repr=False, compare=False)
    """The mapping with the row."""


@dataclass(frozen=True, slots=True)
class _Segment:
    """A segment of another process."""

    header: Header
    table: SegmentTable

    def find(self, key: EntryKey) -> StoredRow | None:
        table = self.table
        row = table.find_row(key)
        if row is None:
            return None
        checksum = table.checksum(row, key)
        # The owner may have reused the row before we have read the checksum.
        if not table.is_ready(row) or table.key(row) != key:
            return None
        return StoredRow(
            table.address(row), table.layout.row_bytes, checksum, row=None, pages=table.pages
        )

    def note_use(self, key: EntryKey) -> bool:
        """Tell the owner that a row was used, so that it evicts the row later. An increment may be
        lost if two processes make it at once.
        """
        row = self.table.find_row(key)
        if row is not None:
            self.table.used[row] = (int(self.table.used[row]) + 1) & LAST_USE
        return row is not None


class PoolReader:
    """The entries of one namespace in all segments on this host that the last `refresh` has seen. A
    key that is found may be gone before its bytes are read.
    """

    def __init__(
        self,
        folder: Path,
        namespace: Namespace,
        row_bytes: int = 0,
        but_not: Collection[Path] = (),
    ) -> None:
        """Segments with smaller rows than `row_bytes`, and those that `but_not` names, are left
        out.
        """
        self._folder = folder
        self._namespace = namespace
        self._row_bytes = row_bytes
        self._but_not = frozenset(but_not)
        self._segments: dict[Path, _Segment] = {}
        self._next_listing = float("-inf")

    def refresh(self, now: float) -> None:
        """Notice new segments. `now` is in monotonic seconds: the folder is looked at at most every
        `LISTING_INTERVAL_S`.
        """
        if now >= self._next_listing:
            self._next_listing = now + LISTING_INTERVAL_S
            self._list_folder()

    def are_stored(self, keys: EntryKeys) -> bytearray:
        """1 for each entry that is stored, 0 for the others; much faster than one question for
        each.
        """
        found = bytearray(len(keys))
        for segment in self._segments.values():
            segment.table.mark_stored(keys, found)
        return found

    def find(self, key: EntryKey) -> StoredRow | None:
        """Where the entry is; None if it is not stored."""
        for segment in self._segments.values():
            found = segment.find(key)
            if found is not None:
                return found
        return None

    def touch(self, key: EntryKey) -> None:
        """Note that an entry was used. Keys that are not stored are ignored."""
        for segment in self._segments.values():
            if segment.note_use(key):
                return

    def close(self) -> None:
        """Forget all segments. Each is unmapped once the last `StoredRow` of it is gone."""
        self._segments.clear()

    def _list_folder(self) -> None:
        paths = {*segment_paths(self._folder, self._namespace)} - self._but_not
        self._segments = {
            path: segment for path, segment in self._segments.items() if path in paths
        }
        for path in sorted(paths - self._segments.keys()):
            opened = open_for_reading(path)
            if (
                opened is not None
                and opened[0].namespace == self._namespace.digest
                and opened[0].layout.row_bytes >= self._row_bytes
            ):
                self._segments[path] = _Segment(*opened)


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """One segment on this host, for people."""

    path: Path
    header: Header
    num_objects: int
    is_live: bool
    """Whether the owner lives."""
    last_store_s: float
    """When the owner last stored an entry, in seconds since 1970; 0 if it never did."""

    @property
    def namespace(self) -> str:
        """The digest of the namespace, in hex."""
        return self.header.namespace.hex()

    @property
    def total_bytes(self) -> int:
        """The size of the file."""
        return self.header.layout.total_bytes


def list_segments(folder: Path) -> Iterator[SegmentInfo]:
    """Describe all segments in a folder. Files that are no valid segments are left out."""
    for path in segment_paths(folder):
        opened = open_for_reading(path)
        if opened is not None:
            header, table = opened
            is_live = is_locked(path)
            yield SegmentInfo(path, header, table.num_ready, is_live, table.last_store_s)
