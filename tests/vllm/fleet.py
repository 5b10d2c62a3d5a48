"""Starts real vLLM servers, embedded engines and routers as child processes; none of them outlives
the `with` block.

With KVFERRY_TEST_VLLM_DEVICE=cuda, the servers run on this machine's GPU, with the interpreter of
the tests.
"""

import json
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from tests.e2e.harness import Engine, ProcessRegistry
from tests.forkserver.client import ForkServer
from tests.ports import reserve_port, reserve_ports

from kvferry.bench.vllm.servers import VllmServer
from kvferry.cli.cluster.http_client import is_healthy
from kvferry.cli.cluster.processes import ProcessStarter, spawn_process
from kvferry.errors import KVFerryError
from kvferry.types import Address

ROOT = Path(__file__).parents[2]
ON_GPU = os.environ.get("KVFERRY_TEST_VLLM_DEVICE") == "cuda"
# `make test-vllm VLLM_VERSION=…` names the environment of another release than the newest.
ENVIRONMENT = ROOT / os.environ.get("KVFERRY_TEST_VLLM_VENV", ".venv-vllm")
PYTHON = Path(sys.executable) if ON_GPU else ENVIRONMENT / "bin" / "python"
START_S = 240.0
TAIL_LINES = 40
LOOPBACK = "127.0.0.1"
OUR_ROUTER = "kvferry router"
MODULES = (
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.layers.quantization.online.base",
    "kvferry.vllm.connector",
    "kvferry.connectors.nixl",
)
VARIABLES = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
VLLM = ForkServer(PYTHON, MODULES, VARIABLES)
GPU_FLAGS = (
    # So servers can start side by side on one GPU: without profiling, and although not all of its
    # memory is free.
    *("--kv-cache-memory-bytes", str(256 << 20), "--max-num-seqs", "32"),
    *("--gpu-memory-utilization", "0.02"),
    # With float32, which is a server's dtype unless flags say otherwise, tokens do not depend on
    # which requests share a step.
    *("--attention-backend", "TRITON_ATTN"),
)
GPU_VARIABLES = {
    # Triton's products in float32, not in tf32, whose rounding alone changes tokens.
    "TRITON_F32_DEFAULT": "ieee",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "OMP_NUM_THREADS": "1",
}
BY_MODULE_PATH = {
    "kv_connector": "NixlConnector",
    "kv_connector_module_path": "kvferry.vllm",
    "kv_role": "kv_both",
}
BY_PLUGIN = {"kv_connector": "KVFerryConnector", "kv_role": "kv_both"}


