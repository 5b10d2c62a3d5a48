"""Tests the host buffer of a cache on a CUDA device: it keeps the contract of the one in host
memory, and no call waits for a copy.
"""

import time
from collections.abc import Iterator

import pytest
import torch

from kvferry.errors import LocalProtocolError
from kvferry.transports.base import StoreCompletion, StoreHandle
from kvferry.transports.host_buffer.cuda import CudaHostBuffer
from kvferry.transports.host_buffer.store import HostBlockStore
from kvferry.transports.shm import SharedMemory
from kvferry.types import MemoryKind, Region

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]

LAYERS, NUM_BLOCKS = 4, 64
DEADLINE_S = 30.0


class BufferedCache:
    """A device cache whose blocks interleave the layers, and a dense host buffer."""

    def __init__(self, size: int) -> None:
        """`size`: the number of bytes of a block."""
        self.engine = torch.randint(
            0, 256, (NUM_BLOCKS, LAYERS, size), dtype=torch.uint8, device="cuda"
        )
        self.memory = SharedMemory.allocate(LAYERS * NUM_BLOCKS * size)
        self.host_buffer = torch.frombuffer(self.memory.buffer, dtype=torch.uint8).view(
            LAYERS, NUM_BLOCKS, size
        )
        self.host_buffer.random_(0, 256)
        own, seen = (
            [
                Region(f"l{i}", start + i * step, size, stride, NUM_BLOCKS, kind, group=i % 2)
                for i in range(LAYERS)
            ]
            for start, step, stride, kind in (
                (self.engine.data_ptr(), size, LAYERS * size, MemoryKind.VRAM),
                (self.memory.address, NUM_BLOCKS * size, size, MemoryKind.DRAM),
            )
        )
        self.regions = own, seen
        self.store = HostBlockStore(
            seen, CudaHostBuffer(own, seen, (self.memory.address, self.memory.size_bytes))
        )

    def run(self, *handles: StoreHandle) -> int:
        """Poll until all handles are complete, and return the number of polls."""
        ended: list[StoreCompletion] = []
        polls, deadline = 0, time.monotonic() + DEADLINE_S
        while len(ended) < len(handles):
            assert time.monotonic() < deadline
            ended += self.store.poll()
            polls += 1
        assert {stored.handle for stored in ended} == set(handles)
        assert all(stored.error is None for stored in ended)
        return polls

    def close(self) -> None:
        self.store.close()
        self.store.close()
        del self.host_buffer
        self.memory.close()


@pytest.fixture(params=[32 * 1024, 2 * 1024 * 1024, 1001], ids=["gathered", "copied", "odd"])
def cache(request: pytest.FixtureRequest) -> Iterator[BufferedCache]:
    made = BufferedCache(request.param)
    yield made
    made.close()


BLOCKS = ([1, 2, 3, 9, 40, 41], [0, 63, 7])


def test_named_blocks_are_saved_and_nothing_else_is_touched(cache: BufferedCache) -> None:
    expected, engine = cache.host_buffer.clone(), cache.engine.cpu()
    for layer in range(LAYERS):
        expected[layer, BLOCKS[layer % 2]] = engine[BLOCKS[layer % 2], layer]
    cache.run(cache.store.copy_to_host_buffer(BLOCKS))
    assert torch.equal(cache.host_buffer, expected)
    assert torch.equal(cache.engine.cpu(), engine)


def test_named_blocks_are_loaded_and_nothing_else_is_touched(cache: BufferedCache) -> None:
    expected, host_buffer = cache.engine.cpu(), cache.host_buffer.clone()
    for layer in range(LAYERS):
        expected[BLOCKS[layer % 2], layer] = host_buffer[layer, BLOCKS[layer % 2]]
    cache.run(cache.store.place((), BLOCKS))
    assert torch.equal(cache.engine.cpu(), expected)
    assert torch.equal(cache.host_buffer, host_buffer)


def test_a_handle_comes_back_when_the_device_is_through_and_polls_do_not_wait_for_it(
    cache: BufferedCache,
) -> None:
    blocks = (list(range(NUM_BLOCKS)),) * 2
    saving = cache.store.copy_to_host_buffer(blocks)
    loading = cache.store.place((), ([],) * 2)
    assert cache.run(saving, loading) > 1
    assert torch.equal(cache.host_buffer, cache.engine.cpu().transpose(0, 1))


def test_a_block_that_is_not_there_is_refused(cache: BufferedCache) -> None:
    with pytest.raises(LocalProtocolError):
        cache.store.copy_to_host_buffer([[NUM_BLOCKS], []])


def test_a_host_buffer_of_host_memory_is_not_for_this_class(cache: BufferedCache) -> None:
    _, seen = cache.regions
    with pytest.raises(LocalProtocolError):
        CudaHostBuffer(seen, seen, (cache.memory.address, cache.memory.size_bytes))
