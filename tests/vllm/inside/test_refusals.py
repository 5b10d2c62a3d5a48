"""Every model and setting that cannot be served is refused by name when the connector is made, in both roles, and nothing else is."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.vllm.inside.engines import BLOCK, vllm_config
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)

from kvferry.errors import ConfigError

SHAPE: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
FULL = FullAttentionSpec(**SHAPE)
WINDOW = SlidingWindowSpec(**SHAPE, sliding_window=64)
CHUNKED = ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=64)
MLA = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=torch.float32)
MAMBA = MambaSpec(block_size=BLOCK, shapes=((4, 16), (16, 16)), dtypes=(torch.float32, torch.float32))
UNIFY = r"has \d KV-cache groups; start vLLM with --disable-hybrid-kv-cache-manager, which keeps all layers in one"


@pytest.fixture
def config(model: Path) -> VllmConfig:
    return vllm_config(str(model), "p", '{"num_gpu_blocks_override": 256}')


def cache_of(*groups: KVCacheSpec, layout: str = "LBHNC", **more: Any) -> KVCacheConfig:
    named = [KVCacheGroupSpec([f"model.layers.{index}.self_attn.attn"], spec, **more) for index, spec in enumerate(groups)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=named, kv_cache_layout=layout)


def make(config: VllmConfig, cache: KVCacheConfig, role: KVConnectorRole) -> None:
    with set_current_vllm_config(config):
        KVConnectorFactory.create_connector(config, role, cache).shutdown()


BOTH_ROLES = pytest.mark.parametrize("role", list(KVConnectorRole))


@BOTH_ROLES
@pytest.mark.parametrize(
    ("cache", "sentence"),
    [
        pytest.param(cache_of(FULL, WINDOW), UNIFY, id="windows beside full attention"),
        pytest.param(cache_of(FULL, WINDOW, WINDOW), UNIFY, id="three groups"),
        pytest.param(cache_of(FULL, CHUNKED), UNIFY, id="chunks beside full attention"),
        pytest.param(cache_of(FULL, FULL), UNIFY, id="two groups of full attention"),
        pytest.param(cache_of(WINDOW), "keeps its KV as SlidingWindowSpec; kvferry serves full attention and MLA", id="windows alone"),
        pytest.param(cache_of(CHUNKED), "keeps its KV as ChunkedLocalAttentionSpec", id="chunks alone"),
        pytest.param(cache_of(MAMBA), "keeps its KV as MambaSpec", id="recurrent state"),
        pytest.param(cache_of(FULL, MAMBA), "keeps its KV as MambaSpec", id="recurrent state beside attention"),
        pytest.param(cache_of(FULL, WINDOW, MAMBA), "keeps its KV as MambaSpec, SlidingWindowSpec", id="all three"),
        pytest.param(cache_of(RSWASpec(**SHAPE, rswa_window=64)), "keeps its KV as RSWASpec", id="gaps"),
        pytest.param(cache_of(SinkFullAttentionSpec(**SHAPE, sink_len=4)), "keeps its KV as SinkFullAttentionSpec", id="sinks"),
        pytest.param(cache_of(CrossAttentionSpec(**SHAPE)), "keeps its KV as CrossAttentionSpec", id="cross attention"),
        pytest.param(cache_of(replace(FULL, non_causal=True)), "attends to later tokens of a prompt", id="prefix language model"),
        pytest.param(cache_of(replace(MLA, tokens_per_state=4)), "keeps one state for several tokens", id="compressed states"),
        pytest.param(cache_of(FULL, host_resident=True), "keeps part of its KV in a host pool", id="host pool"),
        pytest.param(cache_of(FULL, enable_kv_transfer=False), "keeps part of its KV in a host pool", id="not for transfer"),
        pytest.param(cache_of(), "keeps no KV: there is nothing to hand over", id="no attention"),
        *(
            pytest.param(cache_of(FULL, layout=layout), f"does not read KV laid out as {layout} yet", id=layout)
            for layout in ("BLHNC", "BLNHC", "LHBNC", "BHLNC")
        ),
    ],
)
def test_a_cache_that_cannot_be_handed_over(config: VllmConfig, role: KVConnectorRole, cache: KVCacheConfig, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make(config, cache, role)


@BOTH_ROLES
@pytest.mark.parametrize("name", ["pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"])
def test_a_parallel_setting_that_cannot_be_served(
    config: VllmConfig, role: KVConnectorRole, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config.parallel_config, name, 2)
    with pytest.raises(ConfigError, match=f"does not hand over KV with {name} 2 yet; set it to 1"):
        make(config, cache_of(FULL), role)


@BOTH_ROLES
def test_an_encoder_decoder_model(config: VllmConfig, role: KVConnectorRole, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(config.model_config), "is_encoder_decoder", property(lambda _: True))
    with pytest.raises(ConfigError, match="does not hand over the KV of encoder-decoder models"):
        make(config, cache_of(FULL), role)


@BOTH_ROLES
@pytest.mark.parametrize(
    "cache",
    [cache_of(FULL), cache_of(FULL, layout="LBNHC"), cache_of(MLA), cache_of(replace(FULL, sliding_window=64))],
    ids=["full attention", "tokens before heads", "MLA", "a window kept whole"],
)
def test_what_can_be_served_is_not_refused(config: VllmConfig, role: KVConnectorRole, cache: KVCacheConfig) -> None:
    make(config, cache, role)


HYBRIDS: list[tuple[str, Callable[[int], KVCacheSpec]]] = [
    ("Gemma 3: every fourth layer sees all", lambda index: FULL if index % 4 == 3 else WINDOW),
    ("Gemma 2, GPT-OSS: every second layer sees all", lambda index: FULL if index % 2 else WINDOW),
    ("Llama 4: three in four layers see a chunk", lambda index: FULL if index % 4 == 3 else CHUNKED),
]


@pytest.mark.parametrize(("kind", "spec_of"), HYBRIDS, ids=[kind for kind, _ in HYBRIDS])
def test_a_hybrid_is_served_once_vllm_keeps_it_in_one_group(
    config: VllmConfig, kind: str, spec_of: Callable[[int], KVCacheSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the sentence tells the operator to set is what makes it work, by vLLM's own grouping."""

    def grouped(is_off: bool) -> KVCacheConfig:
        monkeypatch.setattr(config.scheduler_config, "disable_hybrid_kv_cache_manager", is_off)
        layers = {f"model.layers.{index}.self_attn.attn": spec_of(index) for index in range(8)}
        (cache,) = get_kv_cache_configs(config, [layers], [1 << 30])
        return cache

    with pytest.raises(ConfigError, match=UNIFY):
        make(config, grouped(is_off=False), KVConnectorRole.SCHEDULER)
    unified = grouped(is_off=True)
    assert len(unified.kv_cache_groups) == 1
    make(config, unified, KVConnectorRole.SCHEDULER)


def test_windows_alone_stay_refused_whatever_is_set(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mistral 7B v0.1: vLLM drops blocks behind the window with and without its hybrid manager."""
    monkeypatch.setattr(config.scheduler_config, "disable_hybrid_kv_cache_manager", True)
    (cache,) = get_kv_cache_configs(config, [{"model.layers.0.self_attn.attn": WINDOW}], [1 << 30])
    with pytest.raises(ConfigError, match="SlidingWindowSpec"):
        make(config, cache, KVConnectorRole.SCHEDULER)
