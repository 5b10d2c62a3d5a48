"""A reader and producers that answer only when this program polls them, over TCP. Run as a program,
because UCX selects its transports once per process.

`python -m tests.transports.silent_producers SCENARIO` prints the result as JSON.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tests.transports.stopped_producer import PEER, start_producer

from kvferry.transports.base import Handle, Segments
from kvferry.transports.nixl.transport import NetworkReach, NixlTransport
from kvferry.types import EngineId, Epoch, PeerId, Region

BLOCKS, BLOCK_BYTES = 16, 64 * 1024
PATIENCE_S, LONGER_S, DEADLINE_S = 0.1, 0.5, 30.0
DISPOSALS = 20


class Producer:
    """A producer whose memory is filled with one number. It answers only when it is polled."""

    def __init__(self, name: str, number: int) -> None:
        self.peer = PeerId(EngineId(name), Epoch("e"), 0)
        self.memory, self.regions = _memory(number)
        self.transport = NixlTransport(num_threads=1, reach=NetworkReach.THIS_HOST)
        assert self.transport.register(self.regions)


class Reader:
    def __init__(self) -> None:
        self.memory, self.regions = _memory(0)
        self.transport = NixlTransport(
            num_threads=1, reach=NetworkReach.THIS_HOST, cancel_timeout_s=PATIENCE_S
        )
        assert self.transport.register(self.regions)
        self.ended: dict[Handle, str | None] = {}
        """The errors of the ended transfers, in the order of their completions."""

    def connect(self, producer: Producer) -> None:
        self.transport.connect(producer.peer, producer.transport.offer(), producer.regions)

    def read(self, producer: Producer, block: int) -> Handle:
        """Start a read of one block; the read is posted when this method returns."""
        offset = np.array([block * BLOCK_BYTES], np.int64)
        handle = self.transport.read(producer.peer, [Segments(0, 0, BLOCK_BYTES, offset, offset)])
        self.turn()
        return handle

    def turn(self, *answering: Producer) -> None:
        for producer in answering:
            producer.transport.poll()
        for completion in self.transport.poll():
            assert completion.handle not in self.ended
            self.ended[completion.handle] = completion.error

    def turn_until(self, is_reached: Callable[[], bool], *answering: Producer) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not is_reached():
            assert time.monotonic() < deadline
            self.turn(*answering)
            time.sleep(0.001)

    def turn_for(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        self.turn_until(lambda: time.monotonic() > until)

    def numbers(self, *blocks: int) -> list[int]:
        return [int(self.memory[block * BLOCK_BYTES]) for block in blocks]


@dataclass(frozen=True, slots=True, order=True)
class Held:
    files: int
    threads: int

    @classmethod
    def now(cls) -> "Held":
        return cls(len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))

    def is_within(self, other: "Held") -> bool:
        return self.files <= other.files and self.threads <= other.threads


def many_disposals() -> dict[str, object]:
    """A producer in another process is stopped; the reader reads from it repeatedly and cancels."""
    process, pipe, offer, regions = start_producer()
    os.kill(process.pid or 0, signal.SIGSTOP)
    reader = Reader()
    before, at_most = Held(10**6, 10**6), Held(0, 0)
    for number in range(DISPOSALS + 1):
        reader.transport.connect(PEER, offer, regions)
        offset = np.zeros(1, np.int64)
        handle = reader.transport.read(PEER, [Segments(0, 0, BLOCK_BYTES, offset, offset)])
        reader.turn()
        at_most = max(at_most, Held.now())
        reader.transport.cancel(handle)
        reader.turn_until(lambda: handle in reader.ended)  # noqa: B023
        # The kernel lists a thread for a short time after the thread can be joined.
        reader.turn_until(lambda: Held.now().is_within(before))  # noqa: B023
        before = before if number else Held.now()  # resources opened only once are open now
    reader.transport.close()
    process.kill()
    process.join(DEADLINE_S)
    pipe.close()
    is_less_when_closed = Held.now().is_within(Held(before.files - 1, before.threads - 1))
    errors = sorted({str(error) for error in reader.ended.values()})
    return {
        "ended": len(reader.ended),
        "errors": errors,
        "held_more": at_most > before,
        "is_less_when_closed": is_less_when_closed,
    }


def others_go_on() -> dict[str, object]:
    """One producer is silent during a read that is cancelled; another producer answers late."""
    reader, silent, late = Reader(), Producer("silent", 7), Producer("late", 9)
    reader.connect(silent)
    reader.connect(late)
    slow, lost = reader.read(late, 1), reader.read(silent, 0)
    reader.transport.cancel(lost)
    reader.turn_for(LONGER_S)
    ended_early = len(reader.ended)
    new = reader.read(late, 2)
    reader.connect(silent)  # immediately, without waiting for the first connection to end
    reader.turn_until(lambda: {slow, lost, new} <= set(reader.ended), late)
    told = [{slow: "slow", lost: "lost"}[handle] for handle in reader.ended if handle != new]
    reader.transport.close()
    return {
        "ended_early": ended_early,
        "told": told,
        "errors": [reader.ended[each] for each in (slow, new, lost)],
        "brought": reader.numbers(0, 1, 2),
    }


def bounded_generations() -> dict[str, object]:
    """One producer after the other falls silent while another producer is about to answer."""
    reader, late = Reader(), Producer("late", 9)
    reader.connect(late)
    silent, lost, slow, threads = [], [], [], []
    for number in range(8):
        silent.append(Producer(f"silent{number}", 7))
        before = Held.now().threads
        reader.connect(silent[-1])
        slow.append(reader.read(late, number + 1))
        lost.append(reader.read(silent[-1], 0))
        reader.transport.cancel(lost[-1])
        reader.turn_for(LONGER_S)
        threads.append(Held.now().threads - before)
    early = len(reader.ended)
    reader.turn_until(lambda: len(reader.ended) == len(lost) + len(slow), late)
    reader.transport.close()
    errors = [sorted({str(reader.ended[each]) for each in group}) for group in (slow, lost)]
    return {
        "ended_early": early,
        "errors": errors,
        "more_threads": threads,
        "brought": reader.numbers(*range(9)),
    }


def _memory(number: int) -> tuple[npt.NDArray[np.uint8], list[Region]]:
    memory = np.full(BLOCKS * BLOCK_BYTES, number, np.uint8)
    return memory, [Region("kv", memory.ctypes.data, BLOCK_BYTES, BLOCK_BYTES, BLOCKS)]


SCENARIOS = {each.__name__: each for each in (many_disposals, others_go_on, bounded_generations)}

if __name__ == "__main__":
    print(json.dumps(SCENARIOS[sys.argv[1]]()))
