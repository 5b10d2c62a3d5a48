"""`python -m benchmarks leases` measures what live leases cost per step, and an idle process.

P and D are two processes with real connectors and transfer workers, ZeroMQ and a real data
transport. P holds a number of leases; D tracks as many requests and renews the leases by heartbeat.
A run takes longer than the lease TTL, so leases that are alive at the end have been renewed.
"""

import argparse
import gc
import json
import multiprocessing
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from kvferry.bench.figures import quantile
from kvferry.bench.vllm.servers import print_progress
from kvferry.cli.arguments import NumberOf, Parser, amount
from kvferry.cli.runtime import stop_signals
from kvferry.config import KVTransferConfig, SideChannelConfig
from kvferry.config.fields import Seconds
from kvferry.connectors.contract import (
    ConnectorConfig,
    KVCacheConfig,
    KVCacheGroup,
    KVConnectorOutput,
    KVConnectorRole,
    ModelIdentity,
    ParallelConfig,
    RequestStatus,
)
from kvferry.connectors.factory import KVConnectorFactory
from kvferry.connectors.stats import merge_stats
from kvferry.engine.messages import StepPlan
from kvferry.errors import KVFerryError
from kvferry.transports.registry import ConfiguredTransportKit

# -- engine process --
# One engine's connector, scheduler half and worker half, with a real transfer worker, in its own
# process. There is no model: the main thread makes the connector calls of an engine step, or
# sleeps, and measures its own time.


BLOCK_SIZE, NUM_BLOCKS, WIDTH = 16, 256, 32
LAYERS = ("layer.0", "layer.1")
PROMPT_TOKENS = 40
WORK = bytes(2**20)
"""The input of the computation between steps.

Like a forward pass, hashing these bytes keeps the core busy for a while and releases the GIL, so
that the transfer worker can run.
"""


@dataclass(frozen=True, slots=True)
class RemoteCall:
    """A call of a method of `LeaseBenchEngine`, sent to the process."""

    method: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class _Tensor:
    """The attributes of a layer's cache tensor that connectors use."""

    address: int
    shape: Sequence[int] = (NUM_BLOCKS, 1, BLOCK_SIZE, WIDTH)
    device: str = "cpu"

    def data_ptr(self) -> int:
        return self.address

    def stride(self, dim: int) -> int:
        stride = 1
        for size in self.shape[dim + 1 :]:
            stride *= size
        return stride

    def element_size(self) -> int:
        return 1


@dataclass(slots=True)
class _Request:
    """The attributes of an engine request that connectors use."""

    request_id: str
    prompt_token_ids: list[int]
    kv_transfer_params: dict[str, Any] | None = None
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    cache_salt: str = ""
    family: str | None = None

    @property
    def all_token_ids(self) -> list[int]:
        return self.prompt_token_ids

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids)


