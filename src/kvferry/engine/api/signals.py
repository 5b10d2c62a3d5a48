"""SIGINT and SIGTERM as events of the running loop, from before the engine core is started until the last request has been answered."""

import asyncio
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = ["StopSignals", "StoppedBySignal", "stop_signals"]

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class StoppedBySignal:
    """A signal came before the work was done."""

    number: int

    @property
    def exit_code(self) -> int:
        """As shells report a signal."""
        return 128 + self.number


class StopSignals:
    """Counts them. SIGTERM, a supervisor's, asks to drain; SIGINT is a person at the keyboard, who waits."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self._number = signal.SIGTERM

    @property
    def asks_to_drain(self) -> bool:
        """What the first signal means."""
        return self._number == signal.SIGTERM

    def on_signal(self, number: signal.Signals) -> None:
        if self.first.is_set():
            self.second.set()
            return
        self._number = number
        self.first.set()

    async def run_unless_stopped(self, work: Coroutine[Any, Any, Result]) -> Result | StoppedBySignal:
        """The result of `work`; Stopped when a signal comes first, after `work` has been cancelled and has cleaned up."""
        task = asyncio.ensure_future(work)
        stopped = asyncio.ensure_future(self.first.wait())
        try:
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            return StoppedBySignal(self._number)
        finally:
            for waiting in (task, stopped):
                waiting.cancel()
            await asyncio.gather(task, stopped, return_exceptions=True)


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    loop = asyncio.get_running_loop()
    signals = StopSignals()
    caught = (signal.SIGINT, signal.SIGTERM)
    for number in caught:
        loop.add_signal_handler(number, signals.on_signal, number)
    try:
        yield signals
    finally:
        for number in caught:
            loop.remove_signal_handler(number)
