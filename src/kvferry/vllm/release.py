"""The vLLM releases that the adapter serves, and the differences between them.

Every difference is decided here, by what the installed vLLM has and not by its version number: a
patched or a later vLLM may have it too. docs/vllm.md shows the differences as a table.

Importing this module imports nothing of vLLM, so that `kvferry doctor` can read `TESTED`.
"""

import logging
import re
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from kvferry.errors import ConfigError

TESTED = ("0.31.0", "0.32.0", "0.33.0")
"""The versions of vLLM that the tests pass with, oldest first. The Makefile reads them too."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NeededName:
    """A name in vLLM without which the adapter cannot keep its promises."""

    module: str
    name: str
    """The name in the module, with a dot for a member of a class."""
    purpose: str
    """What kvferry needs it for, as it follows "to" in the error."""


_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_CONNECTOR = "KVConnectorBase_V1"
NEEDED = (
    # This is new in 0.31.
    NeededName(
        "vllm.v1.core.kv_cache_utils", "to_event_extra_keys", "publish the KV events of tiers"
    ),
    # These are older.
    NeededName(_BASE, f"{_CONNECTOR}.get_transfer_results", "report which requests failed to load"),
    NeededName(
        _BASE,
        f"{_CONNECTOR}.bind_kv_cache_manager",
        "free the blocks of a load whose KV must not be used",
    ),
    NeededName(
        _BASE,
        f"{_CONNECTOR}.has_pending_block_frees",
        "evict retained turns before vLLM preempts a request",
    ),
    NeededName(_BASE, f"{_CONNECTOR}.on_new_request", "read a ticket as soon as it arrives"),
    NeededName(_BASE, f"{_CONNECTOR}.has_pending_push_work", "push while no request is scheduled"),
    NeededName(_BASE, "SupportsHMA", "transfer the KV of models with several KV cache groups"),
)
"""What every release in `TESTED` has and some older release lacks."""


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
    """Raise `ConfigError` if the installed vLLM lacks something that the adapter needs. Called
    before the connector is imported, so that the operator reads this error and no ImportError.
    """
    lacking = [needed for needed in NEEDED if not _exists(needed)]
    if lacking:
        names = ", ".join(f"{needed.name} (to {needed.purpose})" for needed in lacking)
        raise ConfigError(
            f"vLLM {_installed()} lacks what kvferry needs: {names}; install vLLM "
            f"{release(TESTED[0])} or newer, best {TESTED[-1]}"
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
    return hasattr(import_module(_BASE).KVConnectorBase_V1, "unregister_kv_caches")


def _installed() -> str:
    return str(import_module("vllm").__version__).split("+")[0]


def _exists(needed: NeededName) -> bool:
    try:
        owner: Any = import_module(needed.module)
    except ModuleNotFoundError:
        return False
    for part in needed.name.split("."):
        owner = getattr(owner, part, None)
    return owner is not None
