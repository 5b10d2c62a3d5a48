"""What a rank's offload worker reports to the engine's thread, and what it still has to answer."""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from kvferry.tiers.base import TierUsage
from kvferry.tiers.commands import (
    EndStores,
    LoadChunks,
    LoadEnded,
    OffloadCommand,
    OffloadEvent,
    StoreChunks,
    StoresCopied,
    StoresEnded,
    TierCounts,
)


class WorkerReports:
    """Events, counters and the fill of the tiers. Written by the worker's thread, taken by the
    engine's. If the jobs fail, at any line, `answer_all` answers all that the engine waits for.
    """

    def __init__(self) -> None:
        self._events: deque[OffloadEvent] = deque()
        self._wake_engine: Callable[[], None] = _no_wakeup
        self._counts: TierCounts = {}
        self._counts_lock = threading.Lock()
        self._usage: Mapping[str, TierUsage] = {}
        self._has_work = False
        self._unanswered_loads: set[str] = set()
        self._unanswered_ends: set[str] = set()
        self._last_store = 0

    # -- the engine's thread --

    def set_wakeup(self, wake: Callable[[], None]) -> None:
        self._wake_engine = wake

    def take_events(self) -> list[OffloadEvent]:
        return [self._events.popleft() for _ in range(len(self._events))]

    def take_counts(self) -> TierCounts:
        with self._counts_lock:
            counts, self._counts = self._counts, {}
        return counts

    def usage(self) -> dict[str, TierUsage]:
        return dict(self._usage)

    @property
    def is_busy(self) -> bool:
        """Whether the worker has work, or reports wait to be taken."""
        return self._has_work or bool(self._counts) or bool(self._events)

    # -- the worker's thread --

    def expect(self, commands: Sequence[OffloadCommand]) -> None:
        """Note what the engine waits for."""
        for command in commands:
            match command:
                case LoadChunks(request):
                    self._unanswered_loads.add(request)
                case EndStores(request):
                    self._unanswered_ends.add(request)
                case StoreChunks(number=number):
                    self._last_store = max(self._last_store, number)

    def send(self, events: Sequence[OffloadEvent]) -> None:
        for event in events:
            match event:
                case LoadEnded(request):
                    self._unanswered_loads.discard(request)
                case StoresEnded(request):
                    self._unanswered_ends.discard(request)
        self._events.extend(events)
        self._wake_engine()

    def answer_all(self, failure: str) -> None:
        """Send an answer to all that the engine waits for: loads have failed, stores have ended,
        and no work is left.
        """
        self._has_work = False
        self.send(
            [
                StoresCopied(self._last_store),
                *(LoadEnded(request, failure) for request in sorted(self._unanswered_loads)),
                *(StoresEnded(request) for request in sorted(self._unanswered_ends)),
            ]
        )

    def update(self, counts: TierCounts, usage: Mapping[str, TierUsage], *, has_work: bool) -> None:
        """Add counters, and replace the fill of the tiers."""
        if counts:
            with self._counts_lock:
                for tier, row in counts.items():
                    total = self._counts.setdefault(tier, {})
                    for name, value in row.items():
                        total[name] = total.get(name, 0) + value
        self._has_work = has_work
        self._usage = usage


def _no_wakeup() -> None:
    return None
