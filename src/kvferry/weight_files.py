"""The identity of weight files: a digest of every byte.

Two checkpoints with equal digests are the same weights; a checkpoint whose tensors are divided into
files in another way has another digest. The SHA-256 of a file comes from one of three sources:

- the cache of the Hugging Face hub, which names large files by their SHA-256;
- an earlier result, kept in the user's cache folder with the file's device, inode, size and both
  times, if all of them are unchanged;
- the bytes. Files are hashed side by side, and a process that needs a file that another process is
  hashing waits for that result: the ranks of an engine start at the same time.

Reads and writes files. Called by any thread; starts threads that end before it returns.
"""

import errno
import fcntl
import hashlib
import logging
import os
import re
import stat
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import BinaryIO

import msgspec

from kvferry.errors import ConfigError

HUB_DIGEST = re.compile(r"[0-9a-f]{64}")
"""Small files have names of 40 digits, which are not the SHA-256 of their bytes."""
READ_BYTES = 4 << 20
MAX_THREADS = 16
PROGRESS_S = 5.0
LOCK_WAIT_S = 900.0
"""How long a process waits for another one that hashes the same file, before it does so itself."""
LOCK_POLL_S = 0.05
MIN_AGE_NS = 2_000_000_000
"""A file that changed less than this ago may change again within the same tick of its times."""

_log = logging.getLogger(__name__)


class _Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An earlier result, and the state of the file for which it holds."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    sha256: str = ""


def digest_files(paths: Sequence[Path], environ: Mapping[str, str]) -> str:
    """Return the digest of these files in this order: loaders let the last of equal names win.

    Raises ConfigError if a file cannot be read, or changes while it is hashed.
    """
    hashing = _Hashing(_cache_folder(environ))
    try:
        digests = hashing.run(paths)
    except OSError as error:
        raise ConfigError(
            f"the weights in {error.filename or paths[0]} cannot be read, to compare them with a "
            f"peer's: {error.strerror or error}"
        ) from error
    return hashlib.blake2b("\n".join(digests).encode(), digest_size=16).hexdigest()


def file_states(paths: Sequence[Path]) -> tuple[tuple[int, ...], ...]:
    """Return a value that changes when a file is written or replaced."""
    states = []
    for path in paths:
        found = path.stat()
        states.append(
            (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        )
    return tuple(states)


def files_changed_since(paths: Sequence[Path], time_ns: int) -> list[Path]:
    """The files, or links to them, that were written or replaced after this time of the clock.
    Files whose name in the hub's cache states their contents do not count.
    """
    return [
        path
        for path in paths
        if _hub_digest(path) is None
        and max(path.stat().st_ctime_ns, path.lstat().st_ctime_ns) > time_ns
    ]


def _cache_folder(environ: Mapping[str, str]) -> Path | None:
    """Where results are kept; None if there is no such folder."""
    base = environ.get("XDG_CACHE_HOME", "")
    folder = Path(base) if base.startswith("/") else Path("~/.cache")
    try:
        folder = folder.expanduser() / "kvferry" / "weights"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError, ValueError) as error:
        _log.warning(
            "results of hashing the weights cannot be kept, so every start of an engine hashes "
            "them; set XDG_CACHE_HOME to a folder that can be written reason=%s",
            error,
        )
        return None
    return folder


