"""Real vLLM servers with kvferry's connector in them. They live in an environment of their own, made by `make setup-vllm`."""

import json
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.e2e.harness import Engine
from tests.e2e.test_readme import free_ports

from kvferry.cli.http_client import is_healthy
from kvferry.cli.processes import ChildProcess, ProcessGroup
from kvferry.engine.make_model import make_model
from kvferry.types import Address

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
START_S = 180.0


@dataclass(frozen=True)
class VllmPair:
    p: Engine
    d: Engine
    router: Engine


@pytest.fixture(scope="session")
def vllm_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmPair]:
    """P and D as an operator starts them, and our router in front."""
    if not PYTHON.exists():
        pytest.skip("vLLM is not installed here; make setup-vllm does it")
    directory = tmp_path_factory.mktemp("vllm")
    make_model(directory / "tiny")
    ports = free_ports({"p", "d", "router", "side p", "side d"})
    secret = secrets.token_hex(32)
    children: list[ChildProcess] = []
    with ProcessGroup(directory / "group", patience_s=5.0) as group:
        try:
            for number, name in enumerate("pd"):
                children.append(_server(name, number, directory / "tiny", ports, secret))
                children[-1].start(group.id)
            command = [str(ROOT / ".venv/bin/python"), "-m", "kvferry", "proxy", "--host", "127.0.0.1", "--port", ports["router"]]
            command += ["--prefiller-ports", ports["p"], "--decoder-ports", ports["d"]]
            children.append(ChildProcess("router", command, {**os.environ, "KVFERRY_SECRET": secret}))
            children[-1].start(group.id)
            engines = [
                Engine(child, Address("127.0.0.1", int(ports[name]))) for child, name in zip(children, ("p", "d", "router"), strict=True)
            ]
            for engine in engines:
                _wait_healthy(engine)
            yield VllmPair(*engines)
        finally:
            for child in children:
                child.close(patience_s=10.0)


def _server(name: str, core: int, model: Path, ports: dict[str, str], secret: str) -> ChildProcess:
    transfer = {"kv_connector": "NixlConnector", "kv_connector_module_path": "kvferry.vllm", "kv_role": "kv_both"}
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "tiny"]
    command += ["--host", "127.0.0.1", "--port", ports[name], "--enforce-eager", "--dtype", "float32", "--max-model-len", "2048"]
    command += ["--block-size", "32", "--kv-transfer-config", json.dumps(transfer)]
    environment = {
        "KVFERRY_SECRET": secret,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": ports[f"side {name}"],
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "HF_HUB_OFFLINE": "1",
    }
    return ChildProcess(f"vllm {name}", command, {**os.environ, **environment})


def _wait_healthy(engine: Engine) -> None:
    deadline = time.monotonic() + START_S
    while not is_healthy(engine.address):
        engine.process.check_alive()
        assert time.monotonic() < deadline, engine.process.tail(40)
        time.sleep(0.5)
