"""The vLLM releases that the adapter serves, and the differences between them.

Every difference is decided here, by what the installed vLLM has and not by its version number: a
patched or a later vLLM may have it too. docs/vllm.md shows the differences as a table.

Importing this module imports nothing of vLLM, so that `kvferry doctor` can read `TESTED`.
"""

import logging
import re
from importlib import import_module
from typing import Any

from kvferry.errors import ConfigError

TESTED = ("0.31.0", "0.32.0", "0.33.0")
"""The versions of vLLM that the tests pass with, oldest first. The Makefile reads them too."""

_log = logging.getLogger(__name__)


def release(version: str) -> str:
    """The major and minor part of a vLLM version. The byte arrangement of the cache may change
    between minor versions.
    """
    return ".".join(version.split("+")[0].split(".")[:2])


def cache_release(version: str) -> str:
    """What two engines must share for blocks to mean the same: the minor release, and of builds
    between releases the very build, because each commit may change the bytes.
    """
    is_unreleased = re.search(r"\d(a|b|rc|\.dev)\d", version.split("+")[0])
    return version if is_unreleased else release(version)


def check_release() -> None:
    """Raise `ConfigError` if the installed vLLM is older than 0.31, which brought the newest name
    that the adapter needs. Called before the connector is imported, so that the operator reads this
    error and no ImportError.
    """
    if not hasattr(import_module("vllm.v1.core.kv_cache_utils"), "to_event_extra_keys"):
        raise ConfigError(
            f"vLLM {_installed()} lacks what kvferry needs: to_event_extra_keys (to publish the KV "
            f"events of tiers); install vLLM {release(TESTED[0])} or newer, best {TESTED[-1]}"
        )


def warn_if_untested() -> None:
    """Log a warning if this vLLM version is untested. Logs once per process and role, since a
    connector is built once per process and role.
    """
    version = _installed()
    if version not in TESTED:
        _log.warning(
            "kvferry was tested with vLLM %s, but this is %s: its connector interface may have "
            "changed",
            ", ".join(TESTED),
            version,
        )


def find_cache_hit_source() -> Any:
    """vLLM's label for tokens that come from a peer, in vllm:prompt_tokens_cached_by_source; None
    before 0.32, which has no such metric.
    """
    try:
        return import_module("vllm.v1.metrics.cache_hit_source").CacheHitSource.P2P
    except ModuleNotFoundError:
        return None


def find_cache_dtype_handler(name: str) -> Any:
    """What a plugin of vLLM has registered for this cache dtype; None for vLLM's own dtypes, which
    are all there are before 0.33.
    """
    cache = import_module("vllm.config.cache")
    return getattr(cache, "get_kv_cache_dtype_handler", lambda _: None)(name)


def has_sleep_hooks() -> bool:
    """Whether vLLM tells connectors that the cache's memory goes and comes back, as since 0.33."""
    base = import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")
    return hasattr(base.KVConnectorBase_V1, "unregister_kv_caches")


def _installed() -> str:
    return str(import_module("vllm").__version__).split("+")[0]
