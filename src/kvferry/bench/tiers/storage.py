"""The disk tier and the object tier beside plain clients of the same storage.

The plain client of a disk writes and reads one file for each object with direct I/O, where the file
system allows it. The plain client of an object store is obstore, which the tier uses too. Both have
as many threads as the tier, and neither has headers, checks or atomic replacement.
"""

import mmap
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from secrets import token_bytes, token_hex
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvferry.bench.tiers.rounds import Comparison, Contestant, take_turns
from kvferry.cli.runtime import StopRequest
from kvferry.errors import ConfigError, KVFerryError
from kvferry.tiers.base import KEY_BYTES, EntryKey, LoadOutcome, StoreOutcome, Tier
from kvferry.tiers.disk.tier import DiskTier
from kvferry.tiers.keys import Namespace

if TYPE_CHECKING:
    from obstore.store import S3Store

    from kvferry.tiers.object_store import Bucket

NAMESPACE = Namespace({"benchmark": "kvferry bench tiers"})
SECRET = b"the secret of the benchmark"
START_S = 60.0


@dataclass(frozen=True, slots=True)
class StorageScope:
    shapes: tuple[tuple[int, int], ...] = ((256, 256), (2048, 64))
    """KiB of an object, and objects of one round."""
    threads: int = 8
    """As many as a rank of an engine has by default (`io_threads`)."""
    rounds: int = 9


class _Objects:
    """Page-aligned memory for the objects of one round, with new contents and keys in each."""

    def __init__(self, count: int, size_bytes: int) -> None:
        self.count, self.size_bytes = count, size_bytes
        self._memory = mmap.mmap(-1, count * size_bytes)
        self._array = np.frombuffer(self._memory, np.uint8)
        self.keys: list[EntryKey] = []
        self.renew()

    def renew(self) -> None:
        """Choose other keys and contents, so that no storage has the objects already."""
        self.keys = [EntryKey(token_bytes(KEY_BYTES)) for _ in range(self.count)]
        seed = int.from_bytes(token_bytes(8), "little")
        self._array.view(np.uint64)[:] = np.arange(
            seed, seed + len(self._array) // 8, dtype=np.uint64
        )

    def erase(self) -> None:
        self._array[:] = 0

    def checksum(self) -> int:
        return int(self._array.view(np.uint64).sum(dtype=np.uint64))

    def __getitem__(self, index: int) -> memoryview:
        return memoryview(self._memory)[index * self.size_bytes : (index + 1) * self.size_bytes]


class _Client(Protocol):
    """Writes and reads one object; any thread may call."""

    def write(self, key: EntryKey, payload: memoryview) -> None: ...

    def read(self, key: EntryKey, into: memoryview) -> None: ...

    def delete(self, keys: list[EntryKey]) -> None: ...


@dataclass(frozen=True, slots=True)
class _TierClient:
    tier: Tier

    def write(self, key: EntryKey, payload: memoryview) -> None:
        result = self.tier.store(key, payload)
        if result.outcome is not StoreOutcome.STORED:
            raise KVFerryError(f"the {self.tier.name} tier did not store: {result}")

    def read(self, key: EntryKey, into: memoryview) -> None:
        result = self.tier.load(key, into)
        if result.outcome is not LoadOutcome.LOADED:
            raise KVFerryError(f"the {self.tier.name} tier did not load: {result}")

    def delete(self, keys: list[EntryKey]) -> None:
        self.tier.remove(keys)


@dataclass(frozen=True, slots=True)
class _FileClient:
    folder: Path
    direct_flag: int

    def write(self, key: EntryKey, payload: memoryview) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | self.direct_flag
        opened = os.open(self.folder / key.hex(), flags, 0o600)
        try:
            if os.pwritev(opened, [payload], 0) != len(payload):
                raise KVFerryError(f"{self.folder} is full; name another folder with --disk")
        finally:
            os.close(opened)

    def read(self, key: EntryKey, into: memoryview) -> None:
        opened = os.open(self.folder / key.hex(), os.O_RDONLY | self.direct_flag)
        try:
            os.preadv(opened, [into], 0)
        finally:
            os.close(opened)

    def delete(self, keys: list[EntryKey]) -> None:
        for key in keys:
            os.unlink(self.folder / key.hex())


@dataclass(frozen=True, slots=True)
class _ObstoreClient:
    store: "S3Store"

    def write(self, key: EntryKey, payload: memoryview) -> None:
        self.store.put(key.hex(), payload, use_multipart=False)

    def read(self, key: EntryKey, into: memoryview) -> None:
        stored = memoryview(self.store.get(key.hex()).bytes())
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(stored, np.uint8))

    def delete(self, keys: list[EntryKey]) -> None:
        self.store.delete([key.hex() for key in keys])