class Fleet(ProcessRegistry):
    python = PYTHON
    """The interpreter that has vLLM."""
    forkserver = VLLM
    on_gpu = ON_GPU
    gpu_flags: tuple[str, ...] = GPU_FLAGS

    def __init__(self, directory: Path, model: Path, secret: bytes | None = None) -> None:
        """`secret`: the secret of another fleet, so that members of both can transfer KV; empty:
        members find a secret by themselves.
        """
        super().__init__(directory, 20.0, self.forkserver)
        self._model = model
        chosen = secrets.token_hex(32) if secret is None else secret.decode()
        self._secret = {"KVFERRY_SECRET": chosen} if chosen else {}

    @property
    def secret(self) -> bytes:
        return self._secret["KVFERRY_SECRET"].encode()

    def vllm(
        self,
        name: str,
        *flags: str,
        transfer: Mapping[str, Any] | None = BY_MODULE_PATH,
        extra: Mapping[str, Any] | None = None,
        policy: str = "fail",
        cores: str = "0",
        environment: Mapping[str, str] | None = None,
        ports: tuple[int, int] | None = None,
        host: str = LOOPBACK,
        inside: Sequence[str] = (),
    ) -> Engine:
        """Start a vLLM server; `ready` waits for it. `transfer=None`: a server without a connector.
        `ports`: HTTP, side channel.

        `inside`: the command prefix that runs a command on another host, whose address is `host`.
        """
        if transfer is not None:
            transfer = {**transfer, "kv_load_failure_policy": policy}
            if extra is not None:
                transfer["kv_connector_extra_config"] = {
                    **transfer.get("kv_connector_extra_config", {}),
                    **extra,
                }
        http, side_channel = ports or reserve_ports(2)
        device = GPU_VARIABLES if self.on_gpu else {"VLLM_CPU_OMP_THREADS_BIND": cores}
        server = VllmServer(
            name,
            self._model,
            http,
            transfer,
            side_channel,
            flags=(*self.gpu_flags, *flags) if self.on_gpu else flags,
            environment={**device, **(environment or {})},
        )
        command = [*inside, *server.command(self.python), "--host", host]
        return self._start(name, command, server.variables(), Address(host, http))

    def embedded(self, name: str) -> Engine:
        port = reserve_port()
        command = [
            sys.executable,
            "-m",
            "kvferry",
            "serve",
            str(self._model),
            "--host",
            LOOPBACK,
            "--port",
            str(port),
        ]
        return self._start(
            name, [*command, "--served-model-name", "tiny"], {}, Address(LOOPBACK, port)
        )

    def kvferry_router(
        self,
        prefill: Sequence[Engine],
        decode: Sequence[Engine],
        environment: Mapping[str, str] | None = None,
        flags: Sequence[str] = (),
    ) -> Engine:
        port = reserve_port()
        command = [
            sys.executable,
            "-m",
            "kvferry",
            "proxy",
            "--host",
            LOOPBACK,
            "--port",
            str(port),
        ]
        for role, engines in (("prefiller", prefill), ("decoder", decode)):
            command += [f"--{role}-hosts", *(engine.address.host for engine in engines)]
            command += [f"--{role}-ports", *(str(engine.address.port) for engine in engines)]
        return self._start(
            OUR_ROUTER, [*command, *flags], environment or {}, Address(LOOPBACK, port)
        )

    def router(
        self,
        name: str,
        command: Sequence[str],
        port: int,
        environment: Mapping[str, str] | None = None,
    ) -> Engine:
        """Start a router of another project, which listens on `port`."""
        return self._start(name, list(command), dict(environment or {}), Address(LOOPBACK, port))

    def _start(
        self, name: str, command: list[str], environment: Mapping[str, str], address: Address
    ) -> Engine:
        return Engine(self.add(name, command, {**self._secret, **environment}), address)

    def way_to_start(self, command: Sequence[str]) -> ProcessStarter:
        if self.on_gpu:
            return spawn_process  # CUDA does not survive a fork
        return super().way_to_start(command)

    def stop(self, engine: Engine) -> None:
        """End one member early, so that the machine gets its memory back."""
        self.dismiss(engine.process)


def ready(*engines: Engine) -> None:
    """Wait until all answer /health, and until our router has found the engines that started after
    it.
    """
    deadline = time.monotonic() + START_S
    waiting = list(engines)
    while waiting:
        waiting = [
            engine
            for engine in waiting
            if not is_healthy(engine.address) or not _has_noticed_all(engine)
        ]
        for engine in waiting:
            try:
                engine.process.check_alive()
            except KVFerryError as error:
                raise AssertionError(
                    "\n".join([*engine.process.tail(TAIL_LINES), str(error)])
                ) from None
            is_late = time.monotonic() > deadline
            assert not is_late, "\n".join(
                [
                    *engine.process.tail(TAIL_LINES),
                    f"{engine.process.name} is not healthy after {START_S:g} s",
                ]
            )
        time.sleep(0.2 if waiting else 0)


def _has_noticed_all(engine: Engine) -> bool:
    """True for an engine, and for our router once it has found a usable P and D. The router looks
    for missing instances every second, and lets D compute alone until P is found.
    """
    if engine.process.name != OUR_ROUTER:
        return True
    connection = HTTPConnection(engine.address.host, engine.address.port, timeout=60)
    with closing(connection):
        connection.request("GET", "/readyz")
        state = json.loads(connection.getresponse().read())
    return bool(state["prefill_usable"] and state["decode_usable"])
