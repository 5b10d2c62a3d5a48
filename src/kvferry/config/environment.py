"""Settings that are set only by environment variables. The caller passes the environment. Pure."""

from collections.abc import Mapping

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
