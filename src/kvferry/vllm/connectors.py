"""kvferry's other connectors as vLLM connectors: what differs from `KVFerryConnector`."""

import os
from dataclasses import replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from kvferry.cli.register import Registration, check_router_url, role_of
from kvferry.config import ClusterSecret, KVTransferConfig, P2pNcclExtraConfig, SideChannelConfig
from kvferry.connectors.contract import ConnectorDescription, Request
from kvferry.connectors.example import ExampleScheduler
from kvferry.errors import ConfigError
from kvferry.router.fleet.instances import parse_instance
from kvferry.router.fleet.registration import DEFAULT_TTL_S, Registrar
from kvferry.types import Address
from kvferry.vllm.compatibility import drops_too_few_tokens
from kvferry.vllm.connector import KVFerryConnector
from kvferry.vllm.metrics.tiers import OffloadPromMetrics, OffloadVllmStats
from kvferry.vllm.translate import VllmRequestView


class KVFerryPushConnector(KVFerryConnector):
    """The push connector."""

    inner_name = "NixlPushConnector"


class KVFerryMooncakeConnector(KVFerryConnector):
    """The pull connector whose transport is mooncake."""

    inner_name = "MooncakeConnector"


class P2pNcclConnector(KVFerryConnector):
    """The settings of vLLM's former connector, on kvferry's transport `dist`: pushes or pulls, as
    `send_type` says.
    """

    inner_name = "P2pNcclConnector"

    @classmethod
    def registration(cls, transfer: KVTransferConfig) -> Registration | None:
        """The registration with the router that `proxy_ip` names; None without `proxy_ip`."""
        extra = transfer.extra
        assert isinstance(extra, P2pNcclExtraConfig)
        if extra.router_url is None:
            return None
        if not extra.http_port:
            raise ConfigError(
                "kv_connector_extra_config.http_port is missing; proxy_ip needs it: the port of "
                "this vLLM server, at which the router reaches it"
            )
        host = SideChannelConfig.from_environment(os.environ).advertised_host
        instance = parse_instance(role_of(transfer), f"http://{Address(host, extra.http_port)}")
        registrar = Registrar(ClusterSecret.load(os.environ).key)
        routers = [check_router_url(extra.router_url)]
        return Registration(instance, routers, registrar, DEFAULT_TTL_S)


class StorageConnector(KVFerryConnector):
    """A connector that moves KV between the engine and a store, not between engines."""

    _stats_class = OffloadVllmStats

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        # Blocks are stored whole, and the layout is part of their name.
        return None

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return OffloadPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


class KVFerryOffloadingConnector(StorageConnector):
    """Keeps KV in tiers."""

    inner_name = "OffloadingConnector"


class _ExampleScheduler(ExampleScheduler):
    """Leaves requests with a LoRA adapter alone: the adapter's files may be replaced before vLLM
    reads them, and this connector saves KV in the step that computes it.
    """

    def on_new_request(self, request: Request) -> None:
        assert isinstance(request, VllmRequestView)
        if request.request.lora_request is None:
            super().on_new_request(request)


class KVFerryExampleConnector(StorageConnector):
    """Keeps prompts' KV in a shared folder, and loads it within the step that computes the rest of
    a prompt.

    vLLM counts the tokens of such a load as computed when it schedules the step. A block that could
    not be loaded is reported with the step's result, and vLLM computes it again or fails the
    request, as `kv_load_failure_policy` says.
    """

    inner_name = "ExampleConnector"

    @classmethod
    def describe(cls, vllm_config: Any) -> ConnectorDescription:
        return replace(super().describe(vllm_config), make_scheduler=_ExampleScheduler)

    @classmethod
    def check_config(cls, vllm_config: Any) -> None:
        if drops_too_few_tokens(vllm_config):
            raise ConfigError(
                "vLLM gives wrong tokens if a load within a step fails with async scheduling and "
                "kv_load_failure_policy recompute; use --no-async-scheduling or the policy fail"
            )

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        # A CUDA graph of the whole model would not call the connector for each layer.
        return True


class KVFerryDecodeBenchConnector(StorageConnector):
    """Fills blocks with made-up KV, to measure decoding."""

    inner_name = "DecodeBenchConnector"

    @classmethod
    def check_config(cls, vllm_config: Any) -> None:
        if vllm_config.cache_config.enable_prefix_caching:
            raise ConfigError(
                "DecodeBenchConnector makes up KV, which must not get into the prefix cache; "
                "start vLLM with --no-enable-prefix-caching"
            )


# The names of vLLM's own connectors, so that the module path is the only change in a configuration.
DecodeBenchConnector = KVFerryDecodeBenchConnector
ExampleConnector = KVFerryExampleConnector
MooncakeConnector = KVFerryMooncakeConnector
NixlPushConnector = KVFerryPushConnector
OffloadingConnector = KVFerryOffloadingConnector
