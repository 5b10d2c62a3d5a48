"""Conversations without a router: the test itself sends both legs of each turn, and passes D's
parameters for the retained turn to P in the next turn.
"""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import aiohttp
from tests.e2e.harness import Engine, Prompt, ask, metrics, until

from kvferry.protocol import messages as codec
from kvferry.protocol.messages import RetainedTurnReply, RetainedTurnRequest
from kvferry.transports.base import Received
from kvferry.transports.zmq import CurveKeys, ZmqTransport

BLOCK = 16
PULLED, BYTES = "kvferry:reuse_loaded_tokens_total", "kvferry:reuse_loaded_bytes_total"
ANSWER_TOKENS = 24
_rng = random.Random("conversations")


def says(length: int = 40) -> tuple[int, ...]:
    """Return random tokens that no conversation has contained before."""
    return tuple(_rng.randrange(10, 500) for _ in range(length))


def blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK)


@dataclass(frozen=True)
class Told:
    """The result of one turn."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    kept: dict[str, Any] | None
    """D's parameters for the retained turn, to be sent with the next turn."""
    word: str
    num_pulled: int
    """Tokens that P fetched from a D."""
    num_bytes: int
    num_computed: int
    """Tokens that P computed."""

    @property
    def num_kept(self) -> int:
        """Tokens that D retains: all but the last, whose KV D never computes."""
        return len(self.prompt) + len(self.answer) - 1


async def take_turn(
    session: aiohttp.ClientSession,
    p: Engine,
    d: Engine,
    prompt: Sequence[int],
    kept: dict[str, Any] | None = None,
    *,
    is_streamed: bool = False,
    **changes: Any,
) -> Told:
    """Send both legs of a turn; the answer is not checked."""
    asked, before, word = (
        Prompt(tuple(prompt), max_tokens=ANSWER_TOKENS),
        await metrics(session, p),
        uuid4().hex,
    )
    wish = {**(kept or {}), "do_remote_decode": True, "do_remote_prefill": False}
    first = await ask(session, p, asked, max_tokens=1, kv_transfer_params=wish, **changes)
    assert first.is_ok, first.body
    params = {**first.body["kv_transfer_params"], "conversation": word}
    if is_streamed:
        answer, told = await stream(
            session, d, {**asked.body(), "kv_transfer_params": params, **changes}
        )
    else:
        whole = await ask(session, d, asked, kv_transfer_params=params, **changes)
        assert whole.is_ok, whole.body
        [answer], told = whole.token_ids, whole.body["kv_transfer_params"]
    after = await metrics(session, p)
    num_pulled, num_bytes = (
        int(after.get(name, 0) - before.get(name, 0)) for name in (PULLED, BYTES)
    )
    num_cached = first.body["usage"]["prompt_tokens_details"]["cached_tokens"]
    return Told(tuple(prompt), answer, told, word, num_pulled, num_bytes, len(prompt) - num_cached)


async def stream(
    session: aiohttp.ClientSession, d: Engine, body: dict[str, Any]
) -> tuple[tuple[int, ...], dict[str, Any] | None]:
    """Return the answer's tokens, and the transfer parameters in the last event before [DONE]."""
    events: list[dict[str, Any]] = []
    async with session.post(f"{d.url}/v1/completions", json={**body, "stream": True}) as response:
        assert response.status == 200
        async for line in response.content:
            text = line.decode().strip().removeprefix("data: ")
            if text and text != "[DONE]":
                events.append(json.loads(text))
    assert not any("kv_transfer_params" in event for event in events[:-1]), (
        "it is in an event of its own"
    )
    kept = events[-1].get("kv_transfer_params")
    assert kept is None or events[-1]["choices"] == []
    return tuple(
        token
        for event in events
        for choice in event["choices"]
        for token in choice["token_ids"] or ()
    ), kept


@dataclass
class Talk:
    """One client's conversation, and a single engine that gives the right answers."""

    plain: Engine
    history: tuple[int, ...] = field(default_factory=lambda: says(100))
    last: Told | None = None

    @property
    def kept(self) -> dict[str, Any] | None:
        return None if self.last is None else self.last.kept

    async def turn(
        self, session: aiohttp.ClientSession, p: Engine, d: Engine, **changes: Any
    ) -> Told:
        """Continue the conversation with a new question, and check that the answer is right."""
        if self.last is not None:
            self.history = self.last.prompt + self.last.answer + says()
        self.last = told = await take_turn(session, p, d, self.history, self.kept, **changes)
        right = await ask(session, self.plain, Prompt(self.history, max_tokens=ANSWER_TOKENS))
        assert told.answer == right.token_ids[0]
        return told


async def retained_turns(session: aiohttp.ClientSession, d: Engine, num_turns: int) -> None:
    async def are_kept() -> bool:
        # An engine that only waits does not update its metrics until its next step.
        assert (await ask(session, d, Prompt((11, 12), max_tokens=1))).is_ok
        return (await metrics(session, d))["kvferry:num_retained_turns"] == num_turns

    await until(f"{num_turns} turns are kept", are_kept)


async def side_channel_of(session: aiohttp.ClientSession, engine: Engine) -> str:
    """Read the side channel's address from the metrics, as a router does."""
    async with session.get(f"{engine.url}/metrics") as response:
        [line] = [
            line
            for line in (await response.text()).splitlines()
            if line.startswith("kvferry:side_channel{")
        ]
    assert line.endswith(" 1.0")
    return line.split('address="')[1].split('"')[0]


async def ask_side_channel(
    address: str, secret: bytes, word: str, timeout_s: float = 10.0
) -> str | None:
    """Ask an engine for the retained turn with this id. None means no reply: an engine with another
    secret does not answer.
    """
    return await asyncio.to_thread(_ask, address, secret, word, timeout_s)


def _ask(address: str, secret: bytes, word: str, timeout_s: float) -> str | None:
    deadline = time.monotonic() + timeout_s
    with closing(
        ZmqTransport("127.0.0.1", "127.0.0.1", 0, CurveKeys.from_secret(secret))
    ) as control:
        control.send(f"tcp://{address}", codec.encode(RetainedTurnRequest(7, word)))
        while time.monotonic() < deadline:
            for news in control.poll(0.1):
                if isinstance(news, Received):
                    answer = codec.decode(news.frame)
                    assert isinstance(answer, RetainedTurnReply)
                    assert (answer.nonce, answer.turn_id) == (7, word)
                    return answer.params
    return None
