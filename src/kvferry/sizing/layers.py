"""Which of a model's layers look at everything, which at a window, and which cache nothing: from its config.json. Pure.

Families say it in different words. Newer ones list `layer_types`; older ones give a pattern, a period or a switch.
"""

from collections.abc import Collection, Mapping
from typing import Any

from kvferry.errors import ConfigError
from kvferry.sizing.keys import list_for_layers, section, short, switch, whole_number, whole_numbers
from kvferry.sizing.shape import LayerCacheKind

__all__ = ["LayerView", "layer_views"]

LayerView = tuple[LayerCacheKind, int | None] | None
"""What a layer looks at, and the most tokens it holds; None: it caches nothing that grows with the prompt."""

FULL: LayerView = (LayerCacheKind.FULL, None)
_TYPES = {
    "full_attention": LayerCacheKind.FULL,
    "attention": LayerCacheKind.FULL,
    "full": LayerCacheKind.FULL,
    "global": LayerCacheKind.FULL,
    "global_attention": LayerCacheKind.FULL,
    "hybrid": LayerCacheKind.FULL,
    "sliding_attention": LayerCacheKind.SLIDING,
    "sliding_window_attention": LayerCacheKind.SLIDING,
    "local_attention": LayerCacheKind.SLIDING,
    "local": LayerCacheKind.SLIDING,
    "chunked_attention": LayerCacheKind.CHUNKED,
}
_WITHOUT_CACHE = {"linear_attention", "mamba", "mamba2", "conv", "recurrent", "moe", "mlp"}
_ALTERNATING = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2}
"""Families whose every n-th layer looks at everything, when their config does not say."""
_WINDOWS = {"gemma2": 4096, "gemma3": 4096, "gemma3_text": 4096, "cohere2": 4096, "gpt_oss": 128}
_SWITCHED = ("qwen2", "qwen3")
"""Families that name a window and use it only when `use_sliding_window` says so."""


def layer_views(config: Mapping[str, Any], layers: int) -> list[LayerView]:
    """One for each layer that has a cache of its own. ConfigError names the key that cannot be understood."""
    views = _listed_views(config, layers) or _attending_views(config, layers)
    if views is None:
        has_chunks = whole_number(config, "attention_chunk_size") is not None
        views = _chunked_views(config, layers) if has_chunks else _window_views(config, layers)
    # Some small models reuse the cache of earlier layers in their last ones.
    shared = whole_number(config, "num_kv_shared_layers", least=0) or 0
    return views[: max(0, layers - shared)]


def _listed_views(config: Mapping[str, Any], layers: int) -> list[LayerView] | None:
    """Where each layer's type is written down."""
    for key in ("layer_types", "layers_block_type"):
        if (kinds := list_for_layers(config, key, layers)) is not None:
            return [_view_of_type(kind, config, key) for kind in kinds]
    pattern = config.get("hybrid_override_pattern")
    if pattern is None:
        return None
    if not isinstance(pattern, str) or len(pattern) != layers:
        raise ConfigError(f"config.json has {layers} layers, but hybrid_override_pattern is no text of as many signs; correct one of them")
    return [FULL if sign == "*" else None for sign in pattern]


def _attending_views(config: Mapping[str, Any], layers: int) -> list[LayerView] | None:
    """Where a rule or a list says which layers look at everything, and the others cache nothing."""
    attending: Collection[int] | None = None
    if (period := whole_number(config, "attn_layer_period")) is not None:
        attending = range(whole_number(config, "attn_layer_offset", 0, period - 1) or 0, layers, period)
    elif (numbers := whole_numbers(config, "attn_layer_indices", 0, layers - 1)) is not None:
        attending = set(numbers)
    elif list_for_layers(config, "attn_type_list", layers) is not None:
        kinds = whole_numbers(config, "attn_type_list", 0, 1) or []
        attending = {layer for layer, kind in enumerate(kinds) if kind == 1}
    elif (numbers := whole_numbers(section(config, "linear_attn_config"), "full_attn_layers", 1, layers)) is not None:
        attending = {number - 1 for number in numbers}
    elif (every := whole_number(config, "full_attention_interval")) is not None:
        attending = range(every - 1, layers, every)
    return None if attending is None else [FULL if layer in attending else None for layer in range(layers)]


def _view_of_type(kind: object, config: Mapping[str, Any], key: str) -> LayerView:
    if not isinstance(kind, str):
        raise ConfigError(f"config.json lists {short(kind)} in {key}, which must be the names of layer types; correct it")
    if kind in _WITHOUT_CACHE:
        return None
    found = _TYPES.get(kind)
    match found:
        case LayerCacheKind.FULL:
            return FULL
        case LayerCacheKind.SLIDING:
            return LayerCacheKind.SLIDING, _needed(config, "sliding_window")
        case LayerCacheKind.CHUNKED:
            return LayerCacheKind.CHUNKED, _needed(config, "attention_chunk_size")
    raise ConfigError(
        f"config.json lists a layer of type {kind!a:.40} in {key}, which is not known here; give --layers, --kv-heads and --head-dim"
    )


def _chunked_views(config: Mapping[str, Any], layers: int) -> list[LayerView]:
    """Llama 4: layers with rotary positions see their chunk, those without see everything."""
    chunk = _needed(config, "attention_chunk_size")
    every = whole_number(config, "no_rope_layer_interval") or 4
    rotary = [int((layer + 1) % every != 0) for layer in range(layers)]
    if list_for_layers(config, "no_rope_layers", layers) is not None:
        rotary = whole_numbers(config, "no_rope_layers", 0, 1) or rotary
    return [(LayerCacheKind.CHUNKED, chunk) if has_rotary else FULL for has_rotary in rotary]


def _window_views(config: Mapping[str, Any], layers: int) -> list[LayerView]:
    family = str(config.get("model_type"))
    window = whole_number(config, "sliding_window") or _WINDOWS.get(family)
    is_switched = switch(config, "use_sliding_window")
    if window is None or is_switched is False:
        return [FULL] * layers
    sliding: LayerView = (LayerCacheKind.SLIDING, window)
    if family.startswith(_SWITCHED):
        if not is_switched:
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
