"""Tests that the block store permutes exactly the named bytes, in slices, and refuses permutations
that would leave a region.
"""

import itertools

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvferry.errors import LocalProtocolError
from kvferry.transports.base import BlockPermutation, StoreCompletion, StoreHandle
from kvferry.transports.host_buffer import rearrange as rearranging
from kvferry.transports.host_buffer import store as block_store
from kvferry.transports.host_buffer.store import HostBlockStore
from kvferry.types import MemoryKind, Region

Bytes = npt.NDArray[np.uint8]
MANY_POLLS = 100_000


def filled(num_bytes: int) -> Bytes:
    return np.random.default_rng(num_bytes).integers(0, 256, num_bytes, dtype=np.uint8)


def region_of(memory: Bytes, memory_kind: MemoryKind = MemoryKind.DRAM) -> Region:
    """Return a region with all the memory as one block: a store only uses the size of a region."""
    return Region("l0", int(memory.ctypes.data), len(memory), len(memory), 1, memory_kind)


def run(store: HostBlockStore, *wanted: StoreHandle) -> list[StoreCompletion]:
    ended: list[StoreCompletion] = []
    for _ in range(MANY_POLLS):
        ended += store.poll()
        if {each.handle for each in ended} >= set(wanted):
            return ended
    raise AssertionError(f"not over after {MANY_POLLS} polls: {ended}")


def rearranged(memory: Bytes, placement: BlockPermutation) -> Bytes:
    """The slow reference: permute item by item, directly from the definition."""
    result = memory.copy()
    for start in placement.offsets.tolist():
        for index in itertools.product(*map(range, placement.shape)):
            source = start + sum(
                i * stride for i, stride in zip(index, placement.arrived, strict=True)
            )
            target = start + sum(
                i * stride for i, stride in zip(index, placement.wanted, strict=True)
            )
            result[target : target + placement.item_bytes] = memory[
                source : source + placement.item_bytes
            ]
    return result


def dense(shape: tuple[int, ...], order: tuple[int, ...], item_bytes: int) -> tuple[int, ...]:
    """Return the strides of dimensions nested in this order, outermost first, without gaps."""
    strides, step = [0] * len(shape), item_bytes
    for dim in reversed(order):
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


@st.composite
def permutations(draw: st.DrawFn, region: int = 0) -> tuple[int, BlockPermutation]:
    """Draw the size of a region, and a permutation of some of its blocks from one order of
    dimensions to another.
    """
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    item_bytes = draw(st.integers(1, 9))
    orders = [tuple(draw(st.permutations(range(len(shape))))) for _ in range(2)]
    gap = draw(st.integers(0, 3))
    block_bytes = int(np.prod(shape)) * item_bytes + gap
    stride = block_bytes + draw(st.integers(0, 3))
    num_blocks = draw(st.integers(1, 20))
    head = draw(st.integers(0, 5))
    chosen = draw(st.lists(st.integers(0, num_blocks - 1), unique=True, max_size=num_blocks))
    offsets = np.array(chosen, np.int64) * stride + head
    arrived, wanted = (dense(shape, order, item_bytes) for order in orders)
    return head + num_blocks * stride, BlockPermutation(
        region, block_bytes, offsets, item_bytes, shape, arrived, wanted
    )


@settings(max_examples=300)
@given(permutations())
def test_every_item_is_where_it_belongs_and_nothing_else_has_changed(
    case: tuple[int, BlockPermutation],
) -> None:
    size, placement = case
    memory = filled(size)
    expected = rearranged(memory, placement)
    store = HostBlockStore([region_of(memory)])
    handle = store.place([placement])
    assert run(store, handle) == [StoreCompletion(handle, None)]
    assert (memory == expected).all()


TWO_LARGE = (8, BlockPermutation(0, 4, np.array([0, 4]), 1, (2, 2), (2, 1), (1, 2)))


@example(TWO_LARGE, 1, 8)
@given(permutations(), st.integers(1, 40), st.integers(1, 40))
def test_blocks_of_many_slices_are_rearranged_like_small_ones(
    case: tuple[int, BlockPermutation], slice_bytes: int, aside_bytes: int
) -> None:
    size, placement = case
    memory = filled(size)
    expected = rearranged(memory, placement)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rearranging, "STEP_BYTES", slice_bytes)
        patch.setattr(rearranging, "ASIDE_BUFFER_BYTES", aside_bytes)
        patch.setattr(block_store, "STEP_BYTES", slice_bytes)
        store = HostBlockStore([region_of(memory)])
        run(store, store.place([placement]))
    assert (memory == expected).all()


def test_the_reference_notices_a_wrong_order() -> None:
    memory = filled(64)
    placement = BlockPermutation(0, 64, np.array([0]), 8, (2, 4), (32, 8), (8, 16))
    assert not (rearranged(memory, placement) == memory).all()


