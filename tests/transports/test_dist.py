"""Tests the dist transport against strangers, liars and stopped peers: no wrong byte reaches the
cache, every wait ends, and staging memory is bounded.
"""

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import psutil
import pytest
import torch
from tests.transports.tcp_peers import (
    BLOCK,
    BLOCKS,
    DEADLINE_S,
    PEER,
    all_blocks,
    dial,
    rest_of,
    wait,
)

from kvferry.errors import TransportError
from kvferry.transports.base import Segments, TransportOffer
from kvferry.transports.tcp import wire
from kvferry.transports.torch_dist import channel as dist_channel
from kvferry.transports.torch_dist import server as dist_server
from kvferry.transports.torch_dist.channel import Channel, DistOffer
from kvferry.transports.torch_dist.group import Backend, Member, PairGroup
from kvferry.transports.torch_dist.settings import DistSettings
from kvferry.transports.torch_dist.transport import DistTransport
from kvferry.types import EngineId, Epoch, PeerId, Region

CANARY = 5


class Side:
    """A transport with its own memory, which has guard bytes on either side of the region."""

    def __init__(self, fill: int, settings: DistSettings | None = None) -> None:
        self.bytes = np.full((BLOCKS + 2) * BLOCK, fill, np.uint8)
        self.regions = [Region("kv", self.bytes.ctypes.data + BLOCK, BLOCK, BLOCK, BLOCKS)]
        self.transport = DistTransport("127.0.0.1", "127.0.0.1", settings)
        assert self.transport.register(self.regions)

    @property
    def offer(self) -> DistOffer:
        return msgspec.msgpack.decode(self.transport.offer().blob, type=DistOffer)

    def assert_reads(self, far: "Side") -> None:
        self.transport.connect(PEER, far.transport.offer(), far.regions)
        self.bytes[:] = 0
        completion = wait(self.transport, self.transport.read(PEER, all_blocks()))
        assert completion.ok, completion.error
        assert np.array_equal(self.bytes[BLOCK:-BLOCK], far.bytes[BLOCK:-BLOCK])
        assert not self.bytes[:BLOCK].any()
        assert not self.bytes[-BLOCK:].any()


@contextlib.contextmanager
def side(fill: int, settings: DistSettings | None = None) -> Iterator[Side]:
    made = Side(fill, settings)
    try:
        yield made
    finally:
        made.transport.close()


@pytest.fixture
def near() -> Iterator[Side]:
    with side(CANARY) as made:
        yield made


@pytest.fixture
def far() -> Iterator[Side]:
    with side(7) as made:
        yield made


def test_a_stranger_reads_nothing_and_is_sent_away(
    near: Side, far: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist_channel, "PROOF_TIMEOUT_S", 0.2)
    offer = wire.TcpOffer(far.offer.host, far.offer.port, far.offer.token)
    for said in (b"", b"GET / HTTP/1.1\r\n\r\n", secrets.token_bytes(48), secrets.token_bytes(999)):
        with dial(offer) as connection:
            connection.sendall(said)
            assert len(rest_of(connection)) <= wire.GREETING_BYTES
    monkeypatch.undo()
    near.assert_reads(far)


def test_strangers_that_stay_silent_do_not_keep_peers_out(
    near: Side, far: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist_channel, "PROOF_TIMEOUT_S", 1000.0)
    offer = wire.TcpOffer(far.offer.host, far.offer.port, far.offer.token)
    with contextlib.ExitStack() as stack:
        strangers = [
            stack.enter_context(dial(offer)) for _ in range(dist_server.MAX_UNAUTHENTICATED + 9)
        ]
        near.assert_reads(far)
        for oldest in strangers[:9]:
            assert len(rest_of(oldest)) <= wire.GREETING_BYTES


def test_the_ports_of_gloo_survive_noise(near: Side, far: Side) -> None:
    listening = _own_listening_ports()
    near.assert_reads(far)
    before = near.bytes.copy()
    ports = _own_listening_ports() - listening
    assert len(ports) == 2, "each side of a gloo group listens"
    for port in ports:
        for said in (b"", bytes(8), bytes(64), secrets.token_bytes(8), secrets.token_bytes(4096)):
            with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as connection:
                connection.sendall(said)
    near.bytes[:] = 0
    assert wait(near.transport, near.transport.read(PEER, all_blocks())).ok
    assert np.array_equal(near.bytes, before)


