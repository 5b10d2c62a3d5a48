"""Tests bad clients, failing engines and clients that disconnect: every answer has the right shape,
and no request is left in the engine.
"""

import asyncio
import json
import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.engine.api.stage import (
    DEADLINE_S,
    ScriptedEngine,
    events_of,
    outputs_of,
    serving,
    stage,
    until,
)
from tests.web.malformed import MALFORMED, assert_refused_without_echo

from kvferry.engine.api.admission import IgnoredTransfers
from kvferry.engine.api.context import CONTEXT, ApiSettings
from kvferry.engine.api.schema import ChatRequest, CompletionRequest
from kvferry.engine.messages import AddRequest, RequestOutput, SampledToken

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(autouse=True)
def _nothing_unhandled(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert [
        record.getMessage()
        for record in caplog.get_records("call")
        if record.levelno >= logging.ERROR
    ] == []


def silent(request: AddRequest) -> Sequence[RequestOutput]:
    return []


def is_error(answer: Any, status: int) -> bool:
    return (
        set(answer["error"]) == {"message", "type", "param", "code"}
        and answer["error"]["code"] == status
    )


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (COMPLETIONS, b"", 400),
        (COMPLETIONS, b"{", 400),
        (COMPLETIONS, b"[" * 50_000, 400),
        (COMPLETIONS, {}, 400),
        (COMPLETIONS, {"prompt": []}, 400),
        (COMPLETIONS, {"prompt": [[]]}, 400),
        (COMPLETIONS, {"prompt": ""}, 400),
        (COMPLETIONS, {"prompt": [True]}, 400),
        (COMPLETIONS, {"prompt": [1, "a"]}, 400),
        (COMPLETIONS, {"prompt": [[1], "a"]}, 400),
        (COMPLETIONS, {"prompt": [1.5]}, 400),
        (COMPLETIONS, {"prompt": [512]}, 400),
        (COMPLETIONS, {"prompt": [10**25]}, 400),
        (COMPLETIONS, {"prompt": "x " * 1000}, 400),
        (COMPLETIONS, {"prompt": "x" * 1_000_000}, 400),
        (COMPLETIONS, {"prompt": ["x"] * 2000}, 400),
        (COMPLETIONS, {"prompt": [5], "max_tokens": 1000}, 400),
        (COMPLETIONS, {"prompt": [5], "model": "other"}, 404),
        (COMPLETIONS, {"prompt": [5], "stream_options": {"include_usage": True}}, 400),
        (CHAT, {"messages": HELLO, "model": "other"}, 404),
        (CHAT, {"messages": HELLO, "top_logprobs": 2}, 400),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400),
        (CHAT, {"messages": HELLO, "tools": [5]}, 400),
        (CHAT, {"messages": HELLO, "tool_choice": "required"}, 400),
        ("/v1/nothing", {}, 404),
        ("/health", {}, 405),
    ],
)
def test_a_bad_request_gets_a_json_error_with_the_right_status(
    model: Path, path: str, body: Any, status: int
) -> None:
    async def scene() -> None:
        engine = ScriptedEngine()
        async with stage(engine, model) as s:
            got, answer = await s.post(path, body)
            assert (got, is_error(answer, status)) == (status, True), answer
            assert not engine.frames
            await s.complete(prompt=[5])

    asyncio.run(scene())


