"""Translates vLLM's objects into those of kvferry's connector contract.

Pure translation, except that `connector_config` reads the environment, the cluster secret and the
weight files.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, SlidingWindowSpec
from vllm.v1.request import RequestStatus as VllmStatus

from kvferry.config import ClusterSecret, KVTransferConfig, SideChannelConfig
from kvferry.connectors.contract import (
    BlockTables,
    ConnectorConfig,
    KVCacheConfig,
    KVCacheGroup,
    ParallelConfig,
    RequestStatus,
)
from kvferry.errors import ConfigError
from kvferry.protocol.tickets import NO_BLOCK
from kvferry.transports.registry import ConfiguredTransportKit
from kvferry.vllm.engine.progress import PrefillProgress
from kvferry.vllm.engine.states import attention_specs, layer_specs, state_group, state_specs
from kvferry.vllm.identity.factors import model_identity
from kvferry.vllm.identity.loaded_weights import LoadedWeights
from kvferry.vllm.identity.salts import CacheSalts
from kvferry.vllm.plugin import EPOCH_VARIABLE

# vLLM reserves block 0 as its null block.
NULL_BLOCK = 0
LAYOUTS = {
    "LBHNC": "HND",
    "HND": "HND",
    "LBNHC": "NHD",
    "NHD": "NHD",
    "BLHNC": "HND",
    "BLNHC": "NHD",
}
TOKEN_ROWS = frozenset(
    {
        "FLASH_ATTN",
        "FLASHINFER",
        "TRITON_ATTN",
        "FLEX_ATTENTION",
        "FLASH_ATTN_MLA",
        "FLASHINFER_MLA",
        "FLASHMLA",
        "CUTLASS_MLA",
        "TRITON_MLA",
    }
)
"""Attention backends that, on CUDA, store each token's K and V where the layout says. Other
backends pack the tokens of a block together, as the CPU backend does with its keys; blocks of such
backends are split by heads only.
"""
# Requests that end in any other state have no KV to transfer.
_TRANSFERABLE_STATUSES = {
    VllmStatus.FINISHED_STOPPED: RequestStatus.FINISHED_STOPPED,
    VllmStatus.FINISHED_LENGTH_CAPPED: RequestStatus.FINISHED_LENGTH_CAPPED,
}


@dataclass(frozen=True, slots=True)
class VllmRequestView:
    """A vLLM request, read through the contract's names."""

    request: Any
    salts: CacheSalts
    weights_version: str = ""
    """The version of weights that replaced those of the start; see `WeightsVersion`."""
    progress: PrefillProgress | None = None
    """Set for prefill legs that are transferred while they are computed."""
    has_unknown_states: bool = False
    """The number of tokens that the request's states stand for is not known, so its KV must not be
    exchanged.
    """

    @property
    def request_id(self) -> str:
        return str(self.request.request_id)

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        # Not `request.prompt_token_ids`, which is None, or holds placeholders, if the prompt came
        # as embeddings.
        return list(self.request.all_token_ids[: self.num_prompt_tokens])

    @property
    def num_prompt_tokens(self) -> int:
        return int(self.request.num_prompt_tokens)

    @property
    def num_tokens(self) -> int:
        return int(self.request.num_tokens)

    @property
    def num_computed_tokens(self) -> int:
        if self.progress is not None:
            return self.progress.num_written
        # vLLM counts tokens of steps that are still running; the KV of those tokens is not written
        # yet.
        return max(
            0, int(self.request.num_computed_tokens) - int(self.request.num_in_flight_tokens)
        )

    @property
    def all_token_ids(self) -> Sequence[int]:
        return list(self.request.all_token_ids)

    @property
    def status(self) -> RequestStatus:
        status = self.request.status
        if not VllmStatus.is_finished(status):
            return RequestStatus.RUNNING
        return _TRANSFERABLE_STATUSES.get(status, RequestStatus.FINISHED_ABORTED)

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        params: Mapping[str, Any] | None = self.request.kv_transfer_params
        return params

    @property
    def cache_salt(self) -> str | None:
        return (
            None if self.has_unknown_states else self.salts.salt(self.request, self.weights_version)
        )

    @property
    def family(self) -> str | None:
        """The id that the n requests of one client request share; None for a single request.

        vLLM splits a request with n choices into n requests named `0_ID`, `1_ID`, …; the answer
        carries the parameters of one of the n requests.
        """
        index, _, parent = str(self.request.request_id).partition("_")
        return parent if index.isdecimal() and parent else None


@dataclass(frozen=True, slots=True)
class BlocksView:
    """A request's block table. Positions that vLLM fills with its null block, because no attention
    looks there, are holes.
    """

    blocks: Any

    def get_block_ids(self) -> BlockTables:
        return null_blocks_as_holes(self.blocks.get_block_ids())


def null_blocks_as_holes(tables: Iterable[Sequence[int]]) -> BlockTables:
    return tuple(
        [NO_BLOCK if block == NULL_BLOCK else block for block in table] for table in tables
    )


def strip_transfer_params(request: Any) -> None:
    """Remove a request's transfer parameters, which the scheduler has read, from the data that vLLM
    sends to its workers with every new request.

    The workers do not use the parameters, which may be large, and the engine dies when it pickles
    parameters that are nested a few hundred levels deep.
    """
    if request.sampling_params is None or request.sampling_params.extra_args is None:
        return
    # Copy first: the n requests of one request with n choices may share the object.
    request.sampling_params = copy(request.sampling_params)
    extra = request.sampling_params.extra_args
    request.sampling_params.extra_args = {
        name: value for name, value in extra.items() if name != "kv_transfer_params"
    }


