"""Builds what `interop` needs from vLLM: the values that vLLM's own connectors compare.

The hash is computed by vLLM's own function, so that it is equal whenever vLLM's connectors would
agree. See docs/interop.md.
"""

import time
from dataclasses import replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends

from kvferry.config import NixlExtraConfig
from kvferry.connectors.contract import ConnectorConfig, KVCacheConfig, Request
from kvferry.connectors.stock import StockInterop
from kvferry.errors import ConfigError
from kvferry.protocol.stock_dialect import StockIdentity
from kvferry.transports.registry import ConfiguredStockKit
from kvferry.vllm.translate import VllmRequestView

CONNECTOR_VERSION = 14
"""The version of vLLM's connector whose messages `protocol/stock_dialect.py` describes."""


def with_interop(
    config: ConnectorConfig,
    cache: KVCacheConfig,
    vllm_config: Any,
    kv_cache_config: Any,
    is_worker: bool,
) -> ConnectorConfig:
    """Return the configuration with its stock part if `interop` is set, else unchanged."""
    extra = config.kv_transfer.extra
    if not isinstance(extra, NixlExtraConfig) or not extra.interop:
        return config
    if len(cache.groups) != 1 or cache.groups[0].has_local_attention:
        raise ConfigError(
            "interop supports models with one KV-cache group of full attention; start without it"
        )
    if vllm_config.lora_config is not None:
        raise ConfigError(
            "interop does not support LoRA: a stock peer cannot say which adapter it used"
        )
    offset = vllm_config.parallel_config.data_parallel_index if extra.interop_port else 0
    kit = ConfiguredStockKit(
        config.side_channel.bind_host,
        config.side_channel.advertised_host,
        extra.interop_port + offset,
        extra.backends,
        extra.num_threads,
    )
    identity = _identity(vllm_config, kv_cache_config, cache.block_size) if is_worker else None
    return replace(config, stock=StockInterop(kit, identity, _arrived_at))


def _arrived_at(request: Request) -> float:
    assert isinstance(request, VllmRequestView)
    # vLLM notes the time of the wall clock.
    age_s = max(0.0, time.time() - float(request.request.arrival_time))
    return time.monotonic() - age_s


def _identity(vllm_config: Any, kv_cache_config: Any, block_size: int) -> StockIdentity:
    # Not at the top: earlier releases lack some of these names, and no `interop` needs them there.
    try:
        from vllm.distributed.kv_transfer.kv_connector.utils import (
            get_current_attn_backends_and_specs,
        )
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
            NIXL_CONNECTOR_VERSION,
            compute_nixl_compatibility_hash,
        )
        from vllm.v1.worker.utils import select_common_block_size
    except ImportError as error:
        raise ConfigError(
            f"interop needs vLLM 0.32, which has its own connector: {error}"
        ) from None
    if NIXL_CONNECTOR_VERSION != CONNECTOR_VERSION:
        raise ConfigError(
            f"interop speaks version {CONNECTOR_VERSION} of vLLM's connector (vLLM 0.32), but this "
            f"vLLM has version {NIXL_CONNECTOR_VERSION}"
        )
    backends = get_current_attn_backends(vllm_config)
    name = backends[0].get_name()
    kernel_block_size = select_common_block_size(
        block_size, *get_current_attn_backends_and_specs(vllm_config, kv_cache_config, backends)
    )
    return StockIdentity(
        compatibility_hash=compute_nixl_compatibility_hash(vllm_config, name),
        attention_backend=name,
        layout=vllm_config.cache_config.get_resolved_kv_cache_layout().name,
        kernel_blocks=block_size // kernel_block_size,
        block_size=block_size,
    )
