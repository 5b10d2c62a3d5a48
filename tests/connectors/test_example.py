"""Tests `ExampleConnector` with the calls an engine makes, on real files: D gets exactly the KV
that P has computed, and damage, full disks and other engines' files cost only computation.
"""

import logging
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.connectors.pair import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    Blocks,
    EngineRequest,
    MemoryKit,
    Slice,
    Step,
)
from tests.tiers.forged_prefixes import forge
from tests.tiers.storages import mounted

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
)
from kvferry.connectors.factory import KVConnectorFactory
from kvferry.errors import ConfigError
from kvferry.tiers.envelope import HEADER_BYTES
from kvferry.transports.memory import MemoryNetwork

LAYERS = ("layer.0", "layer.1", "layer.2")
TOKENS = list(range(100, 118))
"""Four full blocks and two tokens."""
MODEL = ModelIdentity("Tiny", "abc", 3, 2, 8, "float32")
BLOCKS = [5, 6, 7, 8, 9]
OTHER_BLOCKS = [20, 21, 22, 23, 24]
SECRET = b"a secret of the cluster"


class Side:
    """An engine: its connector in the scheduler's role and in that of every rank."""

    def __init__(
        self,
        folder: Path,
        role: str = "kv_both",
        tp_size: int = 1,
        model: ModelIdentity = MODEL,
        connector: dict[str, Any] | None = None,
        **cache: Any,
    ) -> None:
        heads = 2 // tp_size
        base = KVCacheConfig(
            NUM_BLOCKS, BLOCK_SIZE, (KVCacheGroup(LAYERS),), "HND", heads, 8, "float32"
        )
        self.cache = replace(base, **cache)
        self.transfer = KVTransferConfig.from_mapping(
            {
                "kv_connector": "ExampleConnector",
                "kv_role": role,
                "kv_connector_extra_config": {"shared_storage_path": str(folder)},
                **(connector or {}),
            }
        )
        self.model, self.tp_size = model, tp_size
        shape = (NUM_BLOCKS, heads, self.cache.block_size, 16)
        self.memory = [{layer: torch.zeros(shape) for layer in LAYERS} for _ in range(tp_size)]
        self.workers = [self._connector(KVConnectorRole.WORKER, n) for n in range(tp_size)]
        for worker, memory in zip(self.workers, self.memory, strict=True):
            worker.register_kv_caches(memory)
        self.scheduler = self._connector(KVConnectorRole.SCHEDULER, 0)
        handshakes = {n: worker.get_handshake_metadata() for n, worker in enumerate(self.workers)}
        self.scheduler.set_xfer_handshake_metadata(handshakes)  # type: ignore[arg-type]
        self.aggregator = KVOutputAggregator(tp_size)
        self.counts: dict[str, float] = {}
        self.skipped_layers: set[str] = set()

    def _connector(self, role: KVConnectorRole, rank: int) -> KVConnectorBase_V1:
        config = ConnectorConfig(
            self.transfer,
            self.model,
            ParallelConfig(self.tp_size, rank),
            SideChannelConfig(port=0),
            SECRET,
            "epoch",
            MemoryKit(MemoryNetwork()),
        )
        return KVConnectorFactory.create_connector(config, role, self.cache)

    # -- an engine's calls --

    def ask(self, request: EngineRequest, num_computed_tokens: int = 0) -> int:
        """How many tokens the connector would load; they come within the step."""
        self.scheduler.on_new_request(request)
        count, is_async = self.scheduler.get_num_new_matched_tokens(request, num_computed_tokens)
        assert not is_async
        assert count is not None
        self._add_counts(self.scheduler)
        return count

    def admit(self, request: EngineRequest, blocks: list[int], num_external_tokens: int) -> None:
        self.scheduler.update_state_after_alloc(request, Blocks((blocks,)), num_external_tokens)

    def step(self, *slices: Slice, compute: Callable[[], None] = lambda: None) -> set[int]:
        """Run one step and return the blocks that the connector reports as not loaded."""
        metadata = self.scheduler.build_connector_meta(Step(slices))
        outputs = []
        for worker in self.workers:
            worker.bind_connector_metadata(metadata)
            worker.start_load_kv(None)
            for layer in LAYERS:
                if layer not in self.skipped_layers:
                    worker.wait_for_layer_load(layer)
        compute()
        for worker, memory in zip(self.workers, self.memory, strict=True):
            for layer in LAYERS:
                if layer not in self.skipped_layers:
                    worker.save_kv_layer(layer, memory[layer], None)
            worker.wait_for_save()
            output = KVConnectorOutput(
                invalid_block_ids=worker.get_block_ids_with_load_errors(),
                kv_connector_worker_meta=worker.build_connector_worker_meta(),
            )
            self._add_counts(worker)
            worker.clear_connector_metadata()
            outputs.append(output)
        whole = self.aggregator.aggregate(outputs)
        self.scheduler.update_connector_output(whole)
        return whole.invalid_block_ids

    def _add_counts(self, connector: KVConnectorBase_V1) -> None:
        stats = connector.get_kv_connector_stats()
        for name, n in ({} if stats is None else stats.data["tiers"]["example"]).items():
            self.counts[name] = self.counts.get(name, 0) + n

    def prefill(self, tokens: Sequence[int], name: str = "p", salt: str | None = "") -> None:
        """Compute a prompt in one step and end its request."""
        request = EngineRequest(name, list(tokens), cache_salt=salt)
        blocks = BLOCKS[: -(-len(tokens) // self.cache.block_size)]
        self.ask(request)
        self.admit(request, blocks, 0)
        self.step(whole(request, blocks), compute=lambda: self.fill(tokens, blocks))
        self.scheduler.request_finished(request, blocks)

    def load(self, tokens: Sequence[int] = TOKENS, name: str = "d") -> int:
        """Load a prompt into `OTHER_BLOCKS`, and return how many tokens that gave."""
        request = EngineRequest(name, list(tokens))
        count = self.ask(request)
        self.admit(request, OTHER_BLOCKS, count)
        invalid = self.step()
        self.scheduler.request_finished(request, OTHER_BLOCKS)
        return 0 if invalid else count

    def fill(self, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        for rank, memory in enumerate(self.memory):
            for layer, values in memory.items():
                for index, block in enumerate(blocks):
                    values[block] = kv_of(tokens, index, layer, rank)

    def has(self, tokens: Sequence[int], index: int, block: int) -> bool:
        return all(
            bool((values[block] == kv_of(tokens, index, layer, rank)).all())
            for rank, memory in enumerate(self.memory)
            for layer, values in memory.items()
        )


def kv_of(tokens: Sequence[int], index: int, layer: str, rank: int) -> float:
    """The value of a block: it depends on all tokens up to the block's end."""
    return float(
        hash((tuple(tokens[: (index + 1) * BLOCK_SIZE]), LAYERS.index(layer), rank)) % 2**20
    )


def whole(request: EngineRequest, blocks: Sequence[int]) -> Slice:
    return Slice(request.request_id, 0, (tuple(blocks),), request.num_prompt_tokens)


@pytest.fixture
def p(tmp_path: Path) -> Side:
    side = Side(tmp_path, "kv_producer")
    side.prefill(TOKENS)
    assert side.counts == {"stores": 1}
    return side


@pytest.fixture
def d(tmp_path: Path) -> Side:
    return Side(tmp_path, "kv_consumer")


# -- what D gets --


@pytest.mark.parametrize("tp_size", [1, 2])
def test_d_has_the_kv_that_p_has_computed(tmp_path: Path, tp_size: int) -> None:
    Side(tmp_path, "kv_producer", tp_size).prefill(TOKENS)
    d = Side(tmp_path, "kv_consumer", tp_size)
    assert d.load() == 16
    assert all(d.has(TOKENS, index, OTHER_BLOCKS[index]) for index in range(4))
    assert not d.has(TOKENS, 4, OTHER_BLOCKS[4])


def test_d_loads_only_the_blocks_that_it_does_not_have(p: Side, d: Side) -> None:
    request = EngineRequest("d", TOKENS)
    assert d.ask(request, 2 * BLOCK_SIZE) == 2 * BLOCK_SIZE
    d.admit(request, OTHER_BLOCKS, 2 * BLOCK_SIZE)
    assert d.step() == set()
    assert [d.has(TOKENS, n, OTHER_BLOCKS[n]) for n in range(4)] == [False, False, True, True]


def test_a_longer_prompt_loads_the_longest_stored_prefix(p: Side, d: Side) -> None:
    p.prefill(TOKENS[:9], "short")
    longer = [*TOKENS[:17], 7, 7, 7]
    assert d.load(longer) == 16
    assert all(d.has(TOKENS, index, OTHER_BLOCKS[index]) for index in range(4))
    assert d.load([*TOKENS[:9], 7, 7, 7, 7, 7, 7, 7, 7, 7]) == 8
    assert d.load([7, *TOKENS[1:]]) == 0


def test_a_prompt_that_is_computed_in_chunks_is_saved_with_the_last(tmp_path: Path) -> None:
    p, d = Side(tmp_path, "kv_producer"), Side(tmp_path, "kv_consumer")
    request = EngineRequest("p", TOKENS)
    p.ask(request)
    p.admit(request, BLOCKS, 0)
    p.step(Slice("p", 0, (tuple(BLOCKS[:3]),), 10), compute=lambda: p.fill(TOKENS, BLOCKS[:2]))
    assert d.load() == 0
    p.step(Slice("p", 10, (tuple(BLOCKS),), 8), compute=lambda: p.fill(TOKENS, BLOCKS))
    assert d.load(name="again") == 16
    assert all(d.has(TOKENS, index, OTHER_BLOCKS[index]) for index in range(4))


def test_a_producer_loads_nothing_and_a_consumer_saves_nothing(p: Side, tmp_path: Path) -> None:
    assert p.load() == 0
    d = Side(tmp_path / "empty", "kv_consumer")
    d.prefill(TOKENS)
    assert list((tmp_path / "empty").rglob("*.safetensors")) == []


@pytest.mark.parametrize(
    "other",
    [
        {"model": replace(MODEL, weights="others")},
        {"model": replace(MODEL, settings={"config.rope_theta": 10.0})},
        {"cache_dtype": "bfloat16"},
        {"layout": "NHD", "num_kv_heads": BLOCK_SIZE, "block_size": 2},
        {"has_token_rows": False},
    ],
)
def test_an_engine_whose_kv_differs_finds_nothing(
    p: Side, tmp_path: Path, other: dict[str, Any]
) -> None:
    assert Side(tmp_path, "kv_consumer", **other).load() == 0


def test_ranks_of_another_parallel_size_find_nothing(p: Side, tmp_path: Path) -> None:
    assert Side(tmp_path, "kv_consumer", tp_size=2).load() == 0


def test_tenants_do_not_see_each_other(p: Side, d: Side) -> None:
    assert d.ask(EngineRequest("other", TOKENS, cache_salt="tenant")) == 0
    assert d.ask(EngineRequest("unknown", TOKENS, cache_salt=None)) == 0
    p.prefill(TOKENS, "salted", "tenant")
    p.prefill([1, *TOKENS], "unknown", None)
    assert d.ask(EngineRequest("again", TOKENS, cache_salt="tenant")) == 16
    assert p.counts == {"stores": 2}


# -- damage --


def files(folder: Path, suffix: str = "safetensors") -> list[Path]:
    found = sorted(folder.rglob(f"*.{suffix}"))
    assert found
    return found


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def truncate(folder: Path) -> None:
    path = files(folder)[0]
    path.write_bytes(path.read_bytes()[:-1])


def swap_layers(folder: Path) -> None:
    for suffix in ("safetensors", "seal"):
        first, second, _ = files(folder, suffix)
        contents = first.read_bytes(), second.read_bytes()
        second.write_bytes(contents[0])
        first.write_bytes(contents[1])


def replace_by_fifo(folder: Path) -> None:
    files(folder)[1].unlink()
    os.mkfifo(folder / files(folder)[0].relative_to(folder).with_name("layer.1.safetensors"))


def replace_by_folder(folder: Path) -> None:
    files(folder)[0].unlink()
    (files(folder)[0].parent / "layer.0.safetensors").mkdir()


def take_from_another_prefix(folder: Path) -> None:
    Side(folder, "kv_producer").prefill([3, *TOKENS[1:]], "other")
    first, second = {path.parent for path in files(folder)}
    for path in first.iterdir():
        shutil.copy(path, second / "kept")
        shutil.copy(second / path.name, path)
        shutil.move(second / "kept", second / path.name)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a bit of the data": lambda folder: flip(files(folder)[2], -1),
    "a bit of the header": lambda folder: flip(files(folder)[0], 12),
    "a bit of the seal": lambda folder: flip(files(folder, "seal")[0], 70),
    "a bit of the MAC": lambda folder: flip(files(folder, "seal")[0], HEADER_BYTES - 1),
    "truncated": truncate,
    "empty": lambda folder: os.truncate(files(folder)[0], 0),
    "no seal": lambda folder: files(folder, "seal")[0].unlink(),
    "no layer": lambda folder: files(folder)[0].unlink(),
    "layers swapped": swap_layers,
    "FIFO": replace_by_fifo,
    "folder": replace_by_folder,
    "of another prefix": take_from_another_prefix,
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_a_miss_and_is_removed(
    p: Side, d: Side, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    DAMAGES[kind](tmp_path)
    with caplog.at_level(logging.WARNING, "kvferry"):
        assert d.load() == 0
    assert d.counts == {"refused": 1}
    assert len(caplog.records) == 1
    assert str(tmp_path) in caplog.text
    assert d.load(name="again") == 0
    assert d.counts == {"refused": 1}
    p.prefill(TOKENS, "again")
    assert d.load(name="third") == 16
    assert all(d.has(TOKENS, index, OTHER_BLOCKS[index]) for index in range(4))


def test_a_file_that_was_changed_and_sealed_again_is_loaded(
    p: Side, d: Side, tmp_path: Path
) -> None:
    """The control of the tests of damage."""
    forge(files(tmp_path)[0], SECRET)
    assert d.load() == 16
    assert not d.has(TOKENS, 0, OTHER_BLOCKS[0])


def test_another_secret_is_refused(
    p: Side, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.SECRET", b"of another cluster")
    d = Side(tmp_path, "kv_consumer")
    assert d.load() == 0
    assert d.counts == {"refused": 1}


def test_what_cannot_be_read_at_the_moment_is_not_removed(p: Side, d: Side) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull) as file:
        first_free = file.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, limits[1]))
    try:
        assert d.load() == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert d.counts == {"refused": 1}
    assert d.load(name="again") == 16


def test_the_draft_of_a_killed_writer_is_removed_after_an_hour(p: Side, tmp_path: Path) -> None:
    [folder] = {path.parent for path in files(tmp_path)}
    old, new = (folder.with_suffix(f".draft-{name}") for name in ("old", "new"))
    for draft in (old, new):
        shutil.copytree(folder, draft)
    os.utime(old, (1, 1))
    Side(tmp_path, "kv_consumer")
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, new.name}


def test_a_writer_that_stops_half_way_leaves_nothing_to_find(tmp_path: Path) -> None:
    p, d = Side(tmp_path, "kv_producer"), Side(tmp_path, "kv_consumer")
    p.skipped_layers = {"layer.2"}
    p.prefill(TOKENS)
    assert p.counts == {"failed_stores": 1}
    assert d.load() == 0
    assert d.counts == {}


# -- loads that fail after the lookup --


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_prefix_that_vanishes_before_its_load_is_reported_block_by_block(
    tmp_path: Path, tp_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    Side(tmp_path, tp_size=tp_size).prefill(TOKENS)
    d = Side(tmp_path, tp_size=tp_size)
    request = EngineRequest("d", TOKENS)
    assert d.ask(request) == 16
    shutil.rmtree(files(tmp_path)[0].parent)
    d.admit(request, OTHER_BLOCKS, 16)
    with caplog.at_level(logging.WARNING, "kvferry"):
        assert d.step() == set(OTHER_BLOCKS[:4])
    assert d.counts == {"failed_loads": 1}
    assert len(caplog.records) == 1
    assert d.step() == set()


def test_a_layer_that_the_engine_does_not_ask_for_is_loaded_as_well(p: Side, d: Side) -> None:
    d.skipped_layers = {"layer.1"}
    assert d.load() == 16
    assert all(d.has(TOKENS, index, OTHER_BLOCKS[index]) for index in range(4))


def test_steps_whose_reports_come_together_are_all_over(tmp_path: Path) -> None:
    """vLLM passes on the report of a step that has failed with that of the next step."""
    side = Side(tmp_path)
    side.prefill(TOKENS)
    reports = []
    for name in ("first", "second"):
        request = EngineRequest(name, TOKENS)
        side.admit(request, OTHER_BLOCKS, side.ask(request))
        (worker,) = side.workers
        worker.bind_connector_metadata(side.scheduler.build_connector_meta(Step()))
        worker.start_load_kv(None)
        reports.append(worker.build_connector_worker_meta())
    first, second = reports
    assert first is not None
    assert second is not None
    side.scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=first))
    side.prefill(TOKENS[1:], "not saved")
    assert side.counts["stores"] == 1
    whole = first.aggregate(second)
    side.scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=whole))
    side.prefill(TOKENS[2:], "saved")
    assert side.counts["stores"] == 2


