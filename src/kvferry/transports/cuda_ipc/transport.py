"""The `cuda_ipc` data transport: moves KV between GPUs of one host with our own copy kernel.

The transport opens a peer's memory in this process, and our kernel reads or writes the peer's
memory directly. Owned by one thread. Every allocation that contains a region is opened once per
peer and incarnation. A transfer is one kernel over all segments (more if the segments are very many
or very unequal), on our own streams. No engine waits for a transfer: `poll` watches the device for
a short time without the GIL, so that the engine's threads run. Facts about CUDA 13:

- Memory that is open here stays mapped when the owner dies, until closed. So the death of a peer
  fails transfers, but never this process. But the open memory would keep the peer's whole cache
  allocated on the device, so the transport regularly checks whether all peers are alive.
- A kernel that touches unmapped memory ends the process's use of the GPU for good. So an offer is
  trusted only as far as the driver confirms the offer: the size of every allocation is requested
  from the local driver.
- A process cannot open its own handles, and memory from CUDA's virtual memory calls (torch's
  expandable segments) has no handles.

See docs/decisions/036-cuda-ipc.md.
"""

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from kvferry.errors import TransportError
from kvferry.sleep import SHORT_SLEEP_S
from kvferry.transports.base import Completion, Handle, Operation, Segments, TransportOffer
from kvferry.transports.copy.gather import AddressCopies, Timing
from kvferry.transports.copy.segments import check_segment_fields, group_by_offsets
from kvferry.transports.copy.table import FIRST_ROWS, is_one_launch, split_by_tick
from kvferry.transports.cuda_ipc import driver as cuda_driver
from kvferry.transports.cuda_ipc.peer import (
    CudaOffer,
    OfferedAllocation,
    PeerMemory,
)
from kvferry.transports.linked import LINK_CHECK_S, LinkedTransfer, LinkedTransport
from kvferry.transports.locality import decoded_host_offer, host_identity, own_start_ticks
from kvferry.types import MemoryKind, PeerId, Region

if TYPE_CHECKING:
    from kvferry.transports.copy.cuda import CudaAddressCopier, CudaCopyJob, CudaDevice


class CudaTransfer(LinkedTransfer[PeerMemory]):
    """One transfer by our own kernels: segments as addresses, launched step by step."""

    def __init__(
        self, handle: Handle, link: PeerMemory, operation: Operation, copies: list[AddressCopies]
    ) -> None:
        # A launch that fails says nothing about the peer.
        super().__init__(handle, link, operation, keeps_link=True)
        self._copies = copies
        self._launches = split_by_tick(copies)
        self._next = next(self._launches, None)
        self._jobs: list[CudaCopyJob] = []

    @property
    def is_launching(self) -> bool:
        return self._next is not None

    @property
    def is_one_launch(self) -> bool:
        """Whether one kernel launch covers the whole transfer.

        Then nothing moves if an offset is invalid.
        """
        return len(self._copies) == 1 and is_one_launch(self._copies[0])

    def launch(self, copier: "CudaAddressCopier") -> None:
        """Launch the next kernel of the transfer."""
        assert self._next is not None, "every copy has been launched"
        began = time.perf_counter()
        try:
            self._jobs.append(copier.start(self._next))
        except TransportError as error:
            self.stop(str(error))
            return
        self.total_bytes += sum(part.total_bytes for part in self._next)
        self._next = next(self._launches, None)
        self.segments += 1
        self.post_s += time.perf_counter() - began

    def stop(self, why: str) -> None:
        """Launch no further kernels."""
        self._next = None
        super().stop(why)

    def has_ended(self) -> bool:
        """Whether no kernel of the transfer touches memory any more, and none will."""
        try:
            # The last job is queried first: while the last job runs, the earlier jobs need not be
            # queried.
            return not self.is_launching and all(job.is_done() for job in reversed(self._jobs))
        except TransportError as error:
            self.stop(str(error))
            return True

    def completion(self) -> Completion:
        is_timed = self.error is None and self._jobs and self._jobs[0].timespan is not None
        return replace(super().completion(), device_s=self._device_s() if is_timed else None)

    def _device_s(self) -> float | None:
        times = (job.device_s(self._jobs[0]) for job in self._jobs)
        return max((seconds for seconds in times if seconds is not None), default=None)


