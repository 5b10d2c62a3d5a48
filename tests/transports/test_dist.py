"""Tests the dist transport against strangers, liars and stopped peers: no wrong byte reaches the
cache, every wait ends, and staging memory is bounded.
"""

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

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
    Memory,
    all_blocks,
    assert_still_serves,
    dial,
    memory,
    rest_of,
    wait,
)

from kvferry.errors import TransportError
from kvferry.transports.base import Operation, Segments, TransportOffer
from kvferry.transports.copy.gather import AddressCopies, HostAddressCopier
from kvferry.transports.tcp import wire
from kvferry.transports.torch_dist import channel as dist_channel
from kvferry.transports.torch_dist import group as dist_group
from kvferry.transports.torch_dist import staging as dist_staging
from kvferry.transports.torch_dist import transport as dist_transport
from kvferry.transports.torch_dist.channel import Channel, DistOffer, DistSettings
from kvferry.transports.torch_dist.group import (
    MAX_FRAMES,
    Backend,
    ChannelStore,
    Member,
    PairGroup,
)
from kvferry.transports.torch_dist.transport import DistTransport
from kvferry.types import EngineId, Epoch, PeerId
from kvferry.worker import thread as worker_thread

CANARY = 5


def dist(settings: DistSettings | None = None) -> DistTransport:
    return DistTransport("127.0.0.1", "127.0.0.1", settings)


@pytest.fixture
def near() -> Iterator[Memory]:
    with memory(CANARY, dist()) as made:
        yield made


@pytest.fixture
def far() -> Iterator[Memory]:
    with memory(7, dist()) as made:
        yield made


def test_a_stranger_reads_nothing_and_is_sent_away(
    near: Memory, far: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist_channel, "PROOF_TIMEOUT_S", 0.2)
    for said in (b"", b"GET / HTTP/1.1\r\n\r\n", secrets.token_bytes(48), secrets.token_bytes(999)):
        with dial(far.offer) as connection:
            connection.sendall(said)
            assert len(rest_of(connection)) <= wire.GREETING_BYTES
    monkeypatch.undo()
    assert_still_serves(near, far)


def test_strangers_that_stay_silent_do_not_keep_peers_out(
    near: Memory, far: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist_channel, "PROOF_TIMEOUT_S", 1000.0)
    with contextlib.ExitStack() as stack:
        strangers = [
            stack.enter_context(dial(far.offer))
            for _ in range(dist_transport.MAX_UNAUTHENTICATED + 9)
        ]
        assert_still_serves(near, far)
        for oldest in strangers[:9]:
            assert len(rest_of(oldest)) <= wire.GREETING_BYTES


def test_the_ports_of_gloo_survive_noise(near: Memory, far: Memory) -> None:
    listening = _own_listening_ports()
    assert_still_serves(near, far)
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


def test_bytes_that_the_peer_did_not_send_never_reach_the_cache(near: Memory) -> None:
    def lie(channel: Channel, group: PairGroup) -> None:
        size_bytes = _take_request(channel)
        channel.send(wire.pack_reply())
        channel.send(channel.next_tag(b"other bytes"))
        group.send(torch.zeros(size_bytes, dtype=torch.uint8))

    error = _read_from_liar(near, lie)
    assert "not the bytes that the peer sent" in error


def test_a_tag_is_valid_for_one_batch_only(near: Memory) -> None:
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


def test_a_rendezvous_that_does_not_end_is_an_error() -> None:
    """Otherwise a peer could fill our memory, or keep a thread for ever."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        liar = Channel(theirs, b"k" * 32)
        for number in range(MAX_FRAMES + 1):
            liar.send_frame(f"key {number}", b"value")
        store = ChannelStore(Channel(ours, b"k" * 32))
        with pytest.raises(TransportError, match="does not end the rendezvous"):
            store.get("another key")


@pytest.mark.parametrize(
    "address",
    [b"", bytes(170), b"\xff" * 170, (4 * 10**9).to_bytes(8, "little") + bytes(162), bytes(60_000)],
    ids=["empty", "no name", "all ones", "long name", "too long"],
)
def test_a_gloo_address_in_another_form_is_refused(address: bytes) -> None:
    """gloo would read memory that it does not own, and end the process."""
    with _connection() as (ours, theirs):
        Channel(theirs, b"k" * 32).send_frame("0/1", address)
        with pytest.raises(TransportError, match="address is malformed"):
            PairGroup.meet(Channel(ours, b"k" * 32), Backend.GLOO, Member.PRODUCER, 0)


def test_a_peer_that_never_connects_to_gloo_fails_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gloo waits for a connection five times as long as its timeout says."""
    monkeypatch.setattr(dist_group, "RENDEZVOUS_TIMEOUT_S", 4.0)
    with _connection() as (ours, theirs), ThreadPoolExecutor(1) as executor:
        meeting = executor.submit(
            PairGroup.meet, Channel(ours, b"k" * 32), Backend.GLOO, Member.DIALLER, 0
        )
        peer = Channel(theirs, b"k" * 32)
        _, address = peer.receive_frame()
        peer.send_frame("0/0", address)
        with pytest.raises(TransportError, match="no process group with the peer"):
            meeting.result(DEADLINE_S - 2)


