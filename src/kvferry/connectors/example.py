"""`ExampleConnector`: the KV of prompts in a shared folder.

P writes each prompt's KV, layer by layer, while it computes the prompt; D reads the KV before the
step that needs it. Both wait for the storage, so slow storage makes the engine slow: use
`OffloadingConnector` in production. docs/writing-a-connector.md explains a shorter connector.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import safetensors.torch

from kvferry.config import ExampleExtraConfig
from kvferry.connectors import contract
from kvferry.connectors.geometry import geometry_of
from kvferry.connectors.offloading.metadata import OffloadStats
from kvferry.connectors.offloading.settings import chunk_namespace
from kvferry.tiers.base import EntryKey
from kvferry.tiers.keys import KeyChain
from kvferry.tiers.prefix_folders import PrefixFolders, find_longest, is_stored

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PrefixBlocks:
    """A stored prefix, and the engine's blocks for a part of it that begins with block `first`."""

    key: EntryKey
    first: int
    block_ids: list[int]


@dataclass
class ExampleMetadata(contract.KVConnectorMetadata):
    """The scheduler's message to the workers for one step."""

    number: int = 0
    loads: list[PrefixBlocks] = field(default_factory=list)
    saves: list[PrefixBlocks] = field(default_factory=list)


@dataclass(frozen=True)
class ExampleHandshakeMetadata(contract.KVConnectorHandshakeMetadata):
    """A worker's message to the scheduler at the start: where this rank keeps its prefixes."""

    folders: PrefixFolders


@dataclass(frozen=True)
class LoadsEnded(contract.KVConnectorWorkerMetadata):
    """The workers' message to the scheduler after steps with loads: their numbers."""

    steps: frozenset[int]

    def aggregate(self, other: contract.KVConnectorWorkerMetadata) -> "LoadsEnded":
        assert isinstance(other, LoadsEnded)
        return LoadsEnded(self.steps | other.steps)


@dataclass
class Prompt:
    """The scheduler's notes on one request."""

    keys: Sequence[EntryKey]  # of the prefixes of 1, 2, … full blocks
    must_save: bool
    first: int = 0  # the first block to load
    num_stored: int = 0  # blocks of the longest stored prefix


def note(stats: OffloadStats, counter: str, error: OSError | None = None) -> None:
    """Count an event, and log its error."""
    stats.add_tiers({"example": {counter: 1}})
    if error is not None:
        _log.warning("%s: %s", counter.replace("_", " "), error)


