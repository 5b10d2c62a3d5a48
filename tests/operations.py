"""How much work a call is, counted and not timed: the number of Python instructions it executes."""

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["count_instructions"]


def count_instructions(call: Callable[[], object]) -> int:
    """Of this thread, in all Python functions that the call enters. What C code does by itself is
    not counted.
    """
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before, is_collecting = sys.gettrace(), gc.isenabled()
    # What the collector finds in this moment runs on this thread too, and is nobody's work.
    gc.disable()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        if is_collecting:
            gc.enable()
    return count
