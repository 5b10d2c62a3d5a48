"""`kvferry bench vllm-handover` measures from P's answer to D's first token inside real vLLM.

Our connector and vLLM's own are measured in one run. Both pairs of servers are alive all the time,
but one pair is always paused (SIGSTOP) while the other pair has its round. Each round sends a few
prompts of every length, after warm-up requests that are not counted. docs/benchmarks.md gives the
reasons. With `--device cuda` the servers run on a GPU: see `gpu_handover`.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from kvferry.bench.figures import quantile, ratio, rounded
from kvferry.bench.transfer.command import parse_plot
from kvferry.bench.vllm.client import PromptMaker, prefill, read_transfers, time_to_first_token_s
from kvferry.bench.vllm.gpu_handover import measure_on_gpu
from kvferry.bench.vllm.gpu_report import draw, table
from kvferry.bench.vllm.servers import (
    COUNT,
    OURS,
    STOCK,
    PairSettings,
    ServerPair,
    add_vllm_arguments,
    check_cuda,
    model_directory,
    print_progress,
    start_pair,
    vllm_python,
)
from kvferry.cli.arguments import Parser, whole
from kvferry.cli.runtime import stop_signals
from kvferry.errors import ConfigError

DESCRIPTION = (
    "Measure the time from a prefill server's answer to the decode server's first token, for "
    "kvferry's connector and vLLM's own,\n"
    "side by side in real vLLM servers on this machine, beside the floor: a prompt that is wholly "
    "in the decode server's cache."
)
EXAMPLES = """\
  kvferry bench vllm-handover
  kvferry bench vllm-handover --json --samples 40 --prompt-tokens 512
  kvferry bench vllm-handover --vllm-python ~/vllm/bin/python
  kvferry bench vllm-handover --device cuda --json --plot handover.svg"""

SAMPLES_PER_ROUND = 5
SETTLE_S = 1.0
"""The wait after a pause.

Connections that were silent for too long are closed first; the warm-up requests open new
connections.
"""
WARM_UPS = 2
WARM_UP_TOKENS = 128
MAX_PROMPT_TOKENS = {"cpu": 2000, "cuda": 100_000}
DEFAULT_PROMPT_TOKENS = {"cpu": (128, 512, 1500), "cuda": (1000, 4000, 16_000, 32_000)}
DEFAULT_SAMPLES = {"cpu": 20, "cuda": 6}
SEED = 1


@dataclass(slots=True)
class VllmHandoverSamples:
    """The measurements of one connector and one prompt length, in seconds."""

    handover_s: list[float] = field(default_factory=list)
    """The time from P's answer to D's first token."""
    floor_s: list[float] = field(default_factory=list)
    """The time to D's first token for a prompt that is completely in D's own cache."""
    transfer_s: list[float] = field(default_factory=list)
    """The time to move the bytes alone, as D measures."""
    prefill_s: list[float] = field(default_factory=list)
    """The time to D's first token for a prompt that D computes itself."""


def add_arguments(parser: Parser) -> None:
    add_vllm_arguments(parser)
    parser.add_argument(
        "--device",
        choices=tuple(DEFAULT_SAMPLES),
        default="cpu",
        help="where the servers run; cuda: eight servers on one GPU, and vLLM's own connector as "
        "shipped and tuned (default: %(default)s)",
    )
    parser.add_argument(
        "--samples",
        type=COUNT,
        metavar="N",
        help="samples of each length and connector (default: 20; on a GPU 6)",
    )
    parser.add_argument(
        "--prompt-tokens",
        type=parse_lengths,
        metavar="N,N…",
        help="prompt lengths (default: 128,512,1500; on a GPU 1000,4000,16000,32000)",
    )
    parser.add_argument(
        "--plot",
        type=parse_plot,
        metavar="FILE",
        help="on a GPU: also draw the medians into this SVG file",
    )


def run(arguments: argparse.Namespace) -> int:
    device: str = arguments.device
    lengths = arguments.prompt_tokens or DEFAULT_PROMPT_TOKENS[device]
    num_samples = arguments.samples or DEFAULT_SAMPLES[device]
    if max(lengths) > MAX_PROMPT_TOKENS[device]:
        raise ConfigError(
            f"--prompt-tokens: {max(lengths)} is too long on {device}; at most "
            f"{MAX_PROMPT_TOKENS[device]}"
        )
    python = vllm_python(arguments.vllm_python)
    if device == "cuda":
        check_cuda(python)
        with stop_signals():
            result = measure_on_gpu(python, arguments.model, lengths, num_samples)
        if arguments.plot is not None and any(row["num_samples"] for row in result["rows"]):
            arguments.plot.write_text(draw(result), encoding="utf-8")
        print(json.dumps(result) if arguments.json else table(result))
        return 0
    samples = {
        connector: {length: VllmHandoverSamples() for length in lengths}
        for connector in (OURS, STOCK)
    }
    with stop_signals(), model_directory(arguments.model) as model, ExitStack() as stack:
        pairs: dict[str, ServerPair] = {}
        for connector in (OURS, STOCK):
            pairs[connector] = stack.enter_context(
                start_pair(PairSettings(connector, python, model))
            )
            pairs[connector].servers.pause()
        prompts = PromptMaker(SEED)
        for number, count in enumerate(rounds(num_samples), start=1):
            for connector, pair in pairs.items():
                print_progress(f"round {number}: {count} of each length with {connector}")
                pair.servers.resume()
                time.sleep(SETTLE_S)
                _measure_round(pair, prompts, count, samples[connector])
                pair.servers.pause()
                medians = samples[connector].items()
                shown = [f"{length} tokens {_ms(of.handover_s)} ms" for length, of in medians]
                print_progress(f"  so far: {', '.join(shown)}")
    rows = make_rows(samples)
    print(json.dumps({"rows": rows, "samples": num_samples}) if arguments.json else _table(rows))
    return 0


