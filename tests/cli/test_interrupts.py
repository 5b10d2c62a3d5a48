"""Tests the signals that ask a command to stop, each in a separate process."""

import signal
import subprocess
import sys

import pytest

from kvferry.cli.runtime import FINISH_S, STOP_SIGNALS, StopRequest

SWALLOWED = """
import os, sys
from kvferry.cli.runtime import stop_requests, stop_signals

class Swallowing:
    def __del__(self):
        os.kill(os.getpid(), int(sys.argv[1]))
        for _ in range(1000):
            pass
"""
REMEMBERED = """
with stop_requests() as stop:
    Swallowing()
    print("still here", flush=True)
    stop.check()
    print("not stopped")
"""
RAISED = """
with stop_signals():
    Swallowing()
    print("still here", flush=True)
"""
HANGING = """
import os, signal, threading
from kvferry.cli.runtime import stop_requests

with stop_requests(end_s=0.1) as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    lock = threading.Lock()
    with lock:
        lock.acquire()
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_stop_that_is_asked_for_where_exceptions_are_swallowed_is_remembered(
    number: signal.Signals,
) -> None:
    ran = run(SWALLOWED + REMEMBERED, str(int(number)))
    assert ran.stdout == "still here\n"
    assert ran.stderr.rstrip().endswith("KeyboardInterrupt")


def test_control_an_exception_is_swallowed_there() -> None:
    ran = run(SWALLOWED + RAISED, str(int(signal.SIGINT)))
    assert (ran.returncode, ran.stdout) == (0, "still here\n")
    assert "Exception ignored" in ran.stderr


def test_a_process_that_hangs_after_a_stop_is_ended_and_says_where() -> None:
    ran = run(HANGING)
    assert ran.returncode == 1
    assert 'File "<string>", line 9' in ran.stderr


def test_what_is_under_way_when_a_stop_is_asked_for_has_a_moment_to_finish() -> None:
    stop = StopRequest()
    assert stop.earlier_deadline(1e12) == 1e12
    stop.request()
    asked_for = stop.earlier_deadline(1e12)
    stop.request()
    assert stop.earlier_deadline(1e12) == asked_for < 1e12
    assert stop.earlier_deadline(FINISH_S) == FINISH_S
    with pytest.raises(KeyboardInterrupt):
        stop.check()
