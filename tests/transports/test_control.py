"""Tests that every control transport keeps the contract of `kvferry.transports.base`."""

from collections.abc import Callable

import pytest

from kvferry.testing.control_conformance import CONTROL_CASES, TransportMaker
from kvferry.transports.memory import MemoryControlTransport, MemoryNetwork
from kvferry.transports.zmq import CurveKeys, ZmqTransport

KEYS = CurveKeys.from_secret(b"of this test")


def zmq_maker() -> TransportMaker:
    return lambda port: ZmqTransport("127.0.0.1", "127.0.0.1", port, KEYS, bind_timeout_s=0.2)


def memory_maker() -> TransportMaker:
    network = MemoryNetwork()
    return lambda port: MemoryControlTransport(network, port)


@pytest.mark.parametrize("maker", [memory_maker, zmq_maker])
@pytest.mark.parametrize("case", CONTROL_CASES, ids=lambda case: case.__name__)
def test_the_transport_keeps_its_contract(
    maker: Callable[[], TransportMaker], case: Callable[[TransportMaker], None]
) -> None:
    case(maker())
