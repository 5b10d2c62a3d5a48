"""Tests `OffloadingConnector` with the calls an engine makes: how many tokens it claims, what it
stores and keeps, and that no state remains. The workers, their threads, the host pool and the disk
are real.
"""

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.connectors.event_reader import Reader
from tests.connectors.pair import (
    BLOCK_SIZE,
    DEADLINE_S,
    NUM_BLOCKS,
    Blocks,
    CacheTensor,
    EngineRequest,
    MemoryKit,
)
from tests.tiers.faulty import GatedCopier

from kvferry.config import KVTransferConfig, OffloadingExtraConfig, SideChannelConfig
from kvferry.connectors.aggregator import KVOutputAggregator
from kvferry.connectors.contract import (
    ConnectorConfig,
    KVCacheConfig,
    KVCacheGroup,
    KVConnectorOutput,
    KVConnectorRole,
    ModelIdentity,
    ParallelConfig,
    Request,
    RequestStatus,
)
from kvferry.connectors.factory import KVConnectorFactory
from kvferry.connectors.offloading.break_even import MIN_SAMPLES
from kvferry.connectors.offloading.connector import OffloadingConnector
from kvferry.connectors.offloading.events import HashedBlocks
from kvferry.connectors.offloading.metadata import (
    LoadTime,
    OffloadingHandshakeMetadata,
    OffloadingWorkerMetadata,
)
from kvferry.connectors.offloading.scheduler import OffloadingScheduler
from kvferry.connectors.offloading.settings import open_tiers
from kvferry.connectors.offloading.stores import SeenChunks
from kvferry.errors import ConfigError
from kvferry.protocol.tickets import HOLE
from kvferry.tiers.base import ObjectKey
from kvferry.tiers.commands import EndStores, OffloadCommand, StoreChunks, VoidStores
from kvferry.tiers.disk import DiskTier
from kvferry.tiers.host_pool import HostPool
from kvferry.tiers.keys import KeyChain, Namespace
from kvferry.tiers.policies import LruPolicy
from kvferry.tiers.pool_segment import segment_paths
from kvferry.transports.memory import MemoryNetwork

FULL = KVCacheGroup(("layer.0", "layer.1"))
WINDOW = KVCacheGroup(("layer.2", "layer.3"), sliding_window=6)
TOKENS = list(range(100, 118))
"""Four blocks and two tokens."""
MODEL = ModelIdentity("Tiny", "abc", 4, 2, 8, "float32")


@dataclass(frozen=True)
class Slice:
    request_id: str
    start: int
    block_ids: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Step:
    """What the connector reads of an engine's step."""

    slices: tuple[Slice, ...] = ()
    preempted_req_ids: frozenset[str] = frozenset()
    total_num_scheduled_tokens: int = 0


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
        self.commands: list[OffloadCommand] = []
        self.freed: set[str] = set()
        self.loaded: set[str] = set()
        self.failed: set[str] = set()
        self.reader = Reader()
        self.num_contents_reports = 0

    def _connector(self, role: KVConnectorRole, rank: int) -> OffloadingConnector:
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
        assert isinstance(made, OffloadingConnector)
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
                    if block != HOLE:
                        values[block] = kv_of(tokens, index, layer, rank)

    def has(self, tokens: Sequence[int], index: int, *tables: Sequence[int]) -> bool:
        """Whether a block holds the KV of these tokens, on every rank and in every layer."""
        return all(
            bool((values[block] == kv_of(tokens, index, layer, rank)).all())
            for rank, memory in enumerate(self.memory)
            for layer, values in memory.items()
            if (block := self.table_of(layer, tables)[index]) != HOLE
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

    def commands_of(self, kind: type[OffloadCommand]) -> list[Any]:
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


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Side]]:
    sides: list[Side] = []

    def make(**more: Any) -> Side:
        sides.append(Side(tmp_path, **more))
        return sides[-1]

    yield make
    for side in sides:
        side.close()
    assert not [
        thread.name for thread in threading.enumerate() if thread.name.startswith("kvferry")
    ]


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


# -- stores and loads --


