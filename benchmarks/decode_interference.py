"""`python -m benchmarks decode-interference` measures decode steps while KV arrives.

The embedded engine's runner decodes in the main thread; a second thread reads 64 MiB at a time from
another process, as a transfer worker does. All paces alternate within one run, so that other load
on the machine affects all paces alike.
"""

import argparse
import json
import platform
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvferry.bench.figures import quantile, ratio, rounded
from kvferry.bench.transfer.command import parse_device
from kvferry.bench.transfer.memory import HostAllocator, MemoryAllocator
from kvferry.bench.transfer.moves import Blocks, Move, Pattern, plan_move
from kvferry.bench.transfer.processes import BenchConsumer, ProducerInfo, Shape, start_producer
from kvferry.bench.vllm.servers import COUNT, print_progress
from kvferry.cli.arguments import NumberOf, Parser
from kvferry.cli.runtime import StopRequest, stop_requests
from kvferry.config.fields import Seconds
from kvferry.engine.make_model.writer import make_model
from kvferry.engine.messages import SamplingParams, SequenceSlice
from kvferry.engine.options import EngineOptions
from kvferry.engine.runner import Runner
from kvferry.errors import KVFerryError
from kvferry.testing.local import LocalTransportKit

# -- background reader --
# A thread that reads from a producer. The thread owns the transports, gets its pace through the
# inbox and reports the duration of each transfer through the outbox.


START_S = 60.0
END_S = 30.0


class Pace(Enum):
    """The interval between the starts of two transfers, in seconds; None: no transfers."""

    NONE = None
    EVERY_10_MS = 0.01
    WITHOUT_PAUSE = 0.0

    @property
    def label(self) -> str:
        return self.name.lower().replace("_", " ")


class BackgroundReader:
    """Reads from a producer in its own thread, at a pace; the owner calls `start` and `close`."""

    def __init__(
        self,
        allocator: MemoryAllocator,
        shape: Shape,
        producer: ProducerInfo,
        transport: str,
        move: Move,
    ) -> None:
        self._allocator = allocator
        self._shape = shape
        self._producer = producer
        self._transport = transport
        self._move = move
        self._inbox: queue.SimpleQueue[Pace | None] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[float | Pace | KVFerryError] = queue.SimpleQueue()
        """Durations of transfers, the paces the thread has adopted, or the error that ended the
        thread.
        """
        self._thread = threading.Thread(target=self._run, name="kvferry-arrivals")

    def start(self) -> None:
        """Start the thread; return when the first transfer has arrived and its bytes have been
        checked.
        """
        self._thread.start()
        self._wait_until_adopted()

    def set_pace(self, pace: Pace) -> None:
        """Set the pace; return when the last transfer at the old pace has ended. The durations of
        the old pace are dropped.
        """
        self._inbox.put(pace)
        self._wait_until_adopted()

    def _wait_until_adopted(self) -> None:
        deadline = time.monotonic() + START_S
        try:
            while not isinstance(self._receive(max(0.0, deadline - time.monotonic())), Pace):
                pass
        except queue.Empty:
            raise KVFerryError(
                f"a transfer over {self._transport} did not end within {START_S:.0f} s; is the "
                "machine overloaded?"
            ) from None

    def _receive(self, timeout_s: float) -> float | Pace:
        message = self._outbox.get(timeout=timeout_s)
        if isinstance(message, KVFerryError):
            raise message
        return message

    def take_durations(self) -> list[float]:
        """Return the seconds of each transfer since the last call; raise KVFerryError if a transfer
        failed.
        """
        found: list[float] = []
        while not self._outbox.empty():
            message = self._receive(0.0)
            if not isinstance(message, Pace):
                found.append(message)
        return found

    def close(self) -> None:
        """Stop the thread, after the transfer in progress has ended."""
        self._inbox.put(None)
        if self._thread.ident is not None:
            self._thread.join(END_S)

    def _run(self) -> None:
        try:
            with BenchConsumer.connected(
                self._shape, self._producer, allocator=self._allocator, only=self._transport
            ) as consumer:
                if not consumer.transports:
                    raise KVFerryError(
                        f"no transport {self._transport} works for this memory here; name another "
                        "with --transport"
                    )
                consumer.prepare(self._move)
                consumer.read(self._transport)
                consumer.check(self._move)
                self._read_on(consumer)
        except Exception as error:  # top of a thread: the main thread raises it
            self._outbox.put(
                error
                if isinstance(error, KVFerryError)
                else KVFerryError(f"transfers over {self._transport} failed ({error!r})")
            )

    def _read_on(self, consumer: BenchConsumer) -> None:
        """Read at the current pace until None arrives in the inbox."""
        pace, began = Pace.NONE, 0.0
        self._outbox.put(pace)
        while True:
            try:
                wait_s = (
                    None if pace.value is None else max(0.0, began + pace.value - time.monotonic())
                )
                message = self._inbox.get(timeout=wait_s)
            except queue.Empty:
                began = time.monotonic()
                consumer.read(self._transport)
                self._outbox.put(time.monotonic() - began)
                continue
            if message is None:
                return
            pace = message
            self._outbox.put(pace)


