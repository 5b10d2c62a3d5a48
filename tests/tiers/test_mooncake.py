"""Tests of what the tier `mooncake` does beyond the contract, above all when the store fails.

A real master and real clients run in processes of their own.
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
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from tests.tiers.mooncake_store import (
    MooncakeMaster,
    MooncakeStorage,
    lender,
    mooncake_master,
)

from kvferry.errors import MissingDependency
from kvferry.testing.local import ManualClock
from kvferry.testing.tier_conformance import (
    NAMESPACE,
    SECRET,
    aligned_buffer,
    new_key,
    payload_of,
)
from kvferry.tiers.backoff import StorageFailed
from kvferry.tiers.base import EntryKey, LoadOutcome, LoadResult, StoreOutcome, StoreResult
from kvferry.tiers.envelope import HEADER_BYTES
from kvferry.tiers.mooncake.agent import Call, MooncakePlace, Operation
from kvferry.tiers.mooncake.agent_process import NUM_LANES, AgentProcess
from kvferry.tiers.mooncake.tier import MooncakeDeadlines, MooncakeTier
from kvferry.transports.mooncake.process import AgentFailed
from kvferry.types import Address

pytestmark = pytest.mark.slow

AGENT = "kvferry.tiers.mooncake.agent"
PAYLOAD_BYTES = 256 * 1024
LONG = MooncakeDeadlines(lookup_s=30, transfer_s=30)
SHORT = MooncakeDeadlines(lookup_s=1.0, transfer_s=1.0)
DEADLINE_S = 60.0
PAUSE_S = 100.0
"""Longer than any pause of the tier."""


@pytest.fixture
def master() -> Iterator[MooncakeMaster]:
    with mooncake_master() as master:
        yield master


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def opened(
    master: Address,
    clock: ManualClock | None = None,
    deadlines: MooncakeDeadlines = LONG,
    lent_bytes: int = 0,
) -> "closing[MooncakeTier]":
    place = MooncakePlace(master, lent_bytes=lent_bytes)
    return closing(MooncakeTier(place, NAMESPACE, SECRET, deadlines, clock or ManualClock()))


def store(tier: MooncakeTier, key: EntryKey) -> StoreResult:
    return tier.store(key, payload_of(key, PAYLOAD_BYTES))


def load(tier: MooncakeTier, key: EntryKey) -> LoadResult:
    into = aligned_buffer(PAYLOAD_BYTES)
    result = tier.load(key, into)
    assert result.outcome is not LoadOutcome.LOADED or into == payload_of(key, PAYLOAD_BYTES)
    return result


def until(what: str, is_reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_reached():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def until_answered(tier: MooncakeTier, clock: ManualClock) -> None:
    def is_answered() -> bool:
        clock.advance(PAUSE_S)
        return load(tier, new_key()).outcome is LoadOutcome.MISSING

    until("the agent answers", is_answered)


def agents() -> list[psutil.Process]:
    """The agents of this process, the oldest first."""
    found = [child for child in psutil.Process().children() if AGENT in child.cmdline()]
    return sorted(found, key=lambda child: child.create_time())


# -- the package --


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mooncake.py").write_text("raise ImportError('libibverbs.so.1: no such file')")
    path = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{path}")
    with pytest.raises(MissingDependency, match=r"libibverbs.*pip install 'kvferry\[mooncake\]'"):
        MooncakeTier(MooncakePlace(Address("127.0.0.1", 9)), NAMESPACE, SECRET)
    assert not agents()


def test_the_engine_does_not_load_mooncake(master: MooncakeMaster) -> None:
    with opened(master.address) as tier:
        tier.find([new_key()])
    assert "mooncake.store" not in sys.modules


# -- codes that real stores answer with rarely --

STORE_THAT_ANSWERS_MINUS_600 = """
class MooncakeDistributedStore:
    def setup(self, *settings): return 0
    def register_buffer(self, address, size_bytes): return 0
    def get_into(self, name, address, size_bytes): return -600
    def get_size(self, name): return {stored_bytes}
    def batch_remove(self, names, is_forced):
        open({removed!r}, "a").writelines(names)
        return [0] * len(names)
