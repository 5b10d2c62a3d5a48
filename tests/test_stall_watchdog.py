"""Tests that a failed test runs again if the machine stalled, and only then.

The tests run another pytest process and stop it (SIGSTOP) for a while.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.stall_watchdog import CHECK_INTERVAL_S, StallWatchdog

ROOT = Path(__file__).parents[1]
TESTS = """
import pathlib, time, pytest

@pytest.fixture(scope="module")
def shared():
    with open("made", "a") as made:
        made.write("x")
    (pathlib.Path("waiting")).touch()
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        time.sleep(0.05)
    if pathlib.Path("made").read_text() == "x":
        raise RuntimeError("the first time")

def test_it(shared): pass
def test_another(shared): pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("stands_still", [True, False])
def test_a_failure_is_tried_again_only_where_the_machine_stood_still(
    tmp_path: Path, stands_still: bool
) -> None:
    (tmp_path / "test_sample.py").write_text(
        TESTS.replace("WAIT_S", "2.0" if stands_still else "0.5")
    )
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_runtest_protocol\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        "test_sample.py",
    ]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as child:
        deadline = time.monotonic() + 60
        while not (tmp_path / "waiting").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        if stands_still:
            child.send_signal(signal.SIGSTOP)
            time.sleep(5.0)
            child.send_signal(signal.SIGCONT)
        said, _ = child.communicate()
    assert (child.returncode == 0) == stands_still, said
    assert ("run once more, as the machine stalled" in said) == stands_still, said
    assert ("2 passed" in said) == stands_still, said


@pytest.mark.parametrize(
    ("said", "is_stalled"),
    [
        ("rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:", True),
        ("port 3 entered disabled state", False),
    ],
)
def test_what_the_kernel_says_of_itself_counts(tmp_path: Path, said: str, is_stalled: bool) -> None:
    log = tmp_path / "kmsg"
    log.write_text("BUG: workqueue lockup - long ago\n")
    pulse = StallWatchdog(log)
    time.sleep(3 * CHECK_INTERVAL_S)
    assert pulse.last_stall == float("-inf")
    with log.open("a") as more:
        more.write(f"{said}\n")
    deadline = time.monotonic() + (10 if is_stalled else 3 * CHECK_INTERVAL_S)
    while pulse.last_stall == float("-inf") and time.monotonic() < deadline:
        time.sleep(CHECK_INTERVAL_S)
    assert (pulse.last_stall > 0) == is_stalled
