"""Tests how `kvferry serve` starts, stops, and ends when its engine dies."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.engine.api.stage import DEADLINE_S, ScriptedEngine, events_of, outputs_of, until

from kvferry.engine.api.serve import (
    StoppedBySignal,
    address_of,
    open_listeners,
    run_on_fast_loop,
    serve,
    stop_signals,
)
from kvferry.engine.messages import AddRequest, RequestOutput, SampledToken
from kvferry.engine.options import EngineOptions
from kvferry.errors import ConfigError, KVFerryError
from kvferry.types import Address


def silent(request: AddRequest) -> Sequence[RequestOutput]:
    return []


class Serving:
    """Runs `serve` as a task and provides the URL it listens on."""

    def __init__(self, engine: ScriptedEngine, model: Path, grace_s: float = DEADLINE_S) -> None:
        """`grace_s` is the time limit after either signal."""
        self._listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        options = EngineOptions(
            model, served_model_name="tiny", shutdown_timeout_s=grace_s, drain_timeout_s=grace_s
        )
        self.task = asyncio.ensure_future(
            serve(engine, options, "127.0.0.1", 0, on_listening=self._note)
        )

    def _note(self, model_name: str, address: Address) -> None:
        self._listening.set_result(f"http://{address}")

    async def url(self) -> str:
        return await self._listening


async def ask(session: aiohttp.ClientSession, url: str) -> int:
    async with session.post(
        url + "/v1/completions", json={"prompt": [5], "max_tokens": 1}
    ) as answer:
        await answer.read()
        return answer.status


async def health(session: aiohttp.ClientSession, url: str) -> tuple[int, Any]:
    async with session.get(url + "/health") as answer:
        return (
            answer.status,
            await answer.json() if answer.content_type == "application/json" else None,
        )


def test_ctrl_c_lets_running_requests_finish_and_takes_no_new_ones(model: Path) -> None:
    async def scene() -> None:
        engine = ScriptedEngine(silent)
        serving = Serving(engine, model)
        async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession() as session:
            url = await serving.url()
            running = asyncio.ensure_future(ask(session, url))
            await until(lambda: bool(engine.live))
            os.kill(os.getpid(), signal.SIGINT)
            port = int(url.rsplit(":", 1)[1])
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                except ConnectionRefusedError:
                    break
                writer.close()
                with suppress(ConnectionError):
                    await writer.wait_closed()
            (request_id,) = engine.live
            engine.put(RequestOutput(request_id, [SampledToken(40)], "length"))
            assert await running == 200
            await serving.task

    run_on_fast_loop(scene())


def test_a_draining_server_says_so_until_nobody_needs_it(model: Path) -> None:
    async def scene() -> None:
        engine = ScriptedEngine(silent)
        engine.held = 2
        serving = Serving(engine, model)
        async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession() as session:
            url = await serving.url()
            assert await health(session, url) == (200, None)
            running = asyncio.ensure_future(ask(session, url))
            await until(lambda: bool(engine.live))
            os.kill(os.getpid(), signal.SIGTERM)
            await until(lambda: engine.is_draining)
            assert await health(session, url) == (
                503,
                {"status": "draining", "requests": 1, "leases": 2, "blocks": 6},
            )
            async with session.post(
                url + "/v1/completions", json={"prompt": [5], "stream": True}
            ) as refused:
                assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
                assert (await refused.json())["error"]["type"] == "ServiceUnavailableError"
            async with session.get(url + "/metrics") as metrics:
                assert metrics.status == 200
            (request_id,) = engine.live
            engine.put(RequestOutput(request_id, [SampledToken(40)], "length"))
            assert await running == 200
            assert await health(session, url) == (
                503,
                {"status": "draining", "requests": 0, "leases": 2, "blocks": 6},
            )
            assert not serving.task.done()
            engine.held = 0
            await serving.task

    run_on_fast_loop(scene())


def test_what_peers_have_not_fetched_holds_up_a_drain_and_no_other_end(model: Path) -> None:
    async def scene(number: signal.Signals, grace_s: float) -> None:
        engine = ScriptedEngine()
        engine.held = 1
        serving = Serving(engine, model, grace_s)
        async with asyncio.timeout(DEADLINE_S):
            await serving.url()
            os.kill(os.getpid(), number)
            await serving.task
            assert engine.is_draining == (number == signal.SIGTERM)

    run_on_fast_loop(scene(signal.SIGINT, DEADLINE_S * 2))
    run_on_fast_loop(scene(signal.SIGTERM, 0.05))
    run_on_fast_loop(scene(signal.SIGTERM, 0.0))


def test_a_core_that_dies_while_it_drains_is_no_orderly_end(model: Path) -> None:
    async def scene() -> None:
        engine = ScriptedEngine()
        engine.held = 1
        serving = Serving(engine, model)
        async with asyncio.timeout(DEADLINE_S):
            await serving.url()
            os.kill(os.getpid(), signal.SIGTERM)
            await until(lambda: engine.is_draining)
            engine.die("out of memory")
            with pytest.raises(KVFerryError, match="out of memory"):
                await serving.task

    run_on_fast_loop(scene())


@pytest.mark.parametrize(
    "numbers", [(signal.SIGINT, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT)]
)
def test_a_second_signal_does_not_wait_for_running_requests(
    model: Path, numbers: tuple[signal.Signals, signal.Signals]
) -> None:
    async def scene() -> None:
        engine = ScriptedEngine(silent)
        serving = Serving(engine, model)
        async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession() as session:
            running = asyncio.ensure_future(ask(session, await serving.url()))
            await until(lambda: bool(engine.live))
            for number in numbers:
                os.kill(os.getpid(), number)
            assert await running == 503
            await serving.task
            assert not engine.live

    run_on_fast_loop(scene())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_that_does_not_finish_in_time_is_aborted(
    model: Path, number: signal.Signals
) -> None:
    async def scene() -> None:
        engine = ScriptedEngine(silent)
        serving = Serving(engine, model, grace_s=0.05)
        async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession() as session:
            running = asyncio.ensure_future(ask(session, await serving.url()))
            await until(lambda: bool(engine.live))
            os.kill(os.getpid(), number)
            assert await running == 503
            await serving.task
            assert len(engine.aborted) == 1

    run_on_fast_loop(scene())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stream_that_does_not_finish_in_time_ends_with_an_error_that_says_why(
    model: Path, number: signal.Signals
) -> None:
    async def scene() -> None:
        engine = ScriptedEngine(lambda request: outputs_of(request, [40, 41], None))
        serving = Serving(engine, model, grace_s=0.05)
        async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession() as session:
            body = {"prompt": [5], "max_tokens": 100, "stream": True}
            async with session.post(await serving.url() + "/v1/completions", json=body) as answer:
                first = await answer.content.readuntil(b"\n\n")
                os.kill(os.getpid(), number)
                *tokens, last = events_of(first + await answer.read())
            assert [set(token) >= {"choices"} for token in tokens] == [True, True]
            assert last["error"]["code"] == 503
            assert "the server is stopping" in last["error"]["message"]
            await serving.task
            assert len(engine.aborted) == 1

    run_on_fast_loop(scene())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_whose_body_is_still_coming_hears_at_once_that_the_server_stops(
    model: Path, number: signal.Signals
) -> None:
    async def scene() -> None:
        serving = Serving(ScriptedEngine(), model, grace_s=10 * DEADLINE_S)
        async with asyncio.timeout(DEADLINE_S):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", int((await serving.url()).rsplit(":", 1)[1])
            )
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
                b"Expect: 100-continue\r\nContent-Length: 100\r\n\r\n"
            )
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
            os.kill(os.getpid(), number)
            head, _, said = (await reader.read()).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503")
            assert "the server is stopping" in json.loads(said)["error"]["message"]
            writer.close()
            await serving.task

    run_on_fast_loop(scene())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_before_there_is_anything_to_serve_ends_the_start_orderly(
    number: signal.Signals, code: int
) -> None:
    async def scene() -> None:
        ended: list[str] = []

        async def starts() -> str:
            try:
                os.kill(os.getpid(), number)
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                ended.append("cleaned up")
            return "started"

        async def is_started() -> str:
            return "started"

        with stop_signals() as signals:
            assert await signals.run_unless_stopped(is_started()) == "started"
            outcome = await signals.run_unless_stopped(starts())
        assert isinstance(outcome, StoppedBySignal)
        assert (outcome.exit_code, ended) == (code, ["cleaned up"])

    run_on_fast_loop(scene())


def test_the_death_of_the_core_ends_serving_with_the_reason(model: Path) -> None:
    async def scene() -> None:
        engine = ScriptedEngine()
        serving = Serving(engine, model)
        async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession() as session:
            assert await ask(session, await serving.url()) == 200
            engine.die("out of memory")
            with pytest.raises(KVFerryError, match="out of memory"):
                await serving.task

    run_on_fast_loop(scene())


def test_a_port_in_use_is_a_config_error_that_names_it(model: Path) -> None:
    async def scene() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(ConfigError, match=rf"port {port} \(Address already in use\)"):
                await serve(ScriptedEngine(), EngineOptions(model), "127.0.0.1", port)

    run_on_fast_loop(scene())


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7"])
def test_an_address_that_is_not_here_is_a_config_error(host: str) -> None:
    async def scene() -> None:
        with pytest.raises(ConfigError, match="choose another --host"):
            await open_listeners(host, 0)

    run_on_fast_loop(scene())


@pytest.mark.parametrize("port", [-1, 65536, 10**10])
def test_a_port_that_is_none_is_a_config_error(port: int) -> None:
    async def scene() -> None:
        with pytest.raises(ConfigError, match=f"--port must be from 0 to 65535, got {port}"):
            await open_listeners("127.0.0.1", port)

    run_on_fast_loop(scene())


def test_all_addresses_of_a_name_share_one_port() -> None:
    async def scene() -> None:
        listeners = await open_listeners("localhost", 0)
        try:
            assert len({address_of(listener).port for listener in listeners}) == 1
        finally:
            for listener in listeners:
                listener.close()

    run_on_fast_loop(scene())


def test_one_line_says_where_it_listens(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def scene() -> None:
        engine = ScriptedEngine()
        task = asyncio.ensure_future(
            serve(engine, EngineOptions(model, served_model_name="tiny"), "127.0.0.1", 0)
        )
        await asyncio.sleep(0)
        engine.die("done")
        with pytest.raises(KVFerryError):
            await task

    run_on_fast_loop(scene())
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("kvferry: serving tiny on http://127.0.0.1:")
