"""What a bucket of an object store holds. `kvferry.tiers.object_store` has the objects' names."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvferry.errors import TransportError
from kvferry.tiers.inventory.base import (
    MAX_TEXT_BYTES,
    CheckResult,
    Condition,
    NamespaceSummary,
    NoteProgress,
    factors_of,
)
from kvferry.tiers.inventory.disk import PIECE_BYTES, checked
from kvferry.tiers.keys import NAMESPACE_FILE
from kvferry.tiers.object_store import (
    Bucket,
    ObjectStoreDeadlines,
    describe_failure,
    open_store,
)

if TYPE_CHECKING:
    from obstore import ObjectMeta

LIST_SIZE = 1000
"""Objects per request of a listing and of a removal: what S3 allows."""

_NAMESPACE = re.compile(r"[0-9a-f]{32}\Z")
_OBJECT = re.compile(r"[0-9a-f]{32}/[0-9a-f]{64}\Z")


class BucketInventory:
    """Implements `Inventory`. Other objects in the bucket are left alone."""

    tier = "object"

    def __init__(self, bucket: Bucket, secret: bytes = b"") -> None:
        """`check` needs the cluster's secret. Raises `ConfigError` if the settings cannot be right.
        Makes no request.
        """
        self._store = open_store(bucket, ObjectStoreDeadlines())
        self._bucket = bucket
        self._secret = secret

    @property
    def place(self) -> str:
        return "/".join(part for part in (self._bucket.name, self._bucket.prefix) if part)

    def namespaces(self) -> Iterator[str]:
        with _sentences():
            folders = self._store.list_with_delimiter(None)["common_prefixes"]
        yield from sorted(filter(_NAMESPACE.match, (path.rstrip("/") for path in folders)))

    def summary(self, namespace: str, note: NoteProgress) -> NamespaceSummary:
        num_objects, used_bytes, last_used = 0, 0, 0.0
        for found in self._objects(namespace):
            num_objects += 1
            used_bytes += found["size"]
            last_used = max(last_used, found["last_modified"].timestamp())
            note(num_objects)
        factors = self._factors(namespace)
        return NamespaceSummary(namespace, factors, num_objects, used_bytes, last_used)

    def objects(self, namespace: str) -> Iterator[str]:
        return (found["path"].rpartition("/")[2] for found in self._objects(namespace))

    def check(self, namespace: str, name: str) -> CheckResult:
        try:
            with _sentences():
                result = self._store.get(f"{namespace}/{name}")
                pieces = (memoryview(each) for each in result.stream(min_chunk_size=PIECE_BYTES))
                return checked(self._secret, namespace, name, result.meta["size"], pieces)
        except FileNotFoundError:
            return CheckResult(Condition.GONE)
        except TransportError as error:
            return CheckResult(Condition.UNCHECKED, f"cannot be read: {error}")

    def remove(self, namespace: str, names: Sequence[str]) -> int:
        with _sentences():
            self._store.delete([f"{namespace}/{name}" for name in names])
        return len(names)

    def clear(self, namespace: str, note: NoteProgress) -> int:
        num_gone = 0
        batch: list[str] = []
        for name in self.objects(namespace):
            batch.append(name)
            if len(batch) == LIST_SIZE:
                num_gone += self.remove(namespace, batch)
                note(num_gone)
                batch = []
        # An engine that is running does not write the description again.
        return num_gone + self.remove(namespace, [*batch, NAMESPACE_FILE]) - 1

    def _objects(self, namespace: str) -> "Iterator[ObjectMeta]":
        with _sentences():
            for page in self._store.list(namespace, chunk_size=LIST_SIZE):
                yield from (found for found in page if _OBJECT.match(found["path"]))

    def _factors(self, namespace: str) -> Mapping[str, Any] | None:
        try:
            with _sentences():
                text = self._store.get_range(
                    f"{namespace}/{NAMESPACE_FILE}", start=0, length=MAX_TEXT_BYTES
                )
        except (FileNotFoundError, TransportError):
            return None
        return factors_of(namespace, bytes(text))


@contextmanager
def _sentences() -> Iterator[None]:
    """Turn errors of obstore into `TransportError`, but for objects that do not exist."""
    from obstore.exceptions import BaseError

    try:
        yield
    except FileNotFoundError:
        raise
    except (BaseError, OSError) as error:
        # The text of the error is not passed on: it may repeat an access key.
        raise TransportError(describe_failure(str(error))) from None
