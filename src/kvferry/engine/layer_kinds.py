"""What may differ from layer to layer: how far back attention looks, and the rotation of positions. Pure.

Windows are read as transformers reads them, whose defaults differ by family. Where a file says two things, or says something that
transformers ignores and other engines do not, it is refused.
"""

from dataclasses import dataclass

from kvferry.engine.config_keys import ConfigKeys

__all__ = ["GEMMA", "LayerConfig", "LinearScaling", "Llama3Scaling", "RopeConfig", "read_layers"]

GEMMA = "Gemma3ForCausalLM"
MISTRAL = "MistralForCausalLM"
QWENS = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
SLIDING, FULL = "sliding_attention", "full_attention"
DEFAULT_WINDOW = 4096
DEFAULT_MAX_WINDOW_LAYERS = 28
DEFAULT_GEMMA_PATTERN = 6


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Frequencies are divided by `factor` where the wavelength is long against the context the model was first trained on."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All frequencies are divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class RopeConfig:
    theta: float
    scaling: Llama3Scaling | LinearScaling | None = None


@dataclass(frozen=True, slots=True)
class LayerConfig:
    rope: RopeConfig
    window: int | None = None
    """Token i sees tokens i - window + 1 to i; None: all up to i."""


def read_layers(config: ConfigKeys, architecture: str) -> tuple[LayerConfig, ...]:
    """One kind per layer. A window that no position can outgrow is none."""
    is_sliding = _sliding_layers(config, architecture)
    window = None
    if any(is_sliding):
        width = config.count("sliding_window") if config.has("sliding_window") else DEFAULT_WINDOW
        window = width if width < config.count("max_position_embeddings") else None
    full_rope, sliding_rope = _gemma_ropes(config) if architecture == GEMMA else (_rope(config),) * 2
    kinds = {True: LayerConfig(sliding_rope, window), False: LayerConfig(full_rope)}
    return tuple(kinds[each] for each in is_sliding)


def _sliding_layers(config: ConfigKeys, architecture: str) -> list[bool]:
    num_layers = config.count("num_hidden_layers")
    named = _layer_types(config, num_layers)
    if architecture == MISTRAL:
        every = not config.has("sliding_window") or config.get("sliding_window") is not None
        if named is not None and named != [every] * num_layers:
            raise config.fail("layer_types", "says other than sliding_window, which a Mistral has in all layers or in none")
        return [every] * num_layers
    if architecture in QWENS:
        return _qwen_layers(config, named, num_layers)
    if architecture == GEMMA:
        pattern = config.count("sliding_window_pattern", DEFAULT_GEMMA_PATTERN)
        return [bool((layer + 1) % pattern) for layer in range(num_layers)] if named is None else named
    if config.flag("use_sliding_window") or (named is not None and any(named)):
        key = "layer_types" if named else "use_sliding_window"
        raise config.fail(key, f"asks for sliding windows, which a {architecture} does not have in transformers")
    return [False] * num_layers


def _qwen_layers(config: ConfigKeys, named: list[bool] | None, num_layers: int) -> list[bool]:
    """Qwen files carry a window even when no layer uses it."""
    is_used = config.flag("use_sliding_window") and (not config.has("sliding_window") or config.get("sliding_window") is not None)
    if named is None:
        first = config.count("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS, least=0)
        return [is_used and layer >= first for layer in range(num_layers)]
    if any(named) and not is_used:
        raise config.fail("layer_types", "has sliding_attention, but use_sliding_window is not true or sliding_window is null")
    return named


def _layer_types(config: ConfigKeys, num_layers: int) -> list[bool] | None:
    """Whether each layer is named as one with a window; None where the file does not name them."""
    names = config.get("layer_types")
    if names is None:
        return None
    if not isinstance(names, list):
        raise config.fail("layer_types", f"must be a list, got {names!r}")
    unknown = [name for name in names if name not in (FULL, SLIDING)]
    if unknown:
        raise config.fail("layer_types", f"has {unknown[0]!r}, and only full and sliding attention are supported")
    if len(names) != num_layers:
        raise config.fail("layer_types", f"names {len(names)} layers, but num_hidden_layers is {num_layers}")
    return [name == SLIDING for name in names]


def _rope(config: ConfigKeys) -> RopeConfig:
    """Old files have rope_theta beside rope_scaling, new ones both in rope_parameters."""
    section = config.section("rope_parameters") or config.section("rope_scaling") or ConfigKeys(config.path, {})
    if section.has(FULL) or section.has(SLIDING):
        raise config.fail("rope_parameters", "differ by kind of layer, which is supported for Gemma 3 only")
    return _rope_of(config, section, section.positive("rope_theta", config.positive("rope_theta", 10000.0)))


def _gemma_ropes(config: ConfigKeys) -> tuple[RopeConfig, RopeConfig]:
    """Of full and of sliding layers. Old files have rope_local_base_freq for the latter; scaling is for the former."""
    parameters = config.section("rope_parameters")
    nothing = ConfigKeys(config.path, {})
    if parameters is None:
        scaling = config.section("rope_scaling") or nothing
        full = _rope_of(config, scaling, config.positive("rope_theta", 1_000_000.0))
        return full, _rope_of(config, nothing, config.positive("rope_local_base_freq", 10_000.0))
    sections = parameters.section(FULL), parameters.section(SLIDING)
    if None in sections:
        raise config.fail("rope_parameters", f"must have {FULL} and {SLIDING}")
    full_part, sliding_part = (section or nothing for section in sections)
    full = _rope_of(config, full_part, full_part.positive("rope_theta", 1_000_000.0))
    return full, _rope_of(config, sliding_part, sliding_part.positive("rope_theta", 10_000.0))


def _rope_of(config: ConfigKeys, section: ConfigKeys, theta: float) -> RopeConfig:
    if section.positive("partial_rotary_factor", config.positive("partial_rotary_factor", 1.0)) != 1.0:
        raise config.fail("partial_rotary_factor", "must be 1: partial rotation is not supported")
    kind = section.get("rope_type") or section.get("type") or "default"
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, LinearScaling(section.positive("factor")))
    if kind != "llama3":
        raise config.fail("rope_type", f"must be default, linear or llama3, got {kind!r}")
    scaling = Llama3Scaling(
        factor=section.positive("factor"),
        low_freq_factor=section.positive("low_freq_factor"),
        high_freq_factor=section.positive("high_freq_factor"),
        original_max_position_embeddings=section.count("original_max_position_embeddings"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise config.fail("high_freq_factor", f"must be more than low_freq_factor {scaling.low_freq_factor}")
    return RopeConfig(theta, scaling)
