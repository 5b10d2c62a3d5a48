import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from kvferry.cli.cluster.addresses import announce_address, parse_announcement
from kvferry.cli.cluster.local_cluster import LocalCluster
from kvferry.cli.cluster.processes import ChildProcess, ProcessGroup
from kvferry.cli.cluster.reaper import members_of_group
from kvferry.cli.cluster.startup_view import StartupView
from kvferry.errors import KVFerryError
from kvferry.types import Address

STUB = Path(__file__).with_name("stub_process.py")
STUB_UP = Path(__file__).with_name("stub_up.py")
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class StubLaunch:
    engine_mode: str = "serve"
    router_mode: str = "serve"

    def engine(self) -> Sequence[str]:
        return stub(self.engine_mode)

    def router(self, prefillers: Sequence[Address], decoders: Sequence[Address]) -> Sequence[str]:
        assert prefillers
        assert decoders
        return stub(self.router_mode)


def stub(mode: str) -> list[str]:
    return [sys.executable, str(STUB), mode]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[ProcessGroup]:
    with ProcessGroup(tmp_path / "scratch", grace_s=0.5) as group:
        yield group
        group_id = group.id
    assert members_of_group(group_id) == set()


def eventually(claim: Callable[[], bool], within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not claim():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def started(mode: str, group: ProcessGroup) -> ChildProcess:
    child = ChildProcess(f"the {mode}", stub(mode), os.environ)
    child.start(group.id)
    return child


def serving(mode: str, group: ProcessGroup) -> ChildProcess:
    child = started(mode, group)
    eventually(lambda: child.poll_address() is not None)
    return child


# -- announcements --


def test_an_announced_address_is_read_back() -> None:
    reading, writing = os.pipe()
    environ = {"KVFERRY_ANNOUNCE_FD": str(writing)}
    announce_address(Address("127.0.0.1", 4711), environ)
    assert parse_announcement(os.read(reading, 100)) == Address("127.0.0.1", 4711)
    assert os.read(reading, 1) == b""
    assert environ == {}
    os.close(reading)


@pytest.mark.parametrize("value", [None, "", "x", "-1", "99999", "9" * 30, "１"])
def test_without_a_waiting_parent_nothing_is_announced(value: str | None) -> None:
    announce_address(Address("h", 1), {} if value is None else {"KVFERRY_ANNOUNCE_FD": value})


@pytest.mark.parametrize(
    "line",
    [b"", b"\n", b"host", b"host:x", b"host:0", b"host:70000", b":1", b"host:" + b"1" * 5000],
)
def test_what_is_no_address_is_none(line: bytes) -> None:
    assert parse_announcement(line) is None


# -- one child --


def test_each_line_of_a_child_is_passed_on(group: ProcessGroup) -> None:
    lines: list[str] = []
    child = ChildProcess("the serve", stub("serve"), os.environ, on_line=lines.append)
    child.start(group.id)
    eventually(lambda: lines == ["this is serve"])
    child.close()


def test_a_child_says_where_it_listens_and_is_gone_after_close(group: ProcessGroup) -> None:
    child = started("serve", group)
    eventually(lambda: child.poll_address() is not None)
    assert child.tail() == ["this is serve"]
    pid = child.pid
    child.close()
    assert not is_alive(pid)
    child.close()


@dataclass
class InterruptedProcess:
    """A process; Ctrl-C arrives when its log is about to be read."""

    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def stdout(self) -> None:
        raise KeyboardInterrupt

    def poll(self) -> int | None:
        return self.process.poll()

    def wait(self, timeout: float | None = None) -> int:
        return self.process.wait(timeout)

    def send_signal(self, sig: int) -> None:
        self.process.send_signal(sig)

    def kill(self) -> None:
        self.process.kill()


def test_a_child_whose_start_was_interrupted_is_stopped(group: ProcessGroup) -> None:
    with subprocess.Popen(stub("silent")) as process:
        child = ChildProcess(
            "stub", stub("silent"), os.environ, start=lambda *_: InterruptedProcess(process)
        )
        with pytest.raises(KeyboardInterrupt):
            child.start(group.id)
        child.close()
        assert process.returncode == -signal.SIGTERM


def test_a_child_that_fails_is_reported_with_its_exit_code_and_last_words(
    group: ProcessGroup,
) -> None:
    child = started("fail", group)
    with pytest.raises(KVFerryError, match="the fail exited with code 1"):
        eventually(lambda: child.poll_address() is not None)
    assert child.has_failed
    assert child.tail() == ["this is fail", "the model has three legs"]
    child.close()


def test_a_child_that_is_killed_is_reported_with_the_signal(group: ProcessGroup) -> None:
    child = started("silent", group)
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(KVFerryError, match="the silent was killed by SIGKILL"):
        eventually(lambda: child.poll_address() is not None)
    child.close()


def test_a_child_that_ignores_sigterm_is_killed(group: ProcessGroup) -> None:
    child = started("deaf", group)
    eventually(lambda: child.poll_address() is not None)
    pid = child.pid
    child.close(grace_s=0.2)
    assert not is_alive(pid)


def test_a_child_that_was_asked_to_end_is_not_asked_again_while_it_finishes(
    group: ProcessGroup,
) -> None:
    asked, unasked = serving("patient", group), serving("patient", group)
    asked.interrupt()
    for child in (asked, unasked):
        child.close(grace_s=20)
    assert asked.tail() == ["this is patient", "finishing", "finished"]
    assert unasked.tail() == ["this is patient", "aborted"]


def test_a_child_that_does_not_end_when_asked_is_told_again_and_killed_at_last(
    group: ProcessGroup,
) -> None:
    for mode, said in (("stubborn", ["aborted"]), ("deaf", [])):
        child = serving(mode, group)
        pid = child.pid
        (child.interrupt if mode == "stubborn" else child.terminate)()
        child.close(grace_s=0.2)
        assert not is_alive(pid)
        assert child.tail() == [f"this is {mode}", *said]


def test_a_child_with_work_to_do_is_waited_for(group: ProcessGroup) -> None:
    child = started("finish", group)
    child.wait(timeout_s=60)
    child.close()
    failing = started("fail", group)
    with pytest.raises(KVFerryError, match="exited with code 1"):
        failing.wait(timeout_s=60)
    failing.close()
    slow = started("silent", group)
    with pytest.raises(KVFerryError, match="did not exit within"):
        slow.wait(timeout_s=0.1)
    slow.close()


def test_a_command_that_does_not_exist_is_an_error_in_a_sentence(group: ProcessGroup) -> None:
    child = ChildProcess("x", ["/nonexistent/program"], {})
    with pytest.raises(KVFerryError, match="x cannot be started: No such file"):
        child.start(group.id)
    child.close()


# -- the cluster --


def test_a_cluster_is_up_when_everyone_is_healthy_and_says_so_in_plain_lines(
    group: ProcessGroup,
) -> None:
    text = io.StringIO()
    cluster = LocalCluster(StubLaunch(), os.environ, group.id, start_timeout_s=60)
    with StartupView(Console(file=text)) as view:
        router = cluster.start(2, 1, view)
    assert len(cluster.decoders) == 1
    assert router not in cluster.decoders
    cluster.check_alive()
    cluster.close()
    for name in ("prefill-0", "prefill-1", "decode-0", "router"):
        assert f"{name}: ready on 127.0.0.1:" in text.getvalue()


@pytest.mark.parametrize(
    ("launch", "timeout_s", "sentence"),
    [
        (StubLaunch(engine_mode="fail"), 30, "-0 exited with code 1"),
        (StubLaunch(router_mode="fail"), 30, "router exited with code 1"),
        (
            StubLaunch(engine_mode="unhealthy"),
            1,
            "prefill-0, decode-0 did not become healthy within 1 s",
        ),
    ],
)
def test_a_cluster_that_does_not_come_up_names_who_failed(
    launch: StubLaunch, timeout_s: float, sentence: str, group: ProcessGroup
) -> None:
    cluster = LocalCluster(launch, os.environ, group.id, timeout_s)
    with (
        StartupView(Console(file=io.StringIO())) as view,
        pytest.raises(KVFerryError, match=sentence),
    ):
        cluster.start(1, 1, view)
    assert cluster.last_log_lines()
    cluster.close()


def test_a_member_that_dies_while_serving_is_noticed(group: ProcessGroup) -> None:
    cluster = LocalCluster(StubLaunch(), os.environ, group.id, start_timeout_s=60)
    with StartupView(Console(file=io.StringIO())) as view:
        cluster.start(1, 1, view)
    victim = min(members_of_group(group.id) - {group.id})
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(KVFerryError, match="prefill-0 was killed by SIGKILL"):
        eventually(lambda: _all_live(cluster))
    cluster.close()


def test_a_cluster_lets_its_engines_finish_when_it_is_closed(group: ProcessGroup) -> None:
    cluster = LocalCluster(StubLaunch("patient"), os.environ, group.id, start_timeout_s=60)
    with StartupView(Console(file=io.StringIO())) as view:
        cluster.start(2, 1, view)
    cluster.close()
    said = dict(cluster.last_log_lines())
    assert [said[name][-1] for name in ("prefill-0", "prefill-1", "decode-0")] == ["finished"] * 3


def test_a_cluster_that_is_being_closed_can_be_hurried(group: ProcessGroup) -> None:
    cluster = LocalCluster(StubLaunch("busy"), os.environ, group.id, start_timeout_s=60)
    with StartupView(Console(file=io.StringIO())) as view:
        cluster.start(1, 1, view)
    closing = threading.Thread(target=cluster.close)
    closing.start()
    eventually(
        lambda: (
            [lines[-1] for name, lines in cluster.last_log_lines() if name != "router"]
            == ["finishing"] * 2
        )
    )
    cluster.terminate_all()
    closing.join(60)
    assert [lines[-1] for name, lines in cluster.last_log_lines() if name != "router"] == [
        "aborted"
    ] * 2


def _all_live(cluster: LocalCluster) -> bool:
    """Never true: the caller polls this function until `check_alive` raises."""
    cluster.check_alive()
    return False


# -- the end of the starter and of the group --


@pytest.mark.parametrize(
    ("mode", "number"),
    [("serve", signal.SIGKILL), ("serve", signal.SIGTERM), ("deaf", signal.SIGKILL)],
)
def test_when_the_starter_dies_its_processes_and_its_directory_go_too(
    mode: str, number: signal.Signals, tmp_path: Path
) -> None:
    scratch = tmp_path / "scratch"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, str(STUB_UP), str(scratch), mode], stdout=subprocess.PIPE, env=environment
    ) as starter:
        assert starter.stdout is not None
        pids = [int(pid) for pid in starter.stdout.readline().split()]
        assert len(pids) == (6 if mode == "deaf" else 4)
        assert all(map(is_alive, pids))
        assert scratch.is_dir()
        starter.send_signal(number)
        starter.wait(60)
        eventually(lambda: not any(map(is_alive, pids)))
    assert not scratch.exists()


def test_closing_a_group_ends_members_nobody_closed(tmp_path: Path) -> None:
    with ProcessGroup(tmp_path / "scratch") as group:
        child = started("serve", group)
        eventually(lambda: child.poll_address() is not None)
        pid = child.pid
    assert not is_alive(pid)
    child.close()
