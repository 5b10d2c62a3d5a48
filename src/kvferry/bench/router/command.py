"""`kvferry bench router` measures the cost of a router with stub engines behind the router.

The comparison is with no router and with other projects' routers, in one run. The load client and
the stub engines share one core; the routers have another core. All routers run at once and get load
in turn, so that other load on the machine affects all routers alike; the results are medians of the
rounds. Every answer is compared with the bytes that D sent, and D answers only requests that carry
the parameters that P has just written (`kvferry.bench.router.messages`).
"""

import argparse
import asyncio
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from kvferry.bench.figures import quantile, rounded
from kvferry.bench.process_usage import run_queue_wait_s
from kvferry.bench.router.contestants import (
    TOY_PROGRAM,
    Cores,
    RunningRouter,
    Tools,
    default_router_python,
    missing_packages,
    split_cores,
    start_routers,
)
from kvferry.bench.router.load import (
    LoadClient,
    LoadSpec,
    connect_direct_client,
    connect_router_client,
    run_load,
)
from kvferry.bench.router.messages import EVENTS, BenchMessages
from kvferry.bench.router.report import Router, RouterCell, Sample, make_rows, progress, table
from kvferry.bench.router.stubs import Stubs, start_stubs
from kvferry.cli.arguments import NumberOf, Parser, amount, whole
from kvferry.cli.runtime import raise_file_limit, stop_signals
from kvferry.config.fields import Count, Seconds
from kvferry.errors import ConfigError

DESCRIPTION = (
    "Measure requests per second, time to the first byte and CPU time of `kvferry proxy` with "
    "stub engines behind it, beside a client\n"
    "that asks both engines itself (direct), a minimal proxy on plain aiohttp, a program that does "
    "what vLLM's toy proxy does (toy)\n"
    "and vllm-router."
)
EXAMPLES = """\
  kvferry bench router
  kvferry bench router --json --seconds 5 --repeats 5
  kvferry bench router --routers direct kvferry --concurrency 64 --prompt-bytes 1024
  kvferry bench router --toy-proxy toy_proxy_server.py --router-python .venv-vllm/bin/python"""
CONCURRENCY = (1, 16, 64)
PROMPT_BYTES = (1024, 65536)
WARM_UPS = 4
"""The number of requests per client of a round before the timing starts."""
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class RouterBenchPlan:
    """The settings of a run, checked."""

    routers: Sequence[Router]
    prompt_bytes: Sequence[int]
    concurrency: Sequence[int]
    load: LoadSpec
    repeats: int
    writes: int
    tools: Tools


