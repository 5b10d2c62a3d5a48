"""Device memory of a peer, opened in this process, and the checks on the peer's offer.

Owned by the transport's thread, in which the device's context is current.
"""

from contextlib import ExitStack, suppress

import msgspec

from kvferry.errors import TransportError
from kvferry.transports.base import TransportOffer
from kvferry.transports.cuda_ipc import driver as cuda_driver
from kvferry.transports.linked import Link, decoded_offer
from kvferry.transports.locality import ProcessIncarnation, check_same_host, process_ended
from kvferry.types import PeerId, Region

MAX_ALLOCATIONS = 4096
MAX_INT = (1 << 31) - 1


class OfferedAllocation(msgspec.Struct, frozen=True, array_like=True):
    """An allocation that contains regions.

    `address` is the address in the owner's process; regions have addresses of the owner's process
    too.
    """

    handle: bytes
    address: int
    size_bytes: int


class CudaOffer(msgspec.Struct, frozen=True, array_like=True):
    """The cuda_ipc offer of one process: process identity, GPU and allocations."""

    pid: int
    start_ticks: int
    gpu: bytes
    """UUID of the GPU, which is the same in every process."""
    allocations: list[OfferedAllocation]


class PeerMemory(Link):
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
        super().__init__(peer, regions)
        self.sizes = [region.size_bytes for region in regions]
        self._opened: list[int] = []
        incarnation = ProcessIncarnation.watch(offer.pid, offer.start_ticks)
        if incarnation is None:
            raise TransportError(process_ended(peer))
        self._incarnation = incarnation
        try:
            _check_reach(peer, offer.gpu, device, may_be_elsewhere)
            self.addresses = self._open(peer, offer)
        except TransportError:
            with suppress(TransportError):
                self.close()
            raise

    def problem(self) -> str | None:
        return process_ended(self.peer) if self._incarnation.has_ended() else None

    def close(self) -> None:
        """Close all allocations. Idempotent.

        Every transfer with this peer must have ended. All allocations are closed even if closing an
        allocation fails; then an error is raised.
        """
        opened, self._opened = self._opened, []
        with ExitStack() as stack:
            stack.callback(self._incarnation.close)
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


def decode_offer(peer: PeerId, offer: TransportOffer) -> CudaOffer:
    """Decode an offer. TransportError if malformed, or from another host, user or container."""
    decoded = decoded_offer(peer, offer, CudaOffer)
    numbers = [
        decoded.pid,
        decoded.start_ticks,
        *(n for each in decoded.allocations for n in (each.address, each.size_bytes)),
    ]
    is_possible = (
        min(numbers) >= 0 and decoded.pid <= MAX_INT and len(decoded.allocations) <= MAX_ALLOCATIONS
    )
    if not is_possible or any(
        len(each.handle) != cuda_driver.HANDLE_BYTES for each in decoded.allocations
    ):
        raise TransportError(
            f"the cuda_ipc offer of {peer} does not describe device memory; drop this peer"
        )
    check_same_host(peer, offer)
    return decoded


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
