"""Tests the driver calls of a transfer, with functions of this process in place of the driver's."""

import ctypes
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvferry.sleep import short_sleep
from kvferry.transports.copy.native import (
    Kernel,
    poll_until,
    poll_with_short_sleeps,
    spin_wait,
    start_kernel,
)

WAITING = 600
NUMBER, POINTER, COUNT = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint
UPLOAD = ctypes.CFUNCTYPE(ctypes.c_int, NUMBER, POINTER, ctypes.c_size_t, POINTER)
LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, POINTER, *[COUNT] * 7, POINTER, ctypes.POINTER(POINTER), POINTER
)
RECORD = ctypes.CFUNCTYPE(ctypes.c_int, POINTER, POINTER)
Asking = Callable[[int, int, int, float], int]


def address_of(function: Any) -> int:
    address = ctypes.cast(function, POINTER).value
    assert address is not None
    return address


@pytest.fixture(params=["as installed", "by breaths"])
def ask(request: pytest.FixtureRequest) -> Asking:
    return poll_until if request.param == "as installed" else poll_with_short_sleeps


def test_it_asks_until_the_answer_changes(ask: Asking) -> None:
    asked = list[int]()

    def answer(argument: int) -> int:
        asked.append(argument)
        return 7 if len(asked) == 5 else WAITING

    function = ctypes.CFUNCTYPE(ctypes.c_int, POINTER)(answer)
    assert ask(address_of(function), 1 << 40, WAITING, 60.0) == 7
    assert asked == [1 << 40] * 5


def test_it_asks_once_at_least_and_not_for_ever(ask: Asking) -> None:
    getpid = address_of(ctypes.CDLL(None).getpid)
    assert ask(getpid, 0, os.getpid(), 0.0) == os.getpid()
    assert ask(getpid, 0, os.getpid(), 0.05) == os.getpid()


def waits() -> dict[str, Callable[[], object]]:
    getpid = address_of(ctypes.CDLL(None).getpid)
    return {
        "asking": lambda: poll_until(getpid, 0, os.getpid(), 0.05),
        "asking by breaths": lambda: poll_with_short_sleeps(getpid, 0, os.getpid(), 0.05),
        "spinning": lambda: spin_wait(0.05),
        "sleeping": lambda: short_sleep(0.05),
    }


@pytest.mark.parametrize("way", waits())
def test_it_waits_no_less_than_it_is_told(way: str) -> None:
    began = time.monotonic()
    waits()[way]()
    assert time.monotonic() - began >= 0.05


@pytest.mark.usefixtures("no_thread_switches")
@pytest.mark.parametrize("way", waits())
def test_other_threads_go_on_meanwhile(way: str) -> None:
    has_begun, is_over, counted = threading.Event(), threading.Event(), 0

    def count() -> None:
        nonlocal counted
        has_begun.set()
        while not is_over.is_set():
            counted += 1
            time.sleep(0)

    other = threading.Thread(target=count)
    other.start()
    try:
        has_begun.wait(60.0)
        before, wait, deadline = counted, waits()[way], time.monotonic() + 30.0
        while counted == before and time.monotonic() < deadline:
            wait()
        assert counted > before
    finally:
        is_over.set()
        other.join()


class Driver:
    """Records the calls that it receives."""

    def __init__(self, failing: str = "") -> None:
        self.told = list[tuple[Any, ...]]()
        self._failing = failing
        self._functions = UPLOAD(self._upload), LAUNCH(self._launch), RECORD(self._record)
        self.calls = tuple(map(address_of, self._functions))

    def _upload(self, target: int, source: int, size: int, stream: int) -> int:
        return self._note("upload", target, source, size, stream)

    def _launch(self, function: int, *rest: Any) -> int:
        *shape, stream, parameters, extra = rest
        assert extra is None
        kinds = (NUMBER, ctypes.c_int, ctypes.c_int, NUMBER, NUMBER)
        values = [
            ctypes.cast(parameters[n], ctypes.POINTER(kind)).contents.value
            for n, kind in enumerate(kinds)
        ]
        return self._note("launch", function, shape, stream, values)

    def _record(self, event: int, stream: int) -> int:
        return self._note("record", event, stream)

    def _note(self, *what: Any) -> int:
        self.told.append(what)
        return 700 if what[0] == self._failing else 0


TOLD = [
    ("upload", 1 << 41, 1 << 42, 800, 55),
    ("launch", 1 << 43, [9, 8, 1, 256, 1, 1, 16], 55, [1 << 41, 77, -3, 0, 0]),
    ("record", 66, 55),
]


def start_with(driver: Driver, size: int = 800) -> tuple[int, int]:
    if start_kernel is None:
        pytest.skip("kvferry was installed without a compiler: triton starts its kernels")
    table, kernel = (1 << 41, 1 << 42, size), Kernel(1 << 43, 256, 16, 5)
    return start_kernel(driver.calls, table, kernel, (9, 8), (77, -3), 55, 66)


def test_a_kernel_is_started_in_three_calls() -> None:
    driver = Driver()
    assert start_with(driver) == (2, 0)
    assert driver.told == TOLD


def test_nothing_is_uploaded_where_there_is_nothing() -> None:
    driver = Driver()
    assert start_with(driver, size=0) == (2, 0)
    assert driver.told == TOLD[1:]


@pytest.mark.parametrize(("failing", "call"), [("upload", 0), ("launch", 1), ("record", 2)])
def test_after_a_call_that_fails_there_is_no_other(failing: str, call: int) -> None:
    driver = Driver(failing)
    assert start_with(driver) == (call, 700)
    assert driver.told == TOLD[: call + 1]
