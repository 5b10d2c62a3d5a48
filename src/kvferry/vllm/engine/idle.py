"""Lets vLLM's engine loop wait while the engine only holds blocks for peers. Runs on the engine's
main thread.

vLLM steps every millisecond as long as a finished request still has its blocks: only a step can
report that a peer has fetched them. A lease lasts seconds and a retained turn minutes, so an engine
without traffic would keep a core busy all that time. vLLM offers a connector no other way to report
a lease's end, so the connector waits inside such a step. The wait ends as soon as vLLM's input
queue has an item, so no request, abort or shutdown is delayed
(docs/decisions/050-idle-engines-that-hold-blocks.md).
"""

import logging
import queue
from collections.abc import Callable
from typing import Any, Protocol, cast

from kvferry.vllm.engine.engine_core import find_caller

FIRST_WAIT_S = 0.002
GROWTH = 4
"""Each wait is this many times as long as the one before."""
MAX_WAIT_S = 0.2
"""The longest wait, and so how late an idle engine notices the end of a lease."""
MAX_WAIT_FOR_RANKS_S = 15.0
"""The longest wait if the ranks are processes of their own: after each step, vLLM's ranks poll
their queue in a busy loop for a second.
"""

_log = logging.getLogger(__name__)


class EngineLoop(Protocol):
    """The parts of vLLM's `EngineCoreProc` that decide whether its loop may wait for input."""

    input_queue: queue.Queue[Any]
    engines_running: bool
    """True while a data-parallel engine must step because another rank has requests."""
    process_input_queue_block: bool
    scheduler: Any

    def is_running(self) -> bool:
        """False when shutdown has been requested."""


def find_engine_loop() -> EngineLoop | None:
    """Find the engine that is being constructed around the calling connector. None if the engine
    has no loop, for example vLLM's offline engine in this process; or if this vLLM's loop has
    changed.
    """
    from vllm.v1.engine.core import EngineCoreProc

    names = ("input_queue", "engines_running", "process_input_queue_block", "is_running")
    owner = find_caller(EngineCoreProc)
    if owner is None or all(hasattr(owner, name) for name in names):
        return cast(EngineLoop | None, owner)
    _log.warning(
        "the engine loop of this vLLM is unknown to kvferry: the engine keeps a core busy while it "
        "holds blocks for peers"
    )
    return None


def longest_wait_s(executor_backend: object) -> float:
    """How long a step may wait under this `distributed_executor_backend` of vLLM."""
    return MAX_WAIT_S if executor_backend == "uni" else MAX_WAIT_FOR_RANKS_S


class IdleWait:
    """Waits in steps of an engine that has no unfinished request, the longer the more such steps
    follow each other.
    """

    def __init__(
        self, loop: EngineLoop | None, max_wait_s: float, first_wait_s: float = FIRST_WAIT_S
    ) -> None:
        self._loop = loop
        self._max_wait_s = max_wait_s
        self._first_wait_s = self._wait_s = first_wait_s

    def wait(self, has_work: Callable[[], bool]) -> None:
        """Wait until vLLM has input or `has_work` is true; return at once if the engine has an
        unfinished request. `has_work` may become true on another thread, which then calls `wake`.
        """
        loop = self._loop
        if loop is None or not _may_wait(loop):
            self._wait_s = self._first_wait_s
            return
        inputs = loop.input_queue
        with inputs.not_empty:
            is_woken = inputs.not_empty.wait_for(
                lambda: bool(inputs.queue) or has_work(), self._wait_s
            )
        self._wait_s = (
            self._first_wait_s if is_woken else min(GROWTH * self._wait_s, self._max_wait_s)
        )

    def wake(self) -> None:
        """End a wait whose `has_work` has become true. Called by any thread."""
        if self._loop is not None:
            with self._loop.input_queue.not_empty:
                self._loop.input_queue.not_empty.notify_all()


def _may_wait(loop: EngineLoop) -> bool:
    # The conditions under which vLLM itself blocks on its input queue, except that finished
    # requests may still have blocks.
    return (
        loop.is_running()
        and loop.process_input_queue_block
        and not loop.engines_running
        and not loop.scheduler.has_unfinished_requests()
    )
