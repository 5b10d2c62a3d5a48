"""Push: both legs start together, and the tokens are a single engine's, whatever carried the KV; and a control that must differ."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.conftest import PATIENT, random_prompts
from tests.e2e.harness import Answer, Cluster, Engine, Prompt, ask, ask_all, assert_quiescent, metrics, new_session

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

GREEDY = random_prompts(200, seed=51, longest=600)
PAIRS = [*(((p, d), plane) for p in (1, 2) for d in (1, 2) for plane in ("shm", "nixl")), ((1, 1), "tcp")]


@dataclass(frozen=True)
class Pushing:
    plane: str
    p: Engine
    d: Engine
    router: Engine

    async def at_once(self, session: Any) -> float:
        """Requests whose legs the router started together."""
        return (await metrics(session, self.router))["kvferry:router_legs_at_once_total"]


def start(cluster: Cluster, sizes: tuple[int, int], plane: str, faults: str = "") -> Pushing:
    starting = [
        cluster.serve(
            name,
            "--tensor-parallel-size",
            str(size),
            extra={"planes": [plane], **PATIENT},
            environment={"KVFERRY_FAULTS": spec} if spec else None,
            connector="NixlPushConnector",
        )
        for name, size, spec in (("prefill", sizes[0], ""), ("decode", sizes[1], faults))
    ]
    p, d = (process.ready() for process in starting)
    return Pushing(plane, p, d, cluster.proxy([p], [d]).ready())


@pytest.fixture(scope="module")
def expected(plain: Engine) -> list[Answer]:
    return asyncio.run(ask_all(plain, GREEDY))


@pytest.fixture(scope="module", params=PAIRS, ids=str)
def pushing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Pushing]:
    sizes, plane = request.param
    with Cluster(tmp_path_factory.mktemp(plane), model) as cluster:
        yield start(cluster, sizes, plane)


def test_greedy_tokens_equal_a_single_engines_and_blocks_are_free_long_before_the_lease_ends(
    pushing: Pushing, expected: list[Answer]
) -> None:
    async def check() -> None:
        answers = await ask_all(pushing.router, GREEDY)
        assert [answer.status for answer in answers] == [200] * len(GREEDY)
        assert answers == expected
        async with new_session() as session:
            seen = await metrics(session, pushing.d)
            # Over tcp P writes into what D has lent, elsewhere D reads.
            mover = pushing.p if pushing.plane == "tcp" else pushing.d
            assert (await metrics(session, mover))[f"kvferry:transfer_bytes_total/{pushing.plane}"] > 0
            assert seen["kvferry:finished_pulls_total"] >= 100
            assert seen["kvferry:failed_pulls_total"] == 0
            assert await pushing.at_once(session) >= 150
            await assert_quiescent(session, pushing.p, pushing.d)

    asyncio.run(check())


def test_several_choices_share_one_prefill(pushing: Pushing, plain: Engine) -> None:
    prompt = Prompt(tuple(range(20, 220)), n=4, temperature=0.9, seed=5)

    async def check() -> None:
        async with new_session() as session:
            answer = await ask(session, pushing.router, prompt)
            assert answer == await ask(session, plain, prompt)
            assert len(set(answer.token_ids)) == 4
            await assert_quiescent(session, pushing.p, pushing.d)

    asyncio.run(check())


@pytest.mark.parametrize("plane", ["shm", "nixl"])
def test_one_corrupted_block_in_transit_changes_the_tokens(cluster: Cluster, plane: str) -> None:
    """The negative control of everything above: the same comparison must see a wrong byte."""
    made = start(cluster, (1, 1), plane, "corrupt:every=1")
    prompts = [Prompt(prompt.token_ids + tuple(range(100, 120))) for prompt in random_prompts(8, seed=3, longest=200)[2:]]

    async def check() -> None:
        await ask_all(made.router, [Prompt((1, 2, 3))])
        moved = await ask_all(made.router, prompts)
        plain = await ask_all(made.p, prompts)
        assert [answer.status for answer in moved] == [200] * len(prompts)
        assert all(a.token_ids != b.token_ids for a, b in zip(moved, plain, strict=True))
        async with new_session() as session:
            assert await made.at_once(session) == len(prompts)

    asyncio.run(check())
