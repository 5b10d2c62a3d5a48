"""Tests the front-end through real HTTP, over a real core with a generated model."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.engine.api.kit import PrivateMemoryKit
from tests.engine.api.stage import DEADLINE_S, Stage, events_of, serving

from kvferry.engine.api.serve import fast_loop_factory
from kvferry.engine.api.tokenizer import ModelTokenizer, SpecialTokens
from kvferry.engine.client import EngineClient
from kvferry.engine.messages import CoreStatus
from kvferry.engine.options import EngineOptions

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Running:
    """A served engine and the event loop that serves it."""

    loop: asyncio.Runner
    client: EngineClient
    stage: Stage

    def run(self, scene: Coroutine[Any, Any, None]) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(DEADLINE_S):
                await scene
                await quiescent(self.client)

        self.loop.run(bounded())


@asynccontextmanager
async def served(checkpoint: Path) -> AsyncIterator[tuple[EngineClient, Stage]]:
    options = EngineOptions(checkpoint, num_blocks=256, max_model_len=512)
    client = await EngineClient.start(options, PrivateMemoryKit(), timeout_s=60)
    try:
        async with serving(client, checkpoint) as stage:
            yield client, stage
    finally:
        await client.close()


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Running]:
    # `kvferry serve` uses this loop, whose transports are not asyncio's.
    with asyncio.Runner(loop_factory=fast_loop_factory()) as loop:
        context = served(checkpoint)
        client, stage = loop.run(context.__aenter__())
        try:
            yield Running(loop, client, stage)
        finally:
            loop.run(context.__aexit__(None, None, None))


async def quiescent(client: EngineClient) -> CoreStatus:
    """Wait until nothing runs and no block is held."""
    while True:
        status = await client.status()
        if not (status.num_running or status.num_waiting or status.num_used_blocks):
            return status
        await asyncio.sleep(0.005)


def greedy(**body: Any) -> dict[str, Any]:
    return {
        "temperature": 0,
        "max_tokens": 12,
        "ignore_eos": True,
        "return_token_ids": True,
        **body,
    }


def test_text_and_token_id_prompts_agree_and_another_prompt_differs(
    engine: Running, checkpoint: Path
) -> None:
    async def scene() -> None:
        tokenizer = ModelTokenizer.load(checkpoint)
        token_ids = tokenizer.encode("the people of the world", SpecialTokens.WITH)
        by_text = await engine.stage.complete(**greedy(prompt="the people of the world"))
        by_ids = await engine.stage.complete(**greedy(prompt=token_ids))
        other = await engine.stage.complete(**greedy(prompt="another day at work"))
        assert by_text["choices"][0] == by_ids["choices"][0]
        assert by_text["choices"][0]["prompt_token_ids"] == token_ids
        assert len(by_text["choices"][0]["token_ids"]) == 12
        assert by_text["choices"][0]["text"] == tokenizer.decode(
            by_text["choices"][0]["token_ids"], SpecialTokens.WITHOUT
        )
        assert other["choices"][0]["token_ids"] != by_text["choices"][0]["token_ids"]

    engine.run(scene())


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0}, {"temperature": 1.0, "seed": 11, "n": 3, "logprobs": 2}]
)
def test_a_stream_says_what_the_whole_answer_says(
    engine: Running, sampling: dict[str, Any]
) -> None:
    async def scene() -> None:
        body = greedy(prompt="time and time again") | sampling
        whole = await engine.stage.complete(**body)
        chunks = await engine.stage.stream(COMPLETIONS, **body)
        for choice in whole["choices"]:
            own = [
                chunk["choices"][0]
                for chunk in chunks
                if chunk["choices"][0]["index"] == choice["index"]
            ]
            assert "".join(part["text"] for part in own) == choice["text"]
            assert [token for part in own for token in part["token_ids"]] == choice["token_ids"]
            assert own[-1]["finish_reason"] == choice["finish_reason"] == "length"

    engine.run(scene())


def test_a_seed_fixes_the_tokens_and_samples_of_one_request_differ(engine: Running) -> None:
    async def scene() -> None:
        body = greedy(prompt="many years", temperature=1.0, seed=3, n=2, max_tokens=20)
        first = [choice["token_ids"] for choice in (await engine.stage.complete(**body))["choices"]]
        again = [choice["token_ids"] for choice in (await engine.stage.complete(**body))["choices"]]
        moved = [
            choice["token_ids"]
            for choice in (await engine.stage.complete(**body | {"seed": 4, "n": 1}))["choices"]
        ]
        assert first == again
        assert first[0] != first[1]
        assert moved[0] == first[1]

    engine.run(scene())


def test_a_stop_string_cuts_the_text_and_frees_the_request(engine: Running) -> None:
    async def scene() -> None:
        full = (await engine.stage.complete(**greedy(prompt="what is life", max_tokens=40)))[
            "choices"
        ][0]["text"]
        stop = full[10:13]
        cut = (
            await engine.stage.complete(**greedy(prompt="what is life", max_tokens=400, stop=stop))
        )["choices"][0]
        assert cut["text"] == full[: full.index(stop)]
        assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
        assert len(cut["token_ids"]) < 40

    engine.run(scene())


def test_a_stop_token_ends_the_sequence(engine: Running) -> None:
    async def scene() -> None:
        full = (await engine.stage.complete(**greedy(prompt="what is life")))["choices"][0][
            "token_ids"
        ]
        cut = (
            await engine.stage.complete(**greedy(prompt="what is life", stop_token_ids=[full[3]]))
        )["choices"][0]
        assert cut["token_ids"] == full[: full.index(full[3]) + 1]
        assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", full[3])

    engine.run(scene())


def test_chat_works_both_ways(engine: Running) -> None:
    async def scene() -> None:
        body = greedy(
            messages=[{"role": "user", "content": "hello"}], logprobs=True, top_logprobs=3
        )
        status, whole = await engine.stage.post(CHAT, body)
        assert status == 200, whole
        (choice,) = whole["choices"]
        chunks = await engine.stage.stream(CHAT, **body)
        assert (
            "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
            == choice["message"]["content"]
        )
        for token in choice["logprobs"]["content"]:
            ranked = [top["logprob"] for top in token["top_logprobs"]]
            assert len(ranked) == 3
            assert ranked == sorted(ranked, reverse=True)
            assert token["logprob"] == ranked[0]

    engine.run(scene())


def test_a_prefix_computed_before_is_counted_as_cached(engine: Running) -> None:
    async def scene() -> None:
        prompt = [100 + step % 90 for step in range(64)]
        cached = [
            (await engine.stage.complete(**greedy(prompt=prompt)))["usage"][
                "prompt_tokens_details"
            ]["cached_tokens"]
            for _ in range(2)
        ]
        assert cached[0] == 0
        assert 32 <= cached[1] < 64
        salted = await engine.stage.complete(**greedy(prompt=prompt, cache_salt="mine"))
        assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

    engine.run(scene())


def test_clients_that_leave_free_everything(engine: Running) -> None:
    async def scene() -> None:
        body = {"prompt": "on and on", "max_tokens": 480, "ignore_eos": True}
        asking = [
            asyncio.ensure_future(
                engine.stage.post(COMPLETIONS, {**body, "n": 2, "stream": stream})
            )
            for stream in (False, True) * 3
        ]
        while (await engine.client.status()).num_running < 2:
            await asyncio.sleep(0.002)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    engine.run(scene())


def test_many_requests_at_once_get_the_tokens_they_get_alone(engine: Running) -> None:
    async def scene() -> None:
        prompts = [
            [40 + (step * (7 + which)) % 400 for step in range(5 + 9 * which)] for which in range(8)
        ]
        alone = [
            (await engine.stage.complete(**greedy(prompt=prompt)))["choices"][0]["token_ids"]
            for prompt in prompts
        ]
        answers = await asyncio.gather(
            *(engine.stage.complete(**greedy(prompt=prompt)) for prompt in prompts)
        )
        assert [answer["choices"][0]["token_ids"] for answer in answers] == alone
        batched = await engine.stage.complete(**greedy(prompt=prompts))
        assert [choice["token_ids"] for choice in batched["choices"]] == alone
        assert len({tuple(tokens) for tokens in alone}) > 1

    engine.run(scene())


def test_params_without_a_connector_are_never_fatal(engine: Running) -> None:
    async def scene() -> None:
        for params in (
            {"do_remote_prefill": True},
            {"do_remote_decode": True},
            {"remote_block_ids": "x"},
            {},
        ):
            status, answer = await engine.stage.post(
                COMPLETIONS, greedy(prompt=[50, 51], kv_transfer_params=params)
            )
            assert status == 200 or "error" in answer
        await engine.stage.complete(**greedy(prompt=[50, 51]))

    engine.run(scene())


def test_metrics_follow_the_engine(engine: Running) -> None:
    async def scene() -> None:
        await engine.stage.complete(**greedy(prompt=[60, 61, 62]))
        async with engine.stage.session.get(engine.stage.url + "/metrics") as answer:
            lines = dict(
                line.rsplit(" ", 1)
                for line in (await answer.text()).splitlines()
                if not line.startswith("#")
            )
        status = await engine.client.status()
        assert (
            float(lines['vllm:generation_tokens_total{model_name="tiny"}'])
            == status.generation_tokens_total
            > 0
        )
        assert (
            float(lines['vllm:prompt_tokens_total{model_name="tiny"}'])
            == status.prompt_tokens_total
            > 0
        )

    engine.run(scene())


def test_when_the_core_is_killed_every_client_hears_it(checkpoint: Path) -> None:
    async def scene() -> None:
        async with asyncio.timeout(60), served(checkpoint) as (client, stage):
            body = {"prompt": "on and on", "max_tokens": 480, "ignore_eos": True}
            whole = asyncio.ensure_future(stage.post(COMPLETIONS, body))
            async with stage.session.post(
                stage.url + COMPLETIONS, json={**body, "stream": True}
            ) as answer:
                assert answer.status == 200
                assert client.pid is not None
                os.kill(client.pid, signal.SIGKILL)
                *_, last = events_of(await answer.read())
            assert last["error"]["code"] == 503
            assert (await whole)[0] == 503
            assert (await stage.post(COMPLETIONS, body))[0] == 503
            async with stage.session.get(stage.url + "/health") as answer:
                assert answer.status == 503

    asyncio.run(scene())
