"""`kvferry bench` finds a benchmark by name and runs the benchmark.

A benchmark is a module like a command: `DESCRIPTION`, `EXAMPLES`, `add_arguments(parser)` and
`run(arguments) -> int`. With `--json` a benchmark writes one JSON object to standard output and
nothing else; progress messages are written to standard error.
"""

import argparse
import importlib
from collections.abc import Mapping, Sequence
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


class Benchmark(Protocol):
    """The contract of a benchmark module."""

    DESCRIPTION: str
    EXAMPLES: str

    def add_arguments(self, parser: Parser) -> None: ...

    def run(self, arguments: argparse.Namespace) -> int: ...


@dataclass(frozen=True, slots=True)
class BenchmarkTable:
    """The benchmarks of one command."""

    command: str
    entries: Mapping[str, BenchmarkEntry]

    def describe(self) -> str:
        width = max(map(len, self.entries))
        rows = (f"  {name:<{width}}  {entry.summary}" for name, entry in self.entries.items())
        return "\n".join(["Run a benchmark on this machine. Benchmarks:", "", *rows])

    def run(self, name: str, rest: Sequence[str]) -> int:
        if name not in self.entries:
            raise ConfigError(
                f"{show_argument(name)} is not a benchmark of kvferry; "
                f"{nearest(name, self.entries)}"
            )
        extra = self.entries[name].extra
        if extra is not None:
            check_extra(f"{self.command} {name}", extra)
        arguments = self.make_parser(name).parse([dashed(argument) for argument in rest])
        return self._module(name).run(arguments)

    def make_parser(self, name: str) -> Parser:
        """Return the parser of one benchmark."""
        benchmark = self._module(name)
        parser = Parser(f"{self.command} {name}", benchmark.DESCRIPTION, benchmark.EXAMPLES)
        benchmark.add_arguments(parser)
        return parser

    def _module(self, name: str) -> Benchmark:
        return cast(Benchmark, importlib.import_module(self.entries[name].module))


BENCHMARKS = BenchmarkTable(
    "kvferry bench",
    {
        "router": BenchmarkEntry(
            "kvferry.bench.router.command",
            "cost of the router with stub engines, beside no router, vLLM's toy proxy and "
            "vllm-router",
            extra="router",
        ),
        "tiers": BenchmarkEntry(
            "kvferry.bench.tiers.command",
            "speed of the storage tiers beside memcpy, plain I/O and computing; cost per engine "
            "step",
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
    },
)
ONLY_IN_A_CLONE = (
    "decode",
    "decode-interference",
    "first-token",
    "handover",
    "leases",
    "multiturn",
    "soak",
    "vllm-steps",
)
"""Benchmarks of kvferry's parts, in the folder `benchmarks/` of the repository."""

DESCRIPTION = BENCHMARKS.describe()
EXAMPLES = """\
  kvferry bench transfer --plot transfer.svg
  kvferry bench vllm-handover
  kvferry bench tiers --json
  kvferry bench vllm-handover --help"""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("benchmark", metavar="BENCHMARK", help="the benchmark to run")
    parser.add_argument(
        "rest",
        metavar="…",
        nargs=argparse.REMAINDER,
        help="arguments of the benchmark; `kvferry bench BENCHMARK --help` lists them",
    )


def run(arguments: argparse.Namespace) -> int:
    name: str = arguments.benchmark
    if name in ONLY_IN_A_CLONE:
        raise ConfigError(
            f"{name} is not among the benchmarks that are installed; in a clone of kvferry's "
            f"repository, run `python -m benchmarks {name}`"
        )
    return BENCHMARKS.run(name, arguments.rest)
