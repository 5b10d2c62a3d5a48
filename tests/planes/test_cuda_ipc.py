"""What the plane for device memory decides without a device: which memory is its own, and which offers it believes."""

import msgspec
import pytest

from kvferry.errors import LocalProtocolError, TransportError
from kvferry.planes.cuda_ipc import CudaIpcDataPlane
from kvferry.planes.cuda_peer import CudaOffer, OfferedAllocation, decode_offer
from kvferry.planes.fabric import host_reach
from kvferry.ports.data import PlaneOffer
from kvferry.types import EngineId, Epoch, MemoryKind, PeerId, Region

PEER = PeerId(EngineId("far"), Epoch("1"), 0)
GOOD = CudaOffer(1, 2, b"g" * 16, [OfferedAllocation(b"h" * 64, 4096, 4096)])


def offered(offer: object, reach: str | None = None) -> PlaneOffer:
    return PlaneOffer("cuda_ipc", host_reach() if reach is None else reach, msgspec.msgpack.encode(offer))


def test_host_memory_and_memory_of_two_devices_are_not_its_own() -> None:
    plane = CudaIpcDataPlane()
    here = Region("a", 4096, 64, 64, 4)
    there = Region("b", 8192, 64, 64, 4, MemoryKind.VRAM, device=1)
    beside = Region("c", 8192, 64, 64, 4, MemoryKind.VRAM, device=0)
    assert not plane.register([here])
    assert not plane.register([here, there])
    assert not plane.register([there, beside])
    assert not plane.register([])


def test_a_plane_without_memory_offers_and_reaches_nothing() -> None:
    plane = CudaIpcDataPlane()
    with pytest.raises(LocalProtocolError):
        plane.offer()
    with pytest.raises(LocalProtocolError):
        plane.connect(PEER, offered(GOOD), [])
    with pytest.raises(TransportError):
        plane.read(PEER, [])
    assert plane.poll() == []
    assert plane.poll_interval_s() is None
    plane.close()
    plane.close()


def test_a_good_offer_is_understood() -> None:
    assert decode_offer(PEER, offered(GOOD)) == GOOD


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
        decode_offer(PEER, offered(bad))


def test_an_offer_from_elsewhere_is_refused() -> None:
    with pytest.raises(TransportError, match="another host"):
        decode_offer(PEER, offered(GOOD, "elsewhere"))
