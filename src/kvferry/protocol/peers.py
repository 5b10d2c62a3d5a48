"""Producers a consumer knows: being shaken hands with, ready, or known to be out of reach for a
while. Pure.

Handshakes run side by side, each with its own deadline, so a dead peer delays no other. A failed
one is remembered for a growing time (0.5 s to 10 s), in which requests to that engine incarnation
fail at once; a restarted engine is another incarnation and is tried at once. What is asked of the
book once per turn looks only at those it concerns: with 200 ready peers a turn would cost as much
as a read.
"""

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from kvferry.errors import KVFerryError, RemoteProtocolError
from kvferry.protocol.actions import Action, CloseConnection, ClosePeer, OpenPeer, Send
from kvferry.protocol.handshake import candidate_transports, check_reply
from kvferry.protocol.layout import (
    Geometry,
    RankMapping,
    check_geometry,
    geometry_from_layout,
    rank_mappings,
)
from kvferry.protocol.messages import (
    WIRE_VERSION,
    Factor,
    HandshakeRefused,
    HandshakeReply,
    HandshakeRequest,
    OfferInfo,
    RankLayout,
)
from kvferry.types import Address, EngineIncarnation, Epoch, PeerId

__all__ = ["UNKNOWN_EPOCH", "LostPeer", "Peer", "PeerSettings", "PeerTable", "PeerUser"]

FIRST_BACKOFF_S = 0.5
LAST_BACKOFF_S = 10.0
MAX_REJECTIONS = 1000
UNKNOWN_EPOCH = Epoch("")
"""Of an engine that is known by its address only. Its first answer to the handshake tells the true
one.
"""


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """What we are and what we accept in a peer."""

    factors: Mapping[str, Factor] | None
    """None: any model's factors are accepted (`enforce_handshake_compat: false`)."""
    geometry: Geometry
    offers: tuple[OfferInfo, ...]
    pinned_transports: tuple[str, ...]
    handshake_timeout_s: float
    idle_ttl_s: float


@dataclass(slots=True)
class Peer:
    """One engine incarnation, reached on the ranks we visit. Ready once every rank has a
    transport.
    """

    incarnation: EngineIncarnation
    address: str
    tp_size: int
    rank_mappings: dict[int, RankMapping]
    """By rank."""
    deadline: float
    waiting: dict[int, int]
    """Nonce of each open question -> rank."""
    layouts: dict[int, RankLayout] = field(default_factory=dict)
    geometries: dict[int, Geometry] = field(default_factory=dict)
    transports: dict[int, str] = field(default_factory=dict)
    used_at: float = 0.0
    dialled_as: EngineIncarnation | None = None
    """What it was known as before it said which life it is."""

    @property
    def is_ready(self) -> bool:
        return not self.waiting and len(self.transports) == len(self.layouts)

    @property
    def names(self) -> tuple[EngineIncarnation, ...]:
        return (
            (self.incarnation,) if self.dialled_as is None else (self.incarnation, self.dialled_as)
        )

    def peer_id(self, rank: int) -> PeerId:
        return PeerId(self.incarnation.engine, self.incarnation.epoch, rank)

    def control_address(self, rank: int) -> str:
        return self.layouts[rank].control_address


@dataclass(frozen=True, slots=True)
class LostPeer:
    incarnation: EngineIncarnation
    reason: str
    ranks: tuple[int, ...] = ()
    """Those we knew it by."""
    is_over: bool = False
    """Another incarnation of the engine answers in its place: this one has ended."""


@dataclass(slots=True)
class _Rejection:
    reason: str
    until: float
    backoff_s: float


class PeerUser(Protocol):
    """One who uses peers of a book that somebody else keeps."""

    def peer_ready(self, peer: Peer, now: float) -> None: ...

    def peer_lost(self, lost: LostPeer) -> None: ...

    def incarnations(self) -> set[EngineIncarnation]: ...