# -- measurements --


def measure_disk(folder: Path, scope: StorageScope, stop: StopRequest) -> Iterator[Comparison]:
    """Yield a comparison for each object size and direction. Uses a new folder in `folder`."""
    place = folder / f"kvferry-bench-{token_hex(4)}"
    try:
        (place / "plain").mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"--disk {folder} cannot be used: {error.strerror}") from error
    try:
        with closing(DiskTier(place / "tier", NAMESPACE, SECRET, None)) as tier:
            direct = os.O_DIRECT if tier.uses_direct_io else 0
            clients: dict[str, _Client] = {
                "disk tier": _TierClient(tier),
                "plain files": _FileClient(place / "plain", direct),
            }
            facts = {"direct_io": tier.uses_direct_io, "threads": scope.threads}
            yield from _compare("disk", clients, scope, stop, facts)
    finally:
        shutil.rmtree(place)


def measure_object(
    bucket: "Bucket", scope: StorageScope, stop: StopRequest
) -> Iterator[Comparison]:
    from obstore.store import S3Store

    from kvferry.tiers.object_store import ObjectTier

    plain = S3Store(
        bucket.name,
        prefix=f"{bucket.prefix}/plain",
        config={"endpoint": bucket.endpoint, "region": bucket.region or "us-east-1"}
        if bucket.endpoint
        else {},
        client_options={"allow_http": (bucket.endpoint or "").startswith("http:")},
    )
    with closing(ObjectTier(bucket, NAMESPACE, SECRET)) as tier:
        clients: dict[str, _Client] = {
            "object tier": _TierClient(tier),
            "plain obstore": _ObstoreClient(plain),
        }
        yield from _compare("object", clients, scope, stop, {"threads": scope.threads})


def _compare(
    part: str,
    clients: dict[str, _Client],
    scope: StorageScope,
    stop: StopRequest,
    facts: dict[str, Any],
) -> Iterator[Comparison]:
    ours, baseline = clients
    for kib, count in scope.shapes:
        objects = _Objects(count, kib * 1024)
        with ThreadPoolExecutor(scope.threads, thread_name_prefix="kvferry-bench") as pool:
            for work in ("store", "load"):
                contestants = [
                    _contestant(name, work, client, objects, pool)
                    for name, client in clients.items()
                ]
                seconds = take_turns(contestants, scope.rounds, stop)
                moved = count * kib * 1024
                yield Comparison(part, work, kib * 1024, moved, seconds, ours, baseline, facts)


def _contestant(
    name: str, work: str, client: _Client, objects: _Objects, pool: ThreadPoolExecutor
) -> Contestant:
    def each(call: Callable[[EntryKey, memoryview], None]) -> None:
        list(pool.map(lambda n: call(objects.keys[n], objects[n]), range(objects.count)))

    written: list[int] = []

    def write_all() -> None:
        each(client.write)

    def write_for_reading() -> None:
        objects.renew()
        written[:] = [objects.checksum()]
        each(client.write)
        objects.erase()

    def check_and_delete() -> None:
        if objects.checksum() != written[0]:
            raise KVFerryError(f"{name} has read other bytes; please report this as a bug")
        client.delete(objects.keys)

    if work == "store":
        return Contestant(name, write_all, objects.renew, lambda: client.delete(objects.keys))
    return Contestant(name, lambda: each(client.read), write_for_reading, check_and_delete)


# -- server --


@contextmanager
def moto_bucket() -> "Iterator[Bucket]":
    """Run moto's S3 server in a process of its own, with an empty bucket."""
    from kvferry.tiers.object_store import Bucket

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # moto accepts any credentials, but obstore must have some.
    os.environ.setdefault("AWS_ACCESS_KEY_ID", "bench")
    os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "bench")
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_listening(process, port)
        _make_bucket(port, "kvferry-bench")
        yield Bucket("kvferry-bench", "kvferry", f"http://127.0.0.1:{port}", "us-east-1")
    finally:
        process.kill()
        process.wait()


def _wait_listening(process: "subprocess.Popen[bytes]", port: int) -> None:
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        time.sleep(0.05)
    raise KVFerryError("moto's server did not start; give a store of your own with --object")


def _make_bucket(port: int, name: str) -> None:
    signed = (
        "AWS4-HMAC-SHA256 Credential=bench/20260101/us-east-1/s3/aws4_request, "
        "SignedHeaders=host, Signature=0"
    )
    with closing(HTTPConnection("127.0.0.1", port, timeout=START_S)) as connection:
        connection.request("PUT", f"/{name}", headers={"Authorization": signed})
        if connection.getresponse().status != 200:
            raise KVFerryError("moto's server did not make a bucket; give one with --object")
