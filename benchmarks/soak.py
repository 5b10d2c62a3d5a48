"""`python -m benchmarks soak` runs many transfers between two engines and checks for leaks.

The benchmark checks that memory (also of a GPU), open files and threads stay flat, that every token
is right, and that all blocks are free at the end. Two engine cores run in their own processes, with
real ZeroMQ and the requested data transport; this process sends the requests. Some requests are
aborted, at every point where a client may disconnect.
"""

import argparse
import asyncio
import json
import logging
import math
import os
import random
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from kvferry.bench.figures import MIN_SAMPLES, Tolerance, Verdict, judge
from kvferry.bench.process_usage import (
    ProcessUsage,
    device_bytes_by_process,
    process_tree,
    read_usage,
)
from kvferry.bench.vllm.servers import model_directory, print_progress
from kvferry.cli.arguments import NumberOf, Parser, amount, parse_device
from kvferry.cli.runtime import stop_signals
from kvferry.config import KVTransferConfig, SideChannelConfig
from kvferry.config.fields import Natural, Seconds, Share
from kvferry.engine.client import EngineClient
from kvferry.engine.messages import AddRequest, CoreStatus, RequestOutput, SamplingParams
from kvferry.engine.options import EngineOptions
from kvferry.errors import KVFerryError
from kvferry.transports.registry import ConfiguredTransportKit

# -- engine pair --
# P and D as two core processes, and one transfer after another between the two. The benchmark works
# below HTTP: requests are sent to the engine cores directly, as an API process sends requests, so
# that a hundred thousand transfers take minutes. All code runs on one asyncio loop; every wait has
# a timeout.


BLOCK_SIZE = 16
NUM_BLOCKS = 512
LEG_S = 120.0
SETTLE_S = 60.0
LEASE_S = 20.0
"""The lease TTL; the leases of forgotten tickets expire after this time."""
VOCABULARY = range(10, 500)
KNOWN_PROMPTS = 64
FRESH_SHARE = 0.25
"""The share of new prompts among all prompts.

The other prompts cost P little, because P has their prefix cached; D caches nothing, so the KV of
every prompt moves.
"""
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


class SoakOutcome(StrEnum):
    """How a transfer ends; all outcomes but DONE are aborts, each at a different point."""

    DONE = "done"
    PREFILL_ABORTED = "prefill aborted"
    TICKET_ABANDONED = "ticket abandoned"
    TICKET_FORGOTTEN = "ticket forgotten"
    DECODE_ABORTED = "decode aborted"


ABORTED_OUTCOMES = tuple(SoakOutcome)[1:]


@dataclass(slots=True)
class SoakTally:
    """The counts of outcomes and errors so far."""

    outcomes: Counter[SoakOutcome] = field(default_factory=Counter)
    wrong_tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def done(self) -> int:
        return self.outcomes[SoakOutcome.DONE]

    @property
    def aborted(self) -> int:
        return sum(self.outcomes[outcome] for outcome in ABORTED_OUTCOMES)


