"""What a `tcp` plane has lent, and which connections are receiving into it.

The plane's owner lends and takes back; the loop's thread admits writes and is the only one that receives. A number that is taken back while
something is received under it has ended once that thread has turned those connections away.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial

from kvferry.planes.lending import LentTable, leaves_lent, not_lent
from kvferry.planes.tcp_loop import Connection, Loop
from kvferry.planes.tcp_wire import Rows
from kvferry.ports.data import Completion, Handle
from kvferry.types import Region

__all__ = ["WriteFence", "Writer"]


class Writer(Connection):
    """A connection on which a peer writes."""

    def turn_away(self, why: str) -> None:
        """Tell the peer, and let whatever else it sends land nowhere."""
        raise NotImplementedError


class WriteFence:
    def __init__(self, loop: Loop, regions: tuple[Region, ...], ended: Callable[[Completion], None]) -> None:
        """`ended` may be called by either thread."""
        self._loop = loop
        self._ended = ended
        self._lock = threading.Lock()
        """For what both threads use: these two."""
        self._lent = LentTable(regions)
        self._receiving: dict[Writer, int] = {}

    def lend(self, number: int, blocks: Sequence[Sequence[int]]) -> None:
        with self._lock:
            self._lent.lend(number, blocks)

    def take_back(self, number: int, handle: Handle) -> None:
        with self._lock:
            self._lent.remove(number)
            is_received = number in self._receiving.values()
        if is_received:
            self._loop.call(partial(self._turn_away, number, handle))
        else:
            self._ended(_completion(handle))

    # -- on the loop's thread -----------------------------------------------------------------------------------------------

    def admit(self, writer: Writer, number: int, rows: Rows) -> str:
        """Why a write may not be received; empty when it may: from now on, and until `release`, it is under way."""
        with self._lock:
            lent = self._lent.get(number)
        if lent is not None and not lent.covers(rows[:, 0], rows[:, 1]):
            return leaves_lent(number)
        with self._lock:
            if lent is None or self._lent.get(number) is not lent:
                return not_lent(number)
            self._receiving[writer] = number
        return ""

    def release(self, writer: Writer) -> None:
        """Nothing more is received there, or its connection is closed."""
        with self._lock:
            self._receiving.pop(writer, None)

    def _turn_away(self, number: int, handle: Handle) -> None:
        with self._lock:
            writers = [writer for writer, under in self._receiving.items() if under == number]
        for writer in writers:
            writer.turn_away(not_lent(number))
            self.release(writer)
            self._loop.update(writer)
        self._ended(_completion(handle))


def _completion(handle: Handle) -> Completion:
    return Completion(handle, None, 0, 0, 0.0, 0.0)
