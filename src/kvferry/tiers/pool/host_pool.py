"""The host pool: rows of KV in host memory that all engines of the user on this host share.

Each rank of an engine has one `HostPool`: it owns one segment (`segment.py`), decides what is
stored and evicted there, and finds rows in the segments of other engines. The segment stays when
the engine ends or is killed; the next engine with the same namespace and sizes adopts it, with all
rows that were complete.

A row of our own segment goes through these states:

    free --reserve--> writing --publish--> ready --evicted or removed--> free
                         |
                         +-----discard-----> free

A row that is pinned keeps its bytes: it is not evicted, and after `remove` or `clear` it is reused
only once it is no longer pinned. One thread makes all calls.
"""

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kvferry.errors import ConfigError, LocalProtocolError
from kvferry.host_memory import available_bytes, check_fits
from kvferry.tiers.base import EntryKey, TierUsage
from kvferry.tiers.keys import Namespace
from kvferry.tiers.pool.policies import EvictionPolicy
from kvferry.tiers.pool.reader import PoolReader, StoredRow
from kvferry.tiers.pool.segment import READY, RowState, SegmentLayout, SegmentTable, private_segment
from kvferry.tiers.pool.segment_files import (
    OwnedSegment,
    SegmentFile,
    adopt_segment,
    by_last_store,
    create_segment,
    iter_orphans,
    prepare_folder,
    remove_orphan,
    remove_unfinished,
)

MakePolicy = Callable[[int], EvictionPolicy]
"""Makes the policy of a pool with so many rows: `LruPolicy`, `ArcPolicy`."""

UNMAP_WAIT_S = 2.0
"""How long a new segment waits until readers have unmapped a segment that was removed for it: they
look every `LISTING_INTERVAL_S`.
"""
ALLOCATION_WAIT_S = 300.0
"""How long an engine waits while others allocate: the kernel clears some gigabytes in a second."""
ADOPT_ATTEMPTS = 5
"""A process that only asks whether a segment has an owner holds a lock on it for a moment."""
USES_PER_SCAN = 1024
"""Scanning the uses of this many rows costs about as much as one eviction."""


