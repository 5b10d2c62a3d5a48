"""`MultiConnector` inside vLLM: `"kv_connector": "MultiConnector", "kv_connector_module_path":
"kvferry.vllm"`.

The children are vLLM connectors: kvferry's own, vLLM's, or any other by module path. The decisions
are in `kvferry.connectors.multi`, which the embedded engine uses as well; this module builds the
children from vLLM's configuration and translates vLLM's objects. vLLM recognises a MultiConnector
by its name, so the class must have that name. See docs/decisions/053-multi-connector.md.
"""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, fields, replace
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.request import RequestStatus

from kvferry import vllm as our_package
from kvferry.config.fields import Seconds, converted, refuse_unknown_keys, shown
from kvferry.connectors.factory import ONLY_IN_VLLM
from kvferry.connectors.multi.children import Children, check_children, name_children
from kvferry.connectors.multi.connector import common_finished_count
from kvferry.connectors.multi.lookup import ChildTraits
from kvferry.connectors.multi.metadata import (
    MultiHandshakeMetadata,
    MultiMetadata,
    MultiWorkerMetadata,
)
from kvferry.connectors.multi.scheduler import MultiScheduler
from kvferry.connectors.multi.worker import MultiWorker
from kvferry.errors import ConfigError, LocalProtocolError
from kvferry.vllm.compatibility import drops_too_few_tokens
from kvferry.vllm.connector import KVFerryConnector, log_with_vllm
from kvferry.vllm.multi_metrics import MultiKVEvents, MultiKVStats, MultiPromMetrics
from kvferry.vllm.release import warn_if_untested
from kvferry.vllm.remote_loads import RemoteLoads
from kvferry.vllm.states import has_states

NAME = "MultiConnector"
OWN_PACKAGE = "kvferry.vllm"
DEFAULT_LOOKUP_TIMEOUT_S = 30.0
BETWEEN_ENGINES = (
    "vllm.distributed.kv_transfer.kv_connector.v1.moriio",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl",
)
"""The modules of vLLM's own connectors between engines."""
KNOWN_TRAITS: Mapping[str, ChildTraits] = {
    "OffloadingConnector": ChildTraits(0, honours_token_range=True, loads_are_optional=True),
    "MooncakeStoreConnector": ChildTraits(0, honours_token_range=True, loads_are_optional=True),
    "DecodeBenchConnector": ChildTraits(0, provides_dummy_kv=True),
    "ExampleConnector": ChildTraits(0, names_kv_by_tokens_only=True, saves_in_first_step=True),
    "LMCacheConnectorV1": ChildTraits(0, loads_are_optional=True, follows_lookups=True),
    "LMCacheMPConnector": ChildTraits(
        0,
        honours_token_range=True,
        loads_are_optional=True,
        reports_failed_blocks=True,
        follows_lookups=True,
        store_timeouts_are_harmless=True,
    ),
}
"""What is known of the connectors of vLLM and LMCache, which cannot say it themselves."""
DEFAULT_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "LMCacheMPConnector": {"lmcache.mp.mq_timeout": 5.0, "lmcache.mp.heartbeat_interval": 2.0}
}
"""Settings of children whose own defaults would let a dead server block the engine's thread for
minutes (docs/decisions/053-multi-connector.md). An operator's setting takes precedence.
"""

_log = logging.getLogger(__name__)


# -- configuration --


@dataclass(frozen=True)
class ChildConfig:
    """The class of a child and the configuration that it is built from."""

    name: str
    connector_class: Any
    vllm_config: Any


def child_configs(vllm_config: Any) -> list[ChildConfig]:
    """The children that a configuration lists; `ConfigError` names a wrong key."""
    parent = vllm_config.kv_transfer_config
    found = []
    for index, entry in enumerate(_listed(parent.kv_connector_extra_config)):
        with _naming_child(index):
            transfer = _child_transfer(parent, index, entry)
            with _naming_missing_package(transfer.kv_connector):
                found.append((transfer, KVConnectorFactory.get_connector_class(transfer)))
    names = name_children([str(transfer.kv_connector) for transfer, _ in found])
    configs = []
    for name, (transfer, connector_class) in zip(names, found, strict=True):
        child = copy(vllm_config)
        child.kv_transfer_config = transfer
        configs.append(ChildConfig(name, connector_class, child))
    return configs


