"""Storages for the tests of tiers."""

import os
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.tiers.s3_server import request

from kvferry.tiers.base import EntryKey, Tier
from kvferry.tiers.disk.tier import DiskTier
from kvferry.tiers.keys import Namespace
from kvferry.tiers.object_store import Bucket, ObjectTier
from kvferry.types import Address

CGROUPS = Path("/sys/fs/cgroup/blkio")


@contextmanager
def mounted(
    folder: Path, kind: str, options: str = "mode=700", device: Path | None = None
) -> Iterator[Path]:
    """Mount a new file system in memory, or that of a device, on the folder; or skip the test."""
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", kind, "-o", options, str(device or kind), str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@dataclass(frozen=True, slots=True)
class ThrottledDisk:
    """A file system on a block device, and the control group whose reads and writes are slowed."""

    folder: Path
    group: Path

    @contextmanager
    def throttled(self, pids: Iterable[int], bytes_per_s: int) -> Iterator[None]:
        """Let these processes, which must not end meanwhile, read and write so many bytes a
        second.
        """
        moved = list(pids)
        for pid in moved:
            (self.group / "cgroup.procs").write_text(str(pid))
        self._limit(bytes_per_s)
        try:
            yield
        finally:
            self._limit(0)
            for pid in moved:
                (CGROUPS / "cgroup.procs").write_text(str(pid))

    def _limit(self, bytes_per_s: int) -> None:
        """0: no limit."""
        device = self.folder.stat().st_dev
        rule = f"{os.major(device)}:{os.minor(device)} {bytes_per_s}"
        for direction in ("read", "write"):
            (self.group / f"blkio.throttle.{direction}_bps_device").write_text(rule)


@contextmanager
def throttled_disk(folder: Path, size_bytes: int = 64 * 2**20) -> Iterator[ThrottledDisk]:
    """A disk that a test can slow down, or skip the test."""
    if not CGROUPS.is_dir():
        pytest.skip("this system has no control group for block devices (version 1)")
    image, group = folder / "image", CGROUPS / f"kvferry-test-{os.getpid()}"
    image.touch()
    os.truncate(image, size_bytes)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    with mounted(folder / "mounted", "ext4", "loop", image) as made:
        group.mkdir()
        try:
            yield ThrottledDisk(made, group)
        finally:
            group.rmdir()


@dataclass(frozen=True, slots=True)
class DiskStorage:
    root: Path
    max_bytes: int | None = None

    def open(self, namespace: Namespace, secret: bytes) -> Tier:
        return DiskTier(self.root, namespace, secret, self.max_bytes)

    def read(self, namespace: Namespace, key: EntryKey) -> bytes | None:
        path = self.path(namespace, key)
        return path.read_bytes() if path.exists() else None

    def write(self, namespace: Namespace, key: EntryKey, stored: bytes) -> None:
        path = self.path(namespace, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(stored)

    def path(self, namespace: Namespace, key: EntryKey) -> Path:
        return self.root / namespace.hex / key.hex()[:2] / key.hex()


@dataclass(frozen=True, slots=True)
class S3Storage:
    server: Address
    bucket: str
    prefix: str = "kv/cache"

    def open(self, namespace: Namespace, secret: bytes) -> Tier:
        return ObjectTier(self.place(self.server), namespace, secret)

    def place(self, endpoint: Address) -> Bucket:
        return Bucket(self.bucket, self.prefix, f"http://{endpoint}", "us-east-1")

    def make(self) -> None:
        assert request(self.server, "PUT", f"/{self.bucket}")[0] == 200

    def read(self, namespace: Namespace, key: EntryKey) -> bytes | None:
        status, body = request(self.server, "GET", self.path(namespace, key.hex()))
        assert status in (200, 404)
        return body if status == 200 else None

    def write(self, namespace: Namespace, key: EntryKey, stored: bytes) -> None:
        path = self.path(namespace, key.hex())
        assert request(self.server, "PUT", path, stored)[0] == 200

    def path(self, namespace: Namespace, name: str) -> str:
        return f"/{self.bucket}/{self.prefix}/{namespace.hex}/{name}"
