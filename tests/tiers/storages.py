"""Storages for the tests of tiers."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvferry.tiers.base import ObjectKey, Tier
from kvferry.tiers.disk import DiskTier
from kvferry.tiers.keys import Namespace

__all__ = ["DiskStorage", "mounted"]


@contextmanager
def mounted(folder: Path, kind: str, options: str = "mode=700") -> Iterator[Path]:
    """Mount a new file system in memory on the folder, or skip the test."""
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", kind, "-o", options, kind, str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@dataclass(frozen=True, slots=True)
class DiskStorage:
    root: Path
    max_bytes: int | None = None

    def open(self, namespace: Namespace, secret: bytes) -> Tier:
        return DiskTier(self.root, namespace, secret, self.max_bytes)

    def read(self, namespace: Namespace, key: ObjectKey) -> bytes | None:
        path = self.path(namespace, key)
        return path.read_bytes() if path.exists() else None

    def write(self, namespace: Namespace, key: ObjectKey, stored: bytes) -> None:
        path = self.path(namespace, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(stored)

    def path(self, namespace: Namespace, key: ObjectKey) -> Path:
        return self.root / namespace.hex / key.hex()[:2] / key.hex()
