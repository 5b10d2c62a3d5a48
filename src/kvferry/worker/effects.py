"""Performs the actions of the protocol on transports, block store and control transport, and passes
their ends back to the protocol. Owned by the thread of the transfer worker.
"""

from collections.abc import Sequence
from contextlib import ExitStack

from kvferry.errors import KVFerryError, TransportError
from kvferry.events import BytesMoved, PeerConnected
from kvferry.protocol import messages as codec
from kvferry.protocol.actions import (
    Action,
    CloseConnection,
    ClosePeer,
    CopyToHostBuffer,
    GrantWrites,
    OpenPeer,
    PlaceBlocks,
    Reply,
    RevokeWrites,
    Send,
    StartRead,
    StartWrite,
    StopRead,
    StopWrite,
)
from kvferry.protocol.consumer.consumer import Consumer
from kvferry.protocol.outbox import Outbox
from kvferry.protocol.producer.producer import Producer
from kvferry.transports.base import (
    BlockStore,
    Completion,
    ControlTransport,
    DataTransport,
    Handle,
    StoreHandle,
)


class Effects:
    """The actions of one rank that have not ended, and the transports that perform them."""

    def __init__(
        self,
        transports: Sequence[DataTransport],
        control: ControlTransport,
        store: BlockStore,
        producer: Producer,
        consumer: Consumer,
        outbox: Outbox,
    ) -> None:
        self._transports = {transport.name: transport for transport in transports}
        self._control = control
        self._store = store
        self._producer = producer
        self._consumer = consumer
        self._outbox = outbox
        self._moves: dict[tuple[str, Handle], StartRead | StartWrite | RevokeWrites] = {}
        """The action that each transport handle belongs to, by transport name and handle."""
        self._stored: dict[StoreHandle, PlaceBlocks | CopyToHostBuffer] = {}

    @property
    def num_moves(self) -> int:
        """How many reads, writes and revocations have not ended."""
        return len(self._moves)

    def poll_intervals_s(self, now: float) -> list[float]:
        """How often the block store and the transports want to be polled."""
        intervals = [self._store.poll_interval_s()]
        for transport in self._transports.values():
            intervals.append(transport.poll_interval_s())
            if self._producer.num_readers(transport.name) or self._consumer.may_be_written(
                transport.name
            ):
                intervals.append(self._serving_interval_s(transport, now))
        return [interval for interval in intervals if interval is not None]

    def poll(self, now: float) -> None:
        """Report what the transports and the block store have completed."""
        for transport in self._transports.values():
            for completion in transport.poll():
                self._take_completion(transport.name, completion, now)
        for stored in self._store.poll():
            self._report_end(self._stored.pop(stored.handle), stored.error, now)

    def perform(self, now: float) -> None:
        # Performing an action may produce further actions, so the loop runs until there are none.
        while actions := [*self._consumer.outbox.take_actions(), *self._outbox.take_actions()]:
            for action in actions:
                self._perform_one(action, now)
        self._outbox.events += self._consumer.outbox.take_events()

    def close(self) -> None:
        with ExitStack() as stack:  # every close runs, even after an earlier close has raised
            for close in (
                self._control.close,
                self._store.close,
                *(transport.close for transport in self._transports.values()),
            ):
                stack.callback(close)

    # -- ends --

    def _take_completion(self, transport: str, completion: Completion, now: float) -> None:
        move = self._moves.pop((transport, completion.handle), None)
        if isinstance(move, RevokeWrites):
            self._consumer.writes_revoked(move.request, move.grant_id, now)
            return
        moved, used = completion.total_bytes, completion.segments
        planned = used if move is None else sum(len(part.local_offsets) for part in move.segments)
        request = move.request if isinstance(move, StartRead) else None
        self._outbox.report(
            BytesMoved(
                transport,
                moved,
                used,
                planned,
                completion.post_s,
                completion.transfer_s,
                completion.ok,
                request,
            )
        )
        if move is not None:
            self._report_end(move, completion.error, now)

    def _report_end(
        self,
        action: StartRead | StartWrite | PlaceBlocks | CopyToHostBuffer,
        error: str | None,
        now: float,
    ) -> None:
        match action:
            case StartRead(request, peer):
                self._consumer.read_ended(request, peer, error, now)
            case StartWrite(write):
                self._producer.writers.write_ended(write, error, now)
            case PlaceBlocks(request):
                self._consumer.placed(request, error, now)
            case CopyToHostBuffer():
                self._producer.copied_to_host_buffer(action.copy, error, now)

    def _serving_interval_s(self, transport: DataTransport, now: float) -> float | None:
        """Return how often to poll this transport so that peers can read our memory."""
        interval, expected = transport.serving_interval_s(), self._producer.serving_interval_s(now)
        return interval if interval is None or expected is None else min(interval, expected)

    # -- actions --

    def _perform_one(self, action: Action, now: float) -> None:
        match action:
            case Send(address, message):
                self._send(address, codec.encode(message), now)
            case Reply(route, message):
                self._control.reply(route, codec.encode(message))
            case CloseConnection(address):
                self._control.forget(address)
            case OpenPeer():
                self._open(action, now)
            case ClosePeer(peer, control_address):
                for transport in self._transports.values():
                    transport.disconnect(peer)
                self._control.forget(control_address)
            case StartRead() | StartWrite():
                self._start_move(action, now)
            case StopRead() | StopWrite():
                self._cancel(action)
            case GrantWrites(transport, grant_id, blocks):
                self._transports[transport].grant_writes(grant_id, blocks)
            case RevokeWrites(_, transport, grant_id):
                self._moves[transport, self._transports[transport].revoke_writes(grant_id)] = action
            case PlaceBlocks() | CopyToHostBuffer():
                self._store_blocks(action, now)

    def _send(self, address: str, frame: bytes, now: float) -> None:
        try:
            self._control.send(address, frame)
        except TransportError:
            self._control.forget(address)
            self._consumer.disconnected(address, now)

    def _open(self, action: OpenPeer, now: float) -> None:
        problems = []
        for choice in action.candidates:
            offer = next(o for o in action.offers if o.transport == choice.transport)
            try:
                self._transports[choice.transport].connect(
                    action.peer, offer, action.geometry.regions
                )
            # Boundary for one peer: an offer is decoded by third-party libraries, which may raise
            # any exception.
            except Exception as error:
                problems.append(f"{choice.transport}: {_described(error)}")
                continue
            reason = "; ".join([choice.reason, *problems])
            self._outbox.report(PeerConnected(action.peer.engine, choice.transport, reason))
            self._consumer.peer_opened(action.peer, choice.transport, now)
            return
        self._consumer.peer_unreachable(
            action.peer, f"no transport reaches the producer ({'; '.join(problems)})", now
        )

    def _start_move(self, action: StartRead | StartWrite, now: float) -> None:
        if not action.segments:
            self._report_end(action, None, now)
            return
        transport = self._transports[action.transport]
        try:
            if isinstance(action, StartRead):
                handle = transport.read(action.peer, action.segments)
            else:
                handle = transport.write(action.peer, action.segments, action.grant_id)
        except Exception as error:  # boundary for one transfer: libraries may raise anything
            self._report_end(action, _described(error), now)
            if isinstance(action, StartWrite):
                # The transport has dropped the connection; the next request starts a new handshake.
                self._consumer.peer_unreachable(action.peer, _described(error), now)
            return
        self._moves[action.transport, handle] = action

    def _cancel(self, stop: StopRead | StopWrite) -> None:
        for (name, handle), move in self._moves.items():
            if _is_stopped(move, stop):
                self._transports[name].cancel(handle)

    def _store_blocks(self, action: PlaceBlocks | CopyToHostBuffer, now: float) -> None:
        store = self._store
        try:
            handle = (
                store.place(action.permutations, action.blocks)
                if isinstance(action, PlaceBlocks)
                else store.copy_to_host_buffer(action.blocks)
            )
        except Exception as error:  # boundary for one transfer: libraries may raise anything
            self._report_end(action, _described(error), now)
            return
        self._stored[handle] = action


def _is_stopped(move: StartRead | StartWrite | RevokeWrites, stop: StopRead | StopWrite) -> bool:
    match move, stop:
        case StartRead(request, peer), StopRead():
            return (request, peer) == (stop.request, stop.peer)
        case StartWrite(write), StopWrite():
            return write == stop.write
    return False


def _described(error: Exception) -> str:
    return str(error) if isinstance(error, KVFerryError) else f"{type(error).__name__}: {error}"
