"""What a rank's jobs hand to the thread of the worker: tasks, events and counters. Pure."""

from dataclasses import dataclass, field

from kvferry.tiers.base import ObjectKey
from kvferry.tiers.commands import POOL, OffloadEvent, TierCounts
from kvferry.tiers.jobs.contents import TierContents
from kvferry.tiers.jobs.tasks import Task


@dataclass(slots=True)
class JobOutbox:
    """Collects tasks and reports of all jobs until they are taken, and knows the tasks that have
    not ended.
    """

    contents: TierContents | None
    """Without it, no event says what the tiers hold."""
    is_pool_tier: bool
    """If not, nothing is reported of the host pool."""
    _last_task: int = field(default=0, init=False)
    _open_tasks: dict[int, Task] = field(default_factory=dict, init=False)
    _new_tasks: list[Task] = field(default_factory=list, init=False)
    _events: list[OffloadEvent] = field(default_factory=list, init=False)
    _counts: TierCounts = field(default_factory=dict, init=False)

    def next_task_id(self) -> int:
        self._last_task += 1
        return self._last_task

    def start(self, task: Task) -> None:
        self._new_tasks.append(task)
        self._open_tasks[task.task_id] = task

    def end(self, task_id: int) -> Task:
        return self._open_tasks.pop(task_id)

    @property
    def has_open_tasks(self) -> bool:
        return bool(self._open_tasks)

    def report(self, event: OffloadEvent) -> None:
        self._events.append(event)

    def count(self, tier: str, name: str, by: float = 1) -> None:
        if self._is_reported(tier):
            row = self._counts.setdefault(tier, {})
            row[name] = row.get(name, 0) + by

    def note_held(self, tier: str, key: ObjectKey) -> None:
        if self.contents is not None and self._is_reported(tier):
            self.contents.add(tier, key)

    def note_gone(self, tier: str, key: ObjectKey) -> None:
        if self.contents is not None:
            self.contents.remove(tier, key)

    def take_tasks(self) -> list[Task]:
        tasks, self._new_tasks = self._new_tasks, []
        return tasks

    def take_events(self) -> list[OffloadEvent]:
        change = None if self.contents is None else self.contents.take_change()
        if change is not None:
            self._events.append(change)
        events, self._events = self._events, []
        return events

    def take_counts(self) -> TierCounts:
        counts, self._counts = self._counts, {}
        return counts

    def _is_reported(self, tier: str) -> bool:
        return tier != POOL or self.is_pool_tier
