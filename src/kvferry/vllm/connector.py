"""kvferry's connectors as vLLM connectors: vLLM's base class outside, two sides inside.

`KVFerryConnector` is the only adapter. It translates vLLM's objects and does what only vLLM needs;
the decisions are in `kvferry.connectors`. As in vLLM, there is one instance per role
(`scheduler_role.py`, `worker_role.py`). See docs/decisions/011-inside-vllm.md.
"""

import logging
import os
import threading
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from kvferry.config import KVTransferConfig
from kvferry.connectors.contract import ConnectorDescription
from kvferry.connectors.factory import KVConnectorFactory, check_cache
from kvferry.logs import LEVEL_VARIABLE, ForwardingHandler, LogSettings
from kvferry.vllm.compatibility import check_supported, why_not_asleep
from kvferry.vllm.identity.loaded_weights import LoadedWeights
from kvferry.vllm.metrics.transfers import KVFerryPromMetrics, KVFerryStats
from kvferry.vllm.plugin import register
from kvferry.vllm.release import find_cache_hit_source, warn_if_untested
from kvferry.vllm.scheduler_role import SchedulerRole
from kvferry.vllm.translate import cache_config, connector_config, transfer_config
from kvferry.vllm.worker_role import WorkerRole

if TYPE_CHECKING:
    from kvferry.cli.register import Registration


def log_with_vllm() -> None:
    """Send kvferry's log lines to vLLM's handlers, in vLLM's format; from vLLM's level on, unless
    KVFERRY_LOG_LEVEL is set.

    Idempotent. Does nothing if the operator has configured a logger named kvferry.
    """
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("kvferry")
    if ours.handlers or not theirs.handlers:
        return
    ours.addHandler(ForwardingHandler(theirs))
    asked = LogSettings.of(None, None, os.environ) if LEVEL_VARIABLE in os.environ else None
    ours.setLevel(theirs.getEffectiveLevel() if asked is None else asked.level_number)
    ours.propagate = False


_log = logging.getLogger(__name__)

# vLLM's MultiConnector looks up a child connector by its registered name. Plugins may be
# restricted, so registration must not depend on the plugin entry point.
register()


class KVFerryConnector(SchedulerRole, WorkerRole, SupportsHMA):
    """The pull connector, under the name that the plugin registers: vLLM's MultiConnector looks up
    a child again by the name of its class. The other connectors are in `connectors.py`.
    """

    inner_name = "NixlConnector"
    """The name of kvferry's connector."""
    _cache_hit_source = find_cache_hit_source()
    _stats_class: type[KVConnectorStats] = KVFerryStats

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log_with_vllm()
        warn_if_untested()
        self._has_own_sides = self.has_own_sides(vllm_config)
        self._rank, self._attention_backends, self._loaded_weights = 0, "", LoadedWeights()
        sized = vllm_config.cache_config
        if self._has_own_sides:
            check_supported(vllm_config, kv_cache_config)
            if role is KVConnectorRole.WORKER:
                self._look_at_model(vllm_config)
            self._cache = cache_config(vllm_config, kv_cache_config, self._attention_backends)
            sized = self._cache
        self._registrations: list[Registration] = []
        self._issues_tickets = False
        if role is KVConnectorRole.SCHEDULER:
            self._start_scheduler(vllm_config, kv_cache_config, sized.block_size)
        else:
            self._start_worker(vllm_config)
        self._side = self._make_side()
        if role is KVConnectorRole.SCHEDULER:
            self._side.set_wakeup(self._idle.wake)

    def _look_at_model(self, vllm_config: Any) -> None:
        """Find what only a worker knows: its rank, how the model attends, and its weights."""
        self._rank = get_tensor_model_parallel_rank()
        backends = {backend.get_name() for backend in get_current_attn_backends(vllm_config)}
        self._attention_backends = ",".join(sorted(backends))
        self._loaded_weights = LoadedWeights.find(vllm_config.parallel_config.tensor_parallel_size)

    def _make_side(self) -> Any:
        return self._make_own_side(type(self), self._vllm_config)

    def _make_own_side(self, connector: "type[KVFerryConnector]", vllm_config: Any) -> Any:
        """The side of one of kvferry's connectors; this one, or a child of a `MultiConnector`."""
        connector.check_config(vllm_config)
        name, description = connector.inner_name, connector.describe(vllm_config)
        config = connector_config(
            vllm_config, name, self._rank, self._attention_backends, self._loaded_weights
        )
        check_cache(name, description, self._cache)
        self._issues_tickets |= description.opens_side_channel
        if self._role is KVConnectorRole.WORKER:
            return description.make_worker(config, self._cache)
        side = description.make_scheduler(config, self._cache)
        if found := connector.registration(config.kv_transfer):
            self._registrations.append(found)
            # A daemon thread, so that registration never delays the exit: routers notice an engine
            # that no longer renews.
            threading.Thread(target=found.run, name="kvferry-registration", daemon=True).start()
        return side

    @classmethod
    def has_own_sides(cls, vllm_config: Any) -> bool:
        """Whether kvferry itself moves KV."""
        return True

    @classmethod
    def check_config(cls, vllm_config: Any) -> None:
        """Raise `ConfigError` if this connector cannot work with these settings of vLLM."""

    @classmethod
    def registration(cls, transfer: KVTransferConfig) -> "Registration | None":
        """The registration with a router that the connector's settings ask for."""
        return None

    @classmethod
    def describe(cls, vllm_config: Any) -> ConnectorDescription:
        return KVConnectorFactory.describe(
            transfer_config(vllm_config.kv_transfer_config, cls.inner_name)
        )

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        reason = why_not_asleep(transfer_config(kv_transfer_config, cls.inner_name).extra)
        if reason:
            log_with_vllm()
            _log.error("sleep mode refused connector=%s reason=%s", cls.__name__, reason)
        return not reason

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        transfer = vllm_config.kv_transfer_config
        if transfer is not None and transfer.get_from_extra_config(
            "enable_cross_layers_blocks", False
        ):
            return "BLHNC"
        return None if vllm_config.model_config.use_mla else "LBHNC"

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return cls._stats_class(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        mode = cls.describe(vllm_config).transfer_mode
        return KVFerryPromMetrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues, mode
        )

    @property
    def requires_kv_delivery(self) -> bool:
        is_required: bool = super().requires_kv_delivery
        return is_required and self.describe(self._vllm_config).requires_kv_delivery

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        self._has_unreported_stats = False
        stats = self._side.get_kv_connector_stats()
        return None if stats is None else self.build_kv_connector_stats(stats.to_dict())

    def shutdown(self) -> None:
        for registration in self._registrations:
            registration.stop()
        self._side.shutdown()


NixlConnector = NixlPullConnector = KVFerryConnector
"""The name of vLLM's own connector, so that the module path is the only change in a configuration.
"""
