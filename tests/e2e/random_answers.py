"""Random requests to one engine and to P and D, and what must be equal in both answers."""

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from tests.e2e.harness import Engine, new_session

TEXTS = ("a ferry crosses the river at dawn. ", "Grüße aus Zürich, naïve café! ", "渡し船 🚢🌊 ")


@dataclass(frozen=True)
class Asked:
    """One request."""

    path: str
    body: dict[str, Any]


@dataclass
class Given:
    """What a client gets, streamed or not."""

    status: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)
    roles: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: Any = None
    usage: tuple[int, ...] | None = None
    answer_ids: set[str] = field(default_factory=set, compare=False)
    error: str = ""


def random_requests(count: int, seed: int, settings: dict[str, list[Any]]) -> list[Asked]:
    """Make greedy requests of all kinds. `settings`: values of further fields; a request has each
    field or not.
    """
    rng = random.Random(seed)
    asked = []
    for number in range(count):
        body: dict[str, Any] = {"model": "tiny", "temperature": 0}
        if rng.random() < 0.6:
            body["return_token_ids"] = True
        text = f"{number} " + rng.choice(TEXTS) * rng.randrange(1, 12)
        is_chat = rng.random() < 0.5
        if is_chat:
            body["messages"] = [{"role": "user", "content": text}]
        elif rng.random() < 0.5:
            body["prompt"] = text
        else:
            body["prompt"] = [rng.randrange(10, 500) for _ in range(rng.randrange(1, 400))]
        longest = rng.choice([None, 1, 2, 3, 24])
        if longest is not None:
            body[
                rng.choice(["max_tokens", "max_completion_tokens"]) if is_chat else "max_tokens"
            ] = longest
        for name, values in settings.items():
            if rng.random() < 0.3:
                body[name] = rng.choice(values)
        if is_chat and longest is None:
            # Such an answer may be as long as the model allows: this one stops soon.
            body["stop_token_ids"] = list(range(0, 500, 5))
        if rng.random() < 0.7:
            body["stream"] = True
            if rng.random() < 0.5:
                body["stream_options"] = {"include_usage": True}
        asked.append(Asked("/v1/chat/completions" if is_chat else "/v1/completions", body))
    return asked


async def give_all(
    engine: Engine, asked: Sequence[Asked], concurrency: int = 8, timeout_s: float = 120
) -> list[Given]:
    gate = asyncio.Semaphore(concurrency)

    async def one(session: aiohttp.ClientSession, request: Asked) -> Given:
        async with gate:
            return await give(session, engine, request)

    async with new_session(timeout_s) as session:
        return list(await asyncio.gather(*(one(session, request) for request in asked)))


async def give(session: aiohttp.ClientSession, engine: Engine, asked: Asked) -> Given:
    async with session.post(engine.url + asked.path, json=asked.body) as response:
        given, raw = Given(response.status), await response.read()
    if given.status != 200:
        given.error = raw.decode()
    elif asked.body.get("stream"):
        *events, end, rest = raw.split(b"\n\n")
        assert (end, rest) == (b"data: [DONE]", b""), raw[-300:]
        for event in events:
            _add(given, json.loads(event.removeprefix(b"data: ")))
    else:
        _add(given, json.loads(raw))
    return given


def _add(given: Given, part: dict[str, Any]) -> None:
    assert "error" not in part, part
    given.answer_ids.add(part["id"])
    given.prompt_token_ids += part.get("prompt_token_ids") or []
    if part.get("usage"):
        names = ("prompt_tokens", "completion_tokens", "total_tokens")
        given.usage = tuple(part["usage"][name] for name in names)
    for choice in part["choices"]:
        assert given.finish_reason is None, part
        given.prompt_token_ids += choice.get("prompt_token_ids") or []
        given.token_ids += choice.get("token_ids") or []
        message = choice.get("message") or choice.get("delta") or {}
        given.roles += [message["role"]] if message.get("role") else []
        given.text += choice.get("text") or message.get("content") or ""
        given.finish_reason = choice["finish_reason"]
        given.stop_reason = choice.get("stop_reason")
