"""Runs a failed test once more if the machine stalled, and prints that it did.

A virtual machine can stand still for seconds. Every test that waits with a deadline may then fail,
and the failure says nothing about the code. A failure without a stall stays a failure.
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

CHECK_INTERVAL_S = 0.25
STALL_S = 4.0
AFTER_EFFECT_S = 60.0
"""A stall may damage a fleet that several tests share, and a later test then fails."""


KERNEL_LOG = Path("/dev/kmsg")
STALLS = (b"detected stalls", b"self-detected stall", b"workqueue lockup")
"""Messages that Linux logs when its own threads have not run for half a minute. New processes and
threads do not run then either, even if this process does.
"""


class StallWatchdog:
    """Records the last time when this process or the kernel's threads did not get to run."""

    def __init__(self, kernel_log: Path = KERNEL_LOG) -> None:
        self.last_stall = float("-inf")
        self._kernel_log = _open_end(kernel_log)
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    def _beat(self) -> None:
        before = time.monotonic()
        while True:
            time.sleep(CHECK_INTERVAL_S)
            now = time.monotonic()
            if now - before > STALL_S or self._kernel_reports_stall():
                self.last_stall = now
            before = now

    def _kernel_reports_stall(self) -> bool:
        has_complained = False
        with suppress(OSError):  # no new message, or the kernel has overwritten some
            while self._kernel_log is not None and (said := os.read(self._kernel_log, 8192)):
                has_complained |= any(words in said for words in STALLS)
        return has_complained


def _open_end(log: Path) -> int | None:
    try:
        opened = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError:  # the log needs a privilege that this process may not have
        return None
    try:
        os.lseek(opened, 0, os.SEEK_END)
    except OSError:  # in some containers /dev/kmsg is a terminal
        os.close(opened)
        return None
    return opened


def run_test(
    item: pytest.Item,
    nextitem: pytest.Item | None,
    pulse: StallWatchdog,
    say: Callable[[str], None],
) -> None:
    began = time.monotonic()
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    if any(report.failed for report in reports) and pulse.last_stall > began - AFTER_EFFECT_S:
        say(f"run once more, as the machine stalled: {item.nodeid}")
        # Tear down all shared fixtures, so that the second run creates new ones.
        item.session._setupstate.teardown_exact(None)  # noqa: SLF001
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
