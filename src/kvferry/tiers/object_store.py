"""Objects in a bucket of an S3-compatible object store.

    <prefix>/<namespace: 32 hex digits>/<key: 64 hex digits>     an object
    <prefix>/<namespace: 32 hex digits>/namespace.json           for people

An object is one PUT, which is atomic. Nothing here bounds the bucket: the operator gives it a
life-cycle rule that expires objects. This is the only module that imports obstore.

Credentials come from where obstore looks for them: `AWS_ACCESS_KEY_ID` and the other variables of
AWS, a web identity token, the metadata service of a container or an instance; or, with `profile`,
from the files in ~/.aws, which boto3 reads. They appear in no message of this module: the texts of
obstore's errors, which repeat what the server wrote, are not passed on.
"""

import asyncio
import re
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import numpy as np

from kvferry.errors import ConfigError, MissingDependency, without_password
from kvferry.tiers.backoff import StorageFailed, StorageHealth, StorageNotAsked
from kvferry.tiers.base import (
    EntryKey,
    LoadOutcome,
    LoadResult,
    StoreOutcome,
    StoreResult,
    TierUsage,
)
from kvferry.tiers.envelope import HEADER_BYTES, Envelope
from kvferry.tiers.keys import NAMESPACE_FILE, Namespace

if TYPE_CHECKING:
    from obstore.store import (
        ClientConfig,
        RetryConfig,
        S3Config,
        S3CredentialProvider,
        S3Store,
    )

MAX_RETRIES = 2
"""Retries by obstore of one request: after 5xx, broken connections, and timeouts of reads."""
FIRST_RETRY_S = 0.1
MAX_RETRY_S = 1.0
TOLERATED_FAILURES = 2
MAX_PARALLEL_LOOKUPS = 32
PROBES_PER_ROUND = 16
"""Look-ups in parallel while the end of a prefix is searched: 4,096 keys need three rounds."""
CLOSE_S = 10.0

_STATUS = re.compile(r"status code: (\d{3})")
_ERROR_KIND = re.compile(r"HttpError \{\s*kind: (\w+)")
_KINDS = {
    "Connect": "the object store cannot be reached",
    "Timeout": "the object store did not answer in time",
}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Bucket:
    """Where the objects are. None: as the environment says, or AWS's own default."""

    name: str
    prefix: str = ""
    endpoint: str | None = None
    region: str | None = None
    profile: str | None = None
    """The profile in ~/.aws whose credentials are used. Needs boto3."""


@dataclass(frozen=True, slots=True)
class ObjectStoreDeadlines:
    connect_s: float = 2.0
    read_s: float = 5.0
    """The longest silence of a server that is to answer."""
    lookup_s: float = 2.0
    """For `find` and `find_prefix` as a whole."""
    transfer_s: float = 15.0
    """For one load or one store as a whole, with all retries."""


