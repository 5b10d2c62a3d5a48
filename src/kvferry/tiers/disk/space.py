"""The space that entries take in a folder, and which of them are evicted.

Several engines, also on several hosts, share a folder without locks: each one scans the folder now
and then, adds what it has written since, and deletes the entries that were used least recently.
Two engines that evict at once choose the same entries. Between two scans an engine does not see
what the others write, so the folder may exceed its limit by that much.

    <root>/<namespace: 32 hex digits>/<2 hex digits>/<key: 64 hex digits>       an entry
    <root>/<namespace: 32 hex digits>/<2 hex digits>/.<key>.<16 hex digits>.tmp  being written
    <root>/<namespace: 32 hex digits>/namespace.json                             for people
    <root>/<namespace: 32 hex digits>/.namespace.json.<16 hex digits>.tmp        being written
"""

import errno
import heapq
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvferry.logs import repeats_of
from kvferry.tiers.base import EntryKey, TierUsage

WAKE_FRACTION = 0.975
"""The part of the limit beyond which eviction starts."""
GOAL_FRACTION = 0.95
"""The part of the limit at which eviction stops."""
MAX_EVICTIONS_PER_SCAN = 20_000
"""Bounds the memory of a scan; a folder that is still too large is scanned again at once."""
DRAFT_MAX_AGE_S = 600.0
"""A file being written that has not changed for this long belongs to a dead writer."""
SWEEP_INTERVAL_S = 60.0
FULL_INTERVAL_S = 5.0
"""The least time between two sweeps of a folder in which nothing can be evicted."""
CLOSE_S = 10.0

_log = logging.getLogger(__name__)

NAMESPACE_NAME = re.compile(r"[0-9a-f]{32}\Z")
FOLDER_NAME = re.compile(r"[0-9a-f]{2}\Z")
ENTRY_NAME = re.compile(r"[0-9a-f]{64}\Z")
DRAFT_NAME = re.compile(r"\.([0-9a-f]{64}|namespace\.json)\.[0-9a-f]{16}\.tmp\Z")

NoteFailure = Callable[[str | Path, OSError], None]


def draft_name(name: str) -> str:
    """A name under which one writer writes a file."""
    return f".{name}.{secrets.token_hex(8)}.tmp"


def listing(path: str | Path, failed: NoteFailure | None = None) -> "Iterator[os.DirEntry[str]]":
    """What is in a folder; nothing if it cannot be read or was deleted meanwhile. If it cannot be
    read, `failed` is called.
    """
    try:
        with os.scandir(path) as files:
            yield from files
    except OSError as error:
        if failed is not None and error.errno not in (errno.ENOENT, errno.ENOTDIR):
            failed(path, error)


def folders(
    path: str | Path, name: re.Pattern[str], failed: NoteFailure | None = None
) -> "Iterator[os.DirEntry[str]]":
    """The folders with such a name in a folder. Links are not followed."""
    for folder in listing(path, failed):
        if name.match(folder.name) is not None and folder.is_dir(follow_symlinks=False):
            yield folder


def is_stale(draft: os.stat_result) -> bool:
    """Whether a draft belongs to a dead writer. One from the future does: the clock was set back
    since.
    """
    return abs(time.time() - draft.st_mtime) > DRAFT_MAX_AGE_S


class _StoredFile(NamedTuple):
    """Sorts by the time of last use, then by path: in the same order in every process."""

    used_at: float
    path: str
    size_bytes: int


_BEFORE_ALL = _StoredFile(float("-inf"), "", 0)


