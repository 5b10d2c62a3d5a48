"""A storage connector of vLLM's contract that keeps blocks in this process. It saves every full
block of a finished request and loads between steps; a test reaches a store by its name in `STORES`.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)


@dataclass
class Store:
    """The blocks of one store, and what its connectors are told to do."""

    blocks: dict[bytes, dict[str, torch.Tensor]] = field(default_factory=dict)
    holds_loads: bool = False
    holds_saves: bool = False
    fails_loads: bool = False
    times_out: bool = False
    raising: set[str] = field(default_factory=set)
    calls: set[str] = field(default_factory=set)
    num_loaded_blocks: int = 0
    generation: int = 0
    """Part of every key; `reset_cache` begins a new generation."""


STORES: dict[str, Store] = {}


@dataclass
class Job:
    request_id: str
    keys: list[bytes]
    blocks: list[int]


@dataclass
class StoreMetadata(KVConnectorMetadata):  # type: ignore[misc]
    loads: list[Job] = field(default_factory=list)
    saves: list[Job] = field(default_factory=list)
    before: dict[str, list[int]] = field(default_factory=dict)
    """All blocks of the requests that load."""


class UndescribedStore(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """A connector that does not know kvferry's contract."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._store = STORES.setdefault(extra["store"], Store())
        self._size = vllm_config.cache_config.block_size
        self._asked_from: dict[str, int] = {}
        self._next = StoreMetadata()
        self._caches: dict[str, torch.Tensor] = {}
        self._loads: list[Job] = []
        self._saves: list[Job] = []

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if name.startswith("_") or not callable(found):
            return found
        store = object.__getattribute__(self, "_store")
        store.calls.add(name)
        if name not in store.raising:
            return found

        def fail(*args: Any, **more: Any) -> Any:
            raise RuntimeError(f"{name} was told to fail")

        return fail

    def _keys(self, request: Any, num_blocks: int) -> list[bytes]:
        tokens = list(request.all_token_ids)
        return [
            hashlib.sha256(
                repr((self._store.generation, tokens[: (index + 1) * self._size])).encode()
            ).digest()
            for index in range(min(num_blocks, len(tokens) // self._size))
        ]

    # -- scheduler --

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        first = num_computed_tokens // self._size
        keys = self._keys(request, (request.num_tokens - 1) // self._size)
        count = 0
        while first + count < len(keys) and keys[first + count] in self._store.blocks:
            count += 1
        self._asked_from[request.request_id] = first
        return count * self._size, count > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            first = self._asked_from[request.request_id]
            last = first + num_external_tokens // self._size
            self._next.loads.append(
                Job(
                    request.request_id,
                    self._keys(request, last)[first:],
                    blocks.get_block_ids()[0][first:last],
                )
            )

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        metadata, self._next = self._next, StoreMetadata()
        return metadata

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        num_blocks = min(request.num_computed_tokens // self._size, len(block_ids[0]))
        keys = self._keys(request, num_blocks)
        new = [index for index, key in enumerate(keys) if key not in self._store.blocks]
        if not new:
            return False, None
        self._next.saves.append(
            Job(
                request.request_id,
                [keys[index] for index in new],
                [block_ids[0][index] for index in new],
            )
        )
        return True, None

    def reset_cache(self) -> bool | None:
        self._store.generation += 1
        self._store.blocks.clear()
        return None

    def has_pending_push_work(self) -> bool:
        return bool(self._next.loads or self._next.saves)

    # -- worker --

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert isinstance(self._connector_metadata, StoreMetadata)
        self._loads += self._connector_metadata.loads
        self._saves += self._connector_metadata.saves

    def wait_for_layer_load(self, layer_name: str) -> None:
        return None

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **more: Any
    ) -> None:
        return None

    def wait_for_save(self) -> None:
        return None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        if not self._store.holds_loads:
            loads, self._loads = self._loads, []
            for load in loads:
                results.finished_recving.add(load.request_id)
                if self._store.fails_loads or not set(load.keys) <= self._store.blocks.keys():
                    results.failed_recving.add(load.request_id)
                    continue
                for key, block in zip(load.keys, load.blocks, strict=True):
                    for layer, row in self._store.blocks[key].items():
                        self._caches[layer][block] = row
                    self._store.num_loaded_blocks += 1
        if not self._store.holds_saves:
            saves, self._saves = self._saves, []
            for save in saves:
                for key, block in zip(save.keys, save.blocks, strict=True):
                    self._store.blocks[key] = {
                        layer: cache[block].clone() for layer, cache in self._caches.items()
                    }
                results.finished_sending.add(save.request_id)
        return results


class StoreConnector(UndescribedStore):
    """The same with the attributes of kvferry's contract."""

    honours_token_range = True
    loads_are_optional = True


class BlockReportingStore(StoreConnector):
    """Follows requests and reports a failed load as LMCache does: it learns of a request when it is
    asked, adds the blocks that are new to those that it knows, and reports the blocks of a failed
    load and those before them.
    """

    reports_failed_blocks = True
    follows_lookups = True
    store_timeouts_are_harmless = True

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._known: dict[str, list[int]] = {}
        self._before: dict[str, list[int]] = {}
        self._errors: set[int] = set()

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if request.num_preemptions:
            self._known.pop(request.request_id, None)
        self._known.setdefault(request.request_id, [])
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        known = self._known[request.request_id]
        known += blocks.get_block_ids()[0][len(known) :]
        if num_external_tokens:
            self._next.before[request.request_id] = list(known)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        for new in scheduler_output.scheduled_new_reqs:
            known = self._known[new.req_id]
            assert known[: len(new.block_ids[0])] == new.block_ids[0], "these blocks are outdated"
        return super().build_connector_meta(scheduler_output)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        del self._known[request.request_id]
        return super().request_finished_all_groups(request, block_ids)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        self._before |= self._connector_metadata.before

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        self._errors = {
            block for request in results.failed_recving for block in self._before[request]
        }
        results.failed_recving = set()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        errors, self._errors = self._errors, set()
        return errors

    def wait_for_save(self) -> None:
        if self._store.times_out:
            raise TimeoutError("the store did not answer")
