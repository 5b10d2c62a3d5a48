"""`kvferry bench leases`: what live leases cost an engine per step, and a process that has nothing to do.

P and D are two processes with their real connectors and transfer workers, ZeroMQ and a real data transport. P holds so many leases, D waits
for as many requests and renews them by heartbeat. The whole takes longer than a lease lasts, so leases that are alive at the end were
renewed.
"""

import argparse
import json
import multiprocessing
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from kvferry.bench.lease_side import RemoteCall, run_engine_process
from kvferry.bench.vllm_pairs import print_progress
from kvferry.cli.interrupts import stop_signals
from kvferry.cli.parser import Parser
from kvferry.cli.sizes import parse_size
from kvferry.errors import KVFerryError

__all__ = ["DESCRIPTION", "EXAMPLES", "add_arguments", "judge_rows", "run"]

DESCRIPTION = (
    "Measure what live leases cost: the engine's thread per step, in both halves of the connector, and an idle process.\n"
    "Exit code 1 when a step costs more than 50 µs, or an idle process more than 1 % of a core."
)
EXAMPLES = """\
  kvferry bench leases
  kvferry bench leases --json --leases 10 10k --transports shm"""

TRANSPORTS = ("shm", "nixl", "tcp")
COUNTS = (10, 1_000, 10_000)
LEASE_S, MEASURE_S, IDLE_S = 30.0, 12.0, 20.0
ANSWER_S = 120.0
END_S = 15.0
MAX_STEP_US = 50.0
MAX_IDLE_SHARE = 0.01
MAX_RATIO = 2.0
"""Most against fewest leases: less is flat, for a step of a few dozen calls is never measured to the microsecond."""


class _EngineProcess:
    """The benchmark's end of one side's process."""

    def __init__(self, name: str, process: BaseProcess, link: Connection) -> None:
        self.name = name
        self._process = process
        self._link = link

    def send_call(self, method: str, *arguments: Any) -> None:
        self._link.send(RemoteCall(method, arguments))

    def receive_result(self, timeout_s: float = ANSWER_S) -> Any:
        """KVFerryError when it has ended or says nothing."""
        try:
            if self._link.poll(timeout_s):
                return self._link.recv()
        except (EOFError, ConnectionError):
            raise KVFerryError(f"the {self.name} side has ended; its output is above") from None
        raise KVFerryError(f"the {self.name} side did not answer within {timeout_s:g} s")

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
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--leases", nargs="+", type=parse_size, default=list(COUNTS), metavar="N", help="how many (default: 10 1000 10000)")
    parser.add_argument(
        "--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS), help="one after the other (default: shm nixl tcp)"
    )
    parser.add_argument("--seconds", type=float, default=MEASURE_S, metavar="S", help="of steps at each number (default: %(default)s)")
    parser.add_argument("--lease-seconds", type=float, default=LEASE_S, metavar="S", help="a lease lasts (default: %(default)s)")
    parser.add_argument("--idle-seconds", type=float, default=IDLE_S, metavar="S", help="of nothing (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    rows = []
    with stop_signals():
        for transport in arguments.transports:
            for count in arguments.leases:
                print_progress(
                    f"{count:,} leases by {transport}: {arguments.seconds:g} s of steps, {arguments.idle_seconds:g} s of nothing"
                )
                with _pair(transport, arguments.lease_seconds) as sides:
                    rows += _measure(sides, transport, count, arguments)
    problems = judge_rows(rows)
    if arguments.json:
        print(json.dumps({"rows": rows, "problems": problems, "is_flat": not problems}))
    else:
        print("\n".join([*_table(rows), *(problems or ["flat, and within 50 µs per step and 1 % of a core"])]))
    return 1 if problems else 0


def judge_rows(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One sentence for each thing that is too much."""
    problems = []
    for row in rows:
        where = f"{row['leases']:,} leases by {row['transport']} on the {row['side']} side"
        if row["us_per_step"] > MAX_STEP_US:
            problems.append(f"a step with {where} takes {row['us_per_step']} µs, more than {MAX_STEP_US:g}")
        if row["idle_share"] > MAX_IDLE_SHARE:
            problems.append(f"an idle process with {where} takes {row['idle_share']:.2%} of a core, more than {MAX_IDLE_SHARE:.0%}")
        if row["leases_at_end"] != row["leases"]:
            problems.append(f"of {where} {row['leases_at_end']:,} were left at the end")
    for transport, side in dict.fromkeys((row["transport"], row["side"]) for row in rows):
        ours = sorted((row for row in rows if (row["transport"], row["side"]) == (transport, side)), key=lambda row: int(row["leases"]))
        if ours[-1]["us_per_step"] > MAX_RATIO * ours[0]["us_per_step"]:
            problems.append(f"a step by {transport} on the {side} side takes {MAX_RATIO:g} times as long with the most leases, or longer")
    return problems


@contextmanager
def _pair(transport: str, lease_s: float) -> Iterator[tuple[_EngineProcess, _EngineProcess]]:
    secret = secrets.token_bytes(32)
    sides = []
    try:
        for name in ("prefill", "decode"):
            ours, theirs = multiprocessing.Pipe()
            process = multiprocessing.get_context("spawn").Process(
                target=run_engine_process, args=(theirs, name, transport, lease_s, secret), name=f"kvferry-{name}"
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


def _measure(sides: tuple[_EngineProcess, _EngineProcess], transport: str, count: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    prefill, decode = sides
    started = time.monotonic()
    decode.call("track", prefill.call("issue", count))
    _wait_for(prefill, "num_leases", count)
    _wait_for(decode, "num_transfers", count)
    _wait_for(decode, "num_peers", 1)
    for side in sides:
        side.send_call("measure", options.seconds)
    steps = [side.receive_result(options.seconds + ANSWER_S) for side in sides]
    # Until a lease that nobody renews would be gone.
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
    lines = [f"{'transport':<7}{'side':<9}{'leases':>8}{'µs per step':>13}{'p99':>8}{'on the core':>13}{'idle':>9}{'left':>8}"]
    for row in rows:
        lines.append(
            f"{row['transport']:<7}{row['side']:<9}{row['leases']:>8,}{row['us_per_step']:>13}{row['us_per_step_p99']:>8}"
            f"{row['cpu_us_per_step']:>13}{row['idle_share']:>9.2%}{row['leases_at_end']:>8,}"
        )
    return lines
