"""Copies between a cache on a GPU and the rows of storage tiers in pinned host memory.

A load is one kernel per batch: kernels can access pinned host memory like device memory, and one
copy for each segment would cost the calling thread tens of microseconds. A request waits for it. No
request waits for a store, so it must not take processors of the GPU from the engine: a kernel
gathers the blocks of a batch in a stage on the device, which takes no time, and the copy engines
move whole rows to the host. Each direction has streams and a thread of its own.

The GPU computes the checksums of the blocks in the cache: before a block is stored, and after it
was loaded. So a checksum covers the way over the bus and back, and costs no time of a CPU.

Rows in memory that is not pinned, such as those of another engine's segment, go through a small
pinned buffer.
"""

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
import torch

from kvferry.errors import ConfigError, LocalProtocolError
from kvferry.transports.base import RowBlocks
from kvferry.transports.copy.checksum import (
    GROUP_BYTES,
    PIECE_BYTES,
    checksum_key,
    powers_of_multiplier,
)
from kvferry.transports.copy.cuda import CudaAddressCopier, CudaCopyJob, DeviceArray
from kvferry.transports.copy.gather import AddressCopies
from kvferry.transports.copy.rows import check_block_ids, copy_row, regions_of, row_segments
from kvferry.transports.copy.segments import Offsets
from kvferry.transports.cuda_ipc import driver as cuda_driver
from kvferry.types import MemoryKind, Region

STAGE_BYTES = 32 * 1024 * 1024
"""The device memory of a batch, and of a pinned buffer. Each direction has `NUM_STAGES`, allocated
by its first copy.
"""
NUM_STAGES = 2
LOAD_BYTES = 64 * 1024 * 1024
"""The most bytes of one launch of a load. While the GPU sums one batch, it copies the next."""
POLL_S = 0.0001
PORTABLE_AND_MAPPED = 3
"""Flags of cudaHostRegister."""

_log = logging.getLogger(__name__)


