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

from kvferry.connectors.contract import BlockTables


@dataclass(slots=True)
class PrefillProgress:
    """The progress of one request. In a step it is the contract's `ScheduledSlice`."""

    request: Any
    """vLLM's request object."""
    tables: Callable[[str], BlockTables]
    num_tokens: int = 0
    """How many tokens the step computes that was planned last."""
    _first: int = 0
    """How many tokens the request had from the cache when vLLM last took the request from the
    queue.
    """
    _num_preemptions: int = -1
    """The request's preemption count at that time; -1 if the request has never left the queue."""

    def started(self, first: int) -> None:
        self._first, self._num_preemptions = first, self.request.num_preemptions

    @property
    def request_id(self) -> str:
        return str(self.request.request_id)

    @property
    def start(self) -> int:
        return int(self.request.num_computed_tokens)

    @property
    def num_written(self) -> int:
        """The number of tokens whose KV every device has written."""
        if self.request.num_preemptions != self._num_preemptions:
            return 0
        processed = self.start - int(self.request.num_in_flight_tokens)
        return processed if processed > self._first else 0

    @property
    def block_ids(self) -> tuple[tuple[int, ...], ...]:
        return tuple(map(tuple, self.tables(self.request_id)))


@dataclass(frozen=True, slots=True)
class VllmStep:
    """An implementation of the contract's `Step`, with vLLM's own object for the connectors of
    vLLM.
    """

    scheduler_output: Any
    slices: tuple[PrefillProgress, ...]

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

    tables: Callable[[str], BlockTables]
    _followed: dict[str, PrefillProgress] = field(default_factory=dict)
    _listed: dict[str, PrefillProgress] = field(default_factory=dict)
    """The requests that hold blocks and are not parked."""

    def get(self, request_id: str) -> PrefillProgress | None:
        return self._followed.get(request_id)

    def __len__(self) -> int:
        return len(self._followed)

    def add(self, request: Any) -> None:
        self._followed[str(request.request_id)] = PrefillProgress(request, self.tables)

    def end(self, request_id: str) -> None:
        self._followed.pop(request_id, None)
        self._listed.pop(request_id, None)

    def park(self, request_id: str) -> None:
        """Do not list a running request in later steps, unless it is preempted and starts again."""
        del self._listed[request_id]

    def running(self) -> Iterator[Any]:
        """vLLM's objects of the running requests that are not parked."""
        return (progress.request for progress in self._listed.values())

    def plan(self, scheduler_output: Any) -> VllmStep:
        for request_id in scheduler_output.preempted_req_ids or ():
            self._listed.pop(request_id, None)
        for request_id, first in _starts(scheduler_output):
            if request_id in self._followed and request_id not in self._listed:
                progress = self._listed[request_id] = self._followed[request_id]
                progress.started(first)
        for request_id, progress in self._listed.items():
            progress.num_tokens = scheduler_output.num_scheduled_tokens.get(request_id, 0)
        return VllmStep(scheduler_output, tuple(self._listed.values()))


def _starts(scheduler_output: Any) -> Iterator[tuple[str, int]]:
    """Requests that this step takes from the queue, with the number of tokens each already has."""
    for new in scheduler_output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens
    cached = scheduler_output.scheduled_cached_reqs
    for request_id, first in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        if request_id in cached.resumed_req_ids:
            yield request_id, first
