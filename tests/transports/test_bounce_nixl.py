"""Tests bounce-buffer transfers over real NIXL between processes: exact bytes, back-pressure, and
peers that die, stop or send garbage.
"""

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import numpy as np
import pytest
from tests.transports.bounce_plans import check_read, check_write, mixed, read_as_planned, shuffled
from tests.transports.bounce_reader import read_for_ever
from tests.transports.sides import bounce_nixl_side, nixl_side, slow_bounce_side

from kvferry.errors import ConfigError, LocalProtocolError, TransportError
from kvferry.testing.transport_pairs import (
    LARGE_BLOCK_BYTES,
    LARGE_REGION,
    FarSide,
    SpawnedFarSide,
    TransportPair,
    TransportPairSource,
    TransportSide,
)
from kvferry.transports.base import Segments, TransportOffer
from kvferry.transports.nixl.bounce import transport as bounce_transport
from kvferry.transports.nixl.bounce.mailbox import Mailbox
from kvferry.transports.nixl.bounce.messages import TransferEnded
from kvferry.transports.nixl.bounce.settings import BounceSettings
from kvferry.transports.nixl.bounce.transport import WAITING_INTERVAL_S, BounceNixlTransport
from kvferry.transports.nixl.transport import NixlTransport
from kvferry.types import EngineId, Epoch, MemoryKind, PeerId, Region

SECRET = b"the secret of these tests"
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def source() -> Iterator[TransportPairSource]:
    made = TransportPairSource(bounce_nixl_side, SpawnedFarSide)
    yield made
    made.close()


@pytest.fixture
def pair(source: TransportPairSource) -> Iterator[TransportPair]:
    with source.pair() as made:
        made.connect()
        yield made


