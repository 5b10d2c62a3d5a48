"""The bytes that a model caches for a token, layer by layer. Pure.

    per token = layers × 2 (K, V) × KV heads × head size × bytes of a number

A layer with a window holds only its last tokens; a latent layer (MLA) holds one vector for all
heads, the same on every rank.
"""

from dataclasses import dataclass
from enum import StrEnum

from kvferry.errors import ConfigError
from kvferry.protocol.planning.heads import can_divide

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}
LATENT_DTYPE = "fp8_ds_mla"
"""vLLM's format for latent layers: values of one byte, a scale of four bytes for each 128 values,
and the rotary part in two bytes per number.
"""
_SYNONYMS = {
    "fp32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "float8": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "fp8_inc": "fp8",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
}
_SCALED_TOGETHER = 128


class LayerCacheKind(StrEnum):
    """What a layer attends to, and how it stores the KV."""

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    LATENT = "latent"


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that cache alike: `layers` is their number."""

    kind: LayerCacheKind
    layers: int
    kv_heads: int
    """The number of KV heads; 1 for latent layers."""
    width: int
    """Numbers per token and head: K and V together, or the latent vector with its rotary part."""
    window: int | None = None
    """The most tokens that a layer holds; None for no limit."""
    rotary: int = 0
    """How many of the `width` numbers of a latent layer are the rotary part."""
    fixed_bytes: int = 0
    """Bytes per token and layer if no choice of dtype changes the size; 0 otherwise."""

    def held_tokens(self, tokens: int) -> int:
        return tokens if self.window is None else min(tokens, self.window)

    def held_blocks(self, tokens: int, block_size: int) -> int:
        """The number of blocks with at least one held token."""
        return -(-tokens // block_size) - (tokens - self.held_tokens(tokens)) // block_size

    def heads_per_rank(self, tp: int) -> int:
        return 1 if self.kind is LayerCacheKind.LATENT else max(1, self.kv_heads // tp)

    def head_bytes(self, dtype: str) -> int:
        """The bytes of one token and head in one layer."""
        if self.fixed_bytes:
            return self.fixed_bytes
        if dtype == LATENT_DTYPE:
            values = self.width - self.rotary
            return values + 4 * -(-values // _SCALED_TOGETHER) + 2 * self.rotary
        return self.width * DTYPE_BYTES[dtype]


@dataclass(frozen=True, slots=True)
class ModelCacheShape:
    """The KV cache of a whole model."""

    groups: tuple[LayerGroup, ...]
    dtype: str

    def __post_init__(self) -> None:
        if not self.groups:
            raise ConfigError(
                "none of the model's layers has a KV cache; engines have nothing to transfer"
            )
        if self.dtype == LATENT_DTYPE and any(
            group.kind is not LayerCacheKind.LATENT for group in self.groups
        ):
            raise ConfigError(
                f"--dtype {LATENT_DTYPE} is for models with latent attention only; use fp8"
            )

    @property
    def layers(self) -> int:
        return sum(group.layers for group in self.groups)

    def layer_bytes(self, group: LayerGroup, tp: int = 1) -> int:
        """The bytes of one token in one layer, on one of `tp` ranks."""
        return group.heads_per_rank(tp) * group.head_bytes(self.dtype)

    def bytes_per_token(self, tp: int = 1) -> int:
        """The bytes of one token while the prompt is shorter than every window."""
        return sum(group.layers * self.layer_bytes(group, tp) for group in self.groups)

    def bytes_per_late_token(self) -> int:
        """The bytes that one more token adds when every window is full."""
        return sum(
            group.layers * self.layer_bytes(group) for group in self.groups if group.window is None
        )

    def prompt_bytes(self, tokens: int, tp: int = 1) -> int:
        return sum(
            group.layers * self.layer_bytes(group, tp) * group.held_tokens(tokens)
            for group in self.groups
        )

    def check_tp(self, tp: int, flag: str = "--tp") -> None:
        """Raise `ConfigError` if the heads cannot be divided evenly among the ranks."""
        for group in self.groups:
            if group.kind is not LayerCacheKind.LATENT and not can_divide(group.kv_heads, tp):
                raise ConfigError(
                    f"{flag} {tp} does not fit {group.kv_heads} KV heads; use a divisor or a "
                    f"multiple of {group.kv_heads}"
                )


def canonical_dtype(name: str) -> str:
    """The dtype's usual name. Raises `ConfigError` for a dtype of unknown size."""
    plain = name.lower().removeprefix("torch.")
    found = _SYNONYMS.get(plain, plain)
    if found not in DTYPE_BYTES and found != LATENT_DTYPE:
        raise ConfigError(
            f"{name[:40]!a} is not a known cache dtype; use --dtype with one of "
            f"{', '.join([*DTYPE_BYTES, LATENT_DTYPE])}"
        )
    return found
