"""What bounce buffers cost and gain over NIXL, for docs/decisions/037-bounce-buffers.md: scattered
segments read directly and through bounce buffers of several sizes, and one contiguous segment of
the same bytes, in turn, between two processes.

    python benchmarks/measure_bounce.py [--device cuda] [--mib 256] [--segments 4 16 64]
                                     [--buffers 64/4 256/32] [--rounds 9] [--json]

A bounce buffer is given as its MiB / the MiB of a chunk. The script prints the median of each way,
its spread, and its rate beside the rate of the contiguous segment.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvferry.transports.base import DataTransport, Segments
from kvferry.transports.nixl.bounce.settings import BounceSettings
from kvferry.transports.nixl.bounce.transport import BounceNixlTransport
from kvferry.transports.nixl.transport import NetworkReach, NixlTransport
from kvferry.types import EngineId, Epoch, MemoryKind, PeerId, Region

MIB = 1 << 20
PEER = PeerId(EngineId("producer"), Epoch("1"), 0)
PATTERN = 8191
"""Bytes after which the producer's memory repeats itself: no segment looks like its neighbour."""


@dataclass(frozen=True, slots=True)
class Plan:
    device: str
    total_bytes: int
    buffers: tuple[tuple[int, int], ...]

    @property
    def kind(self) -> MemoryKind:
        return MemoryKind.VRAM if self.device == "cuda" else MemoryKind.DRAM

    def transports(self) -> dict[str, DataTransport]:
        made: dict[str, DataTransport] = {"plain": NixlTransport(reach=NetworkReach.THIS_HOST)}
        for buffer, chunk in self.buffers:
            settings = BounceSettings(1 << 30, buffer * MIB, chunk * MIB)
            made[f"bounce {buffer}/{chunk}"] = BounceNixlTransport(
                settings, b"a measurement", reach=NetworkReach.THIS_HOST
            )
        return made


class Memory:
    def __init__(self, plan: Plan) -> None:
        import torch  # only where it is asked for

        pattern = (
            torch.arange(plan.total_bytes, dtype=torch.int32, device=plan.device) % PATTERN % 251
        ).to(torch.uint8)
        self.bytes = pattern
        if plan.device == "cuda":
            torch.cuda.synchronize()
        self.region = Region(
            "kv", pattern.data_ptr(), plan.total_bytes, plan.total_bytes, 1, plan.kind
        )


def serve(pipe: Connection, plan: Plan) -> None:
    memory, transports = Memory(plan), plan.transports()
    for transport in transports.values():
        assert transport.register([memory.region])
    pipe.send((memory.region, {name: transport.offer() for name, transport in transports.items()}))
    while name := pipe.recv():  # the transport that is measured next: only that one is polled
        pipe.send(name)
        while not pipe.poll(0):
            for _ in range(100):
                transports[name].poll()
    os._exit(0)


def read(pipe: Connection, name: str, transport: DataTransport, segments: Segments) -> float:
    pipe.send(name)
    pipe.recv()
    began = time.perf_counter()
    transport.read(PEER, [segments])
    while not (ended := transport.poll()):
        pass
    elapsed_s = time.perf_counter() - began
    assert ended[0].ok, ended[0].error
    return elapsed_s


def scattered(total_bytes: int, segment_bytes: int, seed: int) -> Segments:
    random, count = np.random.default_rng(seed), total_bytes // segment_bytes
    local, remote = (random.permutation(count).astype(np.int64) * segment_bytes for _ in range(2))
    return Segments(0, 0, segment_bytes, local, remote)


def check(memory: Memory, segments: Segments) -> None:
    """Every byte of the whole memory is the one that was named."""
    import torch

    device, size = memory.bytes.device, segments.segment_bytes
    order = torch.as_tensor(
        segments.remote_offsets[np.argsort(segments.local_offsets)], device=device
    )
    step = max(1, 64 * MIB // size)
    for first in range(0, len(order), step):
        part = order[first : first + step]
        expected = (
            (part[:, None] + torch.arange(size, device=device)[None, :]) % PATTERN % 251
        ).to(torch.uint8)
        assert torch.equal(
            memory.bytes[first * size : first * size + expected.numel()].view(len(part), size),
            expected,
        ), "wrong bytes"


def measure(
    pipe: Connection,
    plan: Plan,
    segment_bytes: int,
    rounds: int,
    memory: Memory,
    transports: Mapping[str, DataTransport],
) -> list[dict[str, Any]]:
    one = Segments(0, 0, plan.total_bytes, np.zeros(1, np.int64), np.zeros(1, np.int64))
    segments = scattered(plan.total_bytes, segment_bytes, seed=segment_bytes)
    # Descriptors by the hundred thousand take seconds: of those fewer bytes are moved.
    most = 4096 if plan.device == "cuda" else len(segments.local_offsets)
    few = Segments(
        0, 0, segment_bytes, segments.local_offsets[:most], segments.remote_offsets[:most]
    )
    ways = {"contiguous": ("plain", one), "plain": ("plain", few)} | {
        name: (name, segments) for name in transports if name != "plain"
    }
    for name, (transport, wanted) in ways.items():
        read(pipe, transport, transports[transport], wanted)
        if name.startswith("bounce"):
            memory.bytes.zero_()
            read(pipe, transport, transports[transport], wanted)
            check(memory, wanted)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, (transport, wanted) in ways.items():
            times[name].append(read(pipe, transport, transports[transport], wanted))
    rates = {
        name: ways[name][1].total_bytes / statistics.median(each) / 1e9
        for name, each in times.items()
    }
    return [
        {
            "segment_kib": segment_bytes / 1024,
            "way": name,
            "gbps": round(rates[name], 2),
            "median_us": round(statistics.median(each) * 1e6),
            "spread_us": [round(min(each) * 1e6), round(max(each) * 1e6)],
            "of_contiguous": round(rates[name] / rates["contiguous"], 3),
            "moved_mib": ways[name][1].total_bytes / MIB,
        }
        for name, each in times.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--segments", type=int, nargs="+", default=[4, 16, 64], help="KiB")
    parser.add_argument(
        "--buffers", nargs="+", default=["64/4"], help="MiB of the bounce buffer / MiB of a chunk"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    buffers = tuple(
        (int(buffer), int(chunk))
        for buffer, _, chunk in (each.partition("/") for each in given.buffers)
    )
    plan = Plan(given.device, given.mib * MIB, buffers)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    producer = context.Process(target=serve, args=(theirs, plan), daemon=True)
    producer.start()
    theirs.close()
    memory, transports = Memory(plan), plan.transports()
    for transport in transports.values():
        assert transport.register([memory.region])
    region, offers = ours.recv()
    for name, transport in transports.items():
        transport.connect(PEER, offers[name], [region])
    for kib in given.segments:
        for row in measure(ours, plan, kib * 1024, given.rounds, memory, transports):
            print(
                json.dumps(row) if given.json else "  ".join(f"{value}" for value in row.values()),
                flush=True,
            )
    ours.send("")
    producer.join(10)
    for transport in transports.values():
        transport.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
