"""Spans of the connector inside vLLM, beside vLLM's own.

vLLM writes spans if it has `--otlp-traces-endpoint`. Its engine core then has a tracer, and each
request has the trace headers that its client sent; the connector uses both. Requests without trace
headers get no spans from the connector, because vLLM chooses their trace after they have ended.
"""

import time
from collections.abc import Collection, Mapping
from typing import Any

from kvferry.connectors.multi.metadata import MultiWorkerMetadata
from kvferry.connectors.nixl.metadata import NixlWorkerMetadata
from kvferry.tracing.context import read_trace_context
from kvferry.vllm.messages import WorkerMetadata

_FAILED = "the load failed; the worker's log has the reason"


class ConnectorTracer:
    """Writes the spans of one connector's scheduler side, if vLLM writes spans."""

    def __init__(self, vllm_config: Any) -> None:
        self._transfers = None
        if vllm_config.observability_config.otlp_traces_endpoint:
            # Imported here, because vLLM works without OpenTelemetry if it writes no spans.
            from kvferry.tracing.spans import vllm_span_writer
            from kvferry.tracing.transfers import TransferTracer

            self._transfers = TransferTracer(vllm_span_writer())

    def add(self, request: Any) -> None:
        """A request has entered the engine."""
        if self._transfers is not None:
            headers: Mapping[str, str] = request.trace_headers or {}
            context = read_trace_context(headers.get)
            if context is not None and context.is_sampled:
                self._transfers.add(str(request.request_id), context, time.monotonic())

    def begin_load(self, request: Any) -> None:
        if self._transfers is not None:
            self._transfers.begin_load(str(request.request_id), time.monotonic())

    def end(
        self,
        loaded: Collection[str],
        failed: Collection[str],
        sent: Collection[str],
        report: WorkerMetadata | None,
    ) -> None:
        """Loads and leases have ended."""
        if self._transfers is None:
            return
        report, now = report or WorkerMetadata(), time.monotonic()
        reasons = _failure_reasons(report.inner)
        for request_id in loaded:
            has_failed = request_id in failed or request_id in report.failed_loads
            failure = reasons.get(request_id, _FAILED) if has_failed else ""
            self._transfers.end_load(request_id, report.times.get(request_id, ()), now, failure)
        for request_id in sent:
            self._transfers.end_lease(request_id, now)

    def finish(self, request: Any, result: tuple[bool, dict[str, Any] | None]) -> None:
        """A request has finished. `result`: what the connector answered."""
        if self._transfers is not None:
            is_held, params = result
            has_lease = is_held and bool(params and params.get("do_remote_prefill"))
            self._transfers.finish(str(request.request_id), time.monotonic(), has_lease=has_lease)


def _failure_reasons(report: Any) -> dict[str, str]:
    """Why loads from peers have failed, in the report of the pull or push connector."""
    parts = [report]
    if isinstance(report, MultiWorkerMetadata):
        parts = [part for reports in report.parts.values() for part in reports]
    found: dict[str, str] = {}
    for part in parts:
        found |= part.failed if isinstance(part, NixlWorkerMetadata) else {}
    return found