MANY: list[Any] = [[]] * 70_000
"""More values than `MODEL_LEN` tokens can use."""
CALLED = {"function": {"name": "f", "arguments": json.dumps(MANY[:20_000])}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": MANY}),
        (COMPLETIONS, {"prompt": [5] * 70_000, "echo": True}),
        (COMPLETIONS, {"prompt": [5], "kv_transfer_params": {"remote_block_ids": MANY}}),
        (COMPLETIONS, {"prompt": [5], "logit_bias": {str(key): 0 for key in range(70_000)}}),
        (CHAT, {"messages": [{"role": "user"}] * 40_000}),
        (CHAT, {"messages": HELLO, "tools": [{"a": MANY}]}),
        (CHAT, {"messages": HELLO, "chat_template_kwargs": {"a": MANY}}),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [CALLED, CALLED]}]}),
        ("/detokenize", {"tokens": [5] * 70_000}),
    ],
)
def test_more_values_than_the_model_can_use_are_refused_before_they_are_decoded(
    model: Path, path: str, body: Any
) -> None:
    async def scene() -> None:
        async with stage(ScriptedEngine(), model) as s:
            status, answer = await s.post(path, body)
            assert (status, "JSON values" in answer["error"]["message"]) == (413, True), answer

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": [5], "kv_transfer_params": {"a": MANY[:30_000]}}),
        (COMPLETIONS, {"prompt": [[5]], "user": "x" * 100_000}),
        (CHAT, {"messages": HELLO, "user": "x" * 5000}),
        ("/detokenize", {"tokens": [5] * 60_000}),
    ],
)
def test_a_large_body_delays_only_its_own_client(model: Path, path: str, body: Any) -> None:
    """The body is decoded and rendered beside the event loop, in turn with other long prompts: here
    after a prompt that takes until the second client has its answer.
    """

    async def scene() -> None:
        is_answered = threading.Event()
        async with stage(ScriptedEngine(), model) as s:
            prompts = s.app[CONTEXT].prompts
            long_prompt = asyncio.create_task(
                prompts.off_loop(1_000_000, lambda: is_answered.wait(DEADLINE_S))
            )
            first = asyncio.create_task(s.post(path, body))
            try:
                for _ in range(20):  # by then the first body has arrived
                    await s.complete(prompt=[5])
                assert not first.done()
            finally:
                is_answered.set()
            assert (await first)[0] == 200
            assert await long_prompt

    asyncio.run(scene())


def test_a_hostile_chat_template_delays_only_chats(tmp_path: Path, model: Path) -> None:
    """Nor does it end the server: a later chat is served."""
    loops = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
    (tmp_path / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{% if tools %}" + loops + "{% endif %}hello")

    async def scene() -> None:
        async with stage(ScriptedEngine(), tmp_path) as s:
            hostile = asyncio.create_task(s.post(CHAT, {"messages": HELLO, "tools": [{}]}))
            later = asyncio.create_task(s.post("/tokenize", {"messages": HELLO}))
            for _ in range(5):
                await s.complete(prompt=[5])
            status, answer = await hostile
            assert (status, "chat template" in answer["error"]["message"]) == (400, True)
            assert (await later)[0] == 200

    asyncio.run(scene())


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=True)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=8,
)
KNOWN = sorted({*CompletionRequest.__struct_fields__, *ChatRequest.__struct_fields__})
bodies = st.dictionaries(st.sampled_from(KNOWN), json_values, max_size=5)
good = st.fixed_dictionaries({}, optional={"prompt": st.just("x"), "messages": st.just(HELLO)})


def test_no_json_body_makes_the_server_fail(model: Path) -> None:
    with asyncio.Runner() as runner:

        async def start() -> tuple[Any, Any]:
            manager = serving(ScriptedEngine(), model)
            return manager, await manager.__aenter__()

        manager, s = runner.run(start())

        @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.sampled_from([COMPLETIONS, CHAT, "/tokenize", "/detokenize"]), bodies, good)
        def fuzz(path: str, body: dict[str, Any], base: dict[str, Any]) -> None:
            async def send() -> None:
                async with s.session.post(s.url + path, data=json.dumps(base | body)) as answer:
                    if answer.content_type == "text/event-stream":
                        events_of(await answer.read())
                    else:
                        shown = await answer.json()
                        assert answer.status == 200 or (
                            answer.status in (400, 404) and is_error(shown, answer.status)
                        ), shown

            runner.run(send())

        fuzz()
        runner.run(manager.__aexit__(None, None, None))


