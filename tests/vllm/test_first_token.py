"""Tests answers that begin with P's token in real vLLM: tokens, text, usage and finish reasons are
those of one vLLM. Controls show that penalties and seeds would differ.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from tests.clients.environment import ask_with
from tests.e2e.harness import Engine, metrics, new_session
from tests.e2e.random_answers import Asked, give, give_all, random_requests
from tests.vllm.conftest import Trio
from tests.vllm.fleet import ready
from tests.vllm.vllm_asking import assert_free

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

FROM_PREFILL = "kvferry:router_first_tokens_from_prefill_total"
SETTINGS: dict[str, list[Any]] = {
    "ignore_eos": [True],
    "stop_token_ids": [list(range(0, 500, 3)), [7]],
    "include_stop_str_in_output": [True],
    "skip_special_tokens": [False],
    "top_p": [0.5],
    "min_p": [0.1],
    "seed": [11],
    "repetition_penalty": [1.5, 0.8],
    "logit_bias": [{"40": 100, "50": -100}],
    "allowed_token_ids": [list(range(20, 400))],
    "presence_penalty": [0, 1.5],  # those below and 1.5 take the usual path
    "stop": [["e"]],
    "min_tokens": [1],
}


@pytest.fixture(scope="module")
def early(trio: Trio) -> Iterator[Engine]:
    """A router that takes the first token from P."""
    router = trio.fleet.kvferry_router([trio.p], [trio.d], flags=["--first-token-from-prefill"])
    ready(router)
    yield router
    trio.fleet.stop(router)


def test_random_requests_get_the_answers_of_one_vllm(
    early: Engine, trio: Trio, pytestconfig: pytest.Config
) -> None:
    """60 requests; `make test-all` sends 500."""
    count = 500 if pytestconfig.getoption("--exhaustive") else 60
    asked = random_requests(count, 4, SETTINGS)

    async def check() -> None:
        given = await give_all(early, asked, timeout_s=240)
        # P without the router is one engine.
        right = await give_all(trio.p, asked, timeout_s=240)
        for request, one, two in zip(asked, right, given, strict=True):
            assert two == one, request
            assert len(two.answer_ids) == 1, request
        assert Counter(one.status for one in right) == {200: count}
        assert {one.finish_reason for one in right} == {"stop", "length"}
        async with new_session() as session:
            seen = await metrics(session, early)
            assert seen[FROM_PREFILL] > 0.1 * count
            await assert_free(session, trio.p, trio.d)

    asyncio.run(check())


@pytest.mark.parametrize("client", ["litellm", "langchain"])
def test_other_packages_get_the_answers_of_one_engine(
    early: Engine, trio: Trio, client: str
) -> None:
    async def num_early() -> float:
        async with new_session() as session:
            return (await metrics(session, early))[FROM_PREFILL]

    before = asyncio.run(num_early())
    found = ask_with(client, early.url, "tiny")
    assert found == ask_with(client, trio.p.url, "tiny")
    assert found["whole"] == found["streamed"] != ""
    assert asyncio.run(num_early()) - before >= 2


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0, "presence_penalty": 2.0},
        {"temperature": 0, "frequency_penalty": 2.0},
        {"temperature": 0.9, "seed": 5},
    ],
    ids=lambda sampling: str(list(sampling)[-1]),
)
def test_a_request_that_takes_the_usual_path_would_differ(
    trio: Trio, sampling: dict[str, Any]
) -> None:
    """The negative control: continued after its first token, such a request gets another answer."""
    body: dict[str, Any] = {"model": "tiny", "return_token_ids": True, "ignore_eos": True}

    async def check() -> None:
        async with new_session(120) as session:
            differ = 0
            for start in range(10, 20):
                prompt, path = list(range(start, 60 + start)), "/v1/completions"
                asked = body | sampling | {"max_tokens": 24}
                whole = await give(session, trio.p, Asked(path, asked | {"prompt": prompt}))
                begun = [*prompt, whole.token_ids[0]]
                rest = Asked(path, asked | {"prompt": begun, "max_tokens": 23})
                differ += (await give(session, trio.p, rest)).token_ids != whole.token_ids[1:]
            assert differ > 0

    asyncio.run(check())
