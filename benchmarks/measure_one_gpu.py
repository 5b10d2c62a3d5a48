"""What staging could reach on one GPU at best, for docs/decisions/037-bounce-buffers.md: nothing of
kvferry or NIXL is in it.

    python benchmarks/measure_one_gpu.py [--mib 1024] [--json]

copies   a GiB of scattered segments gathered, copied and scattered again, chunk by chunk, in one
         process, replayed as one CUDA graph: no messages, no launches by a processor, nobody else.
         One step after the other, and in three streams, so that all three go on at once. By torch's
         kernels. Beside it one plain copy of as many bytes.
turns    two processes that copy so much each in turn, by a flag in shared memory: what it costs to
         hand a GPU over. Run it under CUDA's MPS (nvidia-cuda-mps-control -d) to see what that
         changes.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

MIB = 1 << 20
SEGMENT_BYTES, WORD_BYTES = 16 * 1024, 8
CHUNKS_MIB = (4, 8, 16, 32, 64, 256)
TURNS_MIB = (0, 16, 64, 256)
ROUNDS, NUM_TURNS, SETTLING_TURNS = 15, 400, 100
TURNS_S = 120.0

Captured = tuple[torch.cuda.CUDAGraph, tuple[torch.Tensor, ...]]
"""With the memory that it works in: whoever replays the graph keeps it."""


def timed(run: Callable[[], object]) -> float:
    """The median, of runs that follow another of the same kind."""
    times = []
    for _ in range(ROUNDS):
        run()
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def row(kind: str, mib: float, seconds: float, plain_s: float | None = None) -> Mapping[str, Any]:
    ratio = {} if plain_s is None else {"of_copy": round(plain_s / seconds, 3)}
    return {"kind": kind, "mib": mib, "us": round(seconds * 1e6, 1), **ratio}


def copies(total_mib: int) -> list[Mapping[str, Any]]:
    rows, words = total_mib * MIB // SEGMENT_BYTES, SEGMENT_BYTES // WORD_BYTES
    source = torch.arange(rows * words, dtype=torch.int64, device="cuda").view(rows, words)
    target, order = torch.zeros_like(source), torch.randperm(rows, device="cuda")
    plain_s = timed(lambda: target.copy_(source))
    found = [row("one copy", total_mib, plain_s, plain_s)]
    for mib in (each for each in CHUNKS_MIB if each <= total_mib):
        for name, slots in (("one after the other", 1), ("at once", 3)):
            graph, rings = captured(source, target, order.split(mib * MIB // SEGMENT_BYTES), slots)
            target.zero_()
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(target[:: rows // 64], source[:: rows // 64]), "wrong bytes"
            found.append(
                row(
                    f"gathered, copied, scattered, {name}; chunks",
                    mib,
                    timed(graph.replay),
                    plain_s,
                )
            )
            del graph, rings
    return found


def captured(
    source: torch.Tensor, target: torch.Tensor, parts: Sequence[torch.Tensor], slots: int
) -> Captured:
    """With more slots than one each step has a stream of its own, and waits for the one before it,
    and for room.
    """
    shape = slots, len(parts[0]), source.shape[1]
    here, there = rings = tuple(
        torch.zeros(shape, dtype=source.dtype, device=source.device) for _ in range(2)
    )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        streams = [torch.cuda.Stream() if slots > 1 else main for _ in range(3)]
        for stream in streams:
            stream.wait_stream(main)
        done = [[torch.cuda.Event() for _ in parts] for _ in streams]

        def step(
            which: int, number: int, after: Sequence[tuple[int, int]], work: Callable[[], object]
        ) -> None:
            with torch.cuda.stream(streams[which]):
                for earlier, of in after:
                    if of >= 0:
                        streams[which].wait_event(done[earlier][of])
                work()
                done[which][number].record(streams[which])

        for number, part in enumerate(parts):
            first, second = here[number % slots, : len(part)], there[number % slots, : len(part)]
            step(
                0,
                number,
                [(1, number - slots)],
                partial(torch.index_select, source, 0, part, out=first),
            )
            step(1, number, [(0, number), (2, number - slots)], partial(second.copy_, first))
            step(2, number, [(1, number)], partial(target.index_copy_, 0, part, second))
        for stream in streams:
            main.wait_stream(stream)
    return graph, rings


def take_turns(mine: int, turn: Any, mib: int, pipe: Any) -> None:
    source = torch.zeros(max(1, mib * MIB), dtype=torch.uint8, device="cuda")
    target, event, began = torch.zeros_like(source), torch.cuda.Event(), 0.0
    target.copy_(source)
    torch.cuda.synchronize()
    for number in range(NUM_TURNS):
        while turn.value != 2 * number + mine:
            pass
        if number == SETTLING_TURNS:
            began = time.perf_counter()
        target.copy_(source)
        event.record()
        while not event.query():
            pass
        turn.value += 1
    pipe.send((time.perf_counter() - began) / (NUM_TURNS - SETTLING_TURNS) / 2)


def turns() -> list[Mapping[str, Any]]:
    context, found = multiprocessing.get_context("spawn"), []
    for mib in TURNS_MIB:
        turn, pipes = (
            context.Value("q", 0, lock=False),
            [context.Pipe(duplex=False) for _ in range(2)],
        )
        sides = [
            context.Process(target=take_turns, args=(mine, turn, mib, pipe[1]), daemon=True)
            for mine, pipe in enumerate(pipes)
        ]
        for side in sides:
            side.start()
        if not pipes[0][0].poll(TURNS_S):
            raise SystemExit(
                "two processes did not take their turns on this GPU; is something else using it?"
            )
        found.append(row("turn of one of two processes", mib, pipes[0][0].recv()))
        for side in sides:
            side.join(TURNS_S)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("torch has no GPU here: there is nothing to measure")
    for each in (*copies(given.mib), *turns()):
        print(
            json.dumps(each) if given.json else "  ".join(str(value) for value in each.values()),
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
