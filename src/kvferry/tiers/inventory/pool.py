"""What the segments of a host pool hold.

A row is checked as an engine would load it: a `RowCopier` copies it into memory of this process and
returns the checksum of what arrived. Only the owner of a segment can remove a row.
"""

import mmap
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvferry.errors import ConfigError
from kvferry.tiers.inventory.base import (
    CheckResult,
    Condition,
    NamespaceSummary,
    NoteProgress,
    factors_of,
)
from kvferry.tiers.pool.reader import SegmentInfo, list_segments
from kvferry.tiers.pool.segment import READY, SegmentTable
from kvferry.tiers.pool.segment_files import check_folder, open_for_reading, remove_orphan
from kvferry.transports.base import RowBlocks, RowCopier
from kvferry.types import Region

MakeCopier = Callable[[Sequence[Region]], RowCopier]
ATTEMPTS = 3
"""The owner may overwrite a row and its entry while the row is copied."""


class PoolInventory:
    """Implements `Inventory`. The name of an entry is `<file name>:<row>`."""

    tier = "cpu"

    def __init__(self, folder: Path, make_copier: MakeCopier) -> None:
        """A folder that does not exist holds nothing. Raises `ConfigError` if another user owns
        it.
        """
        if os.path.lexists(folder) and not check_folder(folder):
            raise ConfigError(
                f"{folder} is not a folder of this user; name the folder of this user's host pool"
            )
        self._folder = folder
        self._make_copier = make_copier
        self._opened: dict[Path, SegmentTable] = {}
        self._checkers: dict[str, list[_GroupChecker] | None] = {}
        self._lock = threading.Lock()

    @property
    def place(self) -> str:
        return str(self._folder)

    def namespaces(self) -> Iterator[str]:
        yield from sorted({segment.namespace for segment in list_segments(self._folder)})

    def summary(self, namespace: str, note: NoteProgress) -> NamespaceSummary:
        segments = list(self._segments(namespace))
        return NamespaceSummary(
            namespace,
            _first_factors(segments),
            sum(segment.num_objects for segment in segments),
            sum(segment.num_objects * segment.header.layout.row_bytes for segment in segments),
            max((segment.last_store_s for segment in segments), default=0.0),
            tuple(segments),
        )

    def objects(self, namespace: str) -> Iterator[str]:
        for segment in self._segments(namespace):
            opened = open_for_reading(segment.path)
            if opened is None:
                continue
            table = self._opened[segment.path] = opened[1]
            ready = np.flatnonzero(table.states == READY)
            yield from (f"{segment.path.name}:{row}" for row in ready.tolist())

    def check(self, namespace: str, name: str) -> CheckResult:
        file_name, _, row = name.rpartition(":")
        table = self._opened[self._folder / file_name]
        # The checkers copy into memory of their own, so one thread at a time uses them.
        with self._lock:
            checkers = self._checkers_of(namespace)
            if checkers is None:
                return CheckResult(
                    Condition.UNCHECKED,
                    "cannot be checked: its segment does not describe the layout of rows",
                )
            return _check_row(table, int(row), checkers)

    def remove(self, namespace: str, names: Sequence[str]) -> int:
        """Remove segments without an owner as a whole. A damaged row of a running engine stays
        until the engine overwrites it; no engine uses it.
        """
        by_file: dict[str, int] = defaultdict(int)
        for name in names:
            by_file[name.rpartition(":")[0]] += 1
        return sum(
            count
            for file_name, count in by_file.items()
            if not (self._folder / file_name).exists() or remove_orphan(self._folder / file_name)
        )

    def clear(self, namespace: str, note: NoteProgress) -> int:
        num_gone = 0
        for segment in list(self._segments(namespace)):
            if remove_orphan(segment.path):
                num_gone += segment.num_objects
                note(num_gone)
        return num_gone

    def _segments(self, namespace: str) -> Iterator[SegmentInfo]:
        return (each for each in list_segments(self._folder) if each.namespace == namespace)

    def _checkers_of(self, namespace: str) -> "list[_GroupChecker] | None":
        if namespace not in self._checkers:
            factors = _first_factors(self._segments(namespace))
            self._checkers[namespace] = _group_checkers(factors, self._make_copier)
        return self._checkers[namespace]


class _GroupChecker:
    """Computes the checksum of rows of one KV-cache group."""

    def __init__(self, block_sizes: Sequence[int], num_blocks: int, make: MakeCopier) -> None:
        self._pages = mmap.mmap(-1, max(1, sum(block_sizes) * num_blocks))
        address = int(np.frombuffer(self._pages, np.uint8).ctypes.data)
        regions = []
        for number, size in enumerate(block_sizes):
            regions.append(Region(f"region {number}", address, size, size, num_blocks))
            address += size * num_blocks
        self._copier = make(regions)
        self._block_ids = tuple(range(num_blocks))
        self.row_bytes = self._copier.row_bytes(0, num_blocks)

    def checksum(self, address: int) -> int:
        return self._copier.load([RowBlocks(address, 0, self._block_ids)])[0]


def _group_checkers(
    factors: Mapping[str, Any] | None, make: MakeCopier
) -> "list[_GroupChecker] | None":
    """One checker for each group, from the layout in the namespace's factors; None if the factors
    do not have it.
    """
    try:
        assert factors is not None
        num_blocks = int(factors["blocks_per_chunk"])
        groups: dict[int, list[int]] = defaultdict(list)
        for group, block_bytes, _ in factors["regions"]:
            groups[int(group)].append(int(block_bytes))
        return [_GroupChecker(sizes, num_blocks, make) for _, sizes in sorted(groups.items())]
    except (AssertionError, KeyError, OSError, OverflowError, TypeError, ValueError):
        return None


def _check_row(table: SegmentTable, row: int, checkers: "Sequence[_GroupChecker]") -> CheckResult:
    """Check one row. A key does not say which group its row belongs to, so each is tried."""
    for _ in range(ATTEMPTS):
        if not table.is_ready(row):
            return CheckResult(Condition.GONE)
        key = table.key(row)
        expected = table.checksum(row, key)
        address = table.address(row)
        fitting = [each for each in checkers if each.row_bytes <= table.layout.row_bytes]
        if any(checker.checksum(address) == expected for checker in fitting):
            return CheckResult(Condition.SOUND)
        if table.key(row) != key or table.checksum(row, key) != expected:
            continue
        return CheckResult(Condition.DAMAGED, "differs from its checksum")
    return CheckResult(Condition.GONE)


def _first_factors(segments: "Sequence[SegmentInfo] | Iterator[SegmentInfo]") -> Any:
    texts = ((segment.namespace, segment.header.namespace_text.encode()) for segment in segments)
    return next(
        (found for found in (factors_of(*each) for each in texts) if found is not None), None
    )
