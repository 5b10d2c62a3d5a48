"""Engines on the GPU of this machine, as real processes. CUDA cannot be forked, so each is
spawned.
"""

from collections.abc import Sequence
from typing import Any

from tests.e2e.harness import Cluster, Starting

from kvferry.cli.cluster.processes import ProcessStarter, spawn_process

__all__ = ["CONNECTORS", "DTYPES", "TRANSPORTS", "GpuCluster", "Shape"]

TRANSPORTS = ("cuda_ipc", "nixl")
CONNECTORS = {"pull": "NixlConnector", "push": "NixlPushConnector"}
DTYPES = {"cuda_ipc": "bfloat16", "nixl": "float16"}
"""Of weights and cache: one with each transport."""


class Shape:
    """How an engine keeps its blocks."""

    def __init__(self, block_size: int, layout: str) -> None:
        self.flags = ("--block-size", str(block_size))
        self.variables = {"VLLM_KV_CACHE_LAYOUT": layout}


class GpuCluster(Cluster):
    def way_to_start(self, command: Sequence[str]) -> ProcessStarter:
        return spawn_process

    def plain_on_gpu(self, dtype: str) -> Starting:
        """A single engine that knows nothing of transfers: what it answers is right."""
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
        """`settings`: the connector's, besides the transport that is pinned."""
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
