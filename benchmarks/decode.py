"""`python -m benchmarks decode` measures the time per output token by context length and batch.

One embedded engine with `DecodeBenchConnector` gets each prompt's KV made up, so that a context of
any length costs no prefill, and only decoding is measured. The benchmark works below HTTP: requests
are sent to the engine core directly. The generated tokens mean nothing.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvferry.bench.figures import quantile, rounded
from kvferry.bench.vllm.servers import COUNT
from kvferry.cli.arguments import Parser, whole
from kvferry.cli.runtime import stop_signals
from kvferry.config import KVTransferConfig, SideChannelConfig
from kvferry.engine.client import EngineClient
from kvferry.engine.make_model.writer import make_model
from kvferry.engine.messages import AddRequest, SamplingParams
from kvferry.engine.options import EngineOptions
from kvferry.errors import KVFerryError
from kvferry.testing.local import LocalTransportKit

DESCRIPTION = (
    "Measure the time per output token of an embedded engine against the length of the context and "
    "the number of requests that decode\ntogether. The KV of the prompts is made up by "
    "DecodeBenchConnector, so nothing is prefilled and the tokens mean nothing."
)
EXAMPLES = """\
  python -m benchmarks decode
  python -m benchmarks decode --json --context 1024,16384 --batch 1,8 --output-tokens 64
  python -m benchmarks decode --model /models/Qwen3-0.6B --device cuda"""
BLOCK_SIZE = 16
WARM_UP_TOKENS = 4
REQUEST_S = 600.0
VOCABULARY = range(10, 500)
SEED = 1


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--context",
        type=_counts,
        default=(256, 1024, 4096),
        metavar="N,N",
        help="tokens before the first measured one (default: 256,1024,4096)",
    )
    parser.add_argument(
        "--batch",
        type=_counts,
        default=(1, 4),
        metavar="N,N",
        help="requests that decode together (default: 1,4)",
    )
    parser.add_argument(
        "--output-tokens",
        type=whole(2, 99_999),
        default=32,
        metavar="N",
        help="measured tokens of each request (default: %(default)s)",
    )
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="a checkpoint (default: a tiny generated model)"
    )
    parser.add_argument(
        "--device", default="cpu", help="where the engine computes (default: %(default)s)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on standard output"
    )


def _counts(text: str) -> tuple[int, ...]:
    return tuple(map(COUNT, text.split(",")))


def run(arguments: argparse.Namespace) -> int:
    with stop_signals(), tempfile.TemporaryDirectory(prefix="kvferry-decode-") as directory:
        model = arguments.model or _make_model(Path(directory) / "model", _longest(arguments))
        rows = asyncio.run(_measure_all(model, arguments))
    if arguments.json:
        print(json.dumps({"output_tokens": arguments.output_tokens, "rows": rows}))
    else:
        print(_table(rows))
    return 0


def _longest(arguments: argparse.Namespace) -> int:
    return int(max(arguments.context) + arguments.output_tokens + WARM_UP_TOKENS)


def _make_model(directory: Path, num_positions: int) -> Path:
    """Write a tiny model with enough positions for the contexts."""
    make_model(directory)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["max_position_embeddings"] = max(config["max_position_embeddings"], num_positions)
    path.write_text(json.dumps(config))
    return directory


async def _measure_all(model: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    longest, batch = _longest(arguments), max(arguments.batch)
    options = EngineOptions(
        model=model,
        block_size=BLOCK_SIZE,
        num_blocks=batch * (longest // BLOCK_SIZE + 2),
        max_model_len=longest,
        max_num_seqs=batch,
        device=arguments.device,
        kv_transfer=KVTransferConfig.from_mapping(
            {
                "kv_connector": "DecodeBenchConnector",
                "kv_role": "kv_consumer",
                # Without spread, attention would have the same weight for every token.
                "kv_connector_extra_config": {"fill_std": 0.02},
            }
        ),
    )
    client = await EngineClient.start(
        options, LocalTransportKit(), secret=b"", side_channel=SideChannelConfig(port=0)
    )
    try:
        rows = []
        for context in arguments.context:
            for size in arguments.batch:
                await _decode(client, context, size, WARM_UP_TOKENS)
                times = await _decode(client, context, size, arguments.output_tokens)
                rows.append(make_row(context, times))
        return rows
    finally:
        await client.close()


async def _decode(
    client: EngineClient, context: int, batch: int, output_tokens: int
) -> list[list[float]]:
    """Decode a batch, and return when each token of each request arrived."""
    rng = random.Random(SEED)
    sampling = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)

    async def one(number: int) -> list[float]:
        prompt = rng.choices(VOCABULARY, k=context)
        times: list[float] = []
        async for output in client.generate(AddRequest(f"{number}", prompt, sampling, None)):
            if output.error:
                raise KVFerryError(f"the engine failed: {output.error}")
            times += [time.monotonic()] * len(output.tokens)
        return times

    async with asyncio.timeout(REQUEST_S):
        return list(await asyncio.gather(*(one(number) for number in range(batch))))


def make_row(context: int, times: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Sum up one batch. Gaps between two tokens are counted only while all requests decode."""
    begin, end = max(each[0] for each in times), min(each[-1] for each in times)
    gaps = [
        later - earlier
        for each in times
        for earlier, later in pairwise(each)
        if begin <= earlier and later <= end
    ]
    middle = quantile(gaps, 0.5)
    return {
        "context_tokens": context,
        "batch": len(times),
        "token_ms_p50": _ms(middle),
        "token_ms_p90": _ms(quantile(gaps, 0.9)),
        "tokens_per_s": None if not middle else rounded(len(times) / middle),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else rounded(seconds * 1000, 3)


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = {
        "context": "context_tokens",
        "batch": "batch",
        "ms per token p50": "token_ms_p50",
        "p90": "token_ms_p90",
        "tokens/s": "tokens_per_s",
    }
    lines = ["".join(f"{title:>18}" for title in columns)]
    lines += [
        "".join(f"{'-' if row[key] is None else row[key]:>18}" for key in columns.values())
        for row in rows
    ]
    return "\n".join([*lines, "", "decoding only: the KV of the contexts is made up"])
