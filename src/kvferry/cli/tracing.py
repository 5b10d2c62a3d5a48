"""The flag that turns on tracing, and the check that tracing can work."""

import logging
from collections.abc import Mapping

from kvferry.cli.arguments import Parser
from kvferry.cli.extras import check_extra
from kvferry.config.environment import TRACES_FLAG, is_http_protocol, traces_endpoint
from kvferry.errors import ConfigError, MissingDependency

_log = logging.getLogger(__name__)


def add_traces_argument(parser: Parser) -> None:
    parser.add_argument(
        TRACES_FLAG,
        metavar="URL",
        help="collector to send spans to, by OTLP over HTTP (default: what the OTEL_* variables "
        "say; without them, tracing is off)",
    )


def find_traces_endpoint(command: str, given: str, environ: Mapping[str, str]) -> str:
    """The collector's URL; empty if tracing is off.

    An operator who gives the flag gets an error if tracing cannot work. The variables are often set
    for every process of a platform, so they only cause a warning.
    """
    try:
        endpoint = traces_endpoint(given, environ)
        if not endpoint:
            return ""
        check_extra(f"kvferry {command} {TRACES_FLAG}", "tracing")
        if not is_http_protocol(environ):
            raise ConfigError(
                "kvferry sends spans by http/protobuf only; set "
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf and the collector's HTTP port"
            )
        _check_variables(endpoint)
    except (ConfigError, MissingDependency) as error:
        if given:
            raise
        _log.warning("tracing is off: %s", error)
        return ""
    return endpoint


def _check_variables(endpoint: str) -> None:
    """Raise ConfigError if the SDK refuses a variable. It reads some when it is imported."""
    try:
        # Imported here, because the packages belong to the extra [tracing].
        from kvferry.tracing.exporter import check_variables

        check_variables(endpoint)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"the OpenTelemetry SDK refuses a variable ({error}); check those that begin with OTEL_"
        ) from None
