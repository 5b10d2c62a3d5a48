"""Makes an engine hang while its processes live: the main threads of its core and its ranks stop,
as in a device call that never returns, and all other threads go on.

Linux stops a single thread only for a debugger, so this module is one (ptrace). The engine goes on
when the debugger's thread lets it go or ends.
"""

import ctypes
import os
import platform
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.e2e.harness import Engine

CONTINUE, DETACH, SEIZE, INTERRUPT = 7, 17, 0x4206, 0x4207
WAIT_FOR_ANY_THREAD = 0x40000000
WAITING = {
    "x86_64": {0, 7, 23, 232, 270, 271, 281},
    "aarch64": {22, 63, 72, 73},
}
"""The numbers of the system calls read, poll, select, epoll_wait and their variants."""
TRY_S = 10.0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


@contextmanager
def hung(engine: Engine) -> Iterator[None]:
    """Let the engine hang for the length of the block. Its API process, the first of the family,
    still answers.
    """
    with ExitStack() as stack:
        for process in engine.family()[1:]:
            stack.enter_context(_stopped_main_thread(process.pid))
        yield


@contextmanager
def _stopped_main_thread(pid: int) -> Iterator[None]:
    _ptrace(SEIZE, pid)
    deadline = time.monotonic() + TRY_S
    try:
        # A thread that is stopped while it holds the interpreter's lock would stop all others. A
        # thread in one of these calls does not hold the lock.
        while not _stop_while_waiting(pid):
            assert time.monotonic() < deadline, f"process {pid} never waits"
            _ptrace(CONTINUE, pid)
            time.sleep(0.001)
        yield
    finally:
        try:
            _ptrace(DETACH, pid)
        except ProcessLookupError:
            os.waitpid(pid, WAIT_FOR_ANY_THREAD)


def _stop_while_waiting(pid: int) -> bool:
    """Stop the thread; return whether it is stopped in one of the calls in `WAITING`."""
    before = _where(pid)
    _ptrace(INTERRUPT, pid)
    os.waitpid(pid, WAIT_FOR_ANY_THREAD)
    after = _where(pid)
    # On aarch64 the number of an interrupted call is lost: the thread is still in the call it was
    # in before if its stack is the same and it is about to repeat the call, or to return from it.
    return after.call in WAITING[platform.machine()] or (
        before.call in WAITING[platform.machine()]
        and after.stack == before.stack
        and after.instruction in (before.instruction, before.instruction - 4)
    )


class _Where(NamedTuple):
    """What a thread does: the number of its system call (-1: none), stack and instruction."""

    call: int
    stack: int
    instruction: int


def _where(pid: int) -> _Where:
    words = Path(f"/proc/{pid}/task/{pid}/syscall").read_text().split()
    if words[0] == "running":
        return _Where(-1, 0, 0)
    return _Where(int(words[0]), int(words[-2], 16), int(words[-1], 16))


def _ptrace(request: int, pid: int) -> None:
    if _libc.ptrace(request, pid, None, None) < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