# -- decode stream --
# Decode steps of the embedded engine's runner: the same sequences, one token each, step after step.
# The context of the sequences was never computed: decoding over a cache of zeros takes as long as
# over any other cache. After HEADROOM_TOKENS steps every sequence restarts at its first position,
# so that steps do not become longer. Used by one thread.


BLOCK_SIZE = 16
HEADROOM_TOKENS = 64
"""How many tokens a sequence grows before the sequence restarts."""
TOKEN = 5
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


class DecodeStream:
    """A batch of sequences that decode together; the owner calls `close`."""

    def __init__(self, runner: Runner, sequences: int, context_tokens: int) -> None:
        self._runner = runner
        self._context_tokens = context_tokens
        self._num_steps = 0
        blocks = _blocks_each(context_tokens)
        self._tables = [tuple(range(n * blocks, (n + 1) * blocks)) for n in range(sequences)]
        self._tokens = [TOKEN] * sequences

    @classmethod
    def opened(
        cls, model: Path, device: str, dtype: str, sequences: int, context_tokens: int
    ) -> "DecodeStream":
        """Load the model and allocate the cache; raise ConfigError if the device cannot run the
        model.
        """
        options = EngineOptions(
            model,
            device=device,
            dtype=dtype,
            compute_dtype=dtype,
            block_size=BLOCK_SIZE,
            num_blocks=sequences * _blocks_each(context_tokens),
            max_model_len=context_tokens + HEADROOM_TOKENS,
        )
        runner = Runner(options)
        try:
            runner.load()
            runner.allocate_cache(LocalTransportKit())
        except BaseException:
            runner.close()
            raise
        return cls(runner, sequences, context_tokens)

    def step(self) -> None:
        """Run one step; return when the next token of every sequence has been copied to the
        host.
        """
        start = self._context_tokens + self._num_steps % HEADROOM_TOKENS
        slices = [
            SequenceSlice(f"s{n}", (token,), start, (table,), GREEDY)
            for n, (token, table) in enumerate(zip(self._tokens, self._tables, strict=True))
        ]
        sampled = self._runner.run(slices)
        self._tokens = [sampled[part.request_id].token_id for part in slices]
        self._num_steps += 1

    def close(self) -> None:
        self._runner.close()


