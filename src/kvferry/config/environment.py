"""Settings that are set only by environment variables. The caller passes the environment. Pure."""

from collections.abc import Mapping
from urllib.parse import urlsplit

from kvferry.config.fields import shown
from kvferry.errors import ConfigError
from kvferry.types import KVLayout

# A variable of vLLM that kvferry replaces by `kv_lease_duration`.
OLD_TIMEOUT = "VLLM_NIXL_ABORT_REQUEST_TIMEOUT"
LAYOUT_NAMES = ("KVFERRY_KV_CACHE_LAYOUT", "VLLM_KV_CACHE_LAYOUT")


def kv_cache_layout_from_environment(environ: Mapping[str, str]) -> KVLayout:
    """The cache layout: KVFERRY_KV_CACHE_LAYOUT, else VLLM_KV_CACHE_LAYOUT, else HND. With HND the
    tokens of a head are adjacent, so a slice of heads is one segment.
    """
    for name in LAYOUT_NAMES:
        text = environ.get(name, "").strip()
        if text:
            if text not in KVLayout.__members__:
                raise ConfigError(f"{name} must be one of HND, NHD, got {shown(text)}")
            return KVLayout(text)
    return KVLayout.HND


def fault_spec_from_environment(environ: Mapping[str, str]) -> str:
    """KVFERRY_FAULTS: faults that data transports inject on purpose in tests; empty for none."""
    return environ.get("KVFERRY_FAULTS", "").strip()


def ignored_variables(environ: Mapping[str, str]) -> list[str]:
    """One sentence for each variable that operators set for vLLM and that kvferry does not read."""
    if not environ.get(OLD_TIMEOUT, "").strip():
        return []
    return [
        f"{OLD_TIMEOUT} has no effect here; set kv_lease_duration in kv_connector_extra_config "
        "(seconds, 30 by default)"
    ]


# -- traces --
# Where spans are exported to: `--otlp-traces-endpoint`, or the standard OTEL_* variables. All other
# settings of tracing are OTEL_* variables that the OpenTelemetry SDK reads itself.


TRACES_FLAG = "--otlp-traces-endpoint"
_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
_TRACES_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PATH = "/v1/traces"


def traces_endpoint(given: str, environ: Mapping[str, str]) -> str:
    """The collector's URL for spans; empty if tracing is off. `given`: the value of the flag.

    Raises ConfigError if the URL is not one of HTTP.
    """
    if (
        environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
        or environ.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none"
    ):
        return ""
    for name, value in ((TRACES_FLAG, given), (_TRACES_VARIABLE, environ.get(_TRACES_VARIABLE))):
        if value:
            return _checked(name, value)
    base = environ.get(_VARIABLE)
    return _checked(_VARIABLE, base).removesuffix(_PATH).rstrip("/") + _PATH if base else ""


def is_http_protocol(environ: Mapping[str, str]) -> bool:
    """Whether the OTEL_* variables allow OTLP by HTTP, the one protocol that kvferry has."""
    asked = next((environ[name] for name in _PROTOCOLS if environ.get(name)), "http/protobuf")
    return asked.strip().lower() == "http/protobuf"


def _checked(name: str, url: str) -> str:
    try:
        parts = urlsplit(url)
        is_http = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port
    except ValueError:
        is_http = False
    if not is_http:
        # The URL may hold a password, so the message does not repeat it.
        raise ConfigError(f"{name} must be a URL like http://localhost:4318{_PATH}")
    return url if parts.path not in ("", "/") else url.rstrip("/") + _PATH
