"""A storage connector that keeps blocks in this process, a connector that fills blocks with dummy
values, and a connector that requires another cache layout. All implement kvferry's contract and
move real bytes.

A test reaches a store by its name in `STORES`, to hold back or fail its loads and saves, or to make
any of the connector's methods raise an exception.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.config import FreeExtraConfig
from kvferry.connectors.contract import (
    ConnectorConfig,
    KVCacheBlocks,
    KVCacheConfig,
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    Request,
    SupportsHMA,
)
from kvferry.connectors.stats import KVConnectorStats, add_up

Rows = dict[str, npt.NDArray[Any]]
DUMMY = 77


@dataclass
class Store:
    """The blocks of one store, and what its connectors are told to do."""

    blocks: dict[bytes, Rows] = field(default_factory=dict)
    is_looking: bool = False
    holds_loads: bool = False
    holds_saves: bool = False
    fails_loads: bool = False
    params: dict[str, Any] = field(default_factory=dict)
    """Parameters for the client of a request that is saved."""
    raising: set[str] = field(default_factory=set)
    answers: dict[str, Any] = field(default_factory=dict)
    """What methods return instead of their own results."""
    is_fatal_once: bool = False
    """The first exception ends the raising."""
    reports_twice: bool = False
    saved_requests: list[str] = field(default_factory=list)
    num_loaded_blocks: int = 0
    calls: list[str] = field(default_factory=list)


STORES: dict[str, Store] = {}


@dataclass(frozen=True)
class LoadJob:
    request_id: str
    keys: tuple[bytes, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class SaveJob:
    request_id: str
    keys: tuple[bytes, ...]
    blocks: tuple[int, ...]


@dataclass
class StoreMetadata(KVConnectorMetadata):
    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)


@dataclass
class StoreWorkerMetadata(KVConnectorWorkerMetadata):
    num_steps: int = 0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StoreWorkerMetadata":
        assert isinstance(other, StoreWorkerMetadata)
        return StoreWorkerMetadata(self.num_steps + other.num_steps)


@dataclass
class StoreStats(KVConnectorStats):
    def aggregate(self, other: KVConnectorStats) -> "StoreStats":
        add_up(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)


class StoreConnector(KVConnectorBase_V1, SupportsHMA):
    """Saves every full block of a finished request, and loads full blocks between steps."""

    honours_token_range = True
    loads_are_optional = True

    def __init__(
        self, config: ConnectorConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(config, role, kv_cache_config)
        extra = config.kv_transfer.extra
        assert isinstance(extra, FreeExtraConfig)
        self._store = STORES.setdefault(extra.settings["store"], Store())
        self._asked_from: dict[str, int] = {}
        self._next = StoreMetadata()
        self._caches: dict[str, npt.NDArray[Any]] = {}
        self._loads: list[LoadJob] = []
        self._saves: list[SaveJob] = []
        self._num_loads = 0

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if name.startswith("_") or not callable(found):
            return found
        store = object.__getattribute__(self, "_store")
        store.calls.append(name)
        if name in store.answers:
            return lambda *args, **more: store.answers[name]
        if name not in store.raising:
            return found

        def fail(*args: Any, **more: Any) -> Any:
            if store.is_fatal_once:
                store.raising.discard(name)
            raise RuntimeError(f"{name} was told to fail")

        return fail

    def shutdown(self) -> None:
        self._loads, self._saves = [], []

    # -- scheduler --

    def _key(self, request: Request, block: int) -> bytes:
        end = (block + 1) * self._kv_cache_config.block_size
        tokens = np.array(request.all_token_ids[:end], dtype=np.int64)
        return hashlib.sha256(tokens.tobytes() + str(request.cache_salt).encode()).digest()

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._store.is_looking:
            return None, False
        size = self._kv_cache_config.block_size
        first = last = num_computed_tokens // size
        while last < request.num_prompt_tokens // size and (
            self._key(request, last) in self._store.blocks
        ):
            last += 1
        self._asked_from[request.request_id] = num_computed_tokens
        return (last - first) * size, last > first

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if num_external_tokens:
            size = self._kv_cache_config.block_size
            first = self._asked_from[request.request_id] // size
            places = range(first, first + num_external_tokens // size)
            (table,) = blocks.get_block_ids()
            self._next.loads.append(
                LoadJob(
                    request.request_id,
                    tuple(self._key(request, place) for place in places),
                    tuple(table[place] for place in places),
                )
            )

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> Mapping[str, int]:
        return {"store": num_external_tokens}

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        metadata, self._next = self._next, StoreMetadata()
        return metadata

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        (table,) = block_ids
        places = range(
            min(request.num_computed_tokens // self._kv_cache_config.block_size, len(table))
        )
        keys = {place: self._key(request, place) for place in places}
        new = [place for place in places if keys[place] not in self._store.blocks]
        if not new:
            return False, None
        self._next.saves.append(
            SaveJob(
                request.request_id,
                tuple(keys[place] for place in new),
                tuple(table[place] for place in new),
            )
        )
        return True, dict(self._store.params)

    def has_pending_push_work(self) -> bool:
        return bool(self._next.loads or self._next.saves)

    # -- worker --

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        self._caches = {
            layer: tensor.array if hasattr(tensor, "array") else _bytes_of(tensor)
            for layer, tensor in kv_caches.items()
        }

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert isinstance(self._connector_metadata, StoreMetadata)
        self._loads += self._connector_metadata.loads
        self._saves += self._connector_metadata.saves

    def wait_for_layer_load(self, layer_name: str) -> None:
        return None

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        return None

    def wait_for_save(self) -> None:
        return None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        if not self._store.holds_loads:
            loads, self._loads = self._loads, []
            for load in loads:
                self._load(load, results)
        if not self._store.holds_saves:
            saves, self._saves = self._saves, []
            for save in saves:
                for key, block in zip(save.keys, save.blocks, strict=True):
                    rows = {layer: cache[block].copy() for layer, cache in self._caches.items()}
                    self._store.blocks[key] = rows
                self._store.saved_requests.append(save.request_id)
                results.finished_sending.add(save.request_id)
        if self._store.reports_twice:
            results.finished_sending |= set(self._store.saved_requests) | {"never asked"}
            results.finished_recving.add("never asked")
        return results

    def _load(self, load: LoadJob, results: KVConnectorTransferResults) -> None:
        results.finished_recving.add(load.request_id)
        if self._store.fails_loads:
            results.failed_recving.add(load.request_id)
            results.failure_reasons[load.request_id] = "the store was told to fail"
            return
        for key, block in zip(load.keys, load.blocks, strict=True):
            for layer, row in self._store.blocks[key].items():
                self._caches[layer][block] = row
            self._store.num_loaded_blocks += 1
        self._num_loads += 1

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        num_loads, self._num_loads = self._num_loads, 0
        return StoreStats({"store_loads": num_loads}) if num_loads else None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return StoreWorkerMetadata(1) if self._loads else None


class DummyConnector(StoreConnector):
    """Fills all blocks but that of the last token, within the step that computes the rest."""

    honours_token_range = False
    loads_are_optional = False
    provides_dummy_kv = True

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return max(0, request.num_tokens - 1 - num_computed_tokens), False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if num_external_tokens:
            (table,) = blocks.get_block_ids()
            self._next.loads.append(LoadJob(request.request_id, (), tuple(table)))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert isinstance(self._connector_metadata, StoreMetadata)
        for load in self._connector_metadata.loads:
            for cache in self._caches.values():
                cache[list(load.blocks)] = DUMMY

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None


class StepConnector(StoreConnector):
    """Loads within the step that computes the rest, and cannot share a request's tokens."""

    honours_token_range = False

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        count, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return count, False

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert isinstance(self._connector_metadata, StoreMetadata)
        results = KVConnectorTransferResults()
        for load in self._connector_metadata.loads:
            self._load(load, results)
        self._saves += self._connector_metadata.saves


class OtherLayoutConnector(StoreConnector):
    @classmethod
    def get_required_kvcache_layout(cls, config: ConnectorConfig) -> str | None:
        return "NHD"


def _bytes_of(tensor: Any) -> npt.NDArray[Any]:
    """A real engine's cache, whatever its dtype."""
    import torch

    found: npt.NDArray[Any] = tensor.view(torch.uint8).numpy()
    return found


def child(kind: str, store: str) -> dict[str, Any]:
    """The configuration of a connector of this module in a `MultiConnector`."""
    return {
        "kv_connector": kind,
        "kv_connector_module_path": __name__,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": store},
    }
