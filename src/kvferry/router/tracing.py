"""Spans of the router: one for each request, with a child for each phase of its timeline.

Both legs carry the context of the request's span, so the spans of P and D join the trace. The
phases are those that the dashboard shows. Runs on the event loop, so nothing here may wait: a span
is only appended to a queue.
"""

from dataclasses import dataclass

from kvferry.router.dashboard.request_view import request_phases
from kvferry.router.http.messages import ServerRequest
from kvferry.router.routes.table import Route
from kvferry.router.timeline import Timeline
from kvferry.tracing.context import TraceContext, read_trace_context
from kvferry.tracing.exporter import TraceExporter
from kvferry.tracing.spans import Span, SpanKind, SpanWriter, context_of_span
from kvferry.tracing.transfers import REQUEST_ID

_OPERATIONS = {"/v1/completions": "text_completion", "/v1/chat/completions": "chat"}


@dataclass(slots=True)
class RouterTracer:
    """Writes the spans of one router."""

    exporter: TraceExporter

    def begin(self, route: Route, request: ServerRequest, timeline: Timeline) -> "RequestTrace":
        """Begin the span of a request, in the client's trace if the client sent one."""
        # Collectors group spans by name, so the name has the pattern: a path may contain an id.
        attributes = {
            REQUEST_ID: timeline.request_id,
            "http.request.method": request.method,
            "http.route": route.pattern,
            "gen_ai.operation.name": _OPERATIONS.get(route.pattern, "other"),
        }
        span = self.exporter.spans.begin(
            f"{request.method} {route.pattern}",
            read_trace_context(request.headers.get),
            timeline.arrived,
            attributes,
            SpanKind.SERVER,
        )
        return RequestTrace(self.exporter.spans, span, context_of_span(span))

    def close(self) -> None:
        """Export the last spans, for a bounded time."""
        self.exporter.close()


@dataclass(slots=True)
class RequestTrace:
    """The open span of one request."""

    _spans: SpanWriter
    _span: Span
    context: TraceContext
    """The context for both legs."""

    def end(self, timeline: Timeline) -> None:
        """Write the phases of a request that has ended, and end its span."""
        if not self._span.is_recording() or timeline.ended is None:
            return
        for phase in request_phases(timeline):
            ended = timeline.ended
            if phase.ended_s is not None:
                ended = timeline.arrived + phase.ended_s
            self._spans.write(
                phase.name,
                self._span,
                (timeline.arrived + phase.began_s, ended),
                {"kvferry.instance": phase.instance} if phase.instance else None,
                (phase.detail or "failed") if phase.is_failed else "",
            )
        attributes: dict[str, str | int | float | bool] = {
            "http.response.status_code": timeline.status,
            "kvferry.outcome": str(timeline.outcome),
            "kvferry.retries": timeline.num_retries,
            "kvferry.relayed_bytes": timeline.relayed_bytes,
        }
        if timeline.fallback:
            attributes["kvferry.fallback"] = timeline.fallback
        is_error = timeline.outcome is not None and timeline.outcome.is_error
        error = timeline.error or str(timeline.outcome) if is_error else ""
        self._spans.end(self._span, timeline.ended, attributes, error)
