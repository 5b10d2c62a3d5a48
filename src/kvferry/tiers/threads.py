"""Daemon threads that run functions, for calls that may block in the operating system."""

import queue
import threading
import time
from collections.abc import Callable


class TaskThreads:
    """Threads that run functions in the order in which they are given.

    Not `ThreadPoolExecutor`: the interpreter waits for its threads at exit, also for one that hangs
    in a dead file system. The functions must not raise.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{index}", daemon=True)
            for index in range(num_threads)
        ]
        self._is_closing = False
        for thread in self._threads:
            thread.start()

    def run(self, function: Callable[[], None]) -> None:
        self._queue.put(function)

    def close(self, timeout_s: float) -> bool:
        """Drop the functions that have not begun, and wait for the others. False if a thread is
        still busy after `timeout_s`. Idempotent.
        """
        self._is_closing = True
        for _ in self._threads:
            self._queue.put(None)
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (function := self._queue.get()) is not None:
            if not self._is_closing:
                function()
