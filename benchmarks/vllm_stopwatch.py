"""Wraps any vLLM connector and times every method the engine calls. Used by `python -m benchmarks
vllm-steps`.

    "kv_connector_module_path": "benchmarks.vllm_stopwatch"   keep the name: vLLM reads it
    KVFERRY_STOPWATCH_WRAPS=package.module:ClassName          the class to time
    KVFERRY_STOPWATCH_DIRECTORY=/some/where                   one JSON file per role and process

The timed class is a subclass, so class methods, interfaces and statistics are the connector's own.
Only calls on the thread that built the connector (the engine's thread) are counted, and of nested
calls only the outermost. A thread writes the totals every half second.
"""

import functools
import importlib
import inspect
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

WRAPS_VARIABLE = "KVFERRY_STOPWATCH_WRAPS"
DIRECTORY_VARIABLE = "KVFERRY_STOPWATCH_DIRECTORY"
WRITE_INTERVAL_S = 0.5
CLOSE_TIMEOUT_S = 5.0


@dataclass(slots=True)
class MethodTotals:
    """The totals of one method. `cpu_s` excludes the time in which the thread waited for a lock or
    for a core.
    """

    calls: int = 0
    total_s: float = 0.0
    cpu_s: float = 0.0
    max_s: float = 0.0

    def add(self, wall_s: float, cpu_s: float) -> None:
        self.calls += 1
        self.total_s += wall_s
        self.cpu_s += cpu_s
        self.max_s = max(self.max_s, wall_s)


@dataclass(slots=True)
class Stopwatch:
    """The totals of one connector. Only the thread that built the connector writes; the writer
    thread reads.
    """

    path: Path
    methods: dict[str, MethodTotals] = field(default_factory=dict)
    _owner: int = field(default_factory=threading.get_ident)
    _is_running: bool = False
    _is_closing: threading.Event = field(default_factory=threading.Event)
    _writer: threading.Thread | None = None

    def start(self) -> None:
        self._writer = threading.Thread(target=self._run, name="kvferry-stopwatch", daemon=True)
        self._writer.start()

    def close(self) -> None:
        """Write the last totals and stop the writer thread. Idempotent."""
        self._is_closing.set()
        if self._writer is not None:
            self._writer.join(CLOSE_TIMEOUT_S)
            self._writer = None

    def time(self, name: str, call: Callable[[], Any]) -> Any:
        if self._is_running or threading.get_ident() != self._owner:
            return call()
        self._is_running = True
        cpu, since = time.thread_time(), time.perf_counter()
        try:
            return call()
        finally:
            wall_s, cpu_s = time.perf_counter() - since, time.thread_time() - cpu
            self._is_running = False
            totals = self.methods.get(name)
            if totals is None:
                totals = self.methods[name] = MethodTotals()
            totals.add(wall_s, cpu_s)

    def _run(self) -> None:
        while not self._is_closing.wait(WRITE_INTERVAL_S):
            self._write()
        self._write()

    def _write(self) -> None:
        """Write the totals atomically, so that a reader never sees half a file."""
        # `list` first: the engine's thread may add a method meanwhile.
        totals = {name: asdict(method) for name, method in list(self.methods.items())}
        draft = self.path.with_suffix(".new")
        draft.write_text(json.dumps(totals))
        draft.replace(self.path)


def timed_class(base: Any) -> Any:
    """A subclass of `base` whose public methods are timed. It takes the same arguments as `base`,
    with `role` second.
    """

    def __init__(self: Any, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        base.__init__(self, vllm_config, role, kv_cache_config)
        directory = Path(os.environ[DIRECTORY_VARIABLE])
        self.stopwatch = Stopwatch(directory / f"{role.name.lower()}-{os.getpid()}.json")
        self.stopwatch.start()

    def shutdown(self: Any) -> Any:
        self.stopwatch.close()
        return base.shutdown(self)

    names = [
        name
        for name in dir(base)
        if not name.startswith("_") and inspect.isfunction(inspect.getattr_static(base, name))
    ]
    body: dict[str, Any] = {name: _timed(name, getattr(base, name)) for name in names}
    body |= {
        "__init__": __init__,
        "shutdown": shutdown,
        "__doc__": f"{base.__name__} with a stopwatch.",
        "__module__": __name__,
    }
    return type(base)(base.__name__, (base,), body)


def _timed(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def timed(self: Any, *arguments: Any, **named: Any) -> Any:
        # While the constructor of `base` runs there is no stopwatch yet.
        stopwatch: Stopwatch | None = self.__dict__.get("stopwatch")
        if stopwatch is None:
            return method(self, *arguments, **named)
        return stopwatch.time(name, lambda: method(self, *arguments, **named))

    return timed


@functools.cache
def _wrapped() -> Any:
    module, _, name = os.environ[WRAPS_VARIABLE].partition(":")
    return timed_class(getattr(importlib.import_module(module), name))


def __getattr__(name: str) -> Any:
    """Return the timed class when vLLM looks up the connector by its name in this module."""
    if not name.startswith("_") and name == os.environ.get(WRAPS_VARIABLE, "").partition(":")[2]:
        return _wrapped()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
