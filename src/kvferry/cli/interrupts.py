"""Signals that ask a command to stop: an exception wherever it happens to be, or a request that it looks at when it can.

An exception out of a signal handler appears between any two instructions of whatever the main thread runs. Code that only waits is well
served by that. Code that is inside other libraries is not. They may swallow it, and the command would go on for hours: `__del__` and weak
references' callbacks do, Cython does while it makes a module (seen: the first use of numpy.random). Or it leaves a transfer half made,
whose memory is then freed under it.
"""

import faulthandler
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["STOP_SIGNALS", "StopRequest", "stop_requests", "stop_signals"]

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FINISH_S = 2.0
"""For what is under way when a stop is asked for."""
END_S = 30.0
"""From then until the process ends by force, saying where it hung. Longer than every wait on the way out."""


@contextmanager
def stop_signals() -> Iterator[None]:
    """They become KeyboardInterrupt at once."""
    with _handled_by(_interrupt):
        yield


class StopRequest:
    """What a signal asked for, remembered until somebody looks. Loops call `check`, waits end at `earlier_deadline`."""

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
        """Until when to wait for something that had better be finished: its deadline, or a moment after the stop."""
        return deadline if self._requested_at is None else min(deadline, self._requested_at + FINISH_S)


@contextmanager
def stop_requests(end_s: float = END_S) -> Iterator[StopRequest]:
    """They are remembered. A process that has not ended `end_s` after the first is ended, also when it hangs in another library."""
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
