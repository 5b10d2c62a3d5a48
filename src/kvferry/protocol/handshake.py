"""The handshake: how a consumer learns a producer's layout and chooses transports.

The producer's side channel answers from the layouts reported by the producer's workers. The
consumer compares the compatibility factors first (`connectors/geometry.py` lists them) and decodes
the layout second; IncompatiblePeer names each differing field with both values. Then the consumer
lists the transports to try. Pure.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvferry.errors import IncompatiblePeer, RemoteProtocolError
from kvferry.protocol.messages import (
    WIRE_VERSION,
    Factor,
    HandshakeRefused,
    HandshakeReply,
    HandshakeRequest,
    OfferInfo,
    RankLayout,
    decode_layout,
)
from kvferry.types import EngineId, Epoch

__all__ = ["ServedEngine", "TransportChoice", "answer", "candidate_transports", "check_reply"]

MAX_OFFERS = 16


@dataclass(frozen=True, slots=True)
class ServedEngine:
    """The engine incarnation that a side channel serves: factors, and one encoded layout per
    rank.
    """

    engine: EngineId
    epoch: Epoch
    factors: Mapping[str, Factor]
    layouts: Mapping[int, bytes]


@dataclass(frozen=True, slots=True)
class TransportChoice:
    """A transport to try, and the reason for the choice (for logs)."""

    transport: str
    reason: str


def answer(served: ServedEngine, request: HandshakeRequest) -> HandshakeReply | HandshakeRefused:
    """Return the reply to a handshake request; never raises, whatever the request contains."""
    if request.wire_version != WIRE_VERSION:
        return HandshakeRefused(
            request.nonce,
            f"this engine does not support wire version {request.wire_version}, only "
            f"{WIRE_VERSION}",
        )
    layout = served.layouts.get(request.tp_rank)
    if layout is None:
        return HandshakeRefused(
            request.nonce,
            f"this engine has no rank {request.tp_rank}, only {sorted(served.layouts)}",
        )
    return HandshakeReply(
        request.nonce,
        WIRE_VERSION,
        served.engine,
        served.epoch,
        dict(served.factors),
        msgspec.Raw(layout),
    )


def check_reply(
    reply: HandshakeReply,
    factors: Mapping[str, Factor] | None,
    engine: EngineId,
    epoch: Epoch,
    tp_rank: int,
) -> RankLayout:
    """Return the layout of the requested rank if the expected engine incarnation has answered.

    Raises IncompatiblePeer if a factor differs, RemoteProtocolError for anything else. `factors`
    None accepts any factors.
    """
    if reply.wire_version != WIRE_VERSION:
        raise RemoteProtocolError(
            f"the producer uses wire version {reply.wire_version}, but this engine uses "
            f"{WIRE_VERSION}"
        )
    if reply.engine != engine:
        raise RemoteProtocolError(
            f"engine {reply.engine} answers at this address, but the ticket is of engine {engine}"
        )
    if reply.epoch != epoch:
        raise RemoteProtocolError(f"engine {engine} has restarted since the ticket was issued")
    differences = {} if factors is None else _differences(factors, reply.factors)
    if differences:
        raise IncompatiblePeer(engine, differences)
    layout = decode_layout(bytes(reply.layout))
    if layout.tp_rank != tp_rank:
        raise RemoteProtocolError(
            f"the handshake asked for rank {tp_rank}, but the reply is of rank {layout.tp_rank}"
        )
    if len(layout.offers) > MAX_OFFERS:
        raise RemoteProtocolError(
            f"the peer offers {len(layout.offers)} transports, but at most {MAX_OFFERS} are allowed"
        )
    return layout


def candidate_transports(
    ours: Iterable[OfferInfo], theirs: Iterable[OfferInfo], pinned: Sequence[str]
) -> list[TransportChoice]:
    """Return the transports available on both sides with equal `reach`, best first.

    The order is our own order of preference, except that transports with equal `near` precede
    transports with different `near`. A non-empty `pinned` replaces our order.
    """
    remote = {offer.transport: offer for offer in theirs}
    local = {offer.transport: offer for offer in ours}
    common = [
        name
        for name in pinned or local
        if name in local and name in remote and local[name].reach == remote[name].reach
    ]
    if pinned:
        return [TransportChoice(name, "pinned by `transports`") for name in common]
    # The sort is stable, so our order of preference holds within each half.
    common.sort(key=lambda name: local[name].near != remote[name].near)
    return [
        TransportChoice(name, "first in our order of preference that works between both sides")
        for name in common
    ]


def _differences(
    ours: Mapping[str, Factor], theirs: Mapping[str, Factor]
) -> dict[str, tuple[object, object]]:
    # A factor that only one side has counts as a difference.
    names = sorted(set(ours) | set(theirs))
    return {
        name: (ours.get(name), theirs.get(name))
        for name in names
        if ours.get(name) != theirs.get(name)
    }
