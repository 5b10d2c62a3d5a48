"""P and D of the embedded engine as two core processes, and one transfer after the other between them, some aborted on purpose.

Below HTTP: requests go straight to the engine cores, as an API process sends them, so that a hundred thousand take minutes. Everything
runs on one asyncio loop; every wait has a deadline.
"""

import asyncio
import random
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from kvferry.cli.planes import ConfiguredTransportKit
from kvferry.config import KVTransferConfig, SideChannelConfig
from kvferry.engine.client import EngineClient
from kvferry.engine.messages import AddRequest, CoreStatus, RequestOutput
from kvferry.engine.options import EngineOptions
from kvferry.engine.step import SamplingParams
from kvferry.errors import KVFerryError

__all__ = ["ABORTED_OUTCOMES", "BLOCK_SIZE", "SoakLoad", "SoakOutcome", "SoakPair", "SoakTally", "start_pair"]

BLOCK_SIZE = 16
NUM_BLOCKS = 512
LEG_S = 120.0
SETTLE_S = 60.0
LEASE_S = 20.0
"""Leases of prompts that are forgotten run out after so long."""
VOCABULARY = range(10, 500)
KNOWN_PROMPTS = 64
FRESH_SHARE = 0.25
"""Of prompts that nobody has seen before. The others cost P little, for it keeps what begins alike; D keeps nothing, so all move."""
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


class SoakOutcome(StrEnum):
    """How a transfer ends. All but the first are aborted, each at another point."""

    DONE = "done"
    PREFILL_ABORTED = "prefill aborted"
    TICKET_ABANDONED = "ticket abandoned"
    TICKET_FORGOTTEN = "ticket forgotten"
    DECODE_ABORTED = "decode aborted"


ABORTED_OUTCOMES = tuple(SoakOutcome)[1:]


@dataclass(slots=True)
class SoakTally:
    """What came of the transfers so far."""

    outcomes: Counter[SoakOutcome] = field(default_factory=Counter)
    wrong_tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def done(self) -> int:
        return self.outcomes[SoakOutcome.DONE]

    @property
    def aborted(self) -> int:
        return sum(self.outcomes[outcome] for outcome in ABORTED_OUTCOMES)


