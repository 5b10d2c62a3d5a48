"""Lets vLLM's own OffloadingConnector run on the CPU: its spec with a worker that copies between
host tensors. vLLM's spec refuses to make a worker without a GPU.

While the file of the setting `damage` exists, loads give other values, for controls.
"""

from pathlib import Path
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies at once; one chunk is one block."""

    def __init__(self, kv_caches: Any, damage: str | None) -> None:
        self._damage = None if damage is None else Path(damage)
        self._tensors = [entry.tensor for entry in kv_caches.tensors]
        self._chunks: dict[int, list[torch.Tensor]] = {}
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for block, chunk in zip(src_spec.block_ids, dst_spec.block_ids, strict=True):
            self._chunks[int(chunk)] = [tensor[block].clone() for tensor in self._tensors]
        self._done.append(TransferResult(job_id, success=True))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        is_damaged = self._damage is not None and self._damage.exists()
        for chunk, block in zip(src_spec.block_ids, dst_spec.block_ids, strict=True):
            for tensor, row in zip(self._tensors, self._chunks[int(chunk)], strict=True):
                tensor[block] = row ^ 1 if is_damaged else row
        self._done.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        return None


class HostSpec(CPUOffloadingSpec):  # type: ignore[misc]
    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        return HostWorker(kv_caches, self.extra_config.get("damage"))
