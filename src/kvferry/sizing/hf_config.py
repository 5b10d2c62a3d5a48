"""From a model's config.json to the shape of its KV cache. Pure.

Keys are read strictly: a value that makes no sense raises a `ConfigError` that names the key. The
module understands more model families than any one engine can compute.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from reprlib import repr as short_repr
from typing import Any

from kvferry.errors import ConfigError
from kvferry.sizing.shape import LayerCacheKind, LayerGroup, ModelCacheShape, canonical_dtype

MAX_LAYERS = 10_000
MAX_HEADS = 4_096
"""Far above any model: a larger number is a mistake and would only make the planner slow."""
_MAX_NUMBER = 10**9


def whole_number(
    config: Mapping[str, Any], key: str, least: int = 1, most: int = _MAX_NUMBER
) -> int | None:
    """The whole number under a key; None if the key is missing or null. Raises `ConfigError` if the
    value is not a whole number between `least` and `most`.
    """
    value = config.get(key)
    if value is None:
        return None
    if not is_whole(value, least, most):
        raise ConfigError(
            f"config.json says {key} is {short(value)}, which must be a whole number from {least} "
            f"to {most:,}; correct it"
        )
    return int(value)


def switch(config: Mapping[str, Any], key: str) -> bool | None:
    """The boolean under a key; None if the key is missing or null. 0 and 1 are read as false and
    true.
    """
    value = config.get(key)
    if value is None:
        return None
    if not isinstance(value, bool) and not is_whole(value, 0, 1):
        raise ConfigError(
            f"config.json says {key} is {short(value)}, which must be true or false; correct it"
        )
    return bool(value)


def section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object under a key; empty if the key is missing or null."""
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"config.json says {key} is {short(value)}, which must be an object; correct it"
        )
    return value


def list_for_layers(config: Mapping[str, Any], key: str, layers: int) -> list[Any] | None:
    """A list with one value for each layer; None if the key is missing, null or an empty list."""
    value = config.get(key)
    if value is None or value == []:
        return None
    if not isinstance(value, list) or len(value) != layers:
        raise ConfigError(
            f"config.json has {layers} layers, but {key} does not list as many; correct one of them"
        )
    return value


def whole_numbers(config: Mapping[str, Any], key: str, least: int, most: int) -> list[int] | None:
    """A list of whole numbers of any length; None if the key is missing or null."""
    value = config.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or not all(is_whole(number, least, most) for number in value):
        raise ConfigError(
            f"config.json says {key} is {short(value)}, which must list whole numbers from "
            f"{least} to {most:,}; correct it"
        )
    return value


def short(value: object) -> str:
    """The beginning of a value for an error message, however long or deep the value is."""
    return short_repr(value)[:40]


