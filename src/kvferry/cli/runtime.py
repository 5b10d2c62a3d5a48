"""The process environment of commands: stop signals, the limit on open files, and log settings."""

import argparse
import contextlib
import faulthandler
import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from kvferry.cli.arguments import Parser
from kvferry.logs import FORMAT_VARIABLE, FORMATS, LEVEL_VARIABLE, LEVELS, LogSettings

# -- stop signals --
# A signal either raises KeyboardInterrupt at once (`stop_signals`) or is recorded until the command
# checks (`stop_requests`). An exception from a signal handler appears between any two instructions
# of the main thread. For code that only waits, the exception is fine. Code inside other libraries
# needs the second way: a library may swallow the exception, and the command would run on for hours
# (`__del__` and callbacks of weak references do so; Cython does so while it initialises a module,
# seen at the first use of numpy.random). Or the exception leaves a transfer half done, whose memory
# is then freed during the transfer.


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FINISH_S = 2.0
"""The time that work in progress has to finish after a stop request."""
END_S = 30.0
"""The time from the stop request until the process is ended by force, with a traceback.

The value is longer than every wait during a normal exit.
"""


@contextmanager
def stop_signals() -> Iterator[None]:
    """Turn stop signals into KeyboardInterrupt at once."""
    with _handled_by(_interrupt):
        yield


class StopRequest:
    """A stop request that is recorded until the command checks.

    Loops call `check`; waits end at `earlier_deadline`.
    """

    def __init__(self) -> None:
        self._requested_at: float | None = None

    @property
    def is_requested(self) -> bool:
        return self._requested_at is not None

    def request(self) -> None:
        if self._requested_at is None:
            self._requested_at = time.monotonic()

    def check(self) -> None:
        """Raise KeyboardInterrupt if a stop has been requested."""
        if self.is_requested:
            raise KeyboardInterrupt

    def earlier_deadline(self, deadline: float) -> float:
        """Return the deadline of a wait: `deadline`, or `FINISH_S` after the stop request if that
        is earlier.
        """
        return (
            deadline if self._requested_at is None else min(deadline, self._requested_at + FINISH_S)
        )


@contextmanager
def stop_requests(end_s: float = END_S) -> Iterator[StopRequest]:
    """Record stop signals instead of raising.

    A process that has not ended `end_s` after the first signal is ended by force, even if the
    process hangs in another library.
    """
    stop = StopRequest()

    def remember(number: int, frame: FrameType | None) -> None:
        if not stop.is_requested:
            # faulthandler has its own thread and needs no GIL, so the exit works in a hung process.
            faulthandler.dump_traceback_later(end_s, exit=True)
        stop.request()

    with _handled_by(remember):
        yield stop


@contextmanager
def _handled_by(handler: "signal._HANDLER") -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


# -- limits --
# Limits of the operating system; child processes inherit the limits.


def raise_file_limit() -> None:
    """Raise the soft limit on open files to the hard limit.

    Each connection is one file, and the usual soft limit of 1,024 is too low for a busy server.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# -- logs --


def add_log_arguments(parser: Parser) -> None:
    """Add `--log-level` and `--log-format`; without them the environment decides."""
    parser.add_argument(
        "--log-level",
        choices=LEVELS,
        help=f"log level (default: {LEVEL_VARIABLE}, else {LogSettings().level})",
    )
    parser.add_argument(
        "--log-format",
        choices=FORMATS,
        help=f"text, or json with one object per line (default: {FORMAT_VARIABLE}, else "
        f"{LogSettings().format})",
    )


def log_settings(arguments: argparse.Namespace) -> LogSettings:
    return LogSettings.of(arguments.log_level, arguments.log_format, os.environ)