def test_nothing_is_saved_until_every_load_is_known_to_have_succeeded(tmp_path: Path) -> None:
    """A request that loads and computes in one step may have computed from blocks that another
    rank could not load. It is saved with a later step.
    """
    side = Side(tmp_path)
    side.prefill(TOKENS[:9], "short")
    request = EngineRequest("long", TOKENS)
    assert side.ask(request) == 8
    side.admit(request, OTHER_BLOCKS, 8)
    first = side.scheduler.build_connector_meta(Step((whole(request, OTHER_BLOCKS),)))
    second = side.scheduler.build_connector_meta(
        Step((Slice("long", 18, (tuple(OTHER_BLOCKS),), 1),))
    )
    assert first.saves == second.saves == []  # type: ignore[attr-defined]
    (worker,) = side.workers
    worker.bind_connector_metadata(first)
    worker.start_load_kv(None)
    report = worker.build_connector_worker_meta()
    side.scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=report))
    side.scheduler.update_connector_output(KVConnectorOutput())
    third = side.scheduler.build_connector_meta(
        Step((Slice("long", 19, (tuple(OTHER_BLOCKS),), 1),))
    )
    assert [save.block_ids for save in third.saves] == [OTHER_BLOCKS[:4]]  # type: ignore[attr-defined]


