"""An engine with tiers, for tests of `OffloadingConnector`: the test makes the calls of an engine.
The workers, their threads, the host pool and the disk are real.
"""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tests.connectors.event_reader import Reader
from tests.connectors.pair import (
    BLOCK_SIZE,
    DEADLINE_S,
    NUM_BLOCKS,
    Blocks,
    CacheTensor,
    EngineRequest,
    MemoryKit,
    Slice,
    Step,
)
from tests.tiers.faulty import GatedCopier

from kvferry.config import KVTransferConfig, SideChannelConfig
from kvferry.connectors.aggregator import KVOutputAggregator
from kvferry.connectors.contract import (
    ConnectorConfig,
    KVCacheConfig,
    KVCacheGroup,
    KVConnectorBase_V1,
    KVConnectorOutput,
    KVConnectorRole,
    ModelIdentity,
    ParallelConfig,
    Request,
    RequestStatus,
)
from kvferry.connectors.factory import KVConnectorFactory
from kvferry.connectors.offloading.events import HashedBlocks
from kvferry.connectors.offloading.metadata import (
    EndStores,
    OffloadingWorkerMetadata,
)
from kvferry.protocol.tickets import NO_BLOCK
from kvferry.tiers.commands import OffloadCommand
from kvferry.tiers.keys import KeyChain
from kvferry.transports.memory import MemoryNetwork

FULL = KVCacheGroup(("layer.0", "layer.1"))
WINDOW = KVCacheGroup(("layer.2", "layer.3"), sliding_window=6)
TOKENS = list(range(100, 118))
"""Four blocks and two tokens."""
MODEL = ModelIdentity("Tiny", "abc", 4, 2, 8, "float32")


@dataclass
class Side:
    """An engine with tiers: its connector in the scheduler's role and in that of every rank."""

    folder: Path
    extra: dict[str, Any] = field(default_factory=dict)
    groups: Sequence[KVCacheGroup] = (FULL,)
    tp_size: int = 1
    tiers: Sequence[str] = ("cpu",)
    publishes_events: bool = False

    def __post_init__(self) -> None:
        sizes = {
            "cpu": {"cpu": "1MiB"},
            "disk": {"disk": {"path": str(self.folder / "disk"), "size": "64MiB"}},
        }
        extra: dict[str, Any] = {
            "tiers": [sizes[tier] for tier in self.tiers],
            "pool_path": str(self.folder / "pool"),
            "break_even": False,
        }
        self.transfer = KVTransferConfig.from_mapping(
            {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "engine_id": "a",
                "kv_connector_extra_config": extra | self.extra,
            }
        )
        self.kit = MemoryKit(MemoryNetwork())
        heads = 2 // self.tp_size
        self.cache = KVCacheConfig(
            NUM_BLOCKS, BLOCK_SIZE, tuple(self.groups), "HND", heads, 8, "float32"
        )
        layers = [layer for group in self.groups for layer in group.layer_names]
        self.memory = [
            {layer: np.zeros((NUM_BLOCKS, heads, BLOCK_SIZE, 16), np.float32) for layer in layers}
            for _ in range(self.tp_size)
        ]
        self.workers = []
        for rank, memory in enumerate(self.memory):
            worker = self._connector(KVConnectorRole.WORKER, rank)
            worker.register_kv_caches(
                {layer: CacheTensor(array) for layer, array in memory.items()}  # type: ignore[arg-type]
            )
            self.workers.append(worker)
        self.scheduler = self._connector(KVConnectorRole.SCHEDULER, 0)
        metadata = {
            rank: worker.get_handshake_metadata() for rank, worker in enumerate(self.workers)
        }
        self.scheduler.set_xfer_handshake_metadata(metadata)  # type: ignore[arg-type]
        self.aggregator = KVOutputAggregator(self.tp_size)
        self.commands: list[OffloadCommand | EndStores] = []
        self.freed: set[str] = set()
        self.loaded: set[str] = set()
        self.failed: set[str] = set()
        self.reader = Reader()
        self.num_contents_reports = 0

    def _connector(self, role: KVConnectorRole, rank: int) -> KVConnectorBase_V1:
        config = ConnectorConfig(
            self.transfer,
            MODEL,
            ParallelConfig(self.tp_size, rank),
            SideChannelConfig(port=0),
            b"a secret of the cluster",
            "epoch",
            self.kit,
            publishes_kv_events=self.publishes_events,
        )
        made = KVConnectorFactory.create_connector(config, role, self.cache)
        if self.publishes_events and role is KVConnectorRole.SCHEDULER:
            made.publish_events(describe)
        return made

    @property
    def copiers(self) -> list[GatedCopier]:
        return self.kit.copiers

    # -- an engine's calls --

    def step(self, *slices: Slice, preempted: Sequence[str] = ()) -> None:
        metadata = self.scheduler.build_connector_meta(Step(slices, frozenset(preempted)))
        self.commands += metadata.commands  # type: ignore[attr-defined]
        outputs = []
        for worker in self.workers:
            worker.bind_connector_metadata(metadata)
            worker.start_load_kv(None)
            news = worker.get_transfer_results(set())
            output = KVConnectorOutput(
                news.finished_sending, news.finished_recving, news.failed_recving
            )
            output.kv_connector_worker_meta = worker.build_connector_worker_meta()
            worker.clear_connector_metadata()
            outputs.append(output)
        whole = self.aggregator.aggregate(outputs)
        self.scheduler.update_connector_output(whole)
        self.freed |= whole.finished_sending
        self.loaded |= whole.finished_recving - whole.failed_recving
        self.failed |= whole.failed_recving
        report = whole.kv_connector_worker_meta
        if isinstance(report, OffloadingWorkerMetadata):
            self.num_contents_reports += len(report.contents)
        self.reader.apply(list(self.scheduler.take_events()))

    def step_until(self, condition: Callable[[], bool], *slices: Slice) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, (self.commands, self.freed, self.failed)
            self.step(*slices)
            time.sleep(0.001)

    def fill(self, tokens: Sequence[int], *tables: Sequence[int]) -> None:
        """Write the KV of the first tokens, as many as the blocks hold."""
        for rank, memory in enumerate(self.memory):
            for layer, values in memory.items():
                table = self.table_of(layer, tables)
                for index, block in enumerate(table):
                    if block != NO_BLOCK:
                        values[block] = kv_of(tokens, index, layer, rank)

    def has(self, tokens: Sequence[int], index: int, *tables: Sequence[int]) -> bool:
        """Whether a block holds the KV of these tokens, on every rank and in every layer."""
        return all(
            bool((values[block] == kv_of(tokens, index, layer, rank)).all())
            for rank, memory in enumerate(self.memory)
            for layer, values in memory.items()
            if (block := self.table_of(layer, tables)[index]) != NO_BLOCK
        )

    def table_of(self, layer: str, tables: Sequence[Sequence[int]]) -> Sequence[int]:
        (group,) = [n for n, group in enumerate(self.groups) if layer in group.layer_names]
        return tables[group]

    def run(self, name: str, tokens: Sequence[int], *tables: Sequence[int], **more: Any) -> None:
        """Compute a prompt without a load, and wait until its blocks are free."""
        request = self.arrive(name, tokens, **more)
        self.fill(tokens, *tables)
        request.num_computed_tokens = len(tokens)
        self.step(Slice(name, len(tokens), tuple(map(tuple, tables))))
        self.finish(request, *tables)

    def arrive(self, name: str, tokens: Sequence[int], **more: Any) -> EngineRequest:
        request = EngineRequest(name, list(tokens), **more)
        self.scheduler.on_new_request(request)
        return request

    def ask(self, request: EngineRequest, num_local: int = 0) -> int | None:
        """Ask until the connector knows how many tokens it can load."""
        count, _ = self.scheduler.get_num_new_matched_tokens(request, num_local)
        while count is None:
            time.sleep(0.001)
            count, _ = self.scheduler.get_num_new_matched_tokens(request, num_local)
        return count

    def load(self, request: EngineRequest, count: int, *tables: Sequence[int]) -> None:
        blocks = Blocks(tuple(list(table) for table in tables))
        self.scheduler.update_state_after_alloc(request, blocks, count)
        name = request.request_id
        self.step_until(lambda: name in self.loaded | self.failed)

    def finish(self, request: EngineRequest, *tables: Sequence[int]) -> bool:
        """End a request and wait until its blocks are free; whether they were kept at all."""
        request.status = RequestStatus.FINISHED_STOPPED
        tables_of_request = tuple(list(table) for table in tables)
        is_kept, _ = self.scheduler.request_finished_all_groups(request, tables_of_request)
        if is_kept:
            self.step_until(lambda: request.request_id in self.freed)
        return is_kept

    def commands_of(self, kind: type[OffloadCommand | EndStores]) -> list[Any]:
        return [command for command in self.commands if isinstance(command, kind)]

    def close(self) -> None:
        for copier in self.copiers:
            copier.saves.set()
            copier.loads.set()
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.shutdown()