def is_whole(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


# -- layers --
# Which of a model's layers attend to all tokens, which to a window, and which cache nothing. Newer
# families list `layer_types`; older families give a pattern, a period or a switch.


LayerView = tuple[LayerCacheKind, int | None] | None
"""What a layer attends to and the most tokens it holds; None if the layer caches nothing that grows
with the prompt.
"""

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
"""Families in which every n-th layer attends to all tokens, unless the config states otherwise."""
_WINDOWS = {"gemma2": 4096, "gemma3": 4096, "gemma3_text": 4096, "cohere2": 4096, "gpt_oss": 128}
"""The sliding window of families whose config may leave the window out."""
_SWITCHED = ("qwen2", "qwen3")
"""Families that name a window but use the window only if `use_sliding_window` is true."""


def layer_views(config: Mapping[str, Any], layers: int) -> list[LayerView]:
    """One view for each layer that has its own cache. `ConfigError` names the key that cannot be
    understood.
    """
    views = _listed_views(config, layers) or _attending_views(config, layers)
    if views is None:
        has_chunks = whole_number(config, "attention_chunk_size") is not None
        views = _chunked_views(config, layers) if has_chunks else _window_views(config, layers)
    # In some small models the last layers reuse the cache of earlier layers.
    shared = whole_number(config, "num_kv_shared_layers", least=0) or 0
    return views[: max(0, layers - shared)]


def _listed_views(config: Mapping[str, Any], layers: int) -> list[LayerView] | None:
    """The views if the config lists the type of each layer."""
    for key in ("layer_types", "layers_block_type"):
        if (kinds := list_for_layers(config, key, layers)) is not None:
            return [_view_of_type(kind, config, key) for kind in kinds]
    pattern = config.get("hybrid_override_pattern")
    if pattern is None:
        return None
    if not isinstance(pattern, str) or len(pattern) != layers:
        raise ConfigError(
            f"config.json has {layers} layers, but hybrid_override_pattern is not a text of as "
            "many characters; correct one of them"
        )
    # In the pattern, `*` is an attention layer; the other signs are Mamba and MLP layers.
    return [FULL if sign == "*" else None for sign in pattern]


def _attending_views(config: Mapping[str, Any], layers: int) -> list[LayerView] | None:
    """The views if a rule or a list names the layers that attend to all tokens, and the remaining
    layers cache nothing.
    """
    attending: Collection[int] | None = None
    if (period := whole_number(config, "attn_layer_period")) is not None:
        attending = range(
            whole_number(config, "attn_layer_offset", 0, period - 1) or 0, layers, period
        )
    elif (numbers := whole_numbers(config, "attn_layer_indices", 0, layers - 1)) is not None:
        attending = set(numbers)
    elif list_for_layers(config, "attn_type_list", layers) is not None:
        kinds = whole_numbers(config, "attn_type_list", 0, 1) or []
        attending = {layer for layer, kind in enumerate(kinds) if kind == 1}
    elif (
        numbers := whole_numbers(
            section(config, "linear_attn_config"), "full_attn_layers", 1, layers
        )
    ) is not None:
        # `full_attn_layers` counts from 1.
        attending = {number - 1 for number in numbers}
    elif (every := whole_number(config, "full_attention_interval")) is not None:
        attending = range(every - 1, layers, every)
    return (
        None
        if attending is None
        else [FULL if layer in attending else None for layer in range(layers)]
    )


def _view_of_type(kind: object, config: Mapping[str, Any], key: str) -> LayerView:
    if not isinstance(kind, str):
        raise ConfigError(
            f"config.json lists {short(kind)} in {key}, which must be the names of layer types; "
            "correct it"
        )
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
        f"config.json lists a layer of type {kind!a:.40} in {key}, which kvferry does not know; "
        "give --layers, --kv-heads and --head-dim"
    )


def _chunked_views(config: Mapping[str, Any], layers: int) -> list[LayerView]:
    """Llama 4: layers with rotary positions attend to their chunk, layers without to all tokens."""
    chunk = _needed(config, "attention_chunk_size")
    every = whole_number(config, "no_rope_layer_interval") or 4
    rotary = [int((layer + 1) % every != 0) for layer in range(layers)]
    if list_for_layers(config, "no_rope_layers", layers) is not None:
        rotary = whole_numbers(config, "no_rope_layers", 0, 1) or rotary
    return [(LayerCacheKind.CHUNKED, chunk) if has_rotary else FULL for has_rotary in rotary]


def _window_views(config: Mapping[str, Any], layers: int) -> list[LayerView]:
    """The views of models with one window, used by all layers, by every layer but each n-th, or by
    the later layers.
    """
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


# -- cache shape --
# The shape of the KV cache from the keys of all supported families.


