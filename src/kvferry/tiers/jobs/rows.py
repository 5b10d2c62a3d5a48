"""The rows of the host pool as a rank's jobs use them. Pure."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from kvferry.tiers.base import ObjectKey
from kvferry.tiers.commands import POOL, Chunk
from kvferry.tiers.jobs.outbox import JobOutbox
from kvferry.tiers.pool.host_pool import HostPool
from kvferry.tiers.pool.reader import StoredRow

MAX_DISTRUSTED = 4096

T = TypeVar("T")


@dataclass(slots=True)
class JobRows:
    """The pool, and the rows of other engines that must not be used."""

    pool: HostPool
    row_bytes: tuple[int, ...]
    """The size of a chunk in each KV-cache group."""
    outbox: JobOutbox
    is_tier: bool
    """If not, a row is free as soon as it was copied and written."""
    _distrusted: OrderedDict[ObjectKey, int] = field(default_factory=OrderedDict, init=False)
    """Rows of other engines that were found damaged, with their checksums."""

    def size(self, chunk: Chunk) -> int:
        return self.row_bytes[chunk.group]

    def find(self, key: ObjectKey) -> StoredRow | None:
        """Where the object is in the pool, in a row that may be used."""
        found = self.pool.find(key)
        if found is not None and found.row is None and self._distrusted.get(key) == found.checksum:
            return None
        return found

    def distrust(self, key: ObjectKey, stored: StoredRow) -> None:
        """Do not use a row again. A row of another engine cannot be removed, only ignored."""
        if stored.row is not None:
            self.pool.remove(key)
            self.outbox.note_gone(POOL, key)
            return
        self._distrusted[key] = stored.checksum
        if len(self._distrusted) > MAX_DISTRUSTED:
            self._distrusted.popitem(last=False)

    def publish(self, key: ObjectKey, row: int, checksum: int) -> bool:
        """Let loads find a row. False if the pool was cleared while the row was written. The caller
        calls `release` when it has pinned the row for everything that still needs it.
        """
        is_published = self.pool.publish(row, checksum)
        if is_published:
            self.outbox.note_held(POOL, key)
        return is_published

    def release(self, key: ObjectKey) -> None:
        """Keep a row only if the pool is a tier. Pins keep its bytes until they are used."""
        if not self.is_tier:
            self.pool.remove(key)


def batches(items: Iterable[T], size_of: Callable[[T], int], max_bytes: int) -> Iterator[list[T]]:
    """Batches of at most `max_bytes`, but at least one item, in order. Takes items lazily."""
    batch: list[T] = []
    batch_bytes = 0
    for item in items:
        size = size_of(item)
        if batch and batch_bytes + size > max_bytes:
            yield batch
            batch, batch_bytes = [], 0
        batch.append(item)
        batch_bytes += size
    if batch:
        yield batch
