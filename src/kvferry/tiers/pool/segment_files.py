"""The files of segments: how they are found, made, adopted, read and removed.

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
from collections.abc import Iterator
from pathlib import Path

from kvferry.errors import ConfigError
from kvferry.tiers.files import OPEN_FLAGS
from kvferry.tiers.keys import Namespace
from kvferry.tiers.pool.segment import (
    HEADER,
    HEADER_BYTES,
    LAST_STORE_AT,
    MAGIC,
    SEGMENT_VERSION,
    Header,
    SegmentLayout,
    SegmentTable,
)

MADV_POPULATE_WRITE = 23
"""Maps all pages at once; Python's mmap module does not define the flag yet."""
SUFFIX = ".rows"
UNFINISHED = ".new-"
"""Prefix of files that are not complete."""


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
    with contextlib.suppress(OSError), _opened(path) as fd:
        header = _checked_header(fd)
        if header is not None:
            return header, struct.unpack("<d", os.pread(fd, 8, LAST_STORE_AT))[0]
    return None


def is_locked(path: Path) -> bool:
    """Whether the owner of a file lives. False if there is no such file."""
    with contextlib.suppress(OSError), _opened(path) as fd:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def remove_unfinished(folder: Path) -> None:
    """Remove files of processes that were killed while they made a segment."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if name.startswith(UNFINISHED):
                remove_orphan(folder / name)


def remove_orphan(path: Path) -> bool:
    """Remove a file without an owner; False if it has one. The kernel frees the space when the last
    process that reads the segment has unmapped it.
    """
    with contextlib.suppress(OSError), _opened(path) as fd:
        if _lock(fd, path):
            os.unlink(path)
            return True
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


def by_last_store(
    folder: Path, namespace: Namespace | None = None
) -> list[tuple[float, Path, int]]:
    """The segments of one namespace or of all, each with the time of its last store and its size in
    bytes: first those of other versions of kvferry, then the one without stores for longest. Other
    files are left out.
    """
    found = []
    for path in segment_paths(folder, namespace):
        header = read_header(path)
        if header is not None:
            found.append((header[1], path, header[0].layout.total_bytes))
        elif (size := _size_of_other_version(path)) is not None:
            found.append((0.0, path, size))
    return sorted(found)


def iter_orphans(folder: Path) -> Iterator[tuple[Path, int]]:
    """The segments of all namespaces that have no owner, with their sizes: see `by_last_store`."""
    return ((path, size) for _, path, size in by_last_store(folder) if not is_locked(path))


def _size_of_other_version(path: Path) -> int | None:
    """The size of a segment of another version of kvferry; None if the file is something else."""
    with contextlib.suppress(OSError), _opened(path) as fd:
        found, head = os.fstat(fd), os.pread(fd, 12, 0)
        is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
        if is_ours and len(head) == 12 and head[:8] == MAGIC:
            version = int.from_bytes(head[8:], "little")
            return found.st_size if version != SEGMENT_VERSION else None
    return None


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open a file for reading."""
    fd = os.open(path, os.O_RDONLY | OPEN_FLAGS)
    try:
        yield fd
    finally:
        os.close(fd)