_NESTED = ("text_config", "language_config", "llm_config", "thinker_config")
"""Where multimodal models keep the settings of their language model."""
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_HEAD_DIM = ("head_dim", "attention_head_dim", "kv_channels")
_FAMILY_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "gemma": {"head_dim": 256},
    "gemma2": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    "gemma3": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    "gpt_oss": {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64},
    "llama4_text": {
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_chunk_size": 8192,
    },
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {"head_dim": 128},
    "qwen3_next": {
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "full_attention_interval": 4,
    },
    "mistral": {"num_key_value_heads": 8},
    "mixtral": {"num_key_value_heads": 8},
}
"""Values that config.json files of these families omit when the value is the family's default."""
# A bound on the work of the planner, which plans each group.
MAX_GROUPS = 64
_FIX = "give --layers, --kv-heads and --head-dim instead of MODEL"


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's own settings, completed by the defaults of its family."""
    while (
        nested := next(
            (config[key] for key in _NESTED if isinstance(config.get(key), Mapping)), None
        )
    ) is not None:
        config = nested
    return {
        **_FAMILY_DEFAULTS.get(str(config.get("model_type")), {}),
        **{k: v for k, v in config.items() if v is not None},
    }


def shape_of_config(config: Mapping[str, Any], dtype: str) -> ModelCacheShape:
    """The cache shape of a model. Raises `ConfigError`, one sentence with the fix, for a missing or
    impossible value.
    """
    found = text_config(config)
    if switch(config, "is_encoder_decoder"):
        raise ConfigError(
            "config.json is of a model with an encoder, whose cache does not grow with the "
            f"prompt; {_FIX}"
        )
    layers = _first(found, _LAYERS, MAX_LAYERS)
    if layers is None:
        raise ConfigError(
            f"config.json does not give the number of layers (num_hidden_layers); {_FIX}"
        )
    # Latent attention (MLA).
    if whole_number(found, "kv_lora_rank") is not None:
        return ModelCacheShape(_latent_groups(found, layers), dtype)
    heads = _kv_heads_of_layers(found, layers)
    width = _width(found)
    alike: Counter[tuple[LayerCacheKind, int, int | None]] = Counter()
    for view, kv_heads in zip(layer_views(found, layers), heads, strict=False):
        if view is not None and kv_heads:
            alike[view[0], kv_heads, view[1]] += 1
    if len(alike) > MAX_GROUPS:
        raise ConfigError(
            f"config.json has layers of {len(alike):,} different sizes, but at most {MAX_GROUPS} "
            f"can be planned; {_FIX}"
        )
    return ModelCacheShape(
        tuple(
            LayerGroup(kind, count, kv, width, window)
            for (kind, kv, window), count in alike.items()
        ),
        dtype,
    )


def auto_dtype(config: Mapping[str, Any]) -> str | None:
    """The cache dtype that an engine uses by default: the cache dtype of the quantisation, else the
    dtype of the weights. None if the file names neither.
    """
    quantised = config.get("quantization_config")
    scheme = quantised.get("kv_cache_scheme") if isinstance(quantised, Mapping) else None
    if isinstance(scheme, Mapping) and scheme.get("num_bits") == 8:
        return "fp8" if scheme.get("type", "float") == "float" else "int8"
    found = text_config(config)
    name = next(
        (
            place[key]
            for place in (found, config)
            for key in ("torch_dtype", "dtype")
            if isinstance(place.get(key), str)
        ),
        None,
    )
    return None if name is None else canonical_dtype(name)


