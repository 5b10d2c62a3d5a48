"""Peers of a transfer worker: in the handshake, ready, or unreachable for a while.

A peer is one engine incarnation: a producer that we read from, or, in a push by writing, a consumer
that we write to. Handshakes run concurrently, each with its own deadline, so a dead peer delays no
other peer. After a failed handshake, requests to that incarnation fail at once during a growing
backoff (0.5 s to 10 s). A restarted engine is a new incarnation and is tried at once.

Methods that run once per tick examine only the peers concerned: with 200 ready peers, examining
every peer would make a tick as expensive as a read. Pure: the caller passes `now` (local monotonic
seconds).
"""

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from kvferry.errors import IncompatiblePeer, KVFerryError, RemoteProtocolError
from kvferry.protocol.actions import CloseConnection, ClosePeer, OpenPeer, Send
from kvferry.protocol.handshake import candidate_transports, check_reply
from kvferry.protocol.messages import (
    OLDEST_WIRE_VERSION,
    STATES_WIRE_VERSION,
    WIRE_VERSION,
    Factor,
    HandshakeRefused,
    HandshakeReply,
    HandshakeRequest,
    RankLayout,
    TransportOffer,
)
from kvferry.protocol.outbox import Outbox
from kvferry.protocol.planning.geometry import Geometry, check_geometry, geometry_from_layout
from kvferry.protocol.planning.heads import RankMapping, rank_mappings
from kvferry.types import Address, EngineIncarnation, Epoch, PeerId

FIRST_BACKOFF_S = 0.5
LAST_BACKOFF_S = 10.0
MAX_REJECTIONS = 1000
UNKNOWN_EPOCH = Epoch("")
"""Epoch of an engine of which only the address is known. The first handshake reply carries the real
epoch.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSettings:
    """Our own cache and transports, and the requirements for a peer."""

    factors: Mapping[str, Factor] | None
    """Our compatibility factors; None accepts any factors (`enforce_handshake_compat: false`)."""
    geometry: Geometry
    offers: tuple[TransportOffer, ...]
    pinned_transports: tuple[str, ...]
    handshake_timeout_s: float
    engine_ttl_s: float
    """How long a peer stays connected without a request; 0 or less: for ever."""


@dataclass(slots=True)
class Peer:
    """One engine incarnation and its ranks that we attach to.

    The peer is ready when a transport is connected to each of these ranks.
    """

    incarnation: EngineIncarnation
    address: str
    """Address of the peer's side channel."""
    tp_size: int
    rank_mappings: dict[int, RankMapping]
    """Peer rank -> the heads to read from that rank."""
    deadline: float
    """Time at which the handshake fails."""
    waiting: dict[int, HandshakeRequest]
    """The unanswered requests by nonce."""
    layouts: dict[int, RankLayout] = field(default_factory=dict)
    geometries: dict[int, Geometry] = field(default_factory=dict)
    transports: dict[int, str] = field(default_factory=dict)
    used_at: float = 0.0
    dialled_as: EngineIncarnation | None = None
    """The incarnation with UNKNOWN_EPOCH under which the handshake began; None if the epoch was
    known.
    """

    @property
    def is_ready(self) -> bool:
        return not self.waiting and len(self.transports) == len(self.layouts)

    @property
    def names(self) -> tuple[EngineIncarnation, ...]:
        """Every incarnation under which requests may refer to this peer."""
        return (
            (self.incarnation,) if self.dialled_as is None else (self.incarnation, self.dialled_as)
        )

    def peer_id(self, rank: int) -> PeerId:
        return PeerId(self.incarnation.engine, self.incarnation.epoch, rank)

    def control_address(self, rank: int) -> str:
        return self.layouts[rank].control_address


@dataclass(frozen=True, slots=True)
class LostPeer:
    """A peer that is unreachable or was dropped, and the reason."""

    incarnation: EngineIncarnation
    reason: str
    ranks: tuple[int, ...] = ()
    """Ranks of the peer that we attached to, or wanted to attach to."""
    is_over: bool = False
    """Another incarnation of the engine answers at the address, so this incarnation has ended."""
    is_incompatible: bool = False
    """The peer answered, and was refused because its model, cache or version differs."""


@dataclass(slots=True)
class _Rejection:
    """A failed handshake: requests to the incarnation fail at once until `until`."""

    reason: str
    until: float
    backoff_s: float


