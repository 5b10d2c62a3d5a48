"""`kvferry bench soak`: many transfers between two embedded engines, and whether memory, files and threads stay flat.

Two engine cores in processes of their own, real ZeroMQ, the data plane asked for; this process drives them. Some requests are broken off
at every point where a client may leave. At the end all blocks must be free.
"""

import argparse
import asyncio
import json
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvferry.bench.flatness import MIN_SAMPLES, Tolerance, Verdict, judge
from kvferry.bench.process_probe import Holdings, family_of, look_at
from kvferry.bench.soak_pair import BROKEN_OFF, SoakPair, Tally, start_pair
from kvferry.bench.vllm_pairs import model_directory, say
from kvferry.cli.interrupts import stop_signals
from kvferry.cli.parser import Parser
from kvferry.cli.sizes import parse_size
from kvferry.errors import ConfigError

__all__ = ["DESCRIPTION", "EXAMPLES", "TOLERANCES", "SoakResult", "add_arguments", "run", "soak"]

DESCRIPTION = (
    "Run many transfers between two embedded engines and say whether memory, open files and threads of every process stay flat,\n"
    "every token is right and every block is free at the end. Exit code 1 when not."
)
EXAMPLES = """\
  kvferry bench soak
  kvferry bench soak --transfers 2000 --planes shm --json"""

PLANES = ("shm", "nixl", "tcp")
SAMPLES = 200
"""Of each process over a whole run, at equal numbers of transfers, so that a busy machine only makes it longer."""
SAY_EVERY_S = 10.0
TOLERANCES: Mapping[str, Tolerance] = {
    "rss_bytes": Tolerance(4 * 2**20, 0.02),
    "files": Tolerance(2),
    "threads": Tolerance(1),
}


@dataclass(frozen=True, slots=True)
class SoakResult:
    plane: str
    tally: Tally
    seconds: float
    samples: Mapping[str, Sequence[Holdings]]
    """By process."""
    moved: Mapping[str, int]
    """Transfers that D's planes have counted."""
    used_blocks: Mapping[str, int]
    verdicts: Mapping[str, Mapping[str, Verdict]] = field(default_factory=dict)
    """By process, then by what was measured. Empty for a run too short to judge."""

    @property
    def problems(self) -> list[str]:
        """One sentence each; none when all is well."""
        grown = [
            f"{what} of {name} grew from {verdict.before:,.0f} to {verdict.after:,.0f}"
            for name, rows in self.verdicts.items()
            for what, verdict in rows.items()
            if not verdict.is_flat
        ]
        held = [f"{count} blocks of {name} are still in use" for name, count in self.used_blocks.items() if count]
        failed = [f"{count} requests failed: {reason}" for reason, count in self.tally.errors.items()]
        wrong = [f"{self.tally.wrong_tokens} tokens were wrong"] if self.tally.wrong_tokens else []
        return [*grown, *held, *failed, *wrong]


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--transfers", type=parse_size, default=100_000, metavar="N", help="on each plane (default: %(default)s)")
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        metavar="M",
        help="end each run after so long, with what is done by then (default: no limit)",
    )
    parser.add_argument("--planes", nargs="+", choices=PLANES, default=list(PLANES), help="one after the other (default: shm nixl tcp)")
    parser.add_argument("--concurrency", type=parse_size, default=64, metavar="N", help="requests in flight (default: %(default)s)")
    parser.add_argument("--abort-share", type=float, default=0.05, metavar="SHARE", help="of requests broken off (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and aborts (default: %(default)s)")
    parser.add_argument("--model", type=Path, metavar="DIR", help="checkpoint in the layout of Hugging Face (default: a tiny one is made)")


def run(arguments: argparse.Namespace) -> int:
    if not 0 <= arguments.abort_share < 1:
        raise ConfigError(f"--abort-share must be from 0 to below 1, got {arguments.abort_share:g}")
    if not (arguments.transfers and arguments.concurrency):
        raise ConfigError("--transfers and --concurrency must be at least 1")
    # Engines take over our level; every request that is broken off would be a line.
    logging.getLogger().setLevel(logging.ERROR)
    with stop_signals(), model_directory(arguments.model) as model:
        results = [asyncio.run(soak(model, plane, arguments)) for plane in arguments.planes]
    if arguments.json:
        print(json.dumps({"runs": [_as_json(result) for result in results], "is_flat": not any(r.problems for r in results)}))
    else:
        print("\n\n".join(map(_table, results)))
    return 1 if any(result.problems for result in results) else 0


