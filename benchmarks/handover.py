"""`python -m benchmarks handover` measures the time from P's last token to D's first token.

The modes are pull, push, and push while P computes. Each mode has two embedded engines; all engines
run at once and get requests in turn, so that other load on the machine affects all modes alike. The
benchmark works below HTTP: requests are sent to the engine cores directly, as an API process sends
requests. P computes the prompt in chunks. D and the transports count how many bytes were still to
be moved when P had computed the last chunk; the count is not derived from times or tokens.
"""

import argparse
import asyncio
import json
import random
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from kvferry.bench.figures import quantile, ratio, rounded
from kvferry.bench.vllm.servers import COUNT
from kvferry.cli.arguments import Parser
from kvferry.cli.runtime import stop_signals
from kvferry.config import KVTransferConfig, SideChannelConfig
from kvferry.engine.client import EngineClient
from kvferry.engine.make_model.writer import make_model
from kvferry.engine.messages import AddRequest, SamplingParams
from kvferry.engine.options import EngineOptions
from kvferry.errors import KVFerryError
from kvferry.protocol.tickets import PushTicket, PushTicketKey
from kvferry.sizing.hf_config import auto_dtype, shape_of_config
from kvferry.transports.registry import ConfiguredTransportKit

# -- engine pair --
# P and D as two core processes; one prompt at a time is prefilled by P and decoded by D. All code
# runs on one asyncio loop; every wait has a timeout.


BLOCK_SIZE = 16
CHUNK_TOKENS = 512
LEG_S = 120.0
SPARE_BLOCKS = 64
HEADROOM_TOKENS = BLOCK_SIZE
"""The room for tokens that are generated after a prompt."""


class Mode(StrEnum):
    """How the KV moves from P to D."""

    PULL = "pull"
    PUSH = "push"
    STREAMED = "push streamed"


@dataclass(frozen=True, slots=True)
class Moved:
    """KV bytes as the transports count them: of one transfer, or of all transfers so far."""

    total: int
    early: int
    """The bytes that D already had when P had computed the prompt."""

    @property
    def left(self) -> int:
        """The bytes that were still to be moved when P had computed the prompt."""
        return self.total - self.early

    def since(self, before: "Moved") -> "Moved":
        return Moved(self.total - before.total, self.early - before.early)


@dataclass(slots=True)
class HandoverPair:
    """Two engines, P and D, that serve one prompt at a time."""

    mode: Mode
    prefill: EngineClient
    decode: EngineClient
    secret: bytes
    _number: int = 0
    _source: dict[str, Any] | None = None
    """P's parameters from an earlier answer, from which a router knows P's address and epoch."""

    async def hand_over(self, prompt: list[int]) -> float:
        """Return the seconds from P's only token to D's first token; both tokens must be equal."""
        self._number += 1
        name = f"{self._number}"
        async with asyncio.timeout(LEG_S):
            # The first transfer is always a pull: a push ticket needs P's address and epoch.
            if self.mode is Mode.PULL or self._source is None:
                first, params, at = await self._prefill(name, prompt, {})
                self._source = params
                second, done = await self._decode(name, prompt, params)
            else:
                ticket = {"push_ticket": self._push_ticket(name)}
                decoding = asyncio.create_task(
                    self._decode(name, prompt, {"do_remote_prefill": True, **ticket})
                )
                first, _, at = await self._prefill(name, prompt, ticket)
                second, done = await decoding
        if first != second:
            raise KVFerryError(
                f"P's first token is {first}, D's is {second}: the transferred KV is wrong"
            )
        return done - at

    async def moved(self) -> Moved:
        """Return the counts so far.

        The side that moves the bytes (D by reading or P by writing) has counted the bytes when D
        has its first token.
        """
        prefill, decode = await self.prefill.status(), await self.decode.status()
        total = sum(
            summary.total_bytes for status in (prefill, decode) for summary in status.transfers
        )
        return Moved(total, int(decode.connector_stats.get("pushed_bytes_early", 0)))

    def _push_ticket(self, handover: str) -> str:
        assert self._source is not None
        source = self._source
        host, port = source["remote_host"], source["remote_port"]
        return PushTicketKey(self.secret).sign(
            PushTicket(handover, source["remote_engine_id"], source["remote_epoch"], host, port, 1)
        )

    async def _prefill(
        self, name: str, prompt: list[int], params: dict[str, Any]
    ) -> tuple[int, dict[str, Any], float]:
        request = _request(f"p{name}", prompt, {"do_remote_decode": True, **params})
        async for output in self.prefill.generate(request):
            if output.tokens:
                at = time.monotonic()
                token = output.tokens[0].token_id
            if output.kv_transfer_params is not None:
                return token, output.kv_transfer_params, at
        raise KVFerryError("the prefill engine granted no lease")

    async def _decode(
        self, name: str, prompt: list[int], params: dict[str, Any]
    ) -> tuple[int, float]:
        tokens: list[tuple[int, float]] = []
        async for output in self.decode.generate(_request(f"d{name}", prompt, params)):
            if output.error:
                raise KVFerryError(f"the decode engine failed: {output.error}")
            tokens += [(token.token_id, time.monotonic()) for token in output.tokens]
        return tokens[0]


