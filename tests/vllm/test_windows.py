"""Tests a model in real vLLM whose layers alternate between sliding-window and full attention: vLLM
keeps two block tables and frees the blocks behind the window.
"""

import asyncio
import json
from collections.abc import Iterator

import pytest
from tests.e2e.harness import ask, ask_all, metrics, new_session, prefill
from tests.vllm.conftest import Trio
from tests.vllm.fleet import PYTHON, Fleet, ready
from tests.vllm.vllm_asking import assert_free, random_prompts

from kvferry.engine.make_model.writer import make_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

WINDOW, BLOCK = 64, 32
LAYER_BYTES = 2 * 2 * 64 * 4
"""Bytes per token: K and V of two heads, 64 floats each."""


def blocks_to_move(num_tokens: int) -> int:
    """Return the number of blocks for both kinds of layers together. D computes the last token
    itself, and needs the KV that this token attends to.
    """
    whole = -(-(num_tokens - 1) // BLOCK)
    return whole + whole - max(0, num_tokens - WINDOW) // BLOCK


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    if not PYTHON.exists():
        pytest.skip("vLLM is not installed here; make setup-vllm does it")
    directory = tmp_path_factory.mktemp("windowed")
    make_model(directory / "tiny", family="llama")
    config = json.loads((directory / "tiny" / "config.json").read_text())
    config |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW}
    (directory / "tiny" / "config.json").write_text(json.dumps(config))
    with Fleet(directory / "fleet", directory / "tiny") as fleet:
        lease = {"kv_lease_duration": 600}
        p, d = fleet.vllm("prefill", extra=lease), fleet.vllm("decode", extra=lease, cores="1")
        router = fleet.kvferry_router([p], [d])
        ready(p, d, router)
        yield Trio(fleet, p, d, router)


def test_tokens_equal_a_single_engines_and_only_what_is_seen_is_moved(windowed: Trio) -> None:
    prompts = random_prompts(40, seed=51, longest=1200)
    # If the last token's window begins in the block that P frees when it finishes, D computes the
    # prompt itself.
    handed_over = [
        len(p.token_ids)
        for p in prompts
        if len(p.token_ids) < WINDOW or len(p.token_ids) % BLOCK != BLOCK - 1
    ]
    assert len(handed_over) < len(prompts)

    async def check() -> None:
        async with new_session(240) as session:
            assert await ask_all(
                windowed.router, prompts, concurrency=8, timeout_s=240
            ) == await ask_all(windowed.p, prompts, timeout_s=240)
            seen = await metrics(session, windowed.d)
            assert seen["kvferry:finished_loads_total"] == len(handed_over)
            assert (
                seen["vllm:nixl_bytes_transferred_sum"]
                == sum(map(blocks_to_move, handed_over)) * 2 * BLOCK * LAYER_BYTES
            )
            await assert_free(session, windowed.p, windowed.d)

    asyncio.run(check())


def test_a_prefix_of_what_was_handed_over_is_right_too(windowed: Trio) -> None:
    """P has freed blocks that the shorter prompt's window needs."""
    long = random_prompts(1, seed=52, shortest=700, longest=710)[0]

    async def check() -> None:
        async with new_session(120) as session:
            for length in (30, 64, 300, 690):
                short = type(long)(long.token_ids[:length])
                params = await prefill(session, windowed.p, long)
                moved = await ask(
                    session, windowed.d, short, kv_transfer_params=params, cache_salt=f"{length}"
                )
                assert moved == await ask(session, windowed.p, short, cache_salt="other")
            await assert_free(session, windowed.p, windowed.d)

    asyncio.run(check())
