"""Tests that the connector refuses every unsupported model and setting by name when it is created,
in both roles, and refuses nothing else.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm.config.cache
from tests.vllm.inside.engines import BLOCK, vllm_config
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kvferry.errors import ConfigError
from kvferry.vllm.release import has_sleep_hooks

SHAPE: dict[str, Any] = {
    "block_size": BLOCK,
    "num_kv_heads": 2,
    "head_size": 64,
    "dtype": torch.float32,
}
FULL = FullAttentionSpec(**SHAPE)
WINDOW = SlidingWindowSpec(**SHAPE, sliding_window=64)
CHUNKED = ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=64)
MLA = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=torch.float32)
MAMBA = MambaSpec(
    block_size=BLOCK, shapes=((4, 16), (16, 16)), dtypes=(torch.float32, torch.float32)
)


@pytest.fixture
def config(model: Path) -> VllmConfig:
    return vllm_config(str(model), "p", '{"num_gpu_blocks_override": 256}')


def cache_of(*groups: KVCacheSpec, layout: str = "LBHNC", **more: Any) -> KVCacheConfig:
    named = [
        KVCacheGroupSpec([f"model.layers.{index}.self_attn.attn"], spec, **more)
        for index, spec in enumerate(groups)
    ]
    return KVCacheConfig(
        num_blocks=8, kv_cache_tensors=[], kv_cache_groups=named, kv_cache_layout=layout
    )


def make(config: VllmConfig, cache: KVCacheConfig, role: KVConnectorRole) -> None:
    with set_current_vllm_config(config):
        KVConnectorFactory.create_connector(config, role, cache).shutdown()


BOTH_ROLES = pytest.mark.parametrize("role", list(KVConnectorRole))


@BOTH_ROLES
@pytest.mark.parametrize(
    ("cache", "sentence"),
    [
        pytest.param(
            cache_of(MAMBA), "has no attention layers|vLLM 0.32 or later", id="states alone"
        ),
        pytest.param(
            cache_of(FULL, replace(MAMBA, mamba_cache_mode="all")),
            "start vLLM with --mamba-cache-mode align|vLLM 0.32 or later",
            id="states of every block",
        ),
        pytest.param(
            cache_of(RSWASpec(**SHAPE, rswa_window=64)), "stores its KV as RSWASpec", id="gaps"
        ),
        pytest.param(
            cache_of(SinkFullAttentionSpec(**SHAPE, sink_len=4)),
            "stores its KV as SinkFullAttentionSpec",
            id="sinks",
        ),
        pytest.param(
            cache_of(CrossAttentionSpec(**SHAPE)),
            "stores its KV as CrossAttentionSpec",
            id="cross attention",
        ),
        pytest.param(
            cache_of(FULL, replace(WINDOW, block_size=2 * BLOCK)),
            r"in blocks of \[32, 64\] tokens",
            id="two block sizes",
        ),
        pytest.param(
            cache_of(replace(FULL, non_causal=True)),
            "attends to later tokens of a prompt",
            id="prefix language model",
        ),
        pytest.param(
            cache_of(replace(MLA, tokens_per_state=4)),
            "stores one state for several tokens",
            id="compressed states",
        ),
        pytest.param(
            cache_of(replace(FULL, kv_quant_mode=KVQuantMode.FP8_PER_TOKEN_HEAD)),
            "KV quantised as FP8_PER_TOKEN_HEAD",
            id="scales in blocks",
        ),
        pytest.param(
            cache_of(FULL, host_resident=True),
            "holds part of its KV in a host pool",
            id="host pool",
        ),
        pytest.param(
            cache_of(FULL, enable_kv_transfer=False),
            "holds part of its KV in a host pool",
            id="not for transfer",
        ),
        pytest.param(
            cache_of(), "has no KV cache: there is nothing to transfer", id="no attention"
        ),
        *(
            pytest.param(
                cache_of(FULL, layout=layout),
                f"does not support KV in the layout {layout} yet",
                id=layout,
            )
            for layout in ("LHBNC", "BHLNC")
        ),
    ],
)
def test_a_cache_that_cannot_be_handed_over(
    config: VllmConfig, role: KVConnectorRole, cache: KVCacheConfig, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make(config, cache, role)


@BOTH_ROLES
@pytest.mark.parametrize(
    "name",
    ["pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"],
)
def test_a_parallel_setting_that_cannot_be_served(
    config: VllmConfig, role: KVConnectorRole, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config.parallel_config, name, 2)
    with pytest.raises(ConfigError, match=f"does not transfer KV with {name} 2 yet; set it to 1"):
        make(config, cache_of(FULL), role)


@BOTH_ROLES
def test_a_cache_that_may_move(
    config: VllmConfig, role: KVConnectorRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config.model_config, "enable_sleep_mode", True)
    if has_sleep_hooks():
        make(config, cache_of(FULL), role)
        return
    with pytest.raises(ConfigError, match="start vLLM without --enable-sleep-mode"):
        make(config, cache_of(FULL), role)


@BOTH_ROLES
def test_responses_that_name_the_experts(
    config: VllmConfig, role: KVConnectorRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config.aux_output_config, "enable_return_routed_experts", True)
    with pytest.raises(ConfigError, match="without --enable-return-routed-experts"):
        make(config, cache_of(FULL), role)


@BOTH_ROLES
def test_a_cache_dtype_of_a_plugin(
    config: VllmConfig, role: KVConnectorRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    register = getattr(vllm.config.cache, "register_kv_cache_dtype", None)
    if register is None:
        pytest.skip("before 0.33, a plugin of vLLM cannot define cache dtypes")

    @register("own_bytes")
    class OwnBytes:
        name = "own_bytes"

        def torch_dtype(self) -> torch.dtype:
            return torch.int8

        def quant_mode(self) -> KVQuantMode:
            return KVQuantMode.NONE

    monkeypatch.setattr(config.cache_config, "cache_dtype", "own_bytes")
    with pytest.raises(ConfigError, match="a plugin of vLLM defines the cache dtype own_bytes"):
        make(config, cache_of(FULL), role)


@BOTH_ROLES
def test_an_encoder_decoder_model(
    config: VllmConfig, role: KVConnectorRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(config.model_config), "is_encoder_decoder", property(lambda _: True))
    with pytest.raises(ConfigError, match="does not transfer the KV of encoder-decoder models"):
        make(config, cache_of(FULL), role)


@BOTH_ROLES
@pytest.mark.parametrize(
    "cache",
    [
        pytest.param(cache_of(FULL), id="full attention"),
        pytest.param(cache_of(FULL, layout="LBNHC"), id="tokens before heads"),
        pytest.param(cache_of(MLA), id="MLA"),
        pytest.param(cache_of(replace(FULL, sliding_window=64)), id="a window kept whole"),
        pytest.param(cache_of(WINDOW), id="windows alone"),
        pytest.param(cache_of(FULL, WINDOW, WINDOW), id="windows beside full attention"),
        pytest.param(cache_of(FULL, CHUNKED), id="chunks beside full attention"),
    ],
)
def test_what_can_be_served_is_not_refused(
    config: VllmConfig, role: KVConnectorRole, cache: KVCacheConfig
) -> None:
    make(config, cache, role)


@pytest.mark.parametrize("tier", ["KVFerryDiskTier", "KVFerryObjectTier"])
def test_a_secondary_tier_of_vllms_own_connector_names_its_replacement(tier: str) -> None:
    entry = {"type": tier, "module_path": "kvferry.vllm.stock_tiers", "path": "/var/cache/kvferry"}
    with pytest.raises(ConfigError, match=f"{tier} no longer exists: .* OffloadingConnector"):
        SecondaryTierFactory.get_tier_class(entry)