class _Hashing:
    """One call of `digest_files`."""

    def __init__(self, cache: Path | None) -> None:
        self._cache = cache
        self._hashed_bytes = 0
        """Of all threads together: a lost update makes a progress message wrong, nothing else."""

    def run(self, paths: Sequence[Path]) -> list[str]:
        total_bytes = sum(path.stat().st_size for path in paths)
        num_threads = max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)), len(paths)))
        since = time.monotonic()
        with ThreadPoolExecutor(num_threads) as pool:
            found = [pool.submit(self._digest, path) for path in paths]
            while wait(found, PROGRESS_S).not_done:
                rate = self._hashed_bytes / (time.monotonic() - since)
                _log.info(
                    "hashing the weights: %.1f of %.1f GB read, %.2f GB/s",
                    self._hashed_bytes / 1e9,
                    total_bytes / 1e9,
                    rate / 1e9,
                )
        return [each.result() for each in found]

    def _digest(self, path: Path) -> str:
        stated = _hub_digest(path)
        if stated is not None:
            return stated
        with path.open("rb", buffering=0) as file:
            state = _state(file)
            record = self._open_record(state)
            if record is None:
                return self._hash(file, path)
            with record:
                _lock(record)
                kept = _read_record(record, state)
                if kept is not None:
                    return kept
                sha256 = self._hash(file, path)
                _keep(record, state, sha256)
        return sha256

    def _open_record(self, state: _Kept) -> BinaryIO | None:
        if self._cache is None:
            return None
        name = self._cache / f"{state.device:x}-{state.inode:x}.json"
        try:
            # A link could lead to a file of another purpose.
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            record = os.fdopen(os.open(name, flags, 0o600), "r+b", buffering=0)
            if not stat.S_ISREG(os.fstat(record.fileno()).st_mode):
                record.close()
                raise FileExistsError(errno.EEXIST, "not a file", str(name))
            return record
        except OSError as error:
            _log.warning("the result of hashing a file cannot be kept reason=%s", error)
            return None

    def _hash(self, file: BinaryIO, path: Path) -> str:
        before, digest, buffer = _state(file), hashlib.sha256(), bytearray(READ_BYTES)
        view = memoryview(buffer)
        while count := file.readinto(buffer):  # type: ignore[attr-defined]  # a raw file
            digest.update(view[:count])
            self._hashed_bytes += count
        if _state(file) != before:
            raise ConfigError(
                f"{path} changed while kvferry hashed it; start the engine again when the weights "
                "are complete"
            )
        return digest.hexdigest()


def _hub_digest(path: Path) -> str | None:
    """The SHA-256 that the hub's cache states for `snapshots/<commit>/<name>`, a link to
    `blobs/<digest>` of the same repository.
    """
    blob = path.resolve(strict=True)
    repository = next((part.parent for part in path.parents if part.name == "snapshots"), None)
    if not path.is_symlink() or repository is None:
        return None
    is_blob = blob.parent == (repository / "blobs").resolve() and HUB_DIGEST.fullmatch(blob.name)
    return blob.name if is_blob else None


def _state(file: BinaryIO) -> _Kept:
    found = os.fstat(file.fileno())
    return _Kept(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _lock(record: BinaryIO) -> None:
    """Wait until no other process hashes this file. The lock ends with the process that has it."""
    deadline = time.monotonic() + LOCK_WAIT_S
    while time.monotonic() < deadline:
        try:
            return fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOCK_POLL_S)
        except OSError:  # A file system without locks: the work is done twice, nothing else.
            return None
    _log.warning("another process has been hashing a file for %.0f s", LOCK_WAIT_S)
    return None


def _read_record(record: BinaryIO, state: _Kept) -> str | None:
    try:
        kept = msgspec.json.decode(record.read(READ_BYTES), type=_Kept)
    except msgspec.DecodeError:
        return None
    is_same = HUB_DIGEST.fullmatch(kept.sha256) and state == msgspec.structs.replace(
        kept, sha256=""
    )
    return kept.sha256 if is_same else None


def _keep(record: BinaryIO, state: _Kept, sha256: str) -> None:
    if time.time_ns() - max(state.mtime_ns, state.ctime_ns) < MIN_AGE_NS:
        return
    try:
        os.ftruncate(record.fileno(), 0)
        kept = msgspec.structs.replace(state, sha256=sha256)
        os.pwrite(record.fileno(), msgspec.json.encode(kept), 0)
    except OSError as error:  # A part of the text is no valid record.
        _log.warning("the result of hashing a file cannot be kept reason=%s", error)
