"""Tests push with real engines over each transport: both legs start together, and the tokens are
those of a single engine. A control must differ.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.conftest import PATIENT, random_prompts
from tests.e2e.harness import (
    Answer,
    Cluster,
    Engine,
    Prompt,
    Starting,
    ask,
    ask_all,
    assert_quiescent,
    metrics,
    new_session,
)
from tests.sampling import sampled

pytestmark = pytest.mark.slow

GREEDY = random_prompts(60, seed=51, longest=600)
TRANSPORTS = ("shm", "nixl", "tcp")
TP_SIZES = (1, 2)


@dataclass(frozen=True)
class Pushing:
    transport: str
    sizes: tuple[int, int]
    p: Engine
    d: Engine
    router: Engine

    async def moved(self, session: Any) -> tuple[float, float, float]:
        """Return the bytes moved by the transport, the finished loads and the failed loads. Over
        tcp P writes, with other transports D reads.
        """
        seen, mover = (
            await metrics(session, self.d),
            await metrics(session, self.p if self.transport == "tcp" else self.d),
        )
        ended = (
            seen.get("kvferry:finished_loads_total", 0),
            seen.get("kvferry:failed_loads_total", 0),
        )
        return mover.get(f"kvferry:transfer_bytes_total/{self.transport}", 0), *ended

    async def at_once(self, session: Any) -> float:
        """Return how many requests the router has sent to P and D at the same time."""
        return (await metrics(session, self.router))["kvferry:router_legs_at_once_total"]

    @property
    def salt(self) -> str:
        """The cache salt of this pair: its engines use nothing that they computed or received for
        another pair.
        """
        return f"{self.sizes}"


@dataclass(frozen=True)
class Four:
    """Two prefill engines and two decode engines, one of each tensor-parallel size, and a router
    for each pair that a test uses.
    """

    cluster: Cluster
    transport: str
    prefill: dict[int, Engine]
    decode: dict[int, Engine]
    _pairs: dict[tuple[int, int], Pushing] = field(default_factory=dict)

    def pair(self, sizes: tuple[int, int]) -> Pushing:
        if sizes not in self._pairs:
            p, d = self.prefill[sizes[0]], self.decode[sizes[1]]
            self._pairs[sizes] = Pushing(
                self.transport, sizes, p, d, self.cluster.proxy([p], [d]).ready()
            )
        return self._pairs[sizes]


def start(
    cluster: Cluster,
    name: str,
    size: int,
    transport: str,
    environment: dict[str, str] | None = None,
    **settings: str,
) -> Starting:
    extra = {"transports": [transport], **PATIENT, **settings}
    flags = ("--tensor-parallel-size", str(size))
    return cluster.serve(
        name, *flags, extra=extra, environment=environment, connector="NixlPushConnector"
    )


@pytest.fixture(scope="module")
def expected(plain: Engine) -> list[Answer]:
    return asyncio.run(ask_all(plain, GREEDY))


@pytest.fixture(scope="module", params=TRANSPORTS)
def four(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path
) -> Iterator[Four]:
    transport: str = request.param
    with Cluster(tmp_path_factory.mktemp(transport), model) as cluster:
        starting = {
            (name, size): start(cluster, f"{name} {size}", size, transport)
            for name in ("prefill", "decode")
            for size in (1, 2)
        }
        engines = {key: process.ready() for key, process in starting.items()}
        prefill, decode = (
            {size: engines[name, size] for size in (1, 2)} for name in ("prefill", "decode")
        )
        yield Four(cluster, transport, prefill, decode)


@pytest.fixture
def pushing(four: Four, p_size: int, d_size: int) -> Pushing:
    return four.pair((p_size, d_size))


# Module scope puts tests of one transport next to each other, so that its engines start once.
every_pair = pytest.mark.parametrize(
    ("four", "p_size", "d_size"),
    sampled(TRANSPORTS, TP_SIZES, TP_SIZES),
    indirect=["four"],
    scope="module",
)


@every_pair
def test_greedy_tokens_equal_a_single_engines_and_blocks_are_free_long_before_the_lease_ends(
    pushing: Pushing, expected: list[Answer]
) -> None:
    async def check() -> None:
        async with new_session() as session:
            before = await pushing.moved(session)
            answers = await ask_all(pushing.router, GREEDY, cache_salt=pushing.salt)
            assert [answer.status for answer in answers] == [200] * len(GREEDY)
            assert answers == expected
            moved, finished, failed = (
                now - then for now, then in zip(await pushing.moved(session), before, strict=True)
            )
            assert (moved > 0, finished >= 30, failed) == (True, True, 0)
            assert await pushing.at_once(session) >= 40
            await assert_quiescent(session, pushing.p, pushing.d)

    asyncio.run(check())


@every_pair
def test_several_choices_share_one_prefill(pushing: Pushing, plain: Engine) -> None:
    prompt = Prompt(tuple(range(20, 220)), n=4, temperature=0.9, seed=5)

    async def check() -> None:
        async with new_session() as session:
            answer = await ask(session, pushing.router, prompt, cache_salt=pushing.salt)
            assert answer == await ask(session, plain, prompt)
            assert len(set(answer.token_ids)) == 4
            await assert_quiescent(session, pushing.p, pushing.d)

    asyncio.run(check())


def test_one_corrupted_block_in_transit_changes_the_tokens(four: Four) -> None:
    """The negative control of everything above: the same comparison must see a wrong byte."""
    d = start(
        four.cluster, "corrupted decode", 1, four.transport, {"KVFERRY_FAULTS": "corrupt:every=1"}
    ).ready()
    made = Pushing(
        four.transport,
        (1, 1),
        four.prefill[1],
        d,
        four.cluster.proxy([four.prefill[1]], [d]).ready(),
    )
    prompts = [
        Prompt(prompt.token_ids + tuple(range(100, 120)))
        for prompt in random_prompts(8, seed=3, longest=200)[2:]
    ]

    async def check() -> None:
        await ask_all(made.router, [Prompt((1, 2, 3))])
        moved = await ask_all(made.router, prompts)
        plain = await ask_all(made.p, prompts)
        assert [answer.status for answer in moved] == [200] * len(prompts)
        assert all(a.token_ids != b.token_ids for a, b in zip(moved, plain, strict=True))
        async with new_session() as session:
            assert await made.at_once(session) == len(prompts)

    asyncio.run(check())


@pytest.mark.parametrize("transport", [pytest.param("shm", marks=pytest.mark.exhaustive), "nixl"])
def test_p_writes_over_transports_without_a_fence_where_that_is_asked_for(
    transport: str, expected: list[Answer], model: Path, tmp_path: Path
) -> None:
    with Cluster(tmp_path, model) as cluster:
        starting = [
            start(cluster, name, 1, transport, push_write="always")
            for name in ("prefill", "decode")
        ]
        p, d = (process.ready() for process in starting)
        made = Pushing(transport, (1, 1), p, d, cluster.proxy([p], [d]).ready())

        async def check() -> None:
            assert await ask_all(made.router, GREEDY[:60]) == expected[:60]
            async with new_session() as session:
                by_p, by_d = [
                    (await metrics(session, side)).get(
                        f"kvferry:transfer_bytes_total/{transport}", 0
                    )
                    for side in (p, d)
                ]
                assert by_p > by_d, "only what was offered before there were blocks for it is read"
                await assert_quiescent(session, p, d)

        asyncio.run(check())
