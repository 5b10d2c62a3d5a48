"""LMCache's server, and vLLM servers whose environment has LMCache: `make setup-lmcache`."""

import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.harness import Engine
from tests.forkserver.client import ForkServer
from tests.vllm.fleet import LOOPBACK, MODULES, ROOT, START_S, TAIL_LINES, VARIABLES, Fleet

from kvferry.bench.vllm.servers import free_ports
from kvferry.types import Address

ENVIRONMENT = ROOT / ".venv-lmcache"
PYTHON = ENVIRONMENT / "bin" / "python"
CHUNK = 64
"""Tokens of one object in LMCache; a multiple of the block size."""


def skip_without_lmcache() -> None:
    if not (ENVIRONMENT / ".kvferry-setup").exists():
        pytest.skip("LMCache is not installed here; make setup-lmcache does it (x86-64 only)")


class LMCacheFleet(Fleet):
    """A fleet whose vLLM servers can import LMCache."""

    python = PYTHON
    forkserver = ForkServer(PYTHON, MODULES, VARIABLES)

    def __init__(self, directory: Path, model: Path) -> None:
        super().__init__(directory, model)
        self._memory: set[Path] = set()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        # A server that was killed leaves its memory behind.
        for path in self._memory:
            path.unlink(missing_ok=True)

    def lmcache_server(self, port: int | None = None) -> Engine:
        """Start LMCache's server for engines on CPUs; `listening` waits for it."""
        (http,) = free_ports(1)
        if port is None:
            (port,) = free_ports(1)
        command = [str(ENVIRONMENT / "bin" / "lmcache"), "server", "--disable-observability"]
        command += ["--host", LOOPBACK, "--port", str(port), "--http-port", str(http)]
        command += ["--l1-size-gb", "1", "--eviction-policy", "LRU", "--no-l1-use-lazy"]
        command += ["--chunk-size", str(CHUNK), "--supported-transfer-mode", "engine_driven"]
        memory = shared_memory(Address(LOOPBACK, port))
        self._memory.add(memory)
        command += ["--shm-name", memory.name]
        return self.router("lmcache", command, port)


def shared_memory(server: Address) -> Path:
    """The file of the memory in which LMCache's server keeps KV."""
    return Path(f"/dev/shm/lmcache_l1_pool_kvferry_{server.port}")


def listening(server: Engine) -> None:
    deadline = time.monotonic() + START_S
    address = (server.address.host, server.address.port)
    while time.monotonic() < deadline:
        server.process.check_alive()
        with suppress(OSError), socket.create_connection(address, 1.0):
            return
        time.sleep(0.2)
    raise AssertionError("\n".join(server.process.tail(TAIL_LINES)))


def lmcache_child(server: Address, **settings: Any) -> dict[str, Any]:
    """LMCacheMPConnector as a child of a MultiConnector."""
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": f"tcp://{server.host}",
            "lmcache.mp.port": server.port,
            **settings,
        },
    }
