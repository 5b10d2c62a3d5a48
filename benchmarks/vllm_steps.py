"""`python -m benchmarks vllm-steps` measures the time of vLLM's main threads in the connector.

Two pairs of servers, one after the other, get the same load: concurrent requests through P and D,
then leases whose blocks no D reads for a while. `benchmarks.vllm_stopwatch` times every call from
the engine and writes totals to files; the benchmark reads the files before and after each part.
"""

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvferry.bench.figures import quantile, ratio, rounded
from kvferry.bench.vllm.client import PromptMaker, prefill, time_to_first_token_s
from kvferry.bench.vllm.servers import (
    COUNT,
    OURS,
    ROLES,
    STOCK,
    PairSettings,
    ServerPair,
    add_vllm_arguments,
    model_directory,
    print_progress,
    start_pair,
    vllm_python,
)
from kvferry.cli.arguments import Parser
from kvferry.cli.runtime import stop_signals
from kvferry.errors import KVFerryError

DESCRIPTION = (
    "Measure the time that the main thread of vLLM's scheduler and worker processes spends in the "
    "connector, per step,\n"
    "for kvferry's connector and vLLM's own under the same load in one run."
)
EXAMPLES = """\
  python -m benchmarks vllm-steps
  python -m benchmarks vllm-steps --json --requests 200 --concurrency 16"""

ROOT = Path(__file__).parents[1]
WRAPPED = {
    OURS: "kvferry.vllm.connector:NixlConnector",
    STOCK: "vllm.distributed.kv_transfer.kv_connector.v1.nixl:NixlConnector",
}
SIDES = ("scheduler", "worker")
STEP_METHODS = {"scheduler": "build_connector_meta", "worker": "get_transfer_results"}
"""The method of each side that is called exactly once in each step."""
STARTUP_METHODS = frozenset(
    {
        "bind_gpu_block_pool",
        "bind_kv_cache_manager",
        "get_finished_count",
        "get_handshake_metadata",
        "get_mem_pool_context",
        "register_kv_caches",
        "set_host_xfer_buffer_ops",
        "set_xfer_handshake_metadata",
        "set_xfer_handshake_metadata_pp_aware",
    }
)
"""The methods that are called when an engine starts and are no part of a step."""
PROMPT_TOKENS = (40, 128, 512, 1500)
WARM_UPS = 4
IDLE_LEASES = 4
IDLE_S = 3.0
SETTLE_S = 2.0
"""The wait before the totals are read.

The wait is longer than a server needs to finish its last request, and than the interval at which
the stopwatch writes.
"""
MOST_EXPENSIVE = 3
SEED = 2


@dataclass(frozen=True, slots=True)
class Totals:
    """The totals of one method: calls, wall-clock seconds, CPU seconds, and the longest call."""

    calls: int = 0
    total_s: float = 0.0
    cpu_s: float = 0.0
    max_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SideTotals:
    """The totals of one connector in one process, by method."""

    side: str
    methods: Mapping[str, Totals]

    @property
    def steps(self) -> int:
        return self.methods.get(STEP_METHODS[self.side], Totals()).calls

    @property
    def total_s(self) -> float:
        return sum(method.total_s for method in self.methods.values())

    @property
    def cpu_s(self) -> float:
        return sum(method.cpu_s for method in self.methods.values())

    def most_expensive(self) -> list[dict[str, Any]]:
        slowest = sorted(self.methods.items(), key=lambda item: -item[1].total_s)[:MOST_EXPENSIVE]
        return [
            {
                "method": name,
                "calls": method.calls,
                "us_per_step": _us(method.total_s, self.steps),
                "max_us": rounded(method.max_s * 1e6),
            }
            for name, method in slowest
        ]


Measured = Mapping[tuple[str, str], SideTotals]
"""The totals by role and side."""


