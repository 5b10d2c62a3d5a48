"""Transfers that arrive in this process beside whatever else it does: a thread that reads from a producer as a transfer worker's thread
does.

The thread owns the transports. It is told a pace by its inbox, and tells how long each transfer took by its outbox.
"""

import queue
import threading
import time
from enum import Enum

from kvferry.bench.transfer_memory import MemoryAllocator
from kvferry.bench.transfer_moves import Move
from kvferry.bench.transfer_sides import BenchConsumer, ProducerInfo, Shape
from kvferry.errors import KVFerryError

__all__ = ["BackgroundReader", "Pace"]

START_S = 60.0
END_S = 30.0


class Pace(Enum):
    """When the next transfer begins: the value is how many seconds after the one before it did."""

    NONE = None
    EVERY_10_MS = 0.01
    WITHOUT_PAUSE = 0.0

    @property
    def label(self) -> str:
        return self.name.lower().replace("_", " ")


class BackgroundReader:
    """`start` it, `close` it."""

    def __init__(self, allocator: MemoryAllocator, shape: Shape, producer: ProducerInfo, transport: str, move: Move) -> None:
        self._allocator = allocator
        self._shape = shape
        self._producer = producer
        self._transport = transport
        self._move = move
        self._inbox: queue.SimpleQueue[Pace | None] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[float | KVFerryError] = queue.SimpleQueue()
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvferry-arrivals")

    def start(self) -> None:
        """Until the first transfer has arrived, and was seen to be right."""
        self._thread.start()
        if not self._is_ready.wait(START_S):
            raise KVFerryError(f"no transfer over {self._transport} arrived within {START_S:.0f} s; is the machine overloaded?")
        self.take_durations()

    def set_pace(self, pace: Pace) -> None:
        self._inbox.put(pace)

    def take_durations(self) -> list[float]:
        """Seconds of each transfer since the last call. KVFerryError when one has failed."""
        found: list[float] = []
        while not self._outbox.empty():
            message = self._outbox.get()
            if isinstance(message, KVFerryError):
                raise message
            found.append(message)
        return found

    def close(self) -> None:
        """Whatever is under way is waited for."""
        self._inbox.put(None)
        if self._thread.ident is not None:
            self._thread.join(END_S)

    def _run(self) -> None:
        try:
            with BenchConsumer.connected(self._shape, self._producer, allocator=self._allocator, only=self._transport) as consumer:
                if not consumer.transports:
                    raise KVFerryError(f"there is no transport {self._transport} for this memory here; name another with --transport")
                consumer.prepare(self._move)
                consumer.read(self._transport)
                consumer.check(self._move)
                self._is_ready.set()
                self._read_on(consumer)
        except Exception as error:  # the top of a thread: whoever decodes hears of it
            self._outbox.put(
                error if isinstance(error, KVFerryError) else KVFerryError(f"transfers over {self._transport} ended ({error!r})")
            )
            self._is_ready.set()

    def _read_on(self, consumer: BenchConsumer) -> None:
        pace, began = Pace.NONE, 0.0
        while True:
            try:
                wait_s = None if pace.value is None else max(0.0, began + pace.value - time.monotonic())
                message = self._inbox.get(timeout=wait_s)
            except queue.Empty:
                began = time.monotonic()
                consumer.read(self._transport)
                self._outbox.put(time.monotonic() - began)
                continue
            if message is None:
                return
            pace = message
