"""The native functions of `_copy.c`, each with a Python substitute.

The substitutes are used if kvferry was installed without a compiler, or if the installed `_copy` is
too old to have the function. Native functions release the GIL while they copy or wait. Importing
this module does not need CUDA.
"""

import ctypes
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

from kvferry.sleep import short_sleep

NATIVE_FUNCTIONS = (
    "are_within",
    "poll_until",
    "chunk_keys",
    "copy_and_sum",
    "copy_segments",
    "group_keys",
    "mark_stored",
    "spin_wait",
    "put_all",
    "put_places",
    "read_file",
    "start_kernel",
)

NativeFunction = TypeVar("NativeFunction")


def native_or(name: str, otherwise: NativeFunction) -> NativeFunction:
    """Return the native function of this name, or `otherwise` if it is not available."""
    found: NativeFunction = getattr(_native_module(), name, otherwise)
    return found


def missing_native_functions() -> tuple[str, ...]:
    """Return the names of native functions that are not compiled here: all works, but slower."""
    return tuple(name for name in NATIVE_FUNCTIONS if not hasattr(_native_module(), name))


def _native_module() -> Any:
    try:
        return import_module("kvferry.transports.copy._copy")
    except ImportError:
        return None


# -- driver calls --
# Calls of the CUDA driver that every transfer makes, by the address of the driver's function. They
# release the GIL during the call.


class Kernel(NamedTuple):
    """A loaded kernel. Its parameters are the address of a table, two numbers, and then further
    addresses, which are all null.
    """

    function: int
    threads: int
    shared_bytes: int
    num_parameters: int


def poll_with_short_sleeps(function: int, argument: int, waiting: int, seconds: float) -> int:
    ask = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(function)
    end = time.monotonic() + seconds
    while (answer := int(ask(argument))) == waiting and time.monotonic() < end:
        short_sleep()
    return answer


poll_until: Callable[[int, int, int, float], int] = native_or("poll_until", poll_with_short_sleeps)
"""Call the function at an address, with a pointer, until the result is not `waiting` or the given
seconds are over; returns the last result.
"""
spin_wait: Callable[[float], None] = native_or("spin_wait", short_sleep)
"""Wait for some seconds without sleeping: a processor that sleeps for a few microseconds takes
longer than that to wake up, and is slow at first.
"""
start_kernel: Callable[..., tuple[int, int]] | None = native_or("start_kernel", None)
"""Upload a table (target, source, bytes), launch a kernel with the table and two numbers, and
record an event, in the order of a stream. Returns which of the three calls was the last, and its
status. None if it is not compiled here: then triton launches its kernels.
"""