"""


@contextmanager
def opened_with(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MooncakeTier]:
    """A tier whose agent loads this source instead of Mooncake."""
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    (tmp_path / "mooncake" / "store.py").write_text(source)
    path = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{path}")
    with (
        socket.create_server(("127.0.0.1", 0)) as master,
        opened(Address(*master.getsockname())) as tier,
    ):
        yield tier


@pytest.mark.parametrize(
    ("stored_bytes", "outcome", "reason"),
    [
        (HEADER_BYTES + PAYLOAD_BYTES + 1, LoadOutcome.REFUSED, "has another length"),
        (HEADER_BYTES + PAYLOAD_BYTES, LoadOutcome.FAILED, "Mooncake answered with code -600"),
    ],
)
def test_an_object_is_removed_for_its_length_only_if_it_has_another_length(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stored_bytes: int,
    outcome: LoadOutcome,
    reason: str,
) -> None:
    """Mooncake answers -600 for objects that are too large, and for other mistakes."""
    removed = tmp_path / "removed"
    source = STORE_THAT_ANSWERS_MINUS_600.format(stored_bytes=stored_bytes, removed=str(removed))
    with opened_with(source, tmp_path, monkeypatch) as tier:
        result = load(tier, new_key())
    assert result.outcome is outcome
    assert reason in result.reason
    assert removed.exists() == (outcome is LoadOutcome.REFUSED)


# -- agents that do not answer as they should --

DEFECTIVE_STORE = """
import os, stat, time

def garble(answer):
    for file in map(int, os.listdir("/dev/fd")):
        try:
            if stat.S_ISSOCK(os.fstat(file).st_mode):
                os.write(file, answer)
        except OSError:
            pass
    time.sleep(600)

class MooncakeDistributedStore:
    def setup(self, *settings): return 0
    def batch_is_exist(self, names): return {answer}
"""


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("[1]", "malformed answer"),
        ("[1] * 4", "malformed answer"),
        ("[True] * 3", "malformed answer"),
        ("['1'] * 3", "malformed answer"),
        ("[1 << 80] * 3", "has ended"),
        (r"garble(b'\x00\x00')", "malformed answer"),
        (r"garble(b'\x00\x00\x00\x09\x93\x01')", "malformed answer"),
        (r"garble(b'\x7f\xff\xff\xff')", "malformed answer"),
        ("garble(bytes(150_000))", "malformed answer"),
    ],
)
def test_a_malformed_answer_fails_the_lookup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, reason: str
) -> None:
    keys = [new_key() for _ in range(3)]
    with (
        opened_with(DEFECTIVE_STORE.format(answer=answer), tmp_path, monkeypatch) as tier,
        pytest.raises(StorageFailed, match=reason),
    ):
        tier.find(keys)


def test_the_agent_cannot_truncate_the_memory_that_it_shares_with_the_engine() -> None:
    """The engine's next access to it would end the engine."""
    with (
        closing(AgentProcess(MooncakePlace(Address("127.0.0.1", 9)))) as agent,
        agent.lane(time.monotonic() + DEADLINE_S) as lane,
    ):
        lane.memory(PAYLOAD_BYTES)
        with pytest.raises(PermissionError):
            os.ftruncate(lane.file, 0)


# -- the master --


def test_a_master_that_is_not_there_at_the_start_costs_three_calls(clock: ManualClock) -> None:
    with mooncake_master() as master:
        master.kill()
        with opened(master.address, clock) as tier:
            key = new_key()
            with pytest.raises(StorageFailed):
                tier.find([key])
            assert load(tier, key).outcome is LoadOutcome.FAILED
            assert store(tier, key).outcome is StoreOutcome.FAILED
            assert store(tier, key).outcome is StoreOutcome.DROPPED
            assert "waiting after a failure" in load(tier, key).reason


