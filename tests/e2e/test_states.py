"""Tests a model with states in P and D behind a router, with pull and with push: the tokens are
those of a single engine.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.conftest import PATIENT, random_prompts
from tests.e2e.harness import (
    Answer,
    Cluster,
    Engine,
    ask_all,
    assert_leaving_costs_nothing,
    assert_quiescent,
    metrics,
    new_session,
)

from kvferry.engine.make_model.writer import make_model

pytestmark = pytest.mark.slow

PROMPTS = random_prompts(30, seed=81, longest=300)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hybrid") / "tiny"
    make_model(directory, family="hybrid")
    return directory


@pytest.fixture(scope="module")
def expected(hybrid: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    with Cluster(tmp_path_factory.mktemp("plain"), hybrid) as cluster:
        return asyncio.run(ask_all(cluster.serve("plain", is_plain=True).ready(), PROMPTS))


@pytest.fixture(
    params=[("NixlConnector", "nixl"), ("NixlPushConnector", "shm"), ("NixlPushConnector", "tcp")],
    ids=" over ".join,
)
def pair(
    request: pytest.FixtureRequest, hybrid: Path, tmp_path: Path
) -> Iterator[tuple[Engine, Engine, Engine]]:
    connector, transport = request.param
    extra = {"transports": [transport], **PATIENT}
    with Cluster(tmp_path, hybrid) as cluster:
        starting = [
            cluster.serve(name, extra=extra, connector=connector) for name in ("prefill", "decode")
        ]
        p, d = (process.ready() for process in starting)
        # The token that P samples means nothing here, so the setting must change nothing.
        yield p, d, cluster.proxy([p], [d], "--first-token-from-prefill").ready()


def test_tokens_equal_a_single_engines_and_no_block_is_left_behind(
    pair: tuple[Engine, Engine, Engine], expected: list[Answer]
) -> None:
    p, d, router = pair

    async def check() -> None:
        answers = await ask_all(router, PROMPTS)
        assert [answer.status for answer in answers] == [200] * len(PROMPTS)
        assert answers == expected
        async with new_session() as session:
            seen = await metrics(session, d)
            num_loadable = sum(len(prompt.token_ids) > 1 for prompt in PROMPTS)
            assert seen["kvferry:finished_loads_total"] == num_loadable
            assert seen["kvferry:failed_loads_total"] == 0
            await assert_quiescent(session, p, d)
        await assert_leaving_costs_nothing(router, p, d, num_tokens=200, count=8)

    asyncio.run(check())
