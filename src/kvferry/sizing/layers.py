"""Which of a model's layers look at everything, which at a window, and which cache nothing: from its config.json. Pure.

Families say it in different words. Newer ones list `layer_types`; older ones give a pattern, a period or a switch.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kvferry.errors import ConfigError
from kvferry.sizing.shape import LayerKind

__all__ = ["LayerView", "layer_views", "whole_number"]

LayerView = tuple[LayerKind, int | None] | None
"""What a layer looks at, and the most tokens it holds; None: it caches nothing that grows with the prompt."""

FULL: LayerView = (LayerKind.FULL, None)
_TYPES = {
    "full_attention": LayerKind.FULL,
    "attention": LayerKind.FULL,
    "full": LayerKind.FULL,
    "global": LayerKind.FULL,
    "global_attention": LayerKind.FULL,
    "hybrid": LayerKind.FULL,
    "sliding_attention": LayerKind.SLIDING,
    "sliding_window_attention": LayerKind.SLIDING,
    "local_attention": LayerKind.SLIDING,
    "local": LayerKind.SLIDING,
    "chunked_attention": LayerKind.CHUNKED,
}
_WITHOUT_CACHE = {"linear_attention", "mamba", "mamba2", "conv", "recurrent", "moe", "mlp"}
_ALTERNATING = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2}
"""Families whose every n-th layer looks at everything, when their config does not say."""
_WINDOWS = {"gemma2": 4096, "gemma3": 4096, "gemma3_text": 4096, "cohere2": 4096, "gpt_oss": 128}
_SWITCHED = ("qwen2", "qwen3")
"""Families that name a window and use it only when `use_sliding_window` says so."""


def layer_views(config: Mapping[str, Any], layers: int) -> list[LayerView]:
    """One for each layer. ConfigError names the key that cannot be understood."""
    listed = config.get("layer_types") or config.get("layers_block_type")
    if listed is not None:
        views = [_view_of_type(kind, config) for kind in _list_of(listed, layers, "layer_types")]
    elif isinstance(config.get("hybrid_override_pattern"), str):
        views = [FULL if sign == "*" else None for sign in _list_of(config["hybrid_override_pattern"], layers, "hybrid_override_pattern")]
    elif (period := whole_number(config, "attn_layer_period")) is not None:
        offset = whole_number(config, "attn_layer_offset", least=0) or 0
        views = [FULL if layer % period == offset else None for layer in range(layers)]
    elif isinstance(config.get("attn_layer_indices"), list):
        views = [FULL if layer in config["attn_layer_indices"] else None for layer in range(layers)]
    elif whole_number(config, "attention_chunk_size") is not None:
        views = _chunked_views(config, layers)
    else:
        views = _window_views(config, layers)
    # Some small models reuse the cache of earlier layers in their last ones.
    shared = whole_number(config, "num_kv_shared_layers", least=0) or 0
    return views[: max(0, layers - shared)]


def whole_number(config: Mapping[str, Any], key: str, least: int = 1) -> int | None:
    """None where the key is missing or null. ConfigError when it is no whole number of that size."""
    value = config.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= 10**9:
        raise ConfigError(f"config.json says {key} is {value!r:.40}, which must be a whole number from {least} on; correct it")
    return value


def _view_of_type(kind: object, config: Mapping[str, Any]) -> LayerView:
    if kind in _WITHOUT_CACHE:
        return None
    found = _TYPES.get(str(kind))
    match found:
        case LayerKind.FULL:
            return FULL
        case LayerKind.SLIDING:
            return LayerKind.SLIDING, _needed(config, "sliding_window")
        case LayerKind.CHUNKED:
            return LayerKind.CHUNKED, _needed(config, "attention_chunk_size")
    raise ConfigError(
        f"config.json lists a layer of type {str(kind)!a:.40}, which is not known here; give --layers, --kv-heads and --head-dim"
    )


def _chunked_views(config: Mapping[str, Any], layers: int) -> list[LayerView]:
    """Llama 4: layers with rotary positions see their chunk, those without see everything."""
    chunk = _needed(config, "attention_chunk_size")
    every = whole_number(config, "no_rope_layer_interval") or 4
    rotary = config.get("no_rope_layers") or [int((layer + 1) % every != 0) for layer in range(layers)]
    return [(LayerKind.CHUNKED, chunk) if has_rotary else FULL for has_rotary in _list_of(rotary, layers, "no_rope_layers")]


def _window_views(config: Mapping[str, Any], layers: int) -> list[LayerView]:
    family = str(config.get("model_type"))
    window = whole_number(config, "sliding_window") or _WINDOWS.get(family)
    if window is None or config.get("use_sliding_window") is False:
        return [FULL] * layers
    sliding: LayerView = (LayerKind.SLIDING, window)
    if family.startswith(_SWITCHED):
        if not config.get("use_sliding_window"):
            return [FULL] * layers
        first = whole_number(config, "max_window_layers", least=0) or 0
        return [sliding if layer >= first else FULL for layer in range(layers)]
    every = whole_number(config, "sliding_window_pattern") or _ALTERNATING.get(family)
    if every is None:
        return [sliding] * layers
    return [FULL if (layer + 1) % every == 0 else sliding for layer in range(layers)]


def _needed(config: Mapping[str, Any], key: str) -> int:
    value = whole_number(config, key)
    if value is None:
        raise ConfigError(f"config.json lists layers with a window but has no {key}; add it")
    return value


def _list_of(value: Any, layers: int, key: str) -> Sequence[Any]:
    if not isinstance(value, list | str) or len(value) != layers:
        raise ConfigError(f"config.json has {layers} layers, but {key} does not list as many; correct one of them")
    return value