@dataclass(frozen=True, slots=True)
class PairTotals:
    """The totals of one connector under load and idle with leases, and D's first-token times under
    load.
    """

    load: Measured
    idle: Measured
    first_token_s: Sequence[float]


def add_arguments(parser: Parser) -> None:
    add_vllm_arguments(parser)
    parser.add_argument(
        "--requests",
        type=COUNT,
        default=100,
        metavar="N",
        help="requests through P and D (default: %(default)s)",
    )
    parser.add_argument(
        "--concurrency",
        type=COUNT,
        default=8,
        metavar="N",
        help="requests in flight (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    python = vllm_python(arguments.vllm_python)
    totals: dict[str, PairTotals] = {}
    with (
        stop_signals(),
        model_directory(arguments.model) as model,
        TemporaryDirectory(prefix="kvferry-steps-") as directory,
    ):
        for connector in (OURS, STOCK):
            watched = Path(directory) / connector
            with start_pair(_settings(connector, python, model, watched)) as pair:
                totals[connector] = _measure(
                    pair, watched, arguments.requests, arguments.concurrency
                )
    rows = make_rows({connector: pair.load for connector, pair in totals.items()})
    idle_rows = make_rows({connector: pair.idle for connector, pair in totals.items()})
    handover = make_handover({connector: pair.first_token_s for connector, pair in totals.items()})
    load = f"{arguments.requests} requests, {arguments.concurrency} at a time"
    if arguments.json:
        counts = {"requests": arguments.requests, "concurrency": arguments.concurrency}
        print(json.dumps({"rows": rows, "idle_rows": idle_rows, "handover": handover, **counts}))
    else:
        print(_table(rows, load))
        print(_table(idle_rows, f"\n{IDLE_LEASES} leases, nothing to compute"))
        print(
            "\nms from P's answer to D's first token under that load: "
            f"{', '.join(f'{key} {value}' for key, value in handover.items())}"
        )
    return 0


def read_totals(directory: Path) -> Measured:
    """Read what the stopwatches have written so far."""
    found: dict[tuple[str, str], SideTotals] = {}
    for role in ROLES:
        for side in SIDES:
            files = list((directory / role).glob(f"{side}-*.json"))
            if len(files) != 1:
                raise KVFerryError(
                    f"the {side} of the {role} server wrote {len(files)} files of timings instead "
                    "of one"
                )
            methods = json.loads(files[0].read_text())
            found[role, side] = SideTotals(
                side,
                {
                    name: Totals(**totals)
                    for name, totals in methods.items()
                    if name not in STARTUP_METHODS
                },
            )
    return found


def subtract(after: Measured, before: Measured) -> Measured:
    """Return the totals between two readings; `max_s` is the longest call since the start."""
    return {
        key: SideTotals(
            totals.side,
            {
                name: _difference(method, before[key].methods.get(name, Totals()))
                for name, method in totals.methods.items()
            },
        )
        for key, totals in after.items()
    }


def make_rows(measured: Mapping[str, Measured]) -> list[dict[str, Any]]:
    """Return one row per role and side."""
    rows = []
    for (role, side), ours in measured[OURS].items():
        stock = measured[STOCK][role, side]
        ours_us, stock_us = _us(ours.total_s, ours.steps), _us(stock.total_s, stock.steps)
        rows.append(
            {
                "side": side,
                "role": role,
                "ours_us_per_step": ours_us,
                "stock_us_per_step": stock_us,
                "ratio": ratio(ours_us, stock_us),
                "ours_steps": ours.steps,
                "stock_steps": stock.steps,
                "ours_cpu_us_per_step": _us(ours.cpu_s, ours.steps),
                "stock_cpu_us_per_step": _us(stock.cpu_s, stock.steps),
                "ours_total_ms": rounded(ours.total_s * 1000),
                "stock_total_ms": rounded(stock.total_s * 1000),
                "ours_methods": ours.most_expensive(),
                "stock_methods": stock.most_expensive(),
            }
        )
    return rows


def make_handover(seconds: Mapping[str, Sequence[float]]) -> dict[str, float | None]:
    """Return the milliseconds from P's answer to D's first token under concurrent load."""
    found = {
        f"{connector}_ms_p{round(share * 100)}": rounded((quantile(values, share) or 0.0) * 1000)
        for connector, values in seconds.items()
        for share in (0.5, 0.9)
    }
    return {**found, "ratio": ratio(found["ours_ms_p50"], found["stock_ms_p50"])}


def _settings(connector: str, python: Path, model: Path, directory: Path) -> PairSettings:
    environments = {}
    for role in ROLES:
        (directory / role).mkdir(parents=True)
        environments[role] = {
            "KVFERRY_STOPWATCH_WRAPS": WRAPPED[connector],
            "KVFERRY_STOPWATCH_DIRECTORY": str(directory / role),
            # The servers import the stopwatch from this clone.
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        }
    return PairSettings(
        connector,
        python,
        model,
        {"kv_connector_module_path": "benchmarks.vllm_stopwatch"},
        environments,
    )


def _measure(pair: ServerPair, directory: Path, requests: int, concurrency: int) -> PairTotals:
    """Measure under load, then idle with leases; all connectors get the same prompts."""
    prompts = PromptMaker(SEED)
    _send(pair, [prompts.make(length) for length in PROMPT_TOKENS[:WARM_UPS]], 1)
    start = _read_settled(directory)
    print_progress(f"{requests} requests, {concurrency} at a time")
    first_token_s = _send(
        pair,
        [prompts.make(PROMPT_TOKENS[number % len(PROMPT_TOKENS)]) for number in range(requests)],
        concurrency,
    )
    loaded = _read_settled(directory)
    print_progress(f"{IDLE_LEASES} leases, nothing to compute")
    waiting = [prompts.make(PROMPT_TOKENS[1]) for _ in range(IDLE_LEASES)]
    held_params = [prefill(pair.prefill, prompt) for prompt in waiting]
    before_idle = _read_settled(directory)
    time.sleep(IDLE_S)
    idle = read_totals(directory)
    for prompt, params in zip(waiting, held_params, strict=True):
        time_to_first_token_s(pair.decode, prompt, params)
    return PairTotals(subtract(loaded, start), subtract(idle, before_idle), first_token_s)


def _send(pair: ServerPair, prompts: Sequence[Sequence[int]], concurrency: int) -> list[float]:
    def one(prompt: Sequence[int]) -> float:
        return time_to_first_token_s(pair.decode, prompt, prefill(pair.prefill, prompt))

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(one, prompts))


