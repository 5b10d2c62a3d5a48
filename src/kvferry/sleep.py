"""Pauses of some microseconds, for a thread that waits for a device and shares its interpreter with
others.

To release the GIL for a moment is not enough: whoever waits for it has to be woken first, which
takes longer where processors are idle or shared, and by then the lock is taken again. A thread that
polls without pause would keep an engine's thread out for milliseconds at a time.
"""

import ctypes
import threading
import time
from contextlib import suppress

__all__ = ["SHORT_SLEEP_S", "short_sleep"]

SHORT_SLEEP_S = 20e-6
SLACK_NS = 1000
"""How much later than asked for Linux may wake a thread that breathes; by default it is 50,000."""
PR_SET_TIMERSLACK = 29

_thread_state = threading.local()


def short_sleep(seconds: float = SHORT_SLEEP_S) -> None:
    if not getattr(_thread_state, "has_short_slack", False):
        _thread_state.has_short_slack = True
        with suppress(OSError, AttributeError):  # not Linux: a longer breath
            ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, SLACK_NS, 0, 0, 0)
    time.sleep(seconds)