@contextmanager
def _naming_child(index: int) -> Iterator[None]:
    """Let an error of vLLM about a child's settings say which child it is."""
    try:
        yield
    except (ImportError, TypeError, ValueError) as error:
        # pydantic's messages have several lines.
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"kv_connector_extra_config.connectors[{index}] cannot be used: {reason}"
        ) from error


@contextmanager
def _naming_missing_package(connector: str) -> Iterator[None]:
    """Let the `ImportError` of a connector that needs another package say which one."""
    try:
        yield
    except ImportError as error:
        need = ONLY_IN_VLLM.get(connector)
        if need is None:
            raise
        raise ConfigError(
            f"{connector} cannot be loaded ({error}); in vLLM's environment it needs {need}"
        ) from error


def _listed(extra: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    path = "kv_connector_extra_config"
    listed = extra.get("connectors")
    if not isinstance(listed, list) or not listed:
        raise ConfigError(f"{path}.connectors must be a list of objects, got {shown(listed)}")
    for index, entry in enumerate(listed):
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{path}.connectors[{index}] must be an object, got {shown(entry)}")
    return listed


def _child_transfers(parent: Any) -> list[Any]:
    return [
        _child_transfer(parent, index, entry)
        for index, entry in enumerate(_listed(parent.kv_connector_extra_config))
    ]


def _child_transfer(parent: Any, index: int, entry: Mapping[str, Any]) -> Any:
    """One child's transfer configuration. A name of kvferry's connectors means kvferry's."""
    path = f"kv_connector_extra_config.connectors[{index}]"
    shared = {
        "engine_id": parent.engine_id,
        "kv_load_failure_policy": parent.kv_load_failure_policy,
    }
    for key, value in shared.items():
        if entry.get(key, value) != value:
            raise ConfigError(
                f"{path}.{key} is {shown(entry[key])}, but all connectors of a MultiConnector "
                f"share its {key}; remove it"
            )
    role = entry.get("kv_role")
    if parent.kv_role not in ("kv_both", role):
        # vLLM protects the blocks of loads and sends as the role of the whole connector demands.
        raise ConfigError(
            f"{path}.kv_role is {shown(role)}, but that of the MultiConnector is "
            f"{parent.kv_role}; give the MultiConnector the kv_role kv_both"
        )
    refuse_unknown_keys(entry, [field.name for field in fields(KVTransferConfig)], path)
    name, module = entry.get("kv_connector"), entry.get("kv_connector_module_path")
    if name == NAME:
        raise ConfigError(
            f"{path}.kv_connector cannot be MultiConnector inside a MultiConnector; list its "
            "connectors here instead"
        )
    if module is None and name in our_package.__all__:
        module = OWN_PACKAGE
    own = entry.get("kv_connector_extra_config") or {}
    settings = {
        "kv_connector_extra_config": {**DEFAULT_SETTINGS.get(str(name), {}), **own},
        "kv_connector_module_path": module,
    }
    return KVTransferConfig(**{**entry, **shared, **settings})


def _lookup_timeout_s(extra: Mapping[str, Any]) -> float:
    refuse_unknown_keys(extra, ["connectors", "lookup_timeout"], NAME)
    value = extra.get("lookup_timeout", DEFAULT_LOOKUP_TIMEOUT_S)
    return float(converted("kv_connector_extra_config.lookup_timeout", value, Seconds))


def traits_of(index: int, connector_class: Any) -> ChildTraits:
    """How a child of this class may be combined with others."""
    is_foreign = str(connector_class.__module__).startswith(("vllm.", "lmcache."))
    if is_foreign and connector_class.__name__ in KNOWN_TRAITS:
        return replace(KNOWN_TRAITS[connector_class.__name__], index=index)
    stated = {
        field.name: bool(getattr(connector_class, field.name, False))
        for field in fields(ChildTraits)
        if field.name != "index"
    }
    return ChildTraits(index, **stated)


def _opens_side_channel(connector_class: Any) -> bool:
    return bool(getattr(connector_class, "opens_side_channel", False)) or str(
        connector_class.__module__
    ).startswith(BETWEEN_ENGINES)


def _check(configs: Collection[ChildConfig]) -> str | None:
    """Check that the children can work together, and return the layout that they require."""
    return check_children(
        [child.name for child in configs],
        [
            index
            for index, child in enumerate(configs)
            if _opens_side_channel(child.connector_class)
        ],
        [child.connector_class.get_required_kvcache_layout(child.vllm_config) for child in configs],
    )


# -- messages --


@dataclass
class StepMetadata(KVConnectorMetadata):
    """The message of one step, wrapped for vLLM."""

    inner: MultiMetadata


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    """A rank's report, wrapped for vLLM."""

    inner: MultiWorkerMetadata

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerMetadata":
        assert isinstance(other, WorkerMetadata)
        return WorkerMetadata(self.inner.aggregate(other.inner))


@dataclass
class HandshakeMetadata(KVConnectorHandshakeMetadata):
    """The handshake data of one rank's children, wrapped for vLLM."""

    inner: MultiHandshakeMetadata


# -- views --


class _SchedulerOutputView:
    """vLLM's steps and requests with something left out."""

    def without(self, scheduler_output: Any, requests: Collection[str]) -> Any:
        step = copy(scheduler_output)
        step.scheduled_new_reqs = [
            new for new in scheduler_output.scheduled_new_reqs if new.req_id not in requests
        ]
        step.scheduled_cached_reqs = _without_cached(
            scheduler_output.scheduled_cached_reqs, requests
        )
        for name in (
            "num_scheduled_tokens",
            "scheduled_spec_decode_tokens",
            "scheduled_encoder_inputs",
        ):
            rows = getattr(scheduler_output, name)
            setattr(step, name, {key: rows[key] for key in rows if key not in requests})
        step.total_num_scheduled_tokens = sum(step.num_scheduled_tokens.values())
        return step

    def limited(self, request: Any, num_computed_tokens: int) -> Any:
        view = copy(request)
        view.num_computed_tokens = num_computed_tokens
        view.num_in_flight_tokens = 0
        view.status = RequestStatus.FINISHED_ABORTED
        return view

    def partly_computed(self, scheduler_output: Any) -> set[str]:
        return {
            new.req_id
            for new in scheduler_output.scheduled_new_reqs
            if new.num_computed_tokens + scheduler_output.num_scheduled_tokens[new.req_id]
            < len(new.prompt_token_ids or ())
        }


def _without_cached(cached: Any, requests: Collection[str]) -> Any:
    """vLLM's `CachedRequestData`, whose lists have one entry per request, without some requests."""
    kept = [index for index, name in enumerate(cached.req_ids) if name not in requests]
    changed: dict[str, Any] = {}
    for field in fields(cached):
        value = getattr(cached, field.name)
        if isinstance(value, list) and len(value) == len(cached.req_ids):
            changed[field.name] = [value[index] for index in kept]
        elif isinstance(value, dict):
            changed[field.name] = {key: value[key] for key in value if key not in requests}
        elif isinstance(value, set):
            changed[field.name] = value - set(requests)
    return replace(cached, **changed)


# -- connector --


class MultiConnector(KVConnectorBase_V1, SupportsHMA):
    """Several vLLM connectors in one engine."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log_with_vllm()
        warn_if_untested()
        timeout_s = _lookup_timeout_s(vllm_config.kv_transfer_config.kv_connector_extra_config)
        configs = child_configs(vllm_config)
        _check(configs)
        # If a child cannot be built, the children before it must not leave threads behind.
        with ExitStack() as undo:
            connectors = []
            for child in configs:
                with _naming_missing_package(child.vllm_config.kv_transfer_config.kv_connector):
                    connector = KVConnectorFactory.create_connector(
                        child.vllm_config, role, kv_cache_config
                    )
                undo.callback(connector.shutdown)
                connectors.append(connector)
            undo.pop_all()
        traits = [traits_of(index, type(connector)) for index, connector in enumerate(connectors)]
        if has_states(kv_cache_config):
            # The states at the end of a range that another child continues have no block.
            traits = [replace(each, honours_token_range=False) for each in traits]
        self._children = Children(connectors, [child.name for child in configs], traits)
        self._loads = RemoteLoads()
        is_scheduler = role is KVConnectorRole.SCHEDULER
        self._scheduler_half: MultiScheduler | None = None
        self._worker_half: MultiWorker | None = None
        if is_scheduler:
            self._scheduler_half = MultiScheduler(
                self._children,
                _SchedulerOutputView(),
                vllm_config.cache_config.block_size,
                timeout_s,
                may_load_within_steps=not drops_too_few_tokens(vllm_config),
            )
            for index in self._ours:
                connectors[index].join_multi_connector(self._has_work)
        else:
            self._worker_half = MultiWorker(self._children, len(kv_cache_config.kv_cache_groups))

    @property
    def _ours(self) -> list[int]:
        """kvferry's own children."""
        return [
            index
            for index in range(len(self._children))
            if isinstance(self._children[index], KVFerryConnector)
        ]

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

    def get_kv_connector_stats(self) -> MultiKVStats | None:
        stats = MultiKVStats()
        for child, part in self._children.call_each("get_kv_connector_stats"):
            if part is not None:
                stats.add(self._children.names[child], type(self._children[child]), part)
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
            getattr(self._children[child], "supports_divergent_local_hybrid_hits", False)
            for child in range(len(self._children))
        )

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self._kv_cache_manager = kv_cache_manager
        self._children.call_all_unguarded("bind_kv_cache_manager", kv_cache_manager)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._children.call_all_unguarded("bind_gpu_block_pool", gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        self._scheduler.announce("on_new_request", request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        count, is_async = self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)
        if count is None:
            for child in self._ours:
                self._children.call(child, "note_skipped")
        return count, is_async

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        groups = self._scheduler.get_loaded_kv_cache_group_ids(request)
        if groups is None:
            default: tuple[int, ...] = super().get_loaded_kv_cache_group_ids(request)
            return default
        return tuple(sorted(groups))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)
        if self._scheduler.is_loading(str(request.request_id)):
            self._loads.begin(request)
        else:
            # vLLM has gone on with the request.
            self._loads.end_request(str(request.request_id))

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        sources = self._scheduler.get_external_cache_hit_sources(request, num_external_tokens)
        if sum(sources.values()) == num_external_tokens:
            return sources
        default: dict[Any, int] = super().get_external_cache_hit_sources(
            request, num_external_tokens
        )
        return default

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return StepMetadata(self._scheduler.build_connector_meta(scheduler_output))

    def has_pending_block_frees(self) -> bool:
        return any(self._children.call_all("has_pending_block_frees", default=False))

    def has_pending_push_work(self) -> bool:
        return self._scheduler.has_pending_push_work()

    def _has_work(self) -> bool:
        """Whether a step must not wait: a child has work, or a child that cannot end a wait still
        reads the blocks of a finished request.
        """
        ours = self._ours
        return self._scheduler.has_sends_beside(ours) or any(
            [
                self._children.call(
                    child,
                    "has_urgent_work" if child in ours else "has_pending_push_work",
                    default=False,
                )
                for child in self._children.enabled
            ]
        )

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        events = connector_output.kv_cache_events
        finished = set(connector_output.finished_recving or ())
        failed = set(connector_output.failed_recving or ())
        news = self._scheduler.take_output(
            connector_output,
            None if report is None else report.inner,
            {} if events is None else events.parts,
        )
        # A rank reports a load of which only an optional part failed as finished: vLLM would apply
        # its failure policy to it. The request starts over instead.
        self._loads.note_failed(news.unusable - failed)
        self._loads.end(finished, failed, self._kv_cache_manager)

    def take_events(self) -> Iterable[Any]:
        return self._scheduler.take_events()

    def register_finished_partial_tail(
        self, request: Any, block_ids: tuple[list[int], ...], partial_tail_offloads: Any
    ) -> bool:
        return self._scheduler.register_finished_partial_tail(
            request, block_ids, partial_tail_offloads
        )

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._loads.end_request(str(request.request_id))
        return self._scheduler.request_finished(request, block_ids)

    def get_finished_count(self) -> int | None:
        return common_finished_count(
            self._children.names,
            self._children.call_all_unguarded("get_finished_count"),
            self._vllm_config.parallel_config.world_size,
        )

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        for child, parts in self._parts(metadata).items():
            self._children[child].set_xfer_handshake_metadata(parts)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        for child, parts in self._parts(metadata).items():
            self._children[child].set_xfer_handshake_metadata_pp_aware(parts)

    def _parts(self, metadata: Mapping[Any, HandshakeMetadata]) -> dict[int, dict[Any, Any]]:
        """The handshake data of each child by rank."""
        parts: dict[int, dict[Any, Any]] = {}
        for rank, whole in metadata.items():
            for child, part in whole.inner.parts.items():
                parts.setdefault(child, {})[rank] = part
        return parts

    def reset_cache(self) -> bool | None:
        is_reset = self._scheduler.reset_cache()
        # KV that a child loaded before, or is loading now, may be of other weights.
        self._scheduler.bar_loads(self._loads.request_ids)
        self._loads.reset(self._kv_cache_manager)
        return is_reset

    # -- worker --

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        contexts = {
            name: context
            for name, context in zip(
                self._children.names,
                self._children.call_all_unguarded("get_mem_pool_context"),
                strict=True,
            )
            if context is not None
        }
        if len(contexts) > 1:
            raise ConfigError(
                f"{' and '.join(contexts)} both allocate the KV cache, but an engine has one; "
                "remove one of them"
            )
        return next(iter(contexts.values()), None)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._children.call_all_unguarded("register_kv_caches", kv_caches)

    def unregister_kv_caches(self) -> None:
        self._children.call_all_unguarded("unregister_kv_caches")

    def restore_kv_caches(self) -> None:
        self._children.call_all_unguarded("restore_kv_caches")

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:
        self._children.call_all_unguarded("set_host_xfer_buffer_ops", copy_operation)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        parts = self._children.call_all_unguarded("get_handshake_metadata")
        given = {child: part for child, part in enumerate(parts) if part is not None}
        return HandshakeMetadata(MultiHandshakeMetadata(given)) if given else None

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self._worker.handle_preemptions(kv_connector_metadata.inner)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._worker.bind(connector_metadata.inner)

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
        results, excused = self._worker.get_transfer_results(finished_req_ids)
        return KVConnectorTransferResults(
            results.finished_sending, results.finished_recving, results.failed_recving - excused
        )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_invalid_blocks()

    def get_kv_connector_kv_cache_events(self) -> Any:
        parts = dict(self._children.call_each("get_kv_connector_kv_cache_events"))
        given = {child: part for child, part in parts.items() if part is not None}
        return MultiKVEvents(given) if given else None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report = self._worker.build_worker_meta()
        return None if report is None else WorkerMetadata(report)

    # -- class methods --

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return _check(child_configs(vllm_config))

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        parent = KVTransferConfig(
            kv_connector=NAME, kv_role="kv_both", kv_connector_extra_config=extra_config
        )
        return any(
            KVConnectorFactory.get_connector_class(child).requires_piecewise_for_cudagraph(
                child.kv_connector_extra_config
            )
            for child in _child_transfers(parent)
        )

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        refusing = [
            child.kv_connector
            for child in _child_transfers(kv_transfer_config)
            if not KVConnectorFactory.get_connector_class(child).supports_sleep_mode(child)
        ]
        if refusing:
            log_with_vllm()
            _log.error("sleep mode refused connectors=%s", ",".join(refusing))
        return not refusing

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> MultiKVStats:
        return MultiKVStats.from_dict(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> MultiPromMetrics:
        return MultiPromMetrics(
            vllm_config,
            metric_types,
            labelnames,
            per_engine_labelvalues,
            [
                (child.name, child.connector_class, child.vllm_config)
                for child in child_configs(vllm_config)
            ],
        )