def kv_of(tokens: Sequence[int], index: int, layer: str, rank: int) -> float:
    """The number in a block: it depends on all tokens up to the end of the block."""
    head = tuple(tokens[: (index + 1) * BLOCK_SIZE])
    return float(hash((head, layer, rank)) % 1_000_003)


Start = Callable[..., Side]


def describe(request: Request, tokens: range) -> HashedBlocks:
    """The hash of a block is the tuple of all tokens up to its end."""
    ids = tuple(request.all_token_ids)
    ends = range(tokens.start + BLOCK_SIZE, tokens.stop + 1, BLOCK_SIZE)
    hashes = tuple(ids[:end] for end in ends)
    return HashedBlocks(hashes, ids[: tokens.start] or None, ids[tokens.start : tokens.stop])


def known(tier: str, tokens: Sequence[int], num_blocks: int, group: int = 0) -> set[Any]:
    """What a reader knows of a tier that has the first blocks of a prompt."""
    ends = range(BLOCK_SIZE, num_blocks * BLOCK_SIZE + 1, BLOCK_SIZE)
    return {(tier, group, tuple(tokens[:end])) for end in ends}


def objects(side: Side) -> list[Path]:
    """The objects on the disk of all ranks."""
    files = (path for path in (side.folder / "disk").rglob("*") if path.is_file())
    return sorted(path for path in files if re.fullmatch("[0-9a-f]{64}", path.name))


def objects_of(side: Side, tokens: list[int], index: int) -> list[Path]:
    """The objects of one chunk, of all ranks."""
    chain = KeyChain(BLOCK_SIZE, "")
    chain.extend(tokens, len(tokens))
    return [path for path in objects(side) if chain.keys[0][index].hex() in path.name]


def probe(side: Side) -> set[str]:
    """Run a short request to its end: all earlier copies have ended then."""
    if "probe" not in side.freed:
        side.run("probe", [5, 5, 5, 5], [20])
    return side.freed | {"probe"}
