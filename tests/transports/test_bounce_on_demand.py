"""Tests that bounce buffers are allocated when the first transfer needs them, and not before.

The two engines are transports over real NIXL in this process. Their bounce buffers come from an
allocator that counts bytes, and that can be out of memory.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest

from kvferry.errors import TransportError
from kvferry.transports.base import Completion, DataTransport, Segments
from kvferry.transports.memory import MemoryNetwork, MemoryTransport
from kvferry.transports.nixl.bounce import transport as bounce_transport
from kvferry.transports.nixl.bounce.memory import BufferMemory, allocate_buffer
from kvferry.transports.nixl.bounce.settings import BounceSettings
from kvferry.transports.nixl.bounce.transport import BounceNixlTransport
from kvferry.types import EngineId, Epoch, PeerId, Region

BUFFER_BYTES = 256 * 1024
SEGMENT_BYTES, SLOTS, COUNT = 4096, 512, 300


class CountingAllocator:
    """Counts the bytes of bounce buffers, and allocates nothing while `has_room` is False."""

    def __init__(self) -> None:
        self.num_allocated = 0
        self.held_bytes = 0
        self.has_room = True
        self.gives_null = False
        """True: the allocator returns memory at address 0, which NIXL does not register."""

    def __call__(self, size_bytes: int, like: Region) -> BufferMemory:
        if not self.has_room:
            raise TransportError("out of memory")
        self.num_allocated += 1
        self.held_bytes += size_bytes
        memory = allocate_buffer(size_bytes, like)
        address = 0 if self.gives_null else memory.address
        return CountedMemory(address, size_bytes, memory.owner, self)


@dataclass(slots=True)
class CountedMemory(BufferMemory):
    allocator: CountingAllocator

    def close(self) -> None:
        self.allocator.held_bytes -= self.size_bytes
        BufferMemory.close(self)


class Engine:
    """A side with one region, registered with a bounce-buffer transport."""

    def __init__(self, name: str, buffer_bytes: int) -> None:
        self.peer = PeerId(EngineId(name), Epoch("1"), 0)
        self.memory = np.random.default_rng([*name.encode()]).integers(
            0, 256, SLOTS * SEGMENT_BYTES, dtype=np.uint8
        )
        self.regions = [
            Region("kv", self.memory.ctypes.data, SEGMENT_BYTES, SEGMENT_BYTES, SLOTS),
        ]
        self.allocator = CountingAllocator()
        settings = BounceSettings(
            segment_bytes=1 << 40, buffer_bytes=buffer_bytes, chunk_bytes=32 * 1024
        )
        self.transport = BounceNixlTransport(
            settings, b"the secret of these tests", allocate=self.allocator
        )
        assert self.transport.register(self.regions)
        self.offer = self.transport.offer()

    def connect(self, owner: "Engine") -> None:
        self.transport.connect(owner.peer, owner.offer, owner.regions)


@contextmanager
def engines(*names: str, buffer_bytes: int = BUFFER_BYTES) -> Iterator[list[Engine]]:
    made = [Engine(name, buffer_bytes) for name in names]
    try:
        yield made
    finally:
        for engine in made:
            engine.transport.close()
            assert engine.allocator.held_bytes == 0, "a closed transport holds no memory"


@pytest.fixture
def reader_and_owner() -> Iterator[tuple[Engine, Engine]]:
    with engines("reader", "owner") as (reader, owner):
        reader.connect(owner)
        yield reader, owner


def held_bytes(*made: Engine) -> list[int]:
    return [engine.allocator.held_bytes for engine in made]


def scattered(seed: int) -> Segments:
    random = np.random.default_rng(seed)
    local, remote = (
        random.permutation(SLOTS)[:COUNT].astype(np.int64) * SEGMENT_BYTES for _ in range(2)
    )
    return Segments(0, 0, SEGMENT_BYTES, local, remote)


def read_by(
    transports: tuple[DataTransport, DataTransport], reader: Engine, owner: Engine, plan: Segments
) -> Completion:
    """Read while polling both sides, and compare every byte."""
    expected, blocks = (
        engine.memory.reshape(SLOTS, SEGMENT_BYTES).copy() for engine in (reader, owner)
    )
    expected[plan.local_offsets // SEGMENT_BYTES] = blocks[plan.remote_offsets // SEGMENT_BYTES]
    handle = transports[0].read(owner.peer, [plan])
    ended: list[Completion] = []
    while not ended:
        transports[1].poll()
        ended = transports[0].poll()
    assert [(each.handle, each.error) for each in ended] == [(handle, None)]
    assert np.array_equal(reader.memory, expected.reshape(-1))
    return ended[0]


def is_bounced(reader: Engine, owner: Engine, seed: int) -> bool:
    """Read scattered segments; False if NIXL got a descriptor for each of them."""
    completion = read_by((reader.transport, owner.transport), reader, owner, scattered(seed))
    assert completion.segments in range(1, COUNT + 1)
    return completion.segments < COUNT // 2


def test_registration_offers_connections_and_long_segments_allocate_nothing(
    reader_and_owner: tuple[Engine, Engine],
) -> None:
    reader, owner = reader_and_owner
    row = np.arange(COUNT, dtype=np.int64) * SEGMENT_BYTES
    transports = reader.transport, owner.transport
    read_by(transports, reader, owner, Segments(0, 0, SEGMENT_BYTES, row, row))
    assert held_bytes(reader, owner) == [0, 0]


def test_transfers_over_another_transport_allocate_nothing(
    reader_and_owner: tuple[Engine, Engine],
) -> None:
    network = MemoryNetwork()
    others = MemoryTransport(network), MemoryTransport(network)
    for engine, other in zip(reader_and_owner, others, strict=True):
        assert other.register(engine.regions)
    reader, owner = reader_and_owner
    others[0].connect(owner.peer, others[1].offer(), owner.regions)
    read_by(others, reader, owner, scattered(1))
    for engine in reader_and_owner:
        engine.transport.poll()
    assert held_bytes(reader, owner) == [0, 0]


def test_the_first_transfer_of_small_segments_allocates_both_bounce_buffers(
    reader_and_owner: tuple[Engine, Engine], caplog: pytest.LogCaptureFixture
) -> None:
    reader, owner = reader_and_owner
    with caplog.at_level(logging.INFO, bounce_transport.__name__):
        assert is_bounced(reader, owner, seed=1)
    assert held_bytes(reader, owner) == [BUFFER_BYTES, BUFFER_BYTES]
    reports = [
        record.getMessage().split(" peer=")[0]
        for record in caplog.records
        if record.name == bounce_transport.__name__
    ]
    assert reports == [f"bounce buffer of {BUFFER_BYTES} bytes allocated on the host"] * 2


def test_all_peers_and_both_directions_share_one_bounce_buffer() -> None:
    with engines("a", "b", "c") as (a, b, c):
        for reader, owner in ((a, b), (b, a), (c, a), (a, c), (a, b)):
            reader.connect(owner)  # with an offer made before any bounce buffer existed
            assert is_bounced(reader, owner, seed=2)
        assert [each.allocator.num_allocated for each in (a, b, c)] == [1, 1, 1]
        assert held_bytes(a, b, c) == [BUFFER_BYTES] * 3


def test_with_size_0_no_bounce_buffer_is_used_on_either_side() -> None:
    with engines("with") as (other,), engines("without", buffer_bytes=0) as (without,):
        for reader, owner in ((other, without), (without, other)):
            reader.connect(owner)
            assert not is_bounced(reader, owner, seed=3)
        assert held_bytes(other, without) == [0, 0]


@pytest.mark.parametrize("which", [0, 1])
def test_a_side_without_memory_says_so_once_and_its_segments_go_one_by_one(
    reader_and_owner: tuple[Engine, Engine], which: int, caplog: pytest.LogCaptureFixture
) -> None:
    reader_and_owner[which].allocator.has_room = False
    for seed in range(3):
        assert not is_bounced(*reader_and_owner, seed)
    [warning] = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert f"no bounce buffer of {BUFFER_BYTES} bytes" in warning
    assert "out of memory" in warning
    assert "set bounce_buffer_bytes" in warning
    assert held_bytes(reader_and_owner[which]) == [0]


@pytest.mark.parametrize("which", [0, 1])
def test_once_there_is_memory_again_a_later_transfer_allocates_it(
    reader_and_owner: tuple[Engine, Engine], which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounce_transport, "ALLOCATION_RETRY_S", 0.0)
    allocator = reader_and_owner[which].allocator
    allocator.has_room = False
    assert not is_bounced(*reader_and_owner, seed=1)
    allocator.has_room = True
    assert is_bounced(*reader_and_owner, seed=2)
    assert held_bytes(*reader_and_owner) == [BUFFER_BYTES, BUFFER_BYTES]


@pytest.mark.parametrize("which", [0, 1])
def test_memory_that_nixl_does_not_register_is_freed_and_segments_go_one_by_one(
    reader_and_owner: tuple[Engine, Engine], which: int
) -> None:
    allocator = reader_and_owner[which].allocator
    allocator.gives_null = True
    assert not is_bounced(*reader_and_owner, seed=1)
    assert (allocator.num_allocated, allocator.held_bytes) == (1, 0)
