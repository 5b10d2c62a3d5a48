"""Tests P and D with one and two tensor-parallel workers each, in every combination, in real
vLLM.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.harness import Answer, Engine, ask_all, metrics, new_session
from tests.vllm.abused_cluster import SOON_S
from tests.vllm.conftest import Trio
from tests.vllm.fleet import Fleet, ready
from tests.vllm.vllm_asking import assert_free, random_prompts

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPTS = random_prompts(10, seed=41, longest=700)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, model: Path, trio: Trio) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("ranks"), model, trio.fleet.secret) as made:
        yield made


@pytest.fixture(scope="module")
def two(fleet: Fleet) -> Engine:
    engine = fleet.vllm("two workers", "--tensor-parallel-size", "2", cores="0|1")
    ready(engine)
    return engine


@pytest.fixture(scope="module")
def one(trio: Trio) -> Engine:
    return trio.d


@pytest.fixture(scope="module")
def right(one: Engine) -> list[Answer]:
    answers = asyncio.run(ask_all(one, PROMPTS, concurrency=4, timeout_s=240))
    assert [answer.status for answer in answers] == [200] * len(PROMPTS)
    return answers


def hand_over(fleet: Fleet, p: Engine, d: Engine, salt: str) -> list[Answer]:
    """Return the tokens of all prompts through P and D, and check that neither holds a block
    afterwards. `salt` keeps both from using their prefix caches.
    """
    router = fleet.kvferry_router([p], [d])
    ready(router)

    async def check() -> list[Answer]:
        async with new_session(240) as session:
            before = (await metrics(session, d))["kvferry:finished_loads_total"]
            answers = await ask_all(router, PROMPTS, concurrency=4, timeout_s=240, cache_salt=salt)
            assert (await metrics(session, d))["kvferry:finished_loads_total"] > before
            # No lease can have expired yet, so every rank got D's release.
            await assert_free(session, p, d, timeout_s=SOON_S)
        return answers

    answers = asyncio.run(check())
    fleet.stop(router)
    return answers


def test_two_workers_prefill_and_one_decodes(
    fleet: Fleet, one: Engine, two: Engine, right: list[Answer]
) -> None:
    assert hand_over(fleet, two, one, "two to one") == right


def test_one_worker_prefills_and_two_decode(
    fleet: Fleet, one: Engine, two: Engine, right: list[Answer]
) -> None:
    assert hand_over(fleet, one, two, "one to two") == right


@pytest.mark.exhaustive
def test_two_workers_on_both_sides(fleet: Fleet, two: Engine, right: list[Answer]) -> None:
    other = fleet.vllm("two more workers", "--tensor-parallel-size", "2", cores="0|1")
    ready(other)
    assert hand_over(fleet, two, other, "two to two") == right
