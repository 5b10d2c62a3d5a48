"""A pause of some microseconds for a thread that has more to do at once, so that others of its interpreter come in.

To let go of the interpreter's lock for a moment is not enough: whoever waits for it has to be woken first, which takes longer where
processors are idle, and by then the lock is taken again. A thread that polls would keep an engine's thread out for milliseconds at a time.
"""

import ctypes
import threading
import time
from contextlib import suppress

__all__ = ["breathe"]

BREATH_S = 20e-6
SLACK_NS = 1000
"""How much later than asked for Linux may wake this thread; by default it is 50,000."""
PR_SET_TIMERSLACK = 29

_here = threading.local()


def breathe() -> None:
    if not getattr(_here, "is_punctual", False):
        _here.is_punctual = True
        with suppress(OSError, AttributeError):  # not Linux: a longer breath
            ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, SLACK_NS, 0, 0, 0)
    time.sleep(BREATH_S)