def test_a_master_that_comes_late_is_used(clock: ManualClock) -> None:
    with mooncake_master() as master:
        master.kill()
        with opened(master.address, clock, lent_bytes=16 * 2**20) as tier:
            assert load(tier, new_key()).outcome is LoadOutcome.FAILED
            master.start()
            assert_recovers(tier, clock)


def test_a_killed_master_costs_three_calls_and_is_used_when_it_is_back(
    master: MooncakeMaster, clock: ManualClock
) -> None:
    with opened(master.address, clock, lent_bytes=16 * 2**20) as tier:
        key = new_key()
        assert store(tier, key).outcome is StoreOutcome.STORED
        master.kill()
        for _ in range(3):
            assert load(tier, key).outcome is LoadOutcome.FAILED
        began = agents()
        assert store(tier, new_key()).outcome is StoreOutcome.DROPPED
        for find in (tier.find, tier.find_prefix):
            with pytest.raises(StorageFailed, match="waiting after a failure"):
                find([key])
        tier.remove([key])
        assert "waiting after a failure" in load(tier, key).reason
        master.start()
        assert_recovers(tier, clock)
        assert agents() == began


def assert_recovers(tier: MooncakeTier, clock: ManualClock) -> None:
    """Wait until the tier stores and loads again. A master that was killed has forgotten what it
    had, so only new objects are found.
    """

    def is_stored() -> bool:
        clock.advance(PAUSE_S)
        return store(tier, key).outcome in (StoreOutcome.STORED, StoreOutcome.PRESENT)

    key = new_key()
    until("the tier stores again", is_stored)
    assert load(tier, key).outcome is LoadOutcome.LOADED


def test_a_master_that_hangs_costs_each_call_its_deadline(
    master: MooncakeMaster, clock: ManualClock
) -> None:
    with opened(master.address, clock, SHORT) as tier:
        key = new_key()
        until_answered(tier, clock)
        master.stop()
        result = load(tier, key)
        assert result.outcome is LoadOutcome.FAILED
        assert "did not answer in time" in result.reason


def test_an_agent_whose_calls_all_hang_is_started_again(
    master: MooncakeMaster, clock: ManualClock
) -> None:
    with opened(master.address, clock, SHORT) as tier:
        until_answered(tier, clock)
        [agent] = agents()
        agent.send_signal(signal.SIGSTOP)
        for _ in range(NUM_LANES):
            assert load(tier, new_key()).outcome is LoadOutcome.FAILED
            clock.advance(PAUSE_S)
        until_answered(tier, clock)
        assert agent not in agents()


# -- clients --


def test_a_peer_that_kills_the_agent_does_not_kill_the_engine(
    master: MooncakeMaster, clock: ManualClock
) -> None:
    """Mooncake's client aborts its process when a peer sends it JSON that is not an object."""
    with opened(master.address, clock, lent_bytes=16 * 2**20) as tier:
        assert store(tier, new_key()).outcome is StoreOutcome.STORED
        [agent] = agents()
        ports = [each.laddr.port for each in agent.net_connections() if each.status == "LISTEN"]
        for port in ports:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)) as peer:
                peer.sendall(struct.pack("<QB", 3, 0) + b"[]")
                peer.settimeout(DEADLINE_S)
                peer.recv(1)
        assert agent.wait(DEADLINE_S) == -signal.SIGABRT
        assert_recovers(tier, clock)


def test_a_killed_agent_is_started_again(master: MooncakeMaster, clock: ManualClock) -> None:
    with lender(master.address), opened(master.address, clock) as tier:
        key = new_key()
        assert store(tier, key).outcome is StoreOutcome.STORED
        agents()[-1].kill()
        until("the object is loaded", lambda: load(tier, key).outcome is LoadOutcome.LOADED)


