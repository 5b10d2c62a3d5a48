"""Entries in files of a folder on a local or network file system.

A writer fills a draft in the entry's folder and renames it, which is atomic on local file systems
and on NFS: a reader opens a whole entry or none, and an open file stays readable while another
process replaces or removes it. So engines share a folder without locks. `space.py` has the
names of the files and the eviction.

Nothing is flushed with fsync: an entry that a power failure has torn is refused by its MAC.

Reads and writes bypass the page cache (O_DIRECT) where the file system allows it, because the host
pool is the cache in front of the disk. A call to the file system has no deadline: on a network
mount that hangs, the calling thread waits as long as the mount's own time limits say.
"""

import errno
import logging
import mmap
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from kvferry.errors import ConfigError
from kvferry.logs import repeats_of
from kvferry.tiers.backoff import StorageFailed, StorageHealth, StorageNotAsked
from kvferry.tiers.base import (
    EntryKey,
    LoadOutcome,
    LoadResult,
    StoreOutcome,
    StoreResult,
    TierUsage,
)
from kvferry.tiers.disk.space import DiskSpace, draft_name
from kvferry.tiers.envelope import HEADER_BYTES, Envelope
from kvferry.tiers.files import OPEN_FLAGS, read_regular_file
from kvferry.tiers.keys import NAMESPACE_FILE, Namespace
from kvferry.transports.copy.native import native_or

PAGE_BYTES = HEADER_BYTES
"""What direct I/O needs at most: addresses, offsets and lengths are multiples of it."""
TOUCH_INTERVAL_S = 60.0
"""An entry's time of last use is as exact as this, so that most loads write nothing."""

_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
"""ESTALE: another host has removed the entry while it was open here."""
WRITE_ATTEMPTS = 5
"""`kvferry store clear` may remove a folder at once after it was made."""
_OF_ONE_ENTRY = (errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.EPERM)
"""Something else lies at the entry's path, or a file that may not be replaced: other entries can
still be stored.
"""

_log = logging.getLogger(__name__)


class _ThreadPages(threading.local):
    """Two pages for each thread: for the header, and for the end of a payload that does not fill
    its last page. Direct I/O moves whole pages.
    """

    def __init__(self) -> None:
        self.pages = memoryview(mmap.mmap(-1, 2 * PAGE_BYTES))


