"""Measures the work of a call without a clock: counts the Python instructions that it executes."""

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_instructions(call: Callable[[], object]) -> int:
    """Count the instructions that this thread executes in all Python functions that the call
    enters. Work inside C code is not counted.
    """
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before, is_collecting = sys.gettrace(), gc.isenabled()
    # The garbage collector also runs on this thread, and its finalizers would be counted.
    gc.disable()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        if is_collecting:
            gc.enable()
    return count
