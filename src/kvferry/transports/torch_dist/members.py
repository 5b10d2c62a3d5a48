"""The two members of a process group, each a thread: `DistLink` starts transfers, `ServedPeer`
answers them.

A link dials its peer, and moves the peer's transfers batch by batch, in turns. A transfer that was
cancelled ends at once, or as soon as the copy that touches its local memory is done: its later
bytes stay in a staging buffer. A served peer that does not prove within seconds that it knows the
offer's token is disconnected. Its requests must lie in registered memory. Bytes that it writes wait
in a staging buffer until their tag is verified, and are copied to the cache only if their write
grant is still active then.
"""

import logging
import socket
import threading
from contextlib import closing
from dataclasses import dataclass, field
from queue import SimpleQueue

import numpy as np

from kvferry.errors import KVFerryError, RemoteProtocolError
from kvferry.transports.base import Operation
from kvferry.transports.copy.segments import Descriptors
from kvferry.transports.linked import BatchedTransfer, Link
from kvferry.transports.tcp import wire
from kvferry.transports.torch_dist.channel import Channel, DistOffer
from kvferry.transports.torch_dist.group import Backend, Member, PairGroup
from kvferry.transports.torch_dist.staging import StagingPool
from kvferry.transports.write_grants import WriteGrants, grant_not_active
from kvferry.types import PeerId, Region

_log = logging.getLogger(__name__)


class GroupThread(threading.Thread):
    """One member of a group, with the channel beside it."""

    def __init__(self, me: Member, pool: StagingPool, num_channels: int) -> None:
        super().__init__(name="kvferry-dist", daemon=True)
        self.failure: str | None = None
        """Why the thread has ended, if not by `close`."""
        self.is_closed = False
        self._me = me
        self._pool = pool
        self._num_channels = num_channels
        self._channel: Channel | None = None

    def close(self) -> None:
        """End the thread as soon as it notices. Idempotent."""
        self.is_closed = True
        if self._channel is not None:
            self._channel.shut()

    # -- on the thread --

    def run(self) -> None:
        try:
            with closing(self._connected()) as channel:
                # In this order: either this thread or that of `close` sees what the other did.
                self._channel = channel
                if not self.is_closed:
                    self._meet(channel)
        except (KVFerryError, OSError) as error:
            _log.debug("dist transport: a peer was disconnected: %s", error)
            self.failure = str(error)
        except Exception as error:  # top of the thread: the threads of other peers go on
            _log.exception("dist transport: an internal error has ended the thread of a peer")
            self.failure = f"{type(error).__name__}: {error}"

    def _meet(self, channel: Channel) -> None:
        group = PairGroup.meet(channel, self._agree(channel), self._me, self._num_channels)
        try:
            self._take_part(channel, group)
        finally:
            channel.close()
            group.abort()

    def _connected(self) -> Channel:
        raise NotImplementedError

    def _agree(self, channel: Channel) -> Backend:
        """Prove that both sides know the token; the dialler chooses the backend."""
        raise NotImplementedError

    def _take_part(self, channel: Channel, group: PairGroup) -> None:
        """Move bytes until one side leaves."""
        raise NotImplementedError


@dataclass(slots=True, eq=False)
class DistTransfer(BatchedTransfer["DistLink", Descriptors]):
    """One read or write. Its owner may stop it at any time, without waiting."""

    is_done: bool = False
    """Every batch has moved."""
    copying: threading.Lock = field(default_factory=threading.Lock)
    """The link holds it while it copies, which it does only if `error` is None then."""

    @property
    def has_ended(self) -> bool:
        return (self.is_done or self.error is not None) and not self.copying.locked()


