"""Tests P and D with hybrid models, which have state-space or linear-attention layers, in real
vLLM: right tokens through pull and push, with any TP sizes and chunks, also after the death of each
process.

Falcon-H1 computes in float32, and its tokens must be equal. vLLM's CPU kernels compute Qwen3-Next
in bfloat16 only, where two prompts in one batch may change the last bits. So where its tokens
differ, the plain vLLM must have rated both tokens nearly alike.
"""

import asyncio
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.compatibility.hybrids import HybridOutcomes
from tests.e2e.harness import Answer, Engine, Prompt, ask, ask_all, metrics, new_session, prefill
from tests.sampling import exhaustive
from tests.vllm.abused_cluster import SOON_S
from tests.vllm.documented import documented
from tests.vllm.fleet import BY_MODULE_PATH, PYTHON, Fleet, ready
from tests.vllm.killed import assert_right_or_error, kill_p_while_d_reads, kill_while_kv_moves
from tests.vllm.vllm_asking import assert_free, random_prompts

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

MAKER = Path(__file__).with_name("hybrid_models.py")
MODELS = {
    # vLLM's CPU kernel for Mamba2 fails with prefix caching.
    "falcon-h1": ("--dtype", "float32", "--no-enable-prefix-caching"),
    "qwen3-next": ("--dtype", "bfloat16", "--enable-prefix-caching"),
}
PROMPTS = random_prompts(100, seed=5, longest=1000)
WITH_LOGPROBS = {"logprobs": 5, "return_tokens_as_token_ids": True}
TIE = 0.25
"""The largest difference of two log probabilities that bfloat16 may have changed into the opposite.
"""
LEASE = {"kv_lease_duration": 10}
LOG_LINES = 500


@dataclass(frozen=True)
class Hybrid:
    """A hybrid model, P and D that push, and kvferry's router in front of them."""

    name: str
    fleet: Fleet
    right: list[Answer]
    """The answers of a plain vLLM to `PROMPTS`."""
    p: Engine
    d: Engine
    router: Engine

    def start(self, name: str, *flags: str, **changes: Any) -> Engine:
        """Start a vLLM server that pulls."""
        settings = {"transfer": BY_MODULE_PATH, **changes}
        return self.fleet.vllm(name, *MODELS[self.name], *flags, **settings)

    def check(self, answers: Sequence[Answer]) -> None:
        """Check the answers to the first prompts."""
        for number, (answer, right) in enumerate(zip(answers, self.right, strict=False)):
            assert agrees(answer, right, 0 if self.name == "falcon-h1" else TIE), number


def agrees(answer: Answer, right: Answer, tie: float) -> bool:
    """Whether the tokens are equal up to the first one where the plain vLLM was undecided."""
    if not answer.is_ok:
        return False
    (ours,), (theirs,) = answer.token_ids, right.token_ids
    for index, (token, other) in enumerate(zip(ours, theirs, strict=True)):
        if token != other:
            rated = right.body["choices"][0]["logprobs"]["top_logprobs"][index]
            ratings = [rated.get(f"token_id:{each}") for each in (token, other)]
            return None not in ratings and abs(ratings[0] - ratings[1]) < tie
    return True


@pytest.fixture(scope="module", params=["falcon-h1", pytest.param("qwen3-next", marks=exhaustive)])
def hybrid(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path
) -> Iterator[Hybrid]:
    name = request.param
    directory = tmp_path_factory.mktemp(name)
    subprocess.run([PYTHON, MAKER, name, directory / "model"], check=True)
    for file in model.glob("tokenizer*"):
        shutil.copy(file, directory / "model")
    for_p, for_d = documented("Push")
    chunks = ("--max-num-batched-tokens", "256", "--max-num-seqs", "64")
    with Fleet(directory, directory / "model") as fleet:
        plain = fleet.vllm("plain", *MODELS[name], transfer=None, cores="0-1")
        ready(plain)
        right = asyncio.run(ask_all(plain, PROMPTS, concurrency=8, timeout_s=240, **WITH_LOGPROBS))
        assert [answer.status for answer in right] == [200] * len(PROMPTS)
        fleet.stop(plain)
        p = fleet.vllm("prefill", *MODELS[name], *chunks, transfer=for_p.transfer, extra=LEASE)
        d = fleet.vllm("decode", *MODELS[name], transfer=for_d.transfer, extra=LEASE, cores="1")
        router = fleet.kvferry_router([p], [d])
        ready(p, d, router)
        yield Hybrid(name, fleet, right, p, d, router)


