"""LMCache's server, and vLLM servers whose environment has LMCache: `make setup-lmcache`."""

import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.harness import Engine
from tests.forkserver.client import ForkServer
from tests.ports import reserve_port
from tests.vllm.documented import documented
from tests.vllm.fleet import LOOPBACK, MODULES, ROOT, START_S, TAIL_LINES, VARIABLES, Fleet

from kvferry.types import Address

ENVIRONMENT = ROOT / ".venv-lmcache"
PYTHON = ENVIRONMENT / "bin" / "python"
PAGE, SECTION = "connectors.md", "LMCacheMPConnector"
CHUNK = 64
"""Tokens of one object in LMCache; a multiple of the block size."""


def skip_without_lmcache() -> None:
    if not any(ENVIRONMENT.glob(".kvferry-setup-*")):
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
        """Start LMCache's server as documented, for engines on CPUs; `listening` waits for it."""
        http = reserve_port()
        if port is None:
            port = reserve_port()
        memory = shared_memory(Address(LOOPBACK, port))
        self._memory.add(memory)
        words = list(documented(SECTION, PAGE)[0].words)
        words[words.index("--port") + 1] = str(port)
        words[words.index("--l1-size-gb") + 1] = "1"
        words += ["--supported-transfer-mode", "engine_driven", "--chunk-size", str(CHUNK)]
        words += ["--no-l1-use-lazy", "--shm-name", memory.name]
        words += ["--http-port", str(http), "--disable-observability"]
        return self.router("lmcache", [str(ENVIRONMENT / "bin" / words[0]), *words[1:]], port)


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


def transfer_beside(server: Address) -> dict[str, Any]:
    """The documented configuration: LMCacheMPConnector beside kvferry's NixlConnector."""
    found = documented(SECTION, PAGE)[1].transfer
    _, child = found["kv_connector_extra_config"]["connectors"]
    assert child["kv_connector"] == "LMCacheMPConnector"
    child["kv_connector_extra_config"]["lmcache.mp.port"] = server.port
    return found
