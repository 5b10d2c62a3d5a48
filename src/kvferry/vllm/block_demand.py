"""Who in vLLM lacks how many blocks, so that turns of conversations are let go for them. Runs on
the scheduler's thread.

vLLM does not say that it had no blocks for a waiting request. But it asks a connector for each one
that it is about to give blocks to, in the order of its queue, tells it of each one that got some,
and stops at the first that got none. One whose load has ended it does not ask for again: that one
is told by its state.
"""

from dataclasses import dataclass, field
from typing import Any

from vllm.v1.request import RequestStatus

__all__ = ["BlockDemand"]

_IN_QUEUE = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


@dataclass(frozen=True, slots=True)
class _Candidate:
    request: Any
    num_tokens: int
    """That it has already."""
    will_load: bool


@dataclass(slots=True)
class BlockDemand:
    block_size: int
    num_groups: int
    watermark: int = 0
    """Blocks that vLLM leaves free when it takes a request from its queue."""
    _admitted: dict[str, Any] = field(default_factory=dict)
    """vLLM's requests that have had blocks and have not ended."""
    _loading: dict[str, Any] = field(default_factory=dict)
    """Of these, those that were given blocks to load into, and not yet those to compute in."""
    _candidate: "_Candidate | None" = None
    _largest: int = 1
    """Tokens of one request in the last step."""

    def __len__(self) -> int:
        return len(self._admitted) + len(self._loading)

    def note_candidate(self, request: Any, num_local_tokens: int, *, will_load: bool) -> None:
        self._candidate = _Candidate(request, num_local_tokens, will_load)

    def note_skipped(self) -> None:
        """The one asked for last is not to get blocks now."""
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
        """How many blocks a running request lacks, of which nothing is known but that it got none:
        at least one.
        """
        return max(1, self._blocks(self._largest) - num_free)

    def missing_to_start(self, num_free: int) -> int:
        """How many blocks were lacking for the request at which this plan stopped; 0: it stopped at
        none, or for another reason.
        """
        stopped_at, self._candidate = self._stopped_at(), None
        if stopped_at is None:
            return 0
        request = stopped_at.request
        # vLLM lets no load take what prefills under way are going to need.
        others = (
            [other for other in self._admitted.values() if other is not request]
            if stopped_at.will_load
            else []
        )
        need = self._blocks(request.num_tokens) + self.watermark
        reserved = sum(self._left(other) for other in others if other.num_computed_tokens > 0)
        # At most: what it has in the cache may lie in free blocks, those admitted in this very step
        # may still want all of theirs, and speculated tokens take a block or two.
        new = sum(
            self._left(other)
            for other in others
            if other.status == RequestStatus.RUNNING and other.num_computed_tokens == 0
        )
        upper_bound = need + reserved + new + self.num_groups * (1 + len(others))
        return (
            0
            if num_free >= upper_bound
            else max(1, need + reserved - self._blocks(stopped_at.num_tokens) - num_free)
        )

    def _stopped_at(self) -> "_Candidate | None":
        for request in self._loading.values():
            if request.status in _IN_QUEUE and request.num_computed_tokens > 0:
                return _Candidate(request, request.num_computed_tokens, will_load=False)
        return self._candidate

    def _left(self, request: Any) -> int:
        return max(0, self._blocks(request.num_tokens) - self._blocks(request.num_computed_tokens))

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size) * self.num_groups