class PeerUser(Protocol):
    """A component that uses peers of a `PeerTable` owned by another component.

    The owner calls `peer_ready` and `peer_lost`, and evicts no peer in `incarnations`.
    """

    def peer_ready(self, peer: Peer, now: float) -> None: ...

    def peer_lost(self, lost: LostPeer) -> None: ...

    def incarnations(self) -> set[EngineIncarnation]: ...


class PeerTable:
    """All peers of one transfer worker, with handshakes and backoff."""

    def __init__(self, settings: PeerSettings, outbox: Outbox) -> None:
        self._settings = settings
        self._peers: dict[EngineIncarnation, Peer] = {}
        # The peers still in the handshake, apart from the ready ones, so that a tick does not
        # examine the ready peers.
        self._unready: dict[EngineIncarnation, Peer] = {}
        self._by_control: dict[str, PeerId] = {}
        self._next_idle_check = math.inf
        self._rejections: dict[EngineIncarnation, _Rejection] = {}
        self._nonce = 0
        self._renamed: list[tuple[EngineIncarnation, EngineIncarnation]] = []
        self._outbox = outbox

    def __len__(self) -> int:
        return len(self._peers)

    @property
    def geometry(self) -> Geometry:
        """Geometry of our own cache."""
        return self._settings.geometry

    def get(self, incarnation: EngineIncarnation) -> Peer | None:
        return self._peers.get(incarnation)

    def at(self, control_address: str) -> PeerId | None:
        """Return the peer that uses a control address.

        If several incarnations have used the address, return the latest.
        """
        return self._by_control.get(control_address)

    def resolve_incarnation(
        self, incarnation: EngineIncarnation, address: Address
    ) -> EngineIncarnation:
        """Return the incarnation with its epoch, if the epoch can be found out.

        For an engine known only by address, return the incarnation of the peer at that address, if
        there is one. Any other incarnation is returned unchanged.
        """
        if incarnation.epoch != UNKNOWN_EPOCH:
            return incarnation
        met = (
            peer.incarnation
            for peer in self._peers.values()
            if peer.incarnation.engine == incarnation.engine and peer.address == f"tcp://{address}"
        )
        return next(met, incarnation)

    def take_renamed(self) -> list[tuple[EngineIncarnation, EngineIncarnation]]:
        """Return (old, new) for each peer whose epoch has become known since the last call."""
        renamed, self._renamed = self._renamed, []
        return renamed

    def rank_at(
        self, incarnation: EngineIncarnation, control_address: str, ranks: Iterable[int]
    ) -> int | None:
        """Return the rank among `ranks` whose control address this is; None if there is none.

        A rank whose handshake is running again, after the connection was lost, has no address yet.
        """
        peer = self._peers.get(incarnation)
        layouts = {} if peer is None else peer.layouts
        return next(
            (
                rank
                for rank in ranks
                if rank in layouts and layouts[rank].control_address == control_address
            ),
            None,
        )

    def ensure(
        self, incarnation: EngineIncarnation, address: Address, tp_size: int, now: float
    ) -> Peer | LostPeer:
        """Return the peer, and start the handshake if the peer is new.

        Returns LostPeer with the reason while the backoff of a failed handshake lasts.
        """
        peer = self._peers.get(incarnation)
        if peer is not None:
            peer.used_at = now
            return peer
        rejection = self._rejections.get(incarnation)
        if rejection is not None and rejection.until > now:
            return LostPeer(incarnation, rejection.reason)
        ours = self._settings.geometry
        planned = {
            rank_mapping.rank: rank_mapping
            for rank_mapping in rank_mappings(
                ours.tp_rank, ours.tp_size, tp_size, *ours.head_counts
            )
        }
        peer = Peer(
            incarnation,
            f"tcp://{address}",
            tp_size,
            planned,
            now + self._settings.handshake_timeout_s,
            {},
            used_at=now,
        )
        self._peers[incarnation] = self._unready[incarnation] = peer
        self._next_idle_check = min(self._next_idle_check, now + self._settings.engine_ttl_s)
        for rank in planned:
            self._ask(peer, rank, WIRE_VERSION)
        return peer

    def receive(self, reply: HandshakeReply | HandshakeRefused, now: float) -> LostPeer | None:
        """Handle a handshake reply. Unknown nonces (late replies, or not ours) are ignored.

        Returns LostPeer if the reply is a refusal or not acceptable; the table has then dropped the
        peer.
        """
        peer = next((p for p in self._unready.values() if reply.nonce in p.waiting), None)
        if peer is None:
            return None
        request = peer.waiting[reply.nonce]
        if isinstance(reply, HandshakeRefused):
            return self._refused(peer, request, reply.reason, now)
        try:
            if peer.incarnation.epoch == UNKNOWN_EPOCH:
                known = self._rename(peer, reply)
                if known is not peer:
                    # A peer with this epoch exists already: this handshake is not needed.
                    known.used_at = now
                    return None
            self._accept(peer, request, reply)
        except KVFerryError as error:
            is_over = (
                reply.engine == peer.incarnation.engine and reply.epoch != peer.incarnation.epoch
            )
            return replace(
                self._drop(peer, str(error), now),
                is_over=is_over,
                is_incompatible=isinstance(error, IncompatiblePeer),
            )
        del peer.waiting[reply.nonce]
        if not peer.waiting:
            self._close_unless_shared(peer)
        return None

    def opened(self, peer_id: PeerId, transport: str) -> Peer | None:
        """Note that a transport is connected to a rank; return the peer once the peer is ready."""
        peer = self._peers.get(peer_id.incarnation)
        if peer is None:
            return None
        peer.transports[peer_id.tp_rank] = transport
        if not peer.is_ready:
            return None
        self._unready.pop(peer.incarnation, None)
        for name in peer.names:
            self._rejections.pop(name, None)
        return peer

    def disconnected(self, address: str, now: float) -> list[LostPeer]:
        """Drop the peers that depend on a lost outgoing connection and return the dropped peers.

        The connection may be to a side channel, during a handshake, or to a control address.
        """
        peers = [peer for peer in self._peers.values() if self._depends_on(peer, address)]
        return [self._drop(peer, f"the connection to {address} was lost", now) for peer in peers]

    def advance(self, now: float) -> list[LostPeer]:
        """Drop and return the peers whose handshake has timed out."""
        overdue = [peer for peer in self._unready.values() if peer.deadline <= now]
        reason = (
            "the producer did not answer the handshake within "
            f"{self._settings.handshake_timeout_s:g} s"
        )
        return [self._drop(peer, f"{reason} ({peer.address})", now) for peer in overdue]

    def evict_idle(self, now: float, busy: Container[EngineIncarnation]) -> None:
        """Drop ready peers that no request has used for `engine_ttl_s`."""
        ttl = self._settings.engine_ttl_s
        if ttl <= 0 or now < self._next_idle_check:
            return
        for peer in list(self._peers.values()):
            if peer.incarnation in busy or not peer.is_ready:
                peer.used_at = now
            elif peer.used_at + ttl <= now:
                self._forget(peer)
        # `used_at` only grows, so no peer becomes idle before the least recently used one does.
        self._next_idle_check = min(
            (peer.used_at + ttl for peer in self._peers.values()), default=math.inf
        )

    def lose(self, incarnation: EngineIncarnation, reason: str, now: float) -> LostPeer | None:
        """Drop a peer. None if the peer is unknown.

        If the peer never became ready, requests fail at once during the backoff instead of waiting
        for another handshake. If the peer was ready, the next request starts a new handshake at
        once, because the peer may only have lost a connection.
        """
        peer = self._peers.get(incarnation)
        return None if peer is None else self._drop(peer, reason, now)

    def _drop(self, peer: Peer, reason: str, now: float) -> LostPeer:
        self._forget(peer)
        lost = LostPeer(peer.incarnation, reason, tuple(peer.rank_mappings))
        if peer.is_ready:
            return lost
        for name in peer.names:
            earlier = self._rejections.pop(name, None)
            backoff = min(LAST_BACKOFF_S, earlier.backoff_s * 2) if earlier else FIRST_BACKOFF_S
            self._rejections[name] = _Rejection(reason, now + backoff, backoff)
        # Each failure moves its entry to the end (pop, then insert), so the oldest failure is
        # forgotten first.
        while len(self._rejections) > MAX_REJECTIONS:
            del self._rejections[next(iter(self._rejections))]
        return lost

    def next_deadline(self) -> float | None:
        """Return when to call `advance` next; None if no handshake is in progress."""
        return min((peer.deadline for peer in self._unready.values()), default=None)

    def _ask(self, peer: Peer, rank: int, wire_version: int) -> None:
        self._nonce += 1
        request = HandshakeRequest(self._nonce, wire_version, rank)
        peer.waiting[self._nonce] = request
        self._outbox.perform(Send(peer.address, request))

    def _refused(
        self, peer: Peer, request: HandshakeRequest, reason: str, now: float
    ) -> LostPeer | None:
        """Ask with the wire version before, if our cache can be described with it.

        A refusal contains only text, so a refusal for any other reason is asked twice too.
        """
        older = request.wire_version - 1
        if older < (STATES_WIRE_VERSION if self.geometry.has_states else OLDEST_WIRE_VERSION):
            refusal = (
                f"the producer refused the handshake with wire version {request.wire_version}: "
                f"{reason}"
            )
            return replace(self._drop(peer, refusal, now), is_incompatible=True)
        del peer.waiting[request.nonce]
        self._ask(peer, request.tp_rank, older)
        return None

    def _rename(self, peer: Peer, reply: HandshakeReply) -> Peer:
        """Give a peer the epoch from its handshake reply, and return the peer.

        If the table has a peer with that epoch already, drop `peer` and return the existing one.
        Raises RemoteProtocolError if another engine answers at the address.
        """
        if reply.engine != peer.incarnation.engine or not reply.epoch:
            raise RemoteProtocolError(
                f"engine {reply.engine} answers at this address, but the router named engine "
                f"{peer.incarnation.engine}"
            )
        old, new = peer.incarnation, EngineIncarnation(peer.incarnation.engine, Epoch(reply.epoch))
        self._renamed.append((old, new))
        del self._peers[old], self._unready[old]
        known = self._peers.get(new)
        if known is not None:
            self._close_unless_shared(peer)
            return known
        peer.incarnation, peer.dialled_as = new, old
        self._peers[new] = self._unready[new] = peer
        return peer

    def _accept(self, peer: Peer, request: HandshakeRequest, reply: HandshakeReply) -> None:
        """Check the reply of one rank and request the connection to that rank.

        Raises KVFerryError, with the peer unchanged, if the reply is not acceptable.
        """
        settings, rank = self._settings, request.tp_rank
        layout = check_reply(
            reply, request, settings.factors, peer.incarnation.engine, peer.incarnation.epoch
        )
        geometry = geometry_from_layout(layout)
        if geometry.tp_size != peer.tp_size:
            raise RemoteProtocolError(
                f"rank {rank} reports {geometry.tp_size} ranks, but its engine's tickets report "
                f"{peer.tp_size}"
            )
        check_geometry(peer.incarnation.engine, settings.geometry, geometry)
        choices = candidate_transports(settings.offers, layout.offers, settings.pinned_transports)
        if not choices:
            raise KVFerryError(_no_transport(settings, layout))
        peer.layouts[rank] = layout
        peer.geometries[rank] = geometry
        self._by_control[layout.control_address] = peer.peer_id(rank)
        self._outbox.perform(
            OpenPeer(peer.peer_id(rank), geometry, tuple(layout.offers), tuple(choices))
        )

    def _forget(self, peer: Peer) -> None:
        del self._peers[peer.incarnation]
        self._unready.pop(peer.incarnation, None)
        for rank in peer.layouts:
            peer_id, address = peer.peer_id(rank), peer.control_address(rank)
            # A newer incarnation may have taken over the address; its entry must stay.
            if self._by_control.get(address) == peer_id:
                del self._by_control[address]
            self._outbox.perform(ClosePeer(peer_id, address))
        if peer.waiting:
            self._close_unless_shared(peer)

    def _close_unless_shared(self, peer: Peer) -> None:
        """Close the side-channel connection, unless another handshake uses the same address."""
        if not any(
            p.waiting and p.address == peer.address for p in self._unready.values() if p is not peer
        ):
            self._outbox.perform(CloseConnection(peer.address))

    @staticmethod
    def _depends_on(peer: Peer, address: str) -> bool:
        is_asking = bool(peer.waiting) and peer.address == address
        return is_asking or any(
            layout.control_address == address for layout in peer.layouts.values()
        )


def _no_transport(settings: PeerSettings, layout: RankLayout) -> str:
    ours = settings.pinned_transports or tuple(offer.transport for offer in settings.offers)
    theirs = tuple(offer.transport for offer in layout.offers)
    return (
        f"no data transport reaches the producer: this engine has {', '.join(ours) or 'none'}, "
        f"the producer has {', '.join(theirs) or 'none'}"
    )
