"""vLLM's engine core around a connector: whether it is paused, which remote calls may change its
weights, and waits of its loop while the engine only holds blocks for peers. vLLM passes a connector
no reference to the core, so it is found by the frames of its constructor. Runs on the engine's main
thread.

vLLM steps every millisecond as long as a finished request still has its blocks: only a step can
report that a peer has fetched them. A lease lasts seconds and a retained turn minutes, so an engine
without traffic would keep a core busy all that time. vLLM offers a connector no other way to report
a lease's end, so the connector waits inside such a step. The wait ends as soon as vLLM's input
queue has an item, so no request, abort or shutdown is delayed
(docs/decisions/050-idle-engines-that-hold-blocks.md).
"""

import inspect
import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

READ_ONLY_CALLS = frozenset(
    {"compute_weight_checksums", "get_model_inspection", "list_loras", "synchronize_device"}
)
"""Remote calls to vLLM's workers that change no weights. Any other call, such as a method of a
trainer's own worker extension, may change them.
"""
LOOP_PARTS = ("input_queue", "engines_running", "process_input_queue_block", "is_running")
"""The parts of vLLM's `EngineCoreProc` that decide whether its loop may wait for input."""
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


def find_engine_core() -> Any:
    """The engine core that is being constructed around the calling connector; None if there is
    none.
    """
    from vllm.v1.engine.core import EngineCore

    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, EngineCore):
            return owner
        frame = frame.f_back
    return None


def watch_weights(core: Any, before_change: Callable[[str], None]) -> None:
    """Call `before_change` with the name of every remote call to the engine's workers that may
    change their weights. vLLM does not report such calls, so this wraps the engine's method.
    """
    call = core.collective_rpc

    # `wraps` keeps the signature, by which vLLM decodes the arguments of remote calls.
    @wraps(call)
    def collective_rpc(method: Any, *args: Any, **kwargs: Any) -> Any:
        if method not in READ_ONLY_CALLS:
            before_change(str(getattr(method, "__name__", method)))
        return call(method, *args, **kwargs)

    core.collective_rpc = collective_rpc


def loop_of(core: Any) -> Any:
    """An engine core whose loop waits for input. None if the core has no loop, for example in
    vLLM's offline engine in this process; or if this vLLM's loop has changed.
    """
    from vllm.v1.engine.core import EngineCoreProc

    if not isinstance(core, EngineCoreProc):
        return None
    if all(hasattr(core, name) for name in LOOP_PARTS):
        return core
    _log.warning(
        "the engine loop of this vLLM is unknown to kvferry: the engine keeps a core busy while it "
        "holds blocks for peers"
    )
    return None


class IdleWait:
    """Waits in steps of an engine that has no unfinished request, the longer the more such steps
    follow each other.
    """

    def __init__(self, loop: Any, max_wait_s: float, first_wait_s: float = FIRST_WAIT_S) -> None:
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


def idle_wait(core: Any, executor_backend: object) -> IdleWait:
    """The waits of this engine core with this `distributed_executor_backend` of vLLM."""
    return IdleWait(
        loop_of(core), MAX_WAIT_S if executor_backend == "uni" else MAX_WAIT_FOR_RANKS_S
    )


def _may_wait(loop: Any) -> bool:
    # The conditions under which vLLM itself blocks on its input queue, except that finished
    # requests may still have blocks.
    return bool(
        loop.is_running()
        and loop.process_input_queue_block
        # A data-parallel engine must step while another rank has requests.
        and not loop.engines_running
        and not loop.scheduler.has_unfinished_requests()
    )
