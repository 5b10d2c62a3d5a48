"""What the folder of a disk tier holds. `kvferry.tiers.disk.space` has the names of the files."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import Any

from kvferry.errors import ConfigError
from kvferry.tiers.base import EntryKey
from kvferry.tiers.disk.space import (
    DRAFT_NAME,
    ENTRY_NAME,
    FOLDER_NAME,
    NAMESPACE_NAME,
    folders,
    is_stale,
    listing,
)
from kvferry.tiers.envelope import HEADER_BYTES, Envelope, Refusal
from kvferry.tiers.files import DamagedFile, open_regular_file, read_regular_file
from kvferry.tiers.inventory.base import (
    MAX_TEXT_BYTES,
    CheckResult,
    Condition,
    NamespaceSummary,
    NoteProgress,
    factors_of,
)
from kvferry.tiers.keys import NAMESPACE_FILE

MAX_ENTRY_BYTES = 4 << 30
"""Larger files are refused unread. No engine has chunks of this size."""
PIECE_BYTES = 1 << 20
"""What is read of an entry at once."""


class DiskInventory:
    """Implements `Inventory`. Links are not followed, and other files are left alone."""

    tier = "disk"

    def __init__(self, root: Path, secret: bytes = b"") -> None:
        """`check` needs the cluster's secret. Raises `ConfigError` if `root` cannot be
        read."""
        try:
            os.scandir(root).close()
        except OSError as error:
            raise ConfigError(
                f"the folder {root} cannot be read: {error.strerror}; name the folder of a disk "
                "tier"
            ) from None
        self._root = root
        self._secret = secret

    @property
    def place(self) -> str:
        return str(self._root)

    def namespaces(self) -> Iterator[str]:
        return (folder.name for folder in folders(self._root, NAMESPACE_NAME))

    def summary(self, namespace: str, note: NoteProgress) -> NamespaceSummary:
        num_objects, used_bytes, last_used = 0, 0, 0.0
        for file in self._objects(namespace):
            with suppress(OSError):  # an engine has evicted it
                found = file.stat(follow_symlinks=False)
                num_objects += 1
                used_bytes += found.st_size
                last_used = max(last_used, found.st_mtime)
                note(num_objects)
        factors = self._factors(namespace)
        return NamespaceSummary(namespace, factors, num_objects, used_bytes, last_used)

    def objects(self, namespace: str) -> Iterator[str]:
        return (file.name for file in self._objects(namespace))

    def check(self, namespace: str, name: str) -> CheckResult:
        try:
            with open_regular_file(self._path(namespace, name)) as file:
                stored_bytes = os.fstat(file.fileno()).st_size
                return checked(self._secret, namespace, name, stored_bytes, _pieces(file))
        except FileNotFoundError:
            return CheckResult(Condition.GONE)
        except DamagedFile:
            return CheckResult(Condition.DAMAGED, "is not a file")
        except OSError as error:
            return CheckResult(Condition.UNCHECKED, f"cannot be read: {error.strerror}")

    def remove(self, namespace: str, names: Sequence[str]) -> int:
        # An engine may have replaced a damaged entry since the check. Removing the new one costs
        # that engine no more than a miss.
        return sum(_is_unlinked(self._path(namespace, name)) for name in names)

    def clear(self, namespace: str, note: NoteProgress) -> int:
        num_gone = 0
        for folder in folders(self._root / namespace, FOLDER_NAME):
            for file in listing(folder.path):
                is_entry = ENTRY_NAME.match(file.name) is not None
                if is_entry or _is_stale_draft(file):
                    num_gone += _is_unlinked(file.path) and is_entry
                    note(num_gone)
            with suppress(OSError):  # an engine is writing an entry there
                os.rmdir(folder.path)
        self._remove_folder(namespace)
        return num_gone

    def _remove_folder(self, namespace: str) -> None:
        """Remove the namespace's folder unless an engine has stored something there meanwhile."""
        folder = self._root / namespace
        for draft in filter(_is_stale_draft, listing(folder)):
            _is_unlinked(draft.path)
        if any(file.name != NAMESPACE_FILE for file in listing(folder)):
            return
        with suppress(OSError):  # an engine made a folder in the moment between
            (folder / NAMESPACE_FILE).unlink(missing_ok=True)
            folder.rmdir()

    def _factors(self, namespace: str) -> Mapping[str, Any] | None:
        try:
            text = read_regular_file(self._root / namespace / NAMESPACE_FILE, MAX_TEXT_BYTES)
        except OSError:
            return None
        return factors_of(namespace, text)

    def _objects(self, namespace: str) -> "Iterator[os.DirEntry[str]]":
        for folder in folders(self._root / namespace, FOLDER_NAME):
            yield from (file for file in listing(folder.path) if ENTRY_NAME.match(file.name))

    def _path(self, namespace: str, name: str) -> str:
        return f"{self._root}/{namespace}/{name[:2]}/{name}"


def checked(
    secret: bytes, namespace: str, name: str, stored_bytes: int, pieces: Iterator[memoryview]
) -> CheckResult:
    """Check a stored entry whose name is its key in hex. The first piece is not shorter than the
    header, if the entry is not; it is the only one that is read unless the header is right.
    """
    if stored_bytes > MAX_ENTRY_BYTES:
        return CheckResult(Condition.DAMAGED, "is larger than any chunk")
    envelope = Envelope(secret, bytes.fromhex(namespace))
    first = next(pieces, memoryview(b""))
    header = memoryview(bytes(first[:HEADER_BYTES]))  # the pieces may share one buffer
    refusal = envelope.check_header(EntryKey(bytes.fromhex(name)), header, stored_bytes)
    if refusal is None:
        refusal = envelope.check_payload(header, chain([first[HEADER_BYTES:]], pieces))
    if refusal is None:
        return CheckResult(Condition.SOUND)
    is_unproven = refusal is Refusal.BAD_MAC
    return CheckResult(Condition.UNPROVEN if is_unproven else Condition.DAMAGED, refusal.value)


def _pieces(file: BufferedReader) -> Iterator[memoryview]:
    """The bytes of a file. Each piece is overwritten by the next one."""
    buffer = memoryview(bytearray(PIECE_BYTES))
    for _ in range(0, MAX_ENTRY_BYTES, PIECE_BYTES):
        if not (count := file.readinto(buffer)):
            return
        yield buffer[:count]
        # A walk needs no byte twice, so it leaves the page cache to others.
        with suppress(OSError):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _is_unlinked(path: str) -> bool:
    with suppress(OSError):
        os.unlink(path)
        return True
    return False


def _is_stale_draft(file: "os.DirEntry[str]") -> bool:
    """Whether a file being written belongs to a dead writer."""
    with suppress(OSError):
        return DRAFT_NAME.match(file.name) is not None and is_stale(
            file.stat(follow_symlinks=False)
        )
    return False
