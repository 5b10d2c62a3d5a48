"""kvferry's storage tiers inside vLLM's own OffloadingConnector, as entries of `secondary_tiers`:
`{"type": "KVFerryDiskTier", "module_path": "kvferry.vllm.stock_tiers", "path": ..., "size": ...}`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.config.fields import Count, Text
from kvferry.tiers.base import Tier
from kvferry.tiers.disk import DiskTier
from kvferry.tiers.keys import Namespace
from kvferry.vllm.stock_tiers.tier import StockTier, StockTierSettings

__all__ = ["KVFerryDiskTier"]


@dataclass(frozen=True, slots=True)
class DiskTierSettings(StockTierSettings):
    path: Text = ""
    """A folder on a local or network file system, which engines may share."""
    size: Count | None = None
    """The most bytes that the folder may hold. With null this engine evicts nothing."""


class KVFerryDiskTier(StockTier):
    """Objects in files of a folder."""

    settings_class = DiskTierSettings

    def open_storage(self, settings: Any, namespace: Namespace, secret: bytes) -> Tier:
        return DiskTier(Path(settings.path).expanduser(), namespace, secret, settings.size)
