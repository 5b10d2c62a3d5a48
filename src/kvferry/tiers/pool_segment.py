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

A file gets its name only when it is complete. It is never truncated, only unlinked, because a
process that reads a truncated mapping dies of SIGBUS. The space is reserved in advance for the same
reason. Everything in a file is checked before it is used: a file that is not a valid segment is
ignored.
"""

import contextlib
import fcntl
import mmap
import os
import secrets
import stat
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvferry.errors import ConfigError
from kvferry.tiers.base import KEY_BYTES, ObjectKey, ObjectKeys
from kvferry.tiers.files import OPEN_FLAGS
from kvferry.tiers.keys import Namespace
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
MADV_POPULATE_WRITE = 23
"""Maps all pages at once; Python's mmap module does not define the flag yet."""
SLOTS = 8
"""In one bucket of the index. A slot holds 32 bits of a key and, in its lower half, the number of
the key's row + 1. There are at least as many buckets as rows, so about one row in a million finds
its bucket full. Readers do not find such a row.
"""
LOWER_HALF = (1 << 32) - 1
"""The bits of a slot that hold the row's number."""
SUFFIX = ".rows"
UNFINISHED = ".new-"
"""Prefix of files that are not complete."""


class RowState(IntEnum):
    FREE = 0
    WRITING = 1
    READY = 2


READY = int(RowState.READY)
"""Comparing an integer with a member of an enum is slow."""


def mixed_with_key(checksum: int, key: ObjectKey) -> int:
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

    def key(self, row: int) -> ObjectKey:
        return ObjectKey(bytes(self._keys[KEY_BYTES * row : KEY_BYTES * (row + 1)]))

    def is_ready(self, row: int) -> bool:
        return self._states[row] == READY

    def checksum(self, row: int, key: ObjectKey) -> int:
        """The checksum of a row that holds the object of this key."""
        return mixed_with_key(self._checks[row], key)

    # -- the index --

    def find_row(self, key: ObjectKey) -> int | None:
        """The READY row with this key."""
        for slot in self._bucket(key):
            row = (self._slots[slot] & LOWER_HALF) - 1
            # Another process has written the slot, so the row may not exist.
            if 0 <= row < self.layout.num_rows and self.is_ready(row) and self.key(row) == key:
                return row
        return None

    def mark_stored(self, keys: ObjectKeys, found: bytearray) -> None:
        """Set `found[i]` to 1 if the index has key i. `find_row` may disagree, once in billions of
        keys. Takes some nanoseconds for each key.
        """
        _mark_stored(self._slots, keys.joined, found)

    def add_to_index(self, row: int, key: ObjectKey) -> None:
        for slot in self._bucket(key):
            if not self._slots[slot]:
                self._slots[slot] = _slot(row, key)
                return

    def drop_from_index(self, row: int, key: ObjectKey) -> None:
        for slot in self._bucket(key):
            if self._slots[slot] == _slot(row, key):
                self._slots[slot] = 0
                return

    def clear_index(self) -> None:
        np.frombuffer(self._slots, np.uint64)[:] = 0

    def _bucket(self, key: ObjectKey) -> range:
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

    def write_entry(self, row: int, key: ObjectKey, checksum: int, now_s: float) -> None:
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

    def hide_entry(self, row: int, key: ObjectKey, state: RowState) -> None:
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


def _slot(row: int, key: ObjectKey) -> int:
    """What a slot of the index holds for a row."""
    return int.from_bytes(key[8:16], sys.byteorder) & ~LOWER_HALF | (row + 1)


def private_segment(row_bytes: int, num_rows: int) -> SegmentTable:
    """A segment in private memory, which no other process sees."""
    layout = SegmentLayout(row_bytes, num_rows)
    pages = mmap.mmap(-1, layout.total_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return SegmentTable(pages, layout)


# -- folder --


def default_folder() -> Path:
    """The folder of this user's segments on this host."""
    return Path("/dev/shm") / f"kvferry-{os.geteuid()}"


def prepare_folder(folder: Path) -> None:
    """Make the folder, for this user only. ConfigError if it cannot be made or is not ours."""
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700, parents=True)
        if not check_folder(folder):
            raise ConfigError(
                f"the folder {folder} of the host pool is not a folder of this user; "
                "remove it, or name another one"
            )
        os.chmod(folder, 0o700)
    except OSError as error:
        raise ConfigError(
            f"the folder {folder} of the host pool cannot be used ({error.strerror}); name another"
        ) from error


def check_folder(folder: Path) -> bool:
    """Whether this is a folder of this user. A symbolic link is not: another user may own it."""
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def segment_paths(folder: Path, namespace: Namespace | None = None) -> list[Path]:
    """The segments in the folder, of one namespace or of all. Nothing in them is checked yet."""
    if not check_folder(folder):
        return []
    prefix = "" if namespace is None else namespace.hex
    with contextlib.suppress(OSError):
        return sorted(
            folder / name
            for name in os.listdir(folder)
            if name.startswith(prefix) and name.endswith(SUFFIX) and not name.startswith(".")
        )
    return []


# -- files --


class SegmentFile:
    """The file of a segment of this process, with the flock that shows other processes that the
    owner lives.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd

    def close(self) -> None:
        """Give up the segment. The file stays, with its rows. Idempotent."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        # A mapping has a duplicate of the descriptor, so closing ours might not end the lock.
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


OwnedSegment = tuple[SegmentFile, SegmentTable]


