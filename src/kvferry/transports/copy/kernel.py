"""The kernels that copy many segments of one size between any addresses on a GPU, and that sum the
pieces of segments. The only module that imports triton.

Each program of the first copies a tile: `ROWS` segments of up to `WIDTH` words, or a part of one
longer segment. The addresses are in a table (`copy/table.py`); the second program id selects the
place in the table. The thread that owns the copier makes all calls.
"""

import logging
import re
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from kvferry.errors import TransportError
from kvferry.transports.copy.cuda_table import CudaTable
from kvferry.transports.copy.gather import AddressCopies
from kvferry.transports.copy.native import Kernel
from kvferry.transports.copy.table import TableLayout
from kvferry.transports.cuda_ipc import driver as cuda_driver

_log = logging.getLogger(__name__)

TILE_WORDS = 4096
WIDTHS = (32, 512)
"""Possible widths of a tile, in words. A segment takes the next larger width, with the rest
masked.
"""
WARPS, SUM_WARPS = 8, 4
WARP_THREADS = 32
MAX_WORDS = 1 << 31
MAX_PARAMETERS = 5
TRIAL_SLOTS, TRIAL_SEGMENTS = 4, 3
PARAMETERS = re.compile(r"\.entry\s+\w+\s*\(([^)]*)\)")


@triton.jit(do_not_specialize=["units", "tiles"])
def _copy(table, units, tiles, ROWS: tl.constexpr, WIDTH: tl.constexpr, IS_ALIGNED: tl.constexpr):
    """Copy one tile. A word has 8 bytes if all addresses and sizes are multiples of 16, otherwise 1
    byte. With words of 8 bytes `units` counts pairs of words: from `units * 2` the compiler sees
    that the number of words is even, so that it can move two words at a time.
    """
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
    tl.store(
        ends[:, None] + columns[None, :],
        tl.load(origins[:, None] + columns[None, :], mask=mask, other=0),
        mask=mask,
    )


