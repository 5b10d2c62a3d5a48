"""Tests that the codec decodes every message it encodes, and raises only `RemoteProtocolError` for
any other input.
"""

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import LocalProtocolError, RemoteProtocolError
from kvferry.protocol import messages as codec
from kvferry.protocol.messages import (
    Attach,
    Confirm,
    Confirmed,
    Detach,
    HandshakeRefused,
    HandshakeReply,
    HandshakeRequest,
    Heartbeat,
    HeartbeatReply,
    Message,
    RankLayout,
    Ready,
    Refused,
    Release,
    TransportOffer,
)
from kvferry.types import KVLayout, Region

LAYOUT = RankLayout(
    0,
    1,
    16,
    8,
    KVLayout.HND,
    2,
    64,
    "tcp://127.0.0.1:1",
    [Region("l0", 0, 8, 8, 8)],
    [TransportOffer("shm", "h", b"x")],
)

text = st.text(max_size=20)
number = st.integers(-(2**63), 2**63 - 1)
messages = st.one_of(
    st.builds(HandshakeRequest, number, number, number),
    st.builds(HandshakeRefused, number, text),
    st.builds(Attach, text, text),
    st.builds(Ready, text, text),
    st.builds(Heartbeat, text, number, st.lists(text)),
    st.builds(HeartbeatReply, text, number, st.lists(text)),
    st.builds(Confirm, text, text, text),
    st.builds(Confirmed, text, text),
    st.builds(Refused, text, text, text),
    st.builds(Detach, text, text, text),
    st.builds(Release, text),
)


@given(messages)
def test_every_message_survives_the_wire(message: Message) -> None:
    assert codec.decode(codec.encode(message)) == message


def test_a_handshake_reply_carries_its_layout_sealed() -> None:
    reply = HandshakeReply(
        1,
        1,
        "p",
        "e",
        {"dtype": "float32", "layers": 4, "quantised": False},
        msgspec.Raw(codec.encode_layout(LAYOUT)),
    )
    back = codec.decode(codec.encode(reply))
    assert isinstance(back, HandshakeReply)
    assert codec.decode_layout(bytes(back.layout)) == LAYOUT


@given(st.binary(max_size=300))
def test_garbage_is_a_remote_error(data: bytes) -> None:
    for decode in (codec.decode, codec.decode_layout):
        try:
            decode(data)
        except RemoteProtocolError:
            continue


@given(messages, st.data())
def test_a_damaged_message_is_a_message_or_a_remote_error(
    message: Message, data: st.DataObject
) -> None:
    frame = bytearray(codec.encode(message))
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(RemoteProtocolError):
        codec.decode(bytes(frame))


@pytest.mark.parametrize(
    "message",
    [
        Attach("t", "r" * 2000),
        Attach("t", "r", "", ["c"] * 2000),
        Confirm("e" * 2000, "l", "r"),
        Detach("e", "l" * 2000, "r"),
        Heartbeat("e", 1, ["l"] * 1001),
        Heartbeat("e", 1, ["l" * 2000]),
    ],
)
def test_names_that_an_answer_would_echo_are_bounded(message: Message) -> None:
    with pytest.raises(RemoteProtocolError, match="cannot be decoded"):
        codec.decode(codec.encode(message))


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(RemoteProtocolError):
        codec.decode(b"\x91" * 100_000)


def test_size_is_bounded_both_ways() -> None:
    with pytest.raises(RemoteProtocolError, match="over the limit"):
        codec.decode(bytes(codec.MAX_MESSAGE_BYTES + 1))
    with pytest.raises(LocalProtocolError, match="over the limit"):
        codec.encode(Release("x" * codec.MAX_MESSAGE_BYTES))