def _blocks_each(context_tokens: int) -> int:
    return -(-(context_tokens + HEADROOM_TOKENS) // BLOCK_SIZE)


# -- command --


DESCRIPTION = (
    "Decode with the embedded engine's runner while another thread of the process receives 64 MiB "
    "at a time, as a transfer worker does:\nnever, every 10 ms, and without pause. Prints the "
    "median and the 99th percentile of a step, and their ratios."
)
EXAMPLES = """\
  python -m benchmarks decode-interference
  python -m benchmarks decode-interference --device cuda --json
  python -m benchmarks decode-interference --device cuda --transport nixl"""

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
    """The default transport, model and dtype of a device."""

    transport: str
    model_size: str
    dtype: str


HOST = Preset("shm", "tiny", "float32")
GPU = Preset("cuda_ipc", "middle", "bfloat16")


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The measurements at one pace: the seconds of each step and of each transfer."""

    steps: list[float] = field(default_factory=list)
    transfers: list[float] = field(default_factory=list)

    @property
    def moved_gbps(self) -> float | None:
        took = sum(self.steps)
        return len(self.transfers) * MOVED_MIB * MIB / took / 1e9 if took else None


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )
    parser.add_argument(
        "--device",
        default="cpu",
        metavar="cpu|cuda[:N]",
        help="device of the model and of the received KV (default: %(default)s)",
    )
    parser.add_argument(
        "--transport",
        metavar="NAME",
        help="transport of the received KV (default: shm; cuda: cuda_ipc)",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="folder of a checkpoint (default: a random model, larger on a GPU)",
    )
    parser.add_argument(
        "--sequences",
        type=COUNT,
        default=SEQUENCES,
        metavar="N",
        help="sequences that decode in one batch (default: %(default)s)",
    )
    parser.add_argument(
        "--context",
        type=COUNT,
        default=CONTEXT_TOKENS,
        metavar="N",
        help="tokens of each sequence before the first measured step (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=NumberOf(Seconds),
        default=SECONDS,
        metavar="S",
        help="seconds of steps at each pace (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    allocator = parse_device(arguments.device)
    preset = HOST if isinstance(allocator, HostAllocator) else GPU
    transport = arguments.transport or preset.transport
    with stop_requests() as stop, ExitStack() as stack:
        model = arguments.model or make_random_model(
            Path(stack.enter_context(TemporaryDirectory())), preset.model_size
        )
        stop.check()
        with closing(
            DecodeStream.opened(
                model, arguments.device, preset.dtype, arguments.sequences, arguments.context
            )
        ) as stream:
            print_progress(
                f"{arguments.sequences} sequences of {arguments.context} tokens decode; "
                f"{MOVED_MIB} MiB at a time arrive over {transport}"
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
    step: Callable[[], None],
    allocator: MemoryAllocator,
    transport: str,
    seconds: float,
    stop: StopRequest,
) -> dict[Pace, StepTimes]:
    shape = Shape(REGIONS, MOVED_MIB * SPREAD * MIB // REGIONS)
    move = plan_move(
        Blocks(SEGMENT_BYTES, REGIONS, shape.region_bytes // SEGMENT_BYTES),
        Pattern.SCATTERED,
        SPREAD,
        SEED,
    )
    with (
        start_producer(shape, stop, allocator, transport) as producer,
        closing(BackgroundReader(allocator, shape, producer, transport, move)) as arrivals,
    ):
        arrivals.start()
        measured = {pace: StepTimes() for pace in Pace}
        # Rotate the order of the paces in each round, so that no pace always follows the same pace.
        for round_index in range(ROUNDS):
            order = list(Pace)
            for pace in order[round_index % len(order) :] + order[: round_index % len(order)]:
                _measure_interval(step, arrivals, pace, seconds / ROUNDS, stop, measured[pace])
        return measured


def make_rows(measured: Mapping[Pace, StepTimes]) -> list[dict[str, Any]]:
    """Return one row per pace, with ratios to the steps without transfers."""
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
        f"{facts['sequences']} sequences of {facts['context_tokens']} tokens; "
        f"{facts['moved_mib']} MiB a transfer over "
        f"{facts['transport']}",
        f"{'transfers':<15}{'steps':>7}{'p50 ms':>9}{'÷ none':>8}{'p99 ms':>9}{'÷ none':>8}"
        f"{'arrived':>9}{'p50 ms':>9}{'GB/s':>8}",
    ]
    for row in rows:
        cells = ["-" if row[name] is None else str(row[name]) for name in COLUMNS]
        lines.append(
            f"{row['pace']:<15}"
            + "".join(
                f"{cell:>{width}}" for cell, width in zip(cells, COLUMNS.values(), strict=True)
            )
        )
    return "\n".join(lines)


def _measure_interval(
    step: Callable[[], None],
    arrivals: BackgroundReader,
    pace: Pace,
    seconds: float,
    stop: StopRequest,
    into: StepTimes,
) -> None:
    """Run steps at one pace for a time; the first steps after the change of pace are not
    counted.
    """
    arrivals.set_pace(pace)
    for _ in range(WARM_STEPS):
        step()
    arrivals.take_durations()  # transfers during the warm steps
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
