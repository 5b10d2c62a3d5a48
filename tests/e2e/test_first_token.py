"""Tests answers that begin with P's token: whatever the request, tokens, text, usage and finish
reasons are those of one engine. A control, in which P samples another token, must differ.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from tests.e2e.conftest import PATIENT
from tests.e2e.harness import Cluster, Engine, assert_quiescent, metrics, new_session
from tests.e2e.random_answers import Asked, Given, give, give_all, random_requests

from kvferry.router.serving.client_request import ClientRequest, read_client_request
from kvferry.router.serving.first_token import may_continue

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FROM_PREFILL = "kvferry:router_first_tokens_from_prefill_total"
SETTINGS: dict[str, list[Any]] = {
    "ignore_eos": [True],
    "stop_token_ids": [list(range(0, 500, 3)), [7]],
    "include_stop_str_in_output": [True],
    "skip_special_tokens": [False],
    "top_p": [0.5],
    "top_k": [3],
    "seed": [11],
    "n": [1],
    # These take the usual path.
    "stop": [["e"], ["\ufffd"]],
    "min_tokens": [2],
}


@pytest.fixture(scope="module")
def early(shared: Cluster) -> Iterator[tuple[Engine, Engine, Engine]]:
    """P, D and a router that takes the first token from P."""
    starting = [shared.serve(f"early {role}", extra=PATIENT) for role in ("prefill", "decode")]
    p, d = (process.ready() for process in starting)
    yield p, d, shared.proxy([p], [d], "--first-token-from-prefill").ready()


def _may_begin_early(asked: Asked) -> bool:
    import json

    client = read_client_request(json.dumps(asked.body).encode())
    assert isinstance(client, ClientRequest)
    return may_continue(client)


def test_random_requests_get_the_answers_of_one_engine(
    early: tuple[Engine, Engine, Engine], plain: Engine, pytestconfig: pytest.Config
) -> None:
    """120 requests; `make test-all` sends 500."""
    p, d, router = early
    count = 500 if pytestconfig.getoption("--exhaustive") else 120
    asked = random_requests(count, 3, SETTINGS)

    async def check() -> None:
        right = await give_all(plain, asked)
        async with new_session() as session:
            before = (await metrics(session, router))[FROM_PREFILL]
            given = await give_all(router, asked)
            for request, one, two in zip(asked, right, given, strict=True):
                assert two == one, request
                assert len(two.answer_ids) == 1, request
            # The requests were of all kinds, and most answers did begin with P's token.
            assert Counter(one.status for one in right) == {200: count}
            assert {one.finish_reason for one in right} == {"stop", "length"}
            num_early = (await metrics(session, router))[FROM_PREFILL] - before
            num_possible = sum(map(_may_begin_early, asked))
            assert 0.5 * count < num_possible < count
            # The rest began with part of a character, or with a token without text.
            assert 0.8 * num_possible < num_early <= num_possible
            await assert_quiescent(session, p, d)

    asyncio.run(check())


def test_a_request_with_a_seed_gets_the_answer_of_one_engine(
    early: tuple[Engine, Engine, Engine], plain: Engine
) -> None:
    p, d, router = early
    body = {"model": "tiny", "prompt": "Sampled ", "temperature": 0.9, "max_tokens": 24}
    asked = [Asked("/v1/completions", body | {"seed": seed}) for seed in range(10)]

    async def check() -> None:
        assert await give_all(router, asked) == await give_all(plain, asked)
        async with new_session() as session:
            await assert_quiescent(session, p, d)

    asyncio.run(check())


def test_the_answer_goes_on_after_the_token_that_p_sampled(
    early: tuple[Engine, Engine, Engine], plain: Engine
) -> None:
    """The negative control: P samples at random and D does not, so an answer that were not
    continued after P's token would be the greedy one.
    """
    p, d, router = early
    prompt = list(range(40, 140))
    body: dict[str, Any] = {"model": "tiny", "prompt": prompt, "return_token_ids": True}
    body |= {"max_tokens": 8, "ignore_eos": True, "stream": True, "top_k": 40, "temperature": 1.0}

    async def check() -> None:
        greedy = Asked("/v1/completions", body | {"temperature": 0})
        async with new_session() as session:
            begun: dict[int, Given] = {}
            for _ in range(12):
                given = await give(session, router, Asked("/v1/completions", body))
                assert given.usage is None
                assert (len(given.token_ids), given.finish_reason) == (8, "length")
                begun[given.token_ids[0]] = given
            assert len(begun) > 3
            assert (await give(session, router, greedy)).token_ids == (
                await give(session, plain, greedy)
            ).token_ids
            await assert_quiescent(session, p, d)

    asyncio.run(check())
