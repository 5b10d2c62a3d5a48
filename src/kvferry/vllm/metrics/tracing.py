"""Spans of the connector inside vLLM, beside vLLM's own.

vLLM writes spans if it has `--otlp-traces-endpoint`. Its engine core then has a tracer, and each
request has the trace headers that its client sent; the connector uses both. Requests without trace
headers get no spans from the connector, because vLLM chooses their trace after they have ended.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvferry.events import TransferTimes
from kvferry.tracing.context import read_trace_context
from kvferry.tracing.spans import vllm_span_writer
from kvferry.tracing.transfers import TransferTracer

_FAILED = "the load failed; the worker's log has the reason"


class ConnectorTracer:
    """Writes the spans of one connector's scheduler side."""

    def __init__(self) -> None:
        self._transfers = TransferTracer(vllm_span_writer())

    def add(self, request: Any) -> None:
        """A request has entered the engine."""
        headers: Mapping[str, str] = request.trace_headers or {}
        context = read_trace_context(headers.get)
        if context is not None and context.is_sampled:
            self._transfers.add(str(request.request_id), context, time.monotonic())

    def begin_load(self, request: Any) -> None:
        self._transfers.begin_load(str(request.request_id), time.monotonic())

    def end_loads(
        self,
        finished: Iterable[str],
        failed: frozenset[str],
        times: Mapping[str, Sequence[TransferTimes]],
        reasons: Mapping[str, str],
    ) -> None:
        now = time.monotonic()
        for request_id in finished:
            failure = reasons.get(request_id, _FAILED) if request_id in failed else ""
            self._transfers.end_load(request_id, times.get(request_id, ()), now, failure)

    def finish(self, request: Any, result: tuple[bool, dict[str, Any] | None]) -> None:
        """A request has finished. `result`: what the connector answered."""
        is_held, params = result
        has_lease = is_held and bool(params and params.get("do_remote_prefill"))
        self._transfers.finish(str(request.request_id), time.monotonic(), has_lease=has_lease)

    def end_leases(self, request_ids: Iterable[str]) -> None:
        now = time.monotonic()
        for request_id in request_ids:
            self._transfers.end_lease(request_id, now)
