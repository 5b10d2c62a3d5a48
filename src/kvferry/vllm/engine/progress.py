"""The progress of requests whose KV is transferred or saved while it is computed. Runs on the
scheduler's thread.

vLLM counts a token as computed when the token's step is scheduled. This module counts a token when
vLLM has processed the output of that step: only then has every device written the token's KV. The
rule covers tokens from the prefix cache too: a step still in flight may be the step that fills
their blocks, but that step is over once a later step of this request is over. After a preemption
the count is 0 until the next processed step, so that the published blocks are withdrawn, even if
vLLM resumes the request at once.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

BlockTables = Callable[[str], tuple[list[int], ...]]


@dataclass(slots=True)
class PrefillProgress:
    """The progress of one request."""

    request: Any
    """vLLM's request object."""
    _first: int = 0
    """How many tokens the request had from the cache when vLLM last took the request from the
    queue.
    """
    _num_preemptions: int = -1
    """The request's preemption count at that time; -1 if the request has never left the queue."""

    def note_start(self, first: int) -> None:
        self._first, self._num_preemptions = first, self.request.num_preemptions

    @property
    def num_computed_tokens(self) -> int:
        """The number of tokens whose KV every device has written."""
        if self.request.num_preemptions != self._num_preemptions:
            return 0
        processed = int(self.request.num_computed_tokens) - int(self.request.num_in_flight_tokens)
        return processed if processed > self._first else 0


@dataclass(frozen=True, slots=True)
class VllmSlice:
    """An implementation of the contract's `ScheduledSlice`."""

    progress: PrefillProgress
    num_tokens: int
    tables: BlockTables

    @property
    def request_id(self) -> str:
        return str(self.progress.request.request_id)

    @property
    def start(self) -> int:
        return int(self.progress.request.num_computed_tokens)

    @property
    def num_written(self) -> int:
        return self.progress.num_computed_tokens

    @property
    def block_ids(self) -> tuple[tuple[int, ...], ...]:
        return tuple(map(tuple, self.tables(self.request_id)))


@dataclass(frozen=True, slots=True)
class VllmStep:
    """An implementation of the contract's `Step`, with vLLM's own object for the connectors of
    vLLM.
    """

    scheduler_output: Any
    slices: tuple[VllmSlice, ...]

    @property
    def preempted_req_ids(self) -> frozenset[str]:
        return frozenset(self.scheduler_output.preempted_req_ids or ())

    @property
    def total_num_scheduled_tokens(self) -> int:
        return int(self.scheduler_output.total_num_scheduled_tokens)


@dataclass(slots=True)
class PrefillProgressTable:
    """The requests that a connector follows, waiting or running.

    Every request that holds blocks is examined in every step, even if the step does not compute
    the request: an earlier step of the request may just have ended.
    """

    _waiting: dict[str, PrefillProgress] = field(default_factory=dict)
    _running: dict[str, PrefillProgress] = field(default_factory=dict)
    _parked: dict[str, PrefillProgress] = field(default_factory=dict)
    """Running requests that steps do not list until they are preempted and start again."""

    def get(self, request_id: str) -> PrefillProgress | None:
        return (
            self._running.get(request_id)
            or self._parked.get(request_id)
            or self._waiting.get(request_id)
        )

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running) + len(self._parked)

    def add(self, request: Any) -> PrefillProgress:
        progress = self._waiting[str(request.request_id)] = PrefillProgress(request)
        return progress

    def end(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)
        self._running.pop(request_id, None)
        self._parked.pop(request_id, None)

    def park(self, request_id: str) -> None:
        """Do not list a running request in later steps, unless it is preempted and starts again."""
        self._parked[request_id] = self._running.pop(request_id)

    def running(self) -> Iterator[tuple[str, Any]]:
        """The ids and vLLM's objects of the running requests that are not parked."""
        return ((name, progress.request) for name, progress in self._running.items())

    def plan(self, scheduler_output: Any, tables: BlockTables) -> VllmStep:
        for request_id in scheduler_output.preempted_req_ids or ():
            for started in (self._running, self._parked):
                if request_id in started:
                    self._waiting[request_id] = started.pop(request_id)
        for request_id, first in _starts(scheduler_output):
            if request_id in self._waiting:
                progress = self._running[request_id] = self._waiting.pop(request_id)
                progress.note_start(first)
        counts = scheduler_output.num_scheduled_tokens
        return VllmStep(
            scheduler_output,
            tuple(
                VllmSlice(progress, counts.get(name, 0), tables)
                for name, progress in self._running.items()
            ),
        )


def _starts(scheduler_output: Any) -> Iterator[tuple[str, int]]:
    """Requests that this step takes from the queue, with the number of tokens each already has."""
    for new in scheduler_output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens
    cached = scheduler_output.scheduled_cached_reqs
    for request_id, first in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        if request_id in cached.resumed_req_ids:
            yield request_id, first
