"""Sleeps of some microseconds, for a thread that polls a device and shares the GIL.

Releasing the GIL is not enough: the waiting thread must first be woken, and by then we hold the GIL
again. Waking takes longer if CPUs are idle or shared. A thread that polls without sleeping would
keep the engine's thread from running for milliseconds at a time.
Any thread may call `short_sleep`; the timer slack is set once per thread.
"""

import ctypes
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
