"""The handshake: how a consumer learns a producer's layout and chooses transports.

The producer's side channel answers from the layouts reported by the producer's workers. The
consumer compares the compatibility factors first (`connectors/geometry.py` lists them) and decodes
the layout second; IncompatiblePeer names each differing field with both values. Then the consumer
lists the transports to try. `named_factors` makes factors of a model's settings. Pure.

Both sides use the wire version of the consumer's request, which is the current one or the one
before (docs/decisions/066-rolling-upgrades.md).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import isfinite

import msgspec

from kvferry.errors import IncompatiblePeer, RemoteProtocolError
from kvferry.protocol.messages import (
    MAX_FACTOR_CHARS,
    MAX_FACTORS,
    OLDEST_WIRE_VERSION,
    STATES_WIRE_VERSION,
    WIRE_VERSION,
    Factor,
    HandshakeRefused,
    HandshakeReply,
    HandshakeRequest,
    RankLayout,
    TransportOffer,
    decode_layout,
)
from kvferry.types import EngineId, Epoch

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
    if not OLDEST_WIRE_VERSION <= request.wire_version <= WIRE_VERSION:
        return HandshakeRefused(
            request.nonce,
            f"this engine does not support wire version {request.wire_version}, only "
            f"{OLDEST_WIRE_VERSION} and {WIRE_VERSION}; upgrade the engine with the older version",
        )
    layout = served.layouts.get(request.tp_rank)
    if layout is None:
        return HandshakeRefused(
            request.nonce,
            f"this engine has no rank {request.tp_rank}, only {sorted(served.layouts)}",
        )
    if request.wire_version < STATES_WIRE_VERSION and any(
        region.state_heads for region in decode_layout(layout).regions
    ):
        return HandshakeRefused(
            request.nonce,
            f"this engine's model has states, which wire version {request.wire_version} does not "
            f"support; upgrade the peer to wire version {STATES_WIRE_VERSION}",
        )
    return HandshakeReply(
        request.nonce,
        request.wire_version,
        served.engine,
        served.epoch,
        dict(served.factors),
        msgspec.Raw(layout),
    )


def check_reply(
    reply: HandshakeReply,
    request: HandshakeRequest,
    factors: Mapping[str, Factor] | None,
    engine: EngineId,
    epoch: Epoch,
) -> RankLayout:
    """Return the layout of the requested rank if the expected engine incarnation has answered.

    Raises IncompatiblePeer if a factor differs, RemoteProtocolError for anything else. `factors`
    None accepts any factors.
    """
    if reply.wire_version != request.wire_version:
        raise RemoteProtocolError(
            f"the producer uses wire version {reply.wire_version}, but the handshake asked for "
            f"{request.wire_version}"
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
    if layout.tp_rank != request.tp_rank:
        raise RemoteProtocolError(
            f"the handshake asked for rank {request.tp_rank}, but the reply is of rank "
            f"{layout.tp_rank}"
        )
    if len(layout.offers) > MAX_OFFERS:
        raise RemoteProtocolError(
            f"the peer offers {len(layout.offers)} transports, but at most {MAX_OFFERS} are allowed"
        )
    return layout


def candidate_transports(
    ours: Iterable[TransportOffer], theirs: Iterable[TransportOffer], pinned: Sequence[str]
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
    names = sorted(ours.keys() | theirs.keys())
    return {
        name: (ours.get(name), theirs.get(name))
        for name in names
        if ours.get(name) != theirs.get(name)
    }


# -- factors of settings --
# Every setting of a model is a factor under its own name, so that a refusal names the setting. A
# reply is bounded (`MAX_FACTORS`, `MAX_FACTOR_CHARS`), whatever a configuration contains.


MAX_NESTED_SETTINGS = 128
"""A nested object with more settings, such as a list of quantised layers, is one factor."""


def named_factors(prefix: str, settings: Mapping[str, object]) -> dict[str, Factor]:
    """Return one factor per setting, named by `prefix` and the setting's dotted path.

    Equal numbers give equal factors, whether written as 10000 or 10000.0. Long texts are cut, and
    end with a digest of the whole text.
    """
    factors: dict[str, Factor] = {}
    for name, value in settings.items():
        leaves = list(_leaves(prefix + name, _canonical(value)))
        if len(leaves) > MAX_NESTED_SETTINGS:
            leaves = [(prefix + name, _canonical(value))]
        factors.update((_cut(path), _factor(leaf)) for path, leaf in leaves)
    # The factors of an engine come from several sets of settings.
    if len(factors) <= MAX_FACTORS // 3:
        return factors
    return {f"{prefix}*": _factor(_canonical(settings))}


def _leaves(path: str, value: object) -> Iterator[tuple[str, object]]:
    if not isinstance(value, dict) or not value:
        yield path, value
        return
    for name, part in value.items():
        yield from _leaves(f"{path}.{name}", part)


def _canonical(value: object) -> object:
    """The value with text keys, lists instead of tuples, and whole numbers as integers. Numbers
    that messages cannot carry, or that are not equal to themselves, become text.
    """
    if isinstance(value, Mapping):
        return {str(name): _canonical(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(part) for part in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, float) and not value.is_integer():
        return value if isfinite(value) else str(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return int(value) if abs(value) < 1 << 63 else str(value)
    return value


def _factor(value: object) -> Factor:
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return _cut(value)
    return _cut(msgspec.json.encode(value, enc_hook=str, order="sorted").decode())


def _cut(text: str) -> str:
    if len(text) <= MAX_FACTOR_CHARS:
        return text
    digest = blake2b(text.encode(errors="replace"), digest_size=8).hexdigest()
    return f"{text[: MAX_FACTOR_CHARS // 2]}… digest {digest}"
