"""`kvferry bench handover`: from the prefill side's last token to the decode side's first, in pull, push, and push while P computes.

Two embedded engines for each mode, all alive at once, asked in turn so that whatever else the machine does meets all alike. Below HTTP:
requests go straight to the engine cores, as an API process sends them. P computes the prompt in chunks; how many bytes were still to be
moved when it had computed the last is counted by D and by the transports, not derived from times or from tokens.
"""

import argparse
import asyncio
import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvferry.bench.figures import quantile, ratio, rounded
from kvferry.bench.handover_pair import CHUNK_TOKENS, HEADROOM_TOKENS, HandoverPair, Mode, Moved, start_pair
from kvferry.cli.interrupts import stop_signals
from kvferry.cli.parser import Parser
from kvferry.engine.make_model import make_model
from kvferry.sizing.from_config import auto_dtype, shape_of_config

__all__ = ["DESCRIPTION", "EXAMPLES", "Facts", "HandoverSamples", "add_arguments", "make_rows", "run"]

DESCRIPTION = (
    "Measure the time from the prefill engine's last token to the decode engine's first, in pull, in push, and in push while the prompt\n"
    "is still computed, between embedded engines on this machine; and count what was left to move when the prompt had been computed."
)
EXAMPLES = """\
  kvferry bench handover
  kvferry bench handover --json --samples 10 --prompt-tokens 4096"""
WARM_UPS = 2
"""The first, a short one, tells each pair's router what P is."""
SEED = 1
VOCABULARY = range(10, 500)


@dataclass(frozen=True, slots=True)
class Facts:
    """What was measured."""

    prompt_tokens: int
    chunk_tokens: int
    bytes_per_token: int
    """As the model's config.json has it; what moved was counted without it."""
    transport: str
    samples: int


@dataclass(slots=True)
class HandoverSamples:
    """Of one mode."""

    handover_s: list[float] = field(default_factory=list)
    moved: list[Moved] = field(default_factory=list)


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--samples", type=int, default=10, metavar="N", help="of each mode (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=4096, metavar="N", help="length of the prompts (default: %(default)s)")
    parser.add_argument("--transport", default="shm", choices=("shm", "nixl", "tcp"), help="data transport (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def run(arguments: argparse.Namespace) -> int:
    with stop_signals(), tempfile.TemporaryDirectory(prefix="kvferry-handover-") as directory:
        model = Path(directory) / "model"
        token_bytes = _make_model(model, arguments.prompt_tokens)
        samples = asyncio.run(_measure_all(model, arguments.transport, arguments.samples, arguments.prompt_tokens))
    rows = make_rows(samples)
    facts = Facts(arguments.prompt_tokens, CHUNK_TOKENS, token_bytes, arguments.transport, arguments.samples)
    print(json.dumps({**asdict(facts), "rows": rows}) if arguments.json else _table(rows, facts))
    return 0


def _make_model(directory: Path, prompt_tokens: int) -> int:
    """A tiny one whose positions reach beyond the prompts; what it caches per token, in bytes."""
    make_model(directory)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["max_position_embeddings"] = max(config["max_position_embeddings"], prompt_tokens + HEADROOM_TOKENS)
    path.write_text(json.dumps(config))
    return shape_of_config(config, auto_dtype(config) or config["dtype"]).bytes_per_token()


async def _measure_all(model: Path, transport: str, count: int, length: int) -> dict[Mode, HandoverSamples]:
    samples = {mode: HandoverSamples() for mode in Mode}
    rng = random.Random(SEED)
    async with AsyncExitStack() as stack:
        pairs = {mode: await stack.enter_async_context(start_pair(model, transport, mode, length)) for mode in Mode}
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
    lines += ["".join(f"{'-' if row[key] is None else row[key]:>16}" for key in columns.values()) for row in rows]
    summary = f"{facts.prompt_tokens} tokens of {facts.bytes_per_token} bytes in chunks of {facts.chunk_tokens} over {facts.transport}"
    return "\n".join([*lines, "", f"from P's last token to D's first; {summary}; left: bytes still to be moved when P was through"])
