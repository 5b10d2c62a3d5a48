"""Pauses of some microseconds, for a thread that waits for a device and shares its interpreter with others.

To let go of the interpreter's lock for a moment is not enough: whoever waits for it has to be woken first, which takes longer where
processors are idle or shared, and by then the lock is taken again. A thread that polls without pause would keep an engine's thread out for
milliseconds at a time.
"""

import ctypes
import threading
import time
from contextlib import suppress

__all__ = ["BREATH_S", "breathe"]

BREATH_S = 20e-6
SLACK_NS = 1000
"""How much later than asked for Linux may wake a thread that breathes; by default it is 50,000."""
PR_SET_TIMERSLACK = 29

_here = threading.local()


def breathe(seconds: float = BREATH_S) -> None:
    if not getattr(_here, "is_punctual", False):
        _here.is_punctual = True
        with suppress(OSError, AttributeError):  # not Linux: a longer breath
            ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, SLACK_NS, 0, 0, 0)
    time.sleep(seconds)