@pytest.fixture(scope="session")
def outcomes() -> HybridOutcomes:
    return HybridOutcomes()


async def pull(p: Engine, d: Engine, prompts: Sequence[Prompt]) -> list[Answer]:
    """Send each prompt to P, and then to D with P's parameters, as a router does."""
    gate = asyncio.Semaphore(8)

    async def one(prompt: Prompt) -> Answer:
        async with gate:
            params = await prefill(session, p, prompt)
            return await ask(session, d, prompt, kv_transfer_params=params)

    async with new_session(240) as session:
        return list(await asyncio.gather(*map(one, prompts)))


async def check_loads(hybrid: Hybrid, asked: Any, num_prompts: int) -> None:
    """Check that D has loaded the KV of every prompt, and that no block is left."""
    async with new_session(240) as session:
        before = await metrics(session, hybrid.d)
        hybrid.check(await asked)
        after = await metrics(session, hybrid.d)
        for name, count in (("finished", num_prompts), ("failed", 0)):
            found = f"kvferry:{name}_loads_total"
            assert after[found] - before[found] == count
        await assert_free(session, hybrid.p, hybrid.d, timeout_s=SOON_S)


def test_pulled_tokens_equal_a_plain_vllms(hybrid: Hybrid, outcomes: HybridOutcomes) -> None:
    asyncio.run(check_loads(hybrid, pull(hybrid.p, hybrid.d, PROMPTS), len(PROMPTS)))
    outcomes.add(hybrid.name, "pull, chunks of 256 tokens", len(PROMPTS))


def test_pushed_tokens_equal_a_plain_vllms(hybrid: Hybrid, outcomes: HybridOutcomes) -> None:
    async def check() -> None:
        async with new_session(60) as session:
            # From this answer the router learns that P pushes.
            assert (await ask(session, hybrid.router, Prompt(tuple(range(20, 40)), 2))).is_ok
            asked = ask_all(
                hybrid.router, PROMPTS, concurrency=8, timeout_s=240, cache_salt="pushed"
            )
            await check_loads(hybrid, asked, len(PROMPTS))
            pushed = (await metrics(session, hybrid.router))["kvferry:router_legs_at_once_total"]
            assert pushed >= len(PROMPTS)

    asyncio.run(check())
    outcomes.add(hybrid.name, "push", len(PROMPTS))


@pytest.mark.parametrize(
    "part",
    ["recurrent", pytest.param("conv", marks=exhaustive), pytest.param("attn", marks=exhaustive)],
)
def test_a_corrupted_part_changes_the_tokens(hybrid: Hybrid, part: str) -> None:
    """The negative control of all comparisons here, for each kind of state and for attention."""
    faults = {"KVFERRY_FAULTS": f"corrupt:every=1;corrupt:regions={part}"}
    d = hybrid.start("corrupted decode", cores="1", environment=faults)
    ready(d)
    chosen = [n for n, prompt in enumerate(PROMPTS) if len(prompt.token_ids) < 100][:10]
    answers = asyncio.run(pull(hybrid.p, d, [PROMPTS[n] for n in chosen]))
    hybrid.fleet.stop(d)
    assert all(answer.is_ok for answer in answers)
    right = [agrees(a, hybrid.right[n], TIE) for a, n in zip(answers, chosen, strict=True)]
    assert sum(right) <= len(chosen) // 2, right


