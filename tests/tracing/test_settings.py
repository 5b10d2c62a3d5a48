"""Tests how tracing is turned on, and what is said if it cannot work."""

import logging
import os
import subprocess
import sys

import pytest

from kvferry.cli.tracing import find_traces_endpoint
from kvferry.config.environment import traces_endpoint
from kvferry.errors import ConfigError

URL = "http://localhost:4318"
FULL = f"{URL}/v1/traces"


@pytest.mark.parametrize(
    ("given", "environ", "endpoint"),
    [
        ("", {}, ""),
        (FULL, {}, FULL),
        (URL, {}, FULL),
        ("https://host/own/path", {}, "https://host/own/path"),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": URL}, FULL),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://host/base/"}, "http://host/base/v1/traces"),
        ("", {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://a/x"}, "http://a/x"),
        (FULL, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://a/x"}, FULL),
        (FULL, {"OTEL_SDK_DISABLED": "true"}, ""),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": URL, "OTEL_TRACES_EXPORTER": "none"}, ""),
    ],
)
def test_the_collector_is_named_by_the_flag_or_by_the_standard_variables(
    given: str, environ: dict[str, str], endpoint: str
) -> None:
    assert traces_endpoint(given, environ) == endpoint


def test_a_variable_of_the_platform_never_stops_a_process() -> None:
    platform = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "otel-collector:4317",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
    }
    assert find_traces_endpoint("proxy", "", platform) == ""


@pytest.mark.parametrize(
    "variable",
    [
        "OTEL_BSP_MAX_QUEUE_SIZE=256",
        "OTEL_BSP_SCHEDULE_DELAY=0",
        "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT=abc",
    ],
)
def test_a_variable_that_the_sdk_refuses_is_an_error_with_the_flag_and_a_warning_without(
    variable: str,
) -> None:
    """In a process of its own: the SDK reads some variables when it is imported."""
    name, _, value = variable.partition("=")
    asked = f"""if True:
        import logging
        from kvferry.cli.tracing import find_traces_endpoint
        from kvferry.errors import ConfigError
        logging.basicConfig()
        print(repr(find_traces_endpoint("proxy", "", {{"OTEL_EXPORTER_OTLP_ENDPOINT": {URL!r}}})))
        try:
            find_traces_endpoint("proxy", {FULL!r}, {{}})
        except ConfigError as error:
            print(error)
    """
    ran = subprocess.run(
        [sys.executable, "-c", asked],
        env=os.environ | {name: value},
        capture_output=True,
        text=True,
    )
    endpoint, refusal = ran.stdout.splitlines()
    assert (endpoint, refusal.endswith("check those that begin with OTEL_")) == ("''", True)
    assert "tracing is off: the OpenTelemetry SDK refuses a variable" in ran.stderr


@pytest.mark.parametrize("url", ["localhost:4318", "grpc://host", "http://", "http://[a", "x"])
def test_another_kind_of_url_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(ConfigError, match="must be a URL like") as refusal:
        traces_endpoint(f"{url}?token=secret", {})
    assert "secret" not in str(refusal.value)


def test_a_protocol_that_kvferry_lacks_is_an_error_with_the_flag_and_a_warning_without(
    caplog: pytest.LogCaptureFixture,
) -> None:
    environ = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_ENDPOINT": URL}
    with pytest.raises(ConfigError, match="by http/protobuf only"):
        find_traces_endpoint("proxy", FULL, environ)
    with caplog.at_level(logging.WARNING):
        assert find_traces_endpoint("proxy", "", environ) == ""
    assert "tracing is off: kvferry sends spans by http/protobuf only" in caplog.text


def log_of(code: str, **environ: str) -> str:
    """What a process with an exporter logs that runs `code` and ends."""
    setup = (
        "import logging; logging.basicConfig(level=logging.DEBUG)\n"
        "from kvferry.tracing.context import TraceContext\n"
        "from kvferry.tracing.exporter import TraceExporter\n"
        f"exporter = TraceExporter({FULL!r}, 'test', {{}})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{setup}{code}\nexporter.close()"],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path), **environ},
    )
    return done.stderr


def test_malformed_headers_for_the_collector_are_not_logged() -> None:
    """The SDK logs a malformed OTEL_EXPORTER_OTLP_HEADERS as it is."""
    log = log_of("", OTEL_EXPORTER_OTLP_HEADERS="my;secret")
    assert "Header format invalid" in log
    assert "secret" not in log


def test_a_malformed_tracestate_of_clients_is_not_logged_and_fills_no_log() -> None:
    """The SDK logs a malformed `tracestate` as it is, for each request."""
    log = log_of(
        "for _ in range(3):\n"
        "    parent = TraceContext('1' * 32, '2' * 16, False, 'my;secret')\n"
        "    exporter.spans.begin('POST /v1/completions', parent, 0.0)\n"
    )
    assert log.count("Member doesn't match") == 1
    assert "secret" not in log
