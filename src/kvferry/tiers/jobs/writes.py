"""Writes rows of the host pool to the slower tiers. Pure."""

from collections import OrderedDict
from dataclasses import dataclass, field

from kvferry.tiers.base import ObjectKey, StoreOutcome, StoreResult
from kvferry.tiers.commands import Chunk
from kvferry.tiers.jobs.outbox import JobOutbox
from kvferry.tiers.jobs.rows import JobRows
from kvferry.tiers.jobs.tasks import WriteObject

MAX_KNOWN_OBJECTS = 65_536
KNOWN_FOR_S = 60.0
"""How long a tier that was seen to have an object is not offered it again. The tier may evict the
object in that time.
"""


@dataclass(slots=True)
class WriteJobs:
    """The writes that have not ended, and which objects the slower tiers were seen to have."""

    tiers: tuple[str, ...]
    """The fastest first."""
    rows: JobRows
    outbox: JobOutbox
    _num_active: int = field(default=0, init=False)
    _known: OrderedDict[tuple[str, ObjectKey], float] = field(
        default_factory=OrderedDict, init=False
    )
    """The objects that tiers had, or began to get, at these times."""

    def begin(self, chunk: Chunk, row: int, now: float) -> None:
        """Write a row to the tiers that lack it."""
        pool = self.rows.pool
        for tier in self.lacking(chunk, now):
            # Half of the rows stay free of slow writers, so that loads always find a row.
            if 2 * self._num_active >= pool.num_rows:
                self.outbox.count(tier, "dropped_stores")
                continue
            pool.pin(row)
            self.note_known(tier, chunk.key, now)
            size_bytes = self.rows.size(chunk)
            self.outbox.start(
                WriteObject(self.outbox.next_task_id(), tier, chunk.key, row, size_bytes)
            )
            self._num_active += 1

    def complete(self, task: WriteObject, result: StoreResult, seconds: float) -> None:
        count = self.outbox.count
        count(task.tier, "store_seconds", seconds)
        self._num_active -= 1
        self.rows.pool.unpin(task.row)
        match result.outcome:
            case StoreOutcome.STORED:
                count(task.tier, "stores")
                count(task.tier, "stored_bytes", task.size_bytes)
            case StoreOutcome.DROPPED:
                count(task.tier, "dropped_stores")
            case StoreOutcome.FAILED:
                count(task.tier, "failed_stores")
            case StoreOutcome.PRESENT:
                pass
        if result.outcome in (StoreOutcome.STORED, StoreOutcome.PRESENT):
            self.outbox.note_held(task.tier, task.key)
        else:
            self.forget(task.tier, task.key)

    def lacking(self, chunk: Chunk, now: float) -> list[str]:
        """The tiers that shall have the chunk and were not seen to have it lately."""
        never = float("-inf")
        return [
            tier
            for tier in self.tiers
            if tier in chunk.tiers
            and now - self._known.get((tier, chunk.key), never) >= KNOWN_FOR_S
        ]

    def note_known(self, tier: str, key: ObjectKey, now: float) -> None:
        """Note that a tier has an object, or begins to get it."""
        self._known[tier, key] = now
        self._known.move_to_end((tier, key))
        if len(self._known) > MAX_KNOWN_OBJECTS:
            self._known.popitem(last=False)

    def forget(self, tier: str, key: ObjectKey) -> None:
        """Note that a tier may lack an object."""
        self._known.pop((tier, key), None)

    def forget_all(self) -> None:
        self._known.clear()
