"""Tests of the parts of kvferry's tiers for vLLM's OffloadingConnector: transfers with storage that
hangs, lookups, names of objects, and settings that are refused. `tests/vllm/test_stock_tiers.py`
has the tests in running engines.
"""

import json
import shutil
import threading
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.inside.engines import cache_config, vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kvferry.engine.make_model.writer import make_model
from kvferry.errors import ConfigError
from kvferry.tiers.base import (
    LoadOutcome,
    LoadResult,
    ObjectKey,
    StoreOutcome,
    StoreResult,
    TierUsage,
)
from kvferry.vllm.stock_tiers import DiskTierSettings, KVFerryDiskTier, KVFerryObjectTier
from kvferry.vllm.stock_tiers.host_engine import HostEngine
from kvferry.vllm.stock_tiers.lookups import Answer, Lookups
from kvferry.vllm.stock_tiers.tier import COUNTERS, Incarnation
from kvferry.vllm.stock_tiers.transfers import Chunk, FinishedJob, IoThreads, Transfers

ROW_BYTES = 4096
NUM_ROWS = 8
DEADLINE_S = 20.0
FOREVER_S = 1000.0
AT_ONCE_S = 1e-9


class GatedTier:
    """A tier in memory whose calls wait while the gate is closed, as on a disk that hangs."""

    name = "gated"

    def __init__(self) -> None:
        self.objects: dict[ObjectKey, bytes] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.arrivals = threading.Semaphore(0)
        """Counts the calls that have reached the gate."""

    def find(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return [key in self.objects for key in keys]

    def find_prefix(self, keys: Sequence[ObjectKey]) -> int:
        return next((n for n, key in enumerate(keys) if key not in self.objects), len(keys))

    def load(self, key: ObjectKey, into: memoryview) -> LoadResult:
        self._pass_gate()
        if key not in self.objects:
            return LoadResult(LoadOutcome.MISSING)
        into[:] = self.objects[key]
        return LoadResult(LoadOutcome.LOADED)

    def store(self, key: ObjectKey, payload: memoryview) -> StoreResult:
        self._pass_gate()
        self.objects[key] = bytes(payload)
        return StoreResult(StoreOutcome.STORED)

    def remove(self, keys: Sequence[ObjectKey]) -> None:
        for key in keys:
            self.objects.pop(key, None)

    def usage(self) -> TierUsage:
        return TierUsage()

    def close(self) -> None:
        self.gate.set()

    def _pass_gate(self) -> None:
        self.arrivals.release()
        assert self.gate.wait(DEADLINE_S)


@pytest.fixture
def tier() -> GatedTier:
    return GatedTier()


@pytest.fixture
def rows() -> bytearray:
    return bytearray(NUM_ROWS * ROW_BYTES)


@pytest.fixture
def transfers(tier: GatedTier, rows: bytearray) -> Iterator[Transfers]:
    threads = IoThreads("read", 1), IoThreads("write", 1)
    for each in threads:
        each.start()
    yield Transfers(
        tier,
        memoryview(rows),
        ROW_BYTES,
        *threads,
        load_timeout_s=FOREVER_S,
        store_timeout_s=FOREVER_S,
        max_pending_stores=3,
    )
    tier.close()
    for each in threads:
        each.close()


def chunk(number: int, row: int | None = None) -> Chunk:
    """A chunk with a name and a key of its own, in the row of its number."""
    key = ObjectKey(number.to_bytes(32, "big"))
    return Chunk(b"chunk %d" % number, key, number if row is None else row)


def finished(transfers: Transfers, count: int = 1) -> list[FinishedJob]:
    """Wait until so many jobs have ended."""
    jobs: list[FinishedJob] = []
    waiting = threading.Event()
    for _ in range(int(DEADLINE_S / 0.002)):
        jobs += transfers.take_finished()
        if len(jobs) >= count:
            return jobs
        waiting.wait(0.002)
    raise AssertionError(f"{len(jobs)} of {count} jobs have ended")


def row(rows: bytearray, number: int) -> bytes:
    return bytes(rows[number * ROW_BYTES : (number + 1) * ROW_BYTES])


def full(byte: bytes) -> bytes:
    return byte * ROW_BYTES


def test_a_row_that_was_stored_is_loaded_into_another_row(
    transfers: Transfers, rows: bytearray
) -> None:
    rows[ROW_BYTES : 2 * ROW_BYTES] = full(b"x")
    transfers.store(1, [chunk(1)])
    assert finished(transfers)[0].done == (b"chunk 1",)
    transfers.load(2, [chunk(1, row=5), chunk(2, row=6)])
    (job,) = finished(transfers)
    assert (job.is_load, job.done, job.failed) == (True, (b"chunk 1",), (b"chunk 2",))
    assert row(rows, 5) == full(b"x")
    assert transfers.take_counts() == {
        ("stores", "stored"): 1,
        ("loads", "loaded"): 1,
        ("loads", "missing"): 1,
    }


def test_a_load_that_was_given_up_never_writes_into_its_row(
    transfers: Transfers, tier: GatedTier, rows: bytearray
) -> None:
    tier.objects[chunk(1).key] = full(b"late")[:ROW_BYTES]
    tier.gate.clear()
    transfers.load_timeout_s = AT_ONCE_S
    transfers.load(1, [chunk(1, row=3)])
    assert tier.arrivals.acquire(timeout=DEADLINE_S)
    (job,) = finished(transfers)
    assert (job.done, job.failed) == ((), (b"chunk 1",))
    assert transfers.take_counts() == {("loads", "timed_out"): 1}
    # The storage answers after all, when the row may have another owner. The next load on the same
    # thread shows that the late one is over.
    transfers.load_timeout_s = FOREVER_S
    tier.gate.set()
    transfers.load(2, [chunk(1, row=4)])
    assert finished(transfers)[0].done == (b"chunk 1",)
    assert row(rows, 3) == full(b"\0")
    assert row(rows, 4) == full(b"late")[:ROW_BYTES]


def test_a_store_that_was_given_up_has_the_bytes_of_its_time(
    transfers: Transfers, tier: GatedTier, rows: bytearray
) -> None:
    rows[ROW_BYTES : 2 * ROW_BYTES] = full(b"x")
    tier.gate.clear()
    transfers.store(1, [chunk(1)])
    assert tier.arrivals.acquire(timeout=DEADLINE_S)
    transfers.drain(timeout_s=0)
    assert finished(transfers)[0].failed == (b"chunk 1",)
    # The row has another owner now, and then the storage writes.
    rows[ROW_BYTES : 2 * ROW_BYTES] = full(b"y")
    tier.gate.set()
    transfers.store(2, [chunk(2)])
    assert finished(transfers)[0].done == (b"chunk 2",)
    assert tier.objects[chunk(1).key] == full(b"x")


def test_draining_gives_up_what_waits_and_returns_although_storage_hangs(
    transfers: Transfers, tier: GatedTier
) -> None:
    tier.gate.clear()
    transfers.load(1, [chunk(1)])
    transfers.load(2, [chunk(2)])
    transfers.store(3, [chunk(3)])
    assert tier.arrivals.acquire(timeout=DEADLINE_S)
    transfers.drain(timeout_s=0)
    jobs = transfers.take_finished()
    assert sorted((job.job_id, job.done) for job in jobs) == [(1, ()), (2, ()), (3, ())]
    assert not transfers.has_jobs()


def test_stores_beyond_the_limit_are_dropped_and_loads_are_not(
    transfers: Transfers, tier: GatedTier
) -> None:
    tier.gate.clear()
    transfers.store(1, [chunk(1), chunk(2)])
    transfers.store(2, [chunk(3), chunk(4)])
    (dropped,) = transfers.take_finished()
    assert (dropped.job_id, dropped.failed) == (2, (b"chunk 3", b"chunk 4"))
    transfers.load(3, [chunk(5), chunk(6), chunk(7)])
    tier.gate.set()
    assert {job.job_id for job in finished(transfers, 2)} == {1, 3}
    # A job larger than the limit is stored if it is alone.
    transfers.store(4, [chunk(number) for number in range(5)])
    assert len(finished(transfers)[0].done) == 5


def test_threads_that_hang_are_noticed_until_they_return(
    transfers: Transfers, tier: GatedTier
) -> None:
    assert not transfers.readers.are_stuck(0)
    tier.gate.clear()
    transfers.load(1, [chunk(1)])
    assert tier.arrivals.acquire(timeout=DEADLINE_S)
    assert transfers.readers.are_stuck(0)
    assert not transfers.readers.are_stuck(FOREVER_S)
    tier.gate.set()
    finished(transfers)
    # The thread returns to its queue before it runs the next task.
    ended = threading.Event()
    transfers.readers.submit(ended.set)
    assert ended.wait(DEADLINE_S)


# -- lookups --


def test_a_question_is_asked_once_and_answered_for_its_request() -> None:
    lookups = Lookups(timeout_s=10)
    assert [lookups.ask("r", name, now=0) for name in (b"a", b"b")] == [Answer.UNKNOWN] * 2
    (question,) = lookups.take_questions()
    assert question.names == (b"a", b"b")
    assert lookups.ask("r", b"a", now=1) is Answer.UNKNOWN
    assert lookups.take_questions() == []
    lookups.answer(question, [True, False])
    assert lookups.ask("r", b"a", now=2) is Answer.STORED
    assert lookups.ask("r", b"b", now=2) is Answer.ABSENT
    assert lookups.ask("other", b"a", now=2) is Answer.UNKNOWN


def test_a_question_without_an_answer_ends_with_no() -> None:
    lookups = Lookups(timeout_s=10)
    lookups.ask("r", b"a", now=0)
    (question,) = lookups.take_questions()
    assert lookups.ask("r", b"a", now=10) is Answer.UNKNOWN
    assert lookups.ask("r", b"a", now=10.1) is Answer.ABSENT
    lookups.answer(question, [True])
    assert lookups.ask("r", b"a", now=11) is Answer.ABSENT


def test_a_chunk_that_could_not_be_loaded_is_absent_for_all_waiting_requests() -> None:
    lookups = Lookups(timeout_s=10)
    for request in ("r", "s"):
        lookups.ask(request, b"a", now=0)
    for question in lookups.take_questions():
        lookups.answer(question, [True])
    lookups.mark_absent([b"a", b"never asked for"])
    assert [lookups.ask(request, b"a", now=1) for request in ("r", "s")] == [Answer.ABSENT] * 2
    assert lookups.ask("later", b"a", now=1) is Answer.UNKNOWN


def test_answers_from_before_a_reset_are_ignored() -> None:
    lookups = Lookups(timeout_s=10)
    lookups.ask("r", b"a", now=0)
    (question,) = lookups.take_questions()
    lookups.forget()
    lookups.ask("r", b"a", now=1)
    lookups.answer(question, [True])
    assert lookups.ask("r", b"a", now=2) is Answer.UNKNOWN


# -- names --


def test_the_key_of_a_chunk_depends_on_incarnation_adapter_and_name() -> None:
    first, second = Incarnation(), Incarnation()
    assert first.key(b"name", "adapter") == second.key(b"name", "adapter")
    keys = {first.key(b"name", ""), first.key(b"name", "adapter"), first.key(b"eman", "")}
    # No boundary between the parts can move.
    keys |= {first.key(b"ab", "c"), first.key(b"b", "ca")}
    for incarnation in (first, second):
        incarnation.note_reset(is_cache_empty=True)
        keys.add(incarnation.key(b"name", ""))
    assert len(keys) == 7


def test_only_a_reset_that_empties_the_caches_ends_a_suspension() -> None:
    incarnation = Incarnation()
    incarnation.note_weights_change(is_cache_empty=True)
    assert not incarnation.is_suspended
    incarnation.note_weights_change(is_cache_empty=False)
    assert incarnation.is_suspended
    incarnation.note_weights_change(is_cache_empty=True)
    incarnation.note_reset(is_cache_empty=False)
    assert incarnation.is_suspended
    incarnation.note_reset(is_cache_empty=True)
    assert not incarnation.is_suspended


# -- vLLM --


KNOWN = {
    "block_size_bytes",
    "bp_detector",
    "build_metric_definitions",
    "cache_hit_source",
    "drain_jobs",
    "get_finished_jobs",
    "get_stats",
    "has_pending_work",
    "lookup",
    "medium",
    "on_new_request",
    "on_request_finished",
    "on_schedule_end",
    "serve_external_requests",
    "shutdown",
    "submit_load",
    "submit_store",
    "take_events",
    "touch",
}


def test_every_name_of_vllms_contract_is_known() -> None:
    public = {name for name in vars(SecondaryTierManager) if not name.startswith("_")}
    assert public <= KNOWN
    assert not KVFerryDiskTier.__abstractmethods__
    assert not KVFerryObjectTier.__abstractmethods__


def test_vllm_finds_the_tiers_and_their_metrics_by_module_path() -> None:
    for tier in (KVFerryDiskTier, KVFerryObjectTier):
        entry = {"type": tier.__name__, "module_path": "kvferry.vllm.stock_tiers"}
        assert SecondaryTierFactory.get_tier_class(entry) is tier
        names = tier.build_metric_definitions(entry)
        assert {f"kvferry:stock_tier_{name}" for name in COUNTERS} < names.keys()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, "path"),
        ({"path": "/tmp/x", "size": 0}, "size"),
        ({"path": "/tmp/x", "load_timeout": 0}, "load_timeout"),
        ({"path": "/tmp/x", "locality": "HERE"}, "locality"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        DiskTierSettings(**settings)


def host(model: Path, **arguments: Any) -> HostEngine:
    config = vllm_config(str(model), "stock", json.dumps(arguments))
    return HostEngine(config, cache_config(config, "full"), None, None)


def digest(engine: HostEngine, **chunks: Any) -> str:
    extra = engine.vllm_config.kv_transfer_config.kv_connector_extra_config
    engine.vllm_config.kv_transfer_config.kv_connector_extra_config = {**extra, **chunks}
    config = build_offloading_config(engine.vllm_config, engine.kv_cache_config)
    engine.vllm_config.kv_transfer_config.kv_connector_extra_config = extra
    return engine.namespace(config, ROW_BYTES).hex


def test_everything_that_changes_the_bytes_of_a_chunk_changes_the_namespace(
    model: Path, tmp_path: Path
) -> None:
    first = digest(host(model))
    copied, changed = tmp_path / "copied", tmp_path / "changed"
    make_model(copied, seed=0)
    make_model(changed, seed=1)
    # Only the weights differ.
    shutil.copy(copied / "config.json", changed / "config.json")
    assert digest(host(copied)) == digest(host(model, gpu_memory_utilization=0.5)) == first
    others = {
        digest(host(changed)),
        digest(host(model, dtype="bfloat16")),
        digest(host(model, block_size=64)),
        digest(host(model, prefix_caching_hash_algo="sha256_cbor")),
        digest(host(model, hf_overrides={"rope_theta": 5.0})),
        digest(host(model), blocks_per_chunk=2),
    }
    assert len(others | {first}) == 7


def test_hashes_that_collide_or_are_random_are_refused(model: Path) -> None:
    engine = host(model)
    engine.check_supported()
    cache = copy(engine.vllm_config.cache_config)
    cache.prefix_caching_hash_algo = "xxhash"
    config = copy(engine.vllm_config)
    config.cache_config = cache
    with pytest.raises(ConfigError, match="sha256_cbor"):
        replace(engine, vllm_config=config).check_supported()


def test_weights_that_are_not_on_this_host_are_refused(model: Path) -> None:
    engine = host(model)
    config = copy(engine.vllm_config)
    config.model_config = copy(engine.vllm_config.model_config)
    for name in ("s3://bucket/model", "nobody/has-this-model"):
        config.model_config.model = config.model_config.model_weights = name
        with pytest.raises(ConfigError, match="download the model"):
            replace(engine, vllm_config=config).check_supported()


def test_a_remote_call_that_may_change_weights_is_announced() -> None:
    class Core:
        def collective_rpc(self, method: Any, timeout: float | None = None, args: Any = ()) -> Any:
            return method, timeout, args

    core, calls = Core(), list[str]()
    HostEngine(None, None, None, core).watch_weights(calls.append)
    for method in ("reload_weights", "compute_weight_checksums", str.upper):
        assert core.collective_rpc(method, 3, args=(1,)) == (method, 3, (1,))
    assert calls == ["reload_weights", "upper"]
    assert list(signature(core.collective_rpc).parameters) == ["method", "timeout", "args"]
