"""Tests the HTTP routes over a scripted engine: response shapes, ids and streams."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.engine.api.stage import MODEL_LEN, ScriptedEngine, Stage, outputs_of, stage
from yarl import URL

from kvferry.engine.api.tokenizer import ModelTokenizer, SpecialTokens
from kvferry.engine.messages import AddRequest, RequestOutput
from kvferry.web.transfer_records import TransferRecord

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


def says(text: str, model: Path, **last: Any) -> Any:
    token_ids = ModelTokenizer.load(model).encode(text, SpecialTokens.WITHOUT)
    return lambda request: outputs_of(request, token_ids, "length", **last)


def test_a_completion_has_the_openai_shape(model: Path) -> None:
    async def scene() -> None:
        engine = ScriptedEngine(says("one two", model, num_cached_tokens=3))
        async with stage(engine, model) as s:
            answer = await s.complete(prompt=[5, 6, 7, 8], model="tiny", max_tokens=9)
            (request,) = engine.frames[0]
        assert answer["object"] == "text_completion"
        assert answer["model"] == "tiny"
        choice = {
            "index": 0,
            "text": "one two",
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
        assert answer["choices"] == [choice]
        tokens = len(ModelTokenizer.load(model).encode("one two", SpecialTokens.WITHOUT))
        assert answer["usage"] == {
            "prompt_tokens": 4,
            "completion_tokens": tokens,
            "total_tokens": 4 + tokens,
            "prompt_tokens_details": {"cached_tokens": 3},
        }
        assert answer["kv_transfer_params"] is None
        assert request.prompt_token_ids == [5, 6, 7, 8]
        assert request.sampling.max_tokens == 9

    asyncio.run(scene())


def test_text_prompts_and_token_id_prompts_agree(model: Path) -> None:
    async def scene() -> None:
        engine = ScriptedEngine()
        token_ids = ModelTokenizer.load(model).encode("to be", SpecialTokens.WITH)
        async with stage(engine, model) as s:
            for prompt in ("to be", ["to be"], token_ids, [token_ids]):
                await s.complete(prompt=prompt)
        assert [[request.prompt_token_ids for request in frame] for frame in engine.frames] == [
            [token_ids]
        ] * 4

    asyncio.run(scene())


def test_several_prompts_and_samples_are_one_frame_and_ordered_choices(model: Path) -> None:
    async def scene() -> None:
        engine = ScriptedEngine(
            lambda request: outputs_of(
                request, [request.prompt_token_ids[0], 40], num_cached_tokens=1
            )
        )
        async with stage(engine, model) as s:
            answer = await s.complete(prompt=[[33], [34, 34]], n=2, seed=5, return_token_ids=True)
        (frame,) = engine.frames
        assert [request.draw_seed for request in frame] == [5, 6, 5, 6]
        assert [(choice["index"], choice["token_ids"][0]) for choice in answer["choices"]] == [
            (0, 33),
            (1, 33),
            (2, 34),
            (3, 34),
        ]
        assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [
            [33],
            [33],
            [34, 34],
            [34, 34],
        ]
        assert answer["usage"]["prompt_tokens"] == 3
        assert answer["usage"]["completion_tokens"] == 8
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}

    asyncio.run(scene())


def test_a_stream_says_what_the_whole_answer_says(model: Path) -> None:
    async def scene() -> None:
        engine = ScriptedEngine(says("one € two STOP three", model))
        body = {"prompt": [5], "n": 2, "stop": "STOP", "return_token_ids": True, "logprobs": 1}
        async with stage(engine, model) as s:
            whole = await s.complete(**body)
            chunks = await s.stream(COMPLETIONS, **body, stream_options={"include_usage": True})
        *parts, closing = chunks
        assert closing["choices"] == []
        assert closing["usage"] == whole["usage"]
        assert all(part["usage"] is None for part in parts)
        for expected in whole["choices"]:
            own = [
                part["choices"][0]
                for part in parts
                if part["choices"][0]["index"] == expected["index"]
            ]
            assert "".join(part["text"] for part in own) == expected["text"] == "one € two "
            assert [token_id for part in own for token_id in part["token_ids"]] == expected[
                "token_ids"
            ]
            assert [part.get("prompt_token_ids") for part in own] == [[5]] + [None] * (len(own) - 1)
            assert [part["finish_reason"] for part in own] == [None] * (len(own) - 1) + ["stop"]
            assert own[-1]["stop_reason"] == "STOP"
            for column in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
                assert [value for part in own for value in part["logprobs"][column]] == expected[
                    "logprobs"
                ][column]
        assert len({chunk["id"] for chunk in chunks}) == 1

    asyncio.run(scene())


def test_usage_is_not_in_a_stream_that_did_not_ask_for_it_and_running_in_one_that_did(
    model: Path,
) -> None:
    async def scene() -> None:
        async with stage(ScriptedEngine(), model) as s:
            plain = await s.stream(COMPLETIONS, prompt=[5], max_tokens=3)
            assert all("usage" not in chunk for chunk in plain)
            options = {"include_usage": True, "continuous_usage_stats": True}
            running = await s.stream(COMPLETIONS, prompt=[5], max_tokens=3, stream_options=options)
            assert [chunk["usage"]["completion_tokens"] for chunk in running] == [1, 2, 3, 3]

    asyncio.run(scene())


def test_kv_transfer_params_go_in_untouched_and_come_out_at_the_end(model: Path) -> None:
    params = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "nested": {"a": [1.5, "x"]},
    }
    made = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]]}

    async def scene() -> None:
        engine = ScriptedEngine(
            lambda request: outputs_of(request, [40, 41], kv_transfer_params=made)
        )
        async with stage(engine, model) as s:
            whole = await s.complete(prompt=[5], n=3, kv_transfer_params=params)
            chunks = await s.stream(COMPLETIONS, prompt=[5], kv_transfer_params=params)
            with_usage = await s.stream(
                COMPLETIONS,
                prompt=[5],
                kv_transfer_params=params,
                stream_options={"include_usage": True},
            )
            chat = await s.stream(CHAT, messages=HELLO, kv_transfer_params=params)
        assert whole["kv_transfer_params"] == made
        assert len(whole["choices"]) == 1
        for stream in (chunks, with_usage, chat):
            assert [chunk.get("kv_transfer_params") for chunk in stream] == [None] * (
                len(stream) - 1
            ) + [made]
        assert [request.kv_transfer_params for frame in engine.frames for request in frame] == [
            params
        ] * 4

    asyncio.run(scene())


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}])
def test_what_was_kept_of_a_turn_is_told_in_one_more_event_to_who_asked(
    model: Path, options: dict[str, Any]
) -> None:
    made = {"do_remote_decode": True, "ticket": "t"}
    leg = {"do_remote_prefill": True, "ticket": "p"}

    async def scene() -> None:
        engine = ScriptedEngine(
            lambda request: outputs_of(request, [40, 41], kv_transfer_params=made)
        )
        async with stage(engine, model) as s:
            whole = await s.complete(prompt=[5], kv_transfer_params=leg)
            asked = [
                await s.stream(
                    COMPLETIONS,
                    prompt=[5],
                    kv_transfer_params={**leg, "conversation": "w"},
                    **options,
                ),
                await s.stream(
                    CHAT, messages=HELLO, kv_transfer_params={**leg, "conversation": "w"}, **options
                ),
            ]
            silent = await s.stream(COMPLETIONS, prompt=[5], kv_transfer_params=leg, **options)
            declined = await s.stream(
                COMPLETIONS, prompt=[5], kv_transfer_params={**leg, "conversation": None}, **options
            )
        assert whole["kv_transfer_params"] == made
        for chunks in asked:
            assert [chunk.get("kv_transfer_params") for chunk in chunks] == [None] * (
                len(chunks) - 1
            ) + [made]
            assert chunks[-1]["choices"] == []
            assert "usage" not in chunks[-1]
        assert not any("kv_transfer_params" in chunk for chunk in [*silent, *declined])

    asyncio.run(scene())


def test_a_prefill_for_a_peer_is_not_cut_by_stop_strings(model: Path) -> None:
    made = {"do_remote_prefill": True}

    async def scene() -> None:
        engine = ScriptedEngine(says("STOP", model, kv_transfer_params=made))
        async with stage(engine, model) as s:
            answer = await s.complete(
                prompt=[5], stop="S", kv_transfer_params={"do_remote_decode": True}
            )
            assert answer["kv_transfer_params"] == made
            cut = await s.complete(prompt=[5], stop="S")
            assert cut["choices"][0]["finish_reason"] == "stop"

    asyncio.run(scene())


def test_a_stop_string_aborts_the_request_in_the_engine(model: Path) -> None:
    def endless(request: AddRequest) -> Sequence[RequestOutput]:
        return outputs_of(request, list(range(33, 60)), None)

    async def scene() -> None:
        engine = ScriptedEngine(endless)
        async with stage(engine, model) as s:
            text = ModelTokenizer.load(model).decode([35, 36], SpecialTokens.WITHOUT)
            answer = await s.complete(prompt=[5], stop=[text], return_token_ids=True)
            assert answer["choices"][0]["token_ids"] == [33, 34, 35, 36]
            assert engine.aborted == [engine.frames[0][0].request_id]
            assert not engine.live

    asyncio.run(scene())


def test_echo_puts_the_prompt_before_the_text(model: Path) -> None:
    async def scene() -> None:
        async with stage(ScriptedEngine(says("two", model)), model) as s:
            assert (await s.complete(prompt="one ", echo=True))["choices"][0]["text"] == "one two"
            token_ids = ModelTokenizer.load(model).encode("one ", SpecialTokens.WITHOUT)
            assert (await s.complete(prompt=token_ids, echo=True))["choices"][0][
                "text"
            ] == "one two"
            status, _ = await s.post(COMPLETIONS, {"prompt": "one", "echo": True, "logprobs": 1})
            assert status == 400

    asyncio.run(scene())


def test_a_chat_is_rendered_by_the_template_and_answered_in_chat_shape(model: Path) -> None:
    async def scene() -> None:
        engine = ScriptedEngine(says("hi there", model))
        async with stage(engine, model) as s:
            body = {
                "messages": HELLO,
                "logprobs": True,
                "top_logprobs": 2,
                "return_token_ids": True,
            }
            status, answer = await s.post(CHAT, body)
            chunks = await s.stream(CHAT, **body)
        assert status == 200, answer
        (request,) = engine.frames[0]
        tokenizer = ModelTokenizer.load(model)
        rendered = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        assert (
            request.prompt_token_ids
            == tokenizer.encode(rendered, SpecialTokens.WITHOUT)
            == answer["prompt_token_ids"]
        )
        assert request.sampling.max_tokens == MODEL_LEN - len(request.prompt_token_ids)
        assert request.sampling.logprobs == 2
        (choice,) = answer["choices"]
        assert choice["message"] == {"role": "assistant", "content": "hi there"}
        assert (
            bytes(byte for token in choice["logprobs"]["content"] for byte in token["bytes"])
            == b"hi there"
        )
        assert choice["logprobs"]["content"][0]["top_logprobs"][1]["logprob"] == -1.5
        assert [chunk["object"] for chunk in chunks] == ["chat.completion.chunk"] * len(chunks)
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert chunks[0]["prompt_token_ids"] == request.prompt_token_ids
        rest = [chunk["choices"][0] for chunk in chunks[1:]]
        assert "".join(part["delta"]["content"] for part in rest) == "hi there"
        assert [token for part in rest for token in part["logprobs"]["content"]] == choice[
            "logprobs"
        ]["content"]
        assert [token for part in rest for token in part["token_ids"]] == choice["token_ids"]
        assert rest[-1]["finish_reason"] == "length"

    asyncio.run(scene())


def test_max_completion_tokens_wins_over_max_tokens(model: Path) -> None:
    async def scene() -> None:
        engine = ScriptedEngine()
        async with stage(engine, model) as s:
            await s.post(CHAT, {"messages": HELLO, "max_tokens": 5, "max_completion_tokens": 7})
        assert engine.frames[0][0].sampling.max_tokens == 7

    asyncio.run(scene())


def test_the_request_id_of_the_client_is_used_but_never_trusted_as_unique(model: Path) -> None:
    async def scene() -> None:
        engine = ScriptedEngine()
        async with stage(engine, model) as s:
            for _ in range(2):
                async with s.session.post(
                    s.url + COMPLETIONS, json={"prompt": [5]}, headers={"X-Request-Id": "turn-1"}
                ) as answer:
                    assert answer.headers["X-Request-Id"] == "turn-1"
                    assert (await answer.json())["id"] == "cmpl-turn-1"
            async with s.session.post(
                s.url + CHAT, json={"messages": HELLO, "stream": True}
            ) as answer:
                own = answer.headers["X-Request-Id"]
            for bad in ("x" * 257, "caf\xe9", "tab\there"):
                async with s.session.post(
                    s.url + COMPLETIONS, json={"prompt": [5]}, headers={"X-Request-Id": bad}
                ) as answer:
                    assert answer.status == 400
        first, second, third = (frame[0].request_id for frame in engine.frames)
        assert first[:-8] == second[:-8] == "cmpl-turn-1-0-"
        assert first != second
        assert third.startswith(f"chatcmpl-{own}-0-")

    asyncio.run(scene())


def test_logprobs_can_name_tokens_by_id(model: Path) -> None:
    async def scene() -> None:
        async with stage(ScriptedEngine(), model) as s:
            answer = await s.complete(
                prompt=[5], max_tokens=2, logprobs=0, return_tokens_as_token_ids=True
            )
            logprobs = answer["choices"][0]["logprobs"]
            assert logprobs["tokens"] == ["token_id:33", "token_id:34"]
            assert logprobs["top_logprobs"] == [{"token_id:33": -0.5}, {"token_id:34": -0.5}]

    asyncio.run(scene())


def test_the_routes_that_generate_nothing(model: Path) -> None:
    async def scene() -> None:
        engine = ScriptedEngine()
        async with stage(engine, model) as s:
            async with s.session.get(s.url + "/v1/models") as answer:
                (card,) = (await answer.json())["data"]
                assert (card["id"], card["max_model_len"]) == ("tiny", MODEL_LEN)
            async with s.session.get(s.url + "/version") as answer:
                assert "version" in await answer.json()
            asked = [("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")]
            for method, path in asked:
                async with s.session.request(method, s.url + path) as answer:
                    assert answer.status == 200
            engine.die("out of memory")
            for method, path in asked:
                async with s.session.request(method, s.url + path) as answer:
                    assert answer.status == 503
                    assert "error" in await answer.json()

    asyncio.run(scene())


def test_tokenize_and_detokenize_are_each_others_inverse(model: Path) -> None:
    async def scene() -> None:
        async with stage(ScriptedEngine(), model) as s:
            status, tokenized = await s.post(
                "/tokenize", {"prompt": "the world €", "return_token_strs": True}
            )
            assert status == 200
            assert tokenized["count"] == len(tokenized["tokens"]) == len(tokenized["token_strs"])
            assert await s.post("/detokenize", {"tokens": tokenized["tokens"]}) == (
                200,
                {"prompt": "the world €"},
            )
            _, chat = await s.post("/tokenize", {"messages": HELLO})
            assert (await s.post("/detokenize", {"tokens": chat["tokens"]}))[1][
                "prompt"
            ].startswith("<|im_start|>user")
            for path, body in (
                ("/tokenize", {}),
                ("/detokenize", {"tokens": [512]}),
                ("/detokenize", {"tokens": ["x"]}),
            ):
                assert (await s.post(path, body))[0] == 400

    asyncio.run(scene())


async def scraped(s: Stage) -> list[str]:
    async with s.session.get(s.url + "/metrics") as answer:
        assert answer.status == 200
        assert answer.content_type == "text/plain"
        return (await answer.text()).splitlines()


def test_metrics_have_vllms_names(model: Path) -> None:
    async def scene() -> None:
        engine = ScriptedEngine()
        async with stage(engine, model) as s:
            await s.complete(prompt=[5])
            lines = await scraped(s)
            for line in (
                'vllm:num_requests_running{model_name="tiny"} 0.0',
                'vllm:kv_cache_usage_perc{model_name="tiny"} 0.25',
                'vllm:prompt_tokens_total{model_name="tiny"} 11.0',
                'vllm:generation_tokens_total{model_name="tiny"} 22.0',
                'vllm:prompt_tokens_by_source_total{model_name="tiny",'
                'source="external_kv_transfer"} 6.0',
                'vllm:request_success_total{finished_reason="stop",model_name="tiny"} 3.0',
                'vllm:e2e_request_latency_seconds_count{model_name="tiny"} 1.0',
                'vllm:time_to_first_token_seconds_count{model_name="tiny"} 1.0',
            ):
                assert line in lines, line
            engine.die("gone")
            assert not any(
                line.startswith("vllm:num_requests_running") for line in await scraped(s)
            )

    asyncio.run(scene())


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_the_content_type_does_not_matter(model: Path, path: str) -> None:
    async def scene() -> None:
        async with stage(ScriptedEngine(), model) as s:
            body = b'{"prompt": "x", "messages": [{"role": "user", "content": "x"}]}'
            status, _ = await s.post(path, body, **{"Content-Type": "text/plain"})
            assert status == 200

    asyncio.run(scene())


def test_transfers_are_told_by_the_client_s_id_or_the_newest(model: Path) -> None:
    async def scene() -> None:
        engine = ScriptedEngine()
        engine.records = [
            TransferRecord(request_id="b", age_s=1.0, attached_s=0.5, bytes=7),
            TransferRecord(request_id="a/é", age_s=2.0),
        ]
        async with stage(engine, model) as s:

            async def look(path: str) -> tuple[int, Any]:
                async with s.session.get(
                    URL(f"{s.url}/kvferry/transfers{path}", encoded=True)
                ) as answer:
                    return answer.status, await answer.json()

            status, newest = await look("")
            assert (status, [record["request_id"] for record in newest["transfers"]]) == (
                200,
                ["b", "a/é"],
            )
            assert await look("/b") == (
                200,
                {"transfers": [{"request_id": "b", "age_s": 1.0, "attached_s": 0.5, "bytes": 7}]},
            )
            assert (await look("/a%2F%C3%A9"))[0] == 200
            assert [(await look("/c"))[0], (await look("/c"))[1]["error"]["code"]] == [404, 404]
            engine.die("gone")
            assert (await look(""))[0] == 503

    asyncio.run(scene())
