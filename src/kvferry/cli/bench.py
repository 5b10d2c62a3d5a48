"""`kvferry bench` finds a benchmark by name and runs the benchmark.

A benchmark is a module like a command: `DESCRIPTION`, `EXAMPLES`, `add_arguments(parser)` and
`run(arguments) -> int`. With `--json` a benchmark writes one JSON object to standard output and
nothing else; progress messages are written to standard error.
"""

import argparse
import importlib
from dataclasses import dataclass
from typing import Protocol, cast

from kvferry.cli.arguments import Parser, dashed, show_argument
from kvferry.cli.extras import check_extra
from kvferry.config.fields import nearest
from kvferry.errors import ConfigError


@dataclass(frozen=True, slots=True)
class BenchmarkEntry:
    """A row of the benchmark table."""

    module: str
    summary: str
    extra: str | None = None
    """The extra whose packages the benchmark needs; None: the base install is enough."""


BENCHMARKS = {
    "decode": BenchmarkEntry(
        "kvferry.bench.decode",
        "time per output token of the embedded engine by context length and batch size",
        extra="engine",
    ),
    "decode-interference": BenchmarkEntry(
        "kvferry.bench.decode_interference",
        "time of a decode step of the embedded engine, with and without KV arriving",
        extra="engine",
    ),
    "first-token": BenchmarkEntry(
        "kvferry.bench.first_token",
        "time to the first token through the router, from D and from P",
        extra="all",
    ),
    "handover": BenchmarkEntry(
        "kvferry.bench.handover",
        "time from P's last token to D's first: pull, push, and push while P still computes",
        extra="engine",
    ),
    "leases": BenchmarkEntry(
        "kvferry.bench.leases",
        "cost of 10, 1,000 and 10,000 live leases per engine step and in an idle process",
    ),
    "multiturn": BenchmarkEntry(
        "kvferry.bench.multiturn",
        "time to the first token of each turn of a conversation, with and without D's blocks of "
        "earlier turns",
        extra="all",
    ),
    "router": BenchmarkEntry(
        "kvferry.bench.router.command",
        "cost of the router with stub engines, beside no router, vLLM's toy proxy and vllm-router",
        extra="router",
    ),
    "soak": BenchmarkEntry(
        "kvferry.bench.soak",
        "many transfers between two embedded engines: do memory, files and threads stay flat?",
        extra="engine",
    ),
    "tiers": BenchmarkEntry(
        "kvferry.bench.tiers.command",
        "speed of the storage tiers beside memcpy, plain I/O and computing; cost per engine step",
    ),
    "transfer": BenchmarkEntry(
        "kvferry.bench.transfer.command",
        "speed of KV between two processes on every transport, beside memcpy and raw NIXL",
    ),
    "vllm-handover": BenchmarkEntry(
        "kvferry.bench.vllm.handover",
        "time from P's answer to D's first token in real vLLM, beside vLLM's own NixlConnector",
        extra="engine",
    ),
    "vllm-steps": BenchmarkEntry(
        "kvferry.bench.vllm.steps",
        "time per engine step spent in the connector in real vLLM, beside vLLM's own NixlConnector",
        extra="engine",
    ),
}

WIDTH = max(map(len, BENCHMARKS))
DESCRIPTION = "\n".join(
    [
        "Run a benchmark on this machine. Benchmarks:",
        "",
        *(f"  {name:<{WIDTH}}  {entry.summary}" for name, entry in BENCHMARKS.items()),
    ]
)
EXAMPLES = """\
  kvferry bench transfer --plot transfer.svg
  kvferry bench vllm-handover
  kvferry bench vllm-steps --json
  kvferry bench vllm-handover --help"""


class Benchmark(Protocol):
    """The contract of a benchmark module."""

    DESCRIPTION: str
    EXAMPLES: str

    def add_arguments(self, parser: Parser) -> None: ...

    def run(self, arguments: argparse.Namespace) -> int: ...


def add_arguments(parser: Parser) -> None:
    parser.add_argument("benchmark", metavar="BENCHMARK", help="the benchmark to run")
    parser.add_argument(
        "rest",
        metavar="…",
        nargs=argparse.REMAINDER,
        help="arguments of the benchmark; `kvferry bench BENCHMARK --help` lists them",
    )


def run(arguments: argparse.Namespace) -> int:
    name = arguments.benchmark
    if name not in BENCHMARKS:
        raise ConfigError(
            f"{show_argument(name)} is not a benchmark of kvferry; {nearest(name, BENCHMARKS)}"
        )
    extra = BENCHMARKS[name].extra
    if extra is not None:
        check_extra(f"kvferry bench {name}", extra)
    return _benchmark(name).run(
        make_parser(name).parse([dashed(argument) for argument in arguments.rest])
    )


def make_parser(name: str) -> Parser:
    """Return the parser of one benchmark."""
    benchmark = _benchmark(name)
    parser = Parser(f"kvferry bench {name}", benchmark.DESCRIPTION, benchmark.EXAMPLES)
    benchmark.add_arguments(parser)
    return parser


def _benchmark(name: str) -> Benchmark:
    return cast(Benchmark, importlib.import_module(BENCHMARKS[name].module))
