"""vLLM's own OffloadingConnector with vLLM's CPU build: an engine in a process of its own, which
obeys the calls of a test.

Runs with vLLM's interpreter. `python -m tests.vllm.stock_offloading SOCKET` takes one connection.
Its first line is the engine's configuration, each further line is a call; the answers are lines
too. The process ends with the connection.
"""

import gc
import json
import resource
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any, TextIO

import torch
from prometheus_client import REGISTRY
from vllm.config import KVTransferConfig
from vllm.lora.request import LoRARequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from vllm import LLM, SamplingParams, TokensPrompt

__all__ = ["HostTieringSpec"]

HELD = "1000000"
"""The request that `hold` starts; vLLM's offline engine wants ids that are numbers."""


class HostWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies between the blocks of a KV cache in host memory and the rows of the CPU tier. vLLM's
    own worker needs a GPU.
    """

    def __init__(self, caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        self._blocks = [
            cache.tensor.view(torch.int8).view((-1, cache.page_size_bytes))
            for cache in caches.tensors
        ]
        self._rows = [
            region.create_next_worker_view(cache.page_size_bytes) for cache in caches.tensors
        ]
        self._region = region
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._rows, dst_spec, self._blocks, src_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._blocks, dst_spec, self._rows, src_spec)

    def _copy(self, job_id: int, to: Any, to_spec: Any, source: Any, source_spec: Any) -> bool:
        for to_tensor, source_tensor in zip(to, source, strict=True):
            for target, origin in zip(to_spec.block_ids, source_spec.block_ids, strict=True):
                to_tensor[target] = source_tensor[origin]
        self._finished.append(TransferResult(job_id=job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        self._rows.clear()
        self._region.cleanup()


class HostTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's scheduler, manager and tiers; only the copies are ours. One block per chunk, one group
    of layers.
    """

    _worker: Any

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        assert self.blocks_per_chunk == 1
        assert len(kv_caches.group_data_refs) == 1
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = HostWorker(kv_caches, region)
        return self._worker


class Engine:
    """One vLLM engine, and the calls that a test may make."""

    def __init__(self, model: str, extra: dict[str, Any] | None, **options: Any) -> None:
        transfer = None
        if extra is not None:
            transfer = KVTransferConfig(
                kv_connector="OffloadingConnector",
                kv_role="kv_both",
                kv_connector_extra_config={
                    "spec_name": "HostTieringSpec",
                    "spec_module_path": "tests.vllm.stock_offloading",
                    **extra,
                },
            )
        self._llm = LLM(
            model=model,
            kv_transfer_config=transfer,
            block_size=32,
            dtype="float32",
            enforce_eager=True,
            max_model_len=1024,
            num_gpu_blocks_override=200,
            disable_log_stats=False,
            **options,
        )

    @property
    def _core(self) -> EngineCore:
        core: EngineCore = self._llm.llm_engine.engine_core.engine_core
        return core

    def ask(self, prompts: list[list[int]], adapter: str | None) -> list[dict[str, Any]]:
        """Answer prompts one by one, each after vLLM has stored the KV of the one before. `adapter`
        is the path of a LoRA adapter.
        """
        lora = None if adapter is None else LoRARequest("adapter", 1, adapter)
        return [self._answer(prompt, lora) for prompt in prompts]

    def _answer(self, prompt: list[int], lora: LoRARequest | None) -> dict[str, Any]:
        output = self._llm.generate(
            TokensPrompt(prompt_token_ids=prompt),
            SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
            use_tqdm=False,
            lora_request=lora,
        )[0]
        connector = self._core.scheduler.get_kv_connector()
        while connector is not None and connector.has_pending_push_work():
            self._llm.llm_engine.step()
        return {"tokens": list(output.outputs[0].token_ids), "cached": output.num_cached_tokens}

    def hold(self, prompt: list[int]) -> None:
        """Start a request, and leave it with its blocks. The next call of `ask` finishes it."""
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        self._llm.llm_engine.add_request(HELD, TokensPrompt(prompt_token_ids=prompt), params)
        while not self._core.scheduler.running:
            self._llm.llm_engine.step()

    def load_weights(self, path: str) -> None:
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": path})

    def reset(self, external: bool) -> bool:
        return bool(self._llm.reset_prefix_cache(reset_connector=external))

    def limit_files(self, size_bytes: int) -> None:
        """Let writes beyond this size of a file fail, as on a full disk."""
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))

    def metrics(self) -> dict[str, float]:
        """kvferry's metrics, by name and the label `outcome` if there is one."""
        self._llm.llm_engine.do_log_stats()
        return {
            " ".join([sample.name, *filter(None, [sample.labels.get("outcome")])]): sample.value
            for metric in REGISTRY.collect()
            for sample in metric.samples
            if sample.name.startswith("kvferry:stock") and not sample.name.endswith("_created")
        }

    def import_path(self) -> str:
        import kvferry

        return str(Path(kvferry.__file__).parent)

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()
        gc.collect()


def obey(lines: TextIO) -> None:
    engine: Engine | None = None
    for line in lines:
        command = json.loads(line)
        try:
            if engine is None:
                engine = Engine(**command)
                answer = None
            else:
                answer = getattr(engine, command["call"])(*command["args"])
            reply = {"answer": answer}
        except Exception:
            reply = {"error": traceback.format_exc()}
        lines.write(json.dumps(reply) + "\n")
        lines.flush()
    if engine is not None:
        engine.close()


def serve(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        connection, _ = listener.accept()
    with connection, connection.makefile("rw") as lines:
        obey(lines)


if __name__ == "__main__":
    serve(sys.argv[1])