@exhaustive
@pytest.mark.parametrize("chunk", [48, 128, 1024])
def test_p_may_compute_the_prompt_in_any_chunks(
    hybrid: Hybrid, outcomes: HybridOutcomes, chunk: int
) -> None:
    sizes = ("--max-num-batched-tokens", str(chunk), "--max-num-seqs", "8")
    p = hybrid.start("chunked prefill", *sizes)
    ready(p)
    asyncio.run(check_pair(hybrid, p, hybrid.d, PROMPTS[:40]))
    hybrid.fleet.stop(p)
    outcomes.add(hybrid.name, f"chunks of {chunk} tokens", 40)


@exhaustive
@pytest.mark.parametrize(("at_p", "at_d"), [(2, 1), (1, 2), (2, 2)])
def test_tensor_parallel_sizes_may_differ(
    hybrid: Hybrid, outcomes: HybridOutcomes, at_p: int, at_d: int
) -> None:
    p, d = (
        hybrid.start(
            f"{role} with TP {size}",
            "--tensor-parallel-size",
            str(size),
            cores="0|1" if size == 2 else core,
        )
        for role, size, core in (("prefill", at_p, "0"), ("decode", at_d, "1"))
    )
    ready(p, d)
    asyncio.run(check_pair(hybrid, p, d, PROMPTS[:30]))
    hybrid.fleet.stop(p)
    hybrid.fleet.stop(d)
    outcomes.add(hybrid.name, f"TP {at_p} → {at_d}", 30)


@exhaustive
def test_d_continues_from_its_own_prefix_cache(hybrid: Hybrid, outcomes: HybridOutcomes) -> None:
    if "--enable-prefix-caching" not in MODELS[hybrid.name]:
        pytest.skip("vLLM's CPU kernels do not support prefix caching for this model")
    heads = [prompt for prompt in PROMPTS if len(prompt.token_ids) > 300][:10]
    longer = [
        Prompt((*prompt.token_ids, *range(50 + number, 250 + number)), 16)
        for number, prompt in enumerate(heads)
    ]

    async def check() -> None:
        async with new_session(240) as session:
            right = [await ask(session, hybrid.p, prompt, **WITH_LOGPROBS) for prompt in longer]
            name = "vllm:prefix_cache_hits_total"
            # D keeps states at the boundaries of the chunks that it computes itself.
            assert all(answer.is_ok for answer in await ask_all(hybrid.d, heads, timeout_s=120))
            before = (await metrics(session, hybrid.d))[name]
            answers = await pull(hybrid.p, hybrid.d, longer)
            assert (await metrics(session, hybrid.d))[name] > before
            assert all(agrees(*pair, TIE) for pair in zip(answers, right, strict=True))
            await assert_free(session, hybrid.p, hybrid.d, timeout_s=SOON_S)

    asyncio.run(check())
    outcomes.add(hybrid.name, "prefix caching on both sides", len(longer))


@exhaustive
@pytest.mark.parametrize(
    ("what", "flags", "environment", "reason"),
    [
        (
            "`VLLM_SSM_CONV_STATE_LAYOUT`",
            (),
            {"VLLM_SSM_CONV_STATE_LAYOUT": "SD"},
            "ssm_conv_state_layout: ours 'SD', theirs 'DS'",
        ),
        (
            "`--mamba-ssm-cache-dtype`",
            ("--mamba-ssm-cache-dtype", "float16"),
            {},
            "mamba_ssm_cache_dtype: ours 'float16', theirs 'auto'",
        ),
    ],
    ids=["layout", "dtype"],
)
def test_other_states_are_refused_by_name(
    hybrid: Hybrid,
    outcomes: HybridOutcomes,
    what: str,
    flags: tuple[str, ...],
    environment: dict[str, str],
    reason: str,
) -> None:
    d = hybrid.start("other decode", *flags, cores="1", environment=environment)
    ready(d)
    (answer,) = asyncio.run(pull(hybrid.p, d, PROMPTS[:1]))
    log = "\n".join(d.process.tail(LOG_LINES))
    hybrid.fleet.stop(d)
    assert not answer.is_ok
    assert reason in log, log
    outcomes.refusals[what] = f"at the handshake: `{reason}`"


