"""What a program that can reach an engine's ports can learn and send."""

import os

import aiohttp
import msgspec
from tests.e2e.harness import Engine, Prompt, ask, prefill

from kvferry.protocol import messages as codec
from kvferry.protocol.messages import WIRE_VERSION, HandshakeReply, HandshakeRequest, RankLayout
from kvferry.transports.zmq import CurveKeys, ZmqTransport


def greet(secret: bytes, address: str) -> RankLayout:
    """Return what a cluster member learns about an engine from its side channel."""
    transport = ZmqTransport("127.0.0.1", "127.0.0.1", 0, CurveKeys.from_secret(secret))
    try:
        transport.send(address, codec.encode(HandshakeRequest(1, WIRE_VERSION, 0)))
        for _ in range(50):
            for news in transport.poll(0.2):
                reply = codec.decode(news.frame) if hasattr(news, "frame") else None
                if isinstance(reply, HandshakeReply):
                    return msgspec.msgpack.decode(reply.layout, type=RankLayout)
        raise AssertionError(f"{address} does not answer")
    finally:
        transport.close()


async def side_channel(session: aiohttp.ClientSession, engine: Engine, prompt: Prompt) -> str:
    """Return the address of an engine's side channel, from the engine's own transfer parameters."""
    params = await prefill(session, engine, prompt)
    assert (await ask(session, engine, prompt, kv_transfer_params=params)).is_ok
    return f"tcp://{params['remote_host']}:{params['remote_port']}"


def listening(engine: Engine) -> set[int]:
    return {
        connection.laddr.port
        for process in engine.family()
        for connection in process.net_connections("tcp")
        if connection.status == "LISTEN"
    }


def send_noise(secret: bytes, address: str) -> None:
    """Send noise to a transfer worker's control channel, which does not answer messages that it
    does not know.
    """
    transport = ZmqTransport("127.0.0.1", "127.0.0.1", 0, CurveKeys.from_secret(secret))
    try:
        for frame in (
            b"",
            b"\xc1",
            os.urandom(500),
            b"\x91" * 50_000,
            codec.encode(HandshakeRequest(1, WIRE_VERSION, 0)),
        ):
            transport.send(address, frame)
        transport.poll(0.5)
    finally:
        transport.close()