@dataclass(frozen=True, slots=True)
class SoakLoad:
    """The device of both engines, and the length of the longest prompt."""

    device: str = "cpu"
    longest: int = 3 * BLOCK_SIZE

    @property
    def num_blocks(self) -> int:
        return NUM_BLOCKS * max(1, -(-self.longest // (3 * BLOCK_SIZE)))


SHORT_PROMPTS = SoakLoad()


@dataclass(slots=True)
class SoakPair:
    """Two engines, and the transfers between the two."""

    prefill: EngineClient
    decode: EngineClient
    abort_share: float
    rng: random.Random
    load: SoakLoad = SHORT_PROMPTS
    tally: SoakTally = field(default_factory=SoakTally)
    _number: int = 0
    _known: list[list[int]] = field(default_factory=list)

    async def transfer(self) -> None:
        """Send one prompt through P and D; D's first token must equal P's token."""
        self._number += 1
        name, prompt = f"soak-{self._number}", self._next_prompt()
        outcome = (
            self.rng.choice(ABORTED_OUTCOMES)
            if self.rng.random() < self.abort_share
            else SoakOutcome.DONE
        )
        async with asyncio.timeout(LEG_S):
            await self._run(name, prompt, outcome)

    def _next_prompt(self) -> list[int]:
        if len(self._known) == KNOWN_PROMPTS and self.rng.random() >= FRESH_SHARE:
            return self.rng.choice(self._known)
        prompt = self.rng.choices(VOCABULARY, k=self.rng.randint(1, self.load.longest))
        if len(self._known) < KNOWN_PROMPTS:
            self._known.append(prompt)
        return prompt

    async def _run(self, name: str, prompt: list[int], outcome: SoakOutcome) -> None:
        request = _request(name, prompt, 1, PREFILL)
        if outcome is SoakOutcome.PREFILL_ABORTED:
            await self._abort(self.prefill, request)
            self.tally.outcomes[outcome] += 1
            return
        first = await _last_output(self.prefill, request)
        if first.kv_transfer_params is None:
            self.tally.errors[
                first.error or f"P answered without transfer parameters ({first.finish_reason})"
            ] += 1
            return
        request = _request(name, prompt, self.rng.randint(1, 3), first.kv_transfer_params)
        if outcome is SoakOutcome.TICKET_ABANDONED:
            self.prefill.abandon(name)
        elif outcome is SoakOutcome.DECODE_ABORTED:
            await self._abort(self.decode, request)
        elif outcome is SoakOutcome.DONE:
            await self._decode(request, first.tokens[0].token_id)
            return
        self.tally.outcomes[outcome] += 1

    async def _decode(self, request: AddRequest, expected: int) -> None:
        outputs = [output async for output in self.decode.generate(request)]
        tokens = [token.token_id for output in outputs for token in output.tokens]
        if outputs[-1].finish_reason != "length":
            self.tally.errors[
                outputs[-1].error or f"D finished with {outputs[-1].finish_reason}"
            ] += 1
            return
        self.tally.wrong_tokens += tokens[0] != expected
        self.tally.outcomes[SoakOutcome.DONE] += 1

    async def _abort(self, engine: EngineClient, request: AddRequest) -> None:
        (stream,) = engine.add([request])
        await asyncio.sleep(self.rng.random() * 0.05)
        stream.close()

    async def settle(self) -> tuple[CoreStatus, CoreStatus]:
        """Wait until no block is in use on either side; return the status of both sides.

        After the timeout the status shows the blocks that are still in use.
        """
        deadline = asyncio.get_running_loop().time() + SETTLE_S
        while True:
            both = await self.prefill.status(), await self.decode.status()
            if not any(map(_is_busy, both)) or asyncio.get_running_loop().time() > deadline:
                return both
            await asyncio.sleep(0.1)


@asynccontextmanager
async def start_pair(
    model: Path, transport: str, abort_share: float, seed: int, load: SoakLoad = SHORT_PROMPTS
) -> AsyncIterator[SoakPair]:
    """Start both engines in their own processes, connected by this transport alone."""
    secret = secrets.token_bytes(32)
    # Wait for both starts even if one fails, so that the engine that did start is closed.
    engines = await asyncio.gather(
        *(_start(model, transport, secret, role, load) for role in ("prefill", "decode")),
        return_exceptions=True,
    )
    started = [engine for engine in engines if isinstance(engine, EngineClient)]
    try:
        for engine in engines:
            if isinstance(engine, BaseException):
                raise engine
        prefill, decode = started
        yield SoakPair(prefill, decode, abort_share, random.Random(seed), load)
    finally:
        for client in started:
            await client.close()


async def _start(
    model: Path, transport: str, secret: bytes, role: str, load: SoakLoad
) -> EngineClient:
    extra: dict[str, Any] = {"transports": [transport], "kv_lease_duration": LEASE_S}
    mapping = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "engine_id": f"soak-{role}",
        "kv_connector_extra_config": extra,
    }
    options = EngineOptions(
        model=model,
        device=load.device,
        block_size=BLOCK_SIZE,
        num_blocks=load.num_blocks,
        enable_prefix_caching=role == "prefill",
        kv_transfer=KVTransferConfig.from_mapping(mapping),
    )
    side_channel = SideChannelConfig(port=0)
    kit = ConfiguredTransportKit(
        side_channel.bind_host, side_channel.advertised_host, 0, secret, transports=(transport,)
    )
    return await EngineClient.start(options, kit, secret=secret, side_channel=side_channel)


def _request(name: str, prompt: list[int], max_tokens: int, params: dict[str, Any]) -> AddRequest:
    return AddRequest(
        name,
        prompt,
        SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        params,
    )


async def _last_output(engine: EngineClient, request: AddRequest) -> RequestOutput:
    last = None
    async for output in engine.generate(request):
        last = output
    if last is None:
        raise KVFerryError(f"the engine did not answer for {request.request_id}")
    return last


def _is_busy(status: CoreStatus) -> bool:
    waiting = status.num_running or status.num_waiting or status.num_waiting_for_remote_kvs
    return bool(waiting or status.num_used_blocks or status.num_delayed_frees)


# -- command --


DESCRIPTION = (
    "Run many transfers between two embedded engines and check that memory, open files and "
    "threads of every process stay flat,\nthat every token is right and that every block is free "
    "at the end. The exit code is 1 if not."
)
EXAMPLES = """\
  python -m benchmarks soak
  python -m benchmarks soak --transfers 2000 --transports shm --json
  python -m benchmarks soak --device cuda --transports cuda_ipc --transfers 10000 --longest 600"""

TRANSPORTS = {"cpu": ("shm", "nixl", "tcp"), "cuda": ("cuda_ipc", "nixl")}
"""The transports to run, by kind of device."""
SAMPLES = {"cpu": 200, "cuda": 40}
"""The number of usage samples of each process in a run.

Samples are taken at equal numbers of transfers, so a busy machine only makes the run longer. A GPU
run takes fewer samples, because nvidia-smi is slow.
"""
GPU = "gpu"
PROGRESS_INTERVAL_S = 10.0
TOLERANCES: Mapping[str, Tolerance] = {
    "rss_bytes": Tolerance(4 * 2**20, 0.02),
    "files": Tolerance(2),
    "threads": Tolerance(1),
    # torch allocates device memory 20 MiB at a time.
    "device_bytes": Tolerance(24 * 2**20),
    "torch_bytes": Tolerance(24 * 2**20),
}


@dataclass(frozen=True, slots=True)
class SoakResult:
    """The result of the run on one transport."""

    transport: str
    tally: SoakTally
    seconds: float
    samples: Mapping[str, Sequence[ProcessUsage]]
    """The usage samples of each process."""
    moved: Mapping[str, int]
    """The number of transfers that D's transports have counted, by transport."""
    used_blocks: Mapping[str, int]
    verdicts: Mapping[str, Mapping[str, Verdict]] = field(default_factory=dict)
    """The verdicts by process, then by resource; empty if the run was too short."""

    @property
    def problems(self) -> list[str]:
        """One sentence per problem; empty if there is no problem."""
        grown = [
            f"{what} of {name} grew from {verdict.before:,.0f} to {verdict.after:,.0f}"
            for name, rows in self.verdicts.items()
            for what, verdict in rows.items()
            if not verdict.is_flat
        ]
        usage = [
            f"{count} blocks of {name} are still in use"
            for name, count in self.used_blocks.items()
            if count
        ]
        failed = [
            f"{count} requests failed: {reason}" for reason, count in self.tally.errors.items()
        ]
        wrong = [f"{self.tally.wrong_tokens} tokens were wrong"] if self.tally.wrong_tokens else []
        return [*grown, *usage, *failed, *wrong]


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )
    parser.add_argument(
        "--transfers",
        type=amount(1),
        default=100_000,
        metavar="N",
        help="transfers on each transport (default: %(default)s)",
    )
    parser.add_argument(
        "--minutes",
        type=NumberOf(Seconds),
        default=math.inf,
        metavar="M",
        help="end each run after this many seconds, with the transfers done by then (default: no "
        "limit)",
    )
    parser.add_argument(
        "--device",
        type=parse_device,
        default="cpu",
        help="device of both engines: cpu, cuda or cuda:N (default: %(default)s)",
    )
    known = tuple(
        dict.fromkeys(transport for transports in TRANSPORTS.values() for transport in transports)
    )
    parser.add_argument(
        "--transports",
        nargs="+",
        choices=known,
        help="transports to run, one after the other (default: shm nixl tcp; on GPUs cuda_ipc "
        "nixl)",
    )
    parser.add_argument(
        "--longest",
        type=amount(1, 10**6),
        default=48,
        metavar="TOKENS",
        help="most tokens of a prompt (default: %(default)s)",
    )
    parser.add_argument(
        "--concurrency",
        type=amount(1, 10**6),
        default=64,
        metavar="N",
        help="requests in flight (default: %(default)s)",
    )
    parser.add_argument(
        "--abort-share",
        type=NumberOf(Share),
        default=0.05,
        metavar="SHARE",
        help="share of requests to abort (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=NumberOf(Natural),
        default=0,
        help="seed of prompts and aborts (default: %(default)s)",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="checkpoint in the layout of Hugging Face (default: a tiny generated one)",
    )


