"""Tests that NIXL with bounce buffers moves exactly the named bytes of device memory between two
processes, for segments of any size.
"""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests.gpu.sides import roomy_bounce_nixl_side
from tests.transports.bounce_plans import (
    LARGE_BYTES,
    check_read,
    check_write,
    mixed,
    read_as_planned,
    shuffled,
)

from kvferry.testing.transport_pairs import (
    LARGE_REGION,
    SpawnedFarSide,
    TransportPair,
    TransportPairSource,
)
from kvferry.transports.base import Segments

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


@pytest.fixture(scope="module")
def pair() -> Iterator[TransportPair]:
    source = TransportPairSource(roomy_bounce_nixl_side, SpawnedFarSide)
    with source.pair() as made:
        made.connect()
        yield made
    source.close()


@pytest.mark.parametrize("segment_bytes", [256, 1024, 4096, 16384, 65536, 262_144, 1 << 20])
def test_reads_bring_exactly_the_named_bytes(pair: TransportPair, segment_bytes: int) -> None:
    check_read(pair, shuffled(segment_bytes, seed=segment_bytes))


def test_segments_of_several_sizes_and_odd_ones_are_read_in_one_transfer(
    pair: TransportPair,
) -> None:
    check_read(pair, mixed(seed=1))


def test_another_plan_gives_other_bytes(pair: TransportPair) -> None:
    """The negative control of the tests above."""
    (plan,) = shuffled(4096, seed=3)
    remote = plan.remote_offsets.copy()
    remote[[5, 6]] = remote[[6, 5]]
    other = read_as_planned(
        pair, [Segments(LARGE_REGION, LARGE_REGION, 4096, plan.local_offsets, remote)]
    )
    check_read(pair, [plan])
    assert not np.array_equal(np.array(pair.near.memory), other)


def test_many_transfers_at_once_all_arrive(pair: TransportPair) -> None:
    (blocks,) = shuffled(16384, seed=4)
    plans = [
        Segments(
            LARGE_REGION,
            LARGE_REGION,
            16384,
            blocks.local_offsets[n::16],
            blocks.remote_offsets[n::16],
        )
        for n in range(16)
    ]
    expected = read_as_planned(pair, plans)
    handles = [pair.near.transport.read(pair.peer, [plan]) for plan in plans]
    assert all(completion.ok for completion in pair.wait(*handles).values())
    assert np.array_equal(np.array(pair.near.memory), expected)


@pytest.mark.parametrize("segment_bytes", [256, 16384, 1 << 20])
def test_writes_bring_exactly_the_named_bytes(pair: TransportPair, segment_bytes: int) -> None:
    pair.far.fill(pair.far_seed)
    assert LARGE_BYTES % segment_bytes == 0
    check_write(pair, shuffled(segment_bytes, seed=segment_bytes + 1))


def test_segments_of_several_sizes_and_odd_ones_are_written_in_one_transfer(
    pair: TransportPair,
) -> None:
    pair.far.fill(pair.far_seed)
    check_write(pair, mixed(seed=2))
