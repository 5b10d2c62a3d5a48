"""Measure the copies between a GPU's cache and pinned rows against plain pinned copies:

    python benchmarks/measure_gpu_rows.py

For each size of a block in one layer: 32 layers, rows of one block, 512 MiB in all, random blocks.
Bandwidths are medians of rounds taken in turns.
"""

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from kvferry.transports.base import RowBlocks
from kvferry.transports.copy.cuda_rows import CudaRowCopier
from kvferry.transports.shm import SharedMemory
from kvferry.types import MemoryKind, Region

LAYERS, TOTAL_BYTES, ROUNDS = 32, 512 << 20, 9


def main() -> None:
    print(
        "| block of a layer | store GB/s | load GB/s | plain D2H | plain H2D | store ÷ | load ÷ |"
    )
    print("|---|---|---|---|---|---|---|")
    for block_bytes in (4096, 16384, 65536, 262144):
        times = measure(block_bytes)
        rates = {name: TOTAL_BYTES / statistics.median(each) / 1e9 for name, each in times.items()}
        print(
            f"| {block_bytes // 1024} KiB | {rates['save']:.1f} | {rates['load']:.1f} | "
            f"{rates['d2h']:.1f} | {rates['h2d']:.1f} | {rates['save'] / rates['d2h']:.2f} | "
            f"{rates['load'] / rates['h2d']:.2f} |",
            flush=True,
        )


def measure(block_bytes: int) -> dict[str, list[float]]:
    num_rows = TOTAL_BYTES // (LAYERS * block_bytes)
    num_blocks = 2 * num_rows
    cache = torch.zeros(LAYERS, num_blocks, block_bytes, dtype=torch.uint8, device="cuda")
    memory = SharedMemory.allocate(TOTAL_BYTES)
    regions = [
        Region(f"{n}", cache[n].data_ptr(), block_bytes, block_bytes, num_blocks, MemoryKind.VRAM)
        for n in range(LAYERS)
    ]
    copier = CudaRowCopier(regions)
    copier.pin(memory.address, memory.size_bytes)
    ids = np.random.default_rng(7).permutation(num_blocks)[:num_rows].tolist()
    rows = [
        RowBlocks(memory.address + n * LAYERS * block_bytes, 0, (block,))
        for n, block in enumerate(ids)
    ]
    plain = torch.empty(TOTAL_BYTES, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(TOTAL_BYTES, dtype=torch.uint8, device="cuda")

    def copied(to: torch.Tensor, source: torch.Tensor) -> None:
        to.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    actions: dict[str, Callable[[], object]] = {
        "save": lambda: copier.save(rows),
        "load": lambda: copier.load(rows),
        "d2h": lambda: copied(plain, on_device),
        "h2d": lambda: copied(on_device, plain),
    }
    times: dict[str, list[float]] = {name: [] for name in actions}
    for round_ in range(ROUNDS + 2):
        for name, action in actions.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            action()
            if round_ >= 2:
                times[name].append(time.perf_counter() - began)
    copier.close()
    return times


if __name__ == "__main__":
    main()