@asynccontextmanager
async def start_pair(
    model: Path, transport: str, mode: Mode, prompt_tokens: int
) -> AsyncIterator[HandoverPair]:
    """Start both engines in their own processes, connected by this transport alone.

    Prefix caching is off, so no engine reuses an earlier prompt.
    """
    secret = secrets.token_bytes(32)
    started: list[EngineClient] = []
    try:
        for role in ("prefill", "decode"):
            started.append(
                await _start(
                    model, transport, secret, f"{mode.name.lower()}-{role}", mode, prompt_tokens
                )
            )
        prefill, decode = started
        yield HandoverPair(mode, prefill, decode, secret)
    finally:
        for client in started:
            await client.close()


async def _start(
    model: Path, transport: str, secret: bytes, name: str, mode: Mode, prompt_tokens: int
) -> EngineClient:
    extra: dict[str, Any] = {"transports": [transport], "push_streaming": mode is Mode.STREAMED}
    connector = "NixlConnector" if mode is Mode.PULL else "NixlPushConnector"
    mapping = {
        "kv_connector": connector,
        "kv_role": "kv_both",
        "engine_id": name,
        "kv_connector_extra_config": extra,
    }
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
    kit = ConfiguredTransportKit(
        side_channel.bind_host, side_channel.advertised_host, 0, secret, transports=(transport,)
    )
    return await EngineClient.start(options, kit, secret=secret, side_channel=side_channel)


def _request(name: str, prompt: list[int], params: dict[str, Any]) -> AddRequest:
    return AddRequest(
        name, prompt, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True), params
    )


# -- command --


DESCRIPTION = (
    "Measure the time from the prefill engine's last token to the decode engine's first, in pull, "
    "in push, and in push while the prompt\nis still computed, between embedded engines on this "
    "machine; and count the bytes left to move when the prompt was computed."
)
EXAMPLES = """\
  python -m benchmarks handover
  python -m benchmarks handover --json --samples 10 --prompt-tokens 4096"""
WARM_UPS = 2
"""The first warm-up request, a short one, gives each pair P's address for push tickets."""
SEED = 1
VOCABULARY = range(10, 500)


@dataclass(frozen=True, slots=True)
class Facts:
    """The settings of a run, as reported with the results."""

    prompt_tokens: int
    chunk_tokens: int
    bytes_per_token: int
    """The cache bytes per token according to config.json; the moved bytes were counted
    independently.
    """
    transport: str
    samples: int


@dataclass(slots=True)
class HandoverSamples:
    """The measurements of one mode."""

    handover_s: list[float] = field(default_factory=list)
    moved: list[Moved] = field(default_factory=list)


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--samples",
        type=COUNT,
        default=10,
        metavar="N",
        help="samples of each mode (default: %(default)s)",
    )
    parser.add_argument(
        "--prompt-tokens",
        type=COUNT,
        default=4096,
        metavar="N",
        help="length of the prompts (default: %(default)s)",
    )
    parser.add_argument(
        "--transport",
        default="shm",
        choices=("shm", "nixl", "tcp"),
        help="data transport (default: %(default)s)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on standard output"
    )


