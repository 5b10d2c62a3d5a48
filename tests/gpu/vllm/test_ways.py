"""Tests real vLLM on a GPU: whatever way the KV takes from P to D, the tokens are those of a vLLM
without a connector.

One P pulls and one pushes. Each D uses one transport only, so that D decides the way.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

import pytest
import torch
from tests.e2e.harness import Answer, Engine, Prompt, ask, ask_all, metrics, new_session
from tests.gpu.vllm.gpu_fleet import GpuFleet, on_gpu
from tests.vllm.fleet import ready
from tests.vllm.right import BYTES_PER_TOKEN, PROMPTS
from tests.vllm.vllm_asking import assert_free, random_prompts, stream

from kvferry.engine.make_model.writer import make_model

pytestmark = on_gpu

TRANSPORTS: dict[str, dict[str, object]] = {
    "cuda_ipc": {"transports": ["cuda_ipc"]},
    "nixl bounce": {"transports": ["nixl"]},
    "nixl": {"transports": ["nixl"], "bounce_max_segment_bytes": 0},
}
MODES = ("pull", "push")
WAYS = [(transport, mode) for transport, mode in product(TRANSPORTS, MODES)]
CORRUPTED = [("cuda_ipc", "pull"), ("nixl bounce", "push"), ("nixl", "pull")]
OTHER_SHAPE = ("--block-size", "16")
OTHER_LAYOUT = {"VLLM_KV_CACHE_LAYOUT": "NHD"}
"""kvferry asks for HND."""
REUSING = {"bidirectional_kv_xfer": True, "kv_recompute_threshold": 0}
"""Requests that name no conversation are not affected."""
NUM_REQUESTS, NUM_WARM = 1000, 200
LEAK_BYTES = 64 << 20
"""Below 64 KiB for each request, above what torch's allocator takes at a time (20 MiB)."""


@dataclass
class Servers:
    fleet: GpuFleet
    plain: Engine
    p: dict[str, Engine]
    """By mode."""
    d: dict[tuple[str, str], Engine]
    """By transport and mode."""
    corrupted: dict[tuple[str, str], Engine]
    other: Engine
    """An engine with other blocks in another layout, which pulls or is read."""
    _routers: dict[tuple[int, int], Engine] = field(default_factory=dict)
    _right: list[Answer] = field(default_factory=list)

    @property
    def right(self) -> list[Answer]:
        """The answers of a vLLM without a connector to PROMPTS."""
        if not self._right:
            self._right = asyncio.run(ask_all(self.plain, PROMPTS, concurrency=8, timeout_s=240))
        return self._right

    def router(self, p: Engine, d: Engine) -> Engine:
        pair = (id(p), id(d))
        if pair not in self._routers:
            self._routers[pair] = self.fleet.kvferry_router([p], [d])
            ready(self._routers[pair])
            # From this answer a router learns whether P pushes.
            asyncio.run(ask_all(self._routers[pair], random_prompts(1, seed=id(d))))
        return self._routers[pair]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    directory = tmp_path_factory.mktemp("ways")
    make_model(directory / "tiny")
    corrupt = {"KVFERRY_FAULTS": "corrupt:every=1"}
    with GpuFleet(directory / "fleet", directory / "tiny") as fleet:
        made = Servers(
            fleet,
            fleet.start("plain", mode=None),
            {mode: fleet.start(f"P, {mode}", mode=mode, extra=REUSING) for mode in MODES},
            {
                (name, mode): fleet.start(
                    f"D, {name}, {mode}", mode=mode, extra=TRANSPORTS[name] | REUSING
                )
                for name, mode in WAYS
            },
            {
                (name, mode): fleet.start(
                    f"corrupted D, {name}, {mode}",
                    mode=mode,
                    extra=TRANSPORTS[name],
                    environment=corrupt,
                )
                for name, mode in CORRUPTED
            },
            fleet.start("other shape", *OTHER_SHAPE, environment=OTHER_LAYOUT),
        )
        ready(made.plain, *made.p.values(), *made.d.values(), *made.corrupted.values(), made.other)
        yield made


