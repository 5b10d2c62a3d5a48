"""Tests answers that begin with P's token: whatever the request, tokens, text, usage and finish
reasons are those of one engine. Controls show that another first token or a seed would differ.
"""

import asyncio
import json
from collections import Counter
from typing import Any

import pytest
from tests.e2e.conftest import PATIENT
from tests.e2e.harness import Cluster, Engine, assert_quiescent, metrics, new_session
from tests.e2e.random_answers import Asked, give, give_all, random_requests

from kvferry.router.serving.client_request import ClientRequest, read_client_request
from kvferry.router.serving.first_token import may_continue

pytestmark = pytest.mark.slow

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
    "min_tokens": [1],
}


@pytest.fixture(scope="module")
def early(shared: Cluster) -> tuple[Engine, Engine, Engine]:
    """P, D and a router that takes the first token from P."""
    starting = [shared.serve(f"early {role}", extra=PATIENT) for role in ("prefill", "decode")]
    p, d = (process.ready() for process in starting)
    return p, d, shared.proxy([p], [d], "--first-token-from-prefill").ready()


def _may_begin_early(asked: Asked) -> bool:
    client = read_client_request(json.dumps(asked.body).encode())
    assert isinstance(client, ClientRequest)
    return may_continue(client)


def test_random_requests_get_the_answers_of_one_engine(
    early: tuple[Engine, Engine, Engine], plain: Engine, pytestconfig: pytest.Config
) -> None:
    """60 requests; `make test-all` sends 500."""
    p, d, router = early
    count = 500 if pytestconfig.getoption("--exhaustive") else 60
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
            assert 0.3 * count < num_possible < count
            # The rest began with part of a character, or with a token without text.
            assert 0.5 * num_possible < num_early <= num_possible
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


@pytest.mark.parametrize(
    ("sampling", "first"),
    [({"temperature": 0}, 77), ({"temperature": 0.9, "seed": 5}, None)],
    ids=["another first token", "a seed"],
)
def test_an_answer_that_is_continued_wrongly_differs(
    plain: Engine, sampling: dict[str, Any], first: int | None
) -> None:
    """The negative control: what the router must not do changes the answer."""
    body: dict[str, Any] = {"model": "tiny", "return_token_ids": True, "ignore_eos": True}

    async def check() -> None:
        async with new_session() as session:
            differ = 0
            for start in range(10, 20):
                prompt, path = list(range(start, 100 + start)), "/v1/completions"
                asked = body | sampling | {"max_tokens": 12}
                whole = await give(session, plain, Asked(path, asked | {"prompt": prompt}))
                begun = [*prompt, whole.token_ids[0] if first is None else first]
                rest = Asked(path, asked | {"prompt": begun, "max_tokens": 11})
                differ += (await give(session, plain, rest)).token_ids != whole.token_ids[1:]
            assert differ > 5

    asyncio.run(check())