def create_segment(folder: Path, namespace: Namespace, layout: SegmentLayout) -> OwnedSegment:
    """Make a new segment. OSError if there is no space; then nothing is left behind."""
    token = secrets.token_hex(8)
    unfinished = folder / f"{UNFINISHED}{token}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(unfinished, flags, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.posix_fallocate(fd, 0, layout.total_bytes)
        header = Header(layout, namespace.digest, namespace.text, os.getpid())
        os.pwrite(fd, header.to_bytes(), 0)
        table = _map_for_owner(fd, layout)
        path = folder / f"{namespace.hex}-{token}{SUFFIX}"
        os.rename(unfinished, path)
        return SegmentFile(path, fd), table
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        os.close(fd)
        raise


def adopt_segment(path: Path, namespace: Namespace, layout: SegmentLayout) -> OwnedSegment | None:
    """Become the owner of a segment that an earlier process has left. None if the segment has an
    owner, or is not of this namespace and layout.
    """
    try:
        fd = os.open(path, os.O_RDWR | OPEN_FLAGS)
    except OSError:
        return None
    # OSError also if another engine has just removed the file.
    with contextlib.suppress(OSError, ValueError):
        header = _checked_header(fd)
        if (
            header is not None
            and (header.namespace, header.layout) == (namespace.digest, layout)
            and _lock(fd, path)
        ):
            ours = Header(layout, namespace.digest, namespace.text, os.getpid())
            os.pwrite(fd, ours.to_bytes()[: HEADER.size], 0)
            return SegmentFile(path, fd), _map_for_owner(fd, layout)
    os.close(fd)
    return None


def open_for_reading(path: Path) -> tuple[Header, SegmentTable] | None:
    """Map a segment of another process. None if the file is not a valid segment."""
    try:
        fd = os.open(path, os.O_RDWR | OPEN_FLAGS)
    except OSError:
        return None
    try:
        header = _checked_header(fd)
        if header is None:
            return None
        layout = header.layout
        pages = mmap.mmap(fd, layout.total_bytes, access=mmap.ACCESS_READ)
        used_bytes = layout.rows_at - layout.used_at
        used = mmap.mmap(fd, used_bytes, access=mmap.ACCESS_WRITE, offset=layout.used_at)
        return header, SegmentTable(pages, layout, used)
    except (OSError, ValueError, OverflowError):
        return None
    finally:
        os.close(fd)


def read_header(path: Path) -> tuple[Header, float] | None:
    """The header of a segment and the time of its last store, in seconds since 1970; None if the
    file is not a valid segment.
    """
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | OPEN_FLAGS)
        try:
            header = _checked_header(fd)
            last_store = struct.unpack("<d", os.pread(fd, 8, LAST_STORE_AT))[0] if header else 0.0
        finally:
            os.close(fd)
        return (header, last_store) if header is not None else None
    return None


def is_locked(path: Path) -> bool:
    """Whether the owner of a file lives. False if there is no such file."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | OPEN_FLAGS)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
    return False


def remove_unfinished(folder: Path) -> None:
    """Remove files of processes that were killed while they made a segment."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if name.startswith(UNFINISHED):
                _unlink_unless_locked(folder / name)


def remove_orphan(path: Path) -> bool:
    """Remove a segment without an owner; False if it has one. The kernel frees the space when the
    last process that reads the segment has unmapped it.
    """
    return _unlink_unless_locked(path)


def _unlink_unless_locked(path: Path) -> bool:
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | OPEN_FLAGS)
        try:
            if _lock(fd, path):
                os.unlink(path)
                return True
        finally:
            os.close(fd)
    return False


def _lock(fd: int, path: Path) -> bool:
    """Lock a file; False if it is locked, or if the path names another file meanwhile."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.path.samestat(os.fstat(fd), os.lstat(path))


def _checked_header(fd: int) -> Header | None:
    """The header of an open file, if the file is a complete segment of this user."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        return None
    header = Header.from_bytes(os.pread(fd, HEADER_BYTES, 0))
    if header is None or header.layout.total_bytes != found.st_size:
        return None
    # A page that is not allocated would be allocated by the first access, which ends the process if
    # memory is exhausted.
    return header if found.st_blocks * 512 >= found.st_size else None


def _map_for_owner(fd: int, layout: SegmentLayout) -> SegmentTable:
    pages = mmap.mmap(fd, layout.total_bytes)
    with contextlib.suppress(OSError):  # kernels before 5.14 map pages on the first write
        pages.madvise(MADV_POPULATE_WRITE)
    return SegmentTable(pages, layout)


def iter_orphans(folder: Path) -> Iterator[tuple[Path, int]]:
    """The segments of all namespaces that have no owner, with their sizes in bytes: first those of
    other versions of kvferry, then the one without stores for longest. Other files are left out.
    """
    found = []
    for path in segment_paths(folder):
        header = read_header(path)
        if header is not None:
            last_store_s, size = header[1], header[0].layout.total_bytes
        elif (other := _size_of_other_version(path)) is not None:
            last_store_s, size = 0.0, other
        else:
            continue
        if not is_locked(path):
            found.append((last_store_s, path, size))
    yield from ((path, size) for _, path, size in sorted(found))


def _size_of_other_version(path: Path) -> int | None:
    """The size of a segment of another version of kvferry; None if the file is something else."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | OPEN_FLAGS)
        try:
            found = os.fstat(fd)
            head = os.pread(fd, 12, 0)
        finally:
            os.close(fd)
        is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
        if is_ours and len(head) == 12 and head[:8] == MAGIC:
            version = int.from_bytes(head[8:], "little")
            return found.st_size if version != SEGMENT_VERSION else None
    return None