def swap(region: int, blocks: list[int], block_bytes: int) -> BlockPermutation:
    """Swap the two middle quarters of each block."""
    half, quarter = block_bytes // 2, block_bytes // 4
    return BlockPermutation(
        region,
        block_bytes,
        np.array(blocks) * block_bytes,
        quarter,
        (2, 2),
        (half, quarter),
        (quarter, half),
    )


def test_several_regions_and_several_jobs_are_worked_on_in_turn() -> None:
    first, second = filled(64 * 10), filled(64 * 11)
    expected = (
        rearranged(rearranged(first, swap(0, [1, 2], 64)), swap(0, [5], 64)),
        rearranged(second, swap(1, [3], 64)),
    )
    store = HostBlockStore([region_of(first), region_of(second)])
    assert store.poll() == []
    assert store.poll_interval_s() is None
    handles = store.place([swap(0, [1, 2], 64), swap(1, [3], 64)]), store.place([swap(0, [5], 64)])
    assert store.poll_interval_s() == 0
    assert {each.handle for each in run(store, *handles)} == set(handles)
    assert store.poll_interval_s() is None
    assert (first == expected[0]).all()
    assert (second == expected[1]).all()


def test_a_long_job_takes_many_polls_and_does_not_hold_up_a_short_one() -> None:
    """The worker sends no heartbeat during a poll."""
    block_bytes = 64 * 1024
    memory = filled(256 * block_bytes)
    store = HostBlockStore([region_of(memory)])
    long = store.place([swap(0, list(range(200)), block_bytes)])
    short = store.place([swap(0, [250], block_bytes)])
    ended: list[StoreCompletion] = []
    polls = 0
    while len(ended) < 2:
        ended += store.poll()
        polls += 1
    assert [each.handle for each in ended] == [short, long]
    assert polls >= 200 * block_bytes // (2 * rearranging.STEP_BYTES)


def test_a_short_job_is_over_in_one_poll() -> None:
    """This holds for any number of regions: a model has dozens of layers, and each poll is a tick
    of the transfer worker.
    """
    memories = [filled(640) for _ in range(30)]
    store = HostBlockStore([region_of(memory) for memory in memories])
    handle = store.place([swap(region, [1, 2], 64) for region in range(len(memories))])
    assert store.poll() == [StoreCompletion(handle, None)]


GOOD = BlockPermutation(0, 64, np.array([0, 64]), 8, (2, 4), (32, 8), (8, 16))
BAD = {
    "a region that is not ours": (1, 64, [0], 8, (2, 4), (32, 8), (8, 16)),
    "a region before the first": (-1, 64, [0], 8, (2, 4), (32, 8), (8, 16)),
    "a block before the region": (0, 64, [-1], 8, (2, 4), (32, 8), (8, 16)),
    "a block behind the region": (0, 64, [65], 8, (2, 4), (32, 8), (8, 16)),
    "the same block twice": (0, 64, [0, 0], 8, (2, 4), (32, 8), (8, 16)),
    "blocks that overlap": (0, 64, [0, 63], 8, (2, 4), (32, 8), (8, 16)),
    "items that leave their block as they arrived": (0, 64, [0], 8, (2, 4), (33, 8), (8, 16)),
    "items that leave their block where they belong": (0, 64, [0], 8, (2, 4), (32, 8), (8, 17)),
    "items before their block": (0, 64, [0], 8, (2, 4), (32, -8), (8, 16)),
    "no items": (0, 64, [0], 8, (0, 4), (32, 8), (8, 16)),
    "items of no bytes": (0, 64, [0], 0, (2, 4), (32, 8), (8, 16)),
    "no dimension": (0, 64, [0], 8, (), (), ()),
    "strides of other dimensions": (0, 64, [0], 8, (2, 4), (32,), (8, 16)),
}


@pytest.mark.parametrize("name", BAD)
def test_what_would_leave_a_region_or_a_block_is_refused_and_nothing_is_begun(name: str) -> None:
    region, block_bytes, offsets, *rest = BAD[name]
    memory = filled(128)
    before = memory.copy()
    store = HostBlockStore([region_of(memory)])
    with pytest.raises(LocalProtocolError):
        store.place(
            [
                GOOD,
                BlockPermutation(
                    region,
                    block_bytes,
                    np.array(offsets),
                    *rest,  # type: ignore[arg-type]
                ),
            ]
        )
    assert store.poll_interval_s() is None
    assert (memory == before).all()


def test_memory_of_another_device_is_not_touched() -> None:
    memory = filled(128)
    store = HostBlockStore([region_of(memory, MemoryKind.VRAM)])
    with pytest.raises(LocalProtocolError, match="host memory"):
        store.place([GOOD])


def test_a_closed_store_has_nothing_left_to_do() -> None:
    memory = filled(128)
    before = memory.copy()
    store = HostBlockStore([region_of(memory)])
    store.place([GOOD])
    store.close()
    store.close()
    assert store.poll() == []
    assert store.poll_interval_s() is None
    assert (memory == before).all()