class HostPool:
    """The rows of one rank: its own segment, and read access to the segments of other engines."""

    def __init__(
        self,
        table: SegmentTable,
        make_policy: MakePolicy,
        file: SegmentFile | None = None,
        others: PoolReader | None = None,
    ) -> None:
        """Use `open` or `private` instead."""
        self._layout = table.layout
        self._table = table
        self._file = file
        self._others = others
        self._policy = make_policy(table.layout.num_rows)
        self._index: dict[EntryKey, int] = {}
        """The rows in state READY."""
        self._writing: dict[int, EntryKey] = {}
        self._written: dict[EntryKey, int] = {}
        """The rows that are being written; by key, only those that are to be published."""
        self._pins: dict[int, int] = {}
        self._dropped: set[int] = set()
        """Rows that are free once they are no longer pinned, or once their writer is done."""
        self._free: list[int] = []
        self._evicted: list[EntryKey] = []
        self._num_evicted = 0
        self._seen_uses = table.used.copy()
        self._evictions_until_scan = 0
        self._is_closed = False
        self._take_over()

    @classmethod
    def open(
        cls,
        folder: Path,
        namespace: Namespace,
        row_bytes: int,
        num_rows: int,
        make_policy: MakePolicy,
    ) -> "HostPool":
        """Open a pool whose segment other engines read. Adopts a segment that an earlier engine has
        left, or makes a new one; if there is no space, removes segments that have no owner.
        ConfigError if there is still no space, or the folder cannot be used.
        """
        layout = _checked_layout(row_bytes, num_rows)
        prepare_folder(folder)
        with _one_at_a_time(folder):
            remove_unfinished(folder)
            file, table = _adopt(folder, namespace, layout) or _create(folder, namespace, layout)
        others = PoolReader(folder, namespace, row_bytes, but_not=[file.path])
        return cls(table, make_policy, file, others)

    @classmethod
    def private(cls, row_bytes: int, num_rows: int, make_policy: MakePolicy) -> "HostPool":
        """Open a pool in private memory, which no other process sees."""
        _checked_layout(row_bytes, num_rows)
        return cls(private_segment(row_bytes, num_rows), make_policy)

    # -- memory --

    @property
    def path(self) -> Path | None:
        """The file of our own segment; None if the pool is private."""
        return None if self._file is None else self._file.path

    @property
    def address(self) -> int:
        """Where the rows of our own segment start; a multiple of the page size."""
        return self._table.rows_address

    @property
    def size_bytes(self) -> int:
        return self._layout.num_rows * self._layout.row_stride

    @property
    def row_bytes(self) -> int:
        return self._layout.row_bytes

    @property
    def num_rows(self) -> int:
        return self._layout.num_rows

    def row_address(self, row: int) -> int:
        """Where a row of our own segment starts; a multiple of the page size."""
        return self._table.address(row)

    def row(self, row: int) -> memoryview:
        """The bytes of a row of our own segment. The memory stays mapped as long as a view of it
        exists.
        """
        first = self._table.layout.rows_at + row * self._table.layout.row_stride
        return memoryview(self._table.pages)[first : first + self.row_bytes]

    # -- storing --

    def holds(self, key: EntryKey) -> bool:
        """Whether our own segment has the entry, or it is being written there."""
        return key in self._index or key in self._written

    def reserve(self, key: EntryKey) -> int | None:
        """Choose a row for a new entry, which leaves the row in state writing until `publish` or
        `discard`. If there is no free row, another entry is evicted. None, with nothing changed,
        if all rows are pinned or being written. LocalProtocolError if `holds(key)`.
        """
        if self.holds(key):
            raise LocalProtocolError(f"object {key.hex()} is stored twice")
        if not self._free:
            if len(self._policy) < self.num_rows:
                return None  # the rows that are missing wait until they are no longer pinned
            self._note_uses_of_others()
        insertion = self._policy.insert(key, self._is_pinned)
        if not insertion.is_inserted:
            return None
        if insertion.evicted is None:
            row = self._free.pop()
            self._table.set_state(row, RowState.WRITING)
        else:
            row = self._index.pop(insertion.evicted)
            self._table.hide_entry(row, insertion.evicted, RowState.WRITING)
            self._evicted.append(insertion.evicted)
            self._num_evicted += 1
        self._writing[row] = key
        self._written[key] = row
        return row

    def publish(self, row: int, checksum: int) -> bool:
        """Make a reserved row visible to all engines, now that it holds the entry with this
        checksum (`RowCopier.save`). False if the entry was removed meanwhile; then the row is
        free.
        """
        key = self._end_writing(row)
        if row in self._dropped:
            self._table.set_state(row, RowState.FREE)
            self._release(row)
            return False
        self._index[key] = row
        self._table.write_entry(row, key, checksum, time.time())
        return True

    def discard(self, row: int) -> None:
        """Give a reserved row back: the entry could not be written."""
        key = self._end_writing(row)
        self._table.set_state(row, RowState.FREE)
        if row not in self._dropped:
            self._policy.remove(key)
            self._dropped.add(row)
        self._release(row)

    # -- finding --

    def refresh(self, now: float) -> None:
        """Notice what other engines have stored; `now` is in monotonic seconds."""
        if self._others is not None:
            self._others.refresh(now)

    def find(self, key: EntryKey) -> StoredRow | None:
        """Where the entry is: in our own segment, or in that of another engine as of the last
        `refresh`. None if the entry is not stored. Pin a row of our own before it is read.
        """
        row = self._index.get(key)
        if row is None:
            return None if self._others is None else self._others.find(key)
        table = self._table
        checksum = table.checksum(row, key)
        return StoredRow(table.address(row), table.layout.row_bytes, checksum, row, table.pages)

    def __contains__(self, key: EntryKey) -> bool:
        """Whether the entry was stored at the last `refresh`, by any engine."""
        return self.find(key) is not None

    def pin(self, row: int) -> None:
        """Keep the bytes of one of our own rows until `unpin`. Pins are counted."""
        if row not in self._writing and not self._table.is_ready(row):
            raise LocalProtocolError(f"row {row} of the host pool holds no object")
        self._pins[row] = self._pins.get(row, 0) + 1

    def unpin(self, row: int) -> None:
        if row not in self._pins:
            raise LocalProtocolError(f"row {row} of the host pool is not pinned")
        self._pins[row] -= 1
        if not self._pins[row]:
            del self._pins[row]
            self._release(row)

    def touch(self, key: EntryKey) -> None:
        """Note that an entry was used, so that its owner evicts it later."""
        if key in self._index:
            self._policy.touch(key)
        elif self._others is not None:
            self._others.touch(key)

    # -- removing --

    def remove(self, key: EntryKey) -> None:
        """Remove an entry from our own segment, also while it is being written. Keys that are not
        stored are ignored.
        """
        row = self._index.pop(key, None)
        if row is not None:
            self._table.hide_entry(row, key, RowState.FREE)
        else:
            row = self._written.pop(key, None)
        if row is not None:
            self._policy.remove(key)
            self._dropped.add(row)
            self._release(row)

    def clear(self) -> None:
        """Remove all entries from our own segment. No engine finds them from now on. Entries that
        are being written are not published.
        """
        self._table.clear_index()
        self._table.states[:] = int(RowState.FREE)
        self._policy.clear()
        rows = [*self._index.values(), *self._writing]
        self._index.clear()
        self._written.clear()
        self._dropped.update(rows)
        for row in rows:
            self._release(row)

    def take_evicted(self) -> list[EntryKey]:
        """The keys that were evicted since the last call, in order."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def usage(self) -> TierUsage:
        return TierUsage(
            used_bytes=len(self._index) * self.row_bytes,
            num_entries=len(self._index),
            max_bytes=self.num_rows * self.row_bytes,
            num_evicted=self._num_evicted,
        )

    def close(self) -> None:
        """Give up the segment; its rows stay for other engines and for the next owner. No copy may
        be active; afterwards only the sizes, `path` and `usage` may be used. Idempotent.
        """
        if self._is_closed:
            return
        self._is_closed = True
        del self._table  # unmaps the segment, unless a StoredRow still needs it
        if self._others is not None:
            self._others.close()
        if self._file is not None:
            self._file.close()

    # -- rows --

    def _take_over(self) -> None:
        """Index the rows that an earlier owner has left, oldest first, and free all others."""
        table = self._table
        is_ready = table.states == READY
        rows = np.flatnonzero(is_ready)
        rows = rows[np.argsort(table.order[rows], kind="stable")]
        table.count_stores(rows)
        # The earlier owner may have been killed while it changed its index.
        table.clear_index()
        for row in rows.tolist():
            key = table.key(row)
            if key in self._index:
                is_ready[row] = False
            else:
                self._index[key] = row
                self._policy.insert(key, self._is_pinned)
                table.add_to_index(row, key)
        self._free = np.flatnonzero(~is_ready)[::-1].tolist()
        table.states[~is_ready] = int(RowState.FREE)

    def _is_pinned(self, key: EntryKey) -> bool:
        row = self._index.get(key)
        return row is None or row in self._pins

    def _end_writing(self, row: int) -> EntryKey:
        key = self._writing.pop(row, None)
        if key is None:
            raise LocalProtocolError(f"row {row} of the host pool is not being written")
        if self._written.get(key) == row:
            del self._written[key]
        return key

    def _release(self, row: int) -> None:
        """Free a row that holds no entry, unless it is pinned or being written."""
        if row in self._dropped and row not in self._pins and row not in self._writing:
            self._dropped.remove(row)
            self._free.append(row)

    def _note_uses_of_others(self) -> None:
        """Tell the policy which rows other processes have used since the last look."""
        self._evictions_until_scan -= 1
        if self._evictions_until_scan > 0:
            return
        self._evictions_until_scan = self.num_rows // USES_PER_SCAN
        used = self._table.used.copy()
        for row in np.flatnonzero(used != self._seen_uses).tolist():
            if self._table.is_ready(row):
                self._policy.touch(self._table.key(row))
        self._seen_uses = used


# -- opening --


def _checked_layout(row_bytes: int, num_rows: int) -> SegmentLayout:
    if row_bytes < 1 or num_rows < 1:
        raise ConfigError(
            f"a host pool of {num_rows} rows of {row_bytes} bytes holds nothing; make it larger"
        )
    return SegmentLayout(row_bytes, num_rows)


def _adopt(folder: Path, namespace: Namespace, layout: SegmentLayout) -> OwnedSegment | None:
    for attempt in range(ADOPT_ATTEMPTS):
        if attempt:
            time.sleep(0.002)
        for _, path, _ in reversed(by_last_store(folder, namespace)):
            adopted = adopt_segment(path, namespace, layout)
            if adopted is not None:
                return adopted
    return None


def _create(folder: Path, namespace: Namespace, layout: SegmentLayout) -> OwnedSegment:
    # Segments are removed only if that can help.
    orphan_bytes = sum(size for _, size in iter_orphans(folder))
    check_fits(layout.total_bytes, available_bytes() + orphan_bytes)
    while True:
        try:
            check_fits(layout.total_bytes, available_bytes())
            return create_segment(folder, namespace, layout)
        except ConfigError:
            if not _make_room(folder, layout):
                raise
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.ENOMEM)
            if not is_full or not _make_room(folder, layout):
                raise ConfigError(
                    f"a host pool of {layout.total_bytes} bytes cannot be made in {folder} "
                    f"({error.strerror}); make the cpu tier smaller, or free space there"
                ) from error


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Let the ranks of a host open their pools one after the other. Each of two that allocate at
    once would find enough memory for itself alone, and could remove the file of the other before it
    is locked.
    """
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + ALLOCATION_WAIT_S
        while True:
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"another engine has been allocating a host pool in {folder} for "
                        f"{ALLOCATION_WAIT_S:g} s; end that engine, or choose another pool_path"
                    ) from None
                time.sleep(0.02)
        yield
    finally:
        os.close(opened)  # and so releases the lock


def _make_room(folder: Path, layout: SegmentLayout) -> bool:
    """Remove the segment that is without stores for longest and has no owner; False if there is
    none.
    """
    for path, size in iter_orphans(folder):
        free_bytes = _free_bytes(folder)
        if remove_orphan(path):
            expected = min(layout.total_bytes, free_bytes + size)
            deadline = time.monotonic() + UNMAP_WAIT_S
            while _free_bytes(folder) < expected and time.monotonic() < deadline:
                time.sleep(0.02)
            return True
    return False


def _free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
