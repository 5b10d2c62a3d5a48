"""Tests that D fetches only what it lacks, and that P frees its blocks as soon as no reader needs
them. The tests count bytes, not time.
"""

import asyncio
import random
from pathlib import Path

import aiohttp
import msgspec
import pytest
from tests.e2e.conftest import Pair
from tests.e2e.harness import Engine, Prompt, ask, assert_quiescent, metrics, new_session, prefill

pytestmark = pytest.mark.slow

BLOCK = 16


def tokens(seed: int, count: int) -> tuple[int, ...]:
    """Return tokens that no other test uses: tests share engines and therefore prefix caches."""
    rng = random.Random(f"bytes moved {seed}")
    return tuple(rng.randrange(10, 500) for _ in range(count))


def token_bytes(model: Path) -> int:
    config = msgspec.json.decode((model / "config.json").read_bytes())
    return (
        int(config["num_hidden_layers"])
        * 2
        * int(config["num_key_value_heads"])
        * int(config["head_dim"])
        * 4
    )


async def moved_by(
    session: aiohttp.ClientSession, source: Engine, sink: Engine, prompt: Prompt
) -> int:
    """Send one request through both engines and return the bytes that moved; checks the answer
    against that of `source` alone.
    """
    before = (await metrics(session, sink)).get("kvferry:transfer_bytes_total", 0)
    params = await prefill(session, source, prompt)
    answer = await ask(session, sink, prompt, kv_transfer_params=params)
    assert answer.is_ok, answer.body
    assert answer == await ask(session, source, prompt)
    after = (await metrics(session, sink)).get("kvferry:transfer_bytes_total", 0)
    return int(after - before)


def test_only_the_missing_suffix_moves_and_a_full_hit_moves_nothing(
    patient: Pair, model: Path
) -> None:
    p, d = patient.p, patient.d
    block_bytes = BLOCK * token_bytes(model)

    async def check() -> None:
        async with new_session() as session:
            start = tokens(1, 4 * BLOCK)
            assert await moved_by(session, p, d, Prompt(start)) == 4 * block_bytes
            # D has the first 4 blocks now; the next prompt shares them and adds 2 full blocks and 3
            # tokens.
            longer = start + tokens(2, 2 * BLOCK + 3)
            assert await moved_by(session, p, d, Prompt(longer)) == 3 * block_bytes
            # D has all full blocks; only the partly filled last block is missing.
            assert await moved_by(session, p, d, Prompt(longer)) <= block_bytes
            # D has every block of this prompt in full, so nothing moves. The lease is 600 s, so P's
            # blocks are free only because D released them.
            assert await moved_by(session, p, d, Prompt(longer[: 5 * BLOCK])) == 0
            await assert_quiescent(session, p, d)

    asyncio.run(check())


def test_a_prompt_shorter_than_a_block_moves_one_block_per_layer(
    patient: Pair, model: Path
) -> None:
    p, d = patient.p, patient.d

    async def check() -> None:
        async with new_session() as session:
            assert await moved_by(session, p, d, Prompt(tokens(3, 3))) == BLOCK * token_bytes(model)
            await assert_quiescent(session, p, d)

    asyncio.run(check())


def test_params_of_another_prompt_bring_only_the_common_prefix(patient: Pair, model: Path) -> None:
    p, d = patient.p, patient.d
    base = tuple(range(10, 10 + 4 * BLOCK))
    other = tuple(range(300, 364))
    cases = [
        (base, base[: 2 * BLOCK] + other, 2),
        (base, base + other, 4),
        (base, base[:-5], 3),
        (base, other, 0),
        # P's last block is partly filled, and D's prompt continues in the middle of it.
        (base[:-5], base[:-5] + other, 4),
        (base[:-5], base, 4),
        (base[:3], base[:3] + other[:1], 1),
    ]

    async def check() -> None:
        async with new_session() as session:
            for number, (prefilled, asked, blocks) in enumerate(cases):
                salt = f"case {number}"
                theirs, ours = Prompt(prefilled), Prompt(asked)
                before = (await metrics(session, d)).get("kvferry:transfer_bytes_total", 0)
                produced = await ask(
                    session,
                    p,
                    theirs,
                    max_tokens=1,
                    cache_salt=salt,
                    kv_transfer_params={"do_remote_decode": True},
                )
                answer = await ask(
                    session,
                    d,
                    ours,
                    cache_salt=salt,
                    kv_transfer_params=produced.body["kv_transfer_params"],
                )
                assert answer == await ask(session, p, ours)
                after = (await metrics(session, d)).get("kvferry:transfer_bytes_total", 0)
                assert after - before == blocks * BLOCK * token_bytes(model)
            await assert_quiescent(session, p, d)

    asyncio.run(check())
