"""vLLM's engine core around an engine of these tests, so that the engine sleeps as vLLM's does: the
pauses, the waits, the order of calls and the tags are vLLM's; only the memory is not freed, but
overwritten, when it goes and when it comes back.
"""

import pickle
import queue
from typing import Any

from tests.vllm.inside.conftest import StartEngine
from tests.vllm.inside.engines import Engine, run_until
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.executor.abstract import Executor
from vllm.v1.request import Request

GONE, NEW = -1.0, -2.0
"""What the cache holds while the engine sleeps, and after it."""


class Workers(Executor):  # type: ignore[misc]
    """The executor of one rank, with the calls of vLLM's GPU worker."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.sleeping_tags: set[str] = set()

    def _init_executor(self) -> None:
        return None

    def check_health(self) -> None:
        return None

    def collective_rpc(
        self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None, **_: Any
    ) -> list[Any]:
        worker, tags = self._engine.worker, (kwargs or {}).get("tags")
        match method:
            case "sleep" | "discard":
                worker.unregister_kv_caches()
                self.fill(GONE)
            case "wake_up" if tags is None or "kv_cache" in tags:
                self.fill(NEW)
                worker.restore_kv_caches()
            case "get_kv_connector_handshake_metadata":
                handshake = pickle.loads(pickle.dumps(worker.get_handshake_metadata()))
                return [{(0, 0): handshake} if handshake is not None else None]
        return [None]

    def fill(self, value: float) -> None:
        for tensor in self._engine.tensors.values():
            tensor.fill_(value)


class Core(EngineCoreProc):  # type: ignore[misc]
    """An engine that can sleep."""

    def __init__(self, start_engine: StartEngine, name: str, **settings: Any) -> None:
        # The connector finds this object by the frame of this call.
        self.engine = engine = start_engine(name, may_sleep=True, **settings)
        self.scheduler = engine.scheduler
        self.model_executor = Workers(engine)
        self.batch_queue = engine._queue  # noqa: SLF001
        self.engines_running = self.reject_new_requests = False
        self.mm_receiver_cache = None
        self.output_queue: queue.Queue[Any] = queue.Queue()
        self._idle_state_callbacks: list[Any] = []

    def fall_asleep(self, *others: Engine, level: int = 1, mode: str = "abort") -> None:
        """Sleep as `POST /sleep` does. The engine's loop runs until it has no work, and goes on
        with work that needs no memory while the engine sleeps.
        """
        pause = self.sleep(level, mode)
        run_until(lambda: not self.has_work(), self.engine, *others)
        self._notify_idle_state_callbacks()
        if pause is not None:
            pause.result(timeout=0)
        self.tick(*others)

    def _send_abort_outputs(self, aborted_reqs: list[Request]) -> None:
        for request in aborted_reqs:
            self.engine.answers[request.request_id].finish = "abort"

    def tick(self, *others: Engine) -> None:
        for _ in range(20):
            for engine in (self.engine, *others):
                engine.step()
