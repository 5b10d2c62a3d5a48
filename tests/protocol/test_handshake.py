"""Tests that a refused handshake names the differing fields, and that the server never raises."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import IncompatiblePeer, RemoteProtocolError
from kvferry.protocol import messages as codec
from kvferry.protocol.handshake import (
    MAX_OFFERS,
    ServedEngine,
    answer,
    candidate_transports,
    check_reply,
    named_factors,
)
from kvferry.protocol.messages import (
    MAX_FACTOR_CHARS,
    MAX_FACTORS,
    OLDEST_WIRE_VERSION,
    WIRE_VERSION,
    Factor,
    HandshakeRefused,
    HandshakeReply,
    HandshakeRequest,
    RankLayout,
    TransportOffer,
)
from kvferry.types import EngineId, Epoch, KVLayout, Region

FACTORS: dict[str, Factor] = {"dtype": "float32", "num_layers": 4, "model": "abc"}
ENGINE, EPOCH = EngineId("p"), Epoch("e1")


def make_layout(rank: int = 0, offers: int = 1) -> RankLayout:
    transports = [TransportOffer(f"transport{i}", "", b"") for i in range(offers)]
    return RankLayout(
        rank,
        2,
        16,
        8,
        KVLayout.HND,
        2,
        64,
        "tcp://h:1",
        [Region("l0", 0, 8, 8, 8)],
        transports,
    )


def serve(**layouts: RankLayout) -> ServedEngine:
    encoded = {int(name[1:]): codec.encode_layout(layout) for name, layout in layouts.items()}
    return ServedEngine(ENGINE, EPOCH, FACTORS, encoded)


def asking(rank: int = 0, wire_version: int = WIRE_VERSION) -> HandshakeRequest:
    return HandshakeRequest(7, wire_version, rank)


def ask(served: ServedEngine, rank: int = 0) -> HandshakeReply:
    reply = answer(served, asking(rank))
    assert isinstance(reply, HandshakeReply)
    back = codec.decode(codec.encode(reply))
    assert isinstance(back, HandshakeReply)
    return back


def test_the_asked_rank_comes_back_with_the_nonce() -> None:
    reply = ask(serve(r0=make_layout(0), r1=make_layout(1)), rank=1)
    assert reply.nonce == 7
    assert check_reply(reply, asking(1), FACTORS, ENGINE, EPOCH) == make_layout(1)


@given(st.integers(-(2**40), 2**40), st.integers(-(2**40), 2**40))
def test_whatever_is_asked_gets_an_answer(version: int, rank: int) -> None:
    reply = answer(serve(r0=make_layout()), HandshakeRequest(1, version, rank))
    is_known = OLDEST_WIRE_VERSION <= version <= WIRE_VERSION
    assert isinstance(reply, HandshakeReply) == (is_known and rank == 0)
    assert isinstance(reply, HandshakeReply) or reply.reason


def test_a_peer_of_the_version_before_gets_an_answer_in_its_version_if_there_are_no_states() -> (
    None
):
    reply = answer(serve(r0=make_layout()), asking(wire_version=WIRE_VERSION - 1))
    assert isinstance(reply, HandshakeReply)
    assert reply.wire_version == WIRE_VERSION - 1
    state = Region("l1", 64, 8, 8, 8, state_heads=2)
    hybrid = msgspec.structs.replace(make_layout(), regions=[*make_layout().regions, state])
    refusal = answer(serve(r0=hybrid), asking(wire_version=WIRE_VERSION - 1))
    assert isinstance(refusal, HandshakeRefused)
    assert "upgrade the peer to wire version 9" in refusal.reason
    assert isinstance(answer(serve(r0=hybrid), asking()), HandshakeReply)


@pytest.mark.parametrize("version", [OLDEST_WIRE_VERSION - 1, WIRE_VERSION + 1])
def test_a_refusal_names_the_versions_of_both_sides(version: int) -> None:
    refusal = answer(serve(r0=make_layout()), asking(wire_version=version))
    assert isinstance(refusal, HandshakeRefused)
    assert refusal.reason == (
        f"this engine does not support wire version {version}, only {OLDEST_WIRE_VERSION} and "
        f"{WIRE_VERSION}; upgrade the engine with the older version"
    )


def test_a_refusal_says_which_ranks_there_are() -> None:
    assert answer(
        serve(r0=make_layout()), HandshakeRequest(1, WIRE_VERSION, 7)
    ) == HandshakeRefused(1, "this engine has no rank 7, only [0]")


def test_different_factors_are_named_with_both_values_before_the_layout_is_looked_at() -> None:
    reply = msgspec.structs.replace(ask(serve(r0=make_layout())), layout=msgspec.Raw(b"\xc1"))
    with pytest.raises(
        IncompatiblePeer, match="num_layers: ours 5, theirs 4; rope: ours 'yarn', theirs None"
    ) as caught:
        check_reply(reply, asking(), FACTORS | {"num_layers": 5, "rope": "yarn"}, ENGINE, EPOCH)
    assert caught.value.differences == {"num_layers": (5, 4), "rope": ("yarn", None)}


def test_a_refusal_of_another_model_lists_the_first_fields_only() -> None:
    reply = msgspec.structs.replace(
        ask(serve(r0=make_layout())), factors={f"f{number:03}": number for number in range(100)}
    )
    with pytest.raises(IncompatiblePeer, match=r"f000: ours None.*; and 92 more fields$"):
        check_reply(reply, asking(), {}, ENGINE, EPOCH)


def test_settings_are_factors_under_their_own_names() -> None:
    assert named_factors(
        "config.",
        {"rope": {"theta": 10000.0, "factors": (1, 2.0)}, "eps": 1e-6, "tied": True, "scale": None},
    ) == {
        "config.rope.theta": 10000,
        "config.rope.factors": "[1,2]",
        "config.eps": 1e-6,
        "config.tied": True,
        "config.scale": "null",
    }


def test_a_long_setting_is_cut_but_not_mistaken_for_another() -> None:
    one, other = (named_factors("", {"layers": ["x"] * 1000 + [end]}) for end in "ab")
    assert one != other
    assert len(str(one["layers"])) <= MAX_FACTOR_CHARS


def test_an_object_of_many_settings_is_one_factor() -> None:
    one, other = (
        named_factors("", {"quantised": {f"layer{n}": bits for n in range(1000)}})
        for bits in (4, 8)
    )
    assert list(one) == list(other) == ["quantised"]
    assert one != other


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=50)
@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_whatever_a_configuration_holds_fits_into_a_reply(config: dict[str, object]) -> None:
    factors = named_factors("config.", config)
    served = ServedEngine(ENGINE, EPOCH, factors, {0: codec.encode_layout(make_layout())})
    assert check_reply(ask(served), asking(), factors, ENGINE, EPOCH) == make_layout()


def test_a_configuration_with_thousands_of_settings_fits_into_a_reply() -> None:
    config: dict[str, object] = {f"setting{n}": n for n in range(5000)}
    factors = named_factors("config.", config)
    assert list(factors) == ["config.*"]
    assert factors != named_factors("config.", config | {"setting77": 78})


@pytest.mark.parametrize(
    "factors",
    [
        {f"f{number}": 1 for number in range(MAX_FACTORS + 1)},
        {"f" * (MAX_FACTOR_CHARS + 1): 1},
        {"f": "x" * (MAX_FACTOR_CHARS + 1)},
        {"f": [1]},
    ],
    ids=["too many", "name too long", "text too long", "a list"],
)
def test_factors_beyond_their_bounds_are_refused(factors: dict[str, Factor]) -> None:
    reply = msgspec.structs.replace(ask(serve(r0=make_layout())), factors=factors)
    with pytest.raises(RemoteProtocolError):
        codec.decode(codec.encode(reply))


def test_factors_are_not_compared_when_the_operator_says_so() -> None:
    assert check_reply(ask(serve(r0=make_layout())), asking(), None, ENGINE, EPOCH) == make_layout()


@pytest.mark.parametrize(
    ("engine", "epoch", "says"),
    [("q", "e1", "engine p answers at this address"), ("p", "e0", "has restarted")],
)
def test_another_engine_or_life_is_refused(engine: str, epoch: str, says: str) -> None:
    with pytest.raises(RemoteProtocolError, match=says):
        check_reply(ask(serve(r0=make_layout())), asking(), FACTORS, EngineId(engine), Epoch(epoch))


def test_malformed_answers_are_refused() -> None:
    good = ask(serve(r0=make_layout()))
    with pytest.raises(RemoteProtocolError, match="wire version"):
        check_reply(
            msgspec.structs.replace(good, wire_version=WIRE_VERSION - 1),
            asking(),
            FACTORS,
            ENGINE,
            EPOCH,
        )
    with pytest.raises(RemoteProtocolError, match="cannot be decoded"):
        check_reply(
            msgspec.structs.replace(good, layout=msgspec.Raw(b"\xc1")),
            asking(),
            FACTORS,
            ENGINE,
            EPOCH,
        )
    with pytest.raises(RemoteProtocolError, match="asked for rank 1"):
        check_reply(good, asking(1), FACTORS, ENGINE, EPOCH)
    with pytest.raises(RemoteProtocolError, match="transports, but at most"):
        check_reply(
            ask(serve(r0=make_layout(offers=MAX_OFFERS + 1))), asking(), FACTORS, ENGINE, EPOCH
        )


def offers(*names: str, reach: str = "") -> list[TransportOffer]:
    return [TransportOffer(name, reach if name == "shm" else "", b"") for name in names]


def chosen(ours: list[TransportOffer], theirs: list[TransportOffer], *pinned: str) -> list[str]:
    return [choice.transport for choice in candidate_transports(ours, theirs, pinned)]


def test_transports_are_tried_in_our_order_as_far_as_they_reach() -> None:
    assert chosen(offers("shm", "nixl", reach="host1"), offers("nixl", "shm", reach="host1")) == [
        "shm",
        "nixl",
    ]
    assert chosen(offers("shm", "nixl", reach="host1"), offers("nixl", "shm", reach="host2")) == [
        "nixl"
    ]
    assert chosen(offers("shm"), offers("nixl")) == []


def test_what_is_near_comes_before_what_is_not() -> None:
    def sides(host: str) -> list[TransportOffer]:
        return [
            TransportOffer("shm", host, b""),
            TransportOffer("nixl", "", b"", near=host),
            TransportOffer("tcp", "", b""),
        ]

    assert chosen(sides("a"), sides("a")) == ["shm", "nixl", "tcp"]
    assert chosen(sides("a"), sides("b")) == ["tcp", "nixl"]
    assert chosen(sides("a"), sides("b"), "nixl", "tcp") == ["nixl", "tcp"]


def test_pinned_transports_replace_the_preference() -> None:
    both = offers("shm", "nixl", reach="host1")
    assert chosen(both, both, "nixl") == ["nixl"]
    assert chosen(both, both, "nixl", "shm") == ["nixl", "shm"]
    assert chosen(both, both, "cuda_ipc") == []
