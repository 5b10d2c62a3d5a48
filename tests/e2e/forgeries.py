"""Input as clients, forgers and port scanners send it: plausible parameters, values of every type,
and noise. For any engine.
"""

import base64
import os
import socket
from typing import Any

from hypothesis import strategies as st

from kvferry.protocol import messages as codec
from kvferry.protocol.messages import (
    WIRE_VERSION,
    Confirm,
    HandshakeRefused,
    HandshakeReply,
    HandshakeRequest,
    Refused,
    Release,
)
from kvferry.transports.zmq import CurveKeys, ZmqTransport

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4)
    ),
    max_leaves=8,
)
param_keys = st.sampled_from(
    [
        "do_remote_prefill",
        "do_remote_decode",
        "remote_block_ids",
        "remote_engine_id",
        "remote_host",
        "remote_port",
        "tp_size",
        "ticket",
    ]
)
malformed_params = st.one_of(json_values, st.dictionaries(param_keys, json_values, max_size=6))


def forged_params() -> list[dict[str, Any]]:
    """Plausible parameters with an invalid ticket."""
    base: dict[str, Any] = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[0, 1, 2, 3, 4]],
        "remote_engine_id": "somebody",
        "remote_request_id": "cmpl-1-0-00000000",
        "remote_host": "127.0.0.1",
        "remote_port": 9,
        "tp_size": 1,
    }
    tickets: list[Any] = [
        None,
        "",
        "x",
        7,
        [],
        {},
        "A" * 5000,
        base64.urlsafe_b64encode(os.urandom(200)).decode(),
        "🦊",
        True,
    ]
    return [{"do_remote_prefill": True}, base, *({**base, "ticket": ticket} for ticket in tickets)]


def knock(host: str, port: int, times: int) -> list[socket.socket]:
    """Act like a port scanner: connect, and send noise, HTTP or nothing. Some connections stay
    open; the caller closes them.
    """
    held = []
    for number in range(times):
        raw = socket.create_connection((host, port), timeout=60)
        if number % 3 == 0:
            raw.sendall(os.urandom(64))
        elif number % 3 == 1:
            raw.sendall(b"GET / HTTP/1.0\r\n\r\n")
        if number % 50 == 0:
            held.append(raw)
        else:
            raw.close()
    return held


def send_as_member(secret: bytes, address: str) -> None:
    """Send malformed messages as a cluster member with a bug: it has the keys, so all messages
    arrive. Checks that a valid handshake request is answered afterwards.
    """
    transport = ZmqTransport("127.0.0.1", "127.0.0.1", 0, CurveKeys.from_secret(secret))
    try:
        frames = [
            b"",
            b"\xc1",
            os.urandom(500),
            b"\x91" * 50_000,
            codec.encode(Confirm("e", "l", "r")),
            codec.encode(Release("forged")),
        ]
        frames += [
            codec.encode(HandshakeRequest(n, version, rank))
            for n, (version, rank) in enumerate([(0, 0), (1, 7), (1, -(2**60))])
        ]
        for frame in frames:
            transport.send(address, frame)
        transport.send(address, codec.encode(HandshakeRequest(77, WIRE_VERSION, 0)))
        answers = []
        for _ in range(50):
            answers += [
                codec.decode(news.frame) for news in transport.poll(0.2) if hasattr(news, "frame")
            ]
            if any(isinstance(answer, HandshakeReply) and answer.nonce == 77 for answer in answers):
                return
        raise AssertionError(f"no answer after the garbage, only {answers}")
    finally:
        transport.close()


def send_garbage(secret: bytes, address: str) -> int:
    """Send malformed frames to a side channel or a control channel as a cluster member. Returns how
    many frames are malformed or do not belong on that channel.
    """
    frames = [b"", b"\xc1", os.urandom(500), b"\x91" * 50_000, codec.encode(Release("forged"))]
    # Each message belongs on one of the two channels, which answers it; the other channel drops it.
    frames += [
        codec.encode(Confirm("e", "l", "r")),
        codec.encode(HandshakeRequest(7, WIRE_VERSION, 99)),
    ]
    transport = ZmqTransport("127.0.0.1", "127.0.0.1", 0, CurveKeys.from_secret(secret))
    try:
        for frame in frames:
            transport.send(address, frame)
        for _ in range(50):
            if any(
                isinstance(codec.decode(news.frame), Refused | HandshakeRefused)
                for news in transport.poll(0.2)
                if hasattr(news, "frame")
            ):
                return len(frames) - 1
        raise AssertionError("no answer after the garbage")
    finally:
        transport.close()
