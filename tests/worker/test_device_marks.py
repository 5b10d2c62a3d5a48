"""Tests that a command from the engine takes effect only after the device has reached the mark that
was sent with it, and that the order of the commands is kept.
"""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from tests.worker.world import Side

from kvferry.errors import KVFerryError
from kvferry.events import TransferFailed
from kvferry.testing.local import ManualClock
from kvferry.transports.memory import MemoryNetwork
from kvferry.types import RequestId
from kvferry.worker.commands import RejectLoad
from kvferry.worker.worker import TransferWorkerThread

DEADLINE_S = 60.0


@dataclass
class Gate:
    """A mark that is complete when the test opens it."""

    is_open: bool = False
    num_looks: int = 0

    def is_complete(self) -> bool:
        self.num_looks += 1
        return self.is_open


@pytest.fixture
def thread() -> Iterator[TransferWorkerThread]:
    side = Side("d", "1", MemoryNetwork(), ManualClock())
    made = TransferWorkerThread(side.transfer_worker)
    made.start()
    yield made
    made.close()


def reject(name: str) -> RejectLoad:
    return RejectLoad(RequestId(name), "no")


def obeyed(thread: TransferWorkerThread, count: int) -> list[str]:
    """Wait for `count` rejections and return the rejected requests."""
    names: list[str] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(names) < count:
        assert time.monotonic() < deadline
        names += [
            event.request for event in thread.take_events() if isinstance(event, TransferFailed)
        ]
    return names


def looked_at_again(gate: Gate) -> None:
    before, deadline = gate.num_looks, time.monotonic() + DEADLINE_S
    while gate.num_looks < before + 3:
        assert time.monotonic() < deadline, "the transfer worker has stopped asking"


def test_commands_wait_for_their_mark(thread: TransferWorkerThread) -> None:
    gate = Gate()
    thread.submit([reject("a")], gate)
    looked_at_again(gate)
    assert thread.take_events() == []
    gate.is_open = True
    assert obeyed(thread, 1) == ["a"]


def test_no_command_overtakes_one_that_waits(thread: TransferWorkerThread) -> None:
    gate = Gate()
    thread.submit([reject("a")], gate)
    thread.submit([reject("b")])
    looked_at_again(gate)
    assert thread.take_events() == []
    gate.is_open = True
    assert obeyed(thread, 2) == ["a", "b"]


def test_commands_without_a_mark_are_obeyed_at_once(thread: TransferWorkerThread) -> None:
    thread.submit([reject("a")])
    thread.submit([])
    assert obeyed(thread, 1) == ["a"]


def test_a_transfer_worker_closes_while_commands_wait(thread: TransferWorkerThread) -> None:
    thread.submit([reject("a")], Gate())
    thread.close()


def test_a_close_that_takes_too_long_is_an_error_until_the_thread_has_ended(
    thread: TransferWorkerThread,
) -> None:
    """Otherwise a second attempt to sleep would free memory that the thread may use."""
    entered, goes_on = threading.Event(), threading.Event()

    def block() -> None:
        entered.set()
        goes_on.wait(DEADLINE_S)

    thread.set_wakeup(block)
    thread.submit([reject("a")])
    assert entered.wait(DEADLINE_S)
    for _ in range(2):
        with pytest.raises(KVFerryError, match="has not stopped"):
            thread.close(timeout_s=0.01)
    with pytest.raises(KVFerryError, match="has stopped"):
        thread.submit([reject("b")])
    goes_on.set()
    thread.close()
