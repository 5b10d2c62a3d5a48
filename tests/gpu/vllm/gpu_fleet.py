"""Starts real vLLM servers on this machine's GPU, many at once: each needs most of a minute and
little memory.
"""

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.e2e.harness import Engine
from tests.vllm.fleet import BY_MODULE_PATH, Fleet

from kvferry.cli.cluster.processes import ProcessStarter, spawn_process

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(500),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="this interpreter has no vLLM"
    ),
]
CONNECTORS = {
    "pull": BY_MODULE_PATH,
    "push": {**BY_MODULE_PATH, "kv_connector": "NixlPushConnector"},
}
MEMORY = (
    *("--kv-cache-memory-bytes", str(256 << 20), "--max-num-seqs", "32"),
    *("--gpu-memory-utilization", "0.02"),
)
"""So servers can start side by side on one GPU: without profiling, and although not all of its
memory is free.
"""
PRECISE = ("--attention-backend", "TRITON_ATTN")
"""With float32, which is a server's dtype unless flags say otherwise, tokens do not depend on which
requests share a step.
"""
HALF = ("--dtype", "bfloat16", "--attention-backend", "FLASH_ATTN")
VARIABLES = {
    # Triton's products in float32, not in tf32, whose rounding alone changes tokens.
    "TRITON_F32_DEFAULT": "ieee",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "OMP_NUM_THREADS": "1",
}


class GpuFleet(Fleet):
    """Its servers run with the interpreter of the tests."""

    python = Path(sys.executable)

    def way_to_start(self, command: Sequence[str]) -> ProcessStarter:
        return spawn_process  # CUDA does not survive a fork

    def on_gpu(
        self,
        name: str,
        *flags: str,
        mode: str | None = "pull",
        transfer: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
        policy: str = "fail",
        environment: Mapping[str, str] | None = None,
    ) -> Engine:
        """Start a server; `mode=None`: one without a connector. `transfer` replaces the mode's."""
        return self.vllm(
            name,
            *MEMORY,
            *flags,
            transfer=transfer or (None if mode is None else CONNECTORS[mode]),
            extra=extra,
            policy=policy,
            environment={**VARIABLES, **(environment or {})},
        )
