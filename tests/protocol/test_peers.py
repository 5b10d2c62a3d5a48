"""Tests that the peer table finds producers by address, and evicts them after they have been idle
for their TTL.
"""

import msgspec

from kvferry.protocol import messages as codec
from kvferry.protocol.actions import ClosePeer, OpenPeer, Send
from kvferry.protocol.messages import (
    WIRE_VERSION,
    HandshakeRefused,
    HandshakeReply,
    HandshakeRequest,
    RankLayout,
    TransportOffer,
)
from kvferry.protocol.outbox import Outbox
from kvferry.protocol.peers import Peer, PeerSettings, PeerTable
from kvferry.protocol.planning.geometry import Geometry
from kvferry.types import Address, EngineId, EngineIncarnation, Epoch, KVLayout, PeerId, Region

TTL_S = 100.0
CONTROL = "tcp://p:6000"


class Book:
    """A peer table that completes every handshake immediately."""

    def __init__(self, state_heads: int = 0) -> None:
        region = Region("l0", 4096, 64, 64, 8, state_heads=state_heads)
        geometry = Geometry(0, 1, 4, 8, KVLayout.HND, 1, 8, (region,), 1)
        settings = PeerSettings(
            factors=None,
            geometry=geometry,
            offers=(TransportOffer("memory", "", b"us"),),
            pinned_transports=(),
            handshake_timeout_s=5,
            engine_ttl_s=TTL_S,
        )
        outbox = Outbox()
        self.actions = outbox.actions
        self.book = PeerTable(settings, outbox)

    def meet(self, engine: str, epoch: str, control: str, now: float) -> PeerId:
        incarnation = EngineIncarnation(EngineId(engine), Epoch(epoch))
        assert isinstance(self.book.ensure(incarnation, Address(engine, 5600), 1, now), Peer)
        [nonce] = [
            a.message.nonce
            for a in self.actions
            if isinstance(a, Send) and isinstance(a.message, HandshakeRequest)
        ]
        region, offer = Region("l0", 0, 64, 64, 16), TransportOffer("memory", "", b"them")
        layout = codec.encode_layout(
            RankLayout(0, 1, 4, 16, KVLayout.HND, 1, 8, control, [region], [offer], 1)
        )
        assert (
            self.book.receive(
                HandshakeReply(nonce, WIRE_VERSION, engine, epoch, {}, msgspec.Raw(layout)), now
            )
            is None
        )
        [opened] = [action.peer for action in self.actions if isinstance(action, OpenPeer)]
        self.book.opened(opened, "memory")
        self.actions.clear()
        return opened

    def closed(self) -> list[PeerId]:
        peers = [action.peer for action in self.actions if isinstance(action, ClosePeer)]
        self.actions.clear()
        return peers


def test_a_peer_is_found_by_its_control_address_while_it_is_known() -> None:
    book = Book()
    p, q = book.meet("p", "e1", CONTROL, now=0), book.meet("q", "e1", "tcp://q:6000", now=0)
    assert (book.book.at(CONTROL), book.book.at("tcp://q:6000"), book.book.at("tcp://r:6000")) == (
        p,
        q,
        None,
    )
    book.book.lose(p.incarnation, "it fell silent", now=1)
    assert (book.book.at(CONTROL), book.book.at("tcp://q:6000")) == (None, q)


def test_of_two_lives_at_one_address_the_later_is_found_also_when_the_earlier_is_forgotten_last(
) -> None:  # fmt: skip
    book = Book()
    old, new = book.meet("p", "e1", CONTROL, now=0), book.meet("p", "e2", CONTROL, now=1)
    assert book.book.at(CONTROL) == new
    book.book.lose(old.incarnation, "it was restarted", now=2)
    assert book.book.at(CONTROL) == new


def test_only_those_that_nothing_has_used_for_the_whole_time_are_forgotten() -> None:
    book = Book()
    idle, used, busy = (
        book.meet(name, "e1", f"tcp://{name}:6000", now=0) for name in ("idle", "used", "busy")
    )
    book.book.ensure(used.incarnation, Address("used", 5600), 1, now=TTL_S / 2)
    book.book.evict_idle(TTL_S - 1, {busy.incarnation})
    assert book.closed() == []
    book.book.evict_idle(TTL_S, {busy.incarnation})
    assert book.closed() == [idle]
    book.book.evict_idle(TTL_S * 3 / 2, set())
    assert book.closed() == [used]
    # The TTL of `busy` starts at the last check that found it in use, not at its last `ensure`.
    book.book.evict_idle(TTL_S * 2 - 1, set())
    assert book.closed() == []
    book.book.evict_idle(TTL_S * 2, set())
    assert book.closed() == [busy]
    assert len(book.book) == 0


def test_a_peer_met_after_all_were_forgotten_is_forgotten_in_its_turn() -> None:
    book = Book()
    for first_s in (0, 500):
        peer = book.meet("p", "e1", CONTROL, now=first_s)
        book.book.evict_idle(first_s + TTL_S, set())
        assert book.closed() == [peer]


def test_what_is_still_being_greeted_is_not_idle() -> None:
    book = Book()
    incarnation = EngineIncarnation(EngineId("p"), Epoch("e1"))
    book.book.ensure(incarnation, Address("p", 5600), 1, now=0)
    book.book.evict_idle(TTL_S, set())
    assert book.book.get(incarnation) is not None


def test_a_refusing_producer_is_asked_with_the_version_before_unless_our_cache_has_states() -> None:
    for state_heads, versions in ((0, [WIRE_VERSION, WIRE_VERSION - 1]), (1, [WIRE_VERSION])):
        book = Book(state_heads)
        incarnation = EngineIncarnation(EngineId("p"), Epoch("e1"))
        book.book.ensure(incarnation, Address("p", 5600), 1, now=0)
        lost = [
            book.book.receive(HandshakeRefused(nonce, "no"), now=1)
            for nonce in range(1, len(versions) + 1)
        ]
        assert [each is None for each in lost] == [True] * (len(versions) - 1) + [False]
        assert lost[-1] is not None
        assert lost[-1].is_incompatible
        assert [
            action.message.wire_version
            for action in book.actions
            if isinstance(action, Send) and isinstance(action.message, HandshakeRequest)
        ] == versions
