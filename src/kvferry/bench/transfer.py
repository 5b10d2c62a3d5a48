"""`kvferry bench transfer`: KV moved between two processes on every plane of this machine, beside memcpy and raw NIXL, in one run.

One process owns the memory and serves it; this one reads it through the planes as a ferry does. Every way moves the same bytes in turn,
round after round, so that whatever else the machine does meets all of them; medians are told.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvferry.bench.figures import quantile, ratio, rounded
from kvferry.bench.transfer_memory import HostPlace, Place
from kvferry.bench.transfer_moves import RUN_BLOCKS, Blocks, Move, Pattern, blocks_per_region, plan_move
from kvferry.bench.transfer_plot import draw
from kvferry.bench.transfer_sides import MEMCPY, RAW_NIXL, RAW_NIXL_ONE, RAW_NIXL_WRITE, Consumer, Shape, Way, start_producer
from kvferry.bench.vllm_pairs import parse_count, say
from kvferry.cli.interrupts import StopRequest, stop_requests
from kvferry.cli.parser import Parser
from kvferry.engine.device_names import first_gpu
from kvferry.errors import ConfigError, KVFerryError

__all__ = [
    "DESCRIPTION",
    "EXAMPLES",
    "MEMCPY",
    "RAW_NIXL",
    "Cell",
    "Scope",
    "add_arguments",
    "make_baselines",
    "make_device_rows",
    "make_rows",
    "measure",
    "parse_device",
    "run",
]

DESCRIPTION = (
    "Move KV between two processes on every data plane of this machine, in pieces of 4 KiB to 1 MiB, scattered and in runs of\n"
    f"{RUN_BLOCKS} adjacent blocks, beside plain memcpy of the same bytes and raw NIXL with a descriptor for each block.\n"
    "With --device cuda both processes use one GPU, pieces go up to 16 MiB, and memcpy is the device's own copy.\n"
    "Let nothing else run meanwhile."
)
EXAMPLES = """\
  kvferry bench transfer
  kvferry bench transfer --json --plot transfer.svg
  kvferry bench transfer --spread 4 --rounds 20
  kvferry bench transfer --device cuda --json"""

MIB = 1024 * 1024
SEED = 4
LEAST_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Scope:
    """What is measured, and how often."""

    pieces_kib: tuple[int, ...]
    moved_mib: tuple[int, ...]
    """Sizes of moves, the largest first: the memory is that large, smaller moves take a part of it."""
    regions: int
    rounds: int
    way_s: float = float("inf")
    """About how long one way is measured for one size and pattern; slow ones take part in fewer rounds."""
    most_descriptors: int | None = None
    """How many pieces ways move at most that need long for each."""
    leaves_out: bool = False
    """A way that does not work is left out; else it ends the benchmark."""
    warms_up: bool = False
    """Before each move that is timed there is one of the same kind: a GPU that was left alone for a while is slow at first."""

    def shape(self, spread: int) -> Shape:
        return Shape(self.regions, self.moved_mib[0] * MIB * spread // self.regions)


HOST = Scope((4, 16, 64, 256, 1024), (256,), regions=8, rounds=9)
"""256 MiB are far more than any cache of a processor holds."""
GPU = Scope(
    (4, 16, 64, 256, 1024, 4096, 16384), (1024, 64), regions=8, rounds=25, way_s=0.6, most_descriptors=8192, leaves_out=True, warms_up=True
)
"""NIXL takes some 9 µs for each descriptor on a GPU: a GiB in pieces of 4 KiB would take 2.4 s a move."""
QUICK_MIB, QUICK_REGIONS, QUICK_ROUNDS = 16, 2, 2


@dataclass(frozen=True, slots=True)
class Cell:
    """What was measured for one size of pieces and one pattern: seconds by way, and how many copies or descriptors each plane used."""

    move: Move
    pattern: Pattern
    seconds: Mapping[str, Sequence[float]]
    copies: Mapping[str, int]
    parts: Mapping[str, Move] = field(default_factory=dict)
    """Ways that moved only a part of it, and which."""

    def part(self, way: str) -> Move:
        return self.parts.get(way, self.move)

    def gbps(self, way: str) -> float | None:
        median = quantile(self.seconds.get(way, ()), 0.5)
        return self.part(way).total_bytes / median / 1e9 if median else None


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument(
        "--device", type=parse_device, default=HostPlace(), metavar="cpu|cuda[:N]", help="where both caches lie (default: cpu)"
    )
    parser.add_argument("--plot", type=parse_plot, metavar="FILE", help="also draw the table into this file, as SVG")
    parser.add_argument(
        "--rounds",
        type=parse_count,
        metavar="N",
        help=f"moves of each kind, of which the median is told (default: {HOST.rounds}; cuda: {GPU.rounds})",
    )
    parser.add_argument(
        "--spread",
        type=parse_count,
        default=1,
        metavar="N",
        help="how many times larger than what moves each cache is, so that what moves has gaps (default: %(default)s, no gaps)",
    )
    parser.add_argument("--pieces", nargs="+", type=parse_count, metavar="KIB", help="sizes of pieces (default: all of them)")
    parser.add_argument("--moved", nargs="+", type=parse_count, metavar="MIB", help="how much a move carries (default: 256; cuda: 1024 64)")
    parser.add_argument("--quick", action="store_true", help="little memory and two rounds: whether it works, not how fast")


def parse_plot(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() != ".svg":
        raise argparse.ArgumentTypeError(f"plots are drawn as SVG; name a file that ends in .svg, not {text[:80]!a}")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text[:80]!a} cannot be written: its folder is not there, or it is one")
    return path


def parse_device(text: str) -> Place:
    """For argparse. ConfigError, which says what to do, when there is no such device."""
    index = first_gpu(text)
    if index is None:
        return HostPlace()
    # Imported only when asked for: it takes torch.
    from kvferry.bench.transfer_device import DevicePlace

    place = DevicePlace(index)
    place.check_device()
    return place


def run(arguments: argparse.Namespace) -> int:
    place: Place = arguments.device
    is_host = isinstance(place, HostPlace)
    scope = HOST if is_host else GPU
    if arguments.quick:
        scope = replace(scope, moved_mib=(QUICK_MIB,), regions=QUICK_REGIONS, rounds=QUICK_ROUNDS)
    scope = replace(
        scope,
        rounds=arguments.rounds or scope.rounds,
        pieces_kib=tuple(arguments.pieces or scope.pieces_kib),
        moved_mib=tuple(sorted(arguments.moved or scope.moved_mib, reverse=True)),
    )
    _check_fits(place, scope, arguments.spread)
    if not list(_moves(scope, scope.shape(arguments.spread))):
        raise ConfigError(f"--pieces and --moved leave nothing to move: in each of {scope.regions} regions at least one piece has to fit")
    with stop_requests() as stop:
        cells = measure(place, scope, arguments.spread, stop)
    rows = (make_rows if is_host else make_device_rows)(cells)
    facts = machine_facts(place, scope, arguments.spread)
    if arguments.plot:
        try:
            arguments.plot.write_text(draw(make_rows(_largest(cells)), facts), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--plot {arguments.plot} cannot be written ({error})") from error
        say(f"drawn into {arguments.plot}")
    answer = {"rows": rows, "baselines": make_baselines(cells), "machine": facts}
    print(json.dumps(answer) if arguments.json else table(rows, cells, facts))
    return 0


def measure(place: Place, scope: Scope, spread: int, stop: StopRequest) -> list[Cell]:
    shape = scope.shape(spread)
    say(f"two processes with {shape.total_bytes // MIB} MiB each")
    with start_producer(shape, stop, place) as producer, Consumer.connected(shape, producer, stop, place) as consumer:
        if not consumer.has_raw_nixl:
            say("NIXL is not installed: nothing is measured over it (pip install nixl)")
        left_out: set[str] = set()
        cells = []
        for blocks, pattern, spread_here in _moves(scope, shape):
            move = plan_move(blocks, pattern, spread_here, SEED)
            ways = [way for way in consumer.ways(move, scope.most_descriptors) if way.name not in left_out]
            kib, mib = blocks.piece_bytes // 1024, move.total_bytes // MIB
            say(f"pieces of {kib} KiB, {pattern}: {scope.rounds} rounds of {', '.join(way.name for way in ways)}, {mib} MiB each")
            cells.append(_measure_cell(ways, move, pattern, scope, left_out))
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
            "pieces": len(cell.part(plane).local_blocks),
            "copies": copies,
        }
        for cell in cells
        for plane, copies in cell.copies.items()
    ]


def make_device_rows(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """The same, with what else matters on a GPU."""
    more = [
        {
            "moved_bytes": cell.move.total_bytes,
            "timed_bytes": cell.part(plane).total_bytes,
            "median_us": _microseconds(cell, plane),
            "of_contiguous_nixl": ratio(cell.gbps(plane), cell.gbps(RAW_NIXL_ONE)),
        }
        for cell in cells
        for plane in cell.copies
    ]
    return [row | extra for row, extra in zip(make_rows(cells), more, strict=True)]


def make_baselines(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    return [
        {
            "piece_bytes": cell.move.blocks.piece_bytes,
            "pattern": str(cell.pattern),
            "memcpy_gbps": rounded(cell.gbps(MEMCPY), 2),
            "raw_nixl_gbps": rounded(cell.gbps(RAW_NIXL), 2),
        }
        | (_device_baseline(cell) if RAW_NIXL_ONE in cell.seconds else {})
        for cell in cells
    ]


def _device_baseline(cell: Cell) -> dict[str, Any]:
    return {
        "moved_bytes": cell.move.total_bytes,
        "raw_nixl_timed_bytes": cell.part(RAW_NIXL).total_bytes,
        "memcpy_median_us": _microseconds(cell, MEMCPY),
        "raw_nixl_write_gbps": rounded(cell.gbps(RAW_NIXL_WRITE), 2),
        "contiguous_nixl_gbps": rounded(cell.gbps(RAW_NIXL_ONE), 2),
        "contiguous_nixl_median_us": _microseconds(cell, RAW_NIXL_ONE),
    }


def machine_facts(place: Place, scope: Scope, spread: int) -> dict[str, Any]:
    return {
        "gbps_means": "10^9 bytes per second",
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "page_bytes": os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        **place.facts(),
        "moved_mib": scope.moved_mib[0],
        "regions": scope.regions,
        "spread": spread,
        "rounds": scope.rounds,
    }


def table(rows: Sequence[Mapping[str, Any]], cells: Sequence[Cell], facts: Mapping[str, Any]) -> str:
    lines = [
        f"{facts['moved_mib']} MiB a move in {facts['regions']} regions, spread {facts['spread']}, median of {facts['rounds']}; "
        f"{facts['processor']}, {facts['cores']} cores, copied by {facts['copied_by']}",
        f"{'piece':>9}  {'pattern':<10}{'way':<20}{'GB/s':>8}{'÷ memcpy':>10}{'÷ raw NIXL':>12}{'copies':>9}",
    ]
    size_bytes = cells[0].move.total_bytes
    for cell in cells:
        if cell.move.total_bytes < size_bytes:
            size_bytes = cell.move.total_bytes
            lines.append(f"{size_bytes // MIB} MiB a move")
        for way in (MEMCPY, RAW_NIXL, RAW_NIXL_WRITE, RAW_NIXL_ONE):
            if cell.gbps(way) is not None:
                lines.append(_line(cell, way, rounded(cell.gbps(way), 2), ratio(cell.gbps(way), cell.gbps(MEMCPY))))
        for row in rows:
            if (row["piece_bytes"], row["pattern"], row.get("moved_bytes", cell.move.total_bytes)) == _key(cell):
                lines.append(_line(cell, row["plane"], row["gbps"], row["of_memcpy"], row["of_raw_nixl"], row["copies"]))
    return "\n".join(lines)


def _line(cell: Cell, way: str, *figures: float | None) -> str:
    shown = ["-" if figure is None else str(figure) for figure in figures] + ["", ""]
    piece = f"{cell.move.blocks.piece_bytes // 1024} KiB"
    return f"{piece:>9}  {cell.pattern:<10}{way:<20}{shown[0]:>8}{shown[1]:>10}{shown[2]:>12}{shown[3]:>9}".rstrip()


def _key(cell: Cell) -> tuple[int, Pattern, int]:
    return cell.move.blocks.piece_bytes, cell.pattern, cell.move.total_bytes


def _largest(cells: Sequence[Cell]) -> list[Cell]:
    """Those of the largest move."""
    most = max(cell.move.total_bytes for cell in cells)
    return [cell for cell in cells if cell.move.total_bytes == most]


def _microseconds(cell: Cell, way: str) -> float | None:
    median = quantile(cell.seconds.get(way, ()), 0.5)
    return None if median is None else rounded(1e6 * median, 1)


def _moves(scope: Scope, shape: Shape) -> Iterator[tuple[Blocks, Pattern, int]]:
    """Blocks, pattern and spread of every move that has room for a run of blocks in each region."""
    for mib in scope.moved_mib:
        spread = shape.total_bytes // (mib * MIB)
        for kib in scope.pieces_kib:
            blocks = Blocks(kib * 1024, shape.regions, shape.region_bytes // (kib * 1024))
            for pattern in Pattern:
                if blocks_per_region(blocks, pattern, spread):
                    yield blocks, pattern, spread


def _measure_cell(ways: Sequence[Way], move: Move, pattern: Pattern, scope: Scope, left_out: set[str]) -> Cell:
    turns: dict[str, int] = {}
    for way in ways:
        try:
            way.verify()  # warm, and seen to bring the right bytes
            began = time.perf_counter()
            way.run()
        except KVFerryError as error:
            if not scope.leaves_out:
                raise
            say(f"{way.name} is left out from here on: {error}")
            left_out.add(way.name)
        else:
            most = scope.way_s / max(time.perf_counter() - began, 1e-9)
            turns[way.name] = int(min(scope.rounds, max(LEAST_ROUNDS, most)))
    working = [way for way in ways if way.name in turns]
    seconds: dict[str, list[float]] = {way.name: [] for way in working}
    copies: dict[str, int] = {}
    for turn in range(max(turns.values())):
        shift = turn % len(working)
        for way in working[shift:] + working[:shift]:
            if not _is_turn(turn, turns[way.name], max(turns.values())):
                continue
            if scope.warms_up:
                way.run()
            began = time.perf_counter()
            used = way.run()
            seconds[way.name].append(time.perf_counter() - began)
            if used is not None:
                copies[way.name] = used
    return Cell(move, pattern, seconds, copies, {way.name: way.move for way in working if way.move is not move})


def _is_turn(turn: int, turns: int, of: int) -> bool:
    """Whether something that takes part in so many of all turns does in this one: they are spread evenly."""
    return turn * turns // of != (turn - 1) * turns // of


def _check_fits(place: Place, scope: Scope, spread: int) -> None:
    size_bytes = scope.shape(spread).total_bytes
    try:
        place.check_room(size_bytes)
    except ConfigError as error:
        raise ConfigError(f"--spread {spread} takes {2 * size_bytes // MIB} MiB for two caches, which are not there; give less") from error


def _processor() -> str:
    """The kernel's name for it where it has one (x86), else the architecture's part number."""
    fields: dict[str, str] = {}
    with open("/proc/cpuinfo", encoding="utf-8") as info:
        for line in info:
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    return fields.get("model name") or f"{platform.machine()} part {fields.get('CPU part', 'unknown')}"
