"""Tests that a process that the forkserver forks behaves like a spawned process."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.e2e.harness import OURS

from kvferry.cli.cluster.processes import ChildProcess, ProcessGroup, ProcessStarter, spawn_process
from kvferry.errors import KVFerryError

pytestmark = pytest.mark.slow
COMMAND = [sys.executable, "-m", "tests.forkserver.sample", "serve", "with a word"]
"""`serve`: the word that announces to the forkserver that another process will be spawned."""


@pytest.fixture
def group(tmp_path: Path) -> Iterator[int]:
    with ProcessGroup(tmp_path / "group") as made:
        yield made.id


def environment_seen(
    start: ProcessStarter, group: int, **variables: str
) -> tuple[dict[str, Any], str]:
    child = ChildProcess("sample", COMMAND, {**os.environ, **variables}, start)
    child.start(group)
    try:
        with pytest.raises(KVFerryError) as ended:
            child.wait(60)
    finally:
        child.close()
    return json.loads(child.tail(1)[0]), str(ended.value)


def test_it_finds_the_same_words_variables_files_and_signals_and_so_does_what_it_spawns(
    group: int,
) -> None:
    forked = environment_seen(OURS.start, group, COLOUR="green")
    assert forked == environment_seen(spawn_process, group, COLOUR="green")
    assert forked != environment_seen(spawn_process, group, COLOUR="red"), (
        "the comparison sees a variable"
    )
    assert forked[0]["code"] == 7
    assert forked[1].endswith("exited with code 3")


def test_it_can_be_killed_and_what_it_would_have_spawned_goes_with_it(group: int) -> None:
    writing = os.open(os.devnull, os.O_WRONLY)
    command = [sys.executable, "-m", "tests.forkserver.waiting", "serve"]
    process = OURS.start(command, os.environ, writing, group)
    os.close(writing)
    assert process.stdout is not None
    with process.stdout as output:
        assert output.readline() == b"waiting\n"
        family = [
            psutil.Process(process.pid),
            *psutil.Process(process.pid).children(recursive=True),
        ]
        assert len(family) == 2
        assert process.poll() is None
        process.kill()
        assert process.wait(60) == -9
        _, alive = psutil.wait_procs(family, timeout=60)
        assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]


def test_waiting_for_one_that_does_not_end_has_a_deadline(group: int) -> None:
    writing = os.open(os.devnull, os.O_WRONLY)
    process = OURS.start(
        [sys.executable, "-m", "tests.forkserver.waiting"], os.environ, writing, group
    )
    os.close(writing)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.05)
    process.kill()
    process.wait(60)
    assert process.stdout is not None
    process.stdout.close()


@pytest.mark.parametrize(
    "command",
    [["/bin/true"], [sys.executable, "-c", "pass"], ["/other/python", "-m", "kvferry"]],
    ids=" ".join,
)
def test_only_modules_of_its_own_interpreter_are_started_from_it(command: list[str]) -> None:
    assert not OURS.can_start(command)
    assert OURS.can_start([sys.executable, "-m", "kvferry"])
    assert OURS.can_start(["ip", "netns", "exec", "space", sys.executable, "-m", "kvferry"])
