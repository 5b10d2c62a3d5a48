"""How far prefills have come whose KV is handed over while they are computed. Runs on the
scheduler's thread.

vLLM counts a token as computed when its step is planned. Here it counts when vLLM has taken that
step's output: only then has every device written its KV. That goes for tokens from the prefix cache
too: a step that is still under way may be the one that fills their blocks, but it is over once a
later step of this request is. A preemption sets the count to 0 for as long, so that what was said
of the blocks before is taken back, also where vLLM resumes a request at once.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

__all__ = ["PrefillProgress", "PrefillProgressTable", "PrefillSlice", "PrefillSlices"]

BlockTables = Callable[[str], tuple[list[int], ...]]


@dataclass(slots=True)
class PrefillProgress:
    request: Any
    """vLLM's."""
    _first: int = 0
    """So many tokens it had from the cache when it was last taken from the queue."""
    _num_preemptions: int = -1
    """How often it had been put back into the queue by then; -1: it has never left it."""

    def note_start(self, first: int) -> None:
        self._first, self._num_preemptions = first, self.request.num_preemptions

    @property
    def num_computed_tokens(self) -> int:
        if self.request.num_preemptions != self._num_preemptions:
            return 0
        processed = int(self.request.num_computed_tokens) - int(self.request.num_in_flight_tokens)
        return processed if processed > self._first else 0


@dataclass(frozen=True, slots=True)
class PrefillSlice:
    """The contract's `ScheduledSlice`."""

    request_id: str
    start: int
    tables: BlockTables

    @property
    def block_ids(self) -> tuple[tuple[int, ...], ...]:
        return tuple(map(tuple, self.tables(self.request_id)))


@dataclass(frozen=True, slots=True)
class PrefillSlices:
    """What our connectors want to know of a step."""

    slices: tuple[PrefillSlice, ...]


@dataclass(slots=True)
class PrefillProgressTable:
    """Those that hold blocks are looked at in every step, whether it computes them or not: the step
    before may just have ended.
    """

    _waiting: dict[str, PrefillProgress] = field(default_factory=dict)
    _running: dict[str, PrefillProgress] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    def add(self, request: Any) -> PrefillProgress:
        progress = self._waiting[str(request.request_id)] = PrefillProgress(request)
        return progress

    def end(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)
        self._running.pop(request_id, None)

    def plan(self, scheduler_output: Any, tables: BlockTables) -> PrefillSlices:
        for request_id in scheduler_output.preempted_req_ids or ():
            if request_id in self._running:
                self._waiting[request_id] = self._running.pop(request_id)
        for request_id, first in _starts(scheduler_output):
            if request_id in self._waiting:
                progress = self._running[request_id] = self._waiting.pop(request_id)
                progress.note_start(first)
        return PrefillSlices(
            tuple(
                PrefillSlice(name, progress.num_computed_tokens, tables)
                for name, progress in self._running.items()
            )
        )


def _starts(scheduler_output: Any) -> Iterator[tuple[str, int]]:
    """Requests that this step takes from the queue, and how many tokens they have."""
    for new in scheduler_output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens
    cached = scheduler_output.scheduled_cached_reqs
    for request_id, first in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        if request_id in cached.resumed_req_ids:
            yield request_id, first
