"""Engines on this machine's GPU, as real processes. CUDA does not survive a fork, so each engine
process is spawned.
"""

from collections.abc import Sequence
from typing import Any

from tests.e2e.harness import Cluster, Starting

from kvferry.cli.cluster.processes import ProcessStarter, spawn_process

TRANSPORTS = ("cuda_ipc", "nixl")
CONNECTORS = {"pull": "NixlConnector", "push": "NixlPushConnector"}
DTYPES = {"cuda_ipc": "bfloat16", "nixl": "float16"}
"""The dtype of weights and cache for each transport, so that the tests cover both dtypes."""


class Shape:
    """The block size and the memory layout of an engine's KV cache."""

    def __init__(self, block_size: int, layout: str) -> None:
        self.flags = ("--block-size", str(block_size))
        self.variables = {"VLLM_KV_CACHE_LAYOUT": layout}


class GpuCluster(Cluster):
    def way_to_start(self, command: Sequence[str]) -> ProcessStarter:
        return spawn_process

    def plain_on_gpu(self, dtype: str) -> Starting:
        """Start a single engine without a connector; its answers are the reference."""
        return self.serve(f"plain {dtype}", "--device", "cuda", "--dtype", dtype, is_plain=True)

    def serve_on_gpu(
        self,
        name: str,
        transport: str,
        mode: str,
        *flags: str,
        shape: Shape | None = None,
        faults: str = "",
        port: int = 0,
        engine_id: str = "",
        **settings: Any,
    ) -> Starting:
        """`settings`: settings of the connector, in addition to the pinned transport."""
        shape = shape or Shape(16, "HND")
        return self.serve(
            f"{name} ({transport}, {mode})",
            *("--device", "cuda", "--dtype", DTYPES[transport], *shape.flags, *flags),
            extra={"transports": [transport], **settings},
            environment={**shape.variables, **({"KVFERRY_FAULTS": faults} if faults else {})},
            connector=CONNECTORS[mode],
            port=port,
            engine_id=engine_id,
        )
