"""Engines with vLLM's own OffloadingConnector in processes of their own, for tests."""

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.e2e.harness import ProcessRegistry
from tests.vllm.fleet import PYTHON, VLLM

from kvferry.cli.cluster.processes import ChildProcess

__all__ = ["Answer", "StockEngine", "StockEngines"]

SECRET = "a secret for tests, shared by all engines"
NUM_ROWS = 24
ROW_BYTES = 131072
"""One block of the tiny model, in float32."""
START_S = 240.0
ANSWER_S = 120.0
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "KVFERRY_SECRET": SECRET,
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}

Answer = Mapping[str, Any]
"""`tokens` and `cached`, the number of prompt tokens that vLLM did not compute."""


class StartFailed(Exception):
    """The engine did not start; the text is its traceback."""


class StockEngine:
    """A running engine. Calls have the names of `stock_offloading.Engine`."""

    def __init__(self, process: ChildProcess, address: Path) -> None:
        self.process = process
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(ANSWER_S)
        deadline = time.monotonic() + START_S
        while True:
            try:
                self._socket.connect(str(address))
                break
            except (FileNotFoundError, ConnectionRefusedError):
                assert time.monotonic() < deadline, process.tail(40)
                time.sleep(0.02)
        self._lines = self._socket.makefile("rw")

    def ask(self, *prompts: Sequence[int], adapter: Path | None = None) -> list[Answer]:
        path = None if adapter is None else str(adapter)
        answers: list[Answer] = self.call("ask", list(prompts), path)
        return answers

    def metrics(self) -> dict[str, float]:
        """kvferry's metrics without their common prefix."""
        found = self.call("metrics")
        return {name.removeprefix("kvferry:stock_tier_"): found[name] for name in found}

    def call(self, name: str, *args: Any) -> Any:
        return self.send({"call": name, "args": args})

    def send(self, message: Mapping[str, Any]) -> Any:
        self._lines.write(json.dumps(message) + "\n")
        self._lines.flush()
        reply = json.loads(self._lines.readline())
        if "error" in reply:
            raise StartFailed(reply["error"])
        return reply["answer"]

    def close(self) -> None:
        """Let the process end, and wait for it. Idempotent."""
        with suppress(BrokenPipeError):
            self._lines.close()
        self._socket.close()
        self.process.wait(ANSWER_S)


class StockEngines(ProcessRegistry):
    """Starts engines; none of them outlives the `with` block."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory / "group", 20.0, VLLM)
        self._directory = directory
        self._num_started = 0
        self._engines: list[StockEngine] = []

    def __exit__(self, *error: Any) -> None:
        # An engine that is killed leaves its CPU tier in /dev/shm.
        for engine in self._engines:
            engine.close()
        super().__exit__(*error)

    def start(self, model: Path, tier: Mapping[str, Any] | None, **options: Any) -> StockEngine:
        """Start an engine with one secondary tier, or without any connector. Its CPU tier has room
        for `NUM_ROWS` chunks.
        """
        self._num_started += 1
        # The path of a socket has at most 107 characters.
        address = Path(os.path.relpath(self._directory / f"{self._num_started}.sock"))
        process = self.add(
            f"stock-{self._num_started}",
            [str(PYTHON), "-m", "tests.vllm.stock_offloading", str(address)],
            ENVIRONMENT,
        )
        engine = StockEngine(process, address)
        self._engines.append(engine)
        extra = (
            None
            if tier is None
            else {
                "cpu_bytes_to_use": NUM_ROWS * ROW_BYTES,
                "secondary_tiers": [tier],
            }
        )
        engine.send({"model": str(model), "extra": extra, **options})
        return engine
