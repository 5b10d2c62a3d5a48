"""`MultiConnector` in the embedded engine: builds the children and forwards the engine's calls to
the shared roles (`scheduler.py`, `worker.py`).
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from kvferry.config import MultiExtraConfig
from kvferry.connectors.contract import (
    ConnectorConfig,
    KVCacheBlocks,
    KVCacheConfig,
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    KVTensor,
    Request,
    RequestStatus,
    SupportsHMA,
)
from kvferry.connectors.factory import KVConnectorFactory
from kvferry.connectors.multi.children import Children, check_children, name_children
from kvferry.connectors.multi.lookup import ChildTraits
from kvferry.connectors.multi.metadata import (
    MultiHandshakeMetadata,
    MultiMetadata,
    MultiWorkerMetadata,
)
from kvferry.connectors.multi.scheduler import MultiScheduler
from kvferry.connectors.multi.stats import MultiStats
from kvferry.connectors.multi.worker import MultiWorker
from kvferry.connectors.stats import KVConnectorStats
from kvferry.errors import ConfigError, LocalProtocolError


def child_configs(config: ConnectorConfig) -> list[ConnectorConfig]:
    """One configuration per child."""
    extra = config.kv_transfer.extra
    assert isinstance(extra, MultiExtraConfig)
    return [dataclasses.replace(config, kv_transfer=child) for child in extra.connectors]


def common_finished_count(
    names: Sequence[str], counts: Sequence[int | None], world_size: int
) -> int | None:
    """How many ranks report each transfer; `ConfigError` if that differs between the children,
    because a rank cannot know which of its children will report.
    """
    stated = {
        name: count
        for name, count in zip(names, counts, strict=True)
        if count is not None and count != world_size
    }
    if stated and len(names) > 1:
        name, count = next(iter(stated.items()))
        raise ConfigError(
            f"{name} reports its transfers on {count} of {world_size} ranks only, so it cannot be "
            "combined with other connectors"
        )
    return next(iter(stated.values()), None)


class MultiConnector(KVConnectorBase_V1, SupportsHMA):
    """Several connectors in one engine."""

    def __init__(
        self, config: ConnectorConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(config, role, kv_cache_config)
        extra = config.kv_transfer.extra
        assert isinstance(extra, MultiExtraConfig)
        configs = child_configs(config)
        names = _check(configs)
        # If a child cannot be built, the children before it must not leave threads behind.
        with ExitStack() as undo:
            connectors = []
            for child in configs:
                connector = KVConnectorFactory.create_connector(child, role, kv_cache_config)
                undo.callback(connector.shutdown)
                connectors.append(connector)
            undo.pop_all()
        self._children = Children(connectors, names, _traits(connectors))
        self.provides_dummy_kv = any(connector.provides_dummy_kv for connector in connectors)
        is_scheduler = role is KVConnectorRole.SCHEDULER
        self._scheduler_half = (
            MultiScheduler(
                self._children, _StepView(), kv_cache_config.block_size, extra.lookup_timeout
            )
            if is_scheduler
            else None
        )
        self._worker_half = (
            None if is_scheduler else MultiWorker(self._children, len(kv_cache_config.groups))
        )

    @property
    def _scheduler(self) -> MultiScheduler:
        if self._scheduler_half is None:
            raise LocalProtocolError("a worker's connector got a call for the scheduler's")
        return self._scheduler_half

    @property
    def _worker(self) -> MultiWorker:
        if self._worker_half is None:
            raise LocalProtocolError("the scheduler's connector got a call for a worker's")
        return self._worker_half

    @property
    def children(self) -> Children:
        return self._children

    # -- both roles --

    def shutdown(self) -> None:
        self._children.shutdown()

    def set_wakeup(self, wake: Callable[[], None]) -> None:
        self._children.call_all_unguarded("set_wakeup", wake)
        if self._worker_half is not None:
            self._worker_half.set_wakeup(wake)

    @property
    def needs_polling(self) -> bool:
        return any(self._children[child].needs_polling for child in range(len(self._children)))

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        stats = MultiStats()
        for child, part in self._children.call_each("get_kv_connector_stats"):
            if part is not None:
                stats.add(self._children.names[child], part)
        stats.counts |= self._children.take_counts()
        if self._scheduler_half is not None:
            stats.counts |= self._scheduler_half.take_counts()
        return None if stats.is_empty() else stats

    # -- scheduler --

    @property
    def requires_kv_delivery(self) -> bool:
        return any(self._children[child].requires_kv_delivery for child in self._children.enabled)

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return all(
            self._children[child].supports_divergent_local_hybrid_hits
            for child in range(len(self._children))
        )

    def bind_kv_cache_manager(self, manager: Any) -> None:
        self._children.call_all_unguarded("bind_kv_cache_manager", manager)

    def bind_gpu_block_pool(self, pool: Any) -> None:
        self._children.call_all_unguarded("bind_gpu_block_pool", pool)

    def on_new_request(self, request: Request) -> None:
        self._scheduler.announce("on_new_request", request)

    def expect_request(self, request: Request) -> None:
        self._scheduler.announce("expect_request", request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> set[int] | None:
        return self._scheduler.get_loaded_kv_cache_group_ids(request)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> Mapping[str, int]:
        return self._scheduler.get_external_cache_hit_sources(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._scheduler.build_connector_meta(scheduler_output)

    def has_pending_block_frees(self) -> bool:
        return any(self._children.call_all("has_pending_block_frees", default=False))

    def reclaim_blocks(self, num_blocks: int) -> None:
        self._children.call_all("reclaim_blocks", num_blocks)

    def is_load_optional(self, request_id: str) -> bool:
        return self._scheduler.is_load_optional(
            request_id,
            lambda child: self._children.call(child, "is_load_optional", request_id, default=False),
        )

    def has_pending_push_work(self) -> bool:
        return self._scheduler.has_pending_push_work()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        assert report is None or isinstance(report, MultiWorkerMetadata)
        events = connector_output.kv_cache_events
        self._scheduler.take_output(connector_output, report, events or {})

    def take_events(self) -> Iterable[Any]:
        return self._scheduler.take_events()

    def register_finished_partial_tail(
        self, request: Request, block_ids: tuple[list[int], ...], tails: Any
    ) -> bool:
        return self._scheduler.register_finished_partial_tail(request, block_ids, tails)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.request_finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.request_finished(request, block_ids)

    def request_abandoned(self, request_id: str) -> None:
        self._children.call_all("request_abandoned", request_id)

    def get_finished_count(self) -> int | None:
        return common_finished_count(
            self._children.names,
            self._children.call_all_unguarded("get_finished_count"),
            self._config.parallel.tp_size,
        )

    def set_xfer_handshake_metadata(
        self, metadata: Mapping[int, KVConnectorHandshakeMetadata]
    ) -> None:
        for child in range(len(self._children)):
            parts = {
                rank: part.parts[child]
                for rank, part in metadata.items()
                if isinstance(part, MultiHandshakeMetadata) and child in part.parts
            }
            if parts:
                self._children[child].set_xfer_handshake_metadata(parts)

    def reset_cache(self) -> bool | None:
        return self._scheduler.reset_cache()

    def set_weights_version(self, version: str) -> None:
        # A child that fails here could exchange KV of other weights.
        self._children.call_all("set_weights_version", version, is_decisive=True)

    # -- worker --

    def get_mem_pool_context(self) -> AbstractContextManager[None]:
        own = [
            child
            for child in range(len(self._children))
            if type(self._children[child]).get_mem_pool_context
            is not KVConnectorBase_V1.get_mem_pool_context
        ]
        if len(own) > 1:
            listed = " and ".join(self._children.names[child] for child in own)
            raise ConfigError(
                f"{listed} both allocate the KV cache, but an engine has one; remove one of them"
            )
        context: AbstractContextManager[None] = (
            self._children[own[0]].get_mem_pool_context() if own else super().get_mem_pool_context()
        )
        return context

    def register_kv_caches(self, kv_caches: Mapping[str, KVTensor]) -> None:
        self._children.call_all_unguarded("register_kv_caches", kv_caches)

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:
        self._children.call_all_unguarded("set_host_xfer_buffer_ops", copy_operation)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        parts = self._children.call_all_unguarded("get_handshake_metadata")
        given = {child: part for child, part in enumerate(parts) if part is not None}
        return MultiHandshakeMetadata(given) if given else None

    def handle_preemptions(self, metadata: KVConnectorMetadata) -> None:
        assert isinstance(metadata, MultiMetadata)
        self._worker.handle_preemptions(metadata)

    def bind_connector_metadata(self, metadata: KVConnectorMetadata) -> None:
        assert isinstance(metadata, MultiMetadata)
        super().bind_connector_metadata(metadata)
        self._worker.bind(metadata)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self._worker.clear()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.start_load_kv(forward_context, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._worker.wait_for_layer_load(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        self._worker.save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)

    def wait_for_save(self) -> None:
        self._worker.wait_for_save()

    def finish_forward(self) -> None:
        self._worker.finish_forward()

    def reset_capture_state(self) -> None:
        self._children.call_all("reset_capture_state")

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        # The engine asks `is_load_optional` about failures of optional loads.
        results, _ = self._worker.get_transfer_results(finished_req_ids)
        return results

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_invalid_blocks()

    def get_kv_connector_kv_cache_events(self) -> Any:
        parts = dict(self._children.call_each("get_kv_connector_kv_cache_events"))
        return {child: part for child, part in parts.items() if part is not None} or None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker.build_worker_meta()

    # -- class methods --

    @classmethod
    def get_required_kvcache_layout(cls, config: ConnectorConfig) -> str | None:
        configs = child_configs(config)
        names = name_children([child.kv_transfer.kv_connector for child in configs])
        return check_children(names, [], _layouts(configs))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return MultiStats()


def _classes(configs: Iterable[ConnectorConfig]) -> list[type[KVConnectorBase_V1]]:
    return [KVConnectorFactory.get_connector_class(child.kv_transfer) for child in configs]


def _layouts(configs: Sequence[ConnectorConfig]) -> list[str | None]:
    return [
        child_class.get_required_kvcache_layout(child)
        for child_class, child in zip(_classes(configs), configs, strict=True)
    ]


def _check(configs: Sequence[ConnectorConfig]) -> list[str]:
    """Check that the children can work together, and return their names."""
    names = name_children([child.kv_transfer.kv_connector for child in configs])
    with_side_channel = [
        child for child, found in enumerate(_classes(configs)) if found.opens_side_channel
    ]
    check_children(names, with_side_channel, _layouts(configs))
    return names


def _traits(connectors: Sequence[KVConnectorBase_V1]) -> list[ChildTraits]:
    return [
        ChildTraits(
            index,
            connector.honours_token_range,
            connector.loads_are_optional,
            connector.provides_dummy_kv,
        )
        for index, connector in enumerate(connectors)
    ]


# -- views --
# What a child is shown in place of the engine's own objects.


@dataclasses.dataclass(frozen=True, slots=True)
class _LimitedRequest:
    """A request as if it had been aborted after `num_computed_tokens` tokens."""

    request: Request
    num_computed_tokens: int
    status: RequestStatus = RequestStatus.FINISHED_ABORTED

    def __getattr__(self, name: str) -> Any:
        return getattr(self.request, name)


@dataclasses.dataclass(frozen=True, slots=True)
class _StepWithout:
    """A step without the slices of some requests."""

    step: Any
    slices: tuple[Any, ...]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.step, name)


class _StepView:
    """The embedded engine's steps and requests with something left out."""

    def without(self, scheduler_output: Any, requests: Collection[str]) -> Any:
        slices = getattr(scheduler_output, "slices", ())
        kept = tuple(part for part in slices if part.request_id not in requests)
        return _StepWithout(scheduler_output, kept)

    def limited(self, request: Any, num_computed_tokens: int) -> Any:
        return _LimitedRequest(request, num_computed_tokens)

    def partly_computed(self, scheduler_output: Any) -> set[str]:
        """Empty: only children in vLLM save blocks that are not computed yet."""
        return set()