class _Shape(NamedTuple):
    """How segments of one size are cut into tiles, and the size of a word."""

    rows: int
    width: int
    tiles: int
    """Number of programs that share one segment."""
    units: int
    is_aligned: bool

    @property
    def numbers(self) -> tuple[int, int]:
        return self.units, self.tiles

    def grid(self, layout: TableLayout) -> tuple[int, int]:
        return -(-layout.most_rows // self.rows) * self.tiles, layout.num_places


@lru_cache(maxsize=1024)
def _shape_of(size_bytes: int, is_aligned: bool) -> _Shape:
    words = size_bytes // 8 if is_aligned else size_bytes
    if words >= MAX_WORDS:
        raise TransportError(f"no kernel copies segments of {size_bytes} bytes")
    width = next((each for each in WIDTHS if each >= words), WIDTHS[-1])
    return _Shape(
        TILE_WORDS // width,
        width,
        -(-words // width),
        words // 2 if is_aligned else words,
        is_aligned,
    )


def _kernel_of(compiled: Any) -> Kernel:
    """Convert a kernel that triton compiled for the driver's launch call. ValueError if the kernel
    is not of the form that we know: some versions of triton add parameters or launch options.
    """
    meta = compiled.metadata
    kinds = _parameter_kinds(compiled.asm["ptx"])
    spaces = (getattr(meta, f"{kind}_scratch_size", 0) for kind in ("global", "profile"))
    specials = (
        getattr(meta, kind, None)
        for kind in ("launch_cooperative_grid", "launch_pdl", "instrumentation_mode")
    )
    # Further parameters may be addresses of scratch memory, which this kernel does not need.
    is_known = (
        kinds[:3] == ["u64", "u32", "u32"]
        and {*kinds[3:]} <= {"u64"}
        and len(kinds) <= MAX_PARAMETERS
    )
    if not is_known or any(spaces) or any(specials) or meta.num_ctas != 1:
        raise ValueError(f"parameters {kinds} of {meta}")
    return Kernel(compiled.function, meta.num_warps * WARP_THREADS, meta.shared, len(kinds))


def _parameter_kinds(ptx: str) -> list[str]:
    found = PARAMETERS.search(ptx)
    return re.findall(r"\.param\s+\.(\w+)", found[1]) if found else []


class SegmentKernel:
    """Compiled for the current device by the constructor. Each call starts the kernel once.

    On every call triton selects the variant to launch and its options, which takes longer than
    everything else here together. So the variants that triton compiled are started by calls of the
    driver, if a trial shows that this works with the installed triton.
    """

    def __init__(self, table: CudaTable, scratch: torch.Tensor) -> None:
        """Compile and try all variants. `scratch`: unused device memory. The caller may reuse
        `table` and `scratch` afterwards.
        """
        self._kernels: dict[tuple[bool, int], Kernel] = {}
        self._compiled = list[Any]()
        """The compiled kernels: triton unloads a kernel that has no reference."""
        stream = torch.cuda.current_stream()
        layout = table.write(_trial(scratch.data_ptr(), scratch.numel()))
        for is_aligned in (True, False):
            for width in WIDTHS:
                size_bytes = width * (8 if is_aligned else 1)
                compiled = self._start_by_triton(
                    table.upload(layout, stream), layout, _shape_of(size_bytes, is_aligned)
                )
                self._compiled.append(compiled)
                try:
                    self._kernels[is_aligned, width] = _kernel_of(compiled)
                    self._check(table, layout, scratch, size_bytes, is_aligned)
                except Exception as error:  # another version of triton: triton starts this variant
                    self._kernels.pop((is_aligned, width), None)
                    _log.info("kernels are started by triton itself, slower: %s", error)
        stream.synchronize()

    @property
    def is_started_by_driver(self) -> bool:
        """Whether the driver starts all variants, and triton only compiles."""
        return len(self._kernels) == 2 * len(WIDTHS)

    def __call__(
        self,
        table: CudaTable,
        layout: TableLayout,
        size_bytes: int,
        is_aligned: bool,
        stream: torch.cuda.Stream,
    ) -> None:
        """Copy segments of `size_bytes` by a table with this layout, and record the table's event.
        `is_aligned`: all addresses and the size are multiples of 16.
        """
        shape = _shape_of(size_bytes, is_aligned)
        kernel = self._kernels.get((is_aligned, shape.width))
        if kernel is None:
            with torch.cuda.stream(stream):
                self._start_by_triton(table.upload(layout, stream), layout, shape)
                table.event.record(stream)
            return
        source = *table.addresses, 8 * layout.num_numbers
        cuda_driver.start_kernel(
            kernel,
            source,
            shape.grid(layout),
            shape.numbers,
            stream.cuda_stream,
            table.event_handle,
        )

    def _start_by_triton(self, table: torch.Tensor, layout: TableLayout, shape: _Shape) -> Any:
        grid, numbers = shape.grid(layout), shape.numbers
        return _copy[grid](
            table, *numbers, shape.rows, shape.width, shape.is_aligned, num_warps=WARPS
        )

    def _check(
        self,
        table: CudaTable,
        layout: TableLayout,
        scratch: torch.Tensor,
        size_bytes: int,
        is_aligned: bool,
    ) -> None:
        """ValueError unless the driver's launch copies exactly the trial segments."""
        half = scratch.numel() // 2
        scratch[:half].fill_(7)
        scratch[half:].zero_()
        expected = torch.zeros_like(scratch[half:])
        expected.view(TRIAL_SLOTS, -1)[:TRIAL_SEGMENTS, :size_bytes] = 7
        self(table, layout, size_bytes, is_aligned, torch.cuda.current_stream())
        if not torch.equal(scratch[half:], expected):
            raise ValueError("the kernel copied wrong bytes")


def _trial(first: int, size_bytes: int) -> list[AddressCopies]:
    """Make a trial with one place of one row and one place of two rows. Each copies from the first
    half of some memory to the first slots of the second half.
    """
    half, slot = size_bytes // 2, size_bytes // 2 // TRIAL_SLOTS
    rows = np.arange(2, dtype=np.int64) * slot
    one = AddressCopies(slot, rows[:1], rows[:1], (first,), (first + half,))
    return [one, AddressCopies(slot, rows, rows, (first,), (first + half + slot,))]


# -- checksums --
# The kernel for the checksums of `copy/checksum.py`.


@triton.jit
def _sum(addresses, sizes, firsts, key, out):
    """Sum one piece of one segment: `v` in the definition. Each product pairs word i of a group of
    16 words with word i + 8.
    """
    segment, piece = tl.program_id(0), tl.program_id(1)
    left = tl.load(sizes + segment) - piece * 4096
    if left > 0:
        start = tl.load(addresses + segment) + piece.to(tl.int64) * 4096
        words = start.to(tl.pointer_type(tl.int32))
        nth = tl.arange(0, 512)
        low = (nth // 8) * 16 + nth % 8
        # A segment consists of whole groups, so a group exists or does not.
        exists = low * 4 < left
        one = tl.load(words + low, mask=exists, other=0) ^ tl.load(key + low)
        other = tl.load(words + low + 8, mask=exists, other=0) ^ tl.load(key + low + 8)
        factor = (one.to(tl.int64) & 0xFFFFFFFF) + 0x100000000
        factors = factor * ((other.to(tl.int64) & 0xFFFFFFFF) + 0x100000000)
        total = tl.sum(tl.where(exists, factors, 0), axis=0)
        tl.store(out + tl.load(firsts + segment) + piece, total + tl.minimum(left, 4096))


def sum_pieces(
    addresses: torch.Tensor,
    sizes: torch.Tensor,
    firsts: torch.Tensor,
    key: torch.Tensor,
    num_pieces: tuple[int, int],
) -> torch.Tensor:
    """Return the sums of all pieces, in order, on the current stream. `firsts` is the number of
    pieces before each segment; `num_pieces` the most of a segment, and those of all segments.
    """
    most, total = num_pieces
    out = torch.empty(total, dtype=torch.int64, device=addresses.device)
    _sum[(len(addresses), most)](addresses, sizes, firsts, key, out, num_warps=SUM_WARPS)
    return out