def test_bytes_that_the_peer_did_not_send_never_reach_the_cache(near: Side) -> None:
    def lie(channel: Channel, group: PairGroup) -> None:
        size_bytes = _take_request(channel)
        channel.send(wire.pack_reply())
        channel.send(channel.next_tag(b"other bytes"))
        group.send(torch.zeros(size_bytes, dtype=torch.uint8))

    error = _read_from_liar(near, lie)
    assert "not the bytes that the peer sent" in error


def test_a_tag_is_valid_for_one_batch_only(near: Side) -> None:
    """The liar repeats the first batch with its tag."""

    def lie(channel: Channel, group: PairGroup) -> None:
        size_bytes = _take_request(channel)
        channel.send(wire.pack_reply())
        tag = channel.next_tag(bytes(size_bytes))
        channel.send(tag)
        group.send(torch.zeros(size_bytes, dtype=torch.uint8))
        assert _take_request(channel) == size_bytes
        channel.send(wire.pack_reply(), tag)
        group.send(torch.zeros(size_bytes, dtype=torch.uint8))

    error = _read_from_liar(near, lie, reads=2)
    assert "not the bytes that the peer sent" in error


def test_a_refusal_and_an_early_end_are_errors(near: Side) -> None:
    def refuse(channel: Channel, group: PairGroup) -> None:
        _take_request(channel)
        channel.send(wire.pack_reply("no such memory"))

    def leave(channel: Channel, group: PairGroup) -> None:
        _take_request(channel)
        channel.send(wire.pack_reply(), bytes(32))

    assert "no such memory" in _read_from_liar(near, refuse)
    assert _read_from_liar(near, leave)


@pytest.mark.parametrize("operation", [wire.Operation.READ, wire.Operation.WRITE])
def test_a_peer_is_refused_memory_out_of_range(
    near: Side, far: Side, operation: wire.Operation
) -> None:
    first = far.regions[0].address
    for address in (first - 1, first + BLOCKS * BLOCK - BLOCK + 1, 0, -8, 1 << 62):
        channel = Channel.dial(far.offer)
        channel.send(bytes([Backend.GLOO]))
        group = PairGroup.meet(channel, Backend.GLOO, Member.DIALLER, 0)
        rows = np.array([[address, BLOCK]], "<i8")
        channel.send(wire.pack_header(operation, rows), rows.tobytes())
        with pytest.raises(TransportError, match="refused a transfer: a segment"):
            channel.receive_reply()
        channel.close()
        group.abort()
    near.assert_reads(far)
    assert np.all(far.bytes == 7)


def test_bytes_of_a_cancelled_read_do_not_reach_the_cache(near: Side) -> None:
    is_asked, is_cancelled = threading.Event(), threading.Event()

    def answer_late(channel: Channel, group: PairGroup) -> None:
        size_bytes = _take_request(channel)
        is_asked.set()
        assert is_cancelled.wait(DEADLINE_S)
        _send_zeros(channel, group, size_bytes)
        _send_zeros(channel, group, _take_request(channel))

    with _liar(answer_late) as offer:
        near.transport.connect(PEER, offer, near.regions)
        handle = near.transport.read(PEER, all_blocks())
        assert is_asked.wait(DEADLINE_S)
        near.transport.cancel(handle)
        (completion,) = near.transport.poll()
        assert (completion.handle, completion.error) == (handle, "cancelled")
        is_cancelled.set()
        first = [Segments(0, 0, BLOCK, np.zeros(1, np.int64), np.zeros(1, np.int64))]
        assert wait(near.transport, near.transport.read(PEER, first)).ok
    assert not near.bytes[BLOCK : 2 * BLOCK].any()
    assert np.all(near.bytes[2 * BLOCK :] == CANARY), "a cancelled read has changed the cache"


