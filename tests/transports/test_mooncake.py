"""Tests of what the transport `mooncake` does beyond the contract, above all when an agent fails.

Every side has a real agent, in a process of its own.
"""

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
from tests.transports.mooncake_agents import agents, skip_without_mooncake
from tests.transports.sides import mooncake_side

from kvferry.errors import MissingDependency
from kvferry.testing.transport_pairs import (
    LARGE_BLOCK_BYTES,
    LARGE_REGION,
    SpawnedFarSide,
    TransportSide,
)
from kvferry.transports.base import Completion, Handle, Segments, TransportOffer
from kvferry.transports.mooncake.agent import GREETING_BYTES, MAX_CONNECTIONS, Greeting
from kvferry.transports.mooncake.transport import MooncakeSettings
from kvferry.types import EngineId, Epoch, PeerId

DEADLINE_S = 60.0
PEER = PeerId(EngineId("far"), Epoch("life"), 0)
OTHER = replace(PEER, engine=EngineId("other"))
LENGTH = struct.Struct("<Q")


@pytest.fixture(autouse=True, scope="module")
def _mooncake() -> None:
    skip_without_mooncake()


@contextmanager
def side(value: int, settings: MooncakeSettings | None = None) -> Iterator[TransportSide]:
    made = mooncake_side(settings)
    try:
        made.memory[:] = value
        yield made
    finally:
        made.close()


def until(what: str, is_true: Callable[[], bool], *sides: TransportSide) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_true():
        assert time.monotonic() < deadline, f"after {DEADLINE_S:g} s it is not so that {what}"
        for each in sides:
            assert each.transport.poll() == []
        time.sleep(0.01)


def ended(side: TransportSide, *handles: Handle) -> list[Completion]:
    deadline, found = time.monotonic() + DEADLINE_S, dict[Handle, Completion]()
    while len(found) < len(handles):
        assert time.monotonic() < deadline, f"{handles} have not ended after {DEADLINE_S:g} s"
        found |= {completion.handle: completion for completion in side.transport.poll()}
        time.sleep(0.001)
    return [found[handle] for handle in handles]


def begin(near: TransportSide, peer: PeerId = PEER, num_blocks: int = 4) -> Handle:
    offsets = np.arange(0, 2 * num_blocks, 2, dtype=np.int64) * LARGE_BLOCK_BYTES
    part = Segments(LARGE_REGION, LARGE_REGION, LARGE_BLOCK_BYTES, offsets, offsets)
    return near.transport.read(peer, [part])


def read(near: TransportSide, far: TransportSide, offer: TransportOffer | None = None) -> str:
    """Connect and read. "" if the bytes of the far side have arrived, otherwise the problem."""
    near.transport.connect(PEER, offer or far.transport.offer(), far.regions)
    (completion,) = ended(near, begin(near))
    at = near.regions[LARGE_REGION].address - near.regions[0].address + 4096
    arrived = np.all(near.memory[at : at + LARGE_BLOCK_BYTES] == far.memory[0])
    assert completion.error or arrived, "the read succeeded, but brought other bytes"
    return completion.error or ""


def greeting_of(offer: TransportOffer) -> Greeting:
    host, port, _, _ = msgspec.msgpack.decode(offer.blob)
    with socket.create_connection((host, port), DEADLINE_S) as connection:
        return Greeting.decode(received(connection, GREETING_BYTES))


def received(connection: socket.socket, size: int) -> bytes:
    """Exactly so many bytes. A socket with a timeout ignores MSG_WAITALL."""
    message = b""
    while len(message) < size:
        chunk = connection.recv(size - len(message))
        assert chunk, "the connection was closed"
        message += chunk
    return message


def redirected(offer: TransportOffer, port: int) -> TransportOffer:
    host, _, *rest = msgspec.msgpack.decode(offer.blob)
    return replace(offer, blob=msgspec.msgpack.encode([host, port, *rest]))


