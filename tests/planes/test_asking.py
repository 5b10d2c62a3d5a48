"""A device is asked until it answers something else, and nobody in this interpreter waits meanwhile."""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvferry.planes.asking import ask_by_breaths, ask_until

WAITING = 600
Asking = Callable[[int, int, int, float], int]


@pytest.fixture(params=["as installed", "by breaths"])
def ask(request: pytest.FixtureRequest) -> Asking:
    return ask_until if request.param == "as installed" else ask_by_breaths


@pytest.fixture
def nobody_is_interrupted() -> Iterator[None]:
    """Whoever has the interpreter keeps it until he lets go of it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(30.0)
    yield
    sys.setswitchinterval(before)


def address_of(function: object) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
    assert address is not None
    return address


def test_it_asks_until_the_answer_changes(ask: Asking) -> None:
    asked = list[int]()

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
    def answer(argument: int) -> int:
        asked.append(argument)
        return 7 if len(asked) == 5 else WAITING

    assert ask(address_of(answer), 1 << 40, WAITING, 60.0) == 7
    assert asked == [1 << 40] * 5


def test_it_asks_once_at_least_and_not_for_ever(ask: Asking) -> None:
    libc = ctypes.CDLL(None)
    assert ask(address_of(libc.getpid), 0, os.getpid(), 0.0) == os.getpid()
    began = time.monotonic()
    assert ask(address_of(libc.getpid), 0, os.getpid(), 0.05) == os.getpid()
    assert time.monotonic() - began >= 0.05


@pytest.mark.usefixtures("nobody_is_interrupted")
def test_other_threads_go_on_meanwhile(ask: Asking) -> None:
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
        has_begun.wait(10.0)
        before = counted
        getpid = address_of(ctypes.CDLL(None).getpid)
        deadline = time.monotonic() + 30.0
        while counted == before and time.monotonic() < deadline:
            ask(getpid, 0, os.getpid(), 0.05)
        assert counted > before
    finally:
        is_over.set()
        other.join()
