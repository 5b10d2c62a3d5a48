"""The planes that carry device memory keep the promises of every plane. The far side is a process of its own on the same GPU."""

from collections.abc import Iterator

import pytest
import torch
from tests.gpu.sides import cuda_ipc_side, nixl_side, staged_nixl_side

from kvferry.testing.plane_conformance import CASES, Case, PairSource, SpawnedFar

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")]

MAKERS = {"cuda_ipc": cuda_ipc_side, "nixl": nixl_side, "staged-nixl": staged_nixl_side}


@pytest.fixture(scope="module", params=MAKERS)
def source(request: pytest.FixtureRequest) -> Iterator[PairSource]:
    made = PairSource(MAKERS[request.param], SpawnedFar)
    yield made
    made.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_plane_conforms(source: PairSource, case: Case) -> None:
    case.run(source)
