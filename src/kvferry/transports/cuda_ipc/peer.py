"""Device memory of a peer, opened in this process.

Owned by the transport's thread, in which the device's context is current.
"""

from contextlib import ExitStack, suppress
from typing import Annotated

import msgspec

from kvferry.errors import TransportError
from kvferry.transports.cuda_ipc import driver as cuda_driver
from kvferry.transports.locality import HostLink, OfferedInt, OfferedSize
from kvferry.types import PeerId, Region

MAX_ALLOCATIONS = 4096


class OfferedAllocation(msgspec.Struct, frozen=True, array_like=True):
    """An allocation that contains regions.

    `address` is the address in the owner's process; regions have addresses of the owner's process
    too.
    """

    handle: Annotated[
        bytes,
        msgspec.Meta(min_length=cuda_driver.HANDLE_BYTES, max_length=cuda_driver.HANDLE_BYTES),
    ]
    address: OfferedSize
    size_bytes: OfferedSize


class CudaOffer(msgspec.Struct, frozen=True, array_like=True):
    """The cuda_ipc offer of one process: process identity, GPU and allocations."""

    pid: OfferedInt
    start_ticks: OfferedSize
    gpu: bytes
    """UUID of the GPU, which is the same in every process."""
    allocations: Annotated[list[OfferedAllocation], msgspec.Meta(max_length=MAX_ALLOCATIONS)]


class PeerMemory(HostLink):
    """The opened allocations of one peer. The owner must call `close`.

    The constructor opens all allocations. TransportError if an allocation is not as offered.
    """

    def __init__(
        self,
        peer: PeerId,
        regions: tuple[Region, ...],
        offer: CudaOffer,
        device: int,
        may_be_elsewhere: bool,
    ) -> None:
        super().__init__(peer, regions, offer.pid, offer.start_ticks)
        self.sizes = [region.size_bytes for region in regions]
        self._opened: list[int] = []
        try:
            _check_reach(peer, offer.gpu, device, may_be_elsewhere)
            self.addresses = self._open(peer, offer)
        except TransportError:
            with suppress(TransportError):
                self.close()
            raise

    def close(self) -> None:
        """Close all allocations. Idempotent.

        Every transfer with this peer must have ended. All allocations are closed even if closing an
        allocation fails; then an error is raised.
        """
        opened, self._opened = self._opened, []
        with ExitStack() as stack:
            stack.callback(super().close)
            for address in opened:
                stack.callback(cuda_driver.close_handle, address)

    def _open(self, peer: PeerId, offer: CudaOffer) -> list[int]:
        """Open all allocations; return the local address of each of the peer's regions."""
        here: list[tuple[OfferedAllocation, int]] = []
        for allocation in offer.allocations:
            address = cuda_driver.open_handle(allocation.handle)
            self._opened.append(address)
            # A kernel that runs past the end of an allocation would break this process's CUDA
            # context, so the size comes from the driver, not from the peer.
            found = cuda_driver.allocation_of(address)
            if found.address + found.size_bytes - address < allocation.size_bytes:
                raise TransportError(
                    f"the device memory that {peer} offers is shorter than the offer "
                    "says; drop this peer"
                )
            here.append((allocation, address))
        return [_place(peer, region, here) for region in self.regions]


def _check_reach(peer: PeerId, gpu: bytes, device: int, may_be_elsewhere: bool) -> None:
    theirs = cuda_driver.device_with(gpu)
    if theirs is None:
        raise TransportError(
            f"the GPU of {peer} is not visible to this process (CUDA_VISIBLE_DEVICES); show it "
            "here, or use nixl"
        )
    if theirs != device and not (may_be_elsewhere and cuda_driver.can_reach(device, theirs)):
        raise TransportError(
            f"GPU {device} cannot reach GPU {theirs}, where the cache of {peer} is (no peer "
            "access, or no triton); use nixl there"
        )


def _place(peer: PeerId, region: Region, here: list[tuple[OfferedAllocation, int]]) -> int:
    """Return the local address of one of the peer's regions."""
    for allocation, address in here:
        at = region.address - allocation.address
        if at >= 0 and at + region.size_bytes <= allocation.size_bytes:
            return address + at
    raise TransportError(
        f"region {region.name!r} of {peer} is not in the device memory it offers; drop this peer"
    )