class DiskTier:
    """Implements `Tier` and `WatchesEntries`. Starts a thread if `max_bytes` is given."""

    def __init__(
        self,
        root: Path,
        namespace: Namespace,
        secret: bytes,
        max_bytes: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_bytes` bounds all namespaces in `root` together. With None this process neither
        scans nor evicts. Raises `ConfigError` if the folder cannot be used at all.
        """
        self._root = root
        self._folder = f"{root}/{namespace.hex}"
        self._namespace = namespace
        self._envelope = Envelope(secret, namespace.digest)
        self._storing = StorageHealth(clock)
        self._space = DiskSpace(root, max_bytes, self._folder)
        self._thread_pages = _ThreadPages()
        _prepare_root(root)
        with suppress(OSError):  # a folder that can only be read serves loads
            self._make_folder(self._folder)
            self._describe()
        self._direct_flag = os.O_DIRECT if _allows_direct_io(self._folder) else 0
        self._space.start()

    @property
    def name(self) -> str:
        return "disk"

    @property
    def uses_direct_io(self) -> bool:
        return self._direct_flag != 0

    def find(self, keys: Sequence[EntryKey]) -> list[bool]:
        return [_exists(self._path(key)) for key in keys]

    def find_prefix(self, keys: Sequence[EntryKey]) -> int:
        # A stat takes microseconds, so the answer is exact, also where eviction has made holes.
        missing = (n for n, key in enumerate(keys) if not _exists(self._path(key)))
        return next(missing, len(keys))

    def load(self, key: EntryKey, into: memoryview) -> LoadResult:
        path = self._path(key)
        try:
            refusal = self._read(path, key, into)
        except OSError as error:
            if error.errno in _GONE:
                return LoadResult(LoadOutcome.MISSING)
            return LoadResult(LoadOutcome.FAILED, f"{path} cannot be read: {error.strerror}")
        if refusal is None:
            return LoadResult(LoadOutcome.LOADED)
        self.remove([key])
        return LoadResult(LoadOutcome.REFUSED, f"{path} {refusal}")

    def store(self, key: EntryKey, payload: memoryview) -> StoreResult:
        path = self._path(key)
        try:
            self._storing.check()
            result = self._store(path, key, payload)
        except StorageNotAsked as pause:
            return StoreResult(StoreOutcome.DROPPED, str(pause))
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            advice = "; free space, or lower the disk tier's size" if is_full else ""
            reason = f"{path} cannot be written: {error.strerror}{advice}"
            if error.errno not in _OF_ONE_ENTRY:
                self._storing.failed(reason)
            return StoreResult(StoreOutcome.FAILED, reason)
        self._storing.succeeded()
        return result

    def remove(self, keys: Sequence[EntryKey]) -> None:
        for key in keys:
            path = self._path(key)
            with suppress(OSError):
                size_bytes = os.lstat(path).st_size
                os.unlink(path)
                self._space.record(-1, -size_bytes)

    def watch(self, keys: Sequence[EntryKey]) -> None:
        self._space.watch(keys)

    def take_lost(self) -> list[EntryKey]:
        return self._space.take_lost()

    def usage(self) -> TierUsage:
        return self._space.usage()

    def close(self) -> None:
        self._space.close()

    # -- files --

    def _path(self, key: EntryKey) -> str:
        name = key.hex()
        return f"{self._folder}/{name[:2]}/{name}"

    def _read(self, path: str, key: EntryKey, into: memoryview) -> str | None:
        """Read and check one file, and return why it is refused."""
        pages = self._thread_pages.pages
        header, last_page = pages[:PAGE_BYTES], pages[PAGE_BYTES:]
        split = _whole_pages(len(into))
        parts = (header, into[:split], *([last_page] if split < len(into) else []))
        try:
            mode, stored_bytes, changed_s, num_read = _read_file(
                path, os.O_RDONLY | OPEN_FLAGS, self._direct_flag, parts
            )
        except OSError:
            if not _may_be_file(path):
                return "is not a file"
            raise
        if not stat.S_ISREG(mode):
            return "is not a file"
        if num_read < min(stored_bytes, HEADER_BYTES + len(into)):
            raise OSError(errno.EIO, "the file system returned fewer bytes than the file has")
        into[split:] = last_page[: len(into) - split]
        refusal = self._envelope.check(key, header[:num_read], into, stored_bytes)
        if refusal is not None:
            return refusal.value
        _touch(path, changed_s)
        return None

    def _store(self, path: str, key: EntryKey, payload: memoryview) -> StoreResult:
        size_bytes = HEADER_BYTES + len(payload)
        if _touch_if_present(path, size_bytes):
            return StoreResult(StoreOutcome.PRESENT)
        if not self._space.has_room(size_bytes):
            reason = f"{self._root} is full; kvferry evicts objects from it"
            return StoreResult(StoreOutcome.DROPPED, reason)
        self._write(path, self._envelope.seal(key, payload), payload)
        self._space.record(1, size_bytes)
        return StoreResult(StoreOutcome.STORED)

    def _write(self, path: str, header: bytes, payload: memoryview) -> None:
        """Make the entry visible as a whole, or raise OSError and leave no file."""
        direct = self._direct_flag if _is_aligned(payload) else 0
        for num_left in reversed(range(WRITE_ATTEMPTS)):
            try:
                with _draft_of(path, direct) as opened:
                    _write_entry(opened, self._thread_pages.pages, header, payload)
                break
            except FileNotFoundError:
                if not num_left:
                    raise
            with suppress(FileNotFoundError):
                self._make_folder(os.path.dirname(path))
        if num_left < WRITE_ATTEMPTS - 1:
            self._describe()

    def _make_folder(self, folder: str) -> None:
        """Make the namespace's folder, and a folder in it. Does not make the root again: if it is
        gone, its disk may have been unmounted, and another disk would fill.
        """
        with suppress(FileExistsError):
            os.mkdir(self._folder, 0o700)
        if not stat.S_ISDIR(os.lstat(self._folder).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "the namespace's folder is not a folder")
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)

    def _describe(self) -> None:
        """Write down what the namespace is, unless exactly that is written there. Entries are
        stored and loaded without it.
        """
        path, text = f"{self._folder}/{NAMESPACE_FILE}", self._namespace.text.encode()
        try:
            with suppress(OSError):
                if read_regular_file(path, len(text) + 1) == text:
                    return
            with _draft_of(path) as opened:
                if os.write(opened, text) != len(text):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            _log.warning(
                "%s cannot be written (%s), so `kvferry store` cannot say what is stored there",
                path,
                error.strerror,
                extra=repeats_of("describe", path),
            )


@contextmanager
def _draft_of(path: str, flags: int = 0) -> Iterator[int]:
    """Open a draft, which becomes the file at this path when the block ends. If the block or the
    file system fails, nothing is left. A link at the path is replaced, not followed.
    """
    folder, name = os.path.split(path)
    draft = f"{folder}/{draft_name(name)}"
    opened = _open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags)
    try:
        try:
            yield opened
        finally:
            os.close(opened)  # network file systems report some errors only here
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft)
        raise


def _exists(path: str) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError as error:
        if error.errno in _GONE:
            return False
        raise StorageFailed(f"{path} cannot be looked up: {error.strerror}") from None


def _prepare_root(root: Path) -> None:
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = root.stat().st_mode
    except OSError as error:
        raise ConfigError(
            f"the disk tier's folder {root} cannot be used: {error.strerror}; correct the path"
        ) from error
    if mode & stat.S_IWOTH:
        raise ConfigError(
            f"all users may write to the disk tier's folder {root}; run `chmod o-w {root}`"
        )


def _allows_direct_io(folder: str) -> bool:
    """Try direct I/O once: some network file systems and older tmpfs refuse it."""
    path = f"{folder}/{draft_name(NAMESPACE_FILE)}"  # a sweep deletes it if this process is killed
    try:
        opened = _open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
        try:
            return os.write(opened, mmap.mmap(-1, PAGE_BYTES)) == PAGE_BYTES
        finally:
            os.close(opened)
    except OSError:
        return False
    finally:
        with suppress(OSError):  # Linux makes the file also where it then refuses O_DIRECT
            os.unlink(path)


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | OPEN_FLAGS, 0o600)


def _may_be_file(path: str) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return True


def _whole_pages(size_bytes: int) -> int:
    return size_bytes // PAGE_BYTES * PAGE_BYTES


def read_file_by_os(
    path: str, flags: int, direct: int, parts: tuple[memoryview, ...]
) -> tuple[int, int, float, int]:
    """Read a regular file into these buffers, with the flag `direct` if all of them are aligned.
    Returns the file's mode, size and time of last change, and how many bytes were read.
    """
    is_aligned = all(_is_aligned(part) for part in parts)
    opened = os.open(path, flags | (direct if is_aligned else 0))
    try:
        found = os.fstat(opened)
        num_read = os.preadv(opened, parts, 0) if stat.S_ISREG(found.st_mode) else 0
        return found.st_mode, found.st_size, found.st_mtime, num_read
    finally:
        os.close(opened)


_read_file: Callable[[str, int, int, tuple[memoryview, ...]], tuple[int, int, float, int]] = (
    native_or("read_file", read_file_by_os)
)


def _is_aligned(buffer: memoryview) -> bool:
    address = np.frombuffer(buffer, np.uint8).ctypes.data if len(buffer) else 0
    return bool(address % PAGE_BYTES == 0)


def _write_entry(opened: int, pages: memoryview, header: bytes, payload: memoryview) -> None:
    pages[:HEADER_BYTES] = header
    split = _whole_pages(len(payload))
    rest = len(payload) - split
    pages[PAGE_BYTES : PAGE_BYTES + rest] = payload[split:]
    parts = [pages[:PAGE_BYTES], payload[:split], *([pages[PAGE_BYTES:]] if rest else [])]
    if os.pwritev(opened, parts, 0) != sum(map(len, parts)):
        # A disk that is nearly full takes the first part.
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if rest:
        os.ftruncate(opened, HEADER_BYTES + len(payload))


def _touch_if_present(path: str, size_bytes: int) -> bool:
    try:
        found = os.lstat(path)
    except OSError:
        return False
    # A file of another size is damaged: it is written again.
    if not stat.S_ISREG(found.st_mode) or found.st_size != size_bytes:
        return False
    _touch(path, found.st_mtime)
    return True


def _touch(path: str, changed_s: float) -> None:
    """Set the time of last use, which decides about eviction, unless it is recent. A time in the
    future is not recent: the clock was set back.
    """
    if abs(time.time() - changed_s) > TOUCH_INTERVAL_S:
        with suppress(OSError):  # only the order of eviction depends on it
            os.utime(path, follow_symlinks=False)
