"""A connector made of two halves: a scheduler half and a worker half. `TwoHalvesConnector` forwards
vLLM's connector calls to the half of its role.
"""

from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from kvferry.connectors.contract import (
    KVCacheBlocks,
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorOutput,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    KVTensor,
    Request,
    SupportsHMA,
)
from kvferry.connectors.stats import KVConnectorStats
from kvferry.errors import LocalProtocolError


class SchedulerHalf(Protocol):
    """The half in the process that schedules. The methods mean what the contract's methods of the
    same or a similar name mean.
    """

    def serve(self, metadata: Mapping[int, KVConnectorHandshakeMetadata]) -> None:
        """Accept the workers' handshake data."""

    def on_new_request(self, request: Request) -> None: ...
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]: ...
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None: ...
    def has_pending_block_frees(self) -> bool: ...
    def has_pending_commands(self) -> bool: ...
    def is_load_optional(self, request_id: str) -> bool: ...
    def take_output(self, output: KVConnectorOutput) -> None: ...
    def request_finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]: ...
    def reset_cache(self) -> None: ...
    def take_stats(self) -> KVConnectorStats | None: ...
    def close(self) -> None: ...


class WorkerHalf(Protocol):
    """The half in the process of one rank."""

    def register_kv_caches(self, kv_caches: Mapping[str, KVTensor]) -> None: ...
    def unregister_kv_caches(self) -> None: ...
    def restore_kv_caches(self) -> None: ...
    def handshake_metadata(self) -> KVConnectorHandshakeMetadata | None: ...
    def set_wakeup(self, wake: Callable[[], None]) -> None: ...
    def get_transfer_results(self) -> KVConnectorTransferResults: ...
    def take_worker_metadata(self) -> KVConnectorWorkerMetadata | None: ...
    def take_stats(self) -> KVConnectorStats | None: ...
    def close(self) -> None: ...


S = TypeVar("S", bound=SchedulerHalf)
W = TypeVar("W", bound=WorkerHalf)


class TwoHalvesConnector(KVConnectorBase_V1, SupportsHMA, Generic[S, W]):
    """Subclasses set exactly one half in their constructor."""

    _scheduler_half: S | None
    _worker_half: W | None

    @property
    def _scheduler(self) -> S:
        if self._scheduler_half is None:
            raise LocalProtocolError(
                "a worker's connector got a call for the scheduler's connector; create that one "
                "with KVConnectorRole.SCHEDULER"
            )
        return self._scheduler_half

    @property
    def _worker(self) -> W:
        if self._worker_half is None:
            raise LocalProtocolError(
                "the scheduler's connector got a call for a worker's connector; create that one "
                "with KVConnectorRole.WORKER"
            )
        return self._worker_half

    def shutdown(self) -> None:
        (self._scheduler_half or self._worker).close()

    def set_wakeup(self, wake: Callable[[], None]) -> None:
        if self._worker_half is not None:
            self._worker_half.set_wakeup(wake)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return (self._scheduler_half or self._worker).take_stats()

    # -- scheduler --

    def on_new_request(self, request: Request) -> None:
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def has_pending_block_frees(self) -> bool:
        return self._scheduler.has_pending_block_frees()

    def has_pending_push_work(self) -> bool:
        return self._scheduler.has_pending_commands()

    def is_load_optional(self, request_id: str) -> bool:
        return self._scheduler.is_load_optional(request_id)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduler.take_output(connector_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.request_finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.request_finished(request, block_ids)

    def set_xfer_handshake_metadata(
        self, metadata: Mapping[int, KVConnectorHandshakeMetadata]
    ) -> None:
        self._scheduler.serve(metadata)

    def reset_cache(self) -> bool | None:
        self._scheduler.reset_cache()
        return None

    # -- worker --

    def register_kv_caches(self, kv_caches: Mapping[str, KVTensor]) -> None:
        self._worker.register_kv_caches(kv_caches)

    def unregister_kv_caches(self) -> None:
        self._worker.unregister_kv_caches()

    def restore_kv_caches(self) -> None:
        self._worker.restore_kv_caches()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._worker.handshake_metadata()

    def wait_for_layer_load(self, layer_name: str) -> None:
        return None

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        return None

    def wait_for_save(self) -> None:
        return None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._worker.get_transfer_results()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self._worker.get_transfer_results()
        return results.finished_sending, results.finished_recving

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker.take_worker_metadata()