@pytest.mark.parametrize(("transport", "mode"), WAYS)
def test_tokens_of_100_prompts_equal_a_plain_vllms(
    servers: Servers, transport: str, mode: str
) -> None:
    p, d = servers.p[mode], servers.d[transport, mode]
    router, right = servers.router(p, d), servers.right
    assert [answer.status for answer in right] == [200] * len(PROMPTS)
    moved = f"kvferry:transfer_bytes_total/{transport.split()[0]}"

    async def check() -> None:
        async with new_session(60) as session:
            before = await metrics(session, d)
            assert await ask_all(router, PROMPTS, concurrency=8, timeout_s=240) == right
            after = await metrics(session, d)
            # The KV did move, and this way: D has not computed these prompts.
            num_bytes = sum(len(prompt.token_ids) - 1 for prompt in PROMPTS) * BYTES_PER_TOKEN
            assert after[moved] - before.get(moved, 0) >= num_bytes
            loads = "kvferry:finished_loads_total"
            assert after[loads] - before[loads] == len(PROMPTS)
            at_once = (await metrics(session, router)).get("kvferry:router_legs_at_once_total", 0)
            assert at_once == (len(PROMPTS) if mode == "push" else 0)
            await assert_free(session, p, d)

    asyncio.run(check())


@pytest.mark.parametrize(("transport", "mode"), CORRUPTED)
def test_one_corrupted_block_in_transit_changes_the_tokens(
    servers: Servers, transport: str, mode: str
) -> None:
    """The negative control of the comparison above."""
    router = servers.router(servers.p[mode], servers.corrupted[transport, mode])
    chosen = [
        (prompt, answer)
        for prompt, answer in zip(PROMPTS, servers.right, strict=True)
        if len(prompt.token_ids) < 200
    ][:8]
    answers = asyncio.run(ask_all(router, [prompt for prompt, _ in chosen], timeout_s=60))
    assert [answer.status for answer in answers] == [200] * len(chosen)
    assert all(
        answer.token_ids != plain.token_ids
        for answer, (_, plain) in zip(answers, chosen, strict=True)
    )


@pytest.mark.parametrize("is_other_p", [False, True], ids=["32 HND to 16 NHD", "16 NHD to 32 HND"])
def test_tokens_with_unequal_block_sizes_and_layouts(servers: Servers, is_other_p: bool) -> None:
    p, d = servers.p["pull"], servers.other
    if is_other_p:
        p, d = servers.other, servers.d["cuda_ipc", "pull"]

    async def check() -> None:
        async with new_session(60) as session:
            # Another salt keeps D from using KV that an earlier test has brought.
            before = (await metrics(session, d))["kvferry:finished_loads_total"]
            answers = await ask_all(router, PROMPTS, concurrency=8, timeout_s=240, cache_salt="s")
            assert answers == servers.right
            after = (await metrics(session, d))["kvferry:finished_loads_total"]
            assert after - before == len(PROMPTS)
            await assert_free(session, p, d)

    router = servers.router(p, d)
    asyncio.run(check())


@pytest.mark.parametrize(("transport", "mode"), [("cuda_ipc", "pull"), ("nixl bounce", "push")])
def test_conversations_reuse_what_d_computed(servers: Servers, transport: str, mode: str) -> None:
    p, d = servers.p[mode], servers.d[transport, mode]
    router = servers.router(p, d)
    fetched = "kvferry:reuse_loaded_tokens_total"
    openings = random_prompts(4, seed=7, shortest=100, longest=400)
    additions = iter(random_prompts(20, seed=8, shortest=20, longest=60))

    async def converse(name: str, opening: Prompt, later: list[Prompt]) -> None:
        prompt = opening.token_ids
        async with new_session(60) as session:
            for addition in later:
                asked = Prompt(prompt, max_tokens=40)
                answer = await stream(session, router, asked, conversation_id=name)
                assert answer == (await ask(session, servers.plain, asked)).token_ids[0]
                prompt += answer + addition.token_ids

    async def check() -> None:
        async with new_session(60) as session:
            before = (await metrics(session, p)).get(fetched, 0)
            talks = [
                (f"{transport} {n}", o, [next(additions) for _ in range(5)])
                for n, o in enumerate(openings)
            ]
            await asyncio.gather(*(converse(*talk) for talk in talks))
            # P has the prompts in its own prefix cache; the answers come from D.
            assert (await metrics(session, p))[fetched] > before

    asyncio.run(check())


@pytest.mark.parametrize(("transport", "mode"), [("cuda_ipc", "pull"), ("nixl bounce", "push")])
def test_a_thousand_requests_take_no_device_memory(
    servers: Servers, transport: str, mode: str
) -> None:
    router = servers.router(servers.p[mode], servers.d[transport, mode])
    prompts = random_prompts(NUM_WARM + NUM_REQUESTS, seed=9, longest=300, max_tokens=2)

    def send(part: list[Prompt]) -> int:
        """Return the device memory in use afterwards."""
        answers = asyncio.run(ask_all(router, part, concurrency=24, timeout_s=200))
        assert [answer.status for answer in answers] == [200] * len(part)
        free, total = torch.cuda.mem_get_info()
        return int(total - free)

    before = send(prompts[:NUM_WARM])
    assert send(prompts[NUM_WARM:]) - before < LEAK_BYTES
