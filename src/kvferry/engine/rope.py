"""Rotary positions: the table of cosines and sines, and the rotation. Pure."""

import math
from dataclasses import dataclass

import torch

from kvferry.engine.layer_kinds import LinearScaling, Llama3Scaling, RopeConfig

__all__ = ["RotaryTable", "make_rotary_table"]


@dataclass(frozen=True, slots=True, eq=False)
class RotaryTable:
    """cos and sin of every position, [positions, head_dim / 2]."""

    cos: torch.Tensor
    sin: torch.Tensor

    def at(self, positions: torch.Tensor) -> "RotaryTable":
        """The rows of these positions, shaped to broadcast over heads."""
        return RotaryTable(self.cos[positions, None], self.sin[positions, None])

    def on(self, device: torch.device) -> "RotaryTable":
        return RotaryTable(self.cos.to(device), self.sin.to(device))

    def rotate(self, heads: torch.Tensor) -> torch.Tensor:
        """`heads` is [tokens, heads, head_dim]; dimension i turns with dimension i + head_dim / 2."""
        return torch.cat(self._rotated(*heads.chunk(2, dim=-1)), dim=-1)

    def rotate_interleaved(self, heads: torch.Tensor) -> torch.Tensor:
        """The same where dimension 2i turns with dimension 2i + 1."""
        return torch.stack(self._rotated(heads[..., 0::2], heads[..., 1::2]), dim=-1).flatten(-2)

    def _rotated(self, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return first * self.cos - second * self.sin, second * self.cos + first * self.sin


def make_rotary_table(rope: RopeConfig, head_dim: int, positions: int, dtype: torch.dtype) -> RotaryTable:
    """Angles are made in float32 even when arithmetic is wider: exact ones would differ by up to 1e-4 at far positions from those the
    checkpoint was trained and is served with elsewhere."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    match rope.scaling:
        case LinearScaling(factor):
            frequencies = frequencies / factor
        case Llama3Scaling():
            frequencies = _scaled(frequencies, rope.scaling)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    return RotaryTable(angles.cos().to(dtype), angles.sin().to(dtype))


def _scaled(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Short wavelengths stay, long ones are stretched by `factor`, between the two it blends.

    turns = how often a frequency turns within the first training context:
        turns > high_freq_factor          as it is
        turns < low_freq_factor           divided by factor
    """
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return blend * frequencies + (1 - blend) * frequencies / scaling.factor
