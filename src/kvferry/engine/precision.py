"""Which number formats an engine uses: of weights, cache and arithmetic. Pure."""

from dataclasses import dataclass

import torch

from kvferry.engine.device_names import first_gpu
from kvferry.engine.options import EngineOptions
from kvferry.errors import ConfigError

__all__ = ["FLOAT64_WEIGHTS_LIMIT_BYTES", "Precision", "choose_precision"]

FLOAT64_WEIGHTS_LIMIT_BYTES = 256 * 1024 * 1024
"""Checkpoints up to this size are computed in float64: those of float32 everywhere, those of half precision on GPUs.

The order in which a matrix product adds up depends on the batch, on chunking and on the number of ranks. In float32 that moves a logit by
about 1e-6, in half precision by about 1e-3, enough to change a greedy token now and then; in float64 by about 1e-14. It costs time and, for
the weights, two to four times the memory, so models above the limit are computed in their own format. Half precision on CPUs is what one
chooses for speed, and stays as it is. The cache keeps its own format everywhere: the bytes that move are those of any other model.
"""

WEIGHT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CACHE_DTYPES = {**WEIGHT_DTYPES, "fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
COMPUTE_DTYPES = {**WEIGHT_DTYPES, "float64": torch.float64}


@dataclass(frozen=True, slots=True)
class Precision:
    weights: torch.dtype
    """The values of the weights are rounded to this; they are kept in `compute`."""
    cache: torch.dtype
    """K and V are stored in this, with a scale of 1, and widened before anything is computed with them."""
    compute: torch.dtype

    @property
    def attention(self) -> torch.dtype:
        """Scores and their softmax take at least float32, whatever the model's format."""
        return torch.promote_types(self.compute, torch.float32)


def choose_precision(options: EngineOptions, checkpoint_dtype: str, checkpoint_bytes: int) -> Precision:
    """`checkpoint_bytes` is the size of all weights, the same on every rank."""
    weights = _dtype("dtype", options.dtype, WEIGHT_DTYPES, WEIGHT_DTYPES[checkpoint_dtype])
    is_small = checkpoint_bytes <= FLOAT64_WEIGHTS_LIMIT_BYTES
    is_wide = is_small and (weights is torch.float32 or first_gpu(options.device) is not None)
    return Precision(
        weights=weights,
        cache=_dtype("kv_cache_dtype", options.kv_cache_dtype, CACHE_DTYPES, weights),
        compute=_dtype("compute_dtype", options.compute_dtype, COMPUTE_DTYPES, torch.float64 if is_wide else weights),
    )


def _dtype(key: str, name: str, known: dict[str, torch.dtype], auto: torch.dtype) -> torch.dtype:
    if name == "auto":
        return auto
    if name not in known:
        raise ConfigError(f"{key} must be auto or one of {', '.join(known)}, got {name!r}")
    return known[name]