def _read_settled(directory: Path) -> Measured:
    time.sleep(SETTLE_S)
    return read_totals(directory)


def _difference(after: Totals, before: Totals) -> Totals:
    return Totals(
        after.calls - before.calls,
        after.total_s - before.total_s,
        after.cpu_s - before.cpu_s,
        after.max_s,
    )


def _us(seconds: float, steps: int) -> float | None:
    return round(seconds * 1e6 / steps, 1) if steps else None


def _table(rows: Sequence[Mapping[str, Any]], title: str) -> str:
    lines = [
        title,
        f"{'':<20}{'ours µs/step':>14}{'steps':>8}{'stock µs/step':>15}{'steps':>8}{'ratio':>8}  "
        "most expensive of ours",
    ]
    for row in rows:
        shown = {key: "-" if value is None else value for key, value in row.items()}
        slowest = ", ".join(
            f"{method['method']} {method['us_per_step']}" for method in row["ours_methods"]
        )
        name = f"{row['role']} {row['side']}"
        lines.append(
            f"{name:<20}{shown['ours_us_per_step']:>14}{shown['ours_steps']:>8}{shown['stock_us_per_step']:>15}"
            f"{shown['stock_steps']:>8}{shown['ratio']:>8}  {slowest}"
        )
    return "\n".join(lines)
