"""kvferry's storage tiers inside vLLM's own OffloadingConnector, as entries of `secondary_tiers`:
`{"type": "KVFerryDiskTier", "module_path": "kvferry.vllm.stock_tiers", "path": ..., "size": ...}`.
"""

from pathlib import Path
from typing import Any

from kvferry.config.secret import ClusterSecret
from kvferry.errors import ConfigError
from kvferry.tiers.base import Tier
from kvferry.tiers.disk import DiskTier
from kvferry.tiers.keys import Namespace
from kvferry.vllm.stock_tiers.tier import StockTier

__all__ = ["KVFerryDiskTier"]


class KVFerryDiskTier(StockTier):
    """Objects in files of a folder: `path`, and `size`, the most bytes that the folder may hold."""

    def open_storage(self, namespace: Namespace, secret: ClusterSecret, **settings: Any) -> Tier:
        path, size = settings.pop("path", None), settings.pop("size", None)
        _refuse_unknown(settings, "path, size")
        if not isinstance(path, str) or not path:
            raise ConfigError("KVFerryDiskTier needs the key path: the folder for its objects")
        if size is not None and (not isinstance(size, int) or size <= 0):
            raise ConfigError(f"KVFerryDiskTier: size is a number of bytes, not {size!r}")
        return DiskTier(Path(path).expanduser(), namespace, secret.key, size)


def _refuse_unknown(settings: dict[str, Any], known: str) -> None:
    if settings:
        raise ConfigError(f"unknown keys of a tier: {', '.join(sorted(settings))}; it knows {known}")