class CudaRowCopier:
    """Implements `transports.base.RowCopier` for a cache on one CUDA device."""

    def __init__(self, regions: Sequence[Region]) -> None:
        devices = {region.device for region in regions}
        if len(devices) != 1 or any(region.memory is not MemoryKind.VRAM for region in regions):
            raise LocalProtocolError("this copier is for a cache on one CUDA device")
        self._regions = tuple(regions)
        self._device = devices.pop()
        self._pinned: dict[int, int] = {}
        """The size of each pinned range by its address."""
        self._saving, self._loading = (_Direction(self._device, regions) for _ in range(2))

    def row_bytes(self, group: int, num_blocks: int) -> int:
        return num_blocks * sum(region.block_bytes for region in regions_of(group, self._regions))

    def save(self, rows: Sequence[RowBlocks]) -> list[int]:
        self._check(rows)
        with self._saving as direction:
            for batch in self._batches(rows, STAGE_BYTES):
                size = self.row_bytes(batch[0].group, len(batch[0].block_ids))
                if self._is_pinned(batch, size):
                    direction.copy_from_cache(batch, size)
                    continue
                direction.copy_from_cache(direction.bounce_rows(batch, size), size)
                direction.wait()
                for row, stage in zip(batch, direction.bounce_rows(batch, size), strict=True):
                    ctypes.memmove(row.address, stage.address, size)
            return direction.take_sums()

    def load(self, rows: Sequence[RowBlocks]) -> list[int]:
        self._check(rows)
        with self._loading as direction:
            for batch in self._batches(rows, LOAD_BYTES):
                size = self.row_bytes(batch[0].group, len(batch[0].block_ids))
                source = batch
                if not self._is_pinned(batch, size):
                    direction.wait()  # an earlier batch may still use the buffer
                    source = direction.bounce_rows(batch, size)
                    for row, stage in zip(batch, source, strict=True):
                        ctypes.memmove(stage.address, row.address, size)
                direction.copy_to_cache(source)
            return direction.take_sums()

    def copy_row(self, row: RowBlocks, target: int) -> int:
        return copy_row(row, target, self._regions)

    def pin(self, address: int, size_bytes: int) -> None:
        status = int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, PORTABLE_AND_MAPPED))
        if status:
            _log.warning(
                "host memory of a tier cannot be pinned, so copies are slower bytes=%d "
                "cuda_error=%d",
                size_bytes,
                status,
            )
            return
        self._pinned[address] = size_bytes

    def unpin(self, address: int) -> None:
        if self._pinned.pop(address, None) is not None:
            torch.cuda.cudart().cudaHostUnregister(address)

    def close(self) -> None:
        """Wait for the device, then unpin all memory. Idempotent."""
        for direction in (self._saving, self._loading):
            direction.close()
        for address in list(self._pinned):
            self.unpin(address)

    def _check(self, rows: Sequence[RowBlocks]) -> None:
        """LocalProtocolError if a block does not exist; then nothing is copied. The other checks of
        `row_segments` follow batch by batch.
        """
        for group in {row.group for row in rows}:
            ids = [block for row in rows if row.group == group for block in row.block_ids]
            check_block_ids(ids, regions_of(group, self._regions))

    def _batches(self, rows: Sequence[RowBlocks], batch_bytes: int) -> Iterator[list[RowBlocks]]:
        """Cut rows into batches of one group and one length."""
        for (group, num_blocks), alike in groupby(
            rows, lambda row: (row.group, len(row.block_ids))
        ):
            same = list(alike)
            size = self.row_bytes(group, num_blocks)
            at_once = max(1, batch_bytes // max(1, size))
            for first in range(0, len(same), at_once):
                yield same[first : first + at_once]

    def _is_pinned(self, rows: Sequence[RowBlocks], size_bytes: int) -> bool:
        first = min(row.address for row in rows)
        end = max(row.address for row in rows) + size_bytes
        return any(
            address <= first and end <= address + size for address, size in self._pinned.items()
        )


# -- one direction --


class _Stage:
    """Device memory for one batch on its way between blocks and rows."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.memory = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self.is_free = torch.cuda.Event()
        """Recorded behind the last work that uses the memory. At first that is other work: torch
        may hand out memory that kernels on the calling thread's stream still write.
        """
        self.is_free.record(torch.cuda.current_stream(device))


def _moved(rows: Sequence[RowBlocks], memory: torch.Tensor, size_bytes: int) -> list[RowBlocks]:
    """Return the same rows in this memory, one behind the other."""
    address = memory.data_ptr()
    return [replace(row, address=address + n * size_bytes) for n, row in enumerate(rows)]


_Side = tuple[Offsets, tuple[int, ...]]
"""Offsets, and the base addresses that they are added to."""


class _Direction:
    """The streams, the buffers and the unfinished sums of one direction. Used by one thread at a
    time: the lock is for two callers of the same direction.
    """

    def __init__(self, device: int, regions: Sequence[Region]) -> None:
        self._device = torch.device("cuda", device)
        self._regions = tuple(regions)
        self._copier = CudaAddressCopier(device)
        self._sums = BlockSums(regions, self._device)
        self._stream = torch.cuda.Stream(self._device)
        """Where the copy engines work."""
        self._stages: list[_Stage] = []
        self._bounce: torch.Tensor | None = None
        self._job: CudaCopyJob | None = None
        self._threads: set[int] = set()
        self._lock = threading.Lock()

    def __enter__(self) -> "_Direction":
        self._lock.acquire()
        if threading.get_ident() not in self._threads:
            self._threads.add(threading.get_ident())
            torch.cuda.set_device(self._device)
            cuda_driver.ignore_captures()
        return self

    def __exit__(self, *failure: object) -> None:
        # The caller reuses the memory as soon as the call returns.
        try:
            self._finish()
        finally:
            self._lock.release()

    def copy_from_cache(self, rows: Sequence[RowBlocks], size_bytes: int) -> None:
        """Start a copy to rows, and the sums of its blocks."""
        stage = self._next_stage(len(rows) * size_bytes)
        staged = _moved(rows, stage.memory, size_bytes)
        self._copier.wait_before_next(stage.is_free)
        job = self._copier.start(
            [
                AddressCopies(size, blocks[0], hosts[0], blocks[1], hosts[1])
                for size, blocks, hosts in self._places(staged)
            ]
        )
        job.make_wait(self._stream)
        self._copy_rows(rows, staged, size_bytes)
        stage.is_free.record(self._stream)
        self._sums.start(rows)

    def copy_to_cache(self, rows: Sequence[RowBlocks]) -> None:
        """Start a copy from rows, and then the sums of the blocks."""
        self._job = self._copier.start(
            [
                AddressCopies(size, hosts[0], blocks[0], hosts[1], blocks[1])
                for size, blocks, hosts in self._places(rows)
            ]
        )
        self._job.make_wait(self._sums.stream)
        self._sums.start(rows)

    def _copy_rows(
        self, targets: Sequence[RowBlocks], sources: Sequence[RowBlocks], size_bytes: int
    ) -> None:
        """Copy whole rows by the copy engines, which leaves the processors of the GPU to the
        engine.
        """
        to, origin = (
            np.array([row.address for row in rows], np.uint64) for rows in (targets, sources)
        )
        if cuda_driver.can_copy_in_batches():
            sizes = np.full(len(to), size_bytes, np.uint64)
            cuda_driver.copy_batch(to, origin, sizes, self._stream.cuda_stream)
            return
        for target, source in zip(to.tolist(), origin.tolist(), strict=True):
            cuda_driver.copy_async(target, source, size_bytes, self._stream.cuda_stream)

    def _next_stage(self, size_bytes: int) -> _Stage:
        """Take turns between two stages, so that a batch is copied while another is gathered."""
        stage = self._stages.pop(0) if len(self._stages) == NUM_STAGES else None
        if stage is not None and len(stage.memory) < size_bytes:
            stage.is_free.synchronize()
            stage = None
        if stage is None:
            stage = _Stage(max(STAGE_BYTES, size_bytes), self._device)
        self._stages.append(stage)
        return stage

    def _places(self, rows: Sequence[RowBlocks]) -> Iterator[tuple[int, _Side, _Side]]:
        """For regions of one size and stride: the size of a block, and where all blocks are in the
        cache and in the rows.
        """
        regions = regions_of(rows[0].group, self._regions)
        ends = np.cumsum([region.block_bytes for region in regions]).tolist()
        ids = np.array([row.block_ids for row in rows], np.int64)
        nth = np.arange(ids.shape[1], dtype=np.int64) * ends[-1]
        hosts = (np.array([row.address for row in rows], np.int64)[:, None] + nth).ravel()
        placed = sorted(
            (region.block_bytes, region.stride_bytes, region.address, end - region.block_bytes)
            for region, end in zip(regions, ends, strict=True)
        )
        for (size, stride), alike in groupby(placed, lambda place: place[:2]):
            _, _, addresses, in_row = zip(*alike, strict=True)
            yield size, ((ids * stride).ravel(), addresses), (hosts, in_row)

    def take_sums(self) -> list[int]:
        """Wait for all copies and sums, and return the checksums in order."""
        self.wait()
        self._copier.wait()
        return self._sums.take()

    def bounce_rows(self, rows: Sequence[RowBlocks], size_bytes: int) -> list[RowBlocks]:
        """The same rows in the pinned buffer."""
        if self._bounce is None or len(self._bounce) < len(rows) * size_bytes:
            self._bounce = torch.empty(
                max(STAGE_BYTES, len(rows) * size_bytes), dtype=torch.uint8, pin_memory=True
            )
        return _moved(rows, self._bounce, size_bytes)

    def wait(self) -> None:
        """Wait until no copy is active, without occupying a processor."""
        done = torch.cuda.Event()
        done.record(self._stream)
        while not done.query() or not (self._job is None or self._job.is_done()):
            time.sleep(POLL_S)
        self._job = None

    def close(self) -> None:
        self._finish()
        self._stages, self._bounce = [], None
        self._copier.close()

    def _finish(self) -> None:
        self._copier.wait()
        self._stream.synchronize()
        self._sums.take()


# -- checksums --
# The definition is in `copy/checksum.py`. torch has no unsigned 64-bit arithmetic, but signed
# numbers wrap around in the same way.


class BlockSums:
    """Computes the checksums of rows from the blocks in a cache, on a stream of its own."""

    def __init__(self, regions: Sequence[Region], device: torch.device) -> None:
        for region in regions:
            if region.block_bytes % GROUP_BYTES:
                raise ConfigError(
                    f"a block of {region.name} has {region.block_bytes} bytes, which is not a "
                    f"multiple of {GROUP_BYTES}: its KV cannot be kept in tiers"
                )
        self._regions = tuple(regions)
        self._device = device
        self.stream = torch.cuda.Stream(device)
        self._key = torch.from_numpy(checksum_key().view(np.int32).copy()).to(device)
        self._sum = _best_sum()
        self._sums: list[torch.Tensor] = []
        self._known_weights: dict[int, torch.Tensor] = {}

    def start(self, rows: Sequence[RowBlocks]) -> None:
        """Start the sums of rows of one group and one length."""
        segments = row_segments(rows, self._regions)
        pieces = -(-segments.sizes // PIECE_BYTES)
        total = int(pieces.sum())
        # Pinned, because an upload from other memory waits for all earlier work of the stream.
        table = torch.empty(3, len(pieces), dtype=torch.int64, pin_memory=True)
        table.numpy()[:] = segments.cache, segments.sizes, np.cumsum(pieces) - pieces
        with torch.cuda.stream(self.stream):
            addresses, sizes, before = table.to(self._device, non_blocking=True)
            values = self._sum(addresses, sizes, before, self._key, (int(pieces.max()), total))
            per_row = values.view(len(rows), total // len(rows))
            self._sums.append((per_row * self._weights(per_row.shape[1])).sum(dim=1))

    def take(self) -> list[int]:
        """Wait for the sums, and return the checksums of all rows in order."""
        with torch.cuda.stream(self.stream):
            sums = torch.cat(self._sums).tolist() if self._sums else []
        self._sums = []
        return [number % (1 << 64) for number in sums]

    def _weights(self, num_pieces: int) -> torch.Tensor:
        """The powers of the multiplier that belong to the pieces of a row."""
        if num_pieces not in self._known_weights:
            weights = powers_of_multiplier(num_pieces)[:0:-1].astype(np.int64)
            self._known_weights[num_pieces] = torch.from_numpy(weights).to(self._device)
        return self._known_weights[num_pieces]


SumPieces = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, int]], torch.Tensor
]
"""`copy.kernel.sum_pieces`, or its substitute `sum_pieces_by_torch`."""


def _best_sum() -> SumPieces:
    try:
        from kvferry.transports.copy.kernel import sum_pieces
    except ImportError as error:
        _log.warning("checksums of tiers are computed without triton, slowly reason=%s", error)
        return sum_pieces_by_torch
    return sum_pieces


def sum_pieces_by_torch(
    addresses: torch.Tensor,
    sizes: torch.Tensor,
    firsts: torch.Tensor,
    key: torch.Tensor,
    num_pieces: tuple[int, int],
) -> torch.Tensor:
    """The same as `copy.kernel.sum_pieces`, one segment after the other."""
    sums = [
        _sum_segment(torch.as_tensor(DeviceArray(address, (size // 4,), 4), device=key.device), key)
        for address, size in zip(addresses.tolist(), sizes.tolist(), strict=True)
    ]
    return torch.cat(sums)


def _sum_segment(words: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """v of each piece of one segment."""
    parts = []
    for piece in words.split(PIECE_BYTES // 4):
        mixed = (piece ^ key[: len(piece)]).reshape(-1, 2, GROUP_BYTES // 8).to(torch.int64)
        factors = (mixed & 0xFFFFFFFF) + (1 << 32)
        parts.append((factors[:, 0] * factors[:, 1]).sum() + 4 * len(piece))
    return torch.stack(parts)
