"""The part of a transfer worker that speaks the dialect of vLLM's own NixlConnector.

Exists only if `interop` is set. As a consumer it reads the blocks that a stock producer holds; as a
producer it takes the notifications of stock consumers, which end or renew our leases. It has a NIXL
agent of its own, so stock peers reach nothing that kvferry's peers use.

Owned by the transfer worker's thread; no call waits. Every wait for a peer has a deadline. See
docs/decisions/059-interop.md.
"""

import logging
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvferry.errors import KVFerryError, RemoteProtocolError, TransportError
from kvferry.events import (
    BytesMoved,
    Event,
    HandshakeFailed,
    MessageDropped,
    PeerConnected,
    TransferFailed,
    TransferFinished,
)
from kvferry.protocol.producer import Producer
from kvferry.protocol.stock_dialect import (
    QUESTION,
    ReadsCompleted,
    StockIdentity,
    StockSource,
    block_segments,
    completion_note,
    decode_payload,
    heartbeat_notes,
    read_note,
    remote_regions,
    trusted_until,
)
from kvferry.transports.base import Completion, Handle, Segments
from kvferry.types import Address, EngineId, Epoch, PeerId, Region, RequestId
from kvferry.worker.commands import AbortLoad, PrepareStockLoad, SkipLoad, StartLoad, WorkerCommand

POLL_S = 0.01
"""How often stock peers are polled while one may be connecting, reading or notifying."""
SETTLE_S = 2.0
"""How long the transport is polled after a notification, so that NIXL sends it."""
RETRY_S = 1.0
"""How long a peer whose handshake failed is not asked again."""
LINGER_S = 1.0
"""How long a lease outlives the notification that its blocks were read.

A stock consumer reads the blocks once for each of the n choices of a request, and notifies after
each read; the producer does not know n. The notification may also overtake the grant of the lease.
"""
MAX_NOTES_PER_TICK = 64
"""Notifications that are handled in one tick, so that a flood of them does not stop our own peers.
"""
MAX_NOTES = 1024
"""Notifications that wait for a later tick; beyond this the oldest are dropped."""
MAX_COMPLETED = 10_000
"""Notifications that are remembered; beyond this the oldest are dropped, and their leases expire.
"""

_PeerKey = tuple[EngineId, Address]
"""Unsigned parameters name a peer, so an engine that they name at a wrong address is another peer
than the same engine at the right one.
"""

_log = logging.getLogger(__name__)


class NotifyingTransport(Protocol):
    """The NIXL transport, as far as stock peers need it."""

    def connect_unnamed(self, peer: PeerId, metadata: bytes, regions: Sequence[Region]) -> None: ...
    def disconnect(self, peer: PeerId) -> None: ...
    def is_connected(self, peer: PeerId) -> bool: ...
    def read(self, peer: PeerId, segments: Sequence[Segments]) -> Handle: ...
    def cancel(self, handle: Handle) -> None: ...
    def notify(self, peer: PeerId, note: bytes) -> None: ...
    def take_notes(self) -> list[bytes]: ...
    def poll_posted(self) -> list[Completion]: ...
    def poll_interval_s(self) -> float | None: ...
    def close(self) -> None: ...


class StockQuestions(Protocol):
    """Asks the side channels of stock producers."""

    def ask(self, address: Address, question: bytes) -> None: ...
    def poll(self) -> list[tuple[Address, bytes]]: ...
    def forget(self, address: Address) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StockSettings:
    """Settings of the dialect. `lease_s` is the lease of the stock producers."""

    identity: StockIdentity
    regions: tuple[Region, ...]
    lease_s: float
    handshake_timeout_s: float
    read_timeout_s: float
    queue_timeout_s: float
    step_timeout_s: float


@dataclass(slots=True)
class _Load:
    """One request's KV at a stock producer."""

    source: StockSource
    trusted_until: float
    """When the producer may free the blocks, whatever heartbeats it was sent."""
    give_up_at: float
    """When the request has waited too long: for the engine's blocks before the read is started, for
    the read afterwards.
    """
    pairs: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """The local and the remote blocks of the read; None until the engine has allocated blocks."""
    handle: Handle | None = None
    error: str = ""
    """Why the read failed; the transport may still write until it reports the end of the read."""


