"""How many blocks vLLM lacks, so that retained turns are evicted in time. Runs on the scheduler's
thread.

vLLM does not report that it had no blocks for a waiting request. But for each request that vLLM is
about to give blocks to, in queue order, vLLM asks the connector (`get_num_new_matched_tokens`); for
each request that got blocks, vLLM calls `update_state_after_alloc`; and vLLM stops at the first
request that got none. So the last request that was asked for and not admitted is the one that lacks
blocks. vLLM does not ask again for a request whose load has ended; that request is recognised by
its status.
"""

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
class BlockDemand:
    """Tracks which request vLLM could not give blocks to, and how many blocks were missing."""

    block_size: int
    num_groups: int
    """The number of groups with attention."""
    num_state_groups: int = 0
    """The number of groups whose layers keep a state, in one block per request."""
    watermark: int = 0
    """The number of blocks that vLLM leaves free when it admits a request from the queue."""
    _admitted: dict[str, Any] = field(default_factory=dict)
    """vLLM's requests that were given blocks and have not ended."""
    _loading: dict[str, Any] = field(default_factory=dict)
    """The subset of `_admitted` that was given blocks to load into, but not yet blocks to compute
    in.
    """
    _candidate: "_Candidate | None" = None
    _largest: int = 1
    """The largest number of tokens of one request in the last step."""

    def __len__(self) -> int:
        return len(self._admitted) + len(self._loading)

    def note_candidate(self, request: Any, num_local_tokens: int, *, will_load: bool) -> None:
        self._candidate = _Candidate(request, num_local_tokens, will_load)

    def note_skipped(self) -> None:
        """vLLM will not give blocks in this step to the request it asked for last."""
        self._candidate = None

    def note_admitted(self, request: Any, num_external_tokens: int) -> None:
        self._candidate = None
        self._admitted[request.request_id] = request
        if num_external_tokens:
            self._loading[request.request_id] = request
        else:
            self._loading.pop(request.request_id, None)

    def end(self, request_id: str) -> None:
        self._admitted.pop(request_id, None)
        self._loading.pop(request_id, None)

    def note_planned(self, scheduler_output: Any) -> None:
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

    def _stopped_at(self) -> "_Candidate | None":
        """The request at which the schedule stopped. A request whose load has ended precedes the
        candidate.
        """
        for request in self._loading.values():
            if request.status in _IN_QUEUE and request.num_computed_tokens > 0:
                return _Candidate(request, request.num_computed_tokens, will_load=False)
        return self._candidate

    def _left(self, request: Any) -> int:
        """How many blocks the tokens not computed yet will take."""
        return max(0, self._blocks(request.num_tokens) - self._blocks(request.num_computed_tokens))

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size) * self.num_groups
