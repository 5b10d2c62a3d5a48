"""Every control plane keeps the contract of `kvferry.ports.control`."""

from collections.abc import Callable

import pytest

from kvferry.planes.memory import MemoryControlPlane, MemoryNetwork
from kvferry.planes.zmq import CurveKeys, ZmqControlPlane
from kvferry.testing.control_conformance import CONTROL_CASES, PlaneMaker

KEYS = CurveKeys.from_secret(b"of this test")


def zmq_maker() -> PlaneMaker:
    return lambda port: ZmqControlPlane("127.0.0.1", "127.0.0.1", port, KEYS, bind_patience_s=0.2)


def memory_maker() -> PlaneMaker:
    network = MemoryNetwork()
    return lambda port: MemoryControlPlane(network, port)


@pytest.mark.parametrize("maker", [memory_maker, zmq_maker])
@pytest.mark.parametrize("case", CONTROL_CASES, ids=lambda case: case.__name__)
def test_the_plane_keeps_its_contract(maker: Callable[[], PlaneMaker], case: Callable[[PlaneMaker], None]) -> None:
    case(maker())
