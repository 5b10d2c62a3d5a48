"""The requests to which vLLM gives blocks: how many blocks the next one lacks, so that retained
turns are evicted in time, and which ones load KV that vLLM must not use. Runs on the scheduler's
thread.

vLLM does not report that it had no blocks for a waiting request. But for each request that vLLM is
about to give blocks to, in queue order, vLLM asks the connector (`get_num_new_matched_tokens`); for
each request that got blocks, vLLM calls `update_state_after_alloc`; and vLLM stops at the first
request that got none. So the last request that was asked for and not admitted is the one that lacks
blocks. vLLM does not ask again for a request whose load has ended; that request is recognised by
its status.

Optional loads only save computation: if such a load fails, the engine computes the request, even if
vLLM's failure policy is `fail`. vLLM has one policy for all loads. So a worker reports an optional
load that failed as finished, and reports the failure to the scheduler's connector separately, which
then frees the request's blocks before vLLM looks at the request again, as vLLM itself does under
the policy `recompute`. The connector does the same with KV of old weights that arrives after a
reset.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.request import RequestStatus

_IN_QUEUE = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A waiting request that vLLM is about to give blocks to."""

    request: Any
    num_tokens: int
    """Tokens of the request that are already in the engine's cache."""
    will_load: bool


@dataclass(slots=True)
class _Load:
    """A load between steps, until vLLM goes on with its request."""

    request: Any
    has_ended: bool = False
    """On every rank; vLLM may not have looked at the request since."""
    is_void: bool = False
    """The KV must not be used; other ranks may still be loading."""


@dataclass(slots=True)
class Admissions:
    """vLLM's requests, from the lookup of what they can load until they end."""

    block_size: int
    num_groups: int
    """The number of groups with attention."""
    num_state_groups: int = 0
    """The number of groups whose layers keep a state, in one block per request."""
    watermark: int = 0
    """The number of blocks that vLLM leaves free when it admits a request from the queue."""
    _admitted: dict[str, Any] = field(default_factory=dict)
    """vLLM's requests that were given blocks and have not ended."""
    _will_load: set[str] = field(default_factory=set)
    """The requests whose last lookup found a load between steps. vLLM may admit them later."""
    _loads: dict[str, _Load] = field(default_factory=dict)
    _candidate: _Candidate | None = None
    _largest: int = 1
    """The largest number of tokens of one request in the last step."""

    def looked_up(self, request: Any, num_local_tokens: int, *, will_load: bool) -> None:
        """vLLM is about to give blocks to a request."""
        self._candidate = _Candidate(request, num_local_tokens, will_load)
        self._will_load.discard(request.request_id)
        if will_load:
            self._will_load.add(request.request_id)

    def skip(self) -> None:
        """vLLM will not give blocks in this step to the request it asked for last."""
        self._candidate = None

    def admit(self, request: Any, num_external_tokens: int) -> bool:
        """vLLM has given blocks to a request. Return whether a load between steps begins."""
        self._candidate = None
        self._admitted[request.request_id] = request
        if not num_external_tokens:
            self._go_on(request.request_id)
            return False
        if request.request_id not in self._will_load:
            return False
        # A request that was preempted since its last load may load again.
        self._loads[request.request_id] = _Load(request)
        return True

    def end(self, request_id: str) -> None:
        self._admitted.pop(request_id, None)
        self._will_load.discard(request_id)
        self._go_on(request_id)

    def _go_on(self, request_id: str) -> None:
        if (load := self._loads.get(request_id)) is not None and load.has_ended:
            del self._loads[request_id]

    # -- loads whose KV must not be used --

    def void_loads(self, request_ids: Collection[str]) -> None:
        """Let no request use what these loads bring: optional loads that failed on some rank."""
        for request_id in self._loads.keys() & set(request_ids):
            self._loads[request_id].is_void = True

    def end_loads(
        self, finished: Collection[str], failed: Collection[str], manager: Any
    ) -> set[str]:
        """Process loads that have ended on every rank and return those whose KV must not be used.
        `failed` are the loads that failed for vLLM, which handles their requests itself.
        """
        ended = {
            request_id: self._loads[request_id] for request_id in self._loads.keys() & set(finished)
        }
        void = {request_id for request_id, load in ended.items() if load.is_void}
        for request_id, load in ended.items():
            load.has_ended = True
            if request_id in void or request_id in failed:
                del self._loads[request_id]
        for request_id in void - set(failed):
            _start_over(ended[request_id].request, manager)
        return void

    def reset_loads(self, manager: Any) -> None:
        """Let no request use KV that was loaded for it before now."""
        ended = [request_id for request_id, load in self._loads.items() if load.has_ended]
        for request_id in ended:
            _start_over(self._loads.pop(request_id).request, manager)
        self.void_loads(self._loads)

    # -- blocks that a request lacks --

    def step_planned(self, scheduler_output: Any) -> None:
        self._largest = max(scheduler_output.num_scheduled_tokens.values(), default=1)

    def missing_to_run(self, num_free: int) -> int:
        """How many blocks a running request lacks: at least one, since vLLM reports only that the
        request got none.
        """
        return max(1, self._blocks(self._largest) - num_free)

    def missing_to_start(self, num_free: int) -> int:
        """How many blocks the request lacks at which vLLM's schedule stopped; 0 if the schedule
        stopped for another reason or not at all.
        """
        stopped_at, self._candidate = self._stopped_at(), None
        if stopped_at is None:
            return 0
        request = stopped_at.request
        # vLLM lets no load take blocks that running prefills will need.
        others = (
            [other for other in self._admitted.values() if other is not request]
            if stopped_at.will_load
            else []
        )
        need = self._blocks(request.num_tokens) + self.num_state_groups + self.watermark
        reserved = sum(self._left(other) for other in others if other.num_computed_tokens > 0)
        # An upper bound: the request's cached tokens may lie in free blocks, requests admitted in
        # this step may still need all of their blocks, and speculated tokens take a block or two.
        new = sum(
            self._left(other)
            for other in others
            if other.status == RequestStatus.RUNNING and other.num_computed_tokens == 0
        )
        num_groups = self.num_groups + self.num_state_groups
        upper_bound = need + reserved + new + num_groups * (1 + len(others))
        return (
            0
            if num_free >= upper_bound
            else max(1, need + reserved - self._blocks(stopped_at.num_tokens) - num_free)
        )

    def _stopped_at(self) -> _Candidate | None:
        """The request at which the schedule stopped. A request whose load has ended precedes the
        candidate.
        """
        for request in (load.request for load in self._loads.values()):
            if request.status in _IN_QUEUE and request.num_computed_tokens > 0:
                return _Candidate(request, request.num_computed_tokens, will_load=False)
        return self._candidate

    def _left(self, request: Any) -> int:
        """How many blocks the tokens not computed yet will take."""
        return max(0, self._blocks(request.num_tokens) - self._blocks(request.num_computed_tokens))

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size) * self.num_groups


def _start_over(request: Any, manager: Any) -> None:
    """Free the blocks of a request whose load has ended, unless vLLM has gone on with the request
    or has aborted it.
    """
    if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
        manager.free(request)
        request.num_computed_tokens = 0