def _latent_groups(config: Mapping[str, Any], layers: int) -> tuple[LayerGroup, ...]:
    rank, rotary = (
        whole_number(config, "kv_lora_rank") or 0,
        whole_number(config, "qk_rope_head_dim", least=0),
    )
    if rotary is None:
        raise ConfigError(
            "config.json has kv_lora_rank but no qk_rope_head_dim, which latent attention needs; "
            "add it"
        )
    attending = sum(view is not None for view in layer_views(config, layers))
    if not attending:
        return ()
    groups = [LayerGroup(LayerCacheKind.LATENT, attending, 1, rank + rotary, rotary=rotary)]
    index = whole_number(config, "index_head_dim")
    if index is not None:
        # Sparse attention selects its tokens by separate index keys: one byte per number, and a
        # scale of four bytes for each 128 numbers.
        groups.append(
            LayerGroup(
                LayerCacheKind.LATENT, attending, 1, index, fixed_bytes=index + 4 * -(-index // 128)
            )
        )
    return tuple(groups)


def _width(config: Mapping[str, Any]) -> int:
    """The width of K and V of one head together."""
    head_dim = _first(config, _HEAD_DIM)
    if head_dim is None:
        hidden, heads = _first(config, _HIDDEN), _first(config, _HEADS, MAX_HEADS)
        if hidden is None or heads is None:
            raise ConfigError(
                "config.json has neither head_dim nor both hidden_size and num_attention_heads; "
                f"{_FIX}"
            )
        if hidden % heads:
            raise ConfigError(
                f"config.json has hidden_size {hidden}, which {heads} heads do not divide, and no "
                f"head_dim; {_FIX}"
            )
        head_dim = hidden // heads
    # `v_head_dim` is 0 or missing if the model is not latent; V is then as wide as K.
    return head_dim + (whole_number(config, "v_head_dim", least=0) or head_dim)


def _kv_heads_of_layers(config: Mapping[str, Any], layers: int) -> Sequence[int]:
    """The number of KV heads of each layer; 0 for a layer without attention."""
    if config.get("block_configs") is not None:
        return _pruned_heads(config, layers)
    for key in (*_KV_HEADS, "num_key_value_heads_per_layer"):
        if isinstance(config.get(key), list):
            if len(config[key]) != layers:
                raise ConfigError(
                    f"config.json has {layers} layers, but {key} lists another number of KV "
                    "heads; correct one of them"
                )
            return whole_numbers(config, key, 0, MAX_HEADS) or []
    return [_kv_heads(config)] * layers


def _kv_heads(config: Mapping[str, Any]) -> int:
    # Falcon's first models name the number of all heads, but the heads share one K and V.
    if switch(config, "multi_query") and not switch(config, "new_decoder_architecture"):
        return 1
    for place in (config, section(config, "attn_config"), section(config, "ffn_config")):
        found = _first(place, (*_KV_HEADS, "kv_n_heads"), MAX_HEADS)
        if found is not None:
            return found
    heads = _first(config, _HEADS, MAX_HEADS)
    if heads is None:
        raise ConfigError(
            f"config.json has neither num_key_value_heads nor num_attention_heads; {_FIX}"
        )
    return heads


def _pruned_heads(config: Mapping[str, Any], layers: int) -> list[int]:
    """The KV heads of models pruned layer by layer: each block states how many heads share a K and
    V, or that its attention was removed.
    """
    heads, blocks = (
        _first(config, _HEADS, MAX_HEADS),
        list_for_layers(config, "block_configs", layers),
    )
    if heads is None or blocks is None:
        raise ConfigError(
            f"config.json has block_configs, but no num_attention_heads or no blocks in it; {_FIX}"
        )
    return [_heads_of_block(block, heads) for block in blocks]


def _heads_of_block(block: object, heads: int) -> int:
    attention = block.get("attention") if isinstance(block, Mapping) else None
    if not isinstance(attention, Mapping):
        raise ConfigError(
            f"config.json has a block in block_configs whose attention is {short(attention)}, "
            f"which must be an object; {_FIX}"
        )
    if switch(attention, "no_op") or switch(attention, "replace_with_linear"):
        return 0
    shared = whole_number(attention, "n_heads_in_group", most=heads)
    if shared is None:
        raise ConfigError(
            "config.json has a block in block_configs with attention but no n_heads_in_group; "
            f"{_FIX}"
        )
    return heads // shared


def _first(config: Mapping[str, Any], keys: Sequence[str], most: int = 10**9) -> int | None:
    return next(
        (value for key in keys if (value := whole_number(config, key, most=most)) is not None), None
    )
