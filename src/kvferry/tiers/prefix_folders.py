"""The KV of whole prefixes in folders, one safetensors file per layer: the storage of
`ExampleConnector`.

    root / prefixes-namespace / key of the prefix / layer.safetensors, layer.seal

A writer fills a draft folder and renames it, so a folder has all its files or does not exist. The
seal is the header of an `Envelope`, so a reader finds every byte that is not as it was written.
Nothing is ever evicted. A writer that is killed leaves its draft, `*.draft-*`, which the next
engine removes after an hour.
"""

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from kvferry.errors import ConfigError
from kvferry.tiers.base import KEY_BYTES, EntryKey
from kvferry.tiers.envelope import HEADER_BYTES, Envelope
from kvferry.tiers.files import DamagedFile, read_regular_file
from kvferry.tiers.keys import Namespace

MAX_DRAFT_AGE_S = 3600.0


class PrefixFolders:
    """The folders of one rank. Picklable, so that a scheduler can have those of its workers."""

    def __init__(self, root: str, namespace: Namespace, secret: bytes, max_blocks: int) -> None:
        """`max_blocks` is how many blocks a prefix can have. Raises `ConfigError` if the root
        cannot be read.
        """
        regions = namespace.factors["regions"]
        self._layers = [layer for _, _, layers in regions for layer in layers]
        # The header of a safetensors file with one tensor has about 100 bytes.
        self._max_file_bytes = max_blocks * max(size for _, size, _ in regions) + HEADER_BYTES
        self._folder = Path(root) / f"prefixes-{namespace.hex}"
        self._envelope = Envelope(secret, namespace.digest)
        self._draft_suffix = f".draft-{secrets.token_hex(8)}"
        self._failed_drafts: dict[EntryKey, OSError] = {}
        try:
            Path(root).mkdir(mode=0o700, parents=True, exist_ok=True)
            os.listdir(root)
        except OSError as error:
            raise ConfigError(
                f"shared_storage_path is {root}, which cannot be used: {error.strerror}; correct "
                "the path, or the permissions of the folder"
            ) from error
        self._remove_old_drafts()

    # -- writing --

    def write(self, key: EntryKey, layer: str, data: bytes) -> None:
        """Add a layer to the draft of a prefix. `publish` returns a failure."""
        draft = self._draft(key)
        try:
            draft.mkdir(mode=0o700, parents=True, exist_ok=True)
            (draft / f"{layer}.safetensors").write_bytes(data)
            seal = self._envelope.seal(file_key(key, layer), memoryview(data))
            (draft / f"{layer}.seal").write_bytes(seal)
        except OSError as error:
            self._failed_drafts.setdefault(key, error)

    def publish(self, key: EntryKey) -> OSError | None:
        """Make the draft visible under its key if it has all layers, and return why that was not
        possible. If another engine was faster, its folder stays: both have the same contents.
        """
        draft = self._draft(key)
        failure = self._failed_drafts.pop(key, None)
        try:
            if failure is None:
                for layer in self._layers:
                    (draft / f"{layer}.seal").stat()
                os.rename(draft, self.path(key))
        except OSError as error:
            failure = error
        shutil.rmtree(draft, ignore_errors=True)
        return None if self.has(key) else failure

    def remove(self, key: EntryKey) -> None:
        """Remove a prefix, if the storage permits. It disappears at once or not at all."""
        draft = self._draft(key)
        with contextlib.suppress(OSError):
            os.rename(self.path(key), draft)
            shutil.rmtree(draft, ignore_errors=True)

    # -- reading --

    def path(self, key: EntryKey) -> Path:
        return self._folder / key.hex()

    def has(self, key: EntryKey) -> bool:
        # `Path.is_dir` raises an exception if the storage fails.
        return os.path.isdir(self.path(key))

    def find_damage(self, key: EntryKey) -> OSError | None:
        """Return why the prefix cannot be used, or None if every byte is as it was written."""
        try:
            for layer in self._layers:
                self.read(key, layer)
        except OSError as error:
            return error
        return None

    def read(self, key: EntryKey, layer: str) -> bytes:
        """The contents of one layer's file; OSError unless every byte is as it was written."""
        path = self.path(key) / f"{layer}.safetensors"
        seal = read_regular_file(path.with_name(f"{layer}.seal"), HEADER_BYTES)
        data = read_regular_file(path, self._max_file_bytes)
        refusal = self._envelope.check(
            file_key(key, layer), memoryview(seal), memoryview(data), HEADER_BYTES + len(data)
        )
        if refusal is not None:
            raise DamagedFile(f"{path} {refusal.value}")
        return data

    def _draft(self, key: EntryKey) -> Path:
        return self.path(key).with_suffix(self._draft_suffix)

    def _remove_old_drafts(self) -> None:
        with contextlib.suppress(OSError):
            for draft in self._folder.glob("*.draft-*"):
                if draft.stat().st_mtime < time.time() - MAX_DRAFT_AGE_S:
                    shutil.rmtree(draft, ignore_errors=True)


def is_stored(ranks: Sequence[PrefixFolders], key: EntryKey) -> bool:
    """Whether every rank has a folder for the prefix."""
    return bool(ranks) and all(folders.has(key) for folders in ranks)


def find_longest(
    ranks: Sequence[PrefixFolders], keys: Sequence[EntryKey], first: int
) -> tuple[int, list[OSError]]:
    """Return how many keys the longest intact prefix has, 0 if it has no more than `first`; and
    why longer ones cannot be used. Those that are damaged are removed; others may be intact, and
    this engine cannot read them now.
    """
    damages: list[OSError] = []
    for count in range(len(keys), first, -1):
        key = keys[count - 1]
        if is_stored(ranks, key):
            damage = next(filter(None, (folders.find_damage(key) for folders in ranks)), None)
            if damage is None:
                return count, damages
            damages.append(damage)
            if isinstance(damage, (DamagedFile, FileNotFoundError)):
                for folders in ranks:
                    folders.remove(key)
    return 0, damages


def file_key(key: EntryKey, layer: str) -> EntryKey:
    """The key of one file, so that two layers cannot be mixed up."""
    return EntryKey(blake2b(layer.encode(), key=key, digest_size=KEY_BYTES).digest())
