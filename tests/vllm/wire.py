"""What somebody who can reach an engine's ports may find out and send."""

import os

import aiohttp
import msgspec
from tests.e2e.harness import Engine, Prompt, ask, prefill

from kvferry.protocol import messages as codec
from kvferry.protocol.messages import WIRE_VERSION, HandshakeReply, HandshakeRequest, RankLayout
from kvferry.transports.zmq import CurveKeys, ZmqTransport


def greet(secret: bytes, address: str) -> RankLayout:
    """What a member of the cluster learns of an engine from its side channel."""
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
    """An engine's own parameters say where it listens, whatever its role is."""
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
    """Noise for a worker's control transport, which answers nothing it does not know."""
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
