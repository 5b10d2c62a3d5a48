"""`python tests/protocol/record_peer.py FILE`: records the frames of an old version's engines.

Run it with the old version's code, for example in a git worktree of the commit before a change of
the wire version, and in a process of its own:

    git worktree add /tmp/old COMMIT && (cd /tmp/old && python setup.py build_ext --inplace)
    PYTHONPATH=/tmp/old/src:/tmp/old python tests/protocol/record_peer.py \\
        tests/protocol/recorded/wire_VERSION.msgpack

`test_recorded_peer.py` replays the file. Secret, engine ids, epochs, ports and tickets are the same
in every run, so a new version's engine accepts the recorded frames. Memory addresses are not.
"""

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
from tests.connectors.pair import Blocks, EngineRequest, EngineSide, step_until
from tests.connectors.test_push import TOKENS, WAYS, closed, legs_between, push_side

from kvferry.protocol import messages as codec
from kvferry.protocol.messages import WIRE_VERSION, HandshakeRequest
from kvferry.transports.base import Received
from kvferry.transports.memory import MemoryControlTransport, MemoryNetwork
from kvferry.types import Route

Frames = list[tuple[str, bytes]]
"""Frames with their sender, P or D, in the order in which they were sent."""


@contextmanager
def recorded(frames: Frames, producer: set[str]) -> Iterator[None]:
    """Record every frame of every control transport; `producer` holds the addresses of P's."""
    send, reply = MemoryControlTransport.send, MemoryControlTransport.reply

    def note(self: MemoryControlTransport, frame: bytes) -> None:
        frames.append(("P" if self.address in producer else "D", frame))

    def noted_send(self: MemoryControlTransport, address: str, frame: bytes) -> None:
        note(self, frame)
        send(self, address, frame)

    def noted_reply(self: MemoryControlTransport, route: Route, frame: bytes) -> None:
        # A reply on a connection that this side has opened goes through `send`.
        if not route.dialled:
            note(self, frame)
        reply(self, route, frame)

    MemoryControlTransport.send = noted_send  # type: ignore[method-assign]
    MemoryControlTransport.reply = noted_reply  # type: ignore[method-assign]
    try:
        yield
    finally:
        MemoryControlTransport.send = send  # type: ignore[method-assign]
        MemoryControlTransport.reply = reply  # type: ignore[method-assign]


def record_pull() -> dict[str, Any]:
    network, frames = MemoryNetwork(), Frames()
    p = EngineSide("p", network, kv_lease_duration=600)
    with recorded(frames, set(network.control)):
        d = EngineSide("d", network)
        params = p.prefill(EngineRequest("a", TOKENS), [5, 6, 7])
        request = EngineRequest("r", TOKENS, params)
        d.scheduler.on_new_request(request)
        d.scheduler.get_num_new_matched_tokens(request, 0)
        d.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3],)), 10)
        step_until(lambda: "r" in d.seen.finished_recving and "a" in p.seen.finished_sending, p, d)
    handshake = asked(network, params["remote_port"])
    closed(p, d)
    return {"params": params, "frames": frames, **handshake}


def record_push(way: dict[str, Any]) -> dict[str, Any]:
    network, frames = MemoryNetwork(), Frames()
    p = push_side("p", network, kv_lease_duration=600, **way)
    with recorded(frames, set(network.control)):
        d = push_side("d", network, kv_lease_duration=600, **way)
        legs = legs_between(p, d)
        ticket = legs.ticket()
        legs.begin(ticket)
        legs.registered()
        legs.compute(ticket)
        legs.end()
    handshake = asked(network, legs.port)
    closed(p, d)
    return {"ticket": ticket, "port": legs.port, "frames": frames, **handshake}


def asked(network: MemoryNetwork, port: int) -> dict[str, bytes]:
    """Return P's answers to a consumer of the next version, which asks with its own version first
    and with P's version second.
    """
    answers = []
    with closing(MemoryControlTransport(network)) as asking:
        for nonce, version in ((1, WIRE_VERSION + 1), (2, WIRE_VERSION)):
            question = codec.encode(HandshakeRequest(nonce, version, 0))
            asking.send(f"tcp://memory:{port}", question)
            [event] = asking.poll(10)
            assert isinstance(event, Received)
            answers.append(event.frame)
    return {"refusal": answers[0], "reply": answers[1]}


def main(file: Path) -> None:
    recording = {
        "wire_version": WIRE_VERSION,
        "pull": record_pull(),
        **{name: record_push(way) for name, way in WAYS.items()},
    }
    file.write_bytes(msgspec.msgpack.encode(recording))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
