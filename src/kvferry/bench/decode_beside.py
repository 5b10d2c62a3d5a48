"""`kvferry bench decode-interference`: how long a decode step takes while KV arrives in the same process, beside how long it takes alone.

The embedded engine's runner decodes in this thread; a thread beside it reads 64 MiB at a time from another process, as a transfer worker
does. All paces take turns in one run, so that whatever else the machine does meets all of them.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvferry.bench.arrivals import BackgroundReader, Pace
from kvferry.bench.decode_stream import DecodeStream
from kvferry.bench.figures import quantile, ratio, rounded
from kvferry.bench.transfer import parse_device
from kvferry.bench.transfer_memory import HostAllocator, MemoryAllocator
from kvferry.bench.transfer_moves import Blocks, Pattern, plan_move
from kvferry.bench.transfer_sides import Shape, start_producer
from kvferry.bench.vllm_pairs import parse_count, print_progress
from kvferry.cli.interrupts import StopRequest, stop_requests
from kvferry.cli.parser import Parser
from kvferry.engine.make_model import make_model

__all__ = ["DESCRIPTION", "EXAMPLES", "StepTimes", "add_arguments", "make_rows", "run"]

DESCRIPTION = (
    "Decode with the embedded engine's runner while another thread of the process receives 64 MiB at a time, as a transfer worker does:\n"
    "not at all, every 10 ms, and without pause. Tells the median and the 99th percentile of a step, and their ratios."
)
EXAMPLES = """\
  kvferry bench decode-interference
  kvferry bench decode-interference --device cuda --json
  kvferry bench decode-interference --device cuda --transport nixl"""

MIB = 1024 * 1024
MOVED_MIB, SPREAD, REGIONS = 64, 4, 8
SEGMENT_BYTES = 16 * 1024
SECONDS, ROUNDS = 8.0, 8
WARM_STEPS = 3
SEQUENCES, CONTEXT_TOKENS = 8, 512
SEED = 4
COLUMNS = {
    "steps": 7,
    "step_ms_p50": 9,
    "p50_ratio": 8,
    "step_ms_p99": 9,
    "p99_ratio": 8,
    "transfers": 9,
    "transfer_ms_p50": 9,
    "moved_gbps": 8,
}


@dataclass(frozen=True, slots=True)
class Preset:
    """What decodes, and by which transport KV arrives beside it, unless something else is asked for."""

    transport: str
    model_size: str
    dtype: str


HOST = Preset("shm", "tiny", "float32")
GPU = Preset("cuda_ipc", "middle", "bfloat16")


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What was measured at one pace: seconds of each step, and of each transfer."""

    steps: list[float] = field(default_factory=list)
    transfers: list[float] = field(default_factory=list)

    @property
    def moved_gbps(self) -> float | None:
        took = sum(self.steps)
        return len(self.transfers) * MOVED_MIB * MIB / took / 1e9 if took else None


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument(
        "--device", default="cpu", metavar="cpu|cuda[:N]", help="where the model and what arrives lie (default: %(default)s)"
    )
    parser.add_argument("--transport", metavar="NAME", help="by which KV arrives (default: shm; cuda: cuda_ipc)")
    parser.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint (default: a random one, larger on a GPU)")
    parser.add_argument("--sequences", type=parse_count, default=SEQUENCES, metavar="N", help="that decode together (default: %(default)s)")
    parser.add_argument(
        "--context", type=parse_count, default=CONTEXT_TOKENS, metavar="N", help="tokens that each has behind it (default: %(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, metavar="S", help="of steps at each pace (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    allocator = parse_device(arguments.device)
    preset = HOST if isinstance(allocator, HostAllocator) else GPU
    transport = arguments.transport or preset.transport
    with stop_requests() as stop, ExitStack() as stack:
        model = arguments.model or make_random_model(Path(stack.enter_context(TemporaryDirectory())), preset.model_size)
        stop.check()
        with closing(DecodeStream.opened(model, arguments.device, preset.dtype, arguments.sequences, arguments.context)) as stream:
            print_progress(
                f"{arguments.sequences} sequences of {arguments.context} tokens decode; {MOVED_MIB} MiB at a time arrive over {transport}"
            )
            measured = measure(stream.step, allocator, transport, arguments.seconds, stop)
    rows = make_rows(measured)
    facts = {
        "machine": platform.machine(),
        **allocator.facts(),
        "transport": transport,
        "moved_mib": MOVED_MIB,
        "segment_bytes": SEGMENT_BYTES,
        "sequences": arguments.sequences,
        "context_tokens": arguments.context,
    }
    print(json.dumps({"rows": rows, "machine": facts}) if arguments.json else table(rows, facts))
    return 0


def make_random_model(directory: Path, size: str) -> Path:
    print_progress(f"making a random model ({size})")
    make_model(directory / "model", family="llama", size=size)
    return directory / "model"


def measure(
    step: Callable[[], None], allocator: MemoryAllocator, transport: str, seconds: float, stop: StopRequest
) -> dict[Pace, StepTimes]:
    shape = Shape(REGIONS, MOVED_MIB * SPREAD * MIB // REGIONS)
    move = plan_move(Blocks(SEGMENT_BYTES, REGIONS, shape.region_bytes // SEGMENT_BYTES), Pattern.SCATTERED, SPREAD, SEED)
    with (
        start_producer(shape, stop, allocator, transport) as producer,
        closing(BackgroundReader(allocator, shape, producer, transport, move)) as arrivals,
    ):
        arrivals.start()
        measured = {pace: StepTimes() for pace in Pace}
        for round_index in range(ROUNDS):
            order = list(Pace)
            for pace in order[round_index % len(order) :] + order[: round_index % len(order)]:
                _measure_interval(step, arrivals, pace, seconds / ROUNDS, stop, measured[pace])
        return measured


def make_rows(measured: Mapping[Pace, StepTimes]) -> list[dict[str, Any]]:
    alone = measured[Pace.NONE].steps
    return [
        {
            "pace": pace.label,
            "steps": len(found.steps),
            "step_ms_p50": _milliseconds(found.steps, 0.5),
            "step_ms_p99": _milliseconds(found.steps, 0.99),
            "p50_ratio": ratio(quantile(found.steps, 0.5), quantile(alone, 0.5)),
            "p99_ratio": ratio(quantile(found.steps, 0.99), quantile(alone, 0.99)),
            "transfers": len(found.transfers),
            "transfer_ms_p50": _milliseconds(found.transfers, 0.5),
            "moved_gbps": rounded(found.moved_gbps, 2),
        }
        for pace, found in measured.items()
    ]


def table(rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> str:
    lines = [
        f"{facts['sequences']} sequences of {facts['context_tokens']} tokens; {facts['moved_mib']} MiB a transfer over "
        f"{facts['transport']}",
        f"{'transfers':<15}{'steps':>7}{'p50 ms':>9}{'÷ none':>8}{'p99 ms':>9}{'÷ none':>8}{'arrived':>9}{'p50 ms':>9}{'GB/s':>8}",
    ]
    for row in rows:
        cells = ["-" if row[name] is None else str(row[name]) for name in COLUMNS]
        lines.append(f"{row['pace']:<15}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, COLUMNS.values(), strict=True)))
    return "\n".join(lines)


def _measure_interval(
    step: Callable[[], None], arrivals: BackgroundReader, pace: Pace, seconds: float, stop: StopRequest, into: StepTimes
) -> None:
    arrivals.set_pace(pace)
    for _ in range(WARM_STEPS):
        step()
    arrivals.take_durations()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        stop.check()
        began = time.perf_counter()
        step()
        into.steps.append(time.perf_counter() - began)
    into.transfers.extend(arrivals.take_durations())


def _milliseconds(seconds: Sequence[float], share: float) -> float | None:
    found = quantile(seconds, share)
    return None if found is None else rounded(1000 * found, 3)
