"""Tests the `openai` package against a router and stub engines: what reaches the engines, and how
the package reports errors.
"""

import asyncio
import json
import logging
import socket
from collections.abc import Callable
from typing import Any

import msgspec
import openai
import pytest
import uvloop
from aiohttp import web
from openai import AsyncOpenAI, OpenAI
from tests.router.stubs import (
    Stage,
    answers,
    completes,
    drops_connection,
    hangs,
    prefills,
    stage,
    streams,
)

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "größe",
            "parameters": {
                "type": "object",
                "properties": {"b": {"type": "number"}, "a": {"type": "string"}},
            },
        },
    }
]
EVERYTHING: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "how wide \u2028 is \U0001f6a2?"}]},
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "größe", "arguments": '{"b": 1e2}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "12"},
    ],
    "tools": TOOLS,
    "tool_choice": {"type": "function", "function": {"name": "größe"}},
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "s", "schema": {"type": "object"}, "strict": True},
    },
    "parallel_tool_calls": False,
    "temperature": 0.1,
    "seed": 2**53 + 1,
    "logit_bias": {"50256": -100},
    "extra_body": {"unknown": {"z": [1.0, 1e300, None], "a": {}}, "top_k": 5},
}
CHAT = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": []}
CHUNK = {
    "id": "c",
    "object": "chat.completion.chunk",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "delta": {"content": "hi"}}],
}
OF_THE_ROUTER = {"kv_transfer_params"}
OF_P = OF_THE_ROUTER | {"stream", "max_tokens"}
"""The fields that the router writes itself for P: the prefill leg is not streamed and asks for one
token.
"""


def client_of(s: Stage, **options: Any) -> OpenAI:
    return OpenAI(
        base_url=f"{s.url}/v1", api_key="sk-a", **{"max_retries": 0, "timeout": 5.0, **options}
    )


def with_client(s: Stage, act: Callable[[OpenAI], Any], **options: Any) -> Any:
    """Runs `act` in a thread, because the router runs on the event loop of this thread."""

    def run() -> Any:
        with client_of(s, **options) as client:
            return act(client)

    return asyncio.to_thread(run)


def raw_fields(body: bytes) -> dict[str, bytes]:
    return {
        key: bytes(value)
        for key, value in msgspec.json.decode(body, type=dict[str, msgspec.Raw]).items()
    }


@pytest.mark.parametrize("is_streamed", [False, True])
def test_every_value_reaches_both_engines_as_the_bytes_that_the_package_wrote(
    is_streamed: bool,
) -> None:
    chunks = [f"data: {json.dumps(CHUNK)}\n\n".encode(), b"data: [DONE]\n\n"]

    async def scene() -> None:
        async with stage(
            prefills, streams(chunks) if is_streamed else answers(200, json.dumps(CHAT))
        ) as s:
            sent: list[bytes] = []
            hooks: Any = {"request": [lambda request: sent.append(request.read())]}

            def act(client: OpenAI) -> Any:
                said = client.chat.completions.create(**EVERYTHING, stream=is_streamed)
                return (
                    [chunk.choices[0].delta.content for chunk in said]  # type: ignore[union-attr]
                    if is_streamed
                    else said.id  # type: ignore[union-attr]
                )

            http = openai.DefaultHttpxClient(event_hooks=hooks, trust_env=False)
            assert await with_client(s, act, http_client=http) == (["hi"] if is_streamed else "c")
            expected = raw_fields(sent[0])
            assert {"tools", "tool_choice", "response_format", "unknown"} <= expected.keys()
            at_d, at_p = raw_fields(s.d.calls[0].raw), raw_fields(s.p.calls[0].raw)
            assert {
                key: value for key, value in at_d.items() if key not in OF_THE_ROUTER
            } == expected
            assert {key: value for key, value in at_p.items() if key not in OF_P} == {
                key: value for key, value in expected.items() if key not in OF_P
            }
            assert at_d["kv_transfer_params"] != at_p["kv_transfer_params"]

    uvloop.run(scene())


ODD = (
    b'{"prompt": "\\u00e9\\ud83d\\udea2 \\/", "temperature":1.50e+0 , '
    b'"seed":123456789012345678901234567890,\n'
    b' "tools" :[ {"b":1, "a":2, "a":3} ], "metadata":{"\\u0061":-0.0} , '
    b'"top_p":0.10000000000000000000001, "n":\t1}'
)


def test_odd_but_valid_json_is_not_written_anew() -> None:
    async def scene() -> None:
        async with stage(prefills, completes) as s:
            status, _, _ = await s.post(ODD)
            assert status == 200
            expected = raw_fields(ODD)
            assert {
                key: value
                for key, value in raw_fields(s.d.calls[0].raw).items()
                if key not in OF_THE_ROUTER
            } == expected
            assert json.dumps(json.loads(ODD)["tools"]).encode() != expected["tools"], (
                "re-serialising would have shown"
            )

    uvloop.run(scene())


