"""Tests what `OffloadingConnector` finds worth storing and loading: what is needed again, and what
is faster than computing.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.connectors.offloading_side import FULL, MODEL, TOKENS, Start
from tests.connectors.pair import BLOCK_SIZE, NUM_BLOCKS, EngineRequest, MemoryKit, Slice, Step

from kvferry.config import KVTransferConfig, OffloadingExtraConfig, SideChannelConfig
from kvferry.connectors.contract import (
    ConnectorConfig,
    KVCacheConfig,
    KVConnectorOutput,
    ParallelConfig,
)
from kvferry.connectors.offloading.break_even import MIN_SAMPLES
from kvferry.connectors.offloading.metadata import (
    OffloadingHandshakeMetadata,
    OffloadingWorkerMetadata,
)
from kvferry.connectors.offloading.scheduler import OffloadingScheduler
from kvferry.connectors.offloading.stores import SeenChunks
from kvferry.tiers.base import EntryKey
from kvferry.tiers.commands import LoadEnded, StoreChunks
from kvferry.tiers.keys import KeyChain, Namespace
from kvferry.tiers.pool.host_pool import HostPool
from kvferry.tiers.pool.policies import LruPolicy
from kvferry.transports.memory import MemoryNetwork


def test_a_tier_stores_what_was_needed_often_enough() -> None:
    seen = SeenChunks({"cpu": 1, "disk": 2}, max_chunks=2)
    keys = [EntryKey(bytes([n]) * 32) for n in range(3)]
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
    """A scheduler side with a clock of the test, and a pool that has the prompt."""

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
        self.side = OffloadingScheduler(config, cache, transfer.extra, lambda: self.now)
        self.side.set_xfer_handshake_metadata({0: OffloadingHandshakeMetadata(0, factors, (1000,))})

    def build(self, num_tokens: int) -> int | None:
        return self.side.build_connector_meta(Step((), frozenset(), num_tokens)).timed_step

    def output(self, step: int | None, *loads: LoadEnded) -> None:
        output = KVConnectorOutput()
        output.kv_connector_worker_meta = OffloadingWorkerMetadata(
            loads=list(loads), timed_step=step
        )
        self.side.update_connector_output(output)

    def claimed(self, name: str) -> int | None:
        request = EngineRequest(name, TOKENS)
        self.side.on_new_request(request)
        return self.side.get_num_new_matched_tokens(request, 0)[0]

    def close(self) -> None:
        self.side.shutdown()
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
        timed.output(step, LoadEnded("load", seconds=load_s, bytes_by_tier={"cpu": 4000}))
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
        timed.output(prefill, LoadEnded("load", seconds=load_s, bytes_by_tier={"cpu": 4000}))
        timed.output(None)
    assert timed.claimed("b") == claimed
