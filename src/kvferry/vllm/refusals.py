"""What the adapter cannot serve is said at start-up, with the reason, never later. Reads vLLM's configuration, changes nothing."""

from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, UniformTypeKVCacheSpecs

from kvferry.errors import ConfigError

__all__ = ["check_servable"]


def check_servable(vllm_config: Any, kv_cache_config: Any) -> None:
    """ConfigError for models and parallel settings whose KV the pull connector does not hand over yet."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    sizes = {
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "prefill_context_parallel_size": parallel.prefill_context_parallel_size,
        "decode_context_parallel_size": parallel.decode_context_parallel_size,
    }
    for name, size in sizes.items():
        if size > 1:
            raise ConfigError(f"kvferry does not hand over KV with {name} {size} yet; set it to 1")
    if model.is_encoder_decoder:
        raise ConfigError(f"kvferry does not hand over the KV of encoder-decoder models such as {model.model}")
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise ConfigError(f"{model.model} has {len(groups)} KV-cache groups; kvferry serves models with one for now")
    unknown = sorted({type(spec).__name__ for spec in _layer_specs(groups[0].kv_cache_spec) if not _is_dense(spec)})
    if unknown:
        raise ConfigError(f"{model.model} keeps its KV as {', '.join(unknown)}; kvferry serves full attention with K and V for now")


def _layer_specs(spec: Any) -> list[Any]:
    return list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]


def _is_dense(spec: Any) -> bool:
    return isinstance(spec, FullAttentionSpec) and not isinstance(spec, MLAAttentionSpec)
