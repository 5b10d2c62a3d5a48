"""Exports the spans of this process to an OTLP collector, by HTTP.

A thread of the SDK's batch processor sends the spans. Its queue is bounded: while the collector is
slow or gone, the SDK drops spans, and no request ever waits. The SDK reads the standard OTEL_*
variables for the sampler, headers, certificates, timeouts and batches. Credentials of the collector
and text of clients must never get into the log.
"""

import logging
import threading
import time
from collections.abc import Mapping

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from kvferry import __version__
from kvferry.tracing.spans import SpanWriter

CLOSE_TIMEOUT_S = 2.0
"""How long a process that ends waits until the collector has its last spans."""
_LOG_INTERVAL_S = 60.0
_LOGGERS_OF_HEADERS = ("opentelemetry.trace.span", "opentelemetry.util.re")
"""They log malformed headers unchanged: a client's `tracestate`, the collector's credentials."""
_QUIETED_LOGGERS = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.sdk._shared_internal",
    "opentelemetry.sdk.trace.export",
    *_LOGGERS_OF_HEADERS,
)


def check_variables(endpoint: str) -> None:
    """Raise what the SDK raises if it refuses a variable, such as a queue shorter than a batch."""
    _processor(endpoint).shutdown()  # type: ignore[no-untyped-call]


def _processor(endpoint: str) -> BatchSpanProcessor:
    return BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint))


class TraceExporter:
    """The exporter of a process; `spans` writes to it. The owner calls `close`."""

    def __init__(self, endpoint: str, service: str, attributes: Mapping[str, str]) -> None:
        """`endpoint`: the collector's URL for traces. `service`: the service name, unless an
        OTEL_* variable sets it. `attributes` describe this process.
        """
        for name in _QUIETED_LOGGERS:
            logging.getLogger(name).addFilter(_QuietFilter())
        variables = OTELResourceDetector().detect().attributes
        resource = Resource.create(
            {"service.name": service, "service.version": __version__, **attributes, **variables}
        )
        # Without the SDK's exit hook, which waits up to 30 s for the collector.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(_processor(endpoint))
        self.spans = SpanWriter(self._provider.get_tracer("kvferry", __version__))

    def close(self) -> None:
        """Export the last spans, for at most `CLOSE_TIMEOUT_S`. Idempotent."""
        # The SDK's shutdown may wait 30 s for a collector that does not answer, so it runs on a
        # thread. That thread and the SDK's are daemons: neither delays the end of the process.
        closing = threading.Thread(
            target=self._provider.shutdown, name="kvferry-trace-close", daemon=True
        )
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)


class _QuietFilter(logging.Filter):
    """Passes one record of a logger per minute, without headers and URLs: these may contain
    credentials, or any text of a client.
    """

    def __init__(self) -> None:
        super().__init__()
        self._next_at = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if now < self._next_at:
            return False
        self._next_at = now + _LOG_INTERVAL_S
        if isinstance(record.args, tuple):
            record.args = tuple(_without_secrets(record.name, value) for value in record.args)
        record.exc_info = None
        return True


def _without_secrets(logger: str, value: object) -> object:
    """Replace a header, and an error of the HTTP client, whose text contains the URL."""
    if isinstance(value, BaseException):
        return type(value).__name__
    return "(not shown)" if logger in _LOGGERS_OF_HEADERS else value
