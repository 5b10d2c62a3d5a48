"""Serves the front-end on a loopback port over a scripted engine, for events that a test cannot
make a real core produce on demand.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from kvferry.engine.api.app import build_app
from kvferry.engine.api.context import ApiSettings, Engine
from kvferry.engine.api.serve import make_runner
from kvferry.engine.client import OutputStream
from kvferry.engine.messages import (
    AddRequest,
    CoreReady,
    CoreStatus,
    Remaining,
    RequestOutput,
    SampledToken,
)
from kvferry.engine.options import EngineOptions
from kvferry.errors import KVFerryError, RemoteProtocolError
from kvferry.web.transfer_records import TransferRecord

DEADLINE_S = 60.0
MODEL_LEN = 200
VOCAB = 512

Script = Callable[[AddRequest], Sequence[RequestOutput]]


def outputs_of(
    request: AddRequest, tokens: Sequence[int], finish_reason: str | None = "length", **last: Any
) -> list[RequestOutput]:
    """One output per token; the last output carries the finish reason."""
    outputs = [
        RequestOutput(request.request_id, [SampledToken(token, -0.5, ((token, -0.5), (7, -1.5)))])
        for token in tokens
    ]
    if finish_reason is None:
        return outputs
    return [
        *outputs[:-1],
        RequestOutput(request.request_id, outputs[-1].tokens, finish_reason, **last),
    ]


def counts_up(request: AddRequest) -> Sequence[RequestOutput]:
    """Tokens 33, 34, …: as many as `max_tokens` asks for, at most 90."""
    return outputs_of(request, [33 + step for step in range(min(request.sampling.max_tokens, 90))])


class ScriptedEngine:
    """Replays the outputs that `script` returns for each request. If they have no finish reason,
    the test continues the request with `put`.
    """

    def __init__(self, script: Script = counts_up) -> None:
        self.script = script
        self.frames: list[list[AddRequest]] = []
        self.aborted: list[str] = []
        self.abandoned: list[str] = []
        self.live: dict[str, OutputStream] = {}
        self.records: list[TransferRecord] = []
        self.held = 0
        """Number of leases that the engine reports once it drains."""
        self.is_draining = False
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def ready(self) -> CoreReady:
        return CoreReady(
            max_model_len=MODEL_LEN,
            num_blocks=64,
            block_size=16,
            eos_token_ids=[508],
            vocab_size=VOCAB,
        )

    @property
    def is_alive(self) -> bool:
        return not self._death.done()

    def die(self, reason: str) -> None:
        self._death.set_result(reason)

    async def died(self) -> str:
        return await asyncio.shield(self._death)

    def add(self, requests: Sequence[AddRequest]) -> list[OutputStream]:
        if any(request.request_id in self.live for request in requests):
            raise RemoteProtocolError("request id is already in use")
        self.frames.append(list(requests))
        streams = [OutputStream(request.request_id, self._closed) for request in requests]
        self.live |= {stream.request_id: stream for stream in streams}
        for request in requests:
            for output in self.script(request):
                self.put(output)
        return streams

    def put(self, output: RequestOutput) -> None:
        self.live[output.request_id].put(output)
        if output.finish_reason is not None:
            del self.live[output.request_id]

    def abandon(self, request_id: str) -> None:
        self.abandoned.append(request_id)

    def drain(self) -> None:
        self.is_draining = True

    @property
    def remaining(self) -> Remaining | None:
        return Remaining(len(self.live), self.held, self.held * 3) if self.is_draining else None

    async def drained(self) -> None:
        await until(lambda: self.remaining is not None and self.remaining.is_drained)

    def _closed(self, stream: OutputStream) -> None:
        if self.live.pop(stream.request_id, None) is not None:
            self.aborted.append(stream.request_id)

    async def transfer_records(
        self, name: str = "", timeout_s: float = 5.0
    ) -> list[TransferRecord]:
        if not self.is_alive:
            raise KVFerryError("the engine core is dead")
        return [record for record in self.records if name in ("", record.request_id)]

    async def status(self, timeout_s: float = 5.0) -> CoreStatus:
        if not self.is_alive:
            raise KVFerryError("the engine core is dead")
        return CoreStatus(
            nonce=1,
            num_running=len(self.live),
            num_blocks=64,
            num_used_blocks=16,
            prompt_tokens_total=11,
            generation_tokens_total=22,
            prompt_tokens_by_source={"local_compute": 5, "external_kv_transfer": 6},
            requests_finished_by_reason={"stop": 3},
        )


@dataclass(frozen=True, slots=True)
class Stage:
    session: aiohttp.ClientSession
    url: str
    app: web.Application

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """Returns the status and the decoded JSON; every answer must be JSON."""
        sent = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with self.session.post(self.url + path, headers=headers, **sent) as answer:
            assert answer.content_type == "application/json", await answer.text()
            return answer.status, await answer.json()

    async def complete(self, **body: Any) -> Any:
        status, answer = await self.post("/v1/completions", body)
        assert status == 200, answer
        return answer

    async def stream(self, path: str, **body: Any) -> list[Any]:
        """Returns the decoded events of a stream, which must end properly."""
        async with self.session.post(self.url + path, json={"stream": True, **body}) as answer:
            assert answer.status == 200, await answer.text()
            assert answer.content_type == "text/event-stream"
            return events_of(await answer.read())


def events_of(raw: bytes) -> list[Any]:
    events = raw.decode().split("\n\n")
    assert events[-1] == ""
    assert events[-2] == "data: [DONE]"
    assert all(event.startswith("data: ") for event in events[:-1])
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


@asynccontextmanager
async def stage(
    engine: Engine, model: Path, settings: ApiSettings | None = None
) -> AsyncIterator[Stage]:
    """A stage for one test; everything in the test must end within the deadline."""
    async with asyncio.timeout(DEADLINE_S), serving(engine, model, settings) as s:
        yield s


@asynccontextmanager
async def serving(
    engine: Engine, model: Path, settings: ApiSettings | None = None
) -> AsyncIterator[Stage]:
    app = build_app(engine, EngineOptions(model, served_model_name="tiny"), settings)
    runner = make_runner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with aiohttp.ClientSession() as session:
            yield Stage(session, f"http://127.0.0.1:{runner.addresses[0][1]}", app)
    finally:
        await runner.cleanup()


async def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds; if it never holds, the stage's deadline ends the wait."""
    while not condition():
        await asyncio.sleep(0.001)