def test_an_agent_that_fails_in_a_call_is_started_again() -> None:
    with closing(AgentProcess(MooncakePlace(Address("127.0.0.1", 9)))) as agent:
        until = time.monotonic() + DEADLINE_S
        with agent.lane(until) as lane:
            lane.channel.send(b"no call")
        answer = None
        while answer is None:
            assert time.monotonic() < until
            with suppress(AgentFailed), agent.lane(until) as lane:
                answer = lane.call(Call(Operation.FIND, ["name"]), until)
        assert answer == []  # there is no master


def test_an_agent_that_cannot_be_started_fails_calls_until_it_can(
    master: MooncakeMaster, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(master.address, clock) as tier:
        until_answered(tier, clock)
        with monkeypatch.context() as changed:
            changed.setattr(sys, "executable", "/no/python")
            [agent] = agents()
            agent.kill()
            agent.wait(DEADLINE_S)
            for _ in range(2):
                result = load(tier, new_key())
                assert result.outcome is LoadOutcome.FAILED
            assert "cannot be started" in result.reason
        until_answered(tier, clock)


def test_objects_of_a_killed_lender_are_missing_and_others_are_stored(
    master: MooncakeMaster, clock: ManualClock
) -> None:
    with opened(master.address, clock) as tier:
        key = new_key()
        with lender(master.address):
            assert store(tier, key).outcome is StoreOutcome.STORED
            agents()[-1].kill()
            assert load(tier, key).outcome in (LoadOutcome.FAILED, LoadOutcome.MISSING)

        def is_missing() -> bool:
            clock.advance(PAUSE_S)
            return load(tier, key).outcome is LoadOutcome.MISSING

        until("the master has noticed", is_missing)
        with lender(master.address):
            assert_recovers(tier, clock)


KILLED_ENGINE = """
import os, signal, sys
from kvferry.testing.tier_conformance import NAMESPACE, SECRET
from kvferry.tiers.mooncake.agent import MooncakePlace
from kvferry.tiers.mooncake.tier import MooncakeTier
from kvferry.types import Address
master = Address("127.0.0.1", int(sys.argv[1]))
tier = MooncakeTier(MooncakePlace(master, lent_bytes=2**24), NAMESPACE, SECRET)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_an_agent_ends_with_its_engine(master: MooncakeMaster) -> None:
    port = str(master.address.port)
    engine = subprocess.run([sys.executable, "-c", KILLED_ENGINE, port], check=False)
    assert engine.returncode == -signal.SIGKILL
    until("the agent ends", lambda: not any(port in text for text in all_agents()))


def all_agents() -> list[str]:
    """The settings of all agents on this host."""
    processes = psutil.process_iter(["cmdline"])
    commands = [process.info["cmdline"] or [] for process in processes]
    return [command[-1] for command in commands if AGENT in command]


# -- room and bytes --


def test_a_store_without_room_drops_and_goes_on_loading(
    master: MooncakeMaster, clock: ManualClock
) -> None:
    with opened(master.address, clock) as tier:
        for _ in range(3):
            result = store(tier, new_key())
            assert result == StoreResult(StoreOutcome.DROPPED, "the Mooncake store has no room")
        with lender(master.address) as client:
            key = new_key()
            assert store(tier, key).outcome is StoreOutcome.DROPPED
            clock.advance(PAUSE_S)
            assert store(tier, key).outcome is StoreOutcome.STORED
            assert load(tier, key).outcome is LoadOutcome.LOADED
            assert MooncakeStorage(master, client).read(NAMESPACE, key) is not None


def test_a_close_ends_calls_that_wait(master: MooncakeMaster) -> None:
    with lender(master.address), opened(master.address) as tier:
        key = new_key()
        store(tier, key)
        master.stop()
        outcomes: list[LoadOutcome] = []
        thread = threading.Thread(target=lambda: outcomes.append(load(tier, key).outcome))
        thread.start()
        tier.close()
        thread.join(DEADLINE_S)
        assert outcomes == [LoadOutcome.FAILED]
