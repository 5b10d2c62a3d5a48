"""Checks at start-up that the adapter can serve a vLLM configuration. Reads the configuration,
changes nothing.

Transfers move whole blocks of every layer, and any prefix of a prompt may be used by another
request. So the cache must hold all tokens of a request, or the last ones, in blocks of one size
(full attention, MLA, sliding windows, chunks), and a token's KV must depend on earlier tokens
alone. State-space and linear-attention layers hold a state instead (`states.py`).
"""

from collections.abc import Sequence
from typing import Any

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvferry.config import NixlExtraConfig
from kvferry.errors import ConfigError
from kvferry.vllm.engine.states import attention_specs, check_states, state_specs
from kvferry.vllm.release import find_cache_dtype_handler, has_sleep_hooks

SUPPORTED_QUANT_MODES = {KVQuantMode.NONE.name, KVQuantMode.FP8_PER_TENSOR.name}
"""With other modes, engines keep scales in the cache and may rewrite the scales at any time."""
SUPPORTED_SPECS = (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    ChunkedLocalAttentionSpec,
)
"""Only these classes themselves: their subclasses drop blocks, add blocks or hold other state."""


def check_supported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise `ConfigError` for models and parallel settings whose KV kvferry cannot transfer yet."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    for kind in ("pipeline", "prefill_context", "decode_context"):
        name = f"{kind}_parallel_size"
        if (size := getattr(parallel, name)) > 1:
            raise ConfigError(f"kvferry does not transfer KV with {name} {size} yet; set it to 1")
    if model.enable_sleep_mode and not has_sleep_hooks():
        raise ConfigError(
            "this vLLM does not tell kvferry when sleep mode frees the cache's memory; install "
            "vLLM 0.33 or start vLLM without --enable-sleep-mode"
        )
    if model.is_encoder_decoder:
        raise ConfigError(
            f"kvferry does not transfer the KV of encoder-decoder models such as {model.model}"
        )
    # vLLM itself refuses the option beside its own connectors between engines.
    if vllm_config.aux_output_config.enable_return_routed_experts:
        raise ConfigError(
            "kvferry transfers KV without the experts that computed it, so a response could not "
            "name the experts of a prompt; start vLLM without --enable-return-routed-experts"
        )
    cache_dtype = vllm_config.cache_config.cache_dtype
    if find_cache_dtype_handler(cache_dtype) is not None:
        raise ConfigError(
            f"a plugin of vLLM defines the cache dtype {cache_dtype}, so kvferry does not know "
            "what its blocks hold; use --kv-cache-dtype auto or fp8"
        )
    _check_groups(model.model, kv_cache_config.kv_cache_groups)


def why_not_asleep(extra: Any) -> str:
    """Why kvferry cannot unregister a GPU's memory with these settings; empty if it can."""
    if not isinstance(extra, NixlExtraConfig):
        return ""
    if extra.transports == ("cuda_ipc",):
        return (
            "the cache of an engine with sleep mode has no CUDA IPC handles; let transports name "
            "nixl, or set kv_buffer_device to cpu, which moves KV by shared memory"
        )
    if extra.backends != ("UCX",):
        return "kvferry can unregister memory only from NIXL's backend UCX; set backends to UCX"
    return ""


def _check_groups(model: str, groups: Sequence[Any]) -> None:
    if not groups:
        raise ConfigError(f"{model} has no KV cache: there is nothing to transfer")
    if any(group.host_resident or not group.enable_kv_transfer for group in groups):
        raise ConfigError(
            f"{model} holds part of its KV in a host pool of its own; kvferry does not transfer "
            "that yet"
        )
    for state in state_specs(*groups).values():
        check_states(model, state)
    specs = attention_specs(groups)
    if not specs:
        raise ConfigError(f"{model} has no attention layers; kvferry does not transfer that yet")
    others = sorted({type(spec).__name__ for spec in specs if type(spec) not in SUPPORTED_SPECS})
    if others:
        raise ConfigError(
            f"{model} stores its KV as {', '.join(others)}; kvferry supports full attention, MLA, "
            "sliding windows, chunks, and the states of state-space and linear-attention layers"
        )
    sizes = sorted({spec.block_size for spec in specs})
    if len(sizes) > 1:
        raise ConfigError(
            f"{model} stores its KV in blocks of {sizes} tokens; kvferry supports one block size"
        )
    modes = sorted({spec.kv_quant_mode.name for spec in specs} - SUPPORTED_QUANT_MODES)
    if modes:
        raise ConfigError(
            f"kvferry does not transfer KV quantised as {', '.join(modes)}; use --kv-cache-dtype "
            "auto or fp8"
        )
    if any(spec.tokens_per_state != 1 for spec in specs):
        raise ConfigError(
            f"{model} stores one state for several tokens; kvferry does not transfer that yet"
        )
    if any(getattr(spec, "non_causal", False) for spec in specs):
        raise ConfigError(
            f"{model} attends to later tokens of a prompt, so no part of its KV can be used for "
            "another prompt"
        )


def drops_too_few_tokens(vllm_config: Any) -> bool:
    """Whether vLLM gives wrong tokens after a load within a step has failed: vLLM 0.32 computes the
    step again, but keeps the tokens of the step that async scheduling has scheduled meanwhile.
    """
    is_computed_again = vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute"
    return is_computed_again and bool(vllm_config.scheduler_config.async_scheduling)
