"""Loads that only save computing: when one fails, the request is computed, also where vLLM's policy is `fail`.

vLLM knows one policy for all loads. So a worker does not report such a failure as one: it says that the load has ended, and the failure
goes to the scheduler's connector beside it. That gives the request's blocks back before vLLM looks at it again, as vLLM itself does under
the policy `recompute`.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.request import RequestStatus

__all__ = ["OptionalLoadFailures", "OptionalLoads"]


@dataclass(slots=True)
class OptionalLoads:
    """The scheduler's."""

    _loading: dict[str, Any] = field(default_factory=dict)
    """vLLM's requests."""
    _failed: set[str] = field(default_factory=set)
    """On some rank; others may still be loading."""
    _unannounced: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._loading) + len(self._failed) + len(self._unannounced)

    def begin(self, request: Any) -> None:
        self._loading[request.request_id] = request
        self._unannounced.append(request.request_id)

    def take_unannounced(self) -> tuple[str, ...]:
        """Those the workers have yet to hear of."""
        unannounced, self._unannounced = tuple(self._unannounced), []
        return unannounced

    def note_failed(self, request_ids: Collection[str]) -> None:
        self._failed.update(self._loading.keys() & set(request_ids))

    def end(self, finished: Collection[str], manager: Any) -> set[str]:
        """Those have ended on every rank: which failed. Each of them is as if it had never been loaded."""
        ended = {request_id: self._loading.pop(request_id) for request_id in self._loading.keys() & set(finished)}
        failed = self._failed & ended.keys()
        self._failed -= failed
        for request in (ended[request_id] for request_id in failed):
            # One that was aborted in the meantime gives its blocks back in vLLM's own way.
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                manager.free(request)
                request.num_computed_tokens = 0
        return failed


@dataclass(slots=True)
class OptionalLoadFailures:
    """A worker's."""

    _optional: set[str] = field(default_factory=set)
    _failed: set[str] = field(default_factory=set)

    def add_optional(self, request_ids: Collection[str]) -> None:
        self._optional.update(request_ids)

    def remove_optional(self, finished: Collection[str], failed: set[str]) -> set[str]:
        """What is left of `failed` to be reported to vLLM."""
        excused = self._optional & failed
        self._failed |= excused
        self._optional.difference_update(finished)
        return failed - excused

    def take_failed(self) -> frozenset[str]:
        failed, self._failed = frozenset(self._failed), set()
        return failed