class DiskSpace:
    """What the folder holds, as far as this process knows, and the thread that sweeps it: at the
    start, every `SWEEP_INTERVAL_S`, and when room is wanted. Any thread may call any method.
    """

    def __init__(self, root: Path, max_bytes: int | None, watched_folder: str = "") -> None:
        """`max_bytes` None: this process neither scans nor evicts, and needs no thread.
        `watched_folder` is that of the namespace whose entries may be watched.
        """
        self._root = root
        self._watched_folder = f"{watched_folder}/"
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._used_bytes = 0
        self._num_entries = 0
        self._num_evicted = 0
        self._wanted_bytes = 0
        """The size of the largest entry for which there was no room since the last sweep."""
        self._watched: set[EntryKey] = set()
        self._lost: list[EntryKey] = []
        """Entries that were watched, until `take_lost`."""
        self._wanted = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvferry-disk-sweeper", daemon=True)

    def start(self) -> None:
        if self._max_bytes is not None:
            self._thread.start()

    def close(self) -> None:
        """Stop the thread. A thread that hangs in a call to the file system is left behind; it
        ends with the process. Idempotent.
        """
        self._closing.set()
        self._wanted.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    def has_room(self, size_bytes: int) -> bool:
        """Whether an entry may be stored. If not, a sweep makes room for it."""
        if self._max_bytes is None or self._used_bytes + size_bytes <= self._max_bytes:
            return True
        if size_bytes <= self._max_bytes:
            self._wanted_bytes = max(self._wanted_bytes, size_bytes)
        self._wanted.set()
        return False

    def _is_nearly_full(self) -> bool:
        return self._max_bytes is not None and self._used_bytes > min(
            WAKE_FRACTION * self._max_bytes, self._max_bytes - self._wanted_bytes
        )

    def record(self, num_entries: int, size_bytes: int) -> None:
        """Note that this process has added entries, or removed them with negative numbers."""
        with self._lock:
            self._num_entries = max(0, self._num_entries + num_entries)
            self._used_bytes = max(0, self._used_bytes + size_bytes)
        if num_entries > 0 and self._is_nearly_full():
            self._wanted.set()

    def usage(self) -> TierUsage:
        with self._lock:
            return TierUsage(
                self._used_bytes, self._num_entries, self._max_bytes, self._num_evicted
            )

    def watch(self, keys: Iterable[EntryKey]) -> None:
        """Report these entries by `take_lost` when a scan does not find them, or when this process
        evicts them.
        """
        if self._max_bytes is not None:
            with self._lock:
                self._watched.update(keys)

    def take_lost(self) -> list[EntryKey]:
        with self._lock:
            lost, self._lost = self._lost, []
        return lost

    def sweep(self) -> bool:
        """Scan the folder, delete what dead writers left, and evict until the folder is small
        enough. Return whether it is. Raises nothing for what the file system or other processes do.
        """
        tried: _StoredFile | None = _BEFORE_ALL
        while tried is not None and not self._closing.is_set():
            tried = self._scan_and_evict(tried)
        is_small = not self._is_nearly_full()
        # A store that finds no room again says so; an entry that fits never must not empty the
        # folder at every sweep.
        self._wanted_bytes = 0
        return is_small

    def _scan_and_evict(self, tried: _StoredFile) -> _StoredFile | None:
        """Evict entries that come after those that this sweep has tried. Return the last one if the
        folder needs another scan.
        """
        with self._lock:
            used_before, entries_before = self._used_bytes, self._num_entries
            unseen = self._watched.copy()
        scan = _Scan(self._root)
        files = self._until_cancelled(scan.files(), unseen)
        oldest = heapq.nsmallest(MAX_EVICTIONS_PER_SCAN, (each for each in files if each > tried))
        if self._closing.is_set():
            return None
        if scan.is_complete:
            self._note_lost(unseen)
        with self._lock:
            if not scan.is_complete:
                scan.used_bytes = max(scan.used_bytes, used_before)
                scan.num_entries = max(scan.num_entries, entries_before)
            # An entry that was added during the scan may count twice until the next scan: the
            # folder then seems larger than it is, never smaller.
            self._used_bytes = scan.used_bytes + max(0, self._used_bytes - used_before)
            self._num_entries = scan.num_entries + max(0, self._num_entries - entries_before)
        if not self._is_nearly_full():
            return None
        self._evict(oldest)
        return oldest[-1] if oldest and self._is_nearly_full() else None

    def _evict(self, oldest: list[_StoredFile]) -> None:
        """Delete files, the least recently used first. Those that cannot be deleted keep their
        space, and the next ones are deleted instead.
        """
        assert self._max_bytes is not None
        goal_bytes = min(GOAL_FRACTION * self._max_bytes, self._max_bytes - self._wanted_bytes)
        for file in oldest:
            if self._used_bytes <= goal_bytes or self._closing.is_set():
                break
            try:
                os.unlink(file.path)
                with self._lock:
                    self._num_evicted += 1
            except FileNotFoundError:
                pass  # another engine evicted it, which makes as much room
            except OSError as error:
                _log.warning(
                    "%s cannot be evicted and keeps its space (%s); delete it",
                    file.path,
                    error.strerror,
                    extra=repeats_of("evict", str(self._root)),
                )
                continue
            if self._is_watched(file):
                self._note_lost([_key_of(file)])
            self.record(-1, -file.size_bytes)

    def _until_cancelled(
        self, files: Iterator[_StoredFile], unseen: set[EntryKey]
    ) -> Iterator[_StoredFile]:
        """Yield the files, and remove the entries among them from `unseen`."""
        for file in files:
            if self._closing.is_set():
                return
            if unseen and self._is_watched(file):
                unseen.discard(_key_of(file))
            yield file

    def _is_watched(self, file: _StoredFile) -> bool:
        return bool(self._watched) and file.path.startswith(self._watched_folder)

    def _note_lost(self, keys: Iterable[EntryKey]) -> None:
        with self._lock:
            lost = self._watched.intersection(keys)
            self._watched -= lost
            self._lost += lost

    def _run(self) -> None:
        while not self._closing.is_set():
            is_small = False
            try:
                is_small = self.sweep()
            except Exception:
                # Without sweeps the folder reaches its limit: stores are dropped, loads go on.
                _log.exception("the sweep of a disk tier failed")
            if not is_small:
                # Nothing could be evicted, and every dropped store asks for a sweep.
                self._closing.wait(FULL_INTERVAL_S)
            self._wanted.wait(SWEEP_INTERVAL_S)
            self._wanted.clear()