# -- errors --


def ask(client: OpenAI) -> Any:
    return client.completions.create(model="m", prompt="x")


def ask_streamed(client: OpenAI) -> list[Any]:
    return list(client.chat.completions.create(model="m", messages=[], stream=True))


def expect(
    error: type[BaseException], match: str | None = None, act: Callable[[OpenAI], Any] = ask
) -> Callable[[OpenAI], Any]:
    def run(client: OpenAI) -> Any:
        with pytest.raises(error, match=match) as caught:
            act(client)
        return caught.value

    return run


def test_errors_of_instances_have_the_packages_classes() -> None:
    said = (
        '{"error": {"message": "no such %s", "type": "BadRequestError", "param": "tools", "code": '
        "400}}"
    )

    async def scene() -> None:
        async with stage(prefills, answers(400, said % "tool")) as s:
            error = await with_client(s, expect(openai.BadRequestError, "no such tool"))
            assert (error.param, error.request_id is not None) == ("tools", True)
        async with stage(answers(404, said % "model"), completes) as s:
            await with_client(s, expect(openai.NotFoundError, "no such model"))
        async with stage(prefills, answers(500, said % "thing")) as s:
            await with_client(s, expect(openai.InternalServerError, "no such thing"))
        async with stage(prefills, drops_connection) as s:
            await with_client(s, expect(openai.InternalServerError, "closed the connection"))

    uvloop.run(scene())


def test_a_key_that_is_not_known_is_an_authentication_error() -> None:
    async def scene() -> None:
        async with stage(prefills, completes, api_keys=(("one", "sk-a"),)) as s:
            assert (await with_client(s, ask)).choices[0].text == "hello"
            await with_client(
                s,
                lambda client: expect(openai.AuthenticationError, "API key")(
                    client.with_options(api_key="sk-b")
                ),
            )

    uvloop.run(scene())


def test_too_much_at_once_is_a_rate_limit_error_and_the_package_waits_as_it_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scene() -> None:
        is_free = asyncio.Event()

        async def waits(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await is_free.wait()
            return await completes(request, body)

        async with stage(prefills, waits, tenant_running=1, tenant_waiting=0) as s:
            first = asyncio.create_task(with_client(s, ask))
            await s.d.entered.wait()
            error = await with_client(
                s, expect(openai.RateLimitError, "reached its limit of open requests")
            )
            assert int(error.response.headers["retry-after"]) >= 1
            with caplog.at_level(logging.INFO, "openai"):
                second = asyncio.create_task(with_client(s, ask, max_retries=2))
                while not any(
                    "Retrying request" in record.getMessage() for record in caplog.records
                ):
                    await asyncio.sleep(0.01)
            is_free.set()
            assert [(await each).choices[0].text for each in (first, second)] == ["hello"] * 2
            waited = next(
                record.getMessage()
                for record in caplog.records
                if "Retrying request" in record.getMessage()
            )
            assert f"in {float(error.response.headers['retry-after']):f} seconds" in waited

    uvloop.run(scene())


def test_no_router_is_a_connection_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0) as client:
        assert expect(openai.APIConnectionError)(client)


def test_a_timeout_of_the_package_ends_the_request_at_the_engine_too() -> None:
    async def scene() -> None:
        async with stage(prefills, hangs) as s:
            await with_client(s, expect(openai.APITimeoutError), timeout=0.3)
            await s.d.cancelled.wait()
            await s.releases.happened.wait()
        async with stage(hangs, completes) as s:
            await with_client(s, expect(openai.APITimeoutError), timeout=0.3)
            await s.p.cancelled.wait()

    uvloop.run(scene())


def test_a_stream_that_breaks_off_is_an_error_and_not_an_end() -> None:
    first = f"data: {json.dumps(CHUNK)}\n\n".encode()

    async def scene() -> None:
        async with stage(prefills, streams([first], then="drop")) as s:
            await with_client(
                s, expect(openai.APIError, "did not complete its answer", ask_streamed)
            )
        async with stage(
            prefills, streams([b'{"id": "cut'], then="drop", content_type="application/json")
        ) as s:
            await with_client(s, expect(openai.InternalServerError, "decode instance"))

    uvloop.run(scene())


def test_an_async_stream_that_is_closed_early_ends_the_engines_work() -> None:
    first = f"data: {json.dumps(CHUNK)}\n\n".encode()

    async def scene() -> None:
        async with (
            stage(prefills, streams([first], then="hang")) as s,
            AsyncOpenAI(base_url=f"{s.url}/v1", api_key="x", max_retries=0) as client,
        ):
            stream = await client.chat.completions.create(model="m", messages=[], stream=True)
            async for chunk in stream:
                assert chunk.choices[0].delta.content == "hi"
                break
            await stream.close()
            await s.d.cancelled.wait()

    uvloop.run(scene())
