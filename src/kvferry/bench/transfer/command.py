"""`kvferry bench transfer` moves KV between two processes on every data transport of this machine.

The comparison is with memcpy and raw NIXL, in the same run. The producer process owns and serves
the memory; this process reads through the transports, as a transfer worker does. All methods move
the same bytes alternately, round after round, so that other load on the machine affects all methods
alike; the results are medians.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvferry.bench.transfer.memory import HostAllocator, MemoryAllocator
from kvferry.bench.transfer.moves import (
    RUN_BLOCKS,
    Blocks,
    Move,
    Pattern,
    blocks_per_region,
    plan_move,
)
from kvferry.bench.transfer.processes import BenchConsumer, Shape, TransferMethod, start_producer
from kvferry.bench.transfer.report import (
    TransferCell,
    draw,
    largest,
    make_baselines,
    make_device_rows,
    make_rows,
    table,
)
from kvferry.bench.vllm.servers import COUNT, print_progress
from kvferry.cli.arguments import Parser
from kvferry.cli.extras import check_extra
from kvferry.cli.runtime import StopRequest, stop_requests
from kvferry.engine.options import first_gpu
from kvferry.errors import ConfigError, KVFerryError
from kvferry.transports.base import Completion

DESCRIPTION = (
    "Move KV between two processes on every data transport of this machine, in segments of 4 KiB "
    "to 1 MiB, scattered and in runs of\n"
    f"{RUN_BLOCKS} adjacent blocks, beside plain memcpy of the same bytes and raw NIXL with a "
    "descriptor for each block.\n"
    "With --device cuda both processes use one GPU, segments go up to 16 MiB, and memcpy is the "
    "device's own copy.\n"
    "Stop other work on the machine first."
)
EXAMPLES = """\
  kvferry bench transfer
  kvferry bench transfer --json --plot transfer.svg
  kvferry bench transfer --spread 4 --rounds 20
  kvferry bench transfer --device cuda --json"""

MIB = 1024 * 1024
SEED = 4
MIN_ROUNDS = 3
WARM_MOVES = 5


@dataclass(frozen=True, slots=True)
class Scope:
    """The sizes to measure, and how often."""

    segments_kib: tuple[int, ...]
    moved_mib: tuple[int, ...]
    """The sizes of moves, the largest first.

    The memory has the size of the largest move; smaller moves use a part of the memory.
    """
    regions: int
    rounds: int
    method_s: float = float("inf")
    """The approximate time for one method, size and pattern; a slow method skips rounds."""
    max_descriptors: int | None = None
    """The largest number of descriptors of one move for methods that are slow per descriptor."""
    slow_s: float | None = None
    """The duration above which a move counts as slow for warming up; None: no warm-up moves.

    Each timed move is preceded by moves of the same kind, because an idle GPU is slow at first, and
    so is a processor that has just done other work. A slow move is preceded by one move only.
    """

    def shape(self, spread: int) -> Shape:
        return Shape(self.regions, self.moved_mib[0] * MIB * spread // self.regions)


HOST = Scope((4, 16, 64, 256, 1024), (256,), regions=8, rounds=9)
"""256 MiB are far more than the cache of any processor."""
GPU = Scope(
    (4, 16, 64, 256, 1024, 4096, 16384),
    (1024, 64),
    regions=8,
    rounds=25,
    method_s=0.6,
    max_descriptors=8192,
    slow_s=0.005,
)
"""NIXL takes some 9 µs per descriptor on a GPU: 1 GiB in segments of 4 KiB would take 2.4 s per
move, hence `max_descriptors`.
"""
QUICK_MIB, QUICK_REGIONS, QUICK_ROUNDS = 16, 2, 2


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )
    parser.add_argument(
        "--device",
        type=parse_device,
        default=HostAllocator(),
        metavar="cpu|cuda[:N]",
        help="device of both caches (default: cpu)",
    )
    parser.add_argument(
        "--plot", type=parse_plot, metavar="FILE", help="also draw the table into this SVG file"
    )
    parser.add_argument(
        "--rounds",
        type=COUNT,
        metavar="N",
        help=f"moves of each kind; the median is printed (default: {HOST.rounds}; cuda: "
        f"{GPU.rounds})",
    )
    parser.add_argument(
        "--spread",
        type=COUNT,
        default=1,
        metavar="N",
        help="how many times larger each cache is than the moved bytes, so that moved blocks have "
        "gaps (default: %(default)s, no gaps)",
    )
    parser.add_argument(
        "--segments",
        nargs="+",
        type=COUNT,
        metavar="KIB",
        help="segment sizes to measure (default: all)",
    )
    parser.add_argument(
        "--moved",
        nargs="+",
        type=COUNT,
        metavar="MIB",
        help="MiB per move (default: 256; cuda: 1024 64)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="use little memory and two rounds: shows whether it works, not how fast",
    )


def parse_plot(text: str) -> Path:
    """For argparse: check that the plot can be written as an SVG file."""
    path = Path(text)
    if path.suffix.lower() != ".svg":
        raise argparse.ArgumentTypeError(
            f"plots are drawn as SVG; name a file that ends in .svg, not {text[:80]!a}"
        )
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text[:80]!a} cannot be written: its folder does not exist, or it is a folder itself"
        )
    return path


def parse_device(text: str) -> MemoryAllocator:
    """For argparse: return the allocator of a device; ConfigError explains how to fix a missing
    device.
    """
    index = first_gpu(text)
    if index is None:
        return HostAllocator()
    # Imported only on request, because the module imports torch, which the base install may lack.
    check_extra(f"kvferry bench transfer --device {text}", "engine", ["torch"])
    from kvferry.bench.transfer.device import DeviceAllocator

    allocator = DeviceAllocator(index)
    allocator.check_device()
    return allocator


def run(arguments: argparse.Namespace) -> int:
    allocator: MemoryAllocator = arguments.device
    is_host = isinstance(allocator, HostAllocator)
    scope = HOST if is_host else GPU
    if arguments.quick:
        scope = replace(scope, moved_mib=(QUICK_MIB,), regions=QUICK_REGIONS, rounds=QUICK_ROUNDS)
    scope = replace(
        scope,
        rounds=arguments.rounds or scope.rounds,
        segments_kib=tuple(arguments.segments or scope.segments_kib),
        moved_mib=tuple(sorted(arguments.moved or scope.moved_mib, reverse=True)),
    )
    _check_fits(allocator, scope, arguments.spread)
    if not list(_moves(scope, scope.shape(arguments.spread))):
        raise ConfigError(
            "--segments and --moved leave nothing to move: at least one segment must fit into "
            f"each of {scope.regions} regions"
        )
    with stop_requests() as stop:
        cells = measure(allocator, scope, arguments.spread, stop)
    rows = (make_rows if is_host else make_device_rows)(cells)
    facts = machine_facts(allocator, scope, arguments.spread)
    if arguments.plot:
        try:
            arguments.plot.write_text(draw(make_rows(largest(cells)), facts), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--plot {arguments.plot} cannot be written ({error})") from error
        print_progress(f"drawn into {arguments.plot}")
    answer = {"rows": rows, "baselines": make_baselines(cells), "machine": facts}
    print(json.dumps(answer) if arguments.json else table(rows, cells, facts))
    return 1 if any(cell.failures for cell in cells) else 0


def measure(
    allocator: MemoryAllocator, scope: Scope, spread: int, stop: StopRequest
) -> list[TransferCell]:
    """Measure all sizes and patterns with all methods. A method that fails is not measured from
    then on, and the cells say why. KVFerryError if the producer ends.
    """
    shape = scope.shape(spread)
    print_progress(f"two processes with {shape.total_bytes // MIB} MiB each")
    with (
        start_producer(shape, stop, allocator) as producer,
        BenchConsumer.connected(shape, producer, stop, allocator) as consumer,
    ):
        if not consumer.has_raw_nixl:
            print_progress("NIXL is not installed, so it is not measured (pip install nixl)")
        failures: dict[str, str] = {}
        cells = []
        for blocks, pattern, spread_here in _moves(scope, shape):
            move = plan_move(blocks, pattern, spread_here, SEED)
            methods = [
                method
                for method in consumer.methods(move, scope.max_descriptors)
                if method.name not in failures
            ]
            kib, mib = blocks.segment_bytes // 1024, move.total_bytes // MIB
            print_progress(
                f"segments of {kib} KiB, {pattern}: {scope.rounds} rounds of "
                f"{', '.join(method.name for method in methods)}, {mib} MiB each"
            )
            cells.append(_measure_cell(methods, move, pattern, scope, failures))
            if failures and producer.has_ended:
                reasons = "; ".join(f"{name}: {reason}" for name, reason in failures.items())
                raise KVFerryError(f"the producer process has ended ({reasons})")
        return cells


def machine_facts(allocator: MemoryAllocator, scope: Scope, spread: int) -> dict[str, Any]:
    return {
        "gbps_means": "10^9 bytes per second",
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "page_bytes": os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        **allocator.facts(),
        "moved_mib": scope.moved_mib[0],
        "regions": scope.regions,
        "spread": spread,
        "rounds": scope.rounds,
    }


def _moves(scope: Scope, shape: Shape) -> Iterator[tuple[Blocks, Pattern, int]]:
    """Yield blocks, pattern and spread of every move that has room for at least one run in each
    region.
    """
    for mib in scope.moved_mib:
        spread = shape.total_bytes // (mib * MIB)
        for kib in scope.segments_kib:
            blocks = Blocks(kib * 1024, shape.regions, shape.region_bytes // (kib * 1024))
            for pattern in Pattern:
                if blocks_per_region(blocks, pattern, spread):
                    yield blocks, pattern, spread


def _measure_cell(
    methods: Sequence[TransferMethod],
    move: Move,
    pattern: Pattern,
    scope: Scope,
    failures: dict[str, str],
) -> TransferCell:
    """Measure one size and pattern: verify every method once, then time the methods alternately.
    Methods that fail are added to `failures`.
    """
    turns: dict[str, int] = {}
    for method in methods:
        with _recorded_failure(method, failures):
            method.verify()  # also warms up, and checks that the right bytes arrive
            most = scope.method_s / max(_timed(method)[0], 1e-9)
            turns[method.name] = int(min(scope.rounds, max(MIN_ROUNDS, most)))
    seconds: dict[str, list[float]] = {method.name: [] for method in methods}
    copies: dict[str, int] = {}
    device_seconds: dict[str, list[float]] = {}
    for turn in range(max(turns.values(), default=0)):
        shift = turn % len(methods)
        for method in [*methods[shift:], *methods[:shift]]:
            if method.name in failures or not _takes_part(
                turn, turns[method.name], max(turns.values())
            ):
                continue
            with _recorded_failure(method, failures):
                observed = None if scope.slow_s is None else _warm_up(method, scope.slow_s)
                took, completion = _timed(method)
                seconds[method.name].append(took)
                if completion is not None:
                    copies[method.name] = completion.segments
                if observed is not None and observed.device_s is not None:
                    device_seconds.setdefault(method.name, []).append(observed.device_s)
    working = {method.name: method.move for method in methods if method.name not in failures}
    return TransferCell(
        move,
        pattern,
        {name: seconds[name] for name in working},
        {name: count for name, count in copies.items() if name in working},
        {name: part for name, part in working.items() if part is not move},
        device_seconds,
        dict(failures),
    )


def _timed(method: TransferMethod) -> tuple[float, Completion | None]:
    began = time.perf_counter()
    completion = method.run()
    return time.perf_counter() - began, completion


def _warm_up(method: TransferMethod, slow_s: float) -> Completion | None:
    """Run warm-up moves; return the completion of an observed move, with the device time.

    Other moves run before and after the observed move: observing leaves work behind that would slow
    down the next move.
    """
    took, completion = _timed(method)
    if took > slow_s:
        return completion
    for _ in range(WARM_MOVES):
        method.run()
    observed = method.observe()
    for _ in range(WARM_MOVES):
        method.run()
    return observed


@contextmanager
def _recorded_failure(method: TransferMethod, failures: dict[str, str]) -> Iterator[None]:
    try:
        yield
    except KVFerryError as error:
        print_progress(f"{method.name} is not measured from here on: {error}")
        failures[method.name] = str(error)


def _takes_part(turn: int, turns: int, of: int) -> bool:
    """Whether a method with `turns` of `of` rounds takes part in this round; its rounds are spread
    evenly.
    """
    return turn * turns // of != (turn - 1) * turns // of


def _check_fits(allocator: MemoryAllocator, scope: Scope, spread: int) -> None:
    size_bytes = scope.shape(spread).total_bytes
    try:
        allocator.check_capacity(size_bytes)
    except ConfigError as error:
        raise ConfigError(
            f"--spread {spread} takes {2 * size_bytes // MIB} MiB for two caches, which this "
            "machine does not have free; give less"
        ) from error


def _processor() -> str:
    """Return the kernel's name of the processor if there is one (x86), else the CPU part number."""
    fields: dict[str, str] = {}
    with open("/proc/cpuinfo", encoding="utf-8") as info:
        for line in info:
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    return (
        fields.get("model name") or f"{platform.machine()} part {fields.get('CPU part', 'unknown')}"
    )
