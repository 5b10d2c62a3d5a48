"""`kvferry bench vllm-handover`: from P's answer to D's first token, with our connector and with
vLLM's own, in one run.

Both pairs of servers are alive all the time, but only one may move: the other stands still
(SIGSTOP) until its round comes. Each round asks for a few prompts of every length, after warm-up
requests that are not counted. docs/benchmarks.md says why.
"""

import argparse
import json
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from kvferry.bench.figures import quantile, ratio, rounded
from kvferry.bench.vllm.client import PromptMaker, prefill, read_transfers, time_to_first_token_s
from kvferry.bench.vllm.servers import (
    OURS,
    STOCK,
    PairSettings,
    ServerPair,
    add_vllm_arguments,
    model_directory,
    parse_count,
    print_progress,
    start_pair,
    vllm_python,
)
from kvferry.cli.arguments import Parser
from kvferry.cli.runtime import stop_signals

__all__ = [
    "DESCRIPTION",
    "EXAMPLES",
    "VllmHandoverSamples",
    "add_arguments",
    "make_rows",
    "parse_lengths",
    "rounds",
    "run",
]

DESCRIPTION = (
    "Measure the time from a prefill server's answer to the decode server's first token, for "
    "kvferry's connector and vLLM's own,\n"
    "side by side in real vLLM servers on this machine, beside the floor: a prompt that is wholly "
    "in the decode server's cache."
)
EXAMPLES = """\
  kvferry bench vllm-handover
  kvferry bench vllm-handover --json --samples 40 --prompt-tokens 512
  kvferry bench vllm-handover --vllm-python ~/vllm/bin/python"""

SAMPLES_PER_ROUND = 5
SETTLE_S = 1.0
"""After standing still: connections that were silent for too long are given up first, and come up
again with the warm-up requests.
"""
WARM_UPS = 2
WARM_UP_TOKENS = 128
MAX_PROMPT_TOKENS = 2000
SEED = 1


@dataclass(slots=True)
class VllmHandoverSamples:
    """Seconds, of one connector and one prompt length."""

    handover_s: list[float] = field(default_factory=list)
    """From P's answer to D's first token."""
    floor_s: list[float] = field(default_factory=list)
    """D's first token for a prompt wholly in its own cache."""
    transfer_s: list[float] = field(default_factory=list)
    """The bytes alone, as D counts it."""
    prefill_s: list[float] = field(default_factory=list)
    """D's first token for a prompt that it computes itself."""


def add_arguments(parser: Parser) -> None:
    add_vllm_arguments(parser)
    parser.add_argument(
        "--samples",
        type=parse_count,
        default=20,
        metavar="N",
        help="of each length and connector (default: %(default)s)",
    )
    parser.add_argument(
        "--prompt-tokens",
        type=parse_lengths,
        default="128,512,1500",
        metavar="N,N…",
        help="prompt lengths (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    python = vllm_python(arguments.vllm_python)
    samples = {
        connector: {length: VllmHandoverSamples() for length in arguments.prompt_tokens}
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
        for number, count in enumerate(rounds(arguments.samples), start=1):
            for connector, pair in pairs.items():
                print_progress(f"round {number}: {count} of each length with {connector}")
                pair.servers.resume()
                time.sleep(SETTLE_S)
                _measure_round(pair, prompts, count, samples[connector])
                pair.servers.pause()
                print_progress(
                    "  so far: "
                    f"{', '.join(f'{length} tokens {_ms(of.handover_s)} ms' for length, of in samples[connector].items())}"
                )
    rows = make_rows(samples)
    print(
        json.dumps({"rows": rows, "samples": arguments.samples}) if arguments.json else _table(rows)
    )
    return 0


def rounds(samples: int) -> list[int]:
    """How many of each length every round takes: short rounds, so that whatever else the machine
    does meets both connectors alike.
    """
    whole, rest = divmod(samples, SAMPLES_PER_ROUND)
    return [SAMPLES_PER_ROUND] * whole + ([rest] if rest else [])


def make_rows(samples: Mapping[str, Mapping[int, VllmHandoverSamples]]) -> list[dict[str, Any]]:
    """One for each prompt length."""
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
    """For argparse: `128,512`, each once, in the order given."""
    parts = text.split(",")
    if not all(
        re.fullmatch(r"[0-9]{1,4}", part) and 2 <= int(part) <= MAX_PROMPT_TOKENS for part in parts
    ):
        raise argparse.ArgumentTypeError(
            f"must be numbers from 2 to {MAX_PROMPT_TOKENS} with commas between them, got "
            f"{text[:80]!a}"
        )
    return list(dict.fromkeys(map(int, parts)))


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
    """The same prompt through P and D, and once more to D alone; then another one to D alone."""
    prompt = prompts.make(length)
    before = read_transfers(pair.decode)
    params = prefill(pair.prefill, prompt)
    into.handover_s.append(time_to_first_token_s(pair.decode, prompt, params))
    into.floor_s.append(time_to_first_token_s(pair.decode, prompt))
    # The time of a transfer comes with the step after it, so it is there once another request has
    # been answered.
    after = read_transfers(pair.decode)
    taken = after.mean_since(before) if before is not None and after is not None else None
    into.transfer_s += [] if taken is None else [taken]
    into.prefill_s.append(time_to_first_token_s(pair.decode, prompts.make(length)))


def _ms(values: Sequence[float], share: float = 0.5) -> float | None:
    middle = quantile(values, share)
    return None if middle is None else rounded(middle * 1000)


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The columns that answer the question; the rest is in the JSON."""
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
