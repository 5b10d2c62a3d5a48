"""P and D of the embedded engine as two core processes, and one prompt handed over at a time, in one of three modes.

Everything runs on one asyncio loop; every wait has a deadline.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from kvferry.cli.planes import ConfiguredTransportKit
from kvferry.config import KVTransferConfig, SideChannelConfig
from kvferry.engine.client import EngineClient
from kvferry.engine.messages import AddRequest
from kvferry.engine.options import EngineOptions
from kvferry.engine.step import SamplingParams
from kvferry.errors import KVFerryError
from kvferry.protocol.push_tickets import PushTicket, PushTicketKey

__all__ = ["CHUNK_TOKENS", "HEADROOM_TOKENS", "HandoverPair", "Mode", "Moved", "start_pair"]

BLOCK_SIZE = 16
CHUNK_TOKENS = 512
LEG_S = 120.0
SPARE_BLOCKS = 64
HEADROOM_TOKENS = BLOCK_SIZE
"""For what is generated after a prompt."""


class Mode(StrEnum):
    PULL = "pull"
    PUSH = "push"
    STREAMED = "push streamed"


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes of KV, as the transports count them: of one handover, or of all so far."""

    total: int
    early: int
    """Those that D had when P had computed the prompt."""

    @property
    def left(self) -> int:
        return self.total - self.early

    def since(self, before: "Moved") -> "Moved":
        return Moved(self.total - before.total, self.early - before.early)


@dataclass(slots=True)
class HandoverPair:
    mode: Mode
    prefill: EngineClient
    decode: EngineClient
    secret: bytes
    _number: int = 0
    _source: dict[str, Any] | None = None
    """P's parameters of an earlier answer: what a router knows of it."""

    async def hand_over(self, prompt: list[int]) -> float:
        """Seconds from P's only token to D's first. P's token must be D's."""
        self._number += 1
        name = f"{self._number}"
        async with asyncio.timeout(LEG_S):
            if self.mode is Mode.PULL or self._source is None:
                first, params, at = await self._prefill(name, prompt, {})
                self._source = params
                second, done = await self._decode(name, prompt, params)
            else:
                ticket = {"push_ticket": self._push_ticket(name)}
                decoding = asyncio.create_task(self._decode(name, prompt, {"do_remote_prefill": True, **ticket}))
                first, _, at = await self._prefill(name, prompt, ticket)
                second, done = await decoding
        if first != second:
            raise KVFerryError(f"P's first token is {first}, D's is {second}: the KV that was handed over is wrong")
        return done - at

    async def moved(self) -> Moved:
        """So far. Whoever moves them, D by reading or P by writing, has counted them when D has its first token."""
        prefill, decode = await self.prefill.status(), await self.decode.status()
        total = sum(summary.total_bytes for status in (prefill, decode) for summary in status.transfers)
        return Moved(total, int(decode.connector_stats.get("pushed_bytes_early", 0)))

    def _push_ticket(self, handover: str) -> str:
        assert self._source is not None
        source = self._source
        host, port = source["remote_host"], source["remote_port"]
        return PushTicketKey(self.secret).sign(PushTicket(handover, source["remote_engine_id"], source["remote_epoch"], host, port, 1))

    async def _prefill(self, name: str, prompt: list[int], params: dict[str, Any]) -> tuple[int, dict[str, Any], float]:
        request = _request(f"p{name}", prompt, {"do_remote_decode": True, **params})
        async for output in self.prefill.generate(request):
            if output.tokens:
                at = time.monotonic()
                token = output.tokens[0].token_id
            if output.kv_transfer_params is not None:
                return token, output.kv_transfer_params, at
        raise KVFerryError("the prefill engine kept no blocks")

    async def _decode(self, name: str, prompt: list[int], params: dict[str, Any]) -> tuple[int, float]:
        tokens: list[tuple[int, float]] = []
        async for output in self.decode.generate(_request(f"d{name}", prompt, params)):
            if output.error:
                raise KVFerryError(f"the decode engine failed: {output.error}")
            tokens += [(token.token_id, time.monotonic()) for token in output.tokens]
        return tokens[0]


@asynccontextmanager
async def start_pair(model: Path, transport: str, mode: Mode, prompt_tokens: int) -> AsyncIterator[HandoverPair]:
    """Both engines on their own processes, joined by this transport alone. Neither keeps a prompt for the next request."""
    secret = secrets.token_bytes(32)
    started: list[EngineClient] = []
    try:
        for role in ("prefill", "decode"):
            started.append(await _start(model, transport, secret, f"{mode.name.lower()}-{role}", mode, prompt_tokens))
        prefill, decode = started
        yield HandoverPair(mode, prefill, decode, secret)
    finally:
        for client in started:
            await client.close()


async def _start(model: Path, transport: str, secret: bytes, name: str, mode: Mode, prompt_tokens: int) -> EngineClient:
    extra: dict[str, Any] = {"transports": [transport], "push_streaming": mode is Mode.STREAMED}
    connector = "NixlConnector" if mode is Mode.PULL else "NixlPushConnector"
    mapping = {"kv_connector": connector, "kv_role": "kv_both", "engine_id": name, "kv_connector_extra_config": extra}
    options = EngineOptions(
        model=model,
        block_size=BLOCK_SIZE,
        num_blocks=2 * (prompt_tokens // BLOCK_SIZE) + SPARE_BLOCKS,
        max_model_len=prompt_tokens + HEADROOM_TOKENS,
        max_num_batched_tokens=CHUNK_TOKENS,
        enable_prefix_caching=False,
        kv_transfer=KVTransferConfig.from_mapping(mapping),
    )
    side_channel = SideChannelConfig(port=0)
    kit = ConfiguredTransportKit(side_channel.bind_host, side_channel.advertised_host, 0, secret, transports=(transport,))
    return await EngineClient.start(options, kit, secret=secret, side_channel=side_channel)


def _request(name: str, prompt: list[int], params: dict[str, Any]) -> AddRequest:
    return AddRequest(name, prompt, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True), params)
