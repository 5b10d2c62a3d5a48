"""Tests that a busy thread that calls `short_sleep` lets other threads take the GIL."""

import threading

import pytest

from kvferry.sleep import short_sleep

TURNS = 200


@pytest.mark.usefixtures("no_thread_switches")
def test_a_thread_that_waits_for_the_interpreter_gets_it_when_another_breathes() -> None:
    counted, is_over, has_begun = 0, threading.Event(), threading.Event()

    def count() -> None:
        nonlocal counted
        has_begun.set()
        while not is_over.is_set():
            counted += 1
            short_sleep()

    other = threading.Thread(target=count)
    other.start()
    has_begun.wait(60.0)
    try:
        for _ in range(TURNS):
            before = counted
            for _ in range(1000):
                short_sleep()
                if counted > before:
                    break
            assert counted > before
    finally:
        is_over.set()
        other.join()