def test_a_reset_forgets_all_requests(p: Side, d: Side) -> None:
    request = EngineRequest("d", TOKENS)
    assert d.ask(request) == 16
    d.scheduler.reset_cache()
    assert d.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)


# -- storage that fails --


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "small", "tmpfs", "size=64k,mode=700") as folder:
        yield folder


def test_a_full_disk_costs_only_the_save(small_disk: Path) -> None:
    p, d = Side(small_disk, "kv_producer"), Side(small_disk, "kv_consumer")
    filler = small_disk / "filler"
    filler.write_bytes(bytes(56 * 1024))
    p.prefill(TOKENS)
    assert p.counts == {"failed_stores": 1}
    assert list(small_disk.rglob("*.safetensors")) == []
    assert d.load() == 0
    filler.unlink()
    p.prefill(TOKENS, "again")
    assert p.counts == {"failed_stores": 1, "stores": 1}
    assert d.load(name="again") == 16


def test_a_read_only_disk_serves_loads(small_disk: Path) -> None:
    p = Side(small_disk, "kv_producer")
    p.prefill(TOKENS)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    p.prefill([1, *TOKENS[1:]], "other")
    assert p.counts == {"stores": 1, "failed_stores": 1}
    assert Side(small_disk, "kv_consumer").load() == 16


def test_a_path_that_cannot_be_a_folder_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"shared_storage_path is .*correct the path"):
        Side(tmp_path / "file")


def test_windows_are_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not support models with windows"):
        Side(tmp_path, groups=(KVCacheGroup(LAYERS, sliding_window=6),))