class ExampleScheduler(contract.SchedulerSide):
    """Decides what is loaded and saved."""

    def __init__(self, config: contract.ConnectorConfig, cache: contract.KVCacheConfig) -> None:
        self._transfer = config.kv_transfer
        self._block_size = cache.block_size
        self._ranks: list[PrefixFolders] = []
        self._prompts: dict[str, Prompt] = {}
        self._unconfirmed: set[int] = set()  # steps with loads that may not be over
        self._step = ExampleMetadata()
        self._stats = OffloadStats()

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        self._ranks = [rank.folders for rank in metadata.values()]

    def on_new_request(self, request: contract.Request) -> None:
        if request.cache_salt is not None:
            chain = KeyChain(self._block_size, request.cache_salt)
            # An engine always computes the last token of a prompt.
            chain.extend(request.prompt_token_ids, request.num_prompt_tokens - 1)
            keys, is_producer = chain.keys[0], self._transfer.is_kv_producer
            must_save = is_producer and bool(keys) and not is_stored(self._ranks, keys[-1])
            self._prompts[request.request_id] = Prompt(keys, must_save)

    def get_num_new_matched_tokens(
        self, request: contract.Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        prompt, size = self._prompts.get(request.request_id), self._block_size
        if not (prompt and self._transfer.is_kv_consumer) or num_computed_tokens % size:
            return 0, False
        prompt.first = num_computed_tokens // size
        # Checked at every attempt: the files may have changed since the last one.
        prompt.num_stored, damages = find_longest(self._ranks, prompt.keys, prompt.first)
        for damage in damages:
            note(self._stats, "refused", damage)
        return max(0, prompt.num_stored - prompt.first) * size, False

    def update_state_after_alloc(
        self, request: contract.Request, blocks: contract.KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if num_external_tokens:
            prompt = self._prompts[request.request_id]
            end = prompt.first + num_external_tokens // self._block_size
            block_ids = blocks.get_block_ids()[0][prompt.first : end]
            key = prompt.keys[prompt.num_stored - 1]
            self._step.loads.append(PrefixBlocks(key, prompt.first, block_ids))
            note(self._stats, "loads")

    def build_connector_meta(self, scheduler_output: contract.Step) -> ExampleMetadata:
        step, self._step = self._step, ExampleMetadata(self._step.number + 1)
        self._unconfirmed |= {step.number} if step.loads else set()
        # KV that was computed from a load that failed must not be saved, on any rank.
        for part in () if self._unconfirmed else scheduler_output.slices:
            prompt, end = self._prompts.get(part.request_id), part.start + part.num_tokens
            if prompt and prompt.must_save and len(prompt.keys) <= end // self._block_size:
                prompt.must_save = False
                block_ids = list(part.block_ids[0][: len(prompt.keys)])
                step.saves.append(PrefixBlocks(prompt.keys[-1], 0, block_ids))
        return step

    def update_connector_output(self, connector_output: contract.KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, LoadsEnded):
            self._unconfirmed -= report.steps

    def needs_slices(self, request_id: str) -> bool:
        return request_id in self._prompts and self._prompts[request_id].must_save

    def request_finished_all_groups(
        self, request: contract.Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        self._prompts.pop(request.request_id, None)
        return False, None

    def reset_cache(self) -> None:
        self._prompts.clear()

    def get_kv_connector_stats(self) -> OffloadStats | None:
        return self._stats.drain()


class ExampleWorker(contract.WorkerSide):
    """Loads and saves the layers of one rank."""

    def __init__(self, config: contract.ConnectorConfig, cache: contract.KVCacheConfig) -> None:
        self._config, self._cache_config = config, cache
        self._step = ExampleMetadata()
        self._failed: list[PrefixBlocks] = []
        self._stats = OffloadStats()

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        config, self._caches = self._config, kv_caches
        geometry = geometry_of(config, self._cache_config, kv_caches)
        namespace = chunk_namespace(config, self._cache_config, geometry, 1)
        assert isinstance(config.kv_transfer.extra, ExampleExtraConfig)
        root = config.kv_transfer.extra.shared_storage_path
        self._folders = PrefixFolders(root, namespace, config.secret, geometry.num_blocks)

    def get_handshake_metadata(self) -> ExampleHandshakeMetadata:
        return ExampleHandshakeMetadata(self._folders)

    def bind_connector_metadata(self, metadata: contract.KVConnectorMetadata) -> None:
        assert isinstance(metadata, ExampleMetadata)
        self._step, self._failed = metadata, []
        for load in self._step.loads:
            try:
                for layer, cache in self._caches.items():
                    data = self._folders.read(load.key, layer)
                    rows = safetensors.torch.load(data)["kv"][load.first :][: len(load.block_ids)]
                    cache[load.block_ids] = rows.to(cache.device)
            except OSError as error:
                self._failed.append(load)
                note(self._stats, "failed_loads", error)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kw: Any) -> None:
        # A layer that shares the cache of another layer has none of its own.
        for save in self._step.saves if layer_name in self._caches else ():
            rows = self._caches[layer_name][save.block_ids].cpu().contiguous()
            self._folders.write(save.key, layer_name, safetensors.torch.save({"kv": rows}))

    def wait_for_save(self) -> None:
        for save in self._step.saves:
            error = self._folders.publish(save.key)
            note(self._stats, "failed_stores" if error else "stores", error)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return {block for load in self._failed for block in load.block_ids}

    def build_connector_worker_meta(self) -> LoadsEnded | None:
        return LoadsEnded(frozenset({self._step.number})) if self._step.loads else None

    def get_kv_connector_stats(self) -> OffloadStats | None:
        return self._stats.drain()


ExampleConnector = contract.ConnectorDescription(
    ExampleScheduler,
    ExampleWorker,
    loads_are_optional=True,
    supports_hma=False,
    requires_kv_delivery=False,
    needs_polling=True,
)