async def soak(model: Path, plane: str, arguments: argparse.Namespace) -> SoakResult:
    """One plane's run, from the start of its engines to their end."""
    say(f"{arguments.transfers:,} transfers by {plane}, {arguments.concurrency} at a time")
    async with start_pair(model, plane, arguments.abort_share, arguments.seed) as pair:
        started = time.monotonic()
        samples = await _drive(pair, arguments.transfers, arguments.concurrency, started + 60 * arguments.minutes)
        prefill, decode = await pair.settle()
        return SoakResult(
            plane,
            pair.tally,
            time.monotonic() - started,
            samples,
            {summary.plane: summary.transfers for summary in decode.transfers},
            {"prefill": prefill.num_used_blocks, "decode": decode.num_used_blocks},
            _verdicts(samples),
        )


async def _drive(pair: SoakPair, transfers: int, concurrency: int, deadline: float) -> dict[str, list[Holdings]]:
    """Keep that many in flight until so many are done or time is up; look at every process at equal distances."""
    pids = _processes(pair)
    samples: dict[str, list[Holdings]] = {name: [] for name in pids}
    every = max(1, transfers // SAMPLES)
    said = time.monotonic()

    async def keep_going() -> None:
        nonlocal said
        while pair.tally.done < transfers and pair.tally.errors.total() < MAX_ERRORS and time.monotonic() < deadline:
            await pair.transfer()
            if pair.tally.done >= every * (1 + len(samples["driver"])):
                for name, pid in pids.items():
                    samples[name].append(look_at(pid))
            if time.monotonic() - said > SAY_EVERY_S:
                said = time.monotonic()
                _say_progress(pair.tally, samples)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(keep_going())
    return samples


MAX_ERRORS = 1000
"""After so many there is no point in going on."""


def _processes(pair: SoakPair) -> dict[str, int]:
    found = {"driver": os.getpid()}
    for name, engine in (("prefill", pair.prefill), ("decode", pair.decode)):
        assert engine.pid is not None
        for number, pid in enumerate(family_of(engine.pid)):
            found[f"{name} {number}" if number else name] = pid
    return found


def _verdicts(samples: Mapping[str, Sequence[Holdings]]) -> dict[str, dict[str, Verdict]]:
    if any(len(series) < MIN_SAMPLES for series in samples.values()):
        return {}
    judged = {
        name: {what: judge([getattr(sample, what) for sample in series], tolerance) for what, tolerance in TOLERANCES.items()}
        for name, series in samples.items()
    }
    return {name: {what: verdict for what, verdict in rows.items() if verdict is not None} for name, rows in judged.items()}


def _say_progress(tally: Tally, samples: Mapping[str, Sequence[Holdings]]) -> None:
    held = ", ".join(f"{name} {series[-1].rss_bytes / 2**20:.1f} MiB" for name, series in samples.items() if series)
    say(f"{tally.done:,} done, {tally.broken_off:,} broken off; {held}")


def _as_json(result: SoakResult) -> dict[str, Any]:
    return {
        "plane": result.plane,
        "transfers": result.tally.done,
        "broken_off": {ending: count for ending, count in result.tally.endings.items() if ending in BROKEN_OFF},
        "wrong_tokens": result.tally.wrong_tokens,
        "errors": dict(result.tally.errors),
        "seconds": round(result.seconds, 1),
        "moved": dict(result.moved),
        "used_blocks": dict(result.used_blocks),
        "verdicts": {
            name: {what: {**asdict(verdict), "is_flat": verdict.is_flat} for what, verdict in rows.items()}
            for name, rows in result.verdicts.items()
        },
        "samples": {name: [asdict(sample) for sample in _thinned(series)] for name, series in result.samples.items()},
        "problems": result.problems,
    }


def _thinned(series: Sequence[Holdings], most: int = 50) -> Sequence[Holdings]:
    return series[:: max(1, math.ceil(len(series) / most))]


def _table(result: SoakResult) -> str:
    tally = result.tally
    rate = tally.done / result.seconds
    broken = ", ".join(f"{ending} {count:,}" for ending, count in sorted(tally.endings.items()) if ending != "done")
    lines = [
        f"{tally.done:,} transfers by {result.plane} in {result.seconds:,.0f} s ({rate:,.0f} per second); broken off: {broken or 'none'}",
        f"{'process':<12}{'what':<12}{'before':>16}{'after':>16}{'growth':>14}{'allowed':>14}  verdict",
    ]
    for name, rows in result.verdicts.items():
        for what, verdict in rows.items():
            says = "flat" if verdict.is_flat else "GROWS"
            numbers = f"{verdict.before:>16,.0f}{verdict.after:>16,.0f}{verdict.growth:>14,.0f}{verdict.allowed:>14,.0f}"
            lines.append(f"{name:<12}{what:<12}{numbers}  {says}")
    lines += result.problems or ["every token was right, every block is free" + ("" if result.verdicts else "; too short to judge growth")]
    return "\n".join(lines)
