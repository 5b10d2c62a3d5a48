"""Tests the KV events of the tiers in vLLM's format: they describe blocks as the events of vLLM's
own prefix cache do, and a reader that applies them knows what the tiers hold.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.vllm.adapters import write_adapter
from tests.vllm.block_index import BlockIndex
from tests.vllm.inside.conftest import StartEngine
from tests.vllm.inside.engines import BLOCK, Engine, run_until
from tests.vllm.inside.test_life_cycle import finish, prompt, settle
from vllm.distributed.kv_events import KVEventBatch
from vllm.lora.request import LoRARequest

EVENTS = {"enable_kv_cache_events": True, "publisher": "null"}


class Published(BlockIndex):
    """Applies what an engine publishes."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        engine.scheduler.kv_event_publisher.publish = self.take

    def take(self, batch: KVEventBatch) -> None:
        for event in batch.events:
            self.apply(msgspec.to_builtins(event))


def offloading_in(folder: Path, **extra: Any) -> dict[str, Any]:
    settings = {"break_even": False, "pool_path": str(folder / "pool")}
    if "tiers" not in extra:
        settings["num_cpu_blocks"] = 60
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": settings | extra,
    }


@pytest.fixture
def start(start_engine: StartEngine, tmp_path: Path) -> Callable[..., Engine]:
    def start(
        extra: dict[str, Any] | None = None, kv: dict[str, Any] | None = None, **settings: Any
    ) -> Engine:
        offloading = offloading_in(tmp_path, **(extra or {}))
        return start_engine("a", **settings, kv_events_config=EVENTS, kv=kv or offloading)

    return start


StartTiers = Callable[..., Engine]


def run(engine: Engine, name: str, tokens: list[int], **more: Any) -> None:
    engine.add(name, tokens, **more)
    finish(engine, name)
    settle(engine)


@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
@pytest.mark.parametrize("details", ["plain", "salt", "adapter"])
def test_events_describe_blocks_as_the_events_of_the_prefix_cache_do(
    start: StartTiers, tmp_path: Path, details: str, blocks_per_chunk: int
) -> None:
    more: dict[str, Any] = {
        "plain": {},
        "salt": {"cache_salt": "tenant"},
        "adapter": {
            "lora_request": LoRARequest("adapter", 1, str(write_adapter(tmp_path / "adapter")))
        },
    }[details]
    engine = start({"blocks_per_chunk": blocks_per_chunk})
    index = Published(engine)
    run(engine, "r1", prompt(4 * BLOCK + 8), **more)
    assert len(index.hashes("CPU")) == 4
    assert index.hashes("CPU") <= index.hashes("GPU")
    for blocks in index.places.values():
        assert blocks.items() <= index.seen.items()


def test_each_kv_cache_group_has_events_of_its_own(start: StartTiers) -> None:
    engine = start(kind="windows beside full attention")
    index = Published(engine)
    run(engine, "r1", prompt(4 * BLOCK + 8))
    counts = {
        block.kind: len(blocks)
        for place, blocks in index.places.items()
        for block in blocks.values()
        if place.medium == "CPU"
    }
    assert set(counts) == {"full_attention", "sliding_window"}
    assert counts["full_attention"] == 4


def test_evicted_blocks_are_removed(start: StartTiers) -> None:
    engine = start({"num_cpu_blocks": 6}, enable_prefix_caching=False)
    index = Published(engine)
    for number in range(4):
        run(engine, f"r{number}", prompt(4 * BLOCK, start=100 * number))
    run_until(lambda: len(index.hashes("CPU")) == 6, engine)


def test_after_a_reset_all_blocks_are_removed(start: StartTiers, tmp_path: Path) -> None:
    disk = {"disk": {"path": str(tmp_path / "disk"), "size": "64MiB"}}
    engine = start({"tiers": [{"cpu": "8MiB"}, disk]})
    index = Published(engine)
    run(engine, "r1", prompt(4 * BLOCK))
    run_until(lambda: len(index.hashes("STORAGE", "disk")) == 4, engine)
    assert index.hashes("CPU") == index.hashes("STORAGE", "disk")
    run_until(engine.reset, engine)
    engine.step()
    assert not any(index.places.values())
    # The disk still has the objects, which the engine may use: the weights are the same.
    run(engine, "r2", prompt(4 * BLOCK))
    run_until(lambda: len(index.hashes("STORAGE", "disk")) == 4, engine)


def test_events_pass_through_a_multi_connector(start: StartTiers, tmp_path: Path) -> None:
    children = [offloading_in(tmp_path)]
    engine = start(
        kv={
            "kv_connector": "MultiConnector",
            "kv_connector_extra_config": {"connectors": children},
        }
    )
    index = Published(engine)
    run(engine, "r1", prompt(4 * BLOCK))
    assert len(index.hashes("CPU")) == 4


def test_an_engine_that_publishes_no_events_is_asked_for_none(
    start_engine: StartEngine, tmp_path: Path
) -> None:
    engine = start_engine("a", kv=offloading_in(tmp_path))
    index = Published(engine)
    run(engine, "r1", prompt(4 * BLOCK))
    assert not index.places