def _key_of(file: _StoredFile) -> EntryKey:
    return EntryKey(bytes.fromhex(os.path.basename(file.path)))


class _Scan:
    """One walk through the folder. Links are not followed, other files are left alone."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.used_bytes = 0
        self.num_entries = 0
        self.is_complete = True
        """False if the file system failed: entries that were not seen may be there."""

    def files(self) -> Iterator[_StoredFile]:
        """Yield the entries, and delete the drafts of dead writers."""
        for namespace in folders(self._root, NAMESPACE_NAME, self._note_failure):
            yield from self._files_of(namespace)  # drafts of its description
            for folder in folders(namespace.path, FOLDER_NAME, self._note_failure):
                yield from self._files_of(folder)

    def _files_of(self, folder: "os.DirEntry[str]") -> Iterator[_StoredFile]:
        for file in listing(folder.path, self._note_failure):
            is_draft = DRAFT_NAME.match(file.name) is not None
            if not is_draft and ENTRY_NAME.match(file.name) is None:
                continue
            try:
                found = file.stat(follow_symlinks=False)
            except OSError:
                continue  # another engine deleted it
            if is_draft and is_stale(found):
                with suppress(OSError):
                    os.unlink(file.path)
                    continue
            self.used_bytes += found.st_size
            if not is_draft:
                self.num_entries += 1
                yield _StoredFile(found.st_mtime, file.path, found.st_size)

    def _note_failure(self, path: str | Path, error: OSError) -> None:
        if self.is_complete:
            _log.warning("cannot read %s: %s", path, error.strerror)
        self.is_complete = False
