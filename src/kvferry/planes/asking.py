"""A thread that waits for a device while other threads of its interpreter go on: by a compiled loop, or by short sleeps where kvferry was
installed without a compiler."""

import ctypes
import time
from collections.abc import Callable

from kvferry.breath import breathe

__all__ = ["ask_by_breaths", "ask_until"]


def ask_by_breaths(function: int, argument: int, waiting: int, seconds: float) -> int:
    ask = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(function)
    end = time.monotonic() + seconds
    while (answer := int(ask(argument))) == waiting and time.monotonic() < end:
        breathe()
    return answer


ask_until: Callable[[int, int, int, float], int]
"""Call the function at an address, with a pointer, until it answers something else than `waiting`, for so long at most: its last answer."""
try:
    from kvferry.planes._copy import ask_until
except ImportError:
    ask_until = ask_by_breaths
