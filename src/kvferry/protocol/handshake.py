"""The handshake: compatibility factors first, layout second; the error names the field and both
values. Pure.

The producer's side channel answers with what its workers have told it; the consumer checks the
answer and picks the transports to try.
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
    """What a side channel serves: one engine incarnation, its factors and its ranks' encoded
    layouts.
    """

    engine: EngineId
    epoch: Epoch
    factors: Mapping[str, Factor]
    layouts: Mapping[int, bytes]


@dataclass(frozen=True, slots=True)
class TransportChoice:
    transport: str
    reason: str


def answer(served: ServedEngine, request: HandshakeRequest) -> HandshakeReply | HandshakeRefused:
    """What to send back; never raises, whatever was asked."""
    if request.wire_version != WIRE_VERSION:
        return HandshakeRefused(
            request.nonce,
            f"wire version {request.wire_version} is not spoken here, {WIRE_VERSION} is",
        )
    layout = served.layouts.get(request.tp_rank)
    if layout is None:
        return HandshakeRefused(
            request.nonce, f"there is no rank {request.tp_rank}, only {sorted(served.layouts)}"
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
    """The layout of the rank we asked for, from the engine incarnation we expect;
    RemoteProtocolError or IncompatiblePeer otherwise.
    """
    if reply.wire_version != WIRE_VERSION:
        raise RemoteProtocolError(
            f"the producer speaks wire version {reply.wire_version}, this engine {WIRE_VERSION}"
        )
    if reply.engine != engine:
        raise RemoteProtocolError(
            f"engine {reply.engine} answers at this address, the ticket is of engine {engine}"
        )
    if reply.epoch != epoch:
        raise RemoteProtocolError(f"engine {engine} has restarted since the ticket was issued")
    differences = {} if factors is None else _differences(factors, reply.factors)
    if differences:
        raise IncompatiblePeer(engine, differences)
    layout = decode_layout(bytes(reply.layout))
    if layout.tp_rank != tp_rank:
        raise RemoteProtocolError(f"asked for rank {tp_rank}, got rank {layout.tp_rank}")
    if len(layout.offers) > MAX_OFFERS:
        raise RemoteProtocolError(
            f"{len(layout.offers)} transports offered, at most {MAX_OFFERS} are looked at"
        )
    return layout


def candidate_transports(
    ours: Iterable[OfferInfo], theirs: Iterable[OfferInfo], pinned: Sequence[str]
) -> list[TransportChoice]:
    """Transports both sides have and that can reach across, best first. Our order is the
    preference, except that what is near comes before what is not; `pinned` replaces it.
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
    common.sort(key=lambda name: local[name].near != remote[name].near)
    return [
        TransportChoice(name, "first in preference that both sides have and that reaches across")
        for name in common
    ]


def _differences(
    ours: Mapping[str, Factor], theirs: Mapping[str, Factor]
) -> dict[str, tuple[object, object]]:
    names = sorted(set(ours) | set(theirs))
    return {
        name: (ours.get(name), theirs.get(name))
        for name in names
        if ours.get(name) != theirs.get(name)
    }
