"""Tests the decisions of the CUDA IPC transport that need no device: which memory it registers, and
which offers it accepts.
"""

import msgspec
import pytest

from kvferry.errors import LocalProtocolError, TransportError
from kvferry.transports.base import TransportOffer
from kvferry.transports.cuda_ipc.peer import CudaOffer, OfferedAllocation
from kvferry.transports.cuda_ipc.transport import CudaIpcTransport
from kvferry.transports.locality import decoded_host_offer, host_identity
from kvferry.types import EngineId, Epoch, MemoryKind, PeerId, Region

PEER = PeerId(EngineId("far"), Epoch("1"), 0)
GOOD = CudaOffer(1, 2, b"g" * 16, [OfferedAllocation(b"h" * 64, 4096, 4096)])


def offered(offer: object, reach: str | None = None) -> TransportOffer:
    return TransportOffer(
        "cuda_ipc", host_identity() if reach is None else reach, msgspec.msgpack.encode(offer)
    )


def test_host_memory_and_memory_of_two_devices_are_not_its_own() -> None:
    transport = CudaIpcTransport()
    here = Region("a", 4096, 64, 64, 4)
    there = Region("b", 8192, 64, 64, 4, MemoryKind.VRAM, device=1)
    beside = Region("c", 8192, 64, 64, 4, MemoryKind.VRAM, device=0)
    assert not transport.register([here])
    assert not transport.register([here, there])
    assert not transport.register([there, beside])
    assert not transport.register([])


def test_a_transport_without_memory_offers_and_reaches_nothing() -> None:
    transport = CudaIpcTransport()
    with pytest.raises(LocalProtocolError):
        transport.offer()
    with pytest.raises(LocalProtocolError):
        transport.connect(PEER, offered(GOOD), [])
    with pytest.raises(TransportError):
        transport.read(PEER, [])
    assert transport.poll() == []
    assert transport.poll_interval_s() is None
    transport.close()
    transport.close()


def test_a_good_offer_is_understood() -> None:
    assert decoded_host_offer(PEER, offered(GOOD), CudaOffer) == GOOD


@pytest.mark.parametrize(
    "bad",
    [
        CudaOffer(-1, 2, b"g" * 16, []),
        CudaOffer(2**31, 2, b"g" * 16, []),
        CudaOffer(1, 2, b"g" * 16, [OfferedAllocation(b"short", 4096, 4096)]),
        CudaOffer(1, 2, b"g" * 16, [OfferedAllocation(b"h" * 64, -1, 4096)]),
        CudaOffer(1, 2, b"g" * 16, [OfferedAllocation(b"h" * 64, 4096, 4096)] * 5000),
        "something else",
        [1, 2],
    ],
    ids=["pid", "large pid", "handle", "address", "many", "text", "list"],
)
def test_an_offer_that_cannot_be_one_is_refused(bad: object) -> None:
    with pytest.raises(TransportError):
        decoded_host_offer(PEER, offered(bad), CudaOffer)


def test_an_offer_from_elsewhere_is_refused() -> None:
    with pytest.raises(TransportError, match="another host"):
        decoded_host_offer(PEER, offered(GOOD, "elsewhere"), CudaOffer)
