"""The side of the `dist` transport that starts transfers: one thread for each connected peer.

The thread dials the peer, makes a process group with it, and moves the peer's transfers batch by
batch, in turns. A transfer that was cancelled ends at once, or as soon as the copy that touches
its local memory is done: its later bytes stay in a staging buffer.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from kvferry.errors import KVFerryError
from kvferry.transports.base import Completion, Operation
from kvferry.transports.copy.segments import Descriptors
from kvferry.transports.linked import BatchedTransfer, Link
from kvferry.transports.tcp import wire
from kvferry.transports.torch_dist.channel import Channel, DistOffer
from kvferry.transports.torch_dist.group import Backend, Member, PairGroup
from kvferry.transports.torch_dist.staging import StagingPool
from kvferry.types import PeerId, Region


@dataclass(slots=True, eq=False)
class DistTransfer(BatchedTransfer["DistLink", Descriptors]):
    """One read or write. The owner of the transport may end it at any time, without waiting; the
    link's thread touches local memory only within `copying`.
    """

    report: Callable[[Completion], None] = field(kw_only=True)
    is_ended: bool = False
    """No further copy starts. The end is reported once no copy is active."""
    _is_copying: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def end(self, error: str | None) -> None:
        """Report the end, once; if a copy is active, the copying thread reports it afterwards."""
        with self._lock:
            if self.is_ended:
                return
            self.is_ended, self.error = True, error
            if self._is_copying:
                return
        self.report(self.completion())

    @contextmanager
    def copying(self) -> Iterator[bool]:
        """Hold back the report of the end while local memory is copied. Yields False if the
        transfer has ended: nothing may be copied then.
        """
        with self._lock:
            may_copy = self._is_copying = not self.is_ended
        try:
            yield may_copy
        finally:
            with self._lock:
                self._is_copying = False
                has_ended_meanwhile = may_copy and self.is_ended
            if has_ended_meanwhile:
                self.report(self.completion())


class DistLink(Link):
    """One peer, and the thread that moves bytes with it."""

    def __init__(
        self,
        peer: PeerId,
        regions: tuple[Region, ...],
        offer: DistOffer,
        backend: Backend,
        pool: StagingPool,
        num_channels: int,
    ) -> None:
        super().__init__(peer, regions)
        self._offer = offer
        self._backend = backend
        self._pool = pool
        self._num_channels = num_channels
        self._changed = threading.Condition()
        """Guards `_transfers`, `_stop_reason` and `_channel`."""
        self._transfers: deque[DistTransfer] = deque()
        self._stop_reason = ""
        self._channel: Channel | None = None
        self._thread = threading.Thread(target=self._run, name="kvferry-dist", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, transfer: DistTransfer) -> None:
        with self._changed:
            reason = self._stop_reason
            self._transfers.append(transfer)
            self._changed.notify()
        if reason:
            transfer.end(reason)

    def stop(self, why: str) -> None:
        """End all transfers, and the thread as soon as it has noticed."""
        with self._changed:
            self._stop_reason = self._stop_reason or why
            transfers = list(self._transfers)
            if self._channel is not None:
                self._channel.shut()
            self._changed.notify()
        for transfer in transfers:
            transfer.end(self._stop_reason)

    @property
    def is_alive(self) -> bool:
        """Whether the thread has not ended yet."""
        return self._thread.is_alive()

    def join(self, deadline: float) -> bool:
        """Wait for the thread until the deadline. Returns whether it has ended."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self.is_alive

    # -- on the link's thread --

    def _run(self) -> None:
        why = "the link has ended"
        try:
            self._move_all()
        except (KVFerryError, OSError) as error:
            why = f"{self.peer} at {self._offer.host}:{self._offer.port} over dist: {error}"
        except Exception as error:  # top of the thread: the transfers must learn of the failure
            why = f"{self.peer} over dist: {type(error).__name__}: {error}"
        self.stop(why)

    def _move_all(self) -> None:
        self._pool.enter_device()
        channel = Channel.dial(self._offer)
        group: PairGroup | None = None
        try:
            with self._changed:
                self._channel = channel
                if self._stop_reason:
                    return
            channel.send(bytes([self._backend]))
            group = PairGroup.meet(channel, self._backend, Member.DIALLER, self._num_channels)
            while (transfer := self._next()) is not None:
                self._move_batch(transfer, channel, group)
                if transfer.is_ended:
                    with self._changed:
                        self._transfers.remove(transfer)
        finally:
            with self._changed:
                self._channel = None
            channel.close()
            if group is not None:
                group.abort()

    def _next(self) -> DistTransfer | None:
        """The transfer whose turn it is; None if the link was stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._transfers or self._stop_reason)
            if self._stop_reason:
                return None
            self._transfers.rotate(-1)
            return self._transfers[-1]

    def _move_batch(self, transfer: DistTransfer, channel: Channel, group: PairGroup) -> None:
        batch = None if transfer.is_ended else transfer.next_batch()
        if batch is None:
            transfer.end(None)
            return
        # The buffer is taken before the request is sent: so a producer never waits for the buffers
        # of the peers that it serves, and buffers cannot be waited for in a circle.
        with self._pool.buffer() as staging:
            request = _request(transfer, batch)
            if transfer.operation is Operation.READ:
                channel.send(*request)
                channel.receive_reply()
                staging.receive(channel, group, batch.total_bytes)
                with transfer.copying() as may_copy:
                    if may_copy:
                        staging.scatter(batch.local, batch.size_bytes)
            else:
                with transfer.copying() as may_copy:
                    if may_copy:
                        staging.gather(batch.local, batch.size_bytes)
                if transfer.is_ended:
                    return
                channel.send(*request)
                why = channel.receive_reply()
                if not why:
                    staging.send(channel, group, batch.total_bytes)
                    why = channel.receive_reply()
                if why:
                    transfer.keeps_link = True
                    transfer.end(f"{self.peer} refused a transfer: {why}")
        transfer.count(batch)


def _request(transfer: DistTransfer, batch: Descriptors) -> tuple[bytes, bytes]:
    rows = np.stack((batch.remote, batch.size_bytes), axis=1).astype("<i8")
    return wire.pack_header(transfer.operation, rows, transfer.grant_id), rows.tobytes()