@dataclass(slots=True)
class _StockPeer:
    """One stock producer: being asked, connected, or failed."""

    asked_at: float
    is_connected: bool = False
    error: str = ""
    regions: tuple[Region, ...] = ()
    beat_at: float = -math.inf
    owed: list[RequestId] = field(default_factory=list)
    """Requests whose blocks the producer may free, and has not been notified of."""


class StockDialect:
    """Loads from stock producers, and the notifications of stock consumers."""

    def __init__(
        self,
        settings: StockSettings,
        transport: NotifyingTransport,
        questions: StockQuestions,
        clock: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._settings = settings
        self._transport = transport
        self._questions = questions
        self._loads: dict[RequestId, _Load] = {}
        self._reads: dict[Handle, RequestId] = {}
        self._peers: dict[_PeerKey, _StockPeer] = {}
        self._events: list[Event] = []
        self._settled_at = 0.0
        self._notes: deque[bytes] = deque(maxlen=MAX_NOTES)
        self._num_completed: Counter[RequestId] = Counter()
        """How many ranks of a consumer have read the blocks of a request, if others have not."""
        self._completed: OrderedDict[RequestId, float] = OrderedDict()
        """Requests whose blocks a consumer has read, and when, in the order of time."""

    @property
    def num_loads(self) -> int:
        return len(self._loads)

    @property
    def num_reads(self) -> int:
        return len(self._reads)

    def idle_s(self, now: float, has_leases: bool) -> float:
        """How long the transfer worker may sleep as far as stock peers are concerned."""
        if self._notes:
            return 0.0
        interval = self._transport.poll_interval_s()
        is_waiting = bool(self._loads or self._completed) or now < self._settled_at or has_leases
        is_waiting = is_waiting or any(peer.owed for peer in self._peers.values())
        return min(math.inf if interval is None else interval, POLL_S if is_waiting else math.inf)

    def close(self) -> None:
        self._questions.close()
        self._transport.close()

    # -- producer --

    def serve(self, producer: Producer, now: float) -> None:
        """End and renew leases as stock consumers ask."""
        self._notes += self._transport.take_notes()
        dropped = []
        for _ in range(min(MAX_NOTES_PER_TICK, len(self._notes))):
            try:
                message = read_note(self._notes.popleft())
            except RemoteProtocolError as error:
                dropped.append(str(error))
                continue
            if isinstance(message, ReadsCompleted):
                self._note_completed(message, now)
            else:
                producer.renew(message.requests, now)
        if dropped:
            self._events.append(MessageDropped(f"{dropped[0]} ({len(dropped)} in this tick)"))
        while self._completed and next(iter(self._completed.values())) + LINGER_S <= now:
            request, _ = self._completed.popitem(last=False)
            producer.abandon(request)

    def _note_completed(self, message: ReadsCompleted, now: float) -> None:
        self._num_completed[message.request] += 1
        if self._num_completed[message.request] >= message.num_ranks:
            del self._num_completed[message.request]
            self._completed.setdefault(message.request, now)
        for table in (self._num_completed, self._completed):
            while len(table) > MAX_COMPLETED:
                del table[next(iter(table))]

    # -- consumer --

    def execute(self, command: WorkerCommand, now: float) -> bool:
        """Carry out a command about a load from a stock producer; False if it is about another."""
        match command:
            case PrepareStockLoad(request) if request in self._loads:
                pass  # as for our own loads: a request that is known already is ignored
            case PrepareStockLoad(request, source, arrived_at):
                self._prepare(request, source, min(arrived_at, now), now)
            case StartLoad(request) if request in self._loads:
                self._start(request, command, now)
            case SkipLoad(request) if request in self._loads:
                # A load that has blocks ends with its read.
                if self._loads[request].pairs is None:
                    self._finish(request)
            case AbortLoad(request, reason) if request in self._loads:
                self._abort(request, reason)
            case _:
                return False
        return True

    def advance(self, now: float, engine_seen_at: float) -> list[Event]:
        """Make progress with every peer and load, and return what has happened."""
        for address, reply in self._questions.poll():
            self._take_reply(address, reply, now)
        for key, peer in self._peers.items():
            if not peer.is_connected and not peer.error:
                if now > peer.asked_at + self._settings.handshake_timeout_s:
                    self._fail_peer(key, "the side channel did not answer", now)
            elif peer.is_connected and not self._transport.is_connected(_peer_id(key)):
                self._fail_peer(key, "the connection was lost", now)
        for request in list(self._loads):
            self._advance_load(request, now)
        for completion in self._transport.poll_posted():
            self._take_completion(completion)
        if now < engine_seen_at + self._settings.step_timeout_s:
            self._send_heartbeats(now)
        self._send_completions(now)
        events, self._events = self._events, []
        return events

    def _prepare(
        self, request: RequestId, source: StockSource, arrived_at: float, now: float
    ) -> None:
        key = _key(source)
        peer = self._peers.get(key)
        is_usable = peer is not None and (not peer.error or now < peer.asked_at + RETRY_S)
        if not is_usable:
            self._drop_idle_peers(source.address)
            self._peers[key] = _StockPeer(now)
            try:
                self._questions.ask(source.address, QUESTION)
            except Exception as error:  # boundary for one peer: the process may lack sockets
                self._fail_peer(key, _described(error), now)
        self._loads[request] = _Load(
            source,
            trusted_until(self._settings.lease_s, arrived_at),
            now + self._settings.queue_timeout_s,
        )

    def _start(self, request: RequestId, command: StartLoad, now: float) -> None:
        load, block_size = self._loads[request], self._settings.identity.block_size
        if load.pairs is not None:
            # The read fills other blocks than these, so its end is a failure for both requests.
            load.error = load.error or "another request of the same id is still being read"
            return
        # An engine counts the tokens that it has in whole blocks.
        wanted = slice(command.first_token // block_size, -(-command.end_token // block_size))
        load.pairs = command.blocks[0][wanted], load.source.block_ids[wanted]
        load.give_up_at = now + self._settings.read_timeout_s
        if len(load.pairs[0]) != len(load.pairs[1]):
            load.error = "the engine wants tokens that the prefill side does not hold"

    def _abort(self, request: RequestId, reason: str) -> None:
        load = self._loads[request]
        load.error = load.error or reason
        if load.handle is not None:
            self._transport.cancel(load.handle)
        else:
            self._end_read(request)

    def _advance_load(self, request: RequestId, now: float) -> None:
        load = self._loads[request]
        peer = self._peers[_key(load.source)]
        if load.pairs is None:
            return
        if not load.error and now > load.give_up_at:
            load.error = f"the read took longer than {self._settings.read_timeout_s:g} s"
            if load.handle is not None:
                self._transport.cancel(load.handle)
        if load.handle is not None:
            return
        if not load.error:
            load.error = peer.error or self._expired(load, now)
        if not load.error and peer.is_connected:
            self._post(request, load, peer)
        if load.error:
            self._end_read(request)

    def _post(self, request: RequestId, load: _Load, peer: _StockPeer) -> None:
        assert load.pairs is not None
        try:
            segments = block_segments(self._settings.regions, peer.regions, *load.pairs)
            load.handle = self._transport.read(_peer_id(_key(load.source)), segments)
            self._reads[load.handle] = request
        except Exception as error:  # boundary for one load: NIXL gets the peer's numbers
            load.error = _described(error)

    def _take_completion(self, completion: Completion) -> None:
        request = self._reads.pop(completion.handle, None)
        if request is None:  # `read` raised an error after it had queued the transfer
            return
        load = self._loads[request]
        self._events.append(
            BytesMoved(
                "nixl",
                completion.total_bytes,
                completion.segments,
                completion.segments,
                completion.post_s,
                completion.transfer_s,
                completion.ok,
                request,
            )
        )
        # Judged at the present time, because the poll itself may have copied for a while.
        load.error = load.error or completion.error or self._expired(load, self._clock())
        self._end_read(request)

    def _expired(self, load: _Load, now: float) -> str:
        """Why the producer may have freed the blocks already; empty if it cannot have."""
        if now < load.trusted_until:
            return ""
        return (
            f"the lease of the prefill side, {self._settings.lease_s:g} s, may have run out before "
            "the read ended, and a stock prefill side cannot confirm that it has not"
        )

    def _end_read(self, request: RequestId) -> None:
        """Report the end of a read, or drop a load that has no blocks yet."""
        load = self._loads[request]
        if load.pairs is not None:
            self._events.append(
                TransferFailed(request, load.error) if load.error else TransferFinished(request)
            )
        self._finish(request)

    def _finish(self, request: RequestId) -> None:
        """Drop a load. The last load of a source lets the producer free the blocks."""
        source = self._loads.pop(request).source
        key, name = _key(source), source.request
        others = (load.source for load in self._loads.values())
        if not any((_key(other), other.request) == (key, name) for other in others):
            self._peers[key].owed.append(name)

    # -- peers --

    def _drop_idle_peers(self, address: Address) -> None:
        """Drop earlier engines at an address, so that there are not more peers than addresses."""
        busy = {_key(load.source) for load in self._loads.values()}
        for key, peer in list(self._peers.items()):
            if key[1] == address and key not in busy and not peer.owed:
                self._transport.disconnect(_peer_id(key))
                del self._peers[key]

    def _take_reply(self, address: Address, reply: bytes, now: float) -> None:
        for key, peer in self._peers.items():
            if key[1] == address and not peer.is_connected and not peer.error:
                try:
                    self._connect(key, peer, reply)
                except Exception as error:  # boundary for one peer: NIXL decodes the peer's bytes
                    self._fail_peer(key, _described(error), now)

    def _connect(self, key: _PeerKey, peer: _StockPeer, reply: bytes) -> None:
        identity, regions = self._settings.identity, self._settings.regions
        engine, _ = key
        metadata = decode_payload(reply, identity, engine)
        peer.regions = remote_regions(metadata, identity, regions)
        self._transport.connect_unnamed(_peer_id(key), metadata.agent_metadata, peer.regions)
        peer.is_connected = True
        self._events.append(PeerConnected(engine, "nixl", "a stock vLLM, allowed by `interop`"))

    def _fail_peer(self, key: _PeerKey, reason: str, now: float) -> None:
        peer, (engine, address) = self._peers[key], key
        others = [each for other, each in self._peers.items() if other[1] == address]
        if all(each is peer or each.is_connected or each.error for each in others):
            self._questions.forget(address)
        self._transport.disconnect(_peer_id(key))
        peer.is_connected, peer.error, peer.asked_at = False, reason, now
        if peer.owed:
            _log.info("stock peer not notified peer=%s requests=%d", engine, len(peer.owed))
        peer.owed.clear()
        self._events.append(HandshakeFailed(engine, reason))

    def _send_heartbeats(self, now: float) -> None:
        for key, peer in self._peers.items():
            if not peer.is_connected or now < peer.beat_at + self._settings.lease_s / 6:
                continue
            requests = {
                load.source.request
                for load in self._loads.values()
                if _key(load.source) == key and now < load.give_up_at
            }
            if requests:
                peer.beat_at = now
                self._notify(key, heartbeat_notes(sorted(requests)), now)

    def _send_completions(self, now: float) -> None:
        for key, peer in self._peers.items():
            if peer.owed and peer.is_connected:
                notes = [completion_note(request) for request in peer.owed]
                peer.owed.clear()
                self._notify(key, notes, now)
            elif peer.owed and peer.error:
                peer.owed.clear()

    def _notify(self, key: _PeerKey, notes: Sequence[bytes], now: float) -> None:
        self._settled_at = now + SETTLE_S
        try:
            for note in notes:
                self._transport.notify(_peer_id(key), note)
        except TransportError as error:
            self._fail_peer(key, str(error), now)


def _key(source: StockSource) -> _PeerKey:
    return source.engine, source.address


def _peer_id(key: _PeerKey) -> PeerId:
    engine, address = key
    return PeerId(engine, Epoch(f"stock {address}"), 0)


def _described(error: Exception) -> str:
    return str(error) if isinstance(error, KVFerryError) else f"{type(error).__name__}: {error}"
