"""Spans of requests, exported with OpenTelemetry. See docs/decisions/063-tracing.md."""
