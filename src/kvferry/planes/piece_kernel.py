"""The kernel that copies many pieces of one size from anywhere to anywhere on a GPU. Sole importer of triton.

Each program copies a tile: `ROWS` pieces of up to `WIDTH` words, or a part of one piece that is longer. The addresses come from a table
(`copy_table.py`): the second number of a program says whose.
"""

import ctypes
import logging
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from kvferry.planes import cuda_driver
from kvferry.planes.address_copy import AddressCopies
from kvferry.planes.copy_table import TableLayout, write_table

__all__ = ["PieceKernel"]

_log = logging.getLogger(__name__)

TILE_WORDS = 4096
WIDTHS = (32, 512)
"""Words of a tile's rows; pieces of other lengths take the next, with the rest masked."""
WARPS = 8
WARP_THREADS = 32
TRIAL_SLOTS, TRIAL_PIECES = 4, 3
PARAMETERS = re.compile(r"\.entry\s+\w+\s*\(([^)]*)\)")


@triton.jit(do_not_specialize=["units", "tiles"])
def _copy(table, units, tiles, ROWS: tl.constexpr, WIDTH: tl.constexpr, IS_ALIGNED: tl.constexpr):
    """Words of 8 bytes where addresses and sizes are multiples of 16, else of one. `units`: of two words there, by which the compiler sees
    that two can be moved at a time."""
    program = tl.program_id(0)
    place = table + tl.program_id(1) * 5
    rows = (program // tiles) * ROWS + tl.arange(0, ROWS)
    columns = (program % tiles) * WIDTH + tl.arange(0, WIDTH)
    exists = rows < tl.load(place + 4)
    sources = tl.load(place) + tl.load(table + tl.load(place + 2) + rows, mask=exists, other=0)
    targets = tl.load(place + 1) + tl.load(table + tl.load(place + 3) + rows, mask=exists, other=0)
    if IS_ALIGNED:
        origins = tl.multiple_of(sources.to(tl.pointer_type(tl.int64)), 16)
        ends = tl.multiple_of(targets.to(tl.pointer_type(tl.int64)), 16)
        words = units * 2
    else:
        origins = sources.to(tl.pointer_type(tl.int8))
        ends = targets.to(tl.pointer_type(tl.int8))
        words = units
    mask = exists[:, None] & (columns < words)[None, :]
    tl.store(ends[:, None] + columns[None, :], tl.load(origins[:, None] + columns[None, :], mask=mask, other=0), mask=mask)


@dataclass(frozen=True, slots=True)
class _Shape:
    """How pieces of a size are cut, and what a word is."""

    rows: int
    width: int
    words: int
    is_aligned: bool

    @property
    def units(self) -> int:
        return self.words // 2 if self.is_aligned else self.words

    @property
    def tiles(self) -> int:
        """How many programs share a piece."""
        return -(-self.words // self.width)

    def grid(self, layout: TableLayout) -> tuple[int, int, int]:
        return -(-layout.most_rows // self.rows) * self.tiles, layout.num_places, 1


@cache
def _shape_of(size_bytes: int, is_aligned: bool) -> _Shape:
    words = size_bytes // 8 if is_aligned else size_bytes
    width = next((each for each in WIDTHS if each >= words), WIDTHS[-1])
    return _Shape(TILE_WORDS // width, width, words, is_aligned)


class _Variant:
    """One that triton has compiled, launched by a call of the driver."""

    def __init__(self, compiled: Any) -> None:
        """ValueError when it is not of the kind that we know: other versions of triton give kernels more than we have asked for."""
        meta = compiled.metadata
        kinds = _parameter_kinds(compiled.asm["ptx"])
        spaces = (getattr(meta, f"{kind}_scratch_size", 0) for kind in ("global", "profile"))
        specials = (getattr(meta, f"launch_{kind}", False) for kind in ("cooperative_grid", "pdl"))
        # Beside ours there may be addresses of memory that it works in, of which ours needs none.
        if kinds[:3] != ["u64", "u32", "u32"] or {*kinds[3:]} - {"u64"} or any(spaces) or any(specials) or meta.num_ctas != 1:
            raise ValueError(f"parameters {kinds} of {meta}")
        self._function: int = compiled.function
        self._threads, self._shared_bytes = meta.num_warps * WARP_THREADS, meta.shared
        self._table, self._units, self._tiles = ctypes.c_uint64(), ctypes.c_int32(), ctypes.c_int32()
        nothing = ctypes.c_uint64()
        self._values = (self._table, self._units, self._tiles, *[nothing] * (len(kinds) - 3))
        self._pointers = (ctypes.c_void_p * len(kinds))(*map(ctypes.addressof, self._values))
        self._arguments = ctypes.addressof(self._pointers)

    def launch(self, table: int, shape: _Shape, layout: TableLayout, stream: int) -> None:
        self._table.value, self._units.value, self._tiles.value = table, shape.units, shape.tiles
        cuda_driver.launch(self._function, shape.grid(layout), self._threads, self._shared_bytes, stream, self._arguments)


def _parameter_kinds(ptx: str) -> list[str]:
    found = PARAMETERS.search(ptx)
    return re.findall(r"\.param\s+\.(\w+)", found[1]) if found else []


class PieceKernel:
    """Compiled for the current device when it is made. Each call launches it.

    Triton works out anew with every call which of its variants is meant, and what belongs to it, which takes longer than all else here
    together. So the variants that it made are launched by the driver's own call, if that is seen to work with this triton."""

    def __init__(self, table: torch.Tensor, scratch: torch.Tensor) -> None:
        """`table`: some numbers that the device can read; `scratch`: some memory of the device that holds nothing yet."""
        self._variants: dict[tuple[bool, int], _Variant] = {}
        layout = write_table(table.numpy(), _trial(scratch.data_ptr(), scratch.numel()))
        for is_aligned in (True, False):
            for width in WIDTHS:
                size_bytes = width * (8 if is_aligned else 1)
                compiled = self._compile(table, layout, _shape_of(size_bytes, is_aligned))
                try:
                    self._variants[is_aligned, width] = _Variant(compiled)
                    self._check(table, layout, scratch, size_bytes, is_aligned)
                except Exception as error:  # whatever another version of triton has against it
                    self._variants.pop((is_aligned, width), None)
                    _log.info("kernels are launched by triton itself, slower: %s", error)

    def __call__(self, table: torch.Tensor, layout: TableLayout, size_bytes: int, is_aligned: bool, stream: torch.cuda.Stream) -> None:
        """Copy pieces of `size_bytes`. `table`: laid out like that, readable by the device; `is_aligned`: all addresses and the size are
        multiples of 16."""
        shape = _shape_of(size_bytes, is_aligned)
        variant = self._variants.get((is_aligned, shape.width))
        if variant is None:
            with torch.cuda.stream(stream):
                self._compile(table, layout, shape)
            return
        variant.launch(table.data_ptr(), shape, layout, stream.cuda_stream)

    def _compile(self, table: torch.Tensor, layout: TableLayout, shape: _Shape) -> Any:
        """By triton's own way, which launches too."""
        return _copy[shape.grid(layout)](table, shape.units, shape.tiles, shape.rows, shape.width, shape.is_aligned, num_warps=WARPS)

    def _check(self, table: torch.Tensor, layout: TableLayout, scratch: torch.Tensor, size_bytes: int, is_aligned: bool) -> None:
        half = scratch.numel() // 2
        scratch[:half].fill_(7)
        scratch[half:].zero_()
        expected = torch.zeros_like(scratch[half:])
        expected.view(TRIAL_SLOTS, -1)[:TRIAL_PIECES, :size_bytes] = 7
        self(table, layout, size_bytes, is_aligned, torch.cuda.current_stream())
        if not torch.equal(scratch[half:], expected):
            raise ValueError("it does not copy what it was told to")


def _trial(first: int, size_bytes: int) -> list[AddressCopies]:
    """Two places with one row and with two: from the first half of some memory to the first slots of the other."""
    half, slot = size_bytes // 2, size_bytes // 2 // TRIAL_SLOTS
    rows = np.arange(2, dtype=np.int64) * slot
    one = AddressCopies(slot, rows[:1], rows[:1], (first,), (first + half,))
    return [one, AddressCopies(slot, rows, rows, (first,), (first + half + slot,))]
