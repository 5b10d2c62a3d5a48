"""Loads whose KV vLLM must not use, although the load has not failed for vLLM.

Optional loads only save computation: if such a load fails, the engine computes the request, even if
vLLM's failure policy is `fail`. vLLM has one policy for all loads. So a worker reports an optional
load that failed as finished, and reports the failure to the scheduler's connector separately. The
scheduler's connector then frees the request's blocks before vLLM looks at the request again, as
vLLM itself does under the policy `recompute`. The connector does the same with KV of old weights
that arrives after a reset.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.request import RequestStatus


@dataclass(slots=True)
class RemoteLoads:
    """The requests that load KV from a peer, in the process that schedules."""

    _loading: dict[str, Any] = field(default_factory=dict)
    """vLLM's requests with a load in progress."""
    _loaded: dict[str, Any] = field(default_factory=dict)
    """Requests whose load has ended; vLLM may not have looked at them since."""
    _void: set[str] = field(default_factory=set)
    """Loads in progress whose KV must not be used; other ranks may still be loading."""

    def begin(self, request: Any) -> None:
        self._loading[request.request_id] = request
        # A request that was preempted since its last load may load again.
        self._loaded.pop(request.request_id, None)

    def note_failed(self, request_ids: Collection[str]) -> None:
        """Note optional loads that failed on some rank."""
        self._void.update(self._loading.keys() & set(request_ids))

    def end(self, finished: Collection[str], failed: Collection[str], manager: Any) -> set[str]:
        """Process loads that have ended on every rank and return those whose KV must not be used.
        `failed` are the loads that failed for vLLM, which handles their requests itself.
        """
        ended = {
            request_id: self._loading.pop(request_id)
            for request_id in self._loading.keys() & set(finished)
        }
        void = self._void & ended.keys()
        self._void -= void
        for request_id, request in ended.items():
            if request_id not in failed:
                self._loaded[request_id] = request
        for request_id in void & self._loaded.keys():
            _start_over(self._loaded.pop(request_id), manager)
        return void

    def reset(self, manager: Any) -> None:
        """Let no request use KV that was loaded for it before now."""
        self._void.update(self._loading)
        for request in self._loaded.values():
            _start_over(request, manager)
        self._loaded.clear()

    def end_request(self, request_id: str) -> None:
        self._loaded.pop(request_id, None)


def _start_over(request: Any, manager: Any) -> None:
    """Free the blocks of a request whose load has ended, unless vLLM has gone on with the request
    or has aborted it.
    """
    if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
        manager.free(request)
        request.num_computed_tokens = 0
