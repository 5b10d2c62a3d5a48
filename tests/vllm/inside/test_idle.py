"""Tests when a step of an engine that only holds blocks for peers waits, and what ends the wait.
The waits here last an hour, so a wait that nothing ends fails the test's deadline.
"""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCoreProc

from kvferry.vllm.engine.engine_core import LOOP_PARTS, IdleWait, find_engine_core, loop_of

HOUR_S = 3600.0
DEADLINE_S = 60.0


@dataclass
class Queues:
    """Stands for vLLM's scheduler."""

    num_unfinished: int = 0

    def has_unfinished_requests(self) -> bool:
        return self.num_unfinished > 0


@dataclass
class Loop:
    """The parts of vLLM's engine loop that the wait looks at."""

    input_queue: queue.Queue[Any] = field(default_factory=queue.Queue)
    engines_running: bool = False
    process_input_queue_block: bool = True
    scheduler: Queues = field(default_factory=Queues)
    runs: bool = True

    def is_running(self) -> bool:
        return self.runs


def wait_in_thread(loop: Loop, has_work: Callable[[], bool]) -> tuple[IdleWait, threading.Thread]:
    """Return once the thread's step waits, or has ended."""
    idle = IdleWait(loop, HOUR_S, HOUR_S)
    asked = threading.Event()

    def asks() -> bool:
        asked.set()
        return has_work()

    thread = threading.Thread(target=idle.wait, args=(asks,), daemon=True)
    thread.start()
    assert asked.wait(DEADLINE_S)
    return idle, thread


def ended(thread: threading.Thread) -> bool:
    thread.join(DEADLINE_S)
    return not thread.is_alive()


def test_input_of_any_kind_ends_a_wait() -> None:
    loop = Loop()
    _, thread = wait_in_thread(loop, lambda: False)
    assert thread.is_alive()
    loop.input_queue.put("a request, an abort or the signal to shut down")
    assert ended(thread)
    assert loop.input_queue.qsize() == 1


def test_work_that_another_thread_brings_ends_a_wait() -> None:
    released: list[str] = []
    idle, thread = wait_in_thread(Loop(), lambda: bool(released))
    assert thread.is_alive()
    released.append("a ticket")
    idle.wake()
    assert ended(thread)


def test_work_that_is_there_already_is_not_waited_for() -> None:
    _, thread = wait_in_thread(Loop(), lambda: True)
    assert ended(thread)


@pytest.mark.parametrize(
    "loop",
    [
        Loop(scheduler=Queues(1)),
        Loop(runs=False),
        Loop(engines_running=True),
        Loop(process_input_queue_block=False),
    ],
    ids=["unfinished request", "shutting down", "other data-parallel ranks run", "scaling"],
)
def test_an_engine_that_has_to_step_never_waits(loop: Loop) -> None:
    IdleWait(loop, HOUR_S, HOUR_S).wait(lambda: False)


def test_the_engine_that_builds_a_connector_is_found() -> None:
    class Core(EngineCoreProc):  # type: ignore[misc]
        def __init__(self) -> None:
            self.input_queue: queue.Queue[Any] = queue.Queue()
            self.engines_running = False
            self.process_input_queue_block = True
            self.found = next(loop_of(find_engine_core()) for _ in range(1))

    core = Core()
    assert core.found is core
    assert find_engine_core() is None


def test_vllms_engine_loop_has_the_parts_that_the_wait_looks_at() -> None:
    """Its constructor sets the attributes before it builds the connector."""
    names = EngineCoreProc.__init__.__wrapped__.__code__.co_names
    attributes = set(LOOP_PARTS) - {"is_running"}
    assert max(map(names.index, attributes)) < names.index("super")
    assert hasattr(EngineCoreProc, "is_running")