def test_bytes_that_arrive_after_a_revocation_do_not_reach_the_cache(far: Side) -> None:
    far.transport.grant_writes(3, [[0]])
    channel = Channel.dial(far.offer)
    channel.send(bytes([Backend.GLOO]))
    group = PairGroup.meet(channel, Backend.GLOO, Member.DIALLER, 0)
    rows = np.array([[far.regions[0].address, BLOCK]], "<i8")
    for is_revoked in (False, True):
        channel.send(wire.pack_header(wire.Operation.WRITE, rows, 3), rows.tobytes())
        assert channel.receive_reply() == ""
        if is_revoked:
            far.bytes[:] = CANARY
            handle = far.transport.revoke_writes(3)
            assert [each.handle for each in far.transport.poll()] == [handle]
        channel.send(channel.next_tag(bytes(BLOCK)))
        group.send(torch.zeros(BLOCK, dtype=torch.uint8))
        assert channel.receive_reply() == ("write grant 3 is not active" if is_revoked else "")
        assert np.all(far.bytes[BLOCK : 2 * BLOCK] == (CANARY if is_revoked else 0))
    channel.close()
    group.abort()


def test_a_peer_that_stays_silent_fails_the_read(
    near: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist_channel, "STALL_TIMEOUT_S", 0.5)
    is_over = threading.Event()

    def stay_silent(channel: Channel, group: PairGroup) -> None:
        _take_request(channel)
        is_over.wait(DEADLINE_S)

    try:
        assert "silent for too long" in _read_from_liar(near, stay_silent, is_over.set)
    finally:
        is_over.set()


def test_one_staging_buffer_serves_several_peers_in_turn(far: Side) -> None:
    with side(1, DistSettings(host_pool_bytes=0)) as small:
        peers = [PeerId(EngineId(name), Epoch("1"), 0) for name in "abcd"]
        for peer in peers:
            small.transport.connect(peer, far.transport.offer(), far.regions)
        handles = {small.transport.read(peer, all_blocks()) for peer in peers for _ in range(3)}
        deadline = time.monotonic() + DEADLINE_S
        while handles:
            assert time.monotonic() < deadline
            for completion in small.transport.poll():
                assert completion.ok, completion.error
                handles.remove(completion.handle)
            time.sleep(0.001)
        assert np.all(small.bytes[BLOCK:-BLOCK] == 7)


def test_nccl_without_a_gpu_is_refused(far: Side) -> None:
    with (
        side(1, DistSettings(backend="nccl")) as made,
        pytest.raises(TransportError, match="set backend to gloo"),
    ):
        made.transport.connect(PEER, far.transport.offer(), far.regions)


Lie = Callable[[Channel, PairGroup], None]


def _read_from_liar(
    near: Side, lie: Lie, at_end: Callable[[], None] = lambda: None, reads: int = 1
) -> str:
    """Read from a peer that proves its token and then does `lie`. Returns the error of the last
    read, after which the canary must be untouched unless an earlier read succeeded.
    """
    with _liar(lie, at_end) as offer:
        near.transport.connect(PEER, offer, near.regions)
        for _ in range(reads - 1):
            assert wait(near.transport, near.transport.read(PEER, all_blocks())).ok
        before = near.bytes.copy()
        completion = wait(near.transport, near.transport.read(PEER, all_blocks()))
    assert np.array_equal(near.bytes, before)
    assert completion.error is not None
    return completion.error


@contextlib.contextmanager
def _liar(lie: Lie, at_end: Callable[[], None] = lambda: None) -> Iterator[TransportOffer]:
    """A producer that proves its token, makes a group with one peer, and then does `lie`."""
    token = secrets.token_bytes(wire.TOKEN_BYTES)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError, TransportError):
                channel = Channel.accept(connection, token)
                channel.receive(1)
                group = PairGroup.meet(channel, Backend.GLOO, Member.PRODUCER, 0)
                lie(channel, group)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        offer = DistOffer("127.0.0.1", listener.getsockname()[1], token)
        try:
            yield TransportOffer("dist", "", msgspec.msgpack.encode(offer))
        finally:
            at_end()
            thread.join(DEADLINE_S)
        assert not thread.is_alive()


def _send_zeros(channel: Channel, group: PairGroup, size_bytes: int) -> None:
    channel.send(wire.pack_reply(), channel.next_tag(bytes(size_bytes)))
    group.send(torch.zeros(size_bytes, dtype=torch.uint8))


def _take_request(channel: Channel) -> int:
    header = wire.unpack_header(channel.receive(wire.HEADER_BYTES))
    channel.receive(header.num_descriptors * 16)
    return header.total_bytes


def _own_listening_ports() -> set[int]:
    return {
        connection.laddr.port
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
