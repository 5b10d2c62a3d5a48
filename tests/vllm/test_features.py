"""Tests right tokens in real vLLM with other settings: plugin name, block size, chunked prefill,
preemption, no async scheduling, no prefix cache, policy `recompute`; and as a child of
MultiConnector.
"""

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.e2e.harness import ask, ask_all, metrics, new_session, prefill
from tests.vllm.conftest import Trio
from tests.vllm.fleet import BY_PLUGIN, Fleet, ready
from tests.vllm.vllm_asking import assert_free, random_prompts

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, model: Path, trio: Trio) -> Iterator[Trio]:
    directory = tmp_path_factory.mktemp("other")
    with Fleet(directory / "processes", model, trio.fleet.secret) as fleet:
        small = (
            "--block-size",
            "64",
            "--num-gpu-blocks-override",
            "34",
            "--max-num-batched-tokens",
            "128",
            "--max-num-seqs",
            "16",
        )
        p = fleet.vllm(
            "prefill",
            *small,
            "--no-async-scheduling",
            "--no-enable-prefix-caching",
            transfer=BY_PLUGIN,
        )
        d = fleet.vllm("decode", *small, transfer=BY_PLUGIN, policy="recompute", cores="1")
        router = fleet.kvferry_router([p], [d])
        ready(p, d, router)
        yield Trio(fleet, p, d, router)


def test_tokens_with_everything_set_differently(trio: Trio, other: Trio) -> None:
    prompts = [
        replace(prompt, max_tokens=64) for prompt in random_prompts(24, seed=5, longest=400)
    ] + random_prompts(4, seed=6, shortest=1400)

    async def check() -> None:
        right = await ask_all(trio.p, prompts, concurrency=8, timeout_s=240)
        assert [answer.status for answer in right] == [200] * len(prompts)
        assert await ask_all(other.router, prompts, concurrency=12, timeout_s=240) == right
        async with new_session(60) as session:
            seen = await metrics(session, other.d)
            assert seen["vllm:num_preemptions_total"] > 0, (
                "the cache was not small enough to try it"
            )
            assert seen["kvferry:finished_loads_total"] > 0
            await assert_free(session, other.p, other.d)

    asyncio.run(check())


def test_a_block_size_that_differs_is_refused_by_name_and_computed_by_policy(
    trio: Trio, other: Trio
) -> None:
    prompt = random_prompts(1, seed=7)[0]

    async def check() -> None:
        async with new_session(60) as session:
            params = await prefill(session, trio.p, prompt)
            assert await ask(session, other.d, prompt, kv_transfer_params=params) == await ask(
                session, trio.p, prompt
            )
            await assert_free(session, other.d)

    asyncio.run(check())
    assert any(
        re.search(r"reason=.*block_size.*64.*32", line) for line in other.d.process.tail(200)
    ), other.d.process.tail(200)


def test_what_was_moved_is_counted_under_vllms_names_and_ours(other: Trio) -> None:
    async def check() -> None:
        async with new_session(60) as session:
            await ask(session, other.router, random_prompts(1, seed=8)[0])
            d, p = await metrics(session, other.d), await metrics(session, other.p)
        assert (
            d["vllm:nixl_xfer_time_seconds_count"]
            == d["vllm:nixl_bytes_transferred_count"]
            == d["kvferry:transfers_total/nixl"]
            > 0
        )
        assert d["kvferry:transfer_bytes_total/nixl"] == d["vllm:nixl_bytes_transferred_sum"]
        assert d["kvferry:num_peers"] > 0
        assert p["kvferry:num_held_blocks"] == p["kvferry:num_leases"] == 0
        assert (
            p["vllm:nixl_num_kv_expired_reqs_total"]
            == p["vllm:nixl_num_failed_transfers_total"]
            == 0
        )
        assert (
            d["vllm:nixl_num_failed_transfers_total"]
            == d["kvferry:failed_handshakes_total"] + d["kvferry:failed_transfers_total"]
        )

    asyncio.run(check())


def test_tokens_beside_another_connector(trio: Trio, tmp_path: Path) -> None:
    """The cache has room for all requests: vLLM's own ExampleConnector ends its engine when a
    request is preempted, with any other connector beside it.
    """
    stored = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [BY_PLUGIN, stored]},
    }
    prompts = random_prompts(8, seed=9, longest=400)
    d = trio.fleet.vllm("several", transfer=several, cores="1")
    ready(d)

    async def check() -> None:
        async with new_session(60) as session:
            for prompt in prompts:
                params = await prefill(session, trio.p, prompt)
                assert await ask(session, d, prompt, kv_transfer_params=params) == await ask(
                    session, trio.p, prompt
                )
            assert (await metrics(session, d))["kvferry:finished_loads_total"] == len(prompts)
            await assert_free(session, trio.p, d)

    asyncio.run(check())
    trio.fleet.stop(d)
