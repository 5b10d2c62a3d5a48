"""The children of a `MultiConnector`: what they are, and calls that isolate a child that fails.

An exception of a child never reaches the engine. The first exception of each call is logged with
its traceback, every exception is counted. A child is disabled, which means that it is called no
more, if the same call fails `MAX_FAILURES` times in a row, or once in a decisive call: a call after
whose failure nobody can say what the child has begun.

A call that blocks cannot be ended from outside: it runs on the engine's thread, and a child that is
left alone in the middle of a call could write into the cache later. Slow calls are counted and
logged, so that an operator sees which child delays the engine.

Not thread-safe: owned by the thread that calls the connector.
"""

import logging
import operator
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import msgspec

from kvferry.connectors.contract import KVConnectorTransferResults
from kvferry.connectors.multi.lookup import ChildTraits
from kvferry.connectors.multi.stats import MultiStats
from kvferry.connectors.stats import KVConnectorStats
from kvferry.errors import ConfigError
from kvferry.events import TransferTimes

MAX_FAILURES = 3
SLOW_CALL_S = 1.0
"""A call that takes longer delays every request of the engine visibly."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class ChildHealth:
    """Which children are disabled. Pure."""

    disabled: dict[int, str] = field(default_factory=dict)
    """The disabled children, with the reason."""
    _in_a_row: Counter[tuple[int, str]] = field(default_factory=Counter, init=False)

    def note_success(self, child: int, call: str) -> None:
        self._in_a_row.pop((child, call), None)

    def note_failure(self, child: int, call: str, reason: str, *, is_decisive: bool) -> bool:
        """Count a failure; True if the child is disabled from now on and was not before."""
        self._in_a_row[child, call] += 1
        if child in self.disabled:
            return False
        if is_decisive or self._in_a_row[child, call] >= MAX_FAILURES:
            self.disabled[child] = reason
            return True
        return False


class Children:
    """The connectors that a `MultiConnector` combines, in order of preference."""

    def __init__(
        self,
        connectors: Sequence[Any],
        names: Sequence[str],
        traits: Sequence[ChildTraits],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.names = tuple(names)
        self.traits = tuple(traits)
        self._connectors = tuple(connectors)
        self._health = ChildHealth()
        self._logged: set[tuple[int, str]] = set()
        self._failures: Counter[str] = Counter()
        self._slow_calls: Counter[str] = Counter()
        self._clock = clock
        self._closed: set[int] = set()
        self._on_disabled: Callable[[int, str], None] = lambda child, reason: None

    def __len__(self) -> int:
        return len(self._connectors)

    def __getitem__(self, child: int) -> Any:
        return self._connectors[child]

    @property
    def enabled(self) -> list[int]:
        return [child for child in range(len(self)) if child not in self._health.disabled]

    @property
    def disabled(self) -> dict[int, str]:
        """The disabled children, with the reason."""
        return self._health.disabled

    def watch_disabled(self, on_disabled: Callable[[int, str], None]) -> None:
        """Set the function that is called once for each child that becomes disabled."""
        self._on_disabled = on_disabled

    def call(
        self,
        child: int,
        method: str,
        *args: Any,
        default: Any = None,
        is_decisive: bool = False,
        **more: Any,
    ) -> Any:
        """Call a method of an enabled child. `default` is the result if the child is disabled,
        raises an exception or returns a value of the wrong type.
        """
        check = _CHECKS.get(method, _unchanged)
        return self._guard(
            child,
            method,
            lambda: check(getattr(self._connectors[child], method)(*args, **more)),
            default=default,
            is_decisive=is_decisive,
        )

    def aggregate(self, child: int, messages: Sequence[Any]) -> Any:
        """Join the messages of a child's ranks to one; None if there is none. If the child's class
        cannot join them, what the ranks reported is lost.
        """
        if not messages:
            return None
        return self._guard(
            child,
            "aggregate",
            lambda: reduce(lambda joined, message: joined.aggregate(message), messages),
            default=None,
            is_decisive=True,
        )

    def _guard(
        self,
        child: int,
        name: str,
        call: Callable[[], Any],
        *,
        default: Any,
        is_decisive: bool,
    ) -> Any:
        if child in self._health.disabled:
            return default
        began = self._clock()
        try:
            result = call()
        # A child may be any class, so it may raise any exception; the engine serves on without it.
        except Exception as error:
            if name == "wait_for_save" and isinstance(error, TimeoutError):
                is_decisive = is_decisive and not self.traits[child].store_timeouts_are_harmless
            self.note_failure(child, name, error, is_decisive=is_decisive)
            return default
        finally:
            self.note_duration(child, name, self._clock() - began)
        self._health.note_success(child, name)
        return result

    def note_duration(self, child: int, call: str, duration_s: float) -> None:
        """Count and log a call or a lookup that took long."""
        if duration_s < SLOW_CALL_S:
            return
        name = self.names[child]
        self._slow_calls[name] += 1
        if (child, f"slow {call}") not in self._logged:
            self._logged.add((child, f"slow {call}"))
            _log.warning(
                "child connector is slow child=%s call=%s duration_s=%.1f",
                name,
                call,
                duration_s,
            )

    def call_each(
        self, method: str, *args: Any, default: Any = None, is_decisive: bool = False
    ) -> Iterator[tuple[int, Any]]:
        """Call a method of every enabled child, and yield each child with the result."""
        for child in self.enabled:
            yield (
                child,
                self.call(child, method, *args, default=default, is_decisive=is_decisive),
            )

    def call_all(
        self, method: str, *args: Any, default: Any = None, is_decisive: bool = False
    ) -> list[Any]:
        """The results of `call_each`, after every child has been called."""
        results = self.call_each(method, *args, default=default, is_decisive=is_decisive)
        return [result for _, result in results]

    def call_all_unguarded(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every child at the start of an engine, where an exception must stop the
        start.
        """
        return [getattr(connector, method)(*args) for connector in self._connectors]

    def note_failure(
        self, child: int, call: str, error: Exception, *, is_decisive: bool = False
    ) -> None:
        """Count and log an exception, and disable the child if necessary."""
        name = self.names[child]
        self._failures[name] += 1
        if (child, call) not in self._logged:
            self._logged.add((child, call))
            _log.error("child connector failed child=%s call=%s", name, call, exc_info=error)
        reason = f"{name} failed in {call}: {type(error).__name__}: {error}"
        if self._health.note_failure(child, call, reason, is_decisive=is_decisive):
            self._disable(child, reason)

    def disable(self, child: int, reason: str) -> None:
        """Disable a child that failed in another process of the engine. Idempotent."""
        if child not in self._health.disabled:
            self._health.disabled[child] = reason
            self._disable(child, reason)

    def _disable(self, child: int, reason: str) -> None:
        _log.error(
            "child connector disabled child=%s reason=%s; this engine serves on without it",
            self.names[child],
            reason,
        )
        self.close(child)
        self._on_disabled(child, reason)

    def take_stats(self, own_counts: dict[str, dict[str, int]]) -> MultiStats | None:
        """The stats of all children, with the counters of this role."""
        stats = MultiStats()
        for child, part in self.call_each("get_kv_connector_stats"):
            if part is not None:
                stats.add(self.names[child], part)
        stats.counts |= self.take_counts() | own_counts
        return None if stats.is_empty() else stats

    def take_counts(self) -> dict[str, dict[str, int]]:
        """The exceptions and the slow calls of each child since the last call."""
        counts = {
            "child_failures": dict(self._failures),
            "child_slow_calls": dict(self._slow_calls),
        }
        self._failures, self._slow_calls = Counter(), Counter()
        return {name: rows for name, rows in counts.items() if rows}

    def close(self, child: int) -> Exception | None:
        """Shut a child down once. Returns the exception of a child that could not stop."""
        if child in self._closed:
            return None
        self._closed.add(child)
        try:
            self._connectors[child].shutdown()
        except Exception as error:
            _log.error(
                "child connector could not be shut down child=%s",
                self.names[child],
                exc_info=error,
            )
            return error
        return None

    def shutdown(self) -> None:
        """Shut all children down; raises the first exception after all have been tried."""
        errors = [self.close(child) for child in range(len(self))]
        for error in errors:
            if error is not None:
                raise error