class ObjectTier:
    """Implements `Tier`. One thread with an event loop makes the requests."""

    def __init__(
        self,
        bucket: Bucket,
        namespace: Namespace,
        secret: bytes,
        deadlines: ObjectStoreDeadlines | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises `ConfigError` if the settings cannot be right. Makes no request."""
        self._deadlines = deadlines or ObjectStoreDeadlines()
        self._requests = _Requests(open_store(bucket, self._deadlines))
        self._namespace = namespace
        self._envelope = Envelope(secret, namespace.digest)
        self._asking = StorageHealth(clock, TOLERATED_FAILURES)
        self._storing = StorageHealth(clock, TOLERATED_FAILURES)
        """Of stores alone: a bucket that may only be read answers look-ups and loads."""
        self._usage = TierUsage()
        self._usage_lock = threading.Lock()
        self._has_namespace_file = False

    @property
    def name(self) -> str:
        return "object"

    def find(self, keys: Sequence[EntryKey]) -> list[bool]:
        paths = [self._path(key) for key in keys]
        sizes = self._ask(self._requests.sizes(paths), self._deadlines.lookup_s)
        return [size is not None for size in sizes]

    def find_prefix(self, keys: Sequence[EntryKey]) -> int:
        paths = [self._path(key) for key in keys]
        return self._ask(self._requests.prefix(paths), self._deadlines.lookup_s)

    def load(self, key: EntryKey, into: memoryview) -> LoadResult:
        path = self._path(key)
        try:
            stored_bytes, stored = self._ask(
                self._requests.get(path, HEADER_BYTES + len(into)), self._deadlines.transfer_s
            )
        except FileNotFoundError:
            return LoadResult(LoadOutcome.MISSING)
        except StorageFailed as failure:
            return LoadResult(LoadOutcome.FAILED, str(failure))
        if stored_bytes == HEADER_BYTES + len(into):
            # numpy copies without the GIL. The check reads the copy, so it covers the copying.
            np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(stored[HEADER_BYTES:], np.uint8))
        refusal = self._envelope.check(key, stored[:HEADER_BYTES], into, stored_bytes)
        if refusal is None:
            return LoadResult(LoadOutcome.LOADED)
        self.remove([key])
        return LoadResult(LoadOutcome.REFUSED, f"{path} {refusal.value}")

    def store(self, key: EntryKey, payload: memoryview) -> StoreResult:
        try:
            self._storing.check()
            outcome = self._store(key, payload)
        except StorageNotAsked as pause:
            return StoreResult(StoreOutcome.DROPPED, str(pause))
        except StorageFailed as failure:
            self._storing.failed(str(failure))
            return StoreResult(StoreOutcome.FAILED, str(failure))
        self._storing.succeeded()
        return StoreResult(outcome)

    def remove(self, keys: Sequence[EntryKey]) -> None:
        paths = [self._path(key) for key in keys]
        with suppress(StorageFailed, FileNotFoundError):
            self._ask(self._requests.delete(paths), self._deadlines.transfer_s)

    def usage(self) -> TierUsage:
        """What this process has stored; the bucket's contents are not counted."""
        return self._usage

    def close(self) -> None:
        self._requests.close()

    def _path(self, key: EntryKey) -> str:
        return f"{self._namespace.hex}/{key.hex()}"

    def _store(self, key: EntryKey, payload: memoryview) -> StoreOutcome:
        path, size_bytes = self._path(key), HEADER_BYTES + len(payload)
        # A look-up costs much less than sending an object that is there.
        sizes = self._ask(self._requests.sizes([path]), self._deadlines.lookup_s)
        if sizes == [size_bytes]:
            return StoreOutcome.PRESENT
        put = self._requests.put(path, self._envelope.seal(key, payload), payload)
        try:
            # Not by `_ask`: if the store refuses writes alone, look-ups and loads go on.
            self._requests.run(put, self._deadlines.transfer_s)
            self._stored(size_bytes)
        except FileNotFoundError:
            raise StorageFailed("the object store has no such bucket") from None
        return StoreOutcome.STORED

    def _stored(self, size_bytes: int) -> None:
        with self._usage_lock:
            self._usage = TierUsage(
                self._usage.used_bytes + size_bytes, self._usage.num_entries + 1
            )
            is_first, self._has_namespace_file = not self._has_namespace_file, True
        if is_first:
            path, text = f"{self._namespace.hex}/{NAMESPACE_FILE}", self._namespace.text.encode()
            try:
                self._ask(
                    self._requests.put(path, text, memoryview(b"")), self._deadlines.transfer_s
                )
            except StorageFailed:
                self._has_namespace_file = False  # the next store tries again

    def _ask(self, request: Coroutine[Any, Any, T], deadline_s: float) -> T:
        """Run a request of `_Requests`. Raises FileNotFoundError for what does not exist, and
        `StorageFailed`.
        """
        try:
            self._asking.check()
            answer = self._requests.run(request, deadline_s)
        except FileNotFoundError:
            self._asking.succeeded()
            raise
        except StorageNotAsked:
            request.close()
            raise
        except StorageFailed as failure:
            self._asking.failed(str(failure))
            raise
        self._asking.succeeded()
        return answer


class _Requests:
    """The thread that owns the event loop, and the requests that it makes.

    Other threads call `run` with one of the coroutines and wait.
    """

    def __init__(self, store: "S3Store") -> None:
        self._store = store
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="kvferry-object-store", daemon=True)
        self._is_closed = False
        self._thread.start()

    def close(self) -> None:
        """Cancel all requests and stop the thread. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        asyncio.run_coroutine_threadsafe(_cancel_all_others(), self._loop).result(CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        self._loop.close()

    def run(self, request: Coroutine[Any, Any, T], deadline_s: float) -> T:
        """Run a request from another thread. Raises FileNotFoundError or `StorageFailed`."""
        from obstore.exceptions import BaseError

        if self._is_closed:
            request.close()
            raise StorageFailed("the tier is closed")
        future = asyncio.run_coroutine_threadsafe(asyncio.wait_for(request, deadline_s), self._loop)
        try:
            return future.result()
        except FileNotFoundError:
            raise
        except CancelledError:
            raise StorageFailed("the tier is closed") from None
        except TimeoutError:
            raise StorageFailed(
                f"the object store did not answer within {deadline_s:g} s"
            ) from None
        except (BaseError, OSError) as error:
            raise StorageFailed(describe_failure(str(error))) from None

    # -- requests, on the event loop --

    async def sizes(self, paths: Sequence[str]) -> list[int | None]:
        """The size of each object, None if it does not exist."""
        limit = asyncio.Semaphore(MAX_PARALLEL_LOOKUPS)

        async def size(path: str) -> int | None:
            async with limit:
                return await self._size(path)

        return list(await asyncio.gather(*map(size, paths)))

    async def prefix(self, paths: Sequence[str]) -> int:
        """How many leading objects exist, if all objects before an existing one do."""
        low, high = 0, len(paths)
        while low < high:
            step = -(-(high - low) // PROBES_PER_ROUND)
            # The first and the last object: most prompts are new, or were seen as a whole.
            probed = sorted({*range(low, high, step), high - 1})
            sizes = await asyncio.gather(*(self._size(paths[index]) for index in probed))
            for index, size in zip(probed, sizes, strict=True):
                if size is None:
                    high = index
                    break
                low = index + 1
        return low

    async def _size(self, path: str) -> int | None:
        try:
            return (await self._store.head_async(path))["size"]
        except FileNotFoundError:
            return None

    async def get(self, path: str, max_bytes: int) -> tuple[int, memoryview]:
        """The object's size and bytes. Only the header of an object above `max_bytes` is read."""
        result = await self._store.get_async(path)
        stored_bytes = result.meta["size"]
        if stored_bytes > max_bytes:
            header = await self._store.get_range_async(path, start=0, end=HEADER_BYTES)
            return stored_bytes, memoryview(header)
        stored = memoryview(await result.bytes_async())
        return len(stored), stored

    async def put(self, path: str, header: bytes, payload: memoryview) -> None:
        # One request: a multipart upload that is cut off would leave parts in the bucket.
        await self._store.put_async(path, [header, payload], use_multipart=False)

    async def delete(self, paths: Sequence[str]) -> None:
        await self._store.delete_async(paths)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()