def test_an_engine_error_before_the_first_token_is_a_status(model: Path) -> None:
    async def scene() -> None:
        engine = ScriptedEngine(
            lambda request: [
                RequestOutput(
                    request.request_id, finish_reason="error", error="peer lost", error_status=502
                )
            ]
        )
        async with stage(engine, model) as s:
            for stream in (False, True):
                for path, body in ((COMPLETIONS, {"prompt": [5]}), (CHAT, {"messages": HELLO})):
                    status, answer = await s.post(path, {**body, "stream": stream})
                    assert (status, answer["error"]["message"]) == (502, "peer lost")

    asyncio.run(scene())


def test_an_engine_error_after_the_first_token_is_an_event(model: Path) -> None:
    def fails_late(request: AddRequest) -> list[RequestOutput]:
        last = RequestOutput(
            request.request_id, finish_reason="error", error="peer lost", error_status=502
        )
        return [RequestOutput(request.request_id, [SampledToken(40)]), last]

    async def scene() -> None:
        async with stage(ScriptedEngine(fails_late), model) as s:
            first, last = await s.stream(COMPLETIONS, prompt=[5])
            assert first["choices"][0]["text"]
            assert is_error(last, 502)
            status, _ = await s.post(COMPLETIONS, {"prompt": [5]})
            assert status == 502

    asyncio.run(scene())


def test_one_failing_sample_ends_them_all(model: Path) -> None:
    def one_fails(request: AddRequest) -> list[RequestOutput]:
        if "-1-" not in request.request_id:
            return []
        return [
            RequestOutput(
                request.request_id, finish_reason="error", error="peer lost", error_status=500
            )
        ]

    async def scene() -> None:
        engine = ScriptedEngine(one_fails)
        async with stage(engine, model) as s:
            status, _ = await s.post(COMPLETIONS, {"prompt": [5], "n": 3}, **{"X-Request-Id": "x"})
            assert status == 500
            assert not engine.live
            assert len(engine.aborted) == 2

    asyncio.run(scene())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_waiting_aborts_all_its_samples(
    model: Path, stream: bool
) -> None:
    async def scene() -> None:
        engine = ScriptedEngine(silent)
        async with stage(engine, model) as s:
            asking = asyncio.ensure_future(
                s.post(COMPLETIONS, {"prompt": [5], "n": 3, "stream": stream})
            )
            await until(lambda: len(engine.live) == 3)
            asking.cancel()
            await until(lambda: not engine.live)
            assert len(engine.aborted) == 3
            engine.script = lambda request: outputs_of(request, [40])
            await s.complete(prompt=[5])

    asyncio.run(scene())


@pytest.mark.parametrize(
    "params", [{"do_remote_decode": True}, {"do_remote_prefill": True, "conversation": "w"}]
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_ticket_reaches_nobody_is_given_up(
    model: Path, stream: bool, params: dict[str, Any]
) -> None:
    """This also holds if the engine has finished the request: its blocks would otherwise wait for a
    peer that never learns of them.
    """
    body = {"prompt": [5], "max_tokens": 1, "stream": stream, "kv_transfer_params": params}

    async def scene() -> None:
        engine = ScriptedEngine(silent)
        async with stage(engine, model) as s:
            asking = asyncio.ensure_future(s.post(COMPLETIONS, body))
            await until(lambda: len(engine.live) == 1)
            [request_id] = engine.live
            asking.cancel()
            await until(lambda: engine.abandoned == [request_id])
            # A request whose answer is delivered is not abandoned.
            engine.script = lambda request: outputs_of(request, [40])
            async with s.session.post(s.url + COMPLETIONS, json=body) as answer:
                assert answer.status == 200
                await answer.read()
            assert engine.abandoned == [request_id]

    asyncio.run(scene())


def test_a_client_that_leaves_in_the_middle_of_a_stream_aborts_its_request(model: Path) -> None:
    async def scene() -> None:
        engine = ScriptedEngine(lambda request: outputs_of(request, [40, 41], None))
        async with stage(engine, model) as s:
            async with s.session.post(
                s.url + CHAT, json={"messages": HELLO, "stream": True}
            ) as answer:
                await answer.content.readline()
                assert engine.live
                answer.close()
            await until(lambda: not engine.live)
            assert len(engine.aborted) == 1

    asyncio.run(scene())


@pytest.mark.parametrize(
    "params", [None, {"do_remote_decode": True}, {"do_remote_prefill": True, "conversation": "w"}]
)
def test_a_client_that_does_not_read_is_given_up_and_holds_up_nobody(
    model: Path, params: dict[str, Any] | None
) -> None:
    async def scene() -> None:
        engine = ScriptedEngine(silent)
        async with stage(engine, model, ApiSettings(stall_timeout_s=0.2)) as s:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", int(s.url.rsplit(":", 1)[1]), limit=1
            )
            body = json.dumps(
                {
                    "prompt": [5],
                    "stream": True,
                    "return_token_ids": True,
                    "kv_transfer_params": params,
                }
            ).encode()
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
                % len(body)
                + body
            )
            await until(lambda: bool(engine.live))
            (request_id,) = engine.live
            huge = RequestOutput(request_id, [SampledToken(40)] * 20_000)
            for _ in range(120):
                if request_id in engine.live:
                    engine.put(huge)
                    await asyncio.sleep(0)
            engine.script = lambda request: outputs_of(request, [40])
            await s.complete(prompt=[6])
            await until(lambda: not engine.live)
            # The client never received the ticket, so no peer will fetch the blocks.
            await until(lambda: engine.abandoned == ([request_id] if params is not None else []))
            assert engine.aborted == [request_id]
            writer.close()
            assert reader

    asyncio.run(scene())