def run(arguments: argparse.Namespace) -> int:
    # Engines inherit the log level; at a lower level every aborted request would be a log line.
    logging.getLogger().setLevel(logging.ERROR)
    with stop_signals(), model_directory(arguments.model) as model:
        results = [
            asyncio.run(soak(model, transport, arguments))
            for transport in arguments.transports or TRANSPORTS[_kind(arguments.device)]
        ]
    if arguments.json:
        print(
            json.dumps(
                {
                    "runs": [_as_json(result) for result in results],
                    "is_flat": not any(r.problems for r in results),
                }
            )
        )
    else:
        print("\n\n".join(map(_table, results)))
    return 1 if any(result.problems for result in results) else 0


async def soak(model: Path, transport: str, arguments: argparse.Namespace) -> SoakResult:
    """Run the transfers on one transport, from the start of the engines to the end of the
    engines.
    """
    print_progress(
        f"{arguments.transfers:,} transfers by {transport}, {arguments.concurrency} at a time"
    )
    load = SoakLoad(arguments.device, arguments.longest)
    async with start_pair(model, transport, arguments.abort_share, arguments.seed, load) as pair:
        started = time.monotonic()
        samples = await _drive(
            pair, arguments.transfers, arguments.concurrency, started + 60 * arguments.minutes
        )
        prefill, decode = await pair.settle()
        return SoakResult(
            transport,
            pair.tally,
            time.monotonic() - started,
            samples,
            {summary.transport: summary.transfers for summary in decode.transfers},
            {"prefill": prefill.num_used_blocks, "decode": decode.num_used_blocks},
            _verdicts(samples),
        )