@pytest.mark.parametrize("tiers", [["cpu"], ["disk"], ["cpu", "disk"]])
def test_a_prompt_is_loaded_by_the_next_request(start: Start, tiers: list[str]) -> None:
    side = start(tiers=tiers)
    side.run("a", TOKENS, [1, 2, 3, 4, 5])
    if "cpu" not in tiers:
        side.step_until(lambda: len(objects(side)) == 4)
    request = side.arrive("b", TOKENS)
    assert side.ask(request) == 16
    side.load(request, 16, [11, 12, 13, 14])
    assert side.loaded == {"b"}
    assert all(side.has(TOKENS, index, [11, 12, 13, 14]) for index in range(4))
    assert not side.finish(request, [11, 12, 13, 14])


def test_a_request_without_a_known_salt_is_neither_stored_nor_loaded(start: Start) -> None:
    side = start()
    side.run("a", TOKENS, [1, 2, 3, 4, 5], cache_salt=None)
    assert not side.commands
    side.run("b", TOKENS, [1, 2, 3, 4, 5])
    request = side.arrive("c", TOKENS, cache_salt=None)
    assert side.ask(request) == 0
    other = side.arrive("d", TOKENS, cache_salt="another tenant")
    assert side.ask(other) == 0


@pytest.mark.parametrize(("num_local", "claimed"), [(0, 16), (4, 0), (8, 8), (12, 0), (16, 0)])
def test_a_local_prefix_that_ends_within_a_chunk_prevents_the_load(
    start: Start, num_local: int, claimed: int
) -> None:
    """Its last block may be shared with other requests, and a chunk is loaded whole."""
    side = start(extra={"blocks_per_chunk": 2})
    side.run("a", TOKENS, [1, 2, 3, 4, 5])
    request = side.arrive("b", TOKENS)
    assert side.ask(request, num_local) == claimed
    if claimed:
        before = side.memory[0]["layer.0"][[6, 7]].copy()
        side.load(request, claimed, [*[6, 7][: num_local // 4], 11, 12, 13, 14])
        assert (side.memory[0]["layer.0"][[6, 7]] == before).all()


def test_chunks_that_the_engine_has_itself_need_not_be_in_a_tier(start: Start) -> None:
    side = start()
    side.run("a", TOKENS, [1, 2, 3, 4, 5])
    damage_chunk(side, TOKENS, 0)
    request = side.arrive("b", TOKENS)
    side.load(request, 16 * (side.ask(request) == 16), [11, 12, 13, 14])
    assert side.failed == {"b"}, "the damaged row is gone now"
    assert side.ask(side.arrive("c", TOKENS)) == 0
    assert side.ask(side.arrive("d", TOKENS), 4) == 12


def damage_chunk(side: Side, tokens: list[int], index: int) -> None:
    """Damage a chunk's row in the host pool."""
    (path,) = segment_paths(side.folder / "pool")
    first_layer = side.groups[0].layer_names[0]
    contents = np.float32(kv_of(tokens, index, first_layer, 0)).tobytes()
    data = path.read_bytes()
    at = data.index(8 * contents)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"damage")


def test_the_output_of_a_preempted_request_is_loaded_with_its_prompt(start: Start) -> None:
    side = start(extra={"offload_prompt_only": False})
    side.run("a", TOKENS, [1, 2, 3, 4, 5])
    longer = [*TOKENS, 7, 8, 9]
    side.run("b", longer, [1, 2, 3, 4, 5, 6])
    request = side.arrive("c", TOKENS)
    request.output_token_ids = [7, 8, 9]
    assert side.ask(request) == 20


def test_output_is_stored_when_the_request_ends_if_asked_for(start: Start) -> None:
    side = start(extra={"offload_prompt_only": False})
    request = side.arrive("a", TOKENS)
    request.output_token_ids = [7, 8, 9]
    # Of the tokens that are computed, the engine may have dropped the last.
    request.num_computed_tokens = 24
    side.fill(request.all_token_ids, [1, 2, 3, 4, 5, 6])
    side.step(Slice("a", 18, ((1, 2, 3, 4, 5),)))
    assert side.finish(request, [1, 2, 3, 4, 5, 6])
    assert [len(command.chunks) for command in side.commands_of(StoreChunks)] == [4, 1]
    assert side.ask(side.arrive("b", [*TOKENS, 7, 8, 9])) == 20


# -- blocks --


def test_a_request_that_finishes_during_its_copies_keeps_its_blocks(start: Start) -> None:
    side = start()
    side.copiers[0].saves.clear()
    request = side.arrive("a", TOKENS)
    request.num_computed_tokens = len(TOKENS)
    tables = ([1, 2, 3, 4, 5],)
    for _ in range(20):
        side.step(Slice("a", 18, ((1, 2, 3, 4, 5),)))
    assert side.scheduler.request_finished_all_groups(request, tables) == (True, None)
    side.step()
    assert side.commands_of(EndStores) == [EndStores("a")]
    assert side.scheduler.has_pending_block_frees()
    assert not side.freed
    side.copiers[0].saves.set()
    side.step_until(lambda: side.freed == {"a"})
    assert not side.scheduler.has_pending_block_frees()
    assert side.ask(side.arrive("b", TOKENS)) == 16


def test_a_preempted_request_stores_its_prompt_when_it_has_computed_it_again(start: Start) -> None:
    side = start()
    side.copiers[0].saves.clear()
    request = side.arrive("a", TOKENS)
    side.step(Slice("a", 18, ((1, 2, 3, 4, 5),)))
    assert not side.scheduler.is_watched("a")
    side.step(preempted=["a"])
    assert side.commands_of(VoidStores) == [VoidStores("a")]
    # The engine computes another request in the same blocks.
    side.fill([1, 2, 3] * 6, [1, 2, 3, 4])
    side.copiers[0].saves.set()
    assert side.scheduler.is_watched("a")
    side.step_until(lambda: "probe" in probe(side))
    side.fill(TOKENS, [6, 7, 8, 9, 10])
    request.num_computed_tokens = 18
    side.step(Slice("a", 18, ((6, 7, 8, 9, 10),)))
    side.finish(request, [6, 7, 8, 9, 10])
    check_loads(side, TOKENS)


def probe(side: Side) -> set[str]:
    """Run a short request to its end: all earlier copies have ended then."""
    if "probe" not in side.freed:
        side.run("probe", [5, 5, 5, 5], [20])
    return side.freed | {"probe"}


def check_loads(side: Side, tokens: list[int]) -> None:
    request = side.arrive("check", tokens)
    assert side.ask(request) == 16
    side.load(request, 16, [11, 12, 13, 14])
    assert all(side.has(tokens, index, [11, 12, 13, 14]) for index in range(4))


def test_a_request_that_was_preempted_and_then_aborted_stores_nothing(start: Start) -> None:
    """The engine reports the preemption with the next step, after the abort."""
    side = start()
    side.copiers[0].saves.clear()
    request = side.arrive("a", TOKENS)
    side.step(Slice("a", 18, ((1, 2, 3, 4, 5),)))
    request.num_computed_tokens = 0
    assert not side.finish(request, [])
    side.fill([1, 2, 3] * 6, [1, 2, 3, 4])
    side.step(preempted=["a"])
    side.copiers[0].saves.set()
    probe(side)
    assert side.ask(side.arrive("b", TOKENS)) == 0


# -- sliding windows --

TABLES = ((1, 2, 3, 4, 5), (21, 22, 23, 24, 25))


def test_a_window_that_moves_on_during_a_copy_makes_the_store_void(start: Start) -> None:
    side = start(groups=(FULL, WINDOW))
    side.copiers[0].saves.clear()
    request = side.arrive("a", TOKENS)
    side.fill(TOKENS, *TABLES)
    side.step(Slice("a", 18, TABLES))
    for _ in range(20):
        side.step(Slice("a", 19, TABLES))
    moved = (TABLES[0], (HOLE, HOLE, 23, 24, 25))
    side.step(Slice("a", 22, moved))
    (void,) = side.commands_of(VoidStores)
    assert len(void.keys) == 2
    side.fill([1, 2, 3] * 6, [], [21, 22])
    side.copiers[0].saves.set()
    side.step_until(lambda: not side.scheduler.is_watched("a"), Slice("a", 22, moved))
    request.num_computed_tokens = 22
    assert not side.finish(request, *moved)
    # The token after the prefix sees the chunks 2 and 3 of the window, and only a shorter prefix
    # would need those that are void.
    check_windows(side)


def check_windows(side: Side) -> None:
    request = side.arrive("check", TOKENS)
    assert side.ask(request) == 16
    side.load(request, 16, [11, 12, 13, 14], [HOLE, HOLE, 16, 17])
    assert all(
        side.has(TOKENS, index, [11, 12, 13, 14], [HOLE, HOLE, 16, 17]) for index in range(4)
    )
    shorter = side.arrive("shorter", TOKENS[:9])
    assert side.ask(shorter) == 0


def test_a_running_request_that_a_step_leaves_out_makes_its_window_void(start: Start) -> None:
    """The engine may have freed blocks of its window, and does not show them."""
    side = start(groups=(FULL, WINDOW))
    side.copiers[0].saves.clear()
    side.arrive("a", TOKENS)
    side.fill(TOKENS, *TABLES)
    side.step(Slice("a", 18, TABLES))
    side.step()
    side.step()
    (void,) = side.commands_of(VoidStores)
    assert len(void.keys) == 4


def test_with_a_window_the_last_token_is_left_out(start: Start) -> None:
    """The engine computes it again, and it sees one token more than the token after it."""
    side = start(groups=(FULL, KVCacheGroup(("layer.2",), sliding_window=5)))
    prompt = TOKENS[:16]
    side.run("a", prompt, [1, 2, 3, 4], [21, 22, 23, 24])
    assert side.ask(side.arrive("b", prompt)) == 15
    # Of another prompt, the blocks that only the last token sees have left the window.
    other = [*range(16)]
    side.run("c", other, [1, 2, 3, 4], [HOLE, HOLE, HOLE, 24])
    assert side.ask(side.arrive("d", other)) == 0
    assert side.ask(side.arrive("e", [*other, 1])) == 16


def test_a_model_with_windows_has_chunks_of_one_block(start: Start) -> None:
    with pytest.raises(ConfigError, match="sliding windows"):
        start(groups=(FULL, WINDOW), extra={"blocks_per_chunk": 2})


# -- lookups --


def objects(side: Side) -> list[Path]:
    """The objects on the disk of all ranks."""
    files = (path for path in (side.folder / "disk").rglob("*") if path.is_file())
    return sorted(path for path in files if re.fullmatch("[0-9a-f]{64}", path.name))


def remove_chunk(side: Side, tokens: list[int], index: int) -> None:
    """Remove the object of one chunk from the disk."""
    (path,) = objects_of(side, tokens, index)
    path.unlink()


def objects_of(side: Side, tokens: list[int], index: int) -> list[Path]:
    """The objects of one chunk, of all ranks."""
    chain = KeyChain(BLOCK_SIZE, "")
    chain.extend(tokens, len(tokens))
    return [path for path in objects(side) if chain.keys[0][index].hex() in path.name]


def test_a_lookup_is_pending_until_the_disk_has_answered_or_the_time_is_over(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = start(tiers=["disk"], extra={"lookup_timeout": 0.05})
    side.run("a", TOKENS, [1, 2, 3, 4, 5])
    side.step_until(lambda: len(objects(side)) == 4)
    is_answering = threading.Event()
    find_prefix = DiskTier.find_prefix

    def find_late(tier: DiskTier, keys: Sequence[ObjectKey]) -> int:
        assert is_answering.wait(DEADLINE_S)
        return find_prefix(tier, keys)

    monkeypatch.setattr(DiskTier, "find_prefix", find_late)
    request = side.arrive("b", TOKENS)
    assert side.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    assert side.ask(request) == 0, "the time is over"
    is_answering.set()
    assert side.ask(side.arrive("c", TOKENS)) == 16
    stats = side.scheduler.get_kv_connector_stats()
    assert stats is not None
    assert stats.to_dict()["lookups"]["lookup_timeouts"] == 1


def test_a_failed_load_is_tried_once_more_without_the_missing_chunks(start: Start) -> None:
    side = start(tiers=["disk"])
    side.run("a", TOKENS, [1, 2, 3, 4, 5])
    side.step_until(lambda: len(objects(side)) == 4)
    request = side.arrive("b", TOKENS)
    assert side.ask(request) == 16
    remove_chunk(side, TOKENS, 2)
    side.load(request, 16, [11, 12, 13, 14])
    assert side.failed == {"b"}
    assert side.ask(request) == 8
    side.failed.clear()
    side.load(request, 8, [11, 12])
    assert side.loaded == {"b"}
    assert side.has(TOKENS, 1, [11, 12])


def test_a_load_that_fails_twice_is_not_tried_again(start: Start) -> None:
    side = start(tiers=["disk"])
    side.run("a", TOKENS, [1, 2, 3, 4, 5])
    side.step_until(lambda: len(objects(side)) == 4)
    request = side.arrive("b", TOKENS)
    for index, claimed in ((3, 16), (1, 12)):
        assert side.ask(request) == claimed
        remove_chunk(side, TOKENS, index)
        side.failed.clear()
        side.load(request, claimed, [11, 12, 13, 14][: claimed // 4])
        assert side.failed == {"b"}
    assert side.ask(request) == 0


def test_a_request_that_ends_during_its_load_keeps_its_blocks_until_the_copy_ends(
    start: Start,
) -> None:
    side = start()
    side.run("a", TOKENS, [1, 2, 3, 4, 5])
    side.copiers[0].loads.clear()
    request = side.arrive("b", TOKENS)
    assert side.ask(request) == 16
    side.scheduler.update_state_after_alloc(request, Blocks(([11, 12, 13, 14],)), 16)
    side.step()
    assert side.scheduler.request_finished(request, [11, 12, 13, 14]) == (False, None)
    side.step()
    assert not side.loaded | side.failed
    side.copiers[0].loads.set()
    side.step_until(lambda: side.failed == {"b"})


# -- reset --


def test_after_a_reset_no_request_of_before_loads_or_stores(start: Start) -> None:
    side = start(extra={"offload_prompt_only": False})
    side.run("a", TOKENS, [1, 2, 3, 4, 5])
    side.copiers[0].loads.clear()
    loading, waiting, running = (side.arrive(name, TOKENS) for name in ("b", "c", "d"))
    assert side.ask(loading) == side.ask(waiting) == 16
    side.scheduler.update_state_after_alloc(loading, Blocks(([11, 12, 13, 14],)), 16)
    side.step()
    side.scheduler.reset_cache()
    side.copiers[0].loads.set()
    side.step_until(lambda: "b" in side.loaded | side.failed)
    side.commands.clear()
    for request in (loading, waiting, running):
        assert side.ask(request) == 0
        request.num_computed_tokens = 18
        side.step(Slice(request.request_id, 18, ((1, 2, 3, 4, 5),)))
        assert not side.finish(request, [1, 2, 3, 4, 5])
    assert not side.commands
    assert side.ask(side.arrive("e", TOKENS)) == 0, "the pool was cleared"


def test_a_withdrawn_request_stores_nothing(start: Start) -> None:
    side = start()
    side.copiers[0].saves.clear()
    request = side.arrive("a", TOKENS)
    side.step(Slice("a", 10, ((1, 2, 3),)))
    side.scheduler.withdraw("a")
    side.step(Slice("a", 18, ((1, 2, 3, 4, 5),)))
    request.num_computed_tokens = 18
    assert not side.finish(request, [1, 2, 3, 4, 5])
    side.copiers[0].saves.set()
    probe(side)
    assert side.ask(side.arrive("b", TOKENS)) == 0


# -- ranks --


def test_a_chunk_counts_only_if_every_rank_has_it(start: Start) -> None:
    side = start(tiers=["disk"], tp_size=2)
    side.run("a", TOKENS, [1, 2, 3, 4, 5])
    side.step_until(lambda: len(objects(side)) == 8)
    _, of_rank_1 = objects_of(side, TOKENS, 2)
    of_rank_1.unlink()
    request = side.arrive("b", TOKENS)
    assert side.ask(request) == 8
    side.load(request, 8, [11, 12])
    assert side.has(TOKENS, 0, [11, 12])
    assert side.has(TOKENS, 1, [11, 12])


def test_blocks_are_kept_until_every_rank_has_copied_them(start: Start) -> None:
    side = start(tp_size=2)
    side.copiers[1].saves.clear()
    request = side.arrive("a", TOKENS)
    request.num_computed_tokens = 18
    side.step(Slice("a", 18, ((1, 2, 3, 4, 5),)))
    for _ in range(5):
        side.step()
        time.sleep(0.002)
    assert side.scheduler.request_finished(request, [1, 2, 3, 4, 5]) == (True, None)
    side.step()
    assert not side.freed
    side.copiers[1].saves.set()
    side.step_until(lambda: side.freed == {"a"})


# -- what is worth it --


def test_a_tier_stores_what_was_needed_often_enough() -> None:
    seen = SeenChunks({"cpu": 1, "disk": 2}, max_chunks=2)
    keys = [ObjectKey(bytes([n]) * 32) for n in range(3)]
    assert seen.tiers_of_all is None
    seen.note_uses(keys[:1])
    assert seen.tiers_to_store(keys[0]) == ("cpu",)
    seen.note_uses(keys[:2])
    assert seen.tiers_to_store(keys[0]) == ("cpu", "disk")
    seen.note_uses(keys[1:])
    assert seen.tiers_to_store(keys[0]) == (), "forgotten: only two chunks are counted"
    assert SeenChunks({"cpu": 1}, max_chunks=2).tiers_of_all == ("cpu",)


def test_a_chunk_that_one_request_computes_twice_was_needed_once(start: Start) -> None:
    side = start(extra={"store_threshold": 2})
    side.arrive("a", TOKENS)
    side.step(Slice("a", 18, ((1, 2, 3, 4, 5),)))
    side.step(preempted=["a"])
    side.step(Slice("a", 18, ((1, 2, 3, 4, 5),)))
    assert not side.commands_of(StoreChunks)
    side.arrive("b", TOKENS)
    side.step(Slice("b", 18, ((1, 2, 3, 4, 5),)))
    assert len(side.commands_of(StoreChunks)) == 1


class Timed:
    """A scheduler half with a clock of the test, and a pool that has the prompt."""

    def __init__(self, folder: Path) -> None:
        self.now = 100.0
        factors = {"model": "tiny"}
        self.pool = HostPool.open(folder, Namespace(factors), 4096, 8, LruPolicy)
        chain = KeyChain(BLOCK_SIZE, "")
        chain.extend(TOKENS, len(TOKENS))
        for key in chain.keys[0]:
            row = self.pool.reserve(key)
            assert row is not None
            self.pool.publish(row, 7)
        transfer = KVTransferConfig.from_mapping(
            {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "engine_id": "a",
                "kv_connector_extra_config": {"tiers": [{"cpu": 32768}], "pool_path": str(folder)},
            }
        )
        assert isinstance(transfer.extra, OffloadingExtraConfig)
        config = ConnectorConfig(
            transfer,
            MODEL,
            ParallelConfig(),
            SideChannelConfig(port=0),
            b"secret",
            "epoch",
            MemoryKit(MemoryNetwork()),
        )
        cache = KVCacheConfig(NUM_BLOCKS, BLOCK_SIZE, (FULL,), "HND", 1, 8, "float32")
        self.half = OffloadingScheduler(config, cache, transfer.extra, lambda: self.now)
        self.half.serve({0: OffloadingHandshakeMetadata(0, factors, (1000,))})

    def build(self, num_tokens: int) -> int | None:
        return self.half.build_connector_meta((), (), num_tokens).timed_step

    def output(self, step: int | None, *times: LoadTime) -> None:
        output = KVConnectorOutput()
        output.kv_connector_worker_meta = OffloadingWorkerMetadata(
            times=list(times), timed_step=step
        )
        self.half.take_output(output)

    def claimed(self, name: str) -> int | None:
        request = EngineRequest(name, TOKENS)
        self.half.on_new_request(request)
        return self.half.get_num_new_matched_tokens(request, 0)[0]

    def close(self) -> None:
        self.half.close()
        self.pool.close()


@pytest.fixture
def timed(tmp_path: Path) -> Iterator[Timed]:
    made = Timed(tmp_path / "pool")
    yield made
    made.close()


@pytest.mark.parametrize(("load_s", "claimed"), [(0.5, 16), (2.0, 0)])
def test_a_load_is_claimed_if_it_was_measured_to_be_faster(
    timed: Timed, load_s: float, claimed: int
) -> None:
    """The engine computes 16 tokens in 1 s."""
    assert timed.claimed("before anything was measured") == 16
    for _ in range(MIN_SAMPLES):
        step = timed.build(160)
        timed.now += 10
        timed.output(step, LoadTime(load_s, {"cpu": 4000}))
    assert timed.claimed("b") == claimed


@pytest.mark.parametrize(("load_s", "claimed"), [(0.5, 16), (2.0, 0)])
def test_a_steps_time_begins_when_the_step_before_has_ended(
    timed: Timed, load_s: float, claimed: int
) -> None:
    """With async scheduling, a step is built while the one before is running: each prefill of 10 s
    is built 100 s before the end of a step that decodes, and the next step 1 s later.
    """
    for _ in range(MIN_SAMPLES):
        assert timed.build(1) is None
        prefill = timed.build(160)
        timed.now += 100
        timed.output(None)
        timed.build(1)
        timed.now += 10
        timed.output(prefill, LoadTime(load_s, {"cpu": 4000}))
        timed.output(None)
    assert timed.claimed("b") == claimed


# -- events --


@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_events_name_the_blocks_in_each_tier_until_a_reset(
    start: Start, tp_size: int, blocks_per_chunk: int
) -> None:
    side = start(
        tiers=["cpu", "disk"],
        tp_size=tp_size,
        publishes_events=True,
        extra={"blocks_per_chunk": blocks_per_chunk},
    )
    side.run("a", TOKENS, [1, 2, 3, 4, 5])
    everything = known("cpu", TOKENS, 4) | known("disk", TOKENS, 4)
    side.step_until(lambda: side.reader.known == everything)
    side.scheduler.reset_cache()
    side.step()
    assert not side.reader.known


@pytest.mark.parametrize("tier", ["cpu", "disk"])
def test_events_name_blocks_of_an_earlier_engine_once_a_request_has_used_them(
    start: Start, tier: str
) -> None:
    first = start(tiers=["cpu", "disk"])
    first.run("a", TOKENS, [1, 2, 3, 4, 5])
    first.step_until(lambda: len(objects(first)) == 4)
    first.close()
    side = start(tiers=[tier], publishes_events=True)
    side.step()
    assert not side.reader.known
    request = side.arrive("b", TOKENS)
    side.load(request, side.ask(request) or 0, [11, 12, 13, 14])
    side.step(Slice("b", 16, ((11, 12, 13, 14),)))
    side.step_until(lambda: side.reader.known == known(tier, TOKENS, 4))


def test_each_group_has_events_of_its_own(start: Start) -> None:
    side = start(groups=(FULL, WINDOW), publishes_events=True)
    side.run("a", TOKENS, [1, 2, 3, 4, 5], [HOLE, HOLE, 6, 7, 8])
    window = known("cpu", TOKENS, 4, group=1) - known("cpu", TOKENS, 2, group=1)
    side.step_until(lambda: side.reader.known == known("cpu", TOKENS, 4) | window)


def test_an_engine_that_publishes_no_events_makes_none(start: Start) -> None:
    side = start(tiers=["cpu", "disk"])
    side.run("a", TOKENS, [1, 2, 3, 4, 5])
    side.step_until(lambda: len(objects(side)) == 4)
    assert side.num_contents_reports == 0
    assert not side.reader.known


def test_a_rank_that_would_lend_mooncake_too_little_is_refused() -> None:
    extra = OffloadingExtraConfig.from_mapping(
        {"tiers": [{"mooncake": {"master": "127.0.0.1:9", "size": "31MiB"}}]}, "OffloadingConnector"
    )
    with pytest.raises(ConfigError, match="lends 16252928 bytes of each rank"):
        open_tiers(extra, Namespace({}), b"secret", 2)
