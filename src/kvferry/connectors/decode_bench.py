"""`DecodeBenchConnector`: blocks full of made-up KV, so that decoding can be measured without a P.

Every prompt counts as loaded, except its last token. The values are not KV of any model, so the
tokens mean nothing. An engine with this connector has no prefix cache, and no other connector saves
these blocks: made-up KV must never be taken for a prompt's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvferry.config import DecodeBenchExtraConfig
from kvferry.connectors.contract import (
    ConnectorConfig,
    ConnectorDescription,
    KVCacheBlocks,
    KVCacheConfig,
    KVConnectorMetadata,
    KVTensor,
    Request,
    SchedulerSide,
    Step,
    WorkerSide,
)
from kvferry.protocol.tickets import NO_BLOCK

FP8_BYTE = 16
"""What a cache of bytes is filled with: as fp8 of either kind, a small normal number."""


@dataclass(slots=True)
class FillMetadata(KVConnectorMetadata):
    """The blocks to fill before a step, by KV-cache group."""

    blocks: tuple[list[int], ...] = field(default_factory=tuple)


class DecodeBenchScheduler(SchedulerSide):
    """Lets the workers fill the blocks of each prompt in the step that computes the prompt's last
    token.
    """

    def __init__(self, config: ConnectorConfig, cache: KVCacheConfig) -> None:
        self._extra = _settings(config)
        self._cache = cache
        self._next = self._no_blocks()

    def _no_blocks(self) -> FillMetadata:
        return FillMetadata(tuple([] for _ in self._cache.groups))

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return max(0, request.num_tokens - 1 - num_computed_tokens), False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if not num_external_tokens or self._extra.startup_fill:
            return
        size, end = self._cache.block_size, request.num_tokens - 1
        first, last = (end - num_external_tokens) // size, -(-end // size)
        for found, table in zip(self._next.blocks, blocks.get_block_ids(), strict=True):
            found += [block for block in table[first:last] if block != NO_BLOCK]

    def build_connector_meta(self, scheduler_output: Step) -> FillMetadata:
        metadata, self._next = self._next, self._no_blocks()
        return metadata


class DecodeBenchWorker(WorkerSide):
    """Fills blocks of one rank's cache."""

    def __init__(self, config: ConnectorConfig, cache: KVCacheConfig) -> None:
        self._extra = _settings(config)
        self._groups = cache.groups
        self._caches: Mapping[str, Any] = {}

    def register_kv_caches(self, kv_caches: Mapping[str, KVTensor]) -> None:
        self._caches = kv_caches
        if self._extra.startup_fill:
            for cache in self._caches.values():
                self._fill(cache)

    def restore_kv_caches(self) -> None:
        self.register_kv_caches(self._caches)

    def bind_connector_metadata(self, metadata: KVConnectorMetadata) -> None:
        assert isinstance(metadata, FillMetadata)
        for group, blocks in zip(self._groups, metadata.blocks, strict=True):
            for layer in group.layer_names if blocks else ():
                rows = self._caches[layer][blocks]
                self._fill(rows)
                self._caches[layer][blocks] = rows

    def _fill(self, rows: Any) -> None:
        if not rows.is_floating_point():
            rows.fill_(FP8_BYTE)
        elif self._extra.fill_std:
            rows.normal_(self._extra.fill_mean, self._extra.fill_std)
        else:
            rows.fill_(self._extra.fill_mean)


def _settings(config: ConnectorConfig) -> DecodeBenchExtraConfig:
    assert isinstance(config.kv_transfer.extra, DecodeBenchExtraConfig)
    return config.kv_transfer.extra


DecodeBenchConnector = ConnectorDescription(
    DecodeBenchScheduler,
    DecodeBenchWorker,
    provides_dummy_kv=True,
    requires_kv_delivery=False,
    needs_polling=True,
)