@dataclass(frozen=True, slots=True)
class SoakLoad:
    """What both engines compute on, and the longest prompt."""

    device: str = "cpu"
    longest: int = 3 * BLOCK_SIZE

    @property
    def num_blocks(self) -> int:
        return NUM_BLOCKS * max(1, -(-self.longest // (3 * BLOCK_SIZE)))


SHORT_PROMPTS = SoakLoad()


@dataclass(slots=True)
class SoakPair:
    prefill: EngineClient
    decode: EngineClient
    abort_share: float
    rng: random.Random
    load: SoakLoad = SHORT_PROMPTS
    tally: SoakTally = field(default_factory=SoakTally)
    _number: int = 0
    _known: list[list[int]] = field(default_factory=list)

    async def transfer(self) -> None:
        """One prompt through P and D. P's token is what D's first must be."""
        self._number += 1
        name, prompt = f"soak-{self._number}", self._next_prompt()
        outcome = self.rng.choice(ABORTED_OUTCOMES) if self.rng.random() < self.abort_share else SoakOutcome.DONE
        async with asyncio.timeout(LEG_S):
            await self._run(name, prompt, outcome)

    def _next_prompt(self) -> list[int]:
        if len(self._known) == KNOWN_PROMPTS and self.rng.random() >= FRESH_SHARE:
            return self.rng.choice(self._known)
        prompt = self.rng.choices(VOCABULARY, k=self.rng.randint(1, self.load.longest))
        if len(self._known) < KNOWN_PROMPTS:
            self._known.append(prompt)
        return prompt

    async def _run(self, name: str, prompt: list[int], outcome: SoakOutcome) -> None:
        request = _request(name, prompt, 1, PREFILL)
        if outcome is SoakOutcome.PREFILL_ABORTED:
            await self._abort(self.prefill, request)
            self.tally.outcomes[outcome] += 1
            return
        first = await _last_output(self.prefill, request)
        if first.kv_transfer_params is None:
            self.tally.errors[first.error or f"P gave no parameters ({first.finish_reason})"] += 1
            return
        request = _request(name, prompt, self.rng.randint(1, 3), first.kv_transfer_params)
        if outcome is SoakOutcome.TICKET_ABANDONED:
            self.prefill.abandon(name)
        elif outcome is SoakOutcome.DECODE_ABORTED:
            await self._abort(self.decode, request)
        elif outcome is SoakOutcome.DONE:
            await self._decode(request, first.tokens[0].token_id)
            return
        self.tally.outcomes[outcome] += 1

    async def _decode(self, request: AddRequest, expected: int) -> None:
        outputs = [output async for output in self.decode.generate(request)]
        tokens = [token.token_id for output in outputs for token in output.tokens]
        if outputs[-1].finish_reason != "length":
            self.tally.errors[outputs[-1].error or f"D ended with {outputs[-1].finish_reason}"] += 1
            return
        self.tally.wrong_tokens += tokens[0] != expected
        self.tally.outcomes[SoakOutcome.DONE] += 1

    async def _abort(self, engine: EngineClient, request: AddRequest) -> None:
        (stream,) = engine.add([request])
        await asyncio.sleep(self.rng.random() * 0.05)
        stream.close()

    async def settle(self) -> tuple[CoreStatus, CoreStatus]:
        """Wait until no block is in use on either side. What is still held when time is up is in the answer."""
        deadline = asyncio.get_running_loop().time() + SETTLE_S
        while True:
            both = await self.prefill.status(), await self.decode.status()
            if not any(map(_is_busy, both)) or asyncio.get_running_loop().time() > deadline:
                return both
            await asyncio.sleep(0.1)


@asynccontextmanager
async def start_pair(model: Path, transport: str, abort_share: float, seed: int, load: SoakLoad = SHORT_PROMPTS) -> AsyncIterator[SoakPair]:
    """Both engines on their own processes, joined by this transport alone."""
    secret = secrets.token_bytes(32)
    engines = await asyncio.gather(
        *(_start(model, transport, secret, role, load) for role in ("prefill", "decode")), return_exceptions=True
    )
    started = [engine for engine in engines if isinstance(engine, EngineClient)]
    try:
        for engine in engines:
            if isinstance(engine, BaseException):
                raise engine
        prefill, decode = started
        yield SoakPair(prefill, decode, abort_share, random.Random(seed), load)
    finally:
        for client in started:
            await client.close()


async def _start(model: Path, transport: str, secret: bytes, role: str, load: SoakLoad) -> EngineClient:
    extra: dict[str, Any] = {"transports": [transport], "kv_lease_duration": LEASE_S}
    mapping = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "engine_id": f"soak-{role}", "kv_connector_extra_config": extra}
    options = EngineOptions(
        model=model,
        device=load.device,
        block_size=BLOCK_SIZE,
        num_blocks=load.num_blocks,
        enable_prefix_caching=role == "prefill",
        kv_transfer=KVTransferConfig.from_mapping(mapping),
    )
    side_channel = SideChannelConfig(port=0)
    kit = ConfiguredTransportKit(side_channel.bind_host, side_channel.advertised_host, 0, secret, transports=(transport,))
    return await EngineClient.start(options, kit, secret=secret, side_channel=side_channel)


def _request(name: str, prompt: list[int], max_tokens: int, params: dict[str, Any]) -> AddRequest:
    return AddRequest(name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True), params)


async def _last_output(engine: EngineClient, request: AddRequest) -> RequestOutput:
    last = None
    async for output in engine.generate(request):
        last = output
    if last is None:
        raise KVFerryError(f"the engine said nothing about {request.request_id}")
    return last


def _is_busy(status: CoreStatus) -> bool:
    waiting = status.num_running or status.num_waiting or status.num_waiting_for_remote_kvs
    return bool(waiting or status.num_used_blocks or status.num_delayed_frees)
