"""Spans of requests, exported by OpenTelemetry. See docs/decisions/063-tracing.md."""