@pytest.mark.parametrize(("sent", "status"), MALFORMED)
def test_malformed_http_is_a_json_error_without_an_echo(
    model: Path, sent: bytes, status: int | None
) -> None:
    async def scene() -> None:
        async with stage(ScriptedEngine(), model) as s:
            await assert_refused_without_echo(s.url, sent, status)
            await s.complete(prompt=[5])

    asyncio.run(scene())


def test_a_missing_field_is_named_with_its_place_and_an_empty_body_as_empty(model: Path) -> None:
    async def scene() -> None:
        async with stage(ScriptedEngine(), model) as s:
            _, answer = await s.post(CHAT, {"messages": [*HELLO, {"content": "hello"}]})
            assert answer["error"]["param"] == "messages[1].role"
            assert "messages[1].role" in answer["error"]["message"]
            _, answer = await s.post(CHAT, {})
            assert answer["error"]["param"] == "messages"
            for body in (b"", b" \n"):
                _, answer = await s.post(CHAT, body)
                assert "is empty" in answer["error"]["message"]

    asyncio.run(scene())


def test_transfer_params_without_a_connector_are_served_and_noted_once(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> None:
        async with stage(ScriptedEngine(), model) as s:
            for params in (
                {},
                {"do_remote_prefill": False},
                {"do_remote_prefill": True},
                {"do_remote_decode": True},
            ):
                await s.complete(prompt=[5], kv_transfer_params=params)

    asyncio.run(scene())
    (note,) = [
        record.getMessage()
        for record in caplog.records
        if "kv-transfer-config" in record.getMessage()
    ]
    assert note.startswith("do_remote_prefill is ignored")


def test_another_note_of_an_unused_transfer_is_due_after_a_minute() -> None:
    unused = IgnoredTransfers()
    asks = {"do_remote_decode": True}
    assert unused.note(asks, now=5)
    assert unused.note(asks, now=64.9) is None
    assert unused.note(None, now=65) is None
    assert unused.note(asks, now=65)


def test_garbage_instead_of_http_changes_nothing(model: Path) -> None:
    async def scene() -> None:
        async with stage(ScriptedEngine(), model) as s:
            for garbage in (
                b"\x00\xff" * 500 + b"\r\n\r\n",
                b"GET\r\n\r\n",
                b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
                b"",
            ):
                _, writer = await asyncio.open_connection("127.0.0.1", int(s.url.rsplit(":", 1)[1]))
                writer.write(garbage)
                writer.close()
                await writer.wait_closed()
            await s.complete(prompt=[5])

    asyncio.run(scene())
