"""What the identity of weights costs: hashing files, and the checksums of weights in memory.

    .venv-vllm/bin/python benchmarks/measure_weight_identity.py
    python benchmarks/measure_weight_identity.py --device cuda --gigabytes 16

The interpreter needs vLLM; files are in the page cache. Prints median seconds per GB (10^9 bytes).
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from kvferry.vllm.identity.loaded_weights import LoadedWeights
from kvferry.weight_files import digest_files

ROWS, COLUMNS = 14336, 4096
TENSOR_BYTES = 2 * ROWS * COLUMNS
MAX_FILES_BYTES = 4 * 10**9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    num_bytes = round(options.gigabytes * 1e9)
    with tempfile.TemporaryDirectory() as folder:
        sizes = min(num_bytes, MAX_FILES_BYTES) // 8
        paths = [Path(folder) / f"model-{number}.safetensors" for number in range(8)]
        for path in paths:
            path.write_bytes(os.urandom(sizes))
        nowhere = {"XDG_CACHE_HOME": "/dev/null"}
        show("8 files, hashed", 8 * sizes, options.rounds, lambda: digest_files(paths, nowhere))
        time.sleep(2.5)  # A result is kept only for files that have not just been written.
        kept = {"XDG_CACHE_HOME": folder}
        digest_files(paths, kept)
        show("8 files, results kept", 8 * sizes, options.rounds, lambda: digest_files(paths, kept))
    model = torch.nn.Module()
    for number in range(max(1, num_bytes // TENSOR_BYTES)):
        tensor = torch.randn(ROWS, COLUMNS, dtype=torch.bfloat16, device=options.device)
        setattr(model, f"weight{number}", torch.nn.Parameter(tensor, requires_grad=False))
    get_layerwise_info(model)
    in_memory = TENSOR_BYTES * len(list(model.parameters()))
    show(f"bfloat16 in memory, {options.device}", in_memory, options.rounds, LoadedWeights.find)


def show(what: str, num_bytes: int, rounds: int, work: Callable[[], object]) -> None:
    seconds = []
    for _ in range(rounds):
        since = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - since)
    median = statistics.median(seconds)
    print(
        f"{what}: {num_bytes / 1e9:.1f} GB in {median:.3f} s, worst {max(seconds):.3f} s: "
        f"{median / num_bytes * 1e9:.4f} s per GB",
        flush=True,
    )


if __name__ == "__main__":
    main()