class DistLink(GroupThread, Link):
    """The member that dials."""

    def __init__(
        self,
        peer: PeerId,
        regions: tuple[Region, ...],
        offer: DistOffer,
        backend: Backend,
        pool: StagingPool,
        num_channels: int,
    ) -> None:
        Link.__init__(self, peer, regions)
        GroupThread.__init__(self, Member.DIALLER, pool, num_channels)
        self._offer = offer
        self._backend = backend
        self.waiting: SimpleQueue[DistTransfer | None] = SimpleQueue()
        """The transfers in the order of their turns; None ends the thread."""

    def problem(self) -> str | None:
        if self.failure is None:
            return None
        return f"{self.peer} at {self._offer.host}:{self._offer.port} over dist: {self.failure}"

    def close(self) -> None:
        super().close()
        self.waiting.put(None)

    def _connected(self) -> Channel:
        self._pool.enter_device()
        return Channel.dial(self._offer)

    def _agree(self, channel: Channel) -> Backend:
        channel.send(bytes([self._backend]))
        return self._backend

    def _take_part(self, channel: Channel, group: PairGroup) -> None:
        while (transfer := self.waiting.get()) is not None:
            batch = transfer.next_batch() if transfer.error is None else None
            if batch is None:
                transfer.is_done = True
            else:
                self._move(batch, transfer, channel, group)
                self.waiting.put(transfer)

    def _move(
        self, batch: Descriptors, transfer: DistTransfer, channel: Channel, group: PairGroup
    ) -> None:
        rows = np.stack((batch.remote, batch.size_bytes), axis=1).astype("<i8")
        request = wire.pack_header(transfer.operation, rows, transfer.grant_id), rows.tobytes()
        # The buffer is taken before the request is sent: so a producer never waits for the buffers
        # of the peers that it serves, and buffers cannot be waited for in a circle.
        with self._pool.buffer() as staging:
            if transfer.operation is Operation.READ:
                channel.send(*request)
                channel.receive_reply()
                staging.receive(channel, group, batch.total_bytes)
                with transfer.copying:
                    if transfer.error is None:
                        staging.scatter(batch.local, batch.size_bytes)
            else:
                with transfer.copying:
                    if transfer.error is None:
                        staging.gather(batch.local, batch.size_bytes)
                if transfer.error is not None:
                    return
                channel.send(*request)
                why = channel.receive_reply()
                if not why:
                    staging.send(channel, group, batch.total_bytes)
                    why = channel.receive_reply()
                if why:
                    transfer.keeps_link = True
                    transfer.stop(f"{self.peer} refused a transfer: {why}")
        transfer.count(batch)


class ServedPeer(GroupThread):
    """The member that was dialled."""

    def __init__(
        self,
        connection: socket.socket,
        token: bytes,
        ranges: wire.Ranges,
        write_grants: WriteGrants,
        pool: StagingPool,
        num_channels: int,
    ) -> None:
        super().__init__(Member.PRODUCER, pool, num_channels)
        self.is_known = False
        """Whether the peer has proved that it knows the token."""
        self._channel: Channel = Channel(connection)
        self._token = token
        self._ranges = ranges
        self._write_grants = write_grants

    def _connected(self) -> Channel:
        return self._channel

    def _agree(self, channel: Channel) -> Backend:
        channel.authenticate_client(self._token)
        self.is_known = True
        self._pool.enter_device()
        asked = channel.receive(1)[0]
        if asked not in list(Backend):
            raise RemoteProtocolError(f"the peer asks for backend {asked}")
        return Backend(asked)

    def _take_part(self, channel: Channel, group: PairGroup) -> None:
        try:
            while (header := channel.receive_next(wire.HEADER_BYTES)) is not None:
                self._serve(wire.unpack_header(header), channel, group)
        except RemoteProtocolError as error:
            channel.send(wire.pack_reply(str(error)))
            raise

    def _serve(self, request: wire.Header, channel: Channel, group: PairGroup) -> None:
        received = channel.receive(request.num_descriptors * 16)
        rows = np.frombuffer(received, "<i8").reshape(-1, 2).astype(np.int64)
        self._ranges.check(rows, request.total_bytes)
        addresses, sizes = rows[:, 0], rows[:, 1]
        if request.operation is Operation.READ:
            with self._pool.buffer() as staging:
                staging.gather(addresses, sizes)
                channel.send(wire.pack_reply())
                staging.send(channel, group, request.total_bytes)
            return
        why = self._write_grants.refusal(request.grant_id, addresses, sizes)
        if not why:
            with self._pool.buffer() as staging:
                channel.send(wire.pack_reply())
                staging.receive(channel, group, request.total_bytes)
                with self._write_grants.receiving(request.grant_id) as is_active:
                    if is_active:
                        staging.scatter(addresses, sizes)
                    else:
                        why = grant_not_active(request.grant_id)
        channel.send(wire.pack_reply(why, wire.ReplyStatus.NOT_GRANTED))