def test_a_refusal_and_an_early_end_are_errors(near: Memory) -> None:
    def refuse(channel: Channel, group: PairGroup) -> None:
        _take_request(channel)
        channel.send(wire.pack_reply("no such memory"))

    def leave(channel: Channel, group: PairGroup) -> None:
        _take_request(channel)
        channel.send(wire.pack_reply(), bytes(32))

    assert "no such memory" in _read_from_liar(near, refuse)
    assert _read_from_liar(near, leave)


@pytest.mark.parametrize("operation", [Operation.READ, Operation.WRITE])
def test_a_peer_is_refused_memory_out_of_range(
    near: Memory, far: Memory, operation: Operation
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
    assert_still_serves(near, far)
    assert np.all(far.bytes == 7)


def test_bytes_of_a_cancelled_read_do_not_reach_the_cache(near: Memory) -> None:
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


def test_bytes_that_arrive_after_a_revocation_do_not_reach_the_cache(far: Memory) -> None:
    far.transport.grant_writes(3, [[0]])
    channel = Channel.dial(far.offer)
    channel.send(bytes([Backend.GLOO]))
    group = PairGroup.meet(channel, Backend.GLOO, Member.DIALLER, 0)
    rows = np.array([[far.regions[0].address, BLOCK]], "<i8")
    for is_revoked in (False, True):
        channel.send(wire.pack_header(Operation.WRITE, rows, 3), rows.tobytes())
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


def test_a_read_ends_only_when_a_slow_copy_is_done(
    near: Memory, far: Memory, slow: "SlowCopies"
) -> None:
    near.transport.connect(PEER, far.transport.offer(), far.regions)
    handle = near.transport.read(PEER, all_blocks())
    slow.allow_copies_from(far)
    slow.wait_until_slow()
    near.transport.cancel(handle)
    near.transport.disconnect(PEER)
    assert near.transport.poll() == [], "the read has ended while its bytes are being copied"
    slow.allow_all()
    assert wait(near.transport, handle).error == "cancelled"
    assert np.all(near.bytes[BLOCK:-BLOCK] == 7), "the read has ended before its copy"


def test_a_write_ends_only_when_a_slow_copy_is_done(
    near: Memory, far: Memory, slow: "SlowCopies"
) -> None:
    far.transport.grant_writes(3, [range(BLOCKS)])
    near.transport.connect(PEER, far.transport.offer(), far.regions)
    handle = near.transport.write(PEER, all_blocks(), 3)
    slow.wait_until_slow()
    near.transport.cancel(handle)
    assert near.transport.poll() == [], "the write has ended while its bytes are being copied"
    slow.allow_all()
    assert wait(near.transport, handle).error == "cancelled"


def test_a_revocation_ends_only_when_a_slow_copy_is_done(
    near: Memory, far: Memory, slow: "SlowCopies"
) -> None:
    far.transport.grant_writes(3, [range(BLOCKS)])
    near.transport.connect(PEER, far.transport.offer(), far.regions)
    slow.allow_copies_from(near)
    writing = near.transport.write(PEER, all_blocks(), 3)
    slow.wait_until_slow()
    revoking = far.transport.revoke_writes(3)
    assert far.transport.poll() == [], "the grant has ended while bytes are being copied under it"
    slow.allow_all()
    assert wait(far.transport, revoking).ok
    assert np.all(far.bytes[BLOCK:-BLOCK] == CANARY), "the grant has ended before the copy"
    assert wait(near.transport, writing).ok


def test_close_waits_for_a_slow_copy(
    near: Memory, far: Memory, slow: "SlowCopies", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist_transport, "CLOSE_TIMEOUT_S", 0.0)
    near.transport.connect(PEER, far.transport.offer(), far.regions)
    near.transport.read(PEER, all_blocks())
    slow.allow_copies_from(far)
    slow.wait_until_slow()
    slow.allow_all(after_questions=100)
    near.transport.close()
    assert np.all(near.bytes[BLOCK:-BLOCK] == 7), "close has returned before the copy was done"


def test_close_does_not_wait_for_a_silent_peer_and_no_byte_follows(
    near: Memory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert dist_transport.CLOSE_TIMEOUT_S < worker_thread.CLOSE_TIMEOUT_S
    monkeypatch.setattr(dist_transport, "CLOSE_TIMEOUT_S", 0.0)
    is_waiting, is_closed = threading.Event(), threading.Event()

    def send_after_close(channel: Channel, group: PairGroup) -> None:
        size_bytes = _take_request(channel)
        channel.send(wire.pack_reply(), channel.next_tag(bytes(size_bytes)))
        is_waiting.set()
        assert is_closed.wait(DEADLINE_S)
        group.send(torch.zeros(size_bytes, dtype=torch.uint8))

    with _liar(send_after_close) as offer:
        near.transport.connect(PEER, offer, near.regions)
        near.transport.read(PEER, all_blocks())
        assert is_waiting.wait(DEADLINE_S)
        (thread,) = (each for each in threading.enumerate() if each.name == "kvferry-dist")
        with caplog.at_level(logging.WARNING):
            near.transport.close()
        assert thread.is_alive()
        assert "still waits for a peer" in caplog.text
        is_closed.set()
        thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert np.all(near.bytes == CANARY), "bytes have reached the cache after close"


def test_a_peer_that_stays_silent_fails_the_read(
    near: Memory, monkeypatch: pytest.MonkeyPatch
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


def test_one_staging_buffer_serves_several_peers_in_turn(far: Memory) -> None:
    with memory(1, dist(DistSettings(host_pool_bytes=0))) as small:
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


def test_nccl_without_a_gpu_is_refused(far: Memory) -> None:
    with (
        memory(1, dist(DistSettings(backend="nccl"))) as made,
        pytest.raises(TransportError, match="set backend to gloo"),
    ):
        made.transport.connect(PEER, far.transport.offer(), far.regions)


class SlowCopies:
    """Copies of every transport that are done only when the test allows it, as on a busy GPU."""

    def __init__(self) -> None:
        self._is_slow = threading.Event()
        self._are_allowed = threading.Event()
        self._questions_left = 0
        self._fast: list[Memory] = []

    def allow_copies_from(self, cache: Memory) -> None:
        self._fast.append(cache)

    def allow_all(self, after_questions: int = 0) -> None:
        """Copies are done once their threads have asked so many more times."""
        self._questions_left = after_questions
        self._are_allowed.set()

    def wait_until_slow(self) -> None:
        """Wait until the thread of a copy has waited for longer than the limit of a slow copy."""
        assert self._is_slow.wait(DEADLINE_S)

    def is_done(self, job: "SlowJob") -> bool:
        if any(job.comes_from(each) for each in self._fast):
            return True
        job.num_questions += 1
        if job.num_questions > 2:
            self._is_slow.set()
        if not self._are_allowed.is_set():
            return False
        self._questions_left -= 1
        return self._questions_left < 0


class SlowJob:
    """One copy, which happens at its end."""

    def __init__(self, copies: Sequence[AddressCopies], slow: SlowCopies) -> None:
        self._copies = copies
        self._slow = slow
        self._is_done = False
        self.num_questions = 0

    def comes_from(self, cache: Memory) -> bool:
        first, size_bytes = cache.bytes.ctypes.data, cache.bytes.nbytes
        return all(first <= each.sources[0] < first + size_bytes for each in self._copies)

    def is_done(self) -> bool:
        if not self._is_done and self._slow.is_done(self):
            HostAddressCopier().start(self._copies)
            self._is_done = True
        return self._is_done


class SlowCopier(HostAddressCopier):
    def __init__(self, slow: SlowCopies) -> None:
        super().__init__()
        self._slow = slow

    def start(self, copies: Sequence[AddressCopies]) -> SlowJob:
        return SlowJob(copies, self._slow)


@pytest.fixture
def slow(near: Memory, far: Memory, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowCopies]:
    """Slow copies in transports that make their staging buffers from now on."""
    made = SlowCopies()
    monkeypatch.setattr(dist_staging, "copier_for", lambda _: SlowCopier(made))
    monkeypatch.setattr(dist_staging, "SLOW_COPY_S", 0.0)
    yield made
    made.allow_all()  # the transports are closed next, and wait for their copies


Lie = Callable[[Channel, PairGroup], None]


def _read_from_liar(
    near: Memory, lie: Lie, at_end: Callable[[], None] = lambda: None, reads: int = 1
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
                channel = Channel(connection)
                channel.authenticate_client(token)
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


@contextlib.contextmanager
def _connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as ours,
        listener.accept()[0] as theirs,
    ):
        yield ours, theirs


def _own_listening_ports() -> set[int]:
    return {
        connection.laddr.port
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
