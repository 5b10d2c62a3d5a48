"""Tests that a large request body is read in another process, with the same result as on the event
loop, while other clients are served.
"""

import asyncio
import json
import logging
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from tests.router.stubs import completes, prefills, stage
from tests.router.test_proxy import ONE, message

from kvferry.router.routes.table import Api
from kvferry.router.serving.client_request import InvalidRequest, read_client_request
from kvferry.router.serving.large_bodies import (
    MAX_INLINE_BYTES,
    BodyReader,
    describe,
    restored,
)

LONG = "word " * 20_000
LARGE = {"prompt": "a" * (MAX_INLINE_BYTES + 1), "max_tokens": 4}
BODIES: dict[str, tuple[Api, Any]] = {
    "prompt": (Api.OPENAI, {"prompt": LONG, "stream": "yes", "conversation_id": "c", "n": 2}),
    "prompts": (Api.OPENAI, {"prompt": [LONG, LONG, "short"], "n": "2", "echo": False}),
    "same values": (Api.OPENAI, {"user": LONG, "prompt": LONG, "messages": [LONG]}),
    "escapes": (Api.OPENAI, {"messages": [{"content": '\\"\u6c49\ud83d\ude00 ' * 9000}]}),
    "stolen": (Api.OPENAI, {"prompt": LONG, "kv_transfer_params": {"a": LONG}}),
    "response": (Api.RESPONSES, {"input": LONG, "previous_response_id": "r", "background": 1}),
    "message": (Api.MESSAGES, {"system": LONG, "messages": [LONG]}),
    "tokens": (Api.TOKENS, {"token_ids": list(range(50_000)), "sampling_params": {"n": 1}}),
    "empty": (Api.OPENAI, {}),
    "list": (Api.OPENAI, [LONG]),
    "too many small fields": (Api.OPENAI, {"other": LONG * 20}),
    "no count": (Api.OPENAI, {"prompt": [LONG, LONG], "n": 0}),
}
RAW: dict[str, bytes] = {
    "nothing": b"",
    "space": b" " * 100_000,
    "no end": b'{"prompt":"' + b"a" * 100_000,
    "two values": b'{"prompt":"a"} {"prompt":"b"}',
    "no utf-8": b'{"prompt":"' + b"\xff" * 100_000 + b'"}',
    "deep": b'{"prompt":' + b"[" * 100_000,
    "one key twice": b'{"prompt":"%b","prompt":"%b"}' % (b"a" * 100_000, b"a" * 100_001),
    "spaces": b' {\n "prompt" :\t"' + b"a" * 100_000 + b'" , "n" : 1 }\n ',
}


@pytest.mark.parametrize("name", [*BODIES, *RAW])
def test_another_process_reads_the_same_request(name: str) -> None:
    api, value = BODIES.get(name, (Api.OPENAI, None))
    body = RAW[name] if name in RAW else json.dumps(value).encode()
    here = read_client_request(body, api)
    there = restored(describe(body, api), bytearray(body), api)
    if isinstance(here, InvalidRequest) or isinstance(there, InvalidRequest):
        assert there == here
        return
    for one, other in (
        (here, there),
        *zip(
            map(here.with_prompt, here.prompts), map(there.with_prompt, there.prompts), strict=True
        ),
    ):
        assert b"".join(other.prefill_body()) == b"".join(one.prefill_body())
        assert b"".join(other.decode_body(None)) == b"".join(one.decode_body(None))
        assert bytes(other.prompt) == bytes(one.prompt)
    assert (there.conversation_id, there.num_choices, there.previous_response_id) == (
        here.conversation_id,
        here.num_choices,
        here.previous_response_id,
    )


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Put a shell command in front of the Python of the process that reads."""

    def use(before: str) -> Path:
        script, real = tmp_path / "python", sys.executable
        os.mkfifo(tmp_path / "go")
        script.write_text(f'#!/bin/sh\ncd {tmp_path}\necho $$ > pid\n{before}\nexec {real} "$@"\n')
        script.chmod(stat.S_IRWXU)
        monkeypatch.setattr(sys, "executable", str(script))
        return tmp_path

    return use


async def until_started(folder: Path) -> int:
    while not (folder / "pid").exists() or not (text := (folder / "pid").read_text()):
        await asyncio.sleep(0.01)
    return int(text)


def test_other_clients_are_served_while_a_large_body_is_read(
    python: Callable[[str], Path],
) -> None:
    async def scene() -> None:
        folder = python("read line < go")
        async with stage(prefills, completes) as s:
            large = asyncio.create_task(s.post(LARGE))
            await until_started(folder)
            assert (await s.post(ONE))[0] == 200
            async with s.session.get(f"{s.url}/health") as answer:
                assert answer.status == 200
            assert [call.body["prompt"] for call in s.p.calls] == [ONE["prompt"]]
            assert not large.done()
            await asyncio.to_thread((folder / "go").write_text, "go\n")
            assert (await large)[0] == 200
            assert [engine.calls[-1].body["prompt"] for engine in (s.p, s.d)] == [
                LARGE["prompt"]
            ] * 2

    uvloop.run(scene())


@pytest.mark.parametrize("before", ["exit 1", "kill -9 $$", "echo no; exit 0"])
def test_a_process_that_fails_costs_no_request(
    before: str, python: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> None:
        python(before)
        async with stage(prefills, completes) as s:
            assert (await s.post(LARGE))[0] == 200
            status, _, body = await s.post(b"[" + b"1," * MAX_INLINE_BYTES + b"1]")
            assert (status, message(body)) == (400, "the request body must be a JSON object")

    with caplog.at_level(logging.WARNING):
        uvloop.run(scene())
    assert "a process that reads a large request failed" in caplog.text


def test_the_process_ends_with_a_client_that_leaves(python: Callable[[str], Path]) -> None:
    async def scene() -> None:
        folder = python("read line < go")
        async with stage(prefills, completes) as s:
            large = asyncio.create_task(s.post(LARGE))
            pid = await until_started(folder)
            large.cancel()
            while Path(f"/proc/{pid}").exists():
                await asyncio.sleep(0.01)
            assert s.p.calls == []

    uvloop.run(scene())


def test_a_small_body_needs_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere")

    async def scene() -> None:
        assert not isinstance(await BodyReader().read(b"{}", Api.OPENAI), InvalidRequest)

    uvloop.run(scene())