@pytest.mark.parametrize("segment_bytes", [256, 1000, 4096, 65536, 1 << 20])
def test_reads_and_writes_bring_exactly_the_named_bytes(
    pair: TransportPair, segment_bytes: int
) -> None:
    count = min(20_000, LARGE_BLOCK_BYTES * 640 // segment_bytes)
    check_read(pair, shuffled(segment_bytes, seed=segment_bytes, count=count))
    check_write(pair, shuffled(segment_bytes, seed=segment_bytes + 1, count=count))


def test_segments_of_several_sizes_move_in_one_transfer(pair: TransportPair) -> None:
    check_read(pair, mixed(seed=1))
    check_write(pair, mixed(seed=2))


def test_another_plan_gives_other_bytes(pair: TransportPair) -> None:
    """The negative control of the tests above."""
    (plan,) = shuffled(4096, seed=3)
    remote = plan.remote_offsets.copy()
    remote[[5, 6]] = remote[[6, 5]]
    other = read_as_planned(
        pair, [Segments(plan.local_region, plan.remote_region, 4096, plan.local_offsets, remote)]
    )
    check_read(pair, [plan])
    assert not np.array_equal(pair.near.memory, other)


def test_many_transfers_at_once_pass_a_bounce_buffer_that_holds_two(pair: TransportPair) -> None:
    blocks = shuffled(LARGE_BLOCK_BYTES, seed=4)[0]
    plans = [
        Segments(
            LARGE_REGION,
            LARGE_REGION,
            LARGE_BLOCK_BYTES,
            blocks.local_offsets[n::20],
            blocks.remote_offsets[n::20],
        )
        for n in range(20)
    ]
    expected = read_as_planned(pair, plans)
    handles = [pair.near.transport.read(pair.peer, [plan]) for plan in plans]
    for completion in pair.wait(*handles).values():
        assert completion.ok, completion.error
        assert completion.segments < len(plans[0].local_offsets)
    assert np.array_equal(pair.near.memory, expected)


def test_transfers_of_both_directions_go_on_side_by_side(pair: TransportPair) -> None:
    (read,), (written,) = shuffled(4096, seed=5), shuffled(4096, seed=6)
    half = len(read.local_offsets) // 2
    reading = Segments(
        LARGE_REGION,
        LARGE_REGION,
        4096,
        np.sort(read.local_offsets)[:half],
        read.remote_offsets[:half],
    )
    writing = Segments(
        LARGE_REGION,
        LARGE_REGION,
        4096,
        np.sort(written.local_offsets)[half:],
        read.remote_offsets[half:],
    )
    handles = [
        pair.near.transport.read(pair.peer, [reading]),
        pair.near.transport.write(pair.peer, [writing]),
    ]
    assert all(completion.ok for completion in pair.wait(*handles).values())


def test_segments_without_bytes_are_refused(pair: TransportPair) -> None:
    offsets = np.zeros(20, np.int64)
    for start in (pair.near.transport.read, pair.near.transport.write):
        with pytest.raises(LocalProtocolError):
            start(pair.peer, [Segments(0, 0, 0, offsets, offsets)])


def test_a_bounce_buffer_is_no_region_that_a_plan_may_name(pair: TransportPair) -> None:
    offsets = np.arange(20, dtype=np.int64) * 64
    bounce_buffer = len(pair.near.regions)
    with pytest.raises(LocalProtocolError):
        pair.near.transport.read(pair.peer, [Segments(bounce_buffer, 0, 64, offsets, offsets)])
    with pytest.raises(TransportError):
        pair.near.transport.read(pair.peer, [Segments(0, bounce_buffer, 64, offsets, offsets)])


def test_peers_without_a_bounce_buffer_are_read_plainly_either_way() -> None:
    for ours, theirs in ((nixl_side, bounce_nixl_side), (bounce_nixl_side, nixl_side)):
        near, far = ours(), SpawnedFarSide(theirs)
        try:
            far.fill(0)
            near.transport.connect(PeerId(EngineId("far"), Epoch("1"), 0), far.offer, far.regions)
            pair = TransportPair(near, far, PeerId(EngineId("far"), Epoch("1"), 0), 0)
            (plan,) = shuffled(4096, seed=8, count=500)
            expected = read_as_planned(pair, [plan])
            handle = near.transport.read(pair.peer, [plan])
            completion = pair.wait(handle)[handle]
            assert (completion.error, completion.segments) == (None, 500)
            assert np.array_equal(near.memory, expected)
        finally:
            near.close()
            far.close()


def test_another_secret_is_not_answered_and_the_transfer_goes_plainly(
    source: TransportPairSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    with source.pair() as pair:
        stranger = _over(pair.near, b"another secret")
        stranger.connect(pair.peer, pair.far.offer, pair.far.regions)
        (plan,) = shuffled(4096, seed=9, count=400)
        expected = read_as_planned(pair, [plan])
        other = TransportPair(
            TransportSide(stranger, pair.near.memory, pair.near.regions, lambda: None),
            pair.far,
            pair.peer,
            pair.far_seed,
        )
        assert stranger.poll_interval_s() not in (0.0, WAITING_INTERVAL_S), (
            "nothing is expected yet"
        )
        monkeypatch.setattr(bounce_transport, "BUSY_S", DEADLINE_S)
        handle = stranger.read(pair.peer, [plan])
        assert stranger.poll() == []
        assert stranger.poll_interval_s() == 0.0, (
            "an answer may come at any moment, and each poll pauses by itself"
        )
        monkeypatch.setattr(bounce_transport, "BUSY_S", 0.0)
        assert stranger.poll_interval_s() == WAITING_INTERVAL_S, (
            "nobody answers: there is no hurry any more"
        )
        completion = other.wait(handle)[handle]
        assert (completion.error, completion.segments) == (None, 400)
        assert np.array_equal(pair.near.memory, expected)
        stranger.close()


def test_what_anybody_sends_is_dropped_and_others_are_served(pair: TransportPair) -> None:
    chaos = NixlTransport()
    assert chaos.register(pair.near.regions)
    chaos.connect(
        pair.peer,
        TransportOffer(pair.far.offer.transport, "", pair.far.offer.blob),
        pair.far.regions,
    )
    dice = random.Random(7)
    for number in range(400):
        chaos.notify(pair.peer, dice.randbytes(dice.choice((0, 1, 31, 32, 33, 200, 70_000))))
        if number % 100 == 0:
            check_read(pair, shuffled(65536, seed=number))
    chaos.close()
    check_write(pair, shuffled(65536, seed=1))


def test_notifications_that_mean_nothing_are_counted() -> None:
    near, far = bounce_nixl_side(), nixl_side()
    assert isinstance(near.transport, BounceNixlTransport)
    assert isinstance(far.transport, NixlTransport)
    peer = PeerId(EngineId("near"), Epoch("1"), 0)
    far.transport.connect(peer, near.transport.offer(), near.regions)
    for note in (b"", b"junk", bytes(300_000), bytes(64)):
        far.transport.notify(peer, note)
    deadline = time.monotonic() + DEADLINE_S
    while near.transport.num_dropped_notifications < 3:  # the longest is not examined
        assert time.monotonic() < deadline
        far.transport.poll()
        assert near.transport.poll() == []
    near.close()
    far.close()


def test_the_route_to_an_agent_is_kept_while_it_is_used() -> None:
    near, far = nixl_side(), nixl_side()
    assert isinstance(near.transport, NixlTransport)
    assert isinstance(far.transport, NixlTransport)
    mailbox, asking = Mailbox(near.transport, SECRET, near.regions[0]), far.transport.identity()
    messages = [TransferEnded(1, "why")]
    with pytest.raises(TransportError, match="no route"):
        mailbox.send(asking.agent, messages, now=0.0)
    mailbox.learn(asking.agent, asking.metadata, now=0.0)
    for now in (1.0, 50.0, 100.0):
        mailbox.send(asking.agent, messages, now)
        mailbox.forget_idle(now + 11.0, ())
    mailbox.forget_idle(100.0 + 61.0, {asking.agent})
    mailbox.send(asking.agent, messages, now=162.0)
    mailbox.forget_idle(162.0 + 61.0, ())
    with pytest.raises(TransportError, match="no route"):
        mailbox.send(asking.agent, messages, now=224.0)
    near.close()
    far.close()


@pytest.mark.slow
def test_a_killed_reader_leaves_room_for_others_and_its_slot_comes_back() -> None:
    with _owner() as far, _reader(far) as (process, pipe):
        assert pipe.recv() == "begun"
        time.sleep(0.05)
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join(DEADLINE_S)
        with PairSourceOf(far).pair() as pair:
            check_read(pair, shuffled(4096, seed=1, count=2000))
            time.sleep(7.0)
            for seed in range(
                4
            ):  # if the slot were not freed, these reads would use no bounce buffer
                check_read(pair, shuffled(4096, seed=seed, count=2000))


@pytest.mark.slow
def test_a_stopped_reader_fails_what_it_was_reading_and_reads_on() -> None:
    with _owner() as far, _reader(far) as (process, pipe):
        assert pipe.recv() == "begun"
        time.sleep(0.05)
        os.kill(process.pid or 0, signal.SIGSTOP)
        with PairSourceOf(far).pair() as pair:
            check_read(pair, shuffled(4096, seed=1, count=2000))
        time.sleep(7.0)
        os.kill(process.pid or 0, signal.SIGCONT)
        first = _told(pipe)
        assert first[0] is not None
        assert _told(pipe) == (None, True)


@pytest.mark.slow
def test_a_stopped_owner_fails_the_read_and_serves_again_when_it_wakes() -> None:
    with _owner() as far, PairSourceOf(far).pair() as pair:
        handle = pair.near.transport.read(pair.peer, shuffled(4096, seed=1))
        assert pair.tick() == []
        os.kill(far.pid, signal.SIGSTOP)
        assert pair.wait(handle)[handle].error is not None
        os.kill(far.pid, signal.SIGCONT)
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                pair.connect()
                break
            except TransportError:
                assert time.monotonic() < deadline
                pair.tick()
        check_read(pair, shuffled(4096, seed=2, count=2000))


def test_memory_of_several_kinds_or_of_no_device_is_not_carried() -> None:
    memory = np.zeros(4096, np.uint8)
    here = Region("k", memory.ctypes.data, 64, 64, 32)
    there = Region("v", memory.ctypes.data + 2048, 64, 64, 32, MemoryKind.VRAM)
    for regions in ([], [here, there], [there]):
        transport = BounceNixlTransport(BounceSettings(), SECRET)
        assert not transport.register(regions)
        with pytest.raises(LocalProtocolError):
            transport.offer()
        transport.close()


def test_a_backend_that_is_not_there_is_a_mistake_of_the_operator() -> None:
    memory = np.zeros(4096, np.uint8)
    transport = BounceNixlTransport(
        BounceSettings(segment_bytes=1, buffer_bytes=4096), SECRET, ("UCX", "NOSUCH")
    )
    with pytest.raises(ConfigError, match="NOSUCH"):
        transport.register([Region("kv", memory.ctypes.data, 64, 64, 64)])
    transport.close()


class PairSourceOf:
    """Makes pairs with a far side that another object owns."""

    def __init__(self, far: FarSide) -> None:
        self._far = far

    @contextmanager
    def pair(self) -> Iterator[TransportPair]:
        near = slow_bounce_side()
        self._far.fill(1)
        near.memory[:] = 0
        made = TransportPair(near, self._far, PeerId(EngineId("far"), Epoch("2"), 0), 1)
        made.connect()
        try:
            yield made
        finally:
            near.close()


@contextmanager
def _owner() -> Iterator[SpawnedFarSide]:
    far = SpawnedFarSide(slow_bounce_side)
    far.fill(1)
    try:
        yield far
    finally:
        far.close()


@contextmanager
def _reader(far: FarSide) -> Iterator[tuple[BaseProcess, Connection]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=read_for_ever, args=(theirs, far.offer, far.regions), daemon=True
    )
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join(DEADLINE_S)
        ours.close()


def _told(pipe: Connection) -> tuple[str | None, bool]:
    while True:
        assert pipe.poll(DEADLINE_S)
        if (told := pipe.recv()) != "begun":
            error, has_bytes = told
            return error, has_bytes


def _over(side: TransportSide, secret: bytes) -> BounceNixlTransport:
    settings = BounceSettings(
        segment_bytes=1 << 40, buffer_bytes=2 << 20, chunk_bytes=96 * 1024, min_descriptors=2
    )
    transport = BounceNixlTransport(settings, secret)
    assert transport.register(side.regions)
    return transport
