"""From a model's config.json to the shape of its KV cache. Pure; reads wider than any one engine can compute."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kvferry.errors import ConfigError
from kvferry.sizing.keys import MAX_HEADS, MAX_LAYERS, list_for_layers, section, short, switch, whole_number, whole_numbers
from kvferry.sizing.layers import layer_views
from kvferry.sizing.shape import LayerCacheKind, LayerGroup, ModelCacheShape, canonical_dtype

__all__ = ["auto_dtype", "shape_of_config", "text_config"]

_NESTED = ("text_config", "language_config", "llm_config", "thinker_config")
"""Where models that also see or hear keep their language model's settings."""
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
    "llama4_text": {"num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "attention_chunk_size": 8192},
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {"head_dim": 128},
    "qwen3_next": {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4},
    "mistral": {"num_key_value_heads": 8},
    "mixtral": {"num_key_value_heads": 8},
}
"""What these files leave out when it is the family's usual value."""
MAX_GROUPS = 64
_FIX = "give --layers, --kv-heads and --head-dim instead of MODEL"


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's own settings, with those of its family where the file is silent."""
    while (nested := next((config[key] for key in _NESTED if isinstance(config.get(key), Mapping)), None)) is not None:
        config = nested
    return {**_FAMILY_DEFAULTS.get(str(config.get("model_type")), {}), **{k: v for k, v in config.items() if v is not None}}


def shape_of_config(config: Mapping[str, Any], dtype: str) -> ModelCacheShape:
    """ConfigError, one sentence with the fix, for what is missing or impossible."""
    found = text_config(config)
    if switch(config, "is_encoder_decoder"):
        raise ConfigError(f"config.json is of a model with an encoder, whose cache does not follow the prompt; {_FIX}")
    layers = _first(found, _LAYERS, MAX_LAYERS)
    if layers is None:
        raise ConfigError(f"config.json does not say how many layers there are (num_hidden_layers); {_FIX}")
    if whole_number(found, "kv_lora_rank") is not None:
        return ModelCacheShape(_latent_groups(found, layers), dtype)
    heads = _kv_heads_of_layers(found, layers)
    width = _width(found)
    alike: Counter[tuple[LayerCacheKind, int, int | None]] = Counter()
    for view, kv_heads in zip(layer_views(found, layers), heads, strict=False):
        if view is not None and kv_heads:
            alike[view[0], kv_heads, view[1]] += 1
    if len(alike) > MAX_GROUPS:
        raise ConfigError(f"config.json has layers of {len(alike):,} different sizes, {MAX_GROUPS} are the most that are planned; {_FIX}")
    return ModelCacheShape(tuple(LayerGroup(kind, count, kv, width, window) for (kind, kv, window), count in alike.items()), dtype)


def auto_dtype(config: Mapping[str, Any]) -> str | None:
    """What an engine takes when it is not told: the cache of the quantisation, else the dtype of the weights. None: the file is silent."""
    quantised = config.get("quantization_config")
    scheme = quantised.get("kv_cache_scheme") if isinstance(quantised, Mapping) else None
    if isinstance(scheme, Mapping) and scheme.get("num_bits") == 8:
        return "fp8" if scheme.get("type", "float") == "float" else "int8"
    found = text_config(config)
    name = next((place[key] for place in (found, config) for key in ("torch_dtype", "dtype") if isinstance(place.get(key), str)), None)
    return None if name is None else canonical_dtype(name)


def _latent_groups(config: Mapping[str, Any], layers: int) -> tuple[LayerGroup, ...]:
    rank, rotary = whole_number(config, "kv_lora_rank") or 0, whole_number(config, "qk_rope_head_dim", least=0)
    if rotary is None:
        raise ConfigError("config.json has kv_lora_rank but no qk_rope_head_dim, which latent attention needs; add it")
    attending = sum(view is not None for view in layer_views(config, layers))
    if not attending:
        return ()
    groups = [LayerGroup(LayerCacheKind.LATENT, attending, 1, rank + rotary, rotary=rotary)]
    index = whole_number(config, "index_head_dim")
    if index is not None:
        # Sparse attention finds its tokens by keys of their own: one byte a number and a scale of four for each 128.
        groups.append(LayerGroup(LayerCacheKind.LATENT, attending, 1, index, fixed_bytes=index + 4 * -(-index // 128)))
    return tuple(groups)


def _width(config: Mapping[str, Any]) -> int:
    """K and V of one head."""
    head_dim = _first(config, _HEAD_DIM)
    if head_dim is None:
        hidden, heads = _first(config, _HIDDEN), _first(config, _HEADS, MAX_HEADS)
        if hidden is None or heads is None:
            raise ConfigError(f"config.json has neither head_dim nor both hidden_size and num_attention_heads; {_FIX}")
        if hidden % heads:
            raise ConfigError(f"config.json has hidden_size {hidden}, which {heads} heads do not divide, and no head_dim; {_FIX}")
        head_dim = hidden // heads
    # 0 where a family that may be latent is not, and V is as wide as K.
    return head_dim + (whole_number(config, "v_head_dim", least=0) or head_dim)


def _kv_heads_of_layers(config: Mapping[str, Any], layers: int) -> Sequence[int]:
    """0 for a layer without attention."""
    if config.get("block_configs") is not None:
        return _pruned_heads(config, layers)
    for key in (*_KV_HEADS, "num_key_value_heads_per_layer"):
        if isinstance(config.get(key), list):
            if len(config[key]) != layers:
                raise ConfigError(f"config.json has {layers} layers, but {key} lists another number of KV heads; correct one of them")
            return whole_numbers(config, key, 0, MAX_HEADS) or []
    return [_kv_heads(config)] * layers


def _kv_heads(config: Mapping[str, Any]) -> int:
    # Falcon's first models name all heads and share one K and V among them.
    if switch(config, "multi_query") and not switch(config, "new_decoder_architecture"):
        return 1
    for place in (config, section(config, "attn_config"), section(config, "ffn_config")):
        found = _first(place, (*_KV_HEADS, "kv_n_heads"), MAX_HEADS)
        if found is not None:
            return found
    heads = _first(config, _HEADS, MAX_HEADS)
    if heads is None:
        raise ConfigError(f"config.json has neither num_key_value_heads nor num_attention_heads; {_FIX}")
    return heads


def _pruned_heads(config: Mapping[str, Any], layers: int) -> list[int]:
    """Models pruned layer by layer: each says how many heads share a K and V, or that its attention is gone."""
    heads, blocks = _first(config, _HEADS, MAX_HEADS), list_for_layers(config, "block_configs", layers)
    if heads is None or blocks is None:
        raise ConfigError(f"config.json has block_configs, but no num_attention_heads or no blocks in it; {_FIX}")
    return [_heads_of_block(block, heads) for block in blocks]


def _heads_of_block(block: object, heads: int) -> int:
    attention = block.get("attention") if isinstance(block, Mapping) else None
    if not isinstance(attention, Mapping):
        raise ConfigError(
            f"config.json has a block in block_configs whose attention is {short(attention)}, which must be an object; {_FIX}"
        )
    if switch(attention, "no_op") or switch(attention, "replace_with_linear"):
        return 0
    shared = whole_number(attention, "n_heads_in_group", most=heads)
    if shared is None:
        raise ConfigError(f"config.json has a block in block_configs with attention but no n_heads_in_group; {_FIX}")
    return heads // shared


def _first(config: Mapping[str, Any], keys: Sequence[str], most: int = 10**9) -> int | None:
    return next((value for key in keys if (value := whole_number(config, key, most=most)) is not None), None)