def run(arguments: argparse.Namespace) -> int:
    with stop_signals(), tempfile.TemporaryDirectory(prefix="kvferry-handover-") as directory:
        model = Path(directory) / "model"
        token_bytes = _make_model(model, arguments.prompt_tokens)
        samples = asyncio.run(
            _measure_all(model, arguments.transport, arguments.samples, arguments.prompt_tokens)
        )
    rows = make_rows(samples)
    facts = Facts(
        arguments.prompt_tokens, CHUNK_TOKENS, token_bytes, arguments.transport, arguments.samples
    )
    print(json.dumps({**asdict(facts), "rows": rows}) if arguments.json else _table(rows, facts))
    return 0


def _make_model(directory: Path, prompt_tokens: int) -> int:
    """Write a tiny model with enough positions for the prompts; return its cache bytes per
    token.
    """
    make_model(directory)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["max_position_embeddings"] = max(
        config["max_position_embeddings"], prompt_tokens + HEADROOM_TOKENS
    )
    path.write_text(json.dumps(config))
    return shape_of_config(config, auto_dtype(config) or config["dtype"]).bytes_per_token()


async def _measure_all(
    model: Path, transport: str, count: int, length: int
) -> dict[Mode, HandoverSamples]:
    samples = {mode: HandoverSamples() for mode in Mode}
    rng = random.Random(SEED)
    async with AsyncExitStack() as stack:
        pairs = {
            mode: await stack.enter_async_context(start_pair(model, transport, mode, length))
            for mode in Mode
        }
        for number in range(-WARM_UPS, count):
            for mode, pair in pairs.items():
                tokens = rng.choices(VOCABULARY, k=length if number > -WARM_UPS else CHUNK_TOKENS)
                await _measure(pair, tokens, samples[mode] if number >= 0 else HandoverSamples())
    return samples


async def _measure(pair: HandoverPair, prompt: list[int], into: HandoverSamples) -> None:
    before = await pair.moved()
    into.handover_s.append(await pair.hand_over(prompt))
    into.moved.append((await pair.moved()).since(before))


def make_rows(samples: Mapping[Mode, HandoverSamples]) -> list[dict[str, Any]]:
    """Return one row per mode, with the ratio to pull."""
    pull = quantile(samples[Mode.PULL].handover_s, 0.5)
    return [
        {
            "mode": str(mode),
            "handover_ms_p50": _ms(of.handover_s, 0.5),
            "handover_ms_p90": _ms(of.handover_s, 0.9),
            "handover_ms_max": _ms(of.handover_s, 1.0),
            "ratio_to_pull": ratio(quantile(of.handover_s, 0.5), pull),
            "bytes_total": max((moved.total for moved in of.moved), default=None),
            "bytes_left_p50": quantile([moved.left for moved in of.moved], 0.5),
            "bytes_left_max": max((moved.left for moved in of.moved), default=None),
        }
        for mode, of in samples.items()
    ]


def _ms(values: Sequence[float], share: float) -> float | None:
    middle = quantile(values, share)
    return None if middle is None else rounded(middle * 1000)


def _table(rows: Sequence[Mapping[str, Any]], facts: Facts) -> str:
    columns = {
        "mode": "mode",
        "p50 ms": "handover_ms_p50",
        "p90 ms": "handover_ms_p90",
        "÷ pull": "ratio_to_pull",
        "bytes": "bytes_total",
        "left, at most": "bytes_left_max",
    }
    lines = ["".join(f"{title:>16}" for title in columns)]
    lines += [
        "".join(f"{'-' if row[key] is None else row[key]:>16}" for key in columns.values())
        for row in rows
    ]
    summary = (
        f"{facts.prompt_tokens} tokens of {facts.bytes_per_token} bytes in chunks of "
        f"{facts.chunk_tokens} over {facts.transport}"
    )
    return "\n".join(
        [
            *lines,
            "",
            f"from P's last token to D's first; {summary}; left: bytes still to move when P had "
            "computed the prompt",
        ]
    )