async def _drive(
    pair: SoakPair, transfers: int, concurrency: int, deadline: float
) -> dict[str, list[ProcessUsage]]:
    """Run transfers concurrently until enough are done or time is up; return usage samples.

    Samples are taken at equal numbers of transfers.
    """
    pids = _processes(pair)
    samples: dict[str, list[ProcessUsage]] = {name: [] for name in pids}
    every = max(1, transfers // SAMPLES[_kind(pair.load.device)])
    num_samples, reported_at = 0, time.monotonic()

    async def keep_going() -> None:
        nonlocal num_samples, reported_at
        while (
            pair.tally.done < transfers
            and pair.tally.errors.total() < MAX_ERRORS
            and time.monotonic() < deadline
        ):
            await pair.transfer()
            if pair.tally.done >= every * (1 + num_samples):
                num_samples += 1
                for name, usage in (await _sample_usage(pair, pids)).items():
                    samples.setdefault(name, []).append(usage)
            if time.monotonic() - reported_at > PROGRESS_INTERVAL_S:
                reported_at = time.monotonic()
                _print_progress(pair.tally, samples)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(keep_going())
    return samples


async def _sample_usage(pair: SoakPair, pids: Mapping[str, int]) -> dict[str, ProcessUsage]:
    found = {name: read_usage(pid) for name, pid in pids.items()}
    if pair.load.device == "cpu":
        return found
    by_process = await asyncio.to_thread(device_bytes_by_process)
    for name, engine in (("prefill", pair.prefill), ("decode", pair.decode)):
        status = await engine.status()
        found[name] = replace(
            found[name], device_bytes=by_process.get(pids[name], 0), torch_bytes=status.device_bytes
        )
        # The memory of the whole device: covers a driver that does not report processes, and memory
        # that was not allocated by torch.
        found[GPU] = ProcessUsage(0, 0, 0, status.device_used_bytes)
    return found


def _kind(device: str) -> str:
    return device.partition(":")[0]


MAX_ERRORS = 1000
"""The number of errors after which a run ends early."""


def _processes(pair: SoakPair) -> dict[str, int]:
    found = {"driver": os.getpid()}
    for name, engine in (("prefill", pair.prefill), ("decode", pair.decode)):
        assert engine.pid is not None
        for number, pid in enumerate(process_tree(engine.pid)):
            found[f"{name} {number}" if number else name] = pid
    return found


def _verdicts(samples: Mapping[str, Sequence[ProcessUsage]]) -> dict[str, dict[str, Verdict]]:
    """Compare the start and end of every series; empty if any series is too short."""
    if any(len(series) < MIN_SAMPLES for series in samples.values()):
        return {}
    judged: dict[str, dict[str, Verdict]] = {name: {} for name in samples}
    for name, series in samples.items():
        for what, tolerance in TOLERANCES.items():
            counts = [getattr(sample, what) for sample in series]
            verdict = judge(counts, tolerance) if any(counts) else None
            if verdict is not None:
                judged[name][what] = verdict
    return judged


def _print_progress(tally: SoakTally, samples: Mapping[str, Sequence[ProcessUsage]]) -> None:
    usage = ", ".join(
        f"{name} {_in_mebibytes(series[-1])}" for name, series in samples.items() if series
    )
    print_progress(f"{tally.done:,} done, {tally.aborted:,} aborted; {usage}")


def _in_mebibytes(usage: ProcessUsage) -> str:
    """Return main memory, then device memory according to the driver and to torch, where not 0."""
    return (
        "/".join(
            f"{count / 2**20:.1f}"
            for count in (usage.rss_bytes, usage.device_bytes, usage.torch_bytes)
            if count
        )
        + " MiB"
    )


def _as_json(result: SoakResult) -> dict[str, Any]:
    return {
        "transport": result.transport,
        "transfers": result.tally.done,
        "aborted": {
            outcome: count
            for outcome, count in result.tally.outcomes.items()
            if outcome in ABORTED_OUTCOMES
        },
        "wrong_tokens": result.tally.wrong_tokens,
        "errors": dict(result.tally.errors),
        "seconds": round(result.seconds, 1),
        "moved": dict(result.moved),
        "used_blocks": dict(result.used_blocks),
        "verdicts": {
            name: {
                what: {**asdict(verdict), "is_flat": verdict.is_flat}
                for what, verdict in rows.items()
            }
            for name, rows in result.verdicts.items()
        },
        "samples": {
            name: [asdict(sample) for sample in _thinned(series)]
            for name, series in result.samples.items()
        },
        "problems": result.problems,
    }


def _thinned(series: Sequence[ProcessUsage], most: int = 50) -> Sequence[ProcessUsage]:
    return series[:: max(1, math.ceil(len(series) / most))]


def _table(result: SoakResult) -> str:
    tally = result.tally
    rate = tally.done / result.seconds
    aborted = ", ".join(
        f"{outcome} {count:,}"
        for outcome, count in sorted(tally.outcomes.items())
        if outcome != "done"
    )
    lines = [
        f"{tally.done:,} transfers by {result.transport} in {result.seconds:,.0f} s ({rate:,.0f} "
        f"per second); aborted: {aborted or 'none'}",
        f"{'process':<12}{'what':<12}{'before':>16}{'after':>16}{'growth':>14}{'allowed':>14}  "
        "verdict",
    ]
    for name, rows in result.verdicts.items():
        for what, verdict in rows.items():
            says = "flat" if verdict.is_flat else "GROWS"
            numbers = (
                f"{verdict.before:>16,.0f}{verdict.after:>16,.0f}"
                f"{verdict.growth:>14,.0f}{verdict.allowed:>14,.0f}"
            )
            lines.append(f"{name:<12}{what:<12}{numbers}  {says}")
    for name, series in result.samples.items():
        if any(sample.device_bytes or sample.torch_bytes for sample in series):
            lines.append(
                f"{name}, main/device/torch: " + ", ".join(map(_in_mebibytes, _thinned(series, 20)))
            )
    lines += result.problems or [
        "every token was right, every block is free"
        + ("" if result.verdicts else "; too short to judge growth")
    ]
    return "\n".join(lines)