@dataclass(slots=True)
class LeaseBenchEngine:
    """The connector halves of one engine and the calls that the benchmark measures."""

    config: ConnectorConfig
    totals: dict[str, Any] = field(default_factory=dict)
    is_closed: bool = False
    worker: Any = field(init=False)
    scheduler: Any = field(init=False)

    def __post_init__(self) -> None:
        cache = KVCacheConfig(
            NUM_BLOCKS, BLOCK_SIZE, (KVCacheGroup(LAYERS),), "HND", 1, WIDTH // 2, "uint8"
        )
        memory = self.config.cache_memory
        assert memory is not None
        layer_bytes = memory.size_bytes // len(LAYERS)
        self.worker = KVConnectorFactory.create_connector(
            self.config, KVConnectorRole.WORKER, cache
        )
        self.worker.register_kv_caches(
            {name: _Tensor(memory.address + i * layer_bytes) for i, name in enumerate(LAYERS)}
        )
        self.scheduler = KVConnectorFactory.create_connector(
            self.config, KVConnectorRole.SCHEDULER, cache
        )
        self.scheduler.set_xfer_handshake_metadata_pp_aware(
            {(0, 0): self.worker.get_handshake_metadata()}
        )

    def step(self) -> None:
        """Make all connector calls of one engine step without tokens, in the engine's order."""
        scheduler, worker = self.scheduler, self.worker
        scheduler.has_pending_push_work()
        metadata = scheduler.build_connector_meta(StepPlan(0))
        worker.handle_preemptions(metadata)
        worker.bind_connector_metadata(metadata)
        worker.start_load_kv(None)
        for name in LAYERS:
            worker.wait_for_layer_load(name)
            worker.save_kv_layer(name, None, None)
        worker.finish_forward()
        worker.wait_for_save()
        results = worker.get_transfer_results(set())
        output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            failure_reasons=results.failure_reasons,
            given_up_recving=results.given_up_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_stats=worker.get_kv_connector_stats(),
            kv_cache_events=worker.get_kv_connector_kv_cache_events(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        scheduler.update_connector_output(output)
        for stats in (output.kv_connector_stats, scheduler.get_kv_connector_stats()):
            if stats is not None:
                merge_stats(self.totals, stats.to_dict())

    # -- calls of the benchmark --

    def issue(self, count: int) -> list[dict[str, Any]]:
        """On P: finish `count` prefills; return the parameters for D."""
        issued = []
        for number in range(count):
            request = _Request(
                f"lease-{number}",
                _prompt(number),
                {"do_remote_decode": True},
                RequestStatus.FINISHED_LENGTH_CAPPED,
            )
            request.num_computed_tokens = PROMPT_TOKENS
            blocks = [(3 * number + i) % NUM_BLOCKS for i in range(3)]
            _, params = self.scheduler.request_finished_all_groups(request, (blocks,))
            assert params is not None
            issued.append(params)
            # Each lease begins at a different time, as in a real engine.
            self.step()
        return issued

    def track(self, params: list[dict[str, Any]]) -> None:
        """On D: add requests that wait for the blocks of these prefills."""
        for number, one in enumerate(params):
            self.scheduler.on_new_request(_Request(f"pull-{number}", _prompt(number), one))
        self.step()

    def level(self, name: str) -> int:
        """Return a gauge of the connector, as of a new step."""
        self.step()
        return sum(self.totals.get("levels", {}).get(name, {}).values())

    def measure(self, seconds: float) -> dict[str, float]:
        """Run steps for a time, one by one; return the cost per step in this thread, in
        microseconds.
        """
        # A collection during the steps would be measured as part of a step.
        gc.collect()
        walls, cpus = [], []
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            sha256(WORK)
            cpu, wall = time.thread_time(), time.perf_counter()
            self.step()
            walls.append(time.perf_counter() - wall)
            cpus.append(time.thread_time() - cpu)
        found = {
            "p50": quantile(walls, 0.5),
            "p99": quantile(walls, 0.99),
            "cpu": sum(cpus) / len(cpus),
        }
        return {name: round(1e6 * (value or 0.0), 1) for name, value in found.items()} | {
            "steps": len(walls)
        }

    def idle(self, seconds: float) -> float:
        """Return the share of a core that this process uses while the engine sleeps."""
        cpu, wall = time.process_time(), time.monotonic()
        time.sleep(seconds)
        return (time.process_time() - cpu) / (time.monotonic() - wall)

    def close(self) -> None:
        self.is_closed = True
        self.scheduler.shutdown()
        self.worker.shutdown()


def run_engine_process(
    link: Connection, name: str, transport: str, lease_s: float, secret: bytes
) -> None:
    """The main function of an engine process: answer calls until `close` or the end of the
    benchmark.
    """
    side_channel = SideChannelConfig(port=0)
    kit = ConfiguredTransportKit(
        side_channel.bind_host, side_channel.advertised_host, 0, secret, transports=(transport,)
    )
    extra = {"transports": [transport], "kv_lease_duration": lease_s}
    mapping = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "engine_id": name,
        "kv_connector_extra_config": extra,
    }
    memory = kit.allocate_cache(len(LAYERS) * NUM_BLOCKS * BLOCK_SIZE * WIDTH)
    identity = ModelIdentity("None", "none", len(LAYERS), 1, WIDTH // 2, "uint8")
    transfer = KVTransferConfig.from_mapping(mapping)
    side = LeaseBenchEngine(
        ConnectorConfig(
            transfer,
            identity,
            ParallelConfig(),
            side_channel,
            secret,
            f"epoch of {name}",
            kit,
            memory,
        )
    )
    try:
        while not side.is_closed:
            call = link.recv()
            method: Callable[..., Any] = getattr(side, call.method)
            link.send(method(*call.arguments))
    except EOFError:
        raise KVFerryError("the benchmark has ended") from None
    finally:
        if not side.is_closed:
            side.close()


def _prompt(number: int) -> list[int]:
    return [10 + (number >> (6 * (i % 5))) % 64 + i for i in range(PROMPT_TOKENS)]


# -- command --


DESCRIPTION = (
    "Measure the cost of live leases: time of the engine's thread per step, in both halves of the "
    "connector, and CPU of an idle process.\nThe exit code is 1 if a step costs more than 50 µs, "
    "or an idle process more than 1 % of a core."
)
EXAMPLES = """\
  python -m benchmarks leases
  python -m benchmarks leases --json --leases 10 10k --transports shm"""

TRANSPORTS = ("shm", "nixl", "tcp")
COUNTS = (10, 1_000, 10_000)
LEASE_S, MEASURE_S, IDLE_S = 30.0, 12.0, 20.0
ANSWER_S = 120.0
END_S = 15.0
MAX_STEP_US = 50.0
MAX_IDLE_SHARE = 0.01
MAX_RATIO = 2.0
"""The allowed ratio of step times between the most and the fewest leases.

A lower limit would be below the accuracy of the measurement: a step is a few dozen calls, which
cannot be measured to the microsecond.
"""


class _EngineProcess:
    """The benchmark's end of the pipe to one engine process."""

    def __init__(self, name: str, process: BaseProcess, link: Connection) -> None:
        self.name = name
        self._process = process
        self._link = link

    def send_call(self, method: str, *arguments: Any) -> None:
        self._link.send(RemoteCall(method, arguments))

    def receive_result(self, timeout_s: float = ANSWER_S) -> Any:
        """Wait for the answer; raise KVFerryError if the process has exited or does not answer in
        time.
        """
        try:
            if self._link.poll(timeout_s):
                return self._link.recv()
        except (EOFError, ConnectionError):
            raise KVFerryError(f"the {self.name} process exited; its output is above") from None
        raise KVFerryError(f"the {self.name} process did not answer within {timeout_s:g} s")

    def call(self, method: str, *arguments: Any) -> Any:
        self.send_call(method, *arguments)
        return self.receive_result()

    def end(self) -> None:
        self._link.close()
        self._process.join(END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(END_S)


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )
    parser.add_argument(
        "--leases",
        nargs="+",
        type=amount(1, 10**6),
        default=list(COUNTS),
        metavar="N",
        help="numbers of leases to measure (default: 10 1000 10000)",
    )
    parser.add_argument(
        "--transports",
        nargs="+",
        choices=TRANSPORTS,
        default=list(TRANSPORTS),
        help="transports to measure, one after the other (default: shm nixl tcp)",
    )
    parser.add_argument(
        "--seconds",
        type=NumberOf(Seconds),
        default=MEASURE_S,
        metavar="S",
        help="seconds of steps for each number of leases (default: %(default)s)",
    )
    parser.add_argument(
        "--lease-seconds",
        type=NumberOf(Seconds),
        default=LEASE_S,
        metavar="S",
        help="seconds that a lease lasts (default: %(default)s)",
    )
    parser.add_argument(
        "--idle-seconds",
        type=NumberOf(Seconds),
        default=IDLE_S,
        metavar="S",
        help="seconds of idling for each number of leases (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    rows = []
    with stop_signals():
        for transport in arguments.transports:
            for count in arguments.leases:
                print_progress(
                    f"{count:,} leases by {transport}: {arguments.seconds:g} s of steps, "
                    f"{arguments.idle_seconds:g} s idle"
                )
                with _pair(transport, arguments.lease_seconds) as sides:
                    rows += _measure(sides, transport, count, arguments)
    problems = judge_rows(rows)
    if arguments.json:
        print(json.dumps({"rows": rows, "problems": problems, "is_flat": not problems}))
    else:
        print(
            "\n".join(
                [
                    *_table(rows),
                    *(problems or ["flat, and within 50 µs per step and 1 % of a core"]),
                ]
            )
        )
    return 1 if problems else 0


def judge_rows(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one sentence per limit that a row exceeds."""
    problems = []
    for row in rows:
        where = f"{row['leases']:,} leases by {row['transport']} on the {row['side']} side"
        if row["us_per_step"] > MAX_STEP_US:
            problems.append(
                f"a step with {where} takes {row['us_per_step']} µs, more than {MAX_STEP_US:g}"
            )
        if row["idle_share"] > MAX_IDLE_SHARE:
            problems.append(
                f"an idle process with {where} takes {row['idle_share']:.2%} of a core, more than "
                f"{MAX_IDLE_SHARE:.0%}"
            )
        if row["leases_at_end"] != row["leases"]:
            problems.append(f"{row['leases_at_end']:,} of {where} were left at the end")
    for transport, side in dict.fromkeys((row["transport"], row["side"]) for row in rows):
        ours = sorted(
            (row for row in rows if (row["transport"], row["side"]) == (transport, side)),
            key=lambda row: int(row["leases"]),
        )
        if ours[-1]["us_per_step"] > MAX_RATIO * ours[0]["us_per_step"]:
            problems.append(
                f"a step by {transport} on the {side} side takes at least {MAX_RATIO:g} times as "
                "long with the most leases as with the fewest"
            )
    return problems


@contextmanager
def _pair(transport: str, lease_s: float) -> Iterator[tuple[_EngineProcess, _EngineProcess]]:
    secret = secrets.token_bytes(32)
    sides = []
    try:
        for name in ("prefill", "decode"):
            ours, theirs = multiprocessing.Pipe()
            process = multiprocessing.get_context("spawn").Process(
                target=run_engine_process,
                args=(theirs, name, transport, lease_s, secret),
                name=f"kvferry-{name}",
            )
            process.start()
            theirs.close()
            sides.append(_EngineProcess(name, process, ours))
        yield sides[0], sides[1]
        for side in sides:
            side.call("close")
    finally:
        for side in sides:
            side.end()


def _measure(
    sides: tuple[_EngineProcess, _EngineProcess],
    transport: str,
    count: int,
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    prefill, decode = sides
    started = time.monotonic()
    decode.call("track", prefill.call("issue", count))
    _wait_for(prefill, "num_leases", count)
    _wait_for(decode, "num_transfers", count)
    _wait_for(decode, "num_peers", 1)
    for side in sides:
        side.send_call("measure", options.seconds)
    steps = [side.receive_result(options.seconds + ANSWER_S) for side in sides]
    # Idle until leases without renewal would have expired.
    idle_s = max(options.idle_seconds, started + options.lease_seconds + 1 - time.monotonic())
    for side in sides:
        side.send_call("idle", idle_s)
    idle = [side.receive_result(idle_s + ANSWER_S) for side in sides]
    left = [prefill.call("level", "num_leases"), decode.call("level", "num_transfers")]
    return [
        {
            "transport": transport,
            "leases": count,
            "side": side.name,
            "us_per_step": step["p50"],
            "us_per_step_p99": step["p99"],
            "cpu_us_per_step": step["cpu"],
            "steps": step["steps"],
            "idle_share": round(share, 5),
            "leases_at_end": leases_left,
        }
        for side, step, share, leases_left in zip(sides, steps, idle, left, strict=True)
    ]


def _wait_for(side: _EngineProcess, level: str, value: int) -> None:
    deadline = time.monotonic() + ANSWER_S
    while (found := side.call("level", level)) != value:
        if time.monotonic() > deadline:
            raise KVFerryError(f"{level} of the {side.name} side is {found} instead of {value}")
        time.sleep(0.05)


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        f"{'transport':<10}{'side':<9}{'leases':>8}{'µs per step':>13}{'p99':>8}"
        f"{'on the core':>13}{'idle':>9}{'left':>8}"
    ]
    for row in rows:
        lines.append(
            f"{row['transport']:<10}{row['side']:<9}{row['leases']:>8,}{row['us_per_step']:>13}{row['us_per_step_p99']:>8}"
            f"{row['cpu_us_per_step']:>13}{row['idle_share']:>9.2%}{row['leases_at_end']:>8,}"
        )
    return lines