def add_arguments(parser: Parser) -> None:
    names = [str(router) for router in Router]
    parser.add_argument(
        "--routers",
        nargs="+",
        choices=names,
        default=names,
        help=f"which (default: {' '.join(names)})",
    )
    parser.add_argument(
        "--concurrency",
        nargs="+",
        type=amount(1, 10**6),
        default=list(CONCURRENCY),
        metavar="N",
        help="clients (default: 1 16 64)",
    )
    of = "length of the prompt (default: 1024 65536)"
    parser.add_argument(
        "--prompt-bytes",
        nargs="+",
        type=amount(1, 2**30),
        default=list(PROMPT_BYTES),
        metavar="N",
        help=of,
    )
    parser.add_argument(
        "--seconds",
        type=NumberOf(Seconds),
        default=2.0,
        metavar="S",
        help="each router, in each round (default: %(default)s)",
    )
    parser.add_argument(
        "--requests", type=NumberOf(Count), metavar="N", help="so many in each round instead"
    )
    parser.add_argument(
        "--repeats",
        type=NumberOf(Count),
        default=3,
        metavar="N",
        help="rounds (default: %(default)s)",
    )
    parser.add_argument(
        "--writes",
        type=whole(1, EVENTS),
        default=1,
        metavar="N",
        help="in how many writes D sends its stream (default: %(default)s)",
    )
    parser.add_argument(
        "--toy-proxy",
        type=Path,
        default=TOY_PROGRAM,
        metavar="PATH",
        help="this program instead of ours: upstream's own",
    )
    parser.add_argument(
        "--router-python",
        type=Path,
        default=None,
        metavar="PATH",
        help="has the others' packages (default: .venv-router's)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def run(arguments: argparse.Namespace) -> int:
    tools = Tools(arguments.router_python or default_router_python(), arguments.toy_proxy)
    wanted = [router for router in Router if router in arguments.routers]
    skipped = {
        str(router): note
        for router in wanted
        if (note := missing_packages(router, tools)) is not None
    }
    for note in skipped.values():
        _print_progress(f"left out: {note}")
    routers = [router for router in wanted if router not in skipped]
    if not routers:
        raise ConfigError(f"there is nothing to measure: {'; '.join(skipped.values())}")
    load = (
        LoadSpec(seconds=arguments.seconds)
        if arguments.requests is None
        else LoadSpec(requests=arguments.requests)
    )
    plan = RouterBenchPlan(
        routers,
        arguments.prompt_bytes,
        arguments.concurrency,
        load,
        arguments.repeats,
        arguments.writes,
        tools,
    )
    raise_file_limit()
    with (
        stop_signals(),
        split_cores() as cores,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        if not cores.router:
            _print_progress(
                "this process may use one core only, so the routers share it with the client: the "
                "figures are lower and less steady"
            )
        rows = make_rows(runner.run(_measure_all(plan, cores)))
    facts = _machine(plan, cores) | {"skipped": skipped}
    print(json.dumps({"rows": rows, "machine": facts}) if arguments.json else table(rows, facts))
    return 1 if any(row["failed"] for row in rows) else 0


async def _measure_all(plan: RouterBenchPlan, cores: Cores) -> list[RouterCell]:
    all_messages = [BenchMessages(size, plan.writes) for size in plan.prompt_bytes]
    processes = [router for router in plan.routers if router is not Router.DIRECT]
    cells = []
    async with (
        start_stubs(all_messages[0]) as stubs,
        start_routers(
            processes, (stubs.prefill, stubs.decode), plan.tools, cores, all_messages[0]
        ) as running,
    ):
        for messages in all_messages:
            stubs.set_messages(messages)
            for concurrency in plan.concurrency:
                cells.append(await _measure_cell(concurrency, plan, stubs, running))
                _print_progress(progress(cells[-1]))
    return cells


async def _measure_cell(
    concurrency: int, plan: RouterBenchPlan, stubs: Stubs, running: Mapping[Router, RunningRouter]
) -> RouterCell:
    cell = RouterCell(
        stubs.ledger.messages.prompt_bytes, concurrency, {router: [] for router in plan.routers}
    )
    for number in range(plan.repeats):
        # Rotate the order of the routers, so that no router always runs after the same router.
        first = number % len(plan.routers)
        for router in [*plan.routers[first:], *plan.routers[:first]]:
            cell.samples[router].append(
                await _measure(concurrency, plan.load, stubs, running.get(router))
            )
    return cell


async def _measure(
    concurrency: int, load: LoadSpec, stubs: Stubs, router: RunningRouter | None
) -> Sample:
    messages = stubs.ledger.messages
    clients: list[LoadClient] = []
    try:
        for _ in range(concurrency):
            dialing = (
                connect_router_client(messages, router.address)
                if router
                else connect_direct_client(messages, stubs.prefill, stubs.decode)
            )
            clients.append(await dialing)
        warm_up = await run_load(clients, LoadSpec(requests=WARM_UPS * concurrency))
        before = _CpuUsage.read(router)
        result = await run_load(clients, load)
        after = _CpuUsage.read(router)
    finally:
        for client in clients:
            client.close()
    verified = len(result.ttfb_s)
    return Sample(
        rps=result.rps,
        ttfb_p50_ms=_ms(result.ttfb_s, 0.5),
        ttfb_p99_ms=_ms(result.ttfb_s, 0.99),
        client_share=(after.client_s - before.client_s) / result.wall_s,
        waited_share=(after.waited_s - before.waited_s) / result.wall_s,
        verified=verified,
        failures=result.failures + warm_up.failures,
        cpu_s_per_1k=1000 * (after.router_s - before.router_s) / verified
        if router and verified
        else None,
        rss_mb=router.rss_bytes() / MIB if router else None,
    )


@dataclass(frozen=True, slots=True)
class _CpuUsage:
    """CPU and waiting times so far."""

    router_s: float
    client_s: float
    """The CPU time of this process: the load client and the stub engines."""
    waited_s: float
    """The time that this process and the router have waited for a core that other processes
    used.
    """

    @classmethod
    def read(cls, router: RunningRouter | None) -> "_CpuUsage":
        ours = os.times()
        waited_s = run_queue_wait_s(os.getpid()) + (router.waited_s() if router else 0.0)
        return cls(router.cpu_s() if router else 0.0, ours.user + ours.system, waited_s)


def _ms(values: Sequence[float], share: float) -> float | None:
    found = quantile(values, share)
    return None if found is None else found * 1000


def _machine(plan: RouterBenchPlan, cores: Cores) -> dict[str, Any]:
    return {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": rounded(os.getloadavg()[0]),
        "router_cores": sorted(cores.router),
        "client_cores": sorted(cores.load),
        "seconds": plan.load.seconds,
        "requests": plan.load.requests,
        "repeats": plan.repeats,
        "writes": plan.writes,
        "toy_proxy": "ours"
        if plan.tools.toy_program == TOY_PROGRAM
        else plan.tools.toy_program.name,
    }


def _print_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