# -- transport --


LAUNCH_S = 500e-6
"""How long one poll launches kernels of a transfer.

The device shall not have to wait for the rest of a tick.
"""
WATCH_S = 250e-6
"""How long one poll watches running kernels; most have ended by then."""
BUSY_S = 2e-3
"""How long after the last launch or completion the device is polled without pause.

A copy of 1 GiB takes a quarter of this time.
"""

_log = logging.getLogger(__name__)


class CudaIpcTransport(LinkedTransport[PeerMemory, CudaTransfer]):
    """Implements `base.DataTransport` for device memory.

    CUDA is not loaded before `register` is called with device memory.
    """

    name = "cuda_ipc"
    link_check_s = LINK_CHECK_S

    def __init__(self) -> None:
        super().__init__()
        self._addresses: list[int] = []
        self._sizes: list[int] = []
        self._device: CudaDevice | None = None
        self._offer: CudaOffer
        self._moved_at = 0.0
        """When a kernel was last launched or a transfer last ended."""

    def _open(self, regions: tuple[Region, ...]) -> bool:
        if {region.memory for region in regions} != {MemoryKind.VRAM} or len(
            {region.device for region in regions}
        ) != 1:
            return False
        # Imported only if there is a device, because the import needs torch with CUDA.
        from kvferry.transports.copy.cuda import CudaDevice

        device = CudaDevice(regions[0].device)
        try:
            device.enter()
            self._offer = _own_offer(regions, device.number)
            device.prepare()
        except (
            TransportError,
            RuntimeError,
        ) as error:  # torch raises RuntimeError, for example if out of memory
            _log.warning(
                "this cache cannot be shared with other processes over cuda_ipc: %s", error
            )
            return False
        self._device = device
        self._addresses = [region.address for region in regions]
        self._sizes = [region.size_bytes for region in regions]
        return True

    def offer(self) -> TransportOffer:
        self._check_open()
        return TransportOffer(self.name, host_identity(), msgspec.msgpack.encode(self._offer))

    def _connect(
        self, peer: PeerId, offer: TransportOffer, regions: tuple[Region, ...]
    ) -> PeerMemory:
        device = self._entered()
        decoded = decoded_host_offer(peer, offer, CudaOffer)
        if decoded.pid == os.getpid():
            raise TransportError(
                f"{peer} is this process itself, whose memory cannot be opened again; "
                "drop this peer"
            )
        # Memory of the same allocation is not opened twice at a time.
        self.disconnect(peer)
        return PeerMemory(peer, regions, decoded, device.number, device.copier.reaches_other_gpus)

    def _progress(self) -> None:
        if not self._transfers:
            return
        launched = self._launch_next()
        others = [each for each in self._transfers.values() if each is not launched]
        if launched is None and self._is_moving(time.monotonic()):
            self._watch()
        self._end_finished(others)

    def poll_interval_s(self) -> float | None:
        if self._transfers:
            return 0.0 if self._is_moving(time.monotonic()) else SHORT_SLEEP_S
        return super().poll_interval_s()

    def set_timing(self, timing: Timing) -> None:
        """Set whether completions report the device's time; the measurement costs some
        microseconds.
        """
        self._entered().copier.timing = timing

    def _close(self) -> None:
        """Waits for running kernels, which may touch memory that is freed next."""
        device, self._device = self._device, None
        if device is not None:
            device.close()

    def _entered(self) -> "CudaDevice":
        """Return the device, with the device's context current in the calling thread."""
        self._check_open()
        assert self._device is not None
        self._device.work()
        return self._device

    def _check_segments(self, segments: Sequence[Segments], link: PeerMemory) -> None:
        """Check all but the offsets, which are checked when they are written into the table."""
        check_segment_fields(segments, self._regions, link.regions, link.peer)

    def _post(
        self, link: PeerMemory, segments: Sequence[Segments], operation: Operation, grant_id: int
    ) -> CudaTransfer:
        copies = [self._copies(group, link, operation) for group in group_by_offsets(segments)]
        transfer = CudaTransfer(self._next_handle(), link, operation, copies)
        copier = self._entered().copier
        is_next = (
            transfer.is_launching
            and not copier.is_full
            and not any(each.is_launching for each in self._transfers.values())
        )
        # A small transfer is checked completely before any byte moves. For a large transfer a
        # complete check would take as long as moving a good part of the bytes, so the offsets are
        # checked launch by launch.
        if sum(part.num_rows for part in copies) <= FIRST_ROWS and not (
            is_next and transfer.is_one_launch
        ):
            super()._check_segments(segments, link)
        # A transfer with one launch is checked by the launch, before anything moves. If the launch
        # failed, the check below raises the precise error.
        if is_next:
            self._launch(transfer, copier)
            if transfer.error is not None:
                super()._check_segments(segments, link)
        return transfer

    def _copies(
        self, group: Sequence[Segments], memory: PeerMemory, operation: Operation
    ) -> AddressCopies:
        size, near, far = group[0].segment_bytes, group[0].local_offsets, group[0].remote_offsets
        ours, theirs = [part.local_region for part in group], [part.remote_region for part in group]
        here = tuple([self._addresses[each] for each in ours])
        there = tuple([memory.addresses[each] for each in theirs])
        last_here = min([self._sizes[each] for each in ours]) - size
        last_there = min([memory.sizes[each] for each in theirs]) - size
        if operation is Operation.READ:
            return AddressCopies(size, far, near, there, here, last_there, last_here)
        return AddressCopies(size, near, far, here, there, last_here, last_there)

    def _launch_next(self) -> CudaTransfer | None:
        """Launch kernels of the next transfer in round-robin order; return the transfer.

        None if every transfer is completely launched, or the device's queue is full.
        """
        if not any(transfer.is_launching for transfer in self._transfers.values()):
            return None
        copier = self._entered().copier
        transfer = None if copier.is_full else self._next_in_turn(lambda each: each.is_launching)
        until = time.monotonic() + LAUNCH_S
        while (
            transfer is not None
            and transfer.is_launching
            and not copier.is_full
            and time.monotonic() < until
        ):
            self._launch(transfer, copier)
        return transfer

    def _launch(self, transfer: CudaTransfer, copier: "CudaAddressCopier") -> None:
        transfer.launch(copier)
        self._moved_at = time.monotonic()

    def _watch(self) -> None:
        """Wait until a kernel ends, for WATCH_S at most.

        The wait is shorter with several transfers, because another may end before the oldest.
        """
        try:
            self._entered().copier.watch(WATCH_S if len(self._transfers) == 1 else WATCH_S / 10)
        except RuntimeError:  # the device has failed; each transfer detects the failure itself
            return

    def _is_moving(self, now: float) -> bool:
        """Whether kernels end as soon as expected.

        If not, the engine's work keeps the device busy, and polling without pause is useless.
        """
        return now < self._moved_at + BUSY_S

    def _end_finished(self, transfers: Sequence[CudaTransfer]) -> None:
        ended = [transfer for transfer in transfers if transfer.has_ended()]
        if not ended:
            return
        for memory in {transfer.link for transfer in ended}:
            # Bytes read from a process that has died may be wrong.
            self._is_usable(memory)
        self._moved_at = time.monotonic()
        self._ended.extend(transfer.completion() for transfer in ended)

    def _disconnect(self, link: PeerMemory, why: str) -> None:
        """Close the peer's memory once no kernel touches it.

        Running kernels end within moments, whatever the peer does.
        """
        device = self._entered()
        stopped = [each for each in self._transfers.values() if each.link is link]
        for transfer in stopped:
            transfer.stop(why)
        if stopped:
            device.wait()
        try:
            link.close()
        except TransportError as error:
            _log.warning("memory of a peer cannot be closed peer=%s reason=%s", link.peer, error)


def _own_offer(regions: Sequence[Region], device: int) -> CudaOffer:
    """Return our offer, which contains every allocation with a region once."""
    allocations: dict[int, OfferedAllocation] = {}
    for region in regions:
        found = cuda_driver.allocation_of(region.address)
        if region.address + region.size_bytes > found.address + found.size_bytes:
            raise TransportError(f"region {region.name!r} lies in several allocations")
        if found.address not in allocations:
            handle = cuda_driver.export_handle(found)
            allocations[found.address] = OfferedAllocation(handle, found.address, found.size_bytes)
    return CudaOffer(
        os.getpid(),
        own_start_ticks("cuda_ipc"),
        cuda_driver.uuid_of(device),
        list(allocations.values()),
    )