class PeerTable:
    def __init__(self, settings: PeerSettings, actions: list[Action]) -> None:
        """What is to be done is appended to `actions`, among what others append there, so that the
        order is the true one.
        """
        self._settings = settings
        self._peers: dict[EngineIncarnation, Peer] = {}
        self._unready: dict[EngineIncarnation, Peer] = {}
        self._by_control: dict[str, PeerId] = {}
        self._next_idle_check = math.inf
        self._rejections: dict[EngineIncarnation, _Rejection] = {}
        self._nonce = 0
        self._renamed: list[tuple[EngineIncarnation, EngineIncarnation]] = []
        self._actions = actions

    def __len__(self) -> int:
        return len(self._peers)

    @property
    def geometry(self) -> Geometry:
        """Our own."""
        return self._settings.geometry

    def get(self, incarnation: EngineIncarnation) -> Peer | None:
        return self._peers.get(incarnation)

    def at(self, control_address: str) -> PeerId | None:
        """Whose control channel that is; of several lives at one address, the last to come."""
        return self._by_control.get(control_address)

    def resolve_incarnation(
        self, incarnation: EngineIncarnation, address: Address
    ) -> EngineIncarnation:
        """The same life; for one known by its address only, the one that we have met there."""
        if incarnation.epoch != UNKNOWN_EPOCH:
            return incarnation
        met = (
            peer.incarnation
            for peer in self._peers.values()
            if peer.incarnation.engine == incarnation.engine and peer.address == f"tcp://{address}"
        )
        return next(met, incarnation)

    def take_renamed(self) -> list[tuple[EngineIncarnation, EngineIncarnation]]:
        """Peers that were known by their address only, and the lives they turned out to be, since
        the last call.
        """
        renamed, self._renamed = self._renamed, []
        return renamed

    def rank_at(
        self, incarnation: EngineIncarnation, control_address: str, ranks: Iterable[int]
    ) -> int | None:
        """Which of these ranks of that peer that control channel is, if any."""
        peer = self._peers.get(incarnation)
        return next(
            (
                rank
                for rank in ranks
                if peer is not None and peer.control_address(rank) == control_address
            ),
            None,
        )

    def ensure(
        self, incarnation: EngineIncarnation, address: Address, tp_size: int, now: float
    ) -> Peer | LostPeer:
        """The peer, a producer of that TP, whose handshake starts now if it is new; or why it is
        out of reach for the moment.
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
                ours.tp_rank, ours.tp_size, tp_size, ours.total_kv_heads
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
        self._next_idle_check = min(self._next_idle_check, now + self._settings.idle_ttl_s)
        for rank in planned:
            self._nonce += 1
            peer.waiting[self._nonce] = rank
            self._actions.append(
                Send(peer.address, HandshakeRequest(self._nonce, WIRE_VERSION, rank))
            )
        return peer

    def receive(self, reply: HandshakeReply | HandshakeRefused, now: float) -> LostPeer | None:
        """Take an answer; unknown nonces (late, or not ours) are ignored. A lost peer has been
        forgotten.
        """
        peer = next((p for p in self._unready.values() if reply.nonce in p.waiting), None)
        if peer is None:
            return None
        rank = peer.waiting[reply.nonce]
        if isinstance(reply, HandshakeRefused):
            return self.lose(
                peer.incarnation, f"the producer refused the handshake: {reply.reason}", now
            )
        try:
            if peer.incarnation.epoch == UNKNOWN_EPOCH:
                known = self._rename(peer, reply)
                if known is not peer:
                    known.used_at = now
                    return None
            self._accept(peer, rank, reply)
        except KVFerryError as error:
            is_over = (
                reply.engine == peer.incarnation.engine and reply.epoch != peer.incarnation.epoch
            )
            lost = self.lose(peer.incarnation, str(error), now)
            return lost and replace(lost, is_over=is_over)
        del peer.waiting[reply.nonce]
        if not peer.waiting:
            self._close_unless_shared(peer)
        return None

    def opened(self, peer_id: PeerId, transport: str) -> Peer | None:
        """A transport reaches this rank now. Returns the peer once all its ranks are there."""
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
        """A connection we had dialled is gone: side channel of a handshake, or a peer's control
        channel.
        """
        incarnations = [
            peer.incarnation for peer in self._peers.values() if self._depends_on(peer, address)
        ]
        return [
            lost
            for incarnation in incarnations
            if (lost := self.lose(incarnation, f"the connection to {address} was lost", now))
            is not None
        ]

    def advance(self, now: float) -> list[LostPeer]:
        overdue = [peer.incarnation for peer in self._unready.values() if peer.deadline <= now]
        reason = f"no answer to the handshake within {self._settings.handshake_timeout_s:g} s"
        return [
            lost
            for incarnation in overdue
            if (
                lost := self.lose(
                    incarnation, f"{reason} ({self._peers[incarnation].address})", now
                )
            )
            is not None
        ]

    def evict_idle(self, now: float, busy: Container[EngineIncarnation]) -> None:
        """Forget ready peers that nothing has used for `idle_ttl_s`."""
        ttl = self._settings.idle_ttl_s
        if ttl <= 0 or now < self._next_idle_check:
            return
        for peer in list(self._peers.values()):
            if peer.incarnation in busy or not peer.is_ready:
                peer.used_at = now
            elif peer.used_at + ttl <= now:
                self._forget(peer)
        # Use only makes a peer younger, so nobody is due before the oldest of now.
        self._next_idle_check = min(
            (peer.used_at + ttl for peer in self._peers.values()), default=math.inf
        )

    def lose(self, incarnation: EngineIncarnation, reason: str, now: float) -> LostPeer | None:
        """Forget a peer. One that never became ready is remembered, so that the next requests fail
        at once instead of waiting again; one that was ready is tried anew by the next request, for
        it may only have lost a connection.
        """
        peer = self._peers.get(incarnation)
        if peer is None:
            return None
        self._forget(peer)
        lost = LostPeer(incarnation, reason, tuple(peer.rank_mappings))
        if peer.is_ready:
            return lost
        for name in peer.names:
            earlier = self._rejections.pop(name, None)
            backoff = min(LAST_BACKOFF_S, earlier.backoff_s * 2) if earlier else FIRST_BACKOFF_S
            self._rejections[name] = _Rejection(reason, now + backoff, backoff)
        while len(self._rejections) > MAX_REJECTIONS:
            del self._rejections[next(iter(self._rejections))]
        return lost

    def next_deadline(self) -> float | None:
        return min((peer.deadline for peer in self._unready.values()), default=None)

    def _rename(self, peer: Peer, reply: HandshakeReply) -> Peer:
        """The peer under its true name, or the one that we know by that name already.
        RemoteProtocolError if it is another engine.
        """
        if reply.engine != peer.incarnation.engine or not reply.epoch:
            raise RemoteProtocolError(
                f"engine {reply.engine} answers at this address, the router has named engine "
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

    def _accept(self, peer: Peer, rank: int, reply: HandshakeReply) -> None:
        settings = self._settings
        layout = check_reply(
            reply, settings.factors, peer.incarnation.engine, peer.incarnation.epoch, rank
        )
        geometry = geometry_from_layout(layout)
        if geometry.tp_size != peer.tp_size:
            raise RemoteProtocolError(
                f"rank {rank} is one of {geometry.tp_size}, its engine's tickets say {peer.tp_size}"
            )
        check_geometry(peer.incarnation.engine, settings.geometry, geometry)
        choices = candidate_transports(settings.offers, layout.offers, settings.pinned_transports)
        if not choices:
            raise KVFerryError(_no_transport(settings, layout))
        peer.layouts[rank] = layout
        peer.geometries[rank] = geometry
        self._by_control[layout.control_address] = peer.peer_id(rank)
        self._actions.append(
            OpenPeer(peer.peer_id(rank), geometry, tuple(layout.offers), tuple(choices))
        )

    def _forget(self, peer: Peer) -> None:
        del self._peers[peer.incarnation]
        self._unready.pop(peer.incarnation, None)
        for rank in peer.layouts:
            peer_id, address = peer.peer_id(rank), peer.control_address(rank)
            if self._by_control.get(address) == peer_id:
                del self._by_control[address]
            self._actions.append(ClosePeer(peer_id, address))
        if peer.waiting:
            self._close_unless_shared(peer)

    def _close_unless_shared(self, peer: Peer) -> None:
        if not any(
            p.waiting and p.address == peer.address for p in self._unready.values() if p is not peer
        ):
            self._actions.append(CloseConnection(peer.address))

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
        f"no data transport reaches the producer: ours are {', '.join(ours) or 'none'}, theirs "
        f"{', '.join(theirs) or 'none'}"
    )
