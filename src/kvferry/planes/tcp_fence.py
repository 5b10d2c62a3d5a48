"""What a `tcp` transport has lent, and which connections are receiving into it.

The transport's owner lends and takes back; the loop's thread admits writes and is the only one that receives. A number that is taken back
while something is received under it has ended once that thread has turned those connections away.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial

from kvferry.planes.lending import WriteGrantTable, grant_not_active, write_outside_grant
from kvferry.planes.tcp_loop import SocketLoop, TcpConnection
from kvferry.planes.tcp_wire import Rows
from kvferry.ports.data import Completion, Handle
from kvferry.types import Region

__all__ = ["TcpWriteGrants", "WriterConnection"]


class WriterConnection(TcpConnection):
    """A connection on which a peer writes."""

    def reject(self, why: str) -> None:
        """Tell the peer, and let whatever else it sends land nowhere."""
        raise NotImplementedError


class TcpWriteGrants:
    def __init__(self, loop: SocketLoop, regions: tuple[Region, ...], ended: Callable[[Completion], None]) -> None:
        """`ended` may be called by either thread."""
        self._loop = loop
        self._ended = ended
        self._lock = threading.Lock()
        """For what both threads use: these two."""
        self._granted = WriteGrantTable(regions)
        self._receiving: dict[WriterConnection, int] = {}

    def grant_writes(self, grant_id: int, blocks: Sequence[Sequence[int]]) -> None:
        with self._lock:
            self._granted.grant_writes(grant_id, blocks)

    def revoke_writes(self, grant_id: int, handle: Handle) -> None:
        with self._lock:
            self._granted.remove(grant_id)
            is_received = grant_id in self._receiving.values()
        if is_received:
            self._loop.call(partial(self._reject_writers, grant_id, handle))
        else:
            self._ended(_completion(handle))

    # -- on the loop's thread -----------------------------------------------------------------------------------------------

    def admit(self, writer: WriterConnection, grant_id: int, rows: Rows) -> str:
        """Why a write may not be received; empty when it may: from now on, and until `release`, it is under way."""
        with self._lock:
            granted = self._granted.get(grant_id)
        if granted is not None and not granted.covers(rows[:, 0], rows[:, 1]):
            return write_outside_grant(grant_id)
        with self._lock:
            if granted is None or self._granted.get(grant_id) is not granted:
                return grant_not_active(grant_id)
            self._receiving[writer] = grant_id
        return ""

    def release(self, writer: WriterConnection) -> None:
        """Nothing more is received there, or its connection is closed."""
        with self._lock:
            self._receiving.pop(writer, None)

    def _reject_writers(self, grant_id: int, handle: Handle) -> None:
        with self._lock:
            writers = [writer for writer, under in self._receiving.items() if under == grant_id]
        for writer in writers:
            writer.reject(grant_not_active(grant_id))
            self.release(writer)
            self._loop.update(writer)
        self._ended(_completion(handle))


def _completion(handle: Handle) -> Completion:
    return Completion(handle, None, 0, 0, 0.0, 0.0)
