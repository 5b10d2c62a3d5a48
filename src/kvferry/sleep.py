"""Sleeps of some microseconds, for a thread that polls a device and shares the GIL; and a wake-up
for a thread that waits for file descriptors.

Releasing the GIL is not enough: the waiting thread must first be woken, and by then we hold the GIL
again. Waking takes longer if CPUs are idle or shared. A thread that polls without sleeping would
keep the engine's thread from running for milliseconds at a time.
Any thread may call `short_sleep`; the timer slack is set once per thread.
"""

import ctypes
import os
import threading
import time
from contextlib import suppress

SHORT_SLEEP_S = 20e-6
SLACK_NS = 1000
"""How many nanoseconds late Linux may wake a thread in `short_sleep`; the default is 50,000."""
PR_SET_TIMERSLACK = 29
"""The `prctl` option, from linux/prctl.h."""

_thread_state = threading.local()


def short_sleep(seconds: float = SHORT_SLEEP_S) -> None:
    """Sleep for some microseconds, with a timer slack of `SLACK_NS` so that the sleep is short."""
    if not getattr(_thread_state, "has_short_slack", False):
        _thread_state.has_short_slack = True
        with suppress(OSError, AttributeError):  # Without Linux's prctl the sleep is longer.
            ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, SLACK_NS, 0, 0, 0)
    time.sleep(seconds)


class Wakeup:
    """Wakes the thread that waits for `fileno`; many calls of `wake` before one `clear` count as
    one. Any thread may call `wake`, which does nothing after `close`.
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        """Prevents a late `wake` from writing to a file descriptor that was closed and now belongs
        to another file.
        """
        self._is_open = True

    def wake(self) -> None:
        # BlockingIOError: the counter is at its maximum, so the waiting thread is woken anyway.
        with self._lock, suppress(BlockingIOError):
            if self._is_open:
                os.eventfd_write(self._fd, 1)

    def clear(self) -> bool:
        """Return True if `wake` was called since the last call."""
        with suppress(BlockingIOError):
            return os.eventfd_read(self._fd) > 0
        return False

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        with self._lock:
            if self._is_open:
                self._is_open = False
                os.close(self._fd)
