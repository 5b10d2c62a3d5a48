"""Tests that the dist transport keeps the contract of every data transport for device memory: by
gloo, which stages the bytes in host memory, and by NCCL. The far side is a process of its own on
the same GPU.
"""

from collections.abc import Iterator

import pytest
import torch
from tests.gpu.sides import gloo_side, nccl_side

from kvferry.testing.transport_conformance import CASES, Case, SpawnedFarSide, TransportPairSource
from kvferry.testing.write_grant_conformance import WRITE_GRANT_CASES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]

MAKERS = {"gloo": gloo_side, "nccl": nccl_side}


# By NCCL, the case that closes a transport during a transfer fails (docs/p2p-nccl.md).
@pytest.fixture(scope="module", params=["gloo", pytest.param("nccl", marks=pytest.mark.exhaustive)])
def source(request: pytest.FixtureRequest) -> Iterator[TransportPairSource]:
    made = TransportPairSource(MAKERS[request.param], SpawnedFarSide)
    yield made
    made.close()


@pytest.mark.parametrize("case", [*CASES, *WRITE_GRANT_CASES], ids=lambda case: case.name)
def test_the_transport_conforms(source: TransportPairSource, case: Case) -> None:
    case.run(source)
