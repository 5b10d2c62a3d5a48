"""The kernel that copies many pieces of one size from anywhere to anywhere on a GPU. Sole importer of triton.

Each program copies a tile: `ROWS` pieces of up to `WIDTH` words, or a part of one piece that is longer. The addresses come from a table,
first all sources, then all targets.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["PieceKernel"]

TILE_WORDS = 4096
WIDTHS = (32, 512)
"""Words of a tile's rows; pieces of other lengths take the next, with the rest masked."""
WARPS = 8


@triton.jit(do_not_specialize=["count", "words", "tiles"])
def _copy_aligned(table, count, words, tiles, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Words of 8 bytes; addresses and sizes are multiples of 16, so that 16 are moved at a time."""
    program = tl.program_id(0)
    rows = (program // tiles) * ROWS + tl.arange(0, ROWS)
    columns = (program % tiles) * WIDTH + tl.arange(0, WIDTH)
    exists = rows < count
    sources = tl.multiple_of(tl.load(table + rows, mask=exists, other=0), 16).to(tl.pointer_type(tl.int64))
    targets = tl.multiple_of(tl.load(table + count + rows, mask=exists, other=0), 16).to(tl.pointer_type(tl.int64))
    mask = exists[:, None] & (columns < words)[None, :]
    moved = tl.load(sources[:, None] + columns[None, :], mask=mask, other=0)
    tl.store(targets[:, None] + columns[None, :], moved, mask=mask)


@triton.jit(do_not_specialize=["count", "words", "tiles"])
def _copy_bytes(table, count, words, tiles, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The same for what is not aligned: words of one byte."""
    program = tl.program_id(0)
    rows = (program // tiles) * ROWS + tl.arange(0, ROWS)
    columns = (program % tiles) * WIDTH + tl.arange(0, WIDTH)
    exists = rows < count
    sources = tl.load(table + rows, mask=exists, other=0).to(tl.pointer_type(tl.int8))
    targets = tl.load(table + count + rows, mask=exists, other=0).to(tl.pointer_type(tl.int8))
    mask = exists[:, None] & (columns < words)[None, :]
    moved = tl.load(sources[:, None] + columns[None, :], mask=mask, other=0)
    tl.store(targets[:, None] + columns[None, :], moved, mask=mask)


@dataclass(frozen=True, slots=True)
class _Tiles:
    """How pieces of a size are cut."""

    rows: int
    width: int

    def grid(self, count: int, words: int) -> tuple[int, int]:
        """How many programs there are, and how many of them share a piece."""
        each = -(-words // self.width)
        return -(-count // self.rows) * each, each


class PieceKernel:
    """Compiled for the current device when it is made. Each call launches it.

    Triton works out anew with every call which of its variants is meant, which takes longer than all else here together. So the variants
    that it made are kept and launched as they are, if that is seen to work with this triton."""

    def __init__(self, table: torch.Tensor, scratch: torch.Tensor) -> None:
        """`table`: as for calls; `scratch`: some memory of the device that holds nothing yet."""
        self._variants: dict[tuple[bool, int], Any] = {}
        stream = torch.cuda.current_stream()
        half = scratch.numel() // 2
        table[0], table[1] = scratch.data_ptr(), scratch.data_ptr() + half
        for is_aligned in (True, False):
            for width in WIDTHS:
                size_bytes = width * (8 if is_aligned else 1)
                variant = self._compile(table, size_bytes, is_aligned)
                self._variants[is_aligned, width] = variant
                if not self._works(table, scratch, size_bytes, is_aligned, stream):
                    self._variants[is_aligned, width] = None

    def __call__(self, table: torch.Tensor, count: int, size_bytes: int, is_aligned: bool, stream: torch.cuda.Stream) -> None:
        """Copy `count` pieces of `size_bytes`. `table`: readable by the device, so many sources, then as many targets; `is_aligned`: all of
        them and the size are multiples of 16."""
        words = size_bytes // 8 if is_aligned else size_bytes
        tiles = _tiles(words)
        variant = self._variants.get((is_aligned, tiles.width))
        if variant is None:
            with torch.cuda.stream(stream):
                self._compile(table, size_bytes, is_aligned, count)
            return
        programs, each = tiles.grid(count, words)
        variant[programs, 1, 1](table.data_ptr(), count, words, each, tiles.rows, tiles.width, stream=stream.cuda_stream)

    def _compile(self, table: torch.Tensor, size_bytes: int, is_aligned: bool, count: int = 1) -> Any:
        """By triton's own way, which launches too."""
        kernel, words = (_copy_aligned, size_bytes // 8) if is_aligned else (_copy_bytes, size_bytes)
        tiles = _tiles(words)
        programs, each = tiles.grid(count, words)
        return kernel[(programs,)](table, count, words, each, tiles.rows, tiles.width, num_warps=WARPS)

    def _works(self, table: torch.Tensor, scratch: torch.Tensor, size_bytes: int, is_aligned: bool, stream: torch.cuda.Stream) -> bool:
        half = scratch.numel() // 2
        scratch[:half].fill_(7)
        scratch[half:].zero_()
        try:
            self(table, 1, size_bytes, is_aligned, stream)
        except Exception:  # whatever another version of triton has against it
            return False
        return bool((scratch[half : half + size_bytes] == 7).all()) and not bool(scratch[half + size_bytes :].any())


def _tiles(words: int) -> _Tiles:
    width = next((each for each in WIDTHS if each >= words), WIDTHS[-1])
    return _Tiles(TILE_WORDS // width, width)
