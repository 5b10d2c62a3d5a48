"""kvferry's storage tiers inside vLLM's own OffloadingConnector, as entries of `secondary_tiers`:
`{"type": "KVFerryDiskTier", "module_path": "kvferry.vllm.stock_tiers", "path": ..., "size": ...}`.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.config.fields import Count, Text
from kvferry.config.secret import ClusterSecret
from kvferry.errors import ConfigError
from kvferry.tiers.base import Tier
from kvferry.tiers.disk import DiskTier
from kvferry.tiers.keys import Namespace
from kvferry.tiers.object_store import Bucket, ObjectStoreDeadlines, ObjectTier
from kvferry.vllm.stock_tiers.tier import StockTier, StockTierSettings

__all__ = ["KVFerryDiskTier", "KVFerryObjectTier"]

MAX_LOOKUP_S = 2.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DiskTierSettings(StockTierSettings):
    path: Text = ""
    """A folder on a local or network file system, which engines may share."""
    size: Count | None = None
    """The most bytes that the folder may hold. With null this engine evicts nothing."""


class KVFerryDiskTier(StockTier):
    """Objects in files of a folder."""

    settings_class = DiskTierSettings

    def open_storage(self, settings: Any, namespace: Namespace, secret: ClusterSecret) -> Tier:
        if not secret.is_explicit:
            _log.warning(
                "objects can be read only with the secret that kvferry made in %s, so not by other "
                "hosts, and not if that file is lost; set KVFERRY_SECRET_FILE",
                secret.source,
            )
        return DiskTier(Path(settings.path).expanduser(), namespace, secret.key, settings.size)


@dataclass(frozen=True, slots=True)
class ObjectTierSettings(StockTierSettings):
    bucket: Text = ""
    prefix: str = ""
    endpoint: Text | None = None
    """The URL of the store; null for AWS."""
    region: Text | None = None
    profile: Text | None = None
    """The profile in ~/.aws whose credentials are used; null: the variables of AWS."""


class KVFerryObjectTier(StockTier):
    """Objects in a bucket of an S3-compatible store. The bucket's life-cycle rules bound it."""

    settings_class = ObjectTierSettings

    def open_storage(self, settings: Any, namespace: Namespace, secret: ClusterSecret) -> Tier:
        if not secret.is_explicit:
            raise ConfigError(
                "hosts that share a bucket need a common secret, or they refuse and remove each "
                "other's objects; set KVFERRY_SECRET_FILE"
            )
        bucket = Bucket(
            settings.bucket, settings.prefix, settings.endpoint, settings.region, settings.profile
        )
        deadlines = ObjectStoreDeadlines(
            lookup_s=min(MAX_LOOKUP_S, settings.load_timeout), transfer_s=settings.load_timeout
        )
        return ObjectTier(bucket, namespace, secret.key, deadlines)
