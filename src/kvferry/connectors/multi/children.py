"""The children of a `MultiConnector`: what they are, and calls that isolate a child that fails.

An exception of a child never reaches the engine. The first exception of each call is logged with
its traceback, every exception is counted. A child is disabled, which means that it is called no
more, if the same call fails `MAX_FAILURES` times in a row, or once in a decisive call: a call after
whose failure it is not known what the child has begun (`CALLS`).

A call that blocks cannot be ended from outside: it runs on the engine's thread, and a child that is
left alone in the middle of a call could write into the cache later. Slow calls are counted and
logged, so that an operator sees which child delays the engine.

Not thread-safe: owned by the thread that calls the connector.
"""

import logging
import operator
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import msgspec

from kvferry.connectors.contract import KVConnectorTransferResults
from kvferry.connectors.multi.lookup import ChildTraits
from kvferry.connectors.multi.stats import OwnCounts
from kvferry.connectors.stats import KVConnectorStats
from kvferry.events import TransferTimes

MAX_FAILURES = 3
SLOW_CALL_S = 1.0
"""A call that takes longer delays every request of the engine visibly."""

_log = logging.getLogger(__name__)


class Child:
    """One connector of a `MultiConnector` in one role."""

    def __init__(
        self, side: Any, name: str, traits: ChildTraits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.side = side
        self.name = name
        self.traits = traits
        self.disabled = ""
        """Why the child is disabled; empty if it is not."""
        self.counts: Counter[str] = Counter()
        """What has happened since the last report, by the names of `CHILD_COUNTERS`."""
        self.on_disabled: Callable[[Child], None] = lambda child: None
        self._clock = clock
        self._failures_in_a_row: Counter[str] = Counter()
        self._logged: set[str] = set()
        self._is_closed = False

    @property
    def index(self) -> int:
        return self.traits.index

    def call(self, method: str, *args: Any, is_decisive: bool | None = None, **more: Any) -> Any:
        """Call a method of the child. If the child is disabled, raises an exception or returns a
        value of the wrong type, the result is the default of `CALLS`, which also says whether the
        call is decisive.
        """
        return self._guard(method, lambda: getattr(self.side, method)(*args, **more), is_decisive)

    def aggregate(self, messages: Sequence[Any]) -> Any:
        """Join the messages of the child's ranks to one; None if there is none. If the child's
        class cannot join them, what the ranks reported is lost.
        """
        if not messages:
            return None
        return self._guard(
            "aggregate",
            lambda: reduce(lambda joined, message: joined.aggregate(message), messages),
        )

    def _guard(self, name: str, call: Callable[[], Any], is_decisive: bool | None = None) -> Any:
        rule = CALLS.get(name, CallRule())
        if self.disabled:
            return rule.default
        began = self._clock()
        try:
            result = rule.check(call())
        # A child may be any class, so it may raise any exception; the engine serves on without it.
        except Exception as error:
            self._note_failure(
                name, error, rule.is_decisive if is_decisive is None else is_decisive
            )
            return rule.default
        finally:
            self.note_duration(name, self._clock() - began)
        self._failures_in_a_row.pop(name, None)
        return result

    def _note_failure(self, call: str, error: Exception, is_decisive: bool) -> None:
        self.counts["child_failures"] += 1
        self._failures_in_a_row[call] += 1
        if self.is_first(call):
            _log.error("child connector failed child=%s call=%s", self.name, call, exc_info=error)
        if call == "wait_for_save" and isinstance(error, TimeoutError):
            is_decisive = is_decisive and not self.traits.store_timeouts_are_harmless
        if is_decisive or self._failures_in_a_row[call] >= MAX_FAILURES:
            self.disable(f"{self.name} failed in {call}: {type(error).__name__}: {error}")

    def is_first(self, event: str) -> bool:
        """Whether this is the child's first event of the kind. Only that one is logged."""
        is_first = event not in self._logged
        self._logged.add(event)
        return is_first

    def note_duration(self, call: str, duration_s: float) -> None:
        """Count and log a call or a lookup that took long."""
        if duration_s < SLOW_CALL_S:
            return
        self.counts["child_slow_calls"] += 1
        if self.is_first(f"slow {call}"):
            _log.warning(
                "child connector is slow child=%s call=%s duration_s=%.1f",
                self.name,
                call,
                duration_s,
            )

    def disable(self, reason: str) -> None:
        """Shut the child down and call it no more. Idempotent."""
        if self.disabled:
            return
        self.disabled = reason
        _log.error(
            "child connector disabled child=%s reason=%s; this engine serves on without it",
            self.name,
            reason,
        )
        self.close()
        self.on_disabled(self)

    def close(self) -> Exception | None:
        """Shut the child down once. Returns the exception of a child that could not stop."""
        if self._is_closed:
            return None
        self._is_closed = True
        try:
            self.side.shutdown()
        except Exception as error:
            _log.error("child connector could not be shut down child=%s", self.name, exc_info=error)
            return error
        return None


class Children(tuple[Child, ...]):
    """The children of a `MultiConnector` in one role, in order of preference."""

    @property
    def enabled(self) -> list[Child]:
        return [child for child in self if not child.disabled]

    @property
    def disabled(self) -> dict[int, str]:
        """The disabled children, with the reason."""
        return {child.index: child.disabled for child in self if child.disabled}

    def watch_disabled(self, on_disabled: Callable[[Child], None]) -> None:
        """Set the function that is called once for each child that becomes disabled."""
        for child in self:
            child.on_disabled = on_disabled

    def call_all(self, method: str, *args: Any, **more: Any) -> list[Any]:
        """The results of a call of every enabled child."""
        return [child.call(method, *args, **more) for child in self.enabled]

    def call_all_unguarded(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every child at the start of an engine, where an exception must stop the
        start.
        """
        return [getattr(child.side, method)(*args) for child in self]

    def take_stats(self) -> dict[str, Any]:
        """The stats of each child since the last call, by the child's name."""
        stats = {child.name: child.call("get_kv_connector_stats") for child in self.enabled}
        return {name: part for name, part in stats.items() if part is not None}

    def take_counts(self) -> OwnCounts:
        """What has happened to each child since the last call."""
        counts: OwnCounts = {}
        for child in self:
            for name, count in child.counts.items():
                counts.setdefault(name, {})[child.name] = count
            child.counts.clear()
        return counts

    def shutdown(self) -> None:
        """Shut all children down; raises the first exception after all have been tried."""
        errors = [child.close() for child in self]
        for error in errors:
            if error is not None:
                raise error


class CallAll:
    """A method of a `MultiConnector`'s side that calls every child and combines the results. At the
    start of an engine an exception of a child must stop the start.
    """

    def __init__(
        self, combine: Callable[[list[Any]], Any] = lambda results: None, *, is_start: bool = False
    ) -> None:
        self._combine = combine
        self._is_start = is_start
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, side: Any, owner: type) -> Any:
        if side is None:
            return self
        call = side.children.call_all_unguarded if self._is_start else side.children.call_all
        return lambda *args, **more: self._combine(call(self._name, *args, **more))


# -- calls --


@dataclass(frozen=True, slots=True)
class CallRule:
    """What is known of one method of the children."""

    check: Callable[[Any], Any] = lambda answer: answer
    """Turns the result into one of the contract's type, or raises."""
    default: Any = None
    """The result if the child is disabled or fails."""
    is_decisive: bool = False


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


_ANNOUNCEMENT = CallRule(lambda answer: True, default=False)
"""The result is whether the child has accepted the request."""
_QUESTION = CallRule(bool, default=False)

CALLS: Mapping[str, CallRule] = {
    # -- scheduler --
    "on_new_request": _ANNOUNCEMENT,
    "expect_request": _ANNOUNCEMENT,
    "get_num_new_matched_tokens": CallRule(_count, default=(0, False)),
    "get_loaded_kv_cache_group_ids": CallRule(
        lambda answer: None if answer is None else _ids(answer)
    ),
    "get_external_cache_hit_sources": CallRule(
        lambda answer: {source: operator.index(count) for source, count in answer.items()},
        default={},
    ),
    "build_connector_meta": CallRule(_step_message, is_decisive=True),
    "needs_slices": _QUESTION,
    "has_pending_push_work": _QUESTION,
    "has_urgent_work": _QUESTION,
    "has_pending_block_frees": _QUESTION,
    # A failure loses what the child's ranks have reported.
    "aggregate": CallRule(is_decisive=True),
    # A child that fails here could save KV under a wrong name.
    "withdraw": CallRule(is_decisive=True),
    # A child that fails here may still read the blocks. The engine keeps them until the ranks have
    # shut the child down.
    "register_finished_partial_tail": CallRule(bool, default=True, is_decisive=True),
    "request_finished_all_groups": CallRule(_finish, default=(True, None), is_decisive=True),
    # A child that fails here could exchange or offer KV of other weights.
    "set_weights_version": CallRule(is_decisive=True),
    "reset_cache": CallRule(default=False, is_decisive=True),
    # A child may make its events while they are listed.
    "take_events": CallRule(lambda answer: list(answer or ()), default=()),
    "get_kv_connector_stats": CallRule(_stats),
    # -- worker --
    # After a failure here the child may still read blocks that are overwritten next.
    "handle_preemptions": CallRule(is_decisive=True),
    "bind_connector_metadata": CallRule(is_decisive=True),
    "start_load_kv": CallRule(is_decisive=True),
    "wait_for_layer_load": CallRule(is_decisive=True),
    "wait_for_save": CallRule(is_decisive=True),
    "get_transfer_results": CallRule(_results, is_decisive=True),
    "get_block_ids_with_load_errors": CallRule(_ids, is_decisive=True),
}
