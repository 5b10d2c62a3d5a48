"""A collector for tests: an OTLP/HTTP server that decodes the spans that real exporters send."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Status

ARRIVAL_S = 30.0


@dataclass(frozen=True)
class ReceivedSpan:
    """One span, with the attributes of the process that sent it."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    """Empty for the root of a trace."""
    began_ns: int
    ended_ns: int
    attributes: dict[str, Any]
    process: dict[str, Any]
    error: str | None
    """The description of the error status; None without that status."""

    @property
    def service(self) -> str:
        return str(self.process["service.name"])


@dataclass
class Collector:
    """Receives spans while the `with` block runs."""

    _server: ThreadingHTTPServer = field(init=False)
    spans: list[ReceivedSpan] = field(default_factory=list, init=False)
    _has_new: threading.Condition = field(default_factory=threading.Condition, init=False)
    headers: list[dict[str, str]] = field(default_factory=list, init=False)
    """The HTTP headers of each export, in lower case."""

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"

    def __enter__(self) -> Self:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector._take(body, {k.lower(): v for k, v in self.headers.items()})
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                return None

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def wait_for(
        self, trace_id: str, is_complete: Callable[[Sequence[ReceivedSpan]], bool]
    ) -> list[ReceivedSpan]:
        """Wait until the spans of a trace are complete; return them in order of their begin."""
        with self._has_new:
            if self._has_new.wait_for(lambda: is_complete(self.trace(trace_id)), ARRIVAL_S):
                return self.trace(trace_id)
            found = [(span.service, span.name) for span in self.trace(trace_id)]
            raise AssertionError(f"not within {ARRIVAL_S:g} s; arrived: {found}")

    def find(self, is_wanted: Callable[[ReceivedSpan], bool]) -> ReceivedSpan:
        """Wait for a span."""
        with self._has_new:
            assert self._has_new.wait_for(lambda: any(map(is_wanted, self.spans)), ARRIVAL_S)
            return next(filter(is_wanted, self.spans))

    def trace(self, trace_id: str) -> list[ReceivedSpan]:
        """The spans of a trace that have arrived."""
        return sorted(
            (span for span in self.spans if span.trace_id == trace_id),
            key=lambda span: (span.began_ns, span.ended_ns),
        )

    def _take(self, body: bytes, headers: dict[str, str]) -> None:
        sent = ExportTraceServiceRequest.FromString(body)
        with self._has_new:
            self.headers.append(headers)
            for group in sent.resource_spans:
                process = _values(group.resource.attributes)
                for scope in group.scope_spans:
                    self.spans += [_received(span, process) for span in scope.spans]
            self._has_new.notify_all()


def _received(span: Any, process: dict[str, Any]) -> ReceivedSpan:
    is_error = span.status.code == Status.STATUS_CODE_ERROR
    return ReceivedSpan(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _values(span.attributes),
        process,
        span.status.message if is_error else None,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {
        entry.key: getattr(entry.value, entry.value.WhichOneof("value")) for entry in attributes
    }