@contextmanager
def serving(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """A server on the returned port that calls `answer` for each connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    answer(listener.accept()[0])

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(DEADLINE_S)


# -- the package --


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mooncake.py").write_text("raise ImportError('libibverbs.so.1: no such file')")
    path = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{path}")
    with pytest.raises(MissingDependency, match=r"libibverbs.*pip install 'kvferry\[mooncake\]'"):
        mooncake_side()
    assert agents() == []


def test_the_agent_gets_no_secret_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVFERRY_SECRET", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "a secret")
    monkeypatch.setenv("MC_LOG_LEVEL", "WARNING")
    with side(1):
        (agent,) = agents()
        environ = agent.environ()
    assert "a secret" not in environ.values()
    assert (environ["MC_LOG_LEVEL"], environ["GLOG_minloglevel"]) == ("WARNING", "2")


@pytest.mark.skipif(Path("/sys/class/infiniband").exists(), reason="this host has RDMA devices")
def test_rdma_without_a_device_is_refused() -> None:
    """Mooncake itself would use tcp instead, without a word."""
    with pytest.raises(MissingDependency, match="this host has no RDMA device"):
        mooncake_side(MooncakeSettings(protocol="rdma"))


# -- strangers --


@pytest.mark.parametrize("message", [b"[]", b"\x00[]"])
def test_bytes_that_end_mooncake_end_no_engine_and_peers_read_again(message: bytes) -> None:
    with side(1) as far, side(2) as near:
        (victim, _) = agents()
        assert read(near, far) == ""
        port = greeting_of(far.transport.offer()).port
        with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as stranger:
            stranger.sendall(LENGTH.pack(len(message)) + message)
            until("the agent is gone", lambda: victim not in agents())
        far.memory[:] = 3
        until("another agent runs", lambda: len(agents()) == 2, far)
        assert read(near, far) == ""


def test_the_transport_survives_garbage_at_its_ports() -> None:
    with side(1) as far, side(2) as near:
        offer = far.transport.offer()
        _, port, _, _ = msgspec.msgpack.decode(offer.blob)
        pids = [agent.pid for agent in agents()]
        random = np.random.default_rng(1)
        for each in (port, greeting_of(offer).port):
            for size in (0, 1, 100, 100_000):
                address = ("127.0.0.1", each)
                # The other side may close before all bytes are sent.
                with socket.create_connection(address) as stranger, suppress(OSError):
                    stranger.sendall(random.bytes(size))
        assert read(near, far) == ""
        assert [agent.pid for agent in agents()] == pids


def test_silent_strangers_do_not_keep_peers_out() -> None:
    with side(1) as far, side(2) as near, ExitStack() as held:
        offer = far.transport.offer()
        host, port, _, _ = msgspec.msgpack.decode(offer.blob)
        for _ in range(MAX_CONNECTIONS + 5):
            held.enter_context(socket.create_connection((host, port), DEADLINE_S))
        assert read(near, far) == ""


STRANGER = """
import ctypes, os, sys
from mooncake.engine import TransferEngine
engine, buffer = TransferEngine(), ctypes.create_string_buffer(4096)
engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
calls = (engine.transfer_sync_read, engine.transfer_sync_write)
codes = [c(sys.argv[1], ctypes.addressof(buffer), int(sys.argv[2]), 4096) for c in calls]
os.write(1, repr(codes).encode())
os._exit(0)
"""


def test_a_stranger_can_read_kv_but_not_change_it() -> None:
    with side(1) as far:
        greeting = greeting_of(far.transport.offer())
        arguments = [f"127.0.0.1:{greeting.port}", str(greeting.address)]
        ran = subprocess.run(
            [sys.executable, "-c", STRANGER, *arguments],
            stdout=subprocess.PIPE,
            timeout=DEADLINE_S,
            check=True,
        )
        assert ran.stdout == b"[0, -1]"
        assert np.all(far.memory == 1)


# -- peers --

DEFECTIVE_ENGINE = """
import os, stat, time

class TransferEngine:
    def initialize(self, *settings): return 0
    def register_memory(self, address, size_bytes): return 0
    def get_rpc_port(self): return 1
    def batch_transfer_sync_read(self, peer, local, remote, sizes):
        for file in map(int, os.listdir("/dev/fd")):
            try:
                if stat.S_ISSOCK(os.fstat(file).st_mode):
                    os.write(file, bytes(2))
            except OSError:
                pass
        time.sleep(600)
"""


def test_a_peer_that_is_not_there_fails_the_read() -> None:
    with side(1) as far, side(2) as near:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            offer = redirected(far.transport.offer(), unused.getsockname()[1])
            assert "cannot be reached" in read(near, far, offer)
        assert read(near, far) == ""


def test_a_peer_that_does_not_greet_fails_the_read() -> None:
    held: list[socket.socket] = []
    with (
        side(1) as far,
        side(2, MooncakeSettings(connect_s=0.2)) as near,
        serving(held.append) as p,
    ):
        assert "did not greet in time" in read(near, far, redirected(far.transport.offer(), p))
        for each in held:
            each.close()


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "not the greeting"),
        (Greeting(1, (1 << 64) - 1, bytes(8)).encode(), "names no memory that can be read"),
        (Greeting(1, 1 << 63, bytes(8)).encode(), "names no memory that can be read"),
        (Greeting(0, 1 << 40, bytes(8)).encode(), "names no memory that can be read"),
    ],
    ids=["not a greeting", "address of 64 bits", "address of 63 bits", "port 0"],
)
def test_a_peer_that_greets_with_garbage_fails_the_read(message: bytes, problem: str) -> None:
    def answer(connection: socket.socket) -> None:
        with connection:
            connection.sendall(message)

    with side(1) as far, side(2) as near, serving(answer) as port:
        pids = [agent.pid for agent in agents()]
        assert problem in read(near, far, redirected(far.transport.offer(), port))
        assert read(near, far) == ""
        assert [agent.pid for agent in agents()] == pids


def test_a_peer_at_an_address_that_this_host_cannot_dial_fails_the_read() -> None:
    with side(1) as far, side(2) as near:
        _, *rest = msgspec.msgpack.decode(far.transport.offer().blob)
        blob = msgspec.msgpack.encode(["fe80::1%nosuch", *rest])
        assert "cannot be reached" in read(near, far, replace(far.transport.offer(), blob=blob))


def test_a_malformed_answer_ends_the_agent_and_the_next_one_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    (tmp_path / "mooncake" / "engine.py").write_text(DEFECTIVE_ENGINE)
    path = os.environ.get("PYTHONPATH", "")
    with monkeypatch.context() as changed:
        changed.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{path}")
        near = mooncake_side(MooncakeSettings(num_workers=2))
    (defective,) = agents()
    with closing(near), side(1) as far:
        assert read(near, far) == ""
        assert not defective.is_running()


def test_a_stopped_peer_holds_up_its_own_transfers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_TCP_PROGRESS_TIMEOUT_SEC", "2")
    monkeypatch.setenv("MC_TCP_STATUS_TIMEOUT_SEC", "2")
    with side(1) as far, side(5) as other, side(2) as near:
        assert read(near, far) == ""
        near.transport.connect(OTHER, other.transport.offer(), other.regions)
        agent, _, ours = agents()
        agent.send_signal(signal.SIGSTOP)
        stuck = begin(near)
        assert all(completion.ok for completion in ended(near, begin(near, OTHER)))
        (completion,) = ended(near, stuck)
        assert "Mooncake cannot read" in (completion.error or "")
        # The failure has ended our agent; the next one reads.
        assert all(completion.ok for completion in ended(near, begin(near, OTHER)))
        assert not ours.is_running()
        agent.send_signal(signal.SIGCONT)
        until("the peer is read again", lambda: read(near, far) == "")


def test_reads_go_on_with_the_next_agent() -> None:
    with side(1) as far, side(2) as near:
        assert read(near, far) == ""
        agent, ours = agents()
        agent.send_signal(signal.SIGSTOP)
        waiting = begin(near)
        for _ in range(20):
            assert near.transport.poll() == []
        ours.kill()
        agent.send_signal(signal.SIGCONT)
        (completion,) = ended(near, waiting)
        assert (completion.error, completion.total_bytes) == (None, 4 * LARGE_BLOCK_BYTES)


def test_no_byte_arrives_after_a_read_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mooncake fails a call before all of its reads have ended."""
    monkeypatch.setenv("MC_TRANSFER_TIMEOUT", "5")
    with side(1) as far, side(2) as near:
        assert read(near, far) == ""
        agent, _ = agents()
        agent.send_signal(signal.SIGSTOP)
        (completion,) = ended(near, begin(near, num_blocks=8))
        assert "Mooncake cannot read" in (completion.error or "")
        near.memory[:] = 3
        agent.send_signal(signal.SIGCONT)
        # These reads fetch the first four of the blocks.
        until("the peer is read again", lambda: read(near, far) == "")
        at = near.regions[LARGE_REGION].address - near.regions[0].address + 8 * LARGE_BLOCK_BYTES
        assert np.all(near.memory[at : at + 8 * LARGE_BLOCK_BYTES] == 3)


def test_a_cancelled_read_that_hangs_ends_with_the_agent() -> None:
    with side(1) as far, side(2, MooncakeSettings(stop_s=0.3)) as near:
        assert read(near, far) == ""
        agent, ours = agents()
        agent.send_signal(signal.SIGSTOP)
        stuck = begin(near)
        for _ in range(20):
            assert near.transport.poll() == []
        near.transport.cancel(stuck)
        (completion,) = ended(near, stuck)
        assert completion.error == "cancelled"
        assert not ours.is_running()
        agent.send_signal(signal.SIGCONT)
        assert read(near, far) == ""


def test_a_port_that_another_agent_has_taken_over_is_read_right() -> None:
    """A Transfer Engine remembers what it knew of a port, so the agent needs another one."""
    with (
        side(1) as first,
        side(2) as second,
        side(3) as near,
        socket.create_server(("127.0.0.1", 0)) as changing,
    ):
        for far in (first, second):
            offer, greeted = far.transport.offer(), list[socket.socket]()
            greeting = greeting_of(offer)
            moved = replace(greeting, port=changing.getsockname()[1]).encode()

            def greet(
                connection: socket.socket, message: bytes = moved, to: list[socket.socket] = greeted
            ) -> None:
                connection.sendall(message)
                to.append(connection)

            with forwarding(changing, greeting.port), serving(greet) as port:
                assert read(near, far, redirected(offer, port)) == ""
            for each in greeted:
                each.close()


@contextmanager
def forwarding(listener: socket.socket, port: int) -> Iterator[None]:
    """Forward connections of the listener to a port of this host."""
    listener.settimeout(0.05)
    is_closing = threading.Event()

    def serve() -> None:
        while not is_closing.is_set():
            with suppress(TimeoutError):
                connection, _ = listener.accept()
                with connection, socket.create_connection(("127.0.0.1", port), 5) as target:
                    forward(connection, target)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        is_closing.set()
        thread.join(DEADLINE_S)


def forward(client: socket.socket, target: socket.socket) -> None:
    """Forward one request and its answer, each a length and as many bytes."""
    for source, sink in ((client, target), (target, client)):
        source.settimeout(DEADLINE_S)
        head = received(source, LENGTH.size)
        sink.sendall(head + received(source, LENGTH.unpack(head)[0]))


# -- the engine --


def test_an_agent_ends_with_its_engine() -> None:
    far = SpawnedFarSide(mooncake_side)
    (agent,) = agents(far.pid)
    far.die()
    psutil.wait_procs([agent], DEADLINE_S)
    assert not agent.is_running()
    far.close()
