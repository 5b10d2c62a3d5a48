"""Tests that a host buffer holds exactly the saved blocks, and the engine exactly the loaded
blocks, for any distance between blocks.
"""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import LocalProtocolError
from kvferry.transports.base import NO_BLOCK, BlockPermutation, StoreCompletion, StoreHandle
from kvferry.transports.host_buffer.store import CpuHostBuffer, HostBlockStore
from kvferry.types import MemoryKind, Region

NUM_BLOCKS, BLOCK_BYTES = 12, 24
Bytes = npt.NDArray[np.uint8]


class Cache:
    """Two regions of one group and one of another, in the engine's memory and a host buffer."""

    GROUPS = (0, 0, 1)

    def __init__(self, gap: int = 0) -> None:
        """`gap`: bytes between the engine's blocks, as with interleaved layers."""
        rng = np.random.default_rng(gap)
        self.engine = rng.integers(0, 256, (3, NUM_BLOCKS, BLOCK_BYTES + gap), dtype=np.uint8)
        self.host_buffer = rng.integers(0, 256, (3, NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
        engine, host_buffer = (
            [
                Region(
                    f"l{index}",
                    int(layer.ctypes.data),
                    BLOCK_BYTES,
                    layer.shape[1],
                    NUM_BLOCKS,
                    group=group,
                )
                for index, (layer, group) in enumerate(zip(memory, self.GROUPS, strict=True))
            ]
            for memory in (self.engine, self.host_buffer)
        )
        self.store = HostBlockStore(host_buffer, CpuHostBuffer(engine, host_buffer))

    def run(self, handle: StoreHandle) -> None:
        ended: list[StoreCompletion] = []
        for _ in range(100):
            ended += self.store.poll()
        assert ended == [StoreCompletion(handle, None)]
        assert self.store.poll_interval_s() is None


numbers = st.lists(st.integers(0, NUM_BLOCKS - 1) | st.just(NO_BLOCK))


@given(st.tuples(numbers, numbers), st.integers(0, 9), st.booleans())
def test_named_blocks_are_copied_and_nothing_else_is_touched(
    blocks: tuple[list[int], list[int]], gap: int, is_save: bool
) -> None:
    cache = Cache(gap)
    engine, host_buffer = cache.engine.copy(), cache.host_buffer.copy()
    for region, group in enumerate(cache.GROUPS):
        for block in set(blocks[group]) - {NO_BLOCK}:
            if is_save:
                host_buffer[region, block] = engine[region, block, :BLOCK_BYTES]
            else:
                engine[region, block, :BLOCK_BYTES] = host_buffer[region, block]
    cache.run(cache.store.copy_to_host_buffer(blocks) if is_save else cache.store.place((), blocks))
    assert (cache.engine == engine).all()
    assert (cache.host_buffer == host_buffer).all()


def test_blocks_are_put_in_order_before_they_go_to_the_engine() -> None:
    cache = Cache()
    placement = BlockPermutation(
        1, BLOCK_BYTES, np.array([5 * BLOCK_BYTES]), 1, (4, 6), (6, 1), (1, 4)
    )
    arrived = cache.host_buffer[1, 5].copy()
    cache.run(cache.store.place([placement], [[5], []]))
    assert (cache.engine[1, 5].reshape(6, 4) == arrived.reshape(4, 6).T).all()
    assert not (cache.engine[1, 5] == arrived).all()


@pytest.mark.parametrize("block", [NUM_BLOCKS, -2])
def test_blocks_that_are_not_there_are_refused_and_nothing_is_begun(block: int) -> None:
    cache = Cache()
    for begin in (cache.store.copy_to_host_buffer, lambda blocks: cache.store.place((), blocks)):
        with pytest.raises(LocalProtocolError, match=str(block)):
            begin([[1, block], [1]])
    assert cache.store.poll_interval_s() is None


def test_a_group_that_is_not_named_is_left_alone() -> None:
    cache = Cache()
    before = cache.host_buffer[2].copy()
    cache.run(cache.store.copy_to_host_buffer([[1, 2]]))
    assert (cache.host_buffer[2] == before).all()


def test_a_cache_without_a_host_buffer_has_nothing_to_copy() -> None:
    memory = np.zeros(BLOCK_BYTES, np.uint8)
    store = HostBlockStore([Region("l0", int(memory.ctypes.data), BLOCK_BYTES, BLOCK_BYTES, 1)])
    with pytest.raises(LocalProtocolError, match="nothing to copy"):
        store.copy_to_host_buffer([[0]])
    with pytest.raises(LocalProtocolError, match="nothing to copy"):
        store.place((), [[0]])


def test_a_cache_on_a_device_needs_another_host_buffer() -> None:
    memory = np.zeros(BLOCK_BYTES, np.uint8)
    region = Region("l0", int(memory.ctypes.data), BLOCK_BYTES, BLOCK_BYTES, 1, MemoryKind.VRAM)
    with pytest.raises(LocalProtocolError, match="host memory"):
        CpuHostBuffer([region], [region])


def test_closing_twice_is_closing_once() -> None:
    cache = Cache()
    cache.store.copy_to_host_buffer([[1]])
    cache.store.close()
    cache.store.close()
    assert cache.store.poll() == []