@exhaustive
@pytest.mark.parametrize(
    ("what", "transfer", "flags", "reason"),
    [
        (
            "`OffloadingConnector`",
            {
                "kv_connector": "OffloadingConnector",
                "kv_connector_module_path": "kvferry.vllm",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20},
            },
            (),
            "OffloadingConnector does not support models with state-space or linear-attention "
            "layers",
        ),
        (
            "speculative decoding",
            BY_MODULE_PATH,
            ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'),
            "does not transfer with speculative decoding yet",
        ),
    ],
    ids=["tiers", "speculation"],
)
def test_what_cannot_be_served_is_refused_at_start_up(
    hybrid: Hybrid,
    outcomes: HybridOutcomes,
    what: str,
    transfer: dict[str, Any],
    flags: tuple[str, ...],
    reason: str,
) -> None:
    engine = hybrid.start("refused", *flags, transfer=transfer)
    with pytest.raises(AssertionError, match="exited with code 1"):
        ready(engine)
    log = "\n".join(engine.process.tail(LOG_LINES))
    hybrid.fleet.stop(engine)
    assert reason in log, log
    outcomes.refusals[what] = f"at start-up: `{reason}`"


async def check_pair(hybrid: Hybrid, p: Engine, d: Engine, prompts: Sequence[Prompt]) -> None:
    async with new_session(240) as session:
        before = (await metrics(session, d))["kvferry:finished_loads_total"]
        hybrid.check(await pull(p, d, prompts))
        after = (await metrics(session, d))["kvferry:finished_loads_total"]
        assert after - before == len(prompts)
        await assert_free(session, p, d, timeout_s=SOON_S)


def test_a_lease_without_a_reader_ends_and_frees_blocks_and_states(hybrid: Hybrid) -> None:
    async def check() -> None:
        async with new_session(60) as session:
            before = (await metrics(session, hybrid.p))["kvferry:kv_expired_reqs_total"]
            for prompt in PROMPTS[:3]:
                await prefill(session, hybrid.p, prompt)
            assert (await metrics(session, hybrid.p))["vllm:kv_cache_usage_perc"] > 0
            await assert_free(session, hybrid.p)
            after = (await metrics(session, hybrid.p))["kvferry:kv_expired_reqs_total"]
            assert after - before == 3

    asyncio.run(check())


def test_an_engine_that_is_killed_costs_the_other_nothing(hybrid: Hybrid) -> None:
    """D is killed while it loads, and P while a D reads from it. The last test with P and D."""
    prompts, right = PROMPTS[:12], hybrid.right[:12]

    async def check() -> None:
        async with new_session(120) as session:
            other = hybrid.start("second decode", cores="1")
            router = hybrid.fleet.kvferry_router([hybrid.p], [other])
            ready(other, router)
            answers = await kill_while_kv_moves(session, other, other, router, prompts)
            assert_right_or_error(answers, right)
            assert not all(answer.is_ok for answer in answers), "D was killed too late"
            await assert_free(session, hybrid.p)
            answers = await kill_p_while_d_reads(session, hybrid.p, hybrid.d, prompts[:4])
            assert not any(answer.is_ok for answer in answers)
            await assert_free(session, hybrid.d)
            hybrid.check(await ask_all(hybrid.d, PROMPTS[:8], timeout_s=120))

    asyncio.run(check())


@exhaustive
def test_the_page_shows_the_results(outcomes: HybridOutcomes) -> None:
    outcomes.check_page(set(MODELS))