def cache_config(
    vllm_config: Any, kv_cache_config: Any, attention_backends: str = ""
) -> KVCacheConfig:
    """The contract's view of vLLM's cache. Only workers know the `attention_backends`."""
    model = vllm_config.model_config
    spec = attention_specs(kv_cache_config.kv_cache_groups)[0]
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    groups = tuple(
        _group(group, tp_size, model.hf_text_config) for group in kv_cache_config.kv_cache_groups
    )
    return KVCacheConfig(
        num_blocks=kv_cache_config.num_blocks,
        block_size=spec.block_size,
        groups=groups,
        layout=_layout(kv_cache_config),
        num_kv_heads=spec.num_kv_heads,
        head_dim=model.get_head_size(),
        cache_dtype=_cache_dtype(vllm_config),
        has_token_rows=has_token_rows(attention_backends),
        keeps_last_token_window=False,
        # vLLM counts the blocks of a failed load as reserved until the request runs. If the request
        # asked for a second load, vLLM could wait for ever until these blocks are free as well.
        admits_second_load=False,
    )


def has_token_rows(attention_backends: str) -> bool:
    """Whether all these attention backends store each token's KV where the layout says."""
    return current_platform.is_cuda() and TOKEN_ROWS.issuperset(attention_backends.split(","))


def publishes_kv_events(vllm_config: Any) -> bool:
    events = vllm_config.kv_events_config
    return events is not None and bool(events.enable_kv_cache_events)


def transfer_config(theirs: Any, connector: str) -> KVTransferConfig:
    """vLLM's `KVTransferConfig` as kvferry's, with kvferry's name of the connector."""
    return KVTransferConfig.from_mapping(
        {
            "kv_connector": connector,
            "kv_role": theirs.kv_role,
            "engine_id": theirs.engine_id,
            # vLLM names the device; kvferry treats every device other than the CPU as the engine's
            # own.
            "kv_buffer_device": "cpu" if theirs.kv_buffer_device == "cpu" else "auto",
            "kv_load_failure_policy": theirs.kv_load_failure_policy,
            "kv_connector_extra_config": theirs.kv_connector_extra_config,
        }
    )


def connector_config(
    vllm_config: Any, connector: str, tp_rank: int, attention_backends: str, loaded: LoadedWeights
) -> ConnectorConfig:
    """The contract's configuration. Only workers know the `attention_backends` and the weights."""
    transfer = transfer_config(vllm_config.kv_transfer_config, connector)
    side_channel = _side_channel(vllm_config)
    secret = ClusterSecret.load(os.environ)
    secret.check_reach(side_channel)
    return ConnectorConfig(
        kv_transfer=transfer,
        model=model_identity(vllm_config, attention_backends, loaded),
        parallel=ParallelConfig(vllm_config.parallel_config.tensor_parallel_size, tp_rank),
        side_channel=side_channel,
        secret=secret.key,
        epoch=_epoch(vllm_config),
        kit=replace(
            ConfiguredTransportKit.from_settings(side_channel, secret, transfer, os.environ),
            cache_may_sleep=bool(vllm_config.model_config.enable_sleep_mode),
        ),
        max_model_len=vllm_config.model_config.max_model_len,
        publishes_kv_events=publishes_kv_events(vllm_config),
    )


def _group(group: Any, tp_size: int, config: Any) -> KVCacheGroup:
    if states := state_specs(group):
        return state_group(states, tp_size, config)
    spec = next(iter(layer_specs(group).values()))
    return KVCacheGroup(
        tuple(group.layer_names),
        sliding_window=spec.sliding_window + spec.extra_retained_tokens
        if isinstance(spec, SlidingWindowSpec)
        else None,
        attention_chunk=spec.attention_chunk_size
        if isinstance(spec, ChunkedLocalAttentionSpec)
        else None,
    )


def _side_channel(vllm_config: Any) -> SideChannelConfig:
    """The side channel of this data-parallel rank. Each data-parallel rank is an engine with its
    own port, counted up from the configured port.
    """
    config = SideChannelConfig.from_environment(os.environ)
    return (
        replace(config, port=config.port + vllm_config.parallel_config.data_parallel_index)
        if config.port
        else config
    )


def _cache_dtype(vllm_config: Any) -> str:
    """The name of the cache dtype, with `auto` resolved to the model's dtype."""
    requested = str(vllm_config.cache_config.cache_dtype)
    aliases = {
        "auto": str(vllm_config.model_config.dtype).removeprefix("torch."),
        "fp8": "fp8_e4m3",
    }
    return aliases.get(requested, requested)


def _layout(kv_cache_config: Any) -> str:
    resolved = kv_cache_config.kv_cache_layout or "LBHNC"
    if resolved not in LAYOUTS:
        raise ConfigError(
            f"kvferry does not support KV in the layout {resolved} yet; set VLLM_KV_CACHE_LAYOUT "
            f"to {' or '.join(LAYOUTS)}"
        )
    return LAYOUTS[resolved]


def _epoch(vllm_config: Any) -> str:
    """The incarnation id: equal in all processes of one engine incarnation, different in the next.

    vLLM makes a new instance id for each configuration it builds, and passes the configuration to
    all processes of one incarnation. The environment variable alone is not enough: an operator who
    sets the variable to a fixed value would make tickets of a dead incarnation valid for the
    current one.
    """
    words = (
        os.environ.get(EPOCH_VARIABLE, ""),
        vllm_config.instance_id,
        vllm_config.kv_transfer_config.engine_id,
    )
    return "-".join(word for word in words if word)
