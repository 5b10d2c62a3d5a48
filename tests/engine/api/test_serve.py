"""Starting, stopping and dying, as `kvferry serve` sees it."""

import asyncio
import os
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest
from tests.engine.api.stage import DEADLINE_S, ScriptedEngine, until

from kvferry.engine.api.listening import address_of, open_listeners
from kvferry.engine.api.serve import run_on_fast_loop, serve
from kvferry.engine.messages import AddRequest, RequestOutput
from kvferry.engine.options import EngineOptions
from kvferry.engine.step import SampledToken
from kvferry.errors import ConfigError, KVFerryError
from kvferry.types import Address


def silent(request: AddRequest) -> Sequence[RequestOutput]:
    return []


class Serving:
    """`serve` as a task, with the address it listens on."""

    def __init__(self, engine: ScriptedEngine, model: Path, shutdown_timeout_s: float = DEADLINE_S) -> None:
        self._listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        options = EngineOptions(model, served_model_name="tiny", shutdown_timeout_s=shutdown_timeout_s)
        self.task = asyncio.ensure_future(serve(engine, options, "127.0.0.1", 0, on_listening=self._note))

    def _note(self, model_name: str, address: Address) -> None:
        self._listening.set_result(f"http://{address}")

    async def url(self) -> str:
        return await self._listening


async def ask(session: aiohttp.ClientSession, url: str) -> int:
    async with session.post(url + "/v1/completions", json={"prompt": [5], "max_tokens": 1}) as answer:
        await answer.read()
        return answer.status


def test_a_signal_lets_running_requests_finish_and_takes_no_new_ones(model: Path) -> None:
    async def scene() -> None:
        engine = ScriptedEngine(silent)
        serving = Serving(engine, model)
        async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession() as session:
            url = await serving.url()
            running = asyncio.ensure_future(ask(session, url))
            await until(lambda: bool(engine.live))
            os.kill(os.getpid(), signal.SIGTERM)
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


def test_a_second_signal_does_not_wait_for_running_requests(model: Path) -> None:
    async def scene() -> None:
        engine = ScriptedEngine(silent)
        serving = Serving(engine, model)
        async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession() as session:
            running = asyncio.ensure_future(ask(session, await serving.url()))
            await until(lambda: bool(engine.live))
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
            await serving.task
            assert not engine.live
            with pytest.raises(aiohttp.ClientError):
                await running

    run_on_fast_loop(scene())


def test_a_request_that_does_not_finish_in_time_is_aborted(model: Path) -> None:
    async def scene() -> None:
        engine = ScriptedEngine(silent)
        serving = Serving(engine, model, shutdown_timeout_s=0.05)
        async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession() as session:
            running = asyncio.ensure_future(ask(session, await serving.url()))
            await until(lambda: bool(engine.live))
            os.kill(os.getpid(), signal.SIGTERM)
            await serving.task
            assert len(engine.aborted) == 1
            with pytest.raises(aiohttp.ClientError):
                await running

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
            with pytest.raises(ConfigError, match=str(port)):
                await serve(ScriptedEngine(), EngineOptions(model), "127.0.0.1", port)

    run_on_fast_loop(scene())


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7"])
def test_an_address_that_is_not_here_is_a_config_error(host: str) -> None:
    async def scene() -> None:
        with pytest.raises(ConfigError, match="choose another --host"):
            await open_listeners(host, 0)

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
        task = asyncio.ensure_future(serve(engine, EngineOptions(model, served_model_name="tiny"), "127.0.0.1", 0))
        await asyncio.sleep(0)
        engine.die("done")
        with pytest.raises(KVFerryError):
            await task

    run_on_fast_loop(scene())
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("kvferry: serving tiny on http://127.0.0.1:")
