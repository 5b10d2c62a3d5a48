"""Transfers that arrive in this process beside whatever else it does: a thread that reads from a producer as a ferry's thread does.

The thread owns the planes. It is told a pace by its inbox, and tells how long each transfer took by its outbox.
"""

import queue
import threading
import time
from enum import Enum

from kvferry.bench.transfer_memory import Place
from kvferry.bench.transfer_moves import Move
from kvferry.bench.transfer_sides import Consumer, Producer, Shape
from kvferry.errors import KVFerryError

__all__ = ["Arrivals", "Pace"]

START_S = 60.0
END_S = 30.0


class Pace(Enum):
    """When the next transfer begins: the value is how many seconds after the one before it did."""

    NONE = None
    EVERY_10_MS = 0.01
    WITHOUT_PAUSE = 0.0

    @property
    def words(self) -> str:
        return self.name.lower().replace("_", " ")


class Arrivals:
    """`start` it, `close` it."""

    def __init__(self, place: Place, shape: Shape, producer: Producer, plane: str, move: Move) -> None:
        self._place = place
        self._shape = shape
        self._producer = producer
        self._plane = plane
        self._move = move
        self._inbox: queue.SimpleQueue[Pace | None] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[float | KVFerryError] = queue.SimpleQueue()
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvferry-arrivals")

    def start(self) -> None:
        """Until the first transfer has arrived, and was seen to be right."""
        self._thread.start()
        if not self._is_ready.wait(START_S):
            raise KVFerryError(f"no transfer over {self._plane} arrived within {START_S:.0f} s; is the machine overloaded?")
        self.taken()

    def set_pace(self, pace: Pace) -> None:
        self._inbox.put(pace)

    def taken(self) -> list[float]:
        """Seconds of each transfer since the last call. KVFerryError when one has failed."""
        found: list[float] = []
        while not self._outbox.empty():
            word = self._outbox.get()
            if isinstance(word, KVFerryError):
                raise word
            found.append(word)
        return found

    def close(self) -> None:
        """Whatever is under way is waited for."""
        self._inbox.put(None)
        if self._thread.ident is not None:
            self._thread.join(END_S)

    def _run(self) -> None:
        try:
            with Consumer.connected(self._shape, self._producer, place=self._place, only=self._plane) as consumer:
                if not consumer.planes:
                    raise KVFerryError(f"there is no plane {self._plane} for this memory here; name another with --plane")
                consumer.prepare(self._move)
                consumer.read(self._plane)
                consumer.check(self._move)
                self._is_ready.set()
                self._read_on(consumer)
        except Exception as error:  # the top of a thread: whoever decodes hears of it
            self._outbox.put(error if isinstance(error, KVFerryError) else KVFerryError(f"transfers over {self._plane} ended ({error!r})"))
            self._is_ready.set()

    def _read_on(self, consumer: Consumer) -> None:
        pace, began = Pace.NONE, 0.0
        while True:
            try:
                wait_s = None if pace.value is None else max(0.0, began + pace.value - time.monotonic())
                word = self._inbox.get(timeout=wait_s)
            except queue.Empty:
                began = time.monotonic()
                consumer.read(self._plane)
                self._outbox.put(time.monotonic() - began)
                continue
            if word is None:
                return
            pace = word
