"""Signals that ask a command to stop: an exception wherever it happens to be, or a request that it
looks at when it can.

An exception out of a signal handler appears between any two instructions of whatever the main
thread runs. Code that only waits is well served by that. Code that is inside other libraries is
not. They may swallow it, and the command would go on for hours: `__del__` and weak references'
callbacks do, Cython does while it makes a module (seen: the first use of numpy.random). Or it
leaves a transfer half made, whose memory is then freed under it.
"""

import contextlib
import faulthandler
import json
import logging
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from types import FrameType

__all__ = [
    "STOP_SIGNALS",
    "JsonFormatter",
    "StopRequest",
    "configure_logs",
    "raise_file_limit",
    "stop_requests",
    "stop_signals",
]


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FINISH_S = 2.0
"""For what is under way when a stop is asked for."""
END_S = 30.0
"""From then until the process ends by force, saying where it hung. Longer than every wait on the
way out.
"""


@contextmanager
def stop_signals() -> Iterator[None]:
    """They become KeyboardInterrupt at once."""
    with _handled_by(_interrupt):
        yield


class StopRequest:
    """What a signal asked for, remembered until somebody looks. Loops call `check`, waits end at
    `earlier_deadline`.
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
        """KeyboardInterrupt once a stop is asked for."""
        if self.is_requested:
            raise KeyboardInterrupt

    def earlier_deadline(self, deadline: float) -> float:
        """Until when to wait for something that had better be finished: its deadline, or a moment
        after the stop.
        """
        return (
            deadline if self._requested_at is None else min(deadline, self._requested_at + FINISH_S)
        )


@contextmanager
def stop_requests(end_s: float = END_S) -> Iterator[StopRequest]:
    """They are remembered. A process that has not ended `end_s` after the first is ended, also when
    it hangs in another library.
    """
    stop = StopRequest()

    def remember(number: int, frame: FrameType | None) -> None:
        if not stop.is_requested:
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


# -------------------- limits --------------------
# What the operating system allows a server of ours. Children inherit it.


def raise_file_limit() -> None:
    """As many files as we may have: each connection is one, and the usual soft limit of 1,024 is
    too few for a busy server.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# -------------------- json logs --------------------
# Log lines as JSON objects, one per line, for machines to read.


_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class JsonFormatter(logging.Formatter):
    """Time, level, logger and message, and whatever else the line was given as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        shown: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        shown |= {name: value for name, value in vars(record).items() if name not in _PLAIN}
        if record.exc_info:
            shown["exception"] = self.formatException(record.exc_info)
        return json.dumps(shown, default=str)


class _TextFormatter(logging.Formatter):
    """The same for people: what was given as `extra` follows the message."""

    def format(self, record: logging.LogRecord) -> str:
        extra = " ".join(
            f"{name}={value}"
            for name, value in vars(record).items()
            if name not in _PLAIN and value != ""
        )
        return f"{super().format(record)} {extra}".rstrip()


def configure_logs(is_json: bool) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonFormatter() if is_json else _TextFormatter("%(asctime)s %(levelname)s %(message)s")
    )
    logging.basicConfig(level=logging.INFO, handlers=[handler])