async def _cancel_all_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def describe_failure(error_text: str) -> str:
    """A sentence for an error of obstore, without the text, which may repeat an access key."""
    if (status := _STATUS.search(error_text)) is not None:
        advice = ""
        if status[1] in ("401", "403"):
            # A signature has a time: a store that does not accept it answers with 403 as well.
            advice = ": it does not accept the credentials, or this host's clock is wrong"
        return f"the object store answered with HTTP status {status[1]}{advice}"
    kind = _ERROR_KIND.search(error_text)
    return _KINDS.get(kind[1] if kind else "", "the connection to the object store broke")


def open_store(bucket: Bucket, deadlines: ObjectStoreDeadlines) -> "S3Store":
    try:
        from obstore.exceptions import BaseError
        from obstore.store import S3Store
    except ImportError as error:
        raise MissingDependency(
            "the object tier needs the package obstore, which is not installed; install it with: "
            "pip install 'kvferry[object]'"
        ) from error
    client: ClientConfig = {
        "connect_timeout": timedelta(seconds=deadlines.connect_s),
        "read_timeout": timedelta(seconds=deadlines.read_s),
        "timeout": timedelta(seconds=deadlines.transfer_s),
    }
    location: S3Config = {}
    if bucket.endpoint is not None:
        location["endpoint"] = bucket.endpoint
        client["allow_http"] = _scheme(bucket.endpoint) == "http"
    if bucket.region is not None:
        location["region"] = bucket.region
    retry: RetryConfig = {
        "max_retries": MAX_RETRIES,
        "retry_timeout": timedelta(seconds=deadlines.transfer_s),
        "backoff": {
            "init_backoff": timedelta(seconds=FIRST_RETRY_S),
            "max_backoff": timedelta(seconds=MAX_RETRY_S),
            "base": 2,
        },
    }
    try:
        return S3Store(
            bucket.name,
            prefix=bucket.prefix or None,
            config=location,
            client_options=client,
            retry_config=retry,
            credential_provider=_profile_credentials(bucket.profile) if bucket.profile else None,
        )
    except (BaseError, ValueError) as error:
        raise ConfigError(
            f"the object tier cannot use bucket {bucket.name!r}; correct its name, endpoint and "
            "region"
        ) from error


def _scheme(endpoint: str) -> str:
    """Check the endpoint and return `http` or `https`."""
    parts = urlsplit(endpoint)
    if parts.username is not None:
        raise ConfigError(
            f"the object tier's endpoint at {parts.hostname} contains credentials; give them in "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"the object tier's endpoint {without_password(endpoint)!r} is not a URL; write "
            "https://host:port"
        )
    return parts.scheme


def _profile_credentials(profile: str) -> "S3CredentialProvider":
    try:
        from boto3 import Session
        from botocore.exceptions import BotoCoreError
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise MissingDependency(
            "the object tier reads profiles in ~/.aws with the package boto3, which is not "
            "installed; install boto3, or give the credentials in AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY"
        ) from error
    try:
        return Boto3CredentialProvider(Session(profile_name=profile))
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(
            f"the profile {profile!r} in ~/.aws has no credentials; correct its name"
        ) from error