# -- results --


def _count(answer: tuple[Any, Any]) -> tuple[int | None, bool]:
    count, is_async = answer
    return (None, False) if count is None else (operator.index(count), bool(is_async))


def _finish(answer: tuple[Any, Any]) -> tuple[bool, dict[str, Any] | None]:
    is_delayed, params = answer
    params = dict(params) if params else None
    msgspec.msgpack.encode(params)  # raises for a value that cannot leave the engine's process
    return bool(is_delayed), params


def _results(part: Any) -> KVConnectorTransferResults:
    """The results, which may be of vLLM's class."""
    times = {request: list(each) for request, each in getattr(part, "recving_times", {}).items()}
    for each in times.values():
        if not all(isinstance(entry, TransferTimes) for entry in each):
            raise TypeError(f"recving_times has an entry that is no TransferTimes: {each!r:.80}")
    return KVConnectorTransferResults(
        set(part.finished_sending),
        set(part.finished_recving),
        set(part.failed_recving),
        dict(getattr(part, "failure_reasons", {})),
        set(getattr(part, "optional_failures", ())),
        dict(getattr(part, "given_up_recving", {})),
        times,
    )


def _ids(answer: Any) -> set[int]:
    return {operator.index(number) for number in answer}


def _stats(answer: Any) -> Any:
    if answer is None or answer.is_empty():
        return None
    if isinstance(answer, KVConnectorStats):
        msgspec.msgpack.encode(answer.to_dict())  # the API process gets these numbers
    return answer


