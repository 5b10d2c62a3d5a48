"""Writes spans to an OpenTelemetry tracer: kvferry's own, or inside vLLM the tracer of vLLM.

Callers measure time with `time.monotonic`; spans have the time of day. To end a span never waits:
the tracer's processor only appends the span to a bounded queue. Each process uses one writer on one
thread.
"""

import time
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
)

from kvferry.tracing.context import TraceContext

__all__ = [
    "Attributes",
    "Span",
    "SpanKind",
    "SpanWriter",
    "context_of_span",
    "vllm_span_writer",
]

Attributes = Mapping[str, str | int | float | bool]
_CLOCK_STEP_NS = 10_000_000
"""A change of the time of day by more than this means that the clock was set."""
_NUM_CLOCK_READINGS = 5
_MAX_ERROR_CHARS = 400


class SpanWriter:
    """Begins and ends spans at given times (local monotonic seconds)."""

    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer
        self._offset_ns = _measure_offset_ns()

    def begin(
        self,
        name: str,
        parent: TraceContext | Span | None,
        began: float,
        attributes: Attributes | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> Span:
        """Begin a span. Without a parent it begins a trace, and the sampler decides whether the
        trace is recorded; `is_recording` of the span says so.
        """
        if not isinstance(parent, Span):
            self._follow_clock()
        return self._tracer.start_span(
            name,
            _context_of(parent),
            kind,
            attributes,
            start_time=self._time_of_day_ns(began),
        )

    def end(
        self, span: Span, ended: float, attributes: Attributes | None = None, error: str = ""
    ) -> None:
        """End a span. `error`: why the work of the span failed; empty if it did not."""
        if attributes:
            span.set_attributes(dict(attributes))
        if error:
            span.set_status(Status(StatusCode.ERROR, error[:_MAX_ERROR_CHARS]))
        span.end(self._time_of_day_ns(ended))

    def write(
        self,
        name: str,
        parent: TraceContext | Span,
        times: tuple[float, float],
        attributes: Attributes | None = None,
        error: str = "",
    ) -> None:
        """Write a span that has ended. `times`: when it began and ended."""
        began, ended = times
        self.end(self.begin(name, parent, began, attributes), max(began, ended), error=error)

    def _time_of_day_ns(self, moment: float) -> int:
        return int(moment * 1e9) + self._offset_ns

    def _follow_clock(self) -> None:
        """Measure the offset again if the time of day was set. Otherwise all spans use one offset,
        so that no span seems to begin before its parent.
        """
        offset_ns = time.time_ns() - time.monotonic_ns()
        if abs(offset_ns - self._offset_ns) > _CLOCK_STEP_NS:
            self._offset_ns = _measure_offset_ns()


def context_of_span(span: Span) -> TraceContext:
    """The context that carries a span to another process."""
    context = span.get_span_context()
    return TraceContext(
        f"{context.trace_id:032x}",
        f"{context.span_id:016x}",
        context.trace_flags.sampled,
        context.trace_state.to_header(),
    )


def vllm_span_writer() -> SpanWriter:
    """Write to the tracer that vLLM has set up in this process, or will set up."""
    return SpanWriter(trace.get_tracer("kvferry"))


def _context_of(parent: TraceContext | Span | None) -> Context:
    if parent is None:
        return Context()
    if isinstance(parent, Span):
        return trace.set_span_in_context(parent, Context())
    context = SpanContext(
        int(parent.trace_id, 16),
        int(parent.span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED if parent.is_sampled else TraceFlags.DEFAULT),
        trace_state=TraceState.from_header([parent.state]) if parent.state else None,
    )
    return trace.set_span_in_context(NonRecordingSpan(context), Context())


def _measure_offset_ns() -> int:
    """Measure the time of day at monotonic 0. The shortest of several readings is the most exact,
    because the process may be interrupted between the two clocks.
    """

    def read_clocks() -> tuple[int, int]:
        before = time.monotonic_ns()
        time_of_day = time.time_ns()
        after = time.monotonic_ns()
        return after - before, time_of_day - (before + after) // 2

    _, offset_ns = min(read_clocks() for _ in range(_NUM_CLOCK_READINGS))
    return offset_ns
