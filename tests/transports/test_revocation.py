"""Tests that a write grant can be revoked reliably, also from stopped and from lying writers, and
any number of times.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.transports.revoked_writer import start_writer
from tests.transports.sides import tcp_side, write_grant_memory_side
from tests.transports.tcp_peers import (
    BLOCK,
    BLOCKS,
    DEADLINE_S,
    PEER,
    Memory,
    all_blocks,
    introduce,
    receive,
    request,
    rest_of,
    wait,
)

from kvferry.errors import LocalProtocolError
from kvferry.testing.transport_pairs import (
    LARGE_BLOCK_BYTES,
    LARGE_BLOCKS,
    LARGE_REGION,
    SMALL_BLOCKS,
    TransportSide,
)
from kvferry.transports.base import Completion, DataTransport, Handle, Operation, Segments
from kvferry.transports.faulty import FaultyTransport, parse_faults
from kvferry.transports.memory import MemoryNetwork, MemoryTransport
from kvferry.transports.tcp import server as tcp_server
from kvferry.transports.tcp import wire
from kvferry.transports.write_grants import MAX_GRANT_ID, GrantedBlocks, WriteGrants
from kvferry.types import Region

CANARY = 77
ENDLESS = 256
ALL = (range(SMALL_BLOCKS), range(LARGE_BLOCKS))
GRANT_ID, GRANTED_BLOCKS = 41, (3, 4, 9)


def until(is_reached: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_reached():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def is_reached_soon(is_reached: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 5.0
    while not is_reached() and time.monotonic() < deadline:
        time.sleep(0.01)
    return is_reached()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def collect(transport: DataTransport, count: int) -> list[Completion]:
    ended: list[Completion] = []

    def is_all() -> bool:
        ended.extend(transport.poll())
        return len(ended) >= count

    until(is_all)
    return ended


@contextlib.contextmanager
def owner() -> Iterator[TransportSide]:
    side = tcp_side()
    try:
        yield side
    finally:
        side.close()


@pytest.mark.parametrize("is_revoked", [True, False])
def test_a_writer_that_was_stopped_writes_nothing_into_blocks_of_another(is_revoked: bool) -> None:
    """SIGSTOP stops the writer while it sends; SIGCONT resumes it when the blocks have another
    owner. Without the revocation, the blocks are overwritten.
    """
    with (
        owner() as side,
        contextlib.closing(start_writer(side.transport.offer(), side.regions)) as writer,
    ):
        side.transport.grant_writes(1, ALL)
        side.transport.grant_writes(2, ALL)
        writer.write(1, ENDLESS)
        until(side.memory.any)
        os.kill(writer.pid, signal.SIGSTOP)
        try:
            if is_revoked:
                assert wait(side.transport, side.transport.revoke_writes(1)).ok
            side.memory[:] = CANARY
        finally:
            os.kill(writer.pid, signal.SIGCONT)
        if not is_revoked:
            until(lambda: np.any(side.memory != CANARY))
            return
        assert "write grant 1 is not active" in str(writer.how_it_ended())
        assert np.all(side.memory == CANARY)
        writer.write(2, 1)
        assert writer.how_it_ended() is None, "the writer had lost its peer"
        assert np.count_nonzero(side.memory == 5) == LARGE_BLOCKS * LARGE_BLOCK_BYTES


def test_a_writer_that_was_stopped_for_longer_than_it_is_listened_to_learns_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        owner() as side,
        contextlib.closing(start_writer(side.transport.offer(), side.regions)) as writer,
    ):
        files = open_files()
        side.transport.grant_writes(GRANT_ID, ALL)
        # The signal may stop the writer between two of its requests. The owner then does not wait
        # for bytes and keeps the connection, so the test tries again.
        for grant_id in range(1, 9):
            side.memory[:] = 0
            side.transport.grant_writes(grant_id, ALL)
            writer.write(grant_id, ENDLESS)
            until(side.memory.any)
            assert open_files() > files
            os.kill(writer.pid, signal.SIGSTOP)
            try:
                assert wait(side.transport, side.transport.revoke_writes(grant_id)).ok
                with monkeypatch.context() as patch:
                    patch.setattr(tcp_server, "STALL_TIMEOUT_S", 0.2)
                    is_closed = is_reached_soon(lambda: open_files() <= files)
            finally:
                os.kill(writer.pid, signal.SIGCONT)
            assert f"write grant {grant_id} is not active" in str(writer.how_it_ended())
            if is_closed:
                break
        else:
            pytest.fail("the owner never closed the connection of a stopped writer")
        writer.write(GRANT_ID, 1)
        assert writer.how_it_ended() is None, "the writer had lost its peer"


def test_a_writer_that_is_killed_amid_its_bytes_leaves_a_number_that_can_be_taken_back() -> None:
    with (
        owner() as side,
        contextlib.closing(start_writer(side.transport.offer(), side.regions)) as writer,
    ):
        side.transport.grant_writes(1, ALL)
        writer.write(1, ENDLESS)
        until(side.memory.any)
        os.kill(writer.pid, signal.SIGKILL)
        assert wait(side.transport, side.transport.revoke_writes(1)).ok
        side.memory[:] = CANARY
        writer.process.join(DEADLINE_S)
        assert np.all(side.memory == CANARY)


@pytest.mark.parametrize("sent_before", [0, 1, BLOCK, 3 * BLOCK - 1])
def test_bytes_that_come_after_the_revocation_land_nowhere(far: Memory, sent_before: int) -> None:
    """The owner has read the header and `sent_before` bytes of the body."""
    far.transport.grant_writes(GRANT_ID, [range(BLOCKS)])
    body = b"\x05" * (3 * BLOCK)
    with introduce(far.offer) as connection:
        connection.sendall(
            request(Operation.WRITE, (far.first, 3 * BLOCK), grant_id=GRANT_ID) + body[:sent_before]
        )
        until(lambda: np.count_nonzero(far.bytes == 5) == sent_before)
        assert wait(far.transport, far.transport.revoke_writes(GRANT_ID)).ok
        far.bytes[:] = CANARY
        connection.sendall(body[sent_before:])
        connection.sendall(
            request(Operation.WRITE, (far.first, 3 * BLOCK), grant_id=GRANT_ID) + body
        )
        assert_not_lent(receive_reply(connection))
        far.transport.grant_writes(GRANT_ID + 1, [range(BLOCKS)])
        with contextlib.suppress(OSError):
            connection.sendall(
                request(Operation.WRITE, (far.first, BLOCK), grant_id=GRANT_ID + 1) + body[:BLOCK]
            )
            connection.shutdown(socket.SHUT_WR)
        assert rest_of(connection) == b"", "a connection that was turned away was served again"
    assert np.all(far.bytes == CANARY)


def test_several_who_receive_are_taken_back_together_and_whoever_asks_twice_is_told_twice(
    far: Memory,
) -> None:
    far.transport.grant_writes(GRANT_ID, [range(BLOCKS)])
    with introduce(far.offer) as first, introduce(far.offer) as second:
        for nth, connection in enumerate((first, second)):
            connection.sendall(
                request(Operation.WRITE, (far.first + nth * BLOCK, BLOCK), grant_id=GRANT_ID)
                + b"\x05" * 100
            )
        until(lambda: np.count_nonzero(far.bytes == 5) == 200)
        handles = [far.transport.revoke_writes(GRANT_ID) for _ in range(2)]
        assert {each.handle for each in collect(far.transport, 2)} == set(handles)
        for connection in (first, second):
            assert_not_lent(receive_reply(connection))
    assert far.transport.poll_interval_s() is None


def test_a_writer_that_was_turned_away_and_goes_on_is_hung_up_on(
    far: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_server, "MAX_SINKS", 3)
    with introduce(far.offer) as connection:
        connection.sendall(request(Operation.WRITE, (far.first, BLOCK), grant_id=GRANT_ID))
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 1000:
                connection.sendall(b"\x05" * tcp_server.SINK_BYTES)
                sent += 1
        assert sent < 1000
    assert np.all(far.bytes == 7)


def test_a_refused_write_costs_the_other_transfers_of_its_peer_nothing(
    near: Memory, far: Memory
) -> None:
    near.transport.connect(PEER, far.transport.offer(), far.regions)
    refused = {near.transport.write(PEER, all_blocks(), grant_id) for grant_id in range(1, 9)}
    reads = {near.transport.read(PEER, all_blocks()) for _ in range(8)}
    errors = {each.handle: each.error for each in collect(near.transport, 16)}
    assert all("not active" in str(errors[handle]) for handle in refused)
    assert {errors[handle] for handle in reads} == {None}
    assert wait(near.transport, near.transport.read(PEER, all_blocks())).ok, "the peer was given up"


grant_ids = st.sampled_from([GRANT_ID, GRANT_ID, 0, GRANT_ID + 1, GRANT_ID << 8, MAX_GRANT_ID])
places = st.tuples(st.integers(-BLOCK, (BLOCKS + 1) * BLOCK), st.integers(0, 3 * BLOCK))


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    grant_id=grant_ids,
    runs=st.lists(st.one_of(places, st.just((3 * BLOCK + 5, BLOCK))), min_size=1, max_size=3),
)
def test_a_write_lands_exactly_when_its_number_is_lent_and_every_byte_is_in_its_blocks(
    far: Memory, grant_id: int, runs: list[tuple[int, int]]
) -> None:
    far.transport.revoke_writes(GRANT_ID)
    far.transport.poll()
    far.transport.grant_writes(GRANT_ID, [GRANTED_BLOCKS])
    far.bytes[:] = 7
    touched = {place for offset, size in runs for place in range(offset, offset + size)}
    is_allowed = (
        grant_id == GRANT_ID
        and all(size for _, size in runs)
        and {place // BLOCK for place in touched} <= {*GRANTED_BLOCKS}
    )
    with introduce(far.offer) as connection:
        with contextlib.suppress(ConnectionError):
            sent = request(
                Operation.WRITE,
                *((far.first + offset, size) for offset, size in runs),
                grant_id=grant_id,
            )
            connection.sendall(sent + b"\x05" * sum(size for _, size in runs))
        if is_allowed:
            assert receive_reply(connection) == (0, "")
        with contextlib.suppress(OSError):  # the transport may have closed the connection already
            connection.shutdown(socket.SHUT_WR)
        rest_of(connection)
    assert {*(np.flatnonzero(far.bytes == 5) - BLOCK).tolist()} == (
        touched if is_allowed else set()
    )


def test_a_read_that_names_a_number_is_refused(far: Memory) -> None:
    far.transport.grant_writes(GRANT_ID, [GRANTED_BLOCKS])
    with introduce(far.offer) as connection:
        connection.sendall(request(Operation.READ, (far.first + 3 * BLOCK, 64), grant_id=GRANT_ID))
        assert "only writes" in receive_reply(connection)[1]


@pytest.mark.parametrize("make", [write_grant_memory_side, tcp_side])
def test_a_hundred_thousand_numbers_come_and_go_and_leave_nothing(
    make: Callable[[], TransportSide],
) -> None:
    side = make()

    def grant_and_revoke(count: int) -> None:
        for grant_id in range(1, count + 1):
            side.transport.grant_writes(grant_id, [[grant_id % SMALL_BLOCKS]])
            handle = side.transport.revoke_writes(grant_id)
            assert [each.handle for each in side.transport.poll()] == [handle]

    try:
        grant_and_revoke(1000)
        before = sys.getallocatedblocks()
        grant_and_revoke(100_000)
        assert sys.getallocatedblocks() < before + 5000
        assert side.transport.poll_interval_s() is None
    finally:
        side.close()


def test_numbers_and_blocks_that_cannot_be_lent_are_a_bug_of_ours() -> None:
    regions = (Region("a", 1000, 10, 10, 4), Region("b", 5000, 10, 10, 8, group=1))
    ended: list[Completion] = []
    grants = WriteGrants(regions, ended.append)
    grants.grant(1, [[0, 3], [7]])
    for grant_id, blocks in (
        (1, []),
        (0, []),
        (-1, []),
        (MAX_GRANT_ID + 1, []),
        (2, [[4]]),
        (2, [[-1]]),
        (2, [[], [8]]),
    ):
        with pytest.raises(LocalProtocolError):
            grants.grant(grant_id, blocks)
    assert not grants.begin(2)
    grants.grant(MAX_GRANT_ID, [[], [], [99]])  # a group without a region here
    assert grants.revoke(1, Handle(5))
    assert [each.handle for each in ended] == [Handle(5)]
    grants.grant(1, [])


def test_a_revocation_ends_with_the_last_write_under_the_grant() -> None:
    ended: list[Completion] = []
    grants = WriteGrants((Region("a", 1000, 10, 10, 4),), ended.append)
    grants.grant(1, [[0]])
    assert grants.begin(1)
    assert grants.begin(1)
    assert not grants.revoke(1, Handle(5))
    assert not grants.begin(1), "a write began after the revocation"
    grants.end(1)
    assert ended == []
    grants.end(1)
    assert [(each.handle, each.ok) for each in ended] == [(Handle(5), True)]


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3), st.integers(0, 1)), max_size=4),
    st.lists(st.integers(0, 4), max_size=5),
    st.lists(st.tuples(st.integers(0, 130), st.integers(1, 30)), min_size=1, max_size=3),
)
def test_segments_are_covered_exactly_when_every_byte_is_in_a_granted_block(
    shapes: list[tuple[int, int, int]], ids: list[int], runs: list[tuple[int, int]]
) -> None:
    regions = tuple(
        Region(str(nth), nth * 25 + 7, size, size + gap, 5, group=group)
        for nth, (size, gap, group) in enumerate(shapes)
    )  # the regions overlap and interleave
    granted = GrantedBlocks(regions, (tuple(ids),))
    allowed = {
        place
        for region in regions
        if region.group == 0
        for block in ids
        for place in range(
            region.address + block * region.stride_bytes,
            region.address + block * region.stride_bytes + region.block_bytes,
        )
    }
    is_covered = all({*range(address, address + size)} <= allowed for address, size in runs)
    assert granted.covers(*np.array(runs, np.int64).T) == is_covered


def test_a_number_is_taken_back_while_another_thread_writes_under_it() -> None:
    near, far = write_grant_memory_side(), write_grant_memory_side()
    offsets = np.arange(LARGE_BLOCKS, dtype=np.int64) * LARGE_BLOCK_BYTES
    errors: list[str | None] = []
    near.memory[:] = 5
    near.transport.connect(PEER, far.transport.offer(), far.regions)

    def write() -> None:
        near.transport.write(
            PEER,
            [Segments(LARGE_REGION, LARGE_REGION, LARGE_BLOCK_BYTES, offsets, offsets)] * ENDLESS,
            1,
        )
        while not errors:
            errors.extend(each.error for each in near.transport.poll())

    far.transport.grant_writes(1, ALL)
    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    until(lambda: np.any(far.memory[::LARGE_BLOCK_BYTES]))
    handle = far.transport.revoke_writes(1)
    assert [each.handle for each in far.transport.poll()] == [handle]
    far.memory[:] = CANARY
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert "not active" in str(errors[0])
    assert np.all(far.memory == CANARY)
    near.close()
    far.close()


def test_faults_pass_a_revocation_on_and_may_only_delay_it() -> None:
    network = MemoryNetwork()
    content = np.zeros(4096, np.uint8)
    regions = [Region("kv", content.ctypes.data, 64, 64, 64)]
    transport = FaultyTransport(
        MemoryTransport(network, supports_write_grants=True),
        parse_faults("fail:every=1;delay:polls=2"),
    )
    writer = MemoryTransport(network)
    assert transport.supports_write_grants
    assert not writer.supports_write_grants
    assert transport.register(regions)
    assert writer.register(regions)
    writer.connect(PEER, transport.offer(), regions)
    zero = np.zeros(1, np.int64)
    transport.grant_writes(1, [[0]])
    assert wait(writer, writer.write(PEER, [Segments(0, 0, 64, zero, zero)], 1)).ok
    handle = transport.revoke_writes(1)
    told = [transport.poll() for _ in range(3)]
    assert told[:2] == [[], []]
    assert [(each.handle, each.error) for each in told[2]] == [(handle, None)]
    assert not wait(writer, writer.write(PEER, [Segments(0, 0, 64, zero, zero)], 1)).ok
    transport.close()
    writer.close()


def receive_reply(connection: socket.socket) -> tuple[int, str]:
    reply = receive(connection, wire.REPLY_BYTES)
    text = receive(connection, wire.text_bytes_in(reply)) if len(reply) == wire.REPLY_BYTES else b""
    return (reply[0] if reply else -1), text.decode()


def assert_not_lent(reply: tuple[int, str]) -> None:
    status, text = reply
    assert status == wire.ReplyStatus.NOT_GRANTED
    assert f"write grant {GRANT_ID} is not active" in text


def test_nothing_lands_in_memory_whose_transport_is_closed_while_a_peer_writes() -> None:
    network, size = MemoryNetwork(), 64 << 20
    ours, theirs = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    writer, owner = MemoryTransport(network, True), MemoryTransport(network, True)
    regions = [Region("r", int(each.ctypes.data), size, size, 1) for each in (ours, theirs)]
    for transport, region in zip((writer, owner), regions, strict=True):
        assert transport.register([region])
    writer.connect(PEER, owner.offer(), [regions[1]])
    owner.grant_writes(GRANT_ID, [[0]])
    start = np.zeros(1, np.int64)
    writer.write(PEER, [Segments(0, 0, size, start, start)], GRANT_ID)
    ended: list[Completion] = []

    def write() -> None:
        while not ended:
            ended.extend(writer.poll())

    thread = threading.Thread(target=write)
    thread.start()
    until(lambda: theirs[0])
    owner.close()
    landed = int(np.count_nonzero(theirs))
    thread.join()
    assert np.count_nonzero(theirs) == landed < size
    assert ended[0].error
    writer.close()
