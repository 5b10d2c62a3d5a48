"""What an engine says counts from when its device has passed the mark it was said with: not before, and in order."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from tests.ferry.world import Side

from kvferry.events import PullFailed
from kvferry.ferry.commands import Reject
from kvferry.ferry.thread import FerryThread
from kvferry.planes.memory import MemoryNetwork
from kvferry.testing.clock import ManualClock
from kvferry.types import RequestId

DEADLINE_S = 30.0


@dataclass
class Gate:
    """A mark that is passed when the test says so."""

    is_open: bool = False
    num_looks: int = 0

    def has_passed(self) -> bool:
        self.num_looks += 1
        return self.is_open


@pytest.fixture
def thread() -> Iterator[FerryThread]:
    side = Side("d", "1", MemoryNetwork(), ManualClock())
    made = FerryThread(side.ferry, side.control.wake)
    made.start()
    yield made
    made.close()


def reject(name: str) -> Reject:
    return Reject(RequestId(name), "no")


def obeyed(thread: FerryThread, count: int) -> list[str]:
    """The requests rejected next."""
    names: list[str] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(names) < count:
        assert time.monotonic() < deadline
        names += [event.request for event in thread.take_events() if isinstance(event, PullFailed)]
    return names


def looked_at_again(gate: Gate) -> None:
    before, deadline = gate.num_looks, time.monotonic() + DEADLINE_S
    while gate.num_looks < before + 3:
        assert time.monotonic() < deadline, "the ferry has stopped asking"


def test_commands_wait_for_their_mark(thread: FerryThread) -> None:
    gate = Gate()
    thread.submit([reject("a")], gate)
    looked_at_again(gate)
    assert thread.take_events() == []
    gate.is_open = True
    assert obeyed(thread, 1) == ["a"]


def test_no_command_overtakes_one_that_waits(thread: FerryThread) -> None:
    gate = Gate()
    thread.submit([reject("a")], gate)
    thread.submit([reject("b")])
    looked_at_again(gate)
    assert thread.take_events() == []
    gate.is_open = True
    assert obeyed(thread, 2) == ["a", "b"]


def test_commands_without_a_mark_are_obeyed_at_once(thread: FerryThread) -> None:
    thread.submit([reject("a")])
    thread.submit([])
    assert obeyed(thread, 1) == ["a"]


def test_a_ferry_closes_while_commands_wait(thread: FerryThread) -> None:
    thread.submit([reject("a")], Gate())
    thread.close()
