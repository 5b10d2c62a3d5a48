"""A Mooncake master in its own process, and clients that are not a tier."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.ports import reserve_port

from kvferry.errors import MissingDependency
from kvferry.tiers.base import EntryKey, Tier
from kvferry.tiers.keys import Namespace
from kvferry.tiers.mooncake.agent import Call, MooncakePlace, Operation
from kvferry.tiers.mooncake.agent_process import AgentProcess
from kvferry.tiers.mooncake.tier import MooncakeTier
from kvferry.types import Address

DEADLINE_S = 60.0
LENT_BYTES = 64 * 2**20


@dataclass(slots=True)
class MooncakeMaster:
    """Can be killed and started again on the same port."""

    address: Address
    metrics: Address
    _process: "subprocess.Popen[bytes] | None" = field(default=None, init=False)

    def start(self) -> None:
        package = find_spec("mooncake")
        assert package is not None
        assert package.origin is not None
        self._process = subprocess.Popen(
            [
                str(Path(package.origin).with_name("mooncake_master")),
                f"--rpc_address={self.address.host}",
                f"--rpc_port={self.address.port}",
                f"--metrics_host={self.metrics.host}",
                f"--metrics_port={self.metrics.port}",
                "--client_ttl=3",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + DEADLINE_S
        while True:
            assert self._process.poll() is None, "mooncake_master ended"
            with suppress(OSError):
                socket.create_connection((self.address.host, self.address.port), 1.0).close()
                return
            assert time.monotonic() < deadline, "mooncake_master does not listen"
            time.sleep(0.02)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def object_names(self) -> list[str]:
        with closing(HTTPConnection(self.metrics.host, self.metrics.port, DEADLINE_S)) as http:
            http.request("GET", "/get_all_keys")
            return http.getresponse().read().decode().split()

    def stop(self) -> None:
        """Let the master hang, and return when all its threads do."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)


@contextmanager
def mooncake_master() -> Iterator[MooncakeMaster]:
    """Run a master, or skip the test where Mooncake cannot be loaded."""
    address, metrics = (Address("127.0.0.1", reserve_port()) for _ in range(2))
    try:
        AgentProcess(MooncakePlace(address)).close()
    except MissingDependency as missing:
        pytest.skip(str(missing))
    master = MooncakeMaster(address, metrics)
    master.start()
    try:
        yield master
    finally:
        master.kill()


@contextmanager
def lender(master: Address, lent_bytes: int = LENT_BYTES) -> Iterator[AgentProcess]:
    """A client that lends memory to the store and has joined it."""
    agent = AgentProcess(MooncakePlace(master, lent_bytes=lent_bytes))
    try:
        assert raw_call(agent, Operation.FIND, "-") == [0]
        yield agent
    finally:
        agent.close()


def raw_call(agent: AgentProcess, operation: Operation, name: str) -> list[int]:
    until = time.monotonic() + DEADLINE_S
    with agent.lane(until) as lane:
        return lane.call(Call(operation, [name]), until)


@dataclass(frozen=True, slots=True)
class MooncakeStorage:
    """Tiers that lend nothing, and a client around them that lends all memory."""

    master: MooncakeMaster
    client: AgentProcess

    def open(self, namespace: Namespace, secret: bytes) -> Tier:
        return MooncakeTier(MooncakePlace(self.master.address), namespace, secret)

    def read(self, namespace: Namespace, key: EntryKey) -> bytes | None:
        return self.read_object(f"{namespace.hex}/{key.hex()}")

    def write(self, namespace: Namespace, key: EntryKey, stored: bytes) -> None:
        self.write_object(f"{namespace.hex}/{key.hex()}", stored)

    def read_object(self, name: str) -> bytes | None:
        until = time.monotonic() + DEADLINE_S
        with self.client.lane(until) as lane:
            [size_bytes] = lane.call(Call(Operation.SIZE, [name]), until)
            if size_bytes < 0:
                return None
            memory = lane.memory(size_bytes)
            assert lane.call(Call(Operation.GET, [name], size_bytes), until) == [size_bytes]
            return bytes(memory)

    def write_object(self, name: str, stored: bytes) -> None:
        until = time.monotonic() + DEADLINE_S
        # Mooncake has no empty objects.
        stored = stored or b"\0"
        with self.client.lane(until) as lane:
            lane.call(Call(Operation.REMOVE, [name]), until)
            lane.memory(len(stored))[:] = stored
            assert lane.call(Call(Operation.PUT, [name], len(stored)), until) == [0]
