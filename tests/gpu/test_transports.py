"""Tests that the transports for device memory keep the contract of every data transport. The far
side is a process of its own on the same GPU.
"""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests.gpu.sides import bounce_nixl_side, cuda_ipc_side, nixl_side

from kvferry.errors import KVFerryError
from kvferry.testing.transport_conformance import CASES, Case, SpawnedFarSide, TransportPairSource
from kvferry.testing.transport_pairs import LARGE_BLOCK_BYTES, LARGE_BLOCKS, LARGE_REGION
from kvferry.transports.base import Segments

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]

MAKERS = {"cuda_ipc": cuda_ipc_side, "nixl": nixl_side, "bounce-nixl": bounce_nixl_side}


@pytest.fixture(scope="module", params=MAKERS)
def source(request: pytest.FixtureRequest) -> Iterator[TransportPairSource]:
    made = TransportPairSource(MAKERS[request.param], SpawnedFarSide)
    yield made
    made.close()


def test_one_impossible_offset_among_many_is_found_and_nothing_else_is_touched(
    source: TransportPairSource,
) -> None:
    """With this many offsets, some transports check an offset only when they reach it."""
    offsets = np.arange(LARGE_BLOCKS * LARGE_BLOCK_BYTES // 64, dtype=np.int64)[:10_000] * 64
    for wrong in (-64, LARGE_BLOCKS * LARGE_BLOCK_BYTES - 63):
        for side in range(2):
            with source.pair() as pair:
                pair.connect()
                before = pair.near.memory.copy()
                sides = [offsets.copy(), offsets.copy()]
                sides[side][-1] = wrong
                try:
                    handle = pair.near.transport.read(
                        pair.peer, [Segments(LARGE_REGION, LARGE_REGION, 64, *sides)]
                    )
                    assert not pair.wait(handle)[handle].ok
                except KVFerryError:
                    pass
                at = pair.place(LARGE_REGION, 0)
                assert np.array_equal(pair.near.memory[:at], before[:at])
                assert np.array_equal(
                    pair.near.memory[at + 10_000 * 64 :], before[at + 10_000 * 64 :]
                )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_transport_conforms(source: TransportPairSource, case: Case) -> None:
    case.run(source)
