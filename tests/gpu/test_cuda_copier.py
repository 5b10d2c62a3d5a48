"""Tests that segments of any size and alignment are copied between device addresses, both by the
kernel and by plain torch.
"""

import time

import numpy as np
import pytest
import torch

from kvferry.transports.copy.cuda import CudaAddressCopier, copy_by_torch
from kvferry.transports.copy.cuda_table import CudaTable
from kvferry.transports.copy.gather import AddressCopies, CopyJob
from kvferry.transports.copy.table import TABLE_ROWS, split_by_launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]

MEMORY_BYTES = 64 * 1024 * 1024
DEADLINE_S = 30.0


@pytest.fixture(params=["kernel", "torch"])
def copier(request: pytest.FixtureRequest) -> CudaAddressCopier:
    return CudaAddressCopier(0, copy_by_torch if request.param == "torch" else None)


def copy(copier: CudaAddressCopier, copies: list[AddressCopies]) -> None:
    """Wait for the stream that filled the memory, then run the copies."""
    torch.cuda.synchronize()
    wait_for(copier.start(copies))


def wait_for(job: CopyJob) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not job.is_done():
        assert time.monotonic() < deadline


def scattered(size_bytes: int, count: int, odd: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return random sources and disjoint targets, each `odd` bytes after an aligned offset."""
    random = np.random.default_rng(seed)
    step = -(-size_bytes // 16) * 16
    slots = (MEMORY_BYTES - odd) // step
    return random.integers(0, slots, count) * step + odd, random.permutation(slots)[
        :count
    ] * step + odd


@pytest.mark.parametrize("odd", [0, 8, 1])
@pytest.mark.parametrize(
    ("size_bytes", "count"),
    [(1, 5), (16, 1000), (256, 20_000), (1000, 300), (4096, 1000), (16384, 200), (1 << 20, 9)],
)
def test_every_segment_arrives_and_nothing_else_is_touched(
    copier: CudaAddressCopier, size_bytes: int, count: int, odd: int
) -> None:
    source = torch.randint(0, 256, (MEMORY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.randint(0, 256, (MEMORY_BYTES,), dtype=torch.uint8, device="cuda")
    bytes_there, expected = source.cpu().numpy(), target.cpu().numpy().copy()
    before = expected.copy()
    sources, targets = scattered(size_bytes, count, odd, seed=count)
    for origin, to in zip(sources.tolist(), targets.tolist(), strict=True):
        expected[to : to + size_bytes] = bytes_there[origin : origin + size_bytes]
    copy(
        copier,
        [AddressCopies(size_bytes, sources, targets, (source.data_ptr(),), (target.data_ptr(),))],
    )
    assert np.array_equal(target.cpu().numpy(), expected)
    assert not np.array_equal(expected, before), "the control: nothing was asked for"
    copier.close()


def test_parts_of_several_sizes_and_more_than_a_table_of_rows_go_in_one_job(
    copier: CudaAddressCopier,
) -> None:
    source = torch.randint(0, 256, (MEMORY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.zeros(MEMORY_BYTES, dtype=torch.uint8, device="cuda")
    rows = np.arange(TABLE_ROWS + 100, dtype=np.int64) * 16
    half = MEMORY_BYTES // 2
    parts = [
        AddressCopies(16, rows, rows[::-1].copy(), (source.data_ptr(),), (target.data_ptr(),)),
        AddressCopies(
            4096,
            rows[:9] * 256,
            rows[:9] * 256,
            (source.data_ptr() + half,),
            (target.data_ptr() + half,),
        ),
        AddressCopies(16, np.empty(0, np.int64), np.empty(0, np.int64)),
    ]
    copy(copier, parts)
    size = len(rows) * 16
    assert torch.equal(target[:size].view(-1, 16), source[:size].view(-1, 16).flip(0))
    assert torch.equal(target[half : half + 9 * 4096], source[half : half + 9 * 4096])
    assert not target[size:half].any()
    copier.close()


@pytest.mark.parametrize("odd", [0, 3])
@pytest.mark.parametrize("scale", [1, 900])
def test_places_of_unequal_length_go_together(
    copier: CudaAddressCopier, odd: int, scale: int
) -> None:
    """Places of 3 and 5 rows in one launch, and the same with 900 times as many rows."""
    source = torch.randint(0, 256, (MEMORY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.zeros(MEMORY_BYTES, dtype=torch.uint8, device="cuda")
    quarter, size = MEMORY_BYTES // 4, 1024
    copies = []
    expected = np.zeros(MEMORY_BYTES, np.uint8)
    here = source.cpu().numpy()
    for number, (first, rows) in enumerate([(0, 3 * scale), (2 * quarter, 5 * scale)]):
        sources, targets = (
            np.random.default_rng(number).permutation(rows).astype(np.int64) * size + odd
            for _ in range(2)
        )
        targets = targets[::-1].copy()
        bases = [
            tuple(memory.data_ptr() + first + n * quarter for n in range(2))
            for memory in (source, target)
        ]
        copies.append(AddressCopies(size, sources, targets, bases[0], bases[1]))
        for base in (first, first + quarter):
            for origin, to in zip(
                (base + sources).tolist(), (base + targets).tolist(), strict=True
            ):
                expected[to : to + size] = here[origin : origin + size]
    assert len(list(split_by_launch(copies))) == 1
    copy(copier, copies)
    assert np.array_equal(target.cpu().numpy(), expected)
    copier.close()


def test_the_same_offsets_stand_for_several_places(copier: CudaAddressCopier) -> None:
    source = torch.randint(0, 256, (MEMORY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.zeros(MEMORY_BYTES, dtype=torch.uint8, device="cuda")
    rows, layer = np.arange(100, dtype=np.int64) * 4096, MEMORY_BYTES // 16
    sources, targets = (
        tuple(memory.data_ptr() + n * layer for n in range(0, 16, 3)) for memory in (source, target)
    )
    copy(copier, [AddressCopies(4096, rows, rows[::-1].copy(), sources, targets)])
    expected = torch.zeros_like(target).view(16, layer)
    expected[::3, : 100 * 4096] = (
        source.view(16, layer)[::3, : 100 * 4096]
        .reshape(-1, 100, 4096)
        .flip(1)
        .reshape(-1, 100 * 4096)
    )
    assert torch.equal(target.view(16, layer), expected)
    assert target.any(), "the control: nothing was asked for"
    copier.close()


def test_a_pause_ends_with_a_job_and_lasts_as_long_as_it_is_told_without_one(
    copier: CudaAddressCopier,
) -> None:
    memory, places = torch.zeros(2, 4096, dtype=torch.uint8, device="cuda"), np.zeros(1, np.int64)
    copies = [AddressCopies(4096, places, places, (memory[0].data_ptr(),), (memory[1].data_ptr(),))]
    copy(copier, copies)
    for _ in range(2):  # reclaim the finished job, which returns at once
        copier.pause(0.0)
    began = time.monotonic()
    copier.pause(0.01)
    assert time.monotonic() - began >= 0.01
    job = copier.start(copies)
    copier.pause(DEADLINE_S)
    assert job.is_done()
    assert time.monotonic() - began < DEADLINE_S
    copier.close()


def test_triton_compiles_and_the_driver_starts() -> None:
    from kvferry.transports.copy.kernel import (
        SegmentKernel,
    )  # needs triton, which machines without a GPU lack

    kernel = SegmentKernel(
        CudaTable(torch.device("cuda", 0)),
        torch.empty(128 * 1024, dtype=torch.uint8, device="cuda"),
    )
    assert kernel.is_started_by_driver, "every transfer would cost what triton takes for a launch"


def test_many_jobs_behind_a_busy_device_do_not_share_memory_too_early(
    copier: CudaAddressCopier,
) -> None:
    """More jobs than tables, each with its own offsets; meanwhile the engine's stream frees memory
    that it will still read.
    """
    segments, size, rounds, ones = 64, 4096, 300, 200_000
    source = torch.randint(0, 256, (segments * size,), dtype=torch.uint8, device="cuda").view(
        segments, size
    )
    target = torch.zeros(rounds, segments, size, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    places = np.arange(segments, dtype=np.int64) * size
    orders = [
        np.random.default_rng(turn).permutation(segments).astype(np.int64) for turn in range(rounds)
    ]
    sums, jobs = list[torch.Tensor](), list[CopyJob]()
    for turn, order in enumerate(orders):
        if turn % 20 == 0:
            numbers = torch.ones(ones, device="cuda")
            # This is torch's only kernel that runs for a given time.
            torch.cuda._sleep(1_000_000)  # noqa: SLF001
            sums.append(numbers.sum())
            del numbers
        bases = (source.data_ptr(),), (target[turn].data_ptr(),)
        jobs.append(copier.start([AddressCopies(size, order * size, places, *bases)]))
    for job in jobs:
        wait_for(job)
    for turn, order in enumerate(orders):
        assert torch.equal(target[turn], source[torch.from_numpy(order).cuda()]), turn
    assert [total.item() for total in sums] == [ones] * len(sums)
    assert len({tuple(order) for order in orders}) == rounds, "the control: every table was another"
    copier.close()