def rounds(samples: int) -> list[int]:
    """Return the number of samples of each round.

    Rounds are short, so that other load on the machine affects both connectors alike.
    """
    whole, rest = divmod(samples, SAMPLES_PER_ROUND)
    return [SAMPLES_PER_ROUND] * whole + ([rest] if rest else [])


def make_rows(samples: Mapping[str, Mapping[int, VllmHandoverSamples]]) -> list[dict[str, Any]]:
    """Return one row per prompt length."""
    rows = []
    for length, ours in samples[OURS].items():
        stock = samples[STOCK][length]
        floor, transfer = _ms(ours.floor_s), _ms(ours.transfer_s)
        rows.append(
            {
                "prompt_tokens": length,
                "ours_ms_p50": _ms(ours.handover_s),
                "ours_ms_p90": _ms(ours.handover_s, 0.9),
                "stock_ms_p50": _ms(stock.handover_s),
                "stock_ms_p90": _ms(stock.handover_s, 0.9),
                "ratio": ratio(quantile(ours.handover_s, 0.5), quantile(stock.handover_s, 0.5)),
                "floor_ms_p50": floor,
                "transfer_ms_p50": transfer,
                "target_ms": None
                if floor is None or transfer is None
                else round(floor + 1.5 * transfer, 1),
                "prefill_ms_p50": _ms(ours.prefill_s),
                "ours_ms_min": _ms(ours.handover_s, 0.0),
                "ours_ms_max": _ms(ours.handover_s, 1.0),
                "stock_ms_min": _ms(stock.handover_s, 0.0),
                "stock_ms_max": _ms(stock.handover_s, 1.0),
                "stock_floor_ms_p50": _ms(stock.floor_s),
                "stock_transfer_ms_p50": _ms(stock.transfer_s),
            }
        )
    return rows


def parse_lengths(text: str) -> list[int]:
    """For argparse: parse lengths like `128,512`; drop duplicates, keep the order."""
    return list(dict.fromkeys(map(whole(2, max(MAX_PROMPT_TOKENS.values())), text.split(","))))


def _measure_round(
    pair: ServerPair, prompts: PromptMaker, count: int, samples: Mapping[int, VllmHandoverSamples]
) -> None:
    for _ in range(WARM_UPS):
        _measure(pair, prompts, WARM_UP_TOKENS, VllmHandoverSamples())
    for length, into in samples.items():
        for _ in range(count):
            _measure(pair, prompts, length, into)


def _measure(
    pair: ServerPair, prompts: PromptMaker, length: int, into: VllmHandoverSamples
) -> None:
    """Send one prompt through P and D, then again to D alone, then a new prompt to D alone."""
    prompt = prompts.make(length)
    before = read_transfers(pair.decode)
    params = prefill(pair.prefill, prompt)
    into.handover_s.append(time_to_first_token_s(pair.decode, prompt, params))
    into.floor_s.append(time_to_first_token_s(pair.decode, prompt))
    # vLLM reports the time of a transfer with the next step, so the time is available once another
    # request has been answered.
    after = read_transfers(pair.decode)
    taken = after.mean_since(before) if before is not None and after is not None else None
    into.transfer_s += [] if taken is None else [taken]
    into.prefill_s.append(time_to_first_token_s(pair.decode, prompts.make(length)))


def _ms(values: Sequence[float], share: float = 0.5) -> float | None:
    middle = quantile(values, share)
    return None if middle is None else rounded(middle * 1000)


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the most important columns as a table; the JSON output has all columns."""
    columns = {
        "prompt": "prompt_tokens",
        "ours p50": "ours_ms_p50",
        "p90": "ours_ms_p90",
        "stock p50": "stock_ms_p50",
        "p90 ": "stock_ms_p90",
        "ratio": "ratio",
        "floor": "floor_ms_p50",
        "transfer": "transfer_ms_p50",
        "prefill": "prefill_ms_p50",
    }
    lines = ["".join(f"{title:>11}" for title in columns)]
    for row in rows:
        lines.append(
            "".join(f"{'-' if row[key] is None else row[key]:>11}" for key in columns.values())
        )
    return "\n".join(
        [
            *lines,
            "",
            "milliseconds from P's answer to D's first token; floor: D's time for a prompt wholly "
            "in its own cache",
        ]
    )
