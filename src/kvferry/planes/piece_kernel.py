"""The kernel that copies many pieces of one size from anywhere to anywhere on a GPU. Sole importer of triton.

Each program copies a tile: `ROWS` pieces of up to `WIDTH` words, or a part of one piece that is longer. The addresses come from a table,
all sources in its first half, all targets in its second.
"""

import torch
import triton
import triton.language as tl

__all__ = ["launch_copy", "warm_up"]

TILE_WORDS = 4096
WIDTHS = (32, 512)
"""Words of a tile's rows; pieces of other lengths take the next, with the rest masked."""
WARPS = 8


@triton.jit(do_not_specialize=["count", "words", "tiles"])
def _copy_aligned(table, count, words, tiles, HALF: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Words of 8 bytes; addresses and sizes are multiples of 16, so that 16 are moved at a time."""
    program = tl.program_id(0)
    rows = (program // tiles) * ROWS + tl.arange(0, ROWS)
    columns = (program % tiles) * WIDTH + tl.arange(0, WIDTH)
    exists = rows < count
    sources = tl.multiple_of(tl.load(table + rows, mask=exists, other=0), 16).to(tl.pointer_type(tl.int64))
    targets = tl.multiple_of(tl.load(table + HALF + rows, mask=exists, other=0), 16).to(tl.pointer_type(tl.int64))
    mask = exists[:, None] & (columns < words)[None, :]
    moved = tl.load(sources[:, None] + columns[None, :], mask=mask, other=0)
    tl.store(targets[:, None] + columns[None, :], moved, mask=mask)


@triton.jit(do_not_specialize=["count", "words", "tiles"])
def _copy_bytes(table, count, words, tiles, HALF: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The same for what is not aligned: words of one byte."""
    program = tl.program_id(0)
    rows = (program // tiles) * ROWS + tl.arange(0, ROWS)
    columns = (program % tiles) * WIDTH + tl.arange(0, WIDTH)
    exists = rows < count
    sources = tl.load(table + rows, mask=exists, other=0).to(tl.pointer_type(tl.int8))
    targets = tl.load(table + HALF + rows, mask=exists, other=0).to(tl.pointer_type(tl.int8))
    mask = exists[:, None] & (columns < words)[None, :]
    moved = tl.load(sources[:, None] + columns[None, :], mask=mask, other=0)
    tl.store(targets[:, None] + columns[None, :], moved, mask=mask)


def launch_copy(table: torch.Tensor, count: int, size_bytes: int, is_aligned: bool) -> None:
    """Copy `count` pieces of `size_bytes` on the current stream. `table`: readable by the device, sources at the beginning of its first
    half, targets of its second; `is_aligned`: all of them and the size are multiples of 16."""
    kernel, words = (_copy_aligned, size_bytes // 8) if is_aligned else (_copy_bytes, size_bytes)
    width = next((each for each in WIDTHS if each >= words), WIDTHS[-1])
    rows = TILE_WORDS // width
    tiles = -(-words // width)
    kernel[(-(-count // rows) * tiles,)](table, count, words, tiles, table.numel() // 2, rows, width, num_warps=WARPS)


def warm_up(table: torch.Tensor, scratch: torch.Tensor) -> None:
    """Compile everything now, on the current stream, rather than in the middle of a transfer. `scratch`: 16 KiB and more of the device."""
    half = scratch.numel() // 2
    table[0], table[table.numel() // 2] = scratch.data_ptr(), scratch.data_ptr() + half
    for width in WIDTHS:
        launch_copy(table, 1, min(half, 8 * width), is_aligned=True)
        launch_copy(table, 1, min(half, width), is_aligned=False)