def _step_message(answer: Any) -> Any:
    if answer is None:
        raise TypeError("there is no message for the step, so the ranks would begin no load")
    return answer


def _unchanged(answer: Any) -> Any:
    return answer


_CHECKS: Mapping[str, Callable[[Any], Any]] = {
    "get_num_new_matched_tokens": _count,
    "get_loaded_kv_cache_group_ids": lambda answer: None if answer is None else _ids(answer),
    "get_external_cache_hit_sources": lambda answer: {
        source: operator.index(count) for source, count in answer.items()
    },
    "request_finished_all_groups": _finish,
    "get_transfer_results": _results,
    "get_block_ids_with_load_errors": _ids,
    "get_kv_connector_stats": _stats,
    "build_connector_meta": _step_message,
    "register_finished_partial_tail": bool,
    "has_pending_push_work": bool,
    "has_urgent_work": bool,
    "has_pending_block_frees": bool,
    # A child may make its events while they are listed.
    "take_events": lambda answer: list(answer or ()),
}
"""Turns the result of a child's method into one of the contract's type, or raises."""


def name_children(names: Sequence[str]) -> list[str]:
    """Unique names for logs and metrics: the class name, with the index if it appears twice."""
    return [
        f"{name}[{index}]" if names.count(name) > 1 else name for index, name in enumerate(names)
    ]


def check_children(
    names: Sequence[str], with_side_channel: Collection[int], layouts: Sequence[str | None]
) -> str | None:
    """Raise `ConfigError` if the children cannot work together. Returns the cache layout that they
    require, if any.
    """
    if len(with_side_channel) > 1:
        listed = " and ".join(names[child] for child in sorted(with_side_channel))
        raise ConfigError(
            f"connectors lists {listed}, but an engine has one side channel and a request one set "
            "of transfer parameters, so only one of them can transfer KV between engines; remove "
            "the others"
        )
    required = [(name, layout) for name, layout in zip(names, layouts, strict=True) if layout]
    for name, layout in required[1:]:
        first_name, first_layout = required[0]
        if layout != first_layout:
            raise ConfigError(
                f"{first_name} requires the KV cache layout {first_layout} and {name} requires "
                f"{layout}, but an engine has one cache; remove one of the connectors"
            )
    return required[0][1] if required else None
