"""`kvferry bench transfer`: KV moved between two processes on every plane of this machine, beside memcpy and raw NIXL, in one run.

One process owns the memory and serves it; this one reads it through the planes as a ferry does. Every way moves the same bytes in turn,
round after round, so that whatever else the machine does meets all of them; medians are told.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvferry.bench.figures import quantile, ratio, rounded
from kvferry.bench.transfer_moves import RUN_BLOCKS, Blocks, Move, Pattern, plan_move
from kvferry.bench.transfer_plot import draw
from kvferry.bench.transfer_sides import Consumer, Shape, start_producer
from kvferry.bench.vllm_pairs import parse_count, say
from kvferry.cli.interrupts import StopRequest, stop_requests
from kvferry.cli.parser import Parser
from kvferry.errors import ConfigError
from kvferry.planes.copiers import copy_by_numpy, fastest_copier
from kvferry.planes.shared_memory import available_bytes, check_fits

__all__ = ["DESCRIPTION", "EXAMPLES", "MEMCPY", "RAW_NIXL", "add_arguments", "make_rows", "run"]

DESCRIPTION = (
    "Move KV between two processes on every data plane of this machine, in pieces of 4 KiB to 1 MiB, scattered and in runs of\n"
    f"{RUN_BLOCKS} adjacent blocks, beside plain memcpy of the same bytes and raw NIXL with a descriptor for each block.\n"
    "Let nothing else run meanwhile."
)
EXAMPLES = """\
  kvferry bench transfer
  kvferry bench transfer --json --plot transfer.svg
  kvferry bench transfer --spread 4 --rounds 20"""

MEMCPY, RAW_NIXL = "memcpy", "raw nixl"
PIECES_KIB = (4, 16, 64, 256, 1024)
REGIONS = 8
MIB = 1024 * 1024
ROUNDS = 9
QUICK_MIB, QUICK_REGIONS, QUICK_ROUNDS = 16, 2, 2
MOVED_MIB = 256
"""Far more than any cache holds."""
SEED = 4


@dataclass(frozen=True, slots=True)
class Cell:
    """What was measured for one size of pieces and one pattern: seconds by way, and how many copies or descriptors each plane used."""

    move: Move
    pattern: Pattern
    seconds: Mapping[str, Sequence[float]]
    copies: Mapping[str, int]

    def gbps(self, way: str) -> float | None:
        median = quantile(self.seconds.get(way, ()), 0.5)
        return self.move.total_bytes / median / 1e9 if median else None


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--plot", type=parse_plot, metavar="FILE", help="also draw the table into this file, as SVG")
    parser.add_argument(
        "--rounds", type=parse_count, metavar="N", help=f"moves of each kind, of which the median is told (default: {ROUNDS})"
    )
    parser.add_argument(
        "--spread",
        type=parse_count,
        default=1,
        metavar="N",
        help="how many times larger than what moves each cache is, so that what moves has gaps (default: %(default)s, no gaps)",
    )
    parser.add_argument("--quick", action="store_true", help="little memory and two rounds: whether it works, not how fast")


def parse_plot(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() != ".svg":
        raise argparse.ArgumentTypeError(f"plots are drawn as SVG; name a file that ends in .svg, not {text[:80]!a}")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text[:80]!a} cannot be written: its folder is not there, or it is one")
    return path


def run(arguments: argparse.Namespace) -> int:
    regions, moved_mib = (QUICK_REGIONS, QUICK_MIB) if arguments.quick else (REGIONS, MOVED_MIB)
    rounds = arguments.rounds or (QUICK_ROUNDS if arguments.quick else ROUNDS)
    shape = Shape(regions, moved_mib * MIB * arguments.spread // regions)
    _check_fits(shape, arguments.spread)
    with stop_requests() as stop:
        cells = measure(shape, rounds, arguments.spread, stop)
    rows = make_rows(cells)
    facts = machine_facts(shape, rounds, arguments.spread)
    if arguments.plot:
        try:
            arguments.plot.write_text(draw(rows, facts), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--plot {arguments.plot} cannot be written ({error})") from error
        say(f"drawn into {arguments.plot}")
    print(json.dumps({"rows": rows, "baselines": make_baselines(cells), "machine": facts}) if arguments.json else table(rows, cells, facts))
    return 0


def measure(shape: Shape, rounds: int, spread: int, stop: StopRequest) -> list[Cell]:
    say(f"two processes with {shape.total_bytes // MIB} MiB each")
    with start_producer(shape, stop) as producer, Consumer.connected(shape, producer, stop) as consumer:
        if not consumer.has_raw_nixl:
            say("NIXL is not installed: nothing is measured over it (pip install nixl)")
        cells = []
        for kib in PIECES_KIB:
            for pattern in Pattern:
                say(f"pieces of {kib} KiB, {pattern}: {rounds} rounds of {', '.join(_ways(consumer))}")
                blocks = Blocks(kib * 1024, shape.regions, shape.region_bytes // (kib * 1024))
                cells.append(_measure_cell(consumer, plan_move(blocks, pattern, spread, SEED), pattern, rounds))
        return cells


def make_rows(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """One for each plane, size and pattern."""
    return [
        {
            "plane": plane,
            "piece_bytes": cell.move.blocks.piece_bytes,
            "pattern": str(cell.pattern),
            "gbps": rounded(cell.gbps(plane), 2),
            "of_memcpy": ratio(cell.gbps(plane), cell.gbps(MEMCPY)),
            "of_raw_nixl": ratio(cell.gbps(plane), cell.gbps(RAW_NIXL)),
            "pieces": len(cell.move.local_blocks),
            "copies": copies,
        }
        for cell in cells
        for plane, copies in cell.copies.items()
    ]


def make_baselines(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    return [
        {
            "piece_bytes": cell.move.blocks.piece_bytes,
            "pattern": str(cell.pattern),
            "memcpy_gbps": rounded(cell.gbps(MEMCPY), 2),
            "raw_nixl_gbps": rounded(cell.gbps(RAW_NIXL), 2),
        }
        for cell in cells
    ]


def machine_facts(shape: Shape, rounds: int, spread: int) -> dict[str, Any]:
    return {
        "gbps_means": "10^9 bytes per second",
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "page_bytes": os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "copied_by": "numpy" if fastest_copier() is copy_by_numpy else "compiled loop",
        "moved_mib": shape.total_bytes // spread // MIB,
        "regions": shape.regions,
        "spread": spread,
        "rounds": rounds,
    }


def table(rows: Sequence[Mapping[str, Any]], cells: Sequence[Cell], facts: Mapping[str, Any]) -> str:
    lines = [
        f"{facts['moved_mib']} MiB a move in {facts['regions']} regions, spread {facts['spread']}, median of {facts['rounds']}; "
        f"{facts['processor']}, {facts['cores']} cores, copied by {facts['copied_by']}",
        f"{'piece':>9}  {'pattern':<10}{'way':<10}{'GB/s':>7}{'÷ memcpy':>10}{'÷ raw NIXL':>12}{'copies':>9}",
    ]
    for cell in cells:
        for way in (MEMCPY, RAW_NIXL):
            if cell.gbps(way) is not None:
                lines.append(_line(cell, way, rounded(cell.gbps(way), 2), ratio(cell.gbps(way), cell.gbps(MEMCPY))))
        for row in rows:
            if (row["piece_bytes"], row["pattern"]) == (cell.move.blocks.piece_bytes, cell.pattern):
                lines.append(_line(cell, row["plane"], row["gbps"], row["of_memcpy"], row["of_raw_nixl"], row["copies"]))
    return "\n".join(lines)


def _line(cell: Cell, way: str, *figures: float | None) -> str:
    shown = ["-" if figure is None else str(figure) for figure in figures] + ["", ""]
    piece = f"{cell.move.blocks.piece_bytes // 1024} KiB"
    return f"{piece:>9}  {cell.pattern:<10}{way:<10}{shown[0]:>7}{shown[1]:>10}{shown[2]:>12}{shown[3]:>9}".rstrip()


def _ways(consumer: Consumer) -> list[str]:
    return [MEMCPY, *([RAW_NIXL] if consumer.has_raw_nixl else []), *consumer.planes]


def _measure_cell(consumer: Consumer, move: Move, pattern: Pattern, rounds: int) -> Cell:
    consumer.prepare(move)
    copies: dict[str, int] = {}
    ways: dict[str, Callable[[], object]] = {MEMCPY: lambda: consumer.copy(move)}
    if consumer.has_raw_nixl:
        ways[RAW_NIXL] = consumer.read_raw
    for plane in consumer.planes:
        ways[plane] = partial(_read, consumer, plane, copies)
    for name, way in ways.items():  # warm, and seen to bring the right bytes
        consumer.forget()
        way()
        if name != MEMCPY:
            consumer.check(move)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds):
        names = list(ways)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            began = time.perf_counter()
            ways[name]()
            seconds[name].append(time.perf_counter() - began)
    return Cell(move, pattern, seconds, copies)


def _check_fits(shape: Shape, spread: int) -> None:
    try:
        check_fits(2 * shape.total_bytes, available_bytes())
    except ConfigError as error:
        raise ConfigError(
            f"--spread {spread} takes {2 * shape.total_bytes // MIB} MiB for two caches, which are not there; give less"
        ) from error


def _read(consumer: Consumer, plane: str, copies: dict[str, int]) -> None:
    copies[plane] = consumer.read(plane).pieces


def _processor() -> str:
    """The kernel's name for it where it has one (x86), else the architecture's part number."""
    fields: dict[str, str] = {}
    with open("/proc/cpuinfo", encoding="utf-8") as info:
        for line in info:
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    return fields.get("model name") or f"{platform.machine()} part {fields.get('CPU part', 'unknown')}"
