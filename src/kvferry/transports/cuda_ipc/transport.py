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
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from kvferry.errors import LocalProtocolError, TransportError
from kvferry.sleep import SHORT_SLEEP_S
from kvferry.transports.base import (
    Completion,
    Handle,
    Operation,
    Segments,
    TransportOffer,
    memory_not_registered,
)
from kvferry.transports.copy.gather import AddressCopies, Timing
from kvferry.transports.copy.segments import check_regions, check_segment_fields, check_segments
from kvferry.transports.copy.table import FIRST_ROWS, group_by_offsets, is_one_launch, split_by_tick
from kvferry.transports.cuda_ipc import driver as cuda_driver
from kvferry.transports.cuda_ipc.peer import (
    CudaOffer,
    OfferedAllocation,
    PeerMemory,
    decode_offer,
    has_ended,
)
from kvferry.transports.locality import host_identity, start_ticks
from kvferry.transports.write_grants import write_grants_unsupported
from kvferry.types import MemoryKind, PeerId, Region

if TYPE_CHECKING:
    from kvferry.transports.copy.cuda import CudaAddressCopier, CudaCopyJob, CudaDevice


class CudaTransfer:
    """One transfer by our own kernels: segments as addresses, launched step by step."""

    def __init__(self, handle: Handle, peer: PeerId, copies: Sequence[AddressCopies]) -> None:
        self.handle = handle
        self.peer = peer
        self._began = time.perf_counter()
        self._copies = copies
        self._launches = split_by_tick(copies)
        self._next = next(self._launches, None)
        self._jobs: list[CudaCopyJob] = []
        self.error: str | None = None
        self._total_bytes = 0
        self._num_launches = 0
        self._post_s = 0.0

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
        self._total_bytes += sum(part.total_bytes for part in self._next)
        self._next = next(self._launches, None)
        self._num_launches += 1
        self._post_s += time.perf_counter() - began

    def stop(self, why: str) -> None:
        """Launch no further kernels. Only the first reason is kept."""
        self._next = None
        self.error = self.error or why

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
        elapsed = time.perf_counter() - self._began
        device_s = (
            None
            if self.error or not self._jobs or self._jobs[0].timespan is None
            else self._device_s()
        )
        return Completion(
            self.handle,
            self.error,
            self._total_bytes,
            self._num_launches,
            self._post_s,
            elapsed,
            device_s,
        )

    def _device_s(self) -> float | None:
        times = (job.device_s(self._jobs[0]) for job in self._jobs)
        return max((seconds for seconds in times if seconds is not None), default=None)


# -- transport --


DEATH_CHECK_S = 2.0
"""How often the processes of all peers are checked, besides the check after each transfer."""
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


class CudaIpcTransport:
    """Implements `base.DataTransport` for device memory.

    CUDA is not loaded before `register` is called with device memory.
    """

    def __init__(self) -> None:
        self._regions: tuple[Region, ...] = ()
        self._addresses: list[int] = []
        self._sizes: list[int] = []
        self._device: CudaDevice | None = None
        self._offer: CudaOffer | None = None
        self._peers: dict[PeerId, PeerMemory] = {}
        self._transfers: deque[CudaTransfer] = deque()
        self._last_handle = 0
        self._next_death_check = 0.0
        self._moved_at = 0.0
        """When a kernel was last launched or a transfer last ended."""

    @property
    def name(self) -> str:
        return "cuda_ipc"

    def register(self, regions: Sequence[Region]) -> bool:
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
        self._device, self._regions = device, tuple(regions)
        self._addresses, self._sizes = (
            [region.address for region in regions],
            [region.size_bytes for region in regions],
        )
        return True

    def offer(self) -> TransportOffer:
        if self._offer is None:
            raise memory_not_registered(self.name)
        return TransportOffer(self.name, host_identity(), msgspec.msgpack.encode(self._offer))

    def connect(self, peer: PeerId, offer: TransportOffer, regions: Sequence[Region]) -> None:
        device = self._entered()
        check_regions(regions, peer)
        decoded = decode_offer(peer, offer)
        if decoded.pid == os.getpid():
            raise TransportError(
                f"{peer} is this process itself, whose memory cannot be opened again; "
                "drop this peer"
            )
        self.disconnect(peer)
        self._peers[peer] = PeerMemory(
            peer, decoded, tuple(regions), device.number, device.copier.reaches_other_gpus
        )

    def disconnect(self, peer: PeerId) -> None:
        self._drop(peer, f"peer {peer} was disconnected")

    def read(self, peer: PeerId, segments: Sequence[Segments]) -> Handle:
        return self._start(peer, segments, Operation.READ)

    def write(self, peer: PeerId, segments: Sequence[Segments], grant_id: int = 0) -> Handle:
        return self._start(peer, segments, Operation.WRITE)

    @property
    def supports_write_grants(self) -> bool:
        return False

    def grant_writes(self, grant_id: int, blocks: Sequence[Sequence[int]]) -> None:
        raise write_grants_unsupported(self.name)

    def revoke_writes(self, grant_id: int) -> Handle:
        raise write_grants_unsupported(self.name)

    def poll(self) -> list[Completion]:
        if self._device is None:
            return []
        now = time.monotonic()
        if now >= self._next_death_check:
            self._next_death_check = now + DEATH_CHECK_S
            for peer in [peer for peer, memory in self._peers.items() if memory.has_ended()]:
                self._drop(peer, has_ended(peer))
        if not self._transfers:
            return []
        launched = self._launch_next()
        others = [transfer for transfer in self._transfers if transfer is not launched]
        if launched is None and self._is_moving(now):
            self._watch()
        return self._take_ended(others)

    def cancel(self, handle: Handle) -> None:
        for transfer in self._transfers:
            if transfer.handle == handle:
                transfer.stop("cancelled")

    def poll_interval_s(self) -> float | None:
        if self._transfers:
            return 0.0 if self._is_moving(time.monotonic()) else SHORT_SLEEP_S
        return DEATH_CHECK_S if self._peers else None

    def serving_interval_s(self) -> float | None:
        return None

    def set_timing(self, timing: Timing) -> None:
        """Set whether completions report the device's time; the measurement costs some
        microseconds.
        """
        self._entered().copier.timing = timing

    def close(self) -> None:
        """Close the transport.

        Waits for running kernels, which may touch memory that is freed next.
        """
        if self._device is None:
            return
        for peer in list(self._peers):
            self.disconnect(peer)
        self._transfers.clear()
        device, self._device = self._device, None
        device.close()

    def _entered(self) -> "CudaDevice":
        """Return the device, with the device's context current in the calling thread."""
        if self._device is None:
            raise memory_not_registered(self.name)
        self._device.work()
        return self._device

    def _start(self, peer: PeerId, segments: Sequence[Segments], operation: Operation) -> Handle:
        memory = self._peers.get(peer)
        if memory is None:
            raise TransportError(f"peer {peer} is not connected over cuda_ipc")
        check_segment_fields(segments, self._regions, memory.regions, peer)
        copies = [self._copies(group, memory, operation) for group in group_by_offsets(segments)]
        self._last_handle += 1
        transfer = CudaTransfer(Handle(self._last_handle), peer, copies)
        copier = self._entered().copier
        is_next = (
            transfer.is_launching
            and not copier.is_full
            and not any(each.is_launching for each in self._transfers)
        )
        # Offsets are checked when written into the table. A small transfer is checked completely
        # before any byte moves. For a large transfer a complete check would take as long as moving
        # a good part of the bytes, so the offsets are checked launch by launch.
        if sum(part.num_rows for part in copies) <= FIRST_ROWS and not (
            is_next and transfer.is_one_launch
        ):
            check_segments(segments, self._regions, memory.regions, peer)
        # A transfer with one launch is checked by the launch, before anything moves. If the launch
        # failed, the check below raises the precise error.
        if is_next:
            self._launch(transfer, copier)
            if transfer.error is not None:
                check_segments(segments, self._regions, memory.regions, peer)
        self._transfers.append(transfer)
        return transfer.handle

    def _copies(
        self, group: Sequence[Segments], memory: PeerMemory, operation: Operation
    ) -> AddressCopies:
        size, near, far = group[0].segment_bytes, group[0].local_offsets, group[0].remote_offsets
        ours, theirs = [part.local_region for part in group], [part.remote_region for part in group]
        here, there = (
            tuple([self._addresses[each] for each in ours]),
            tuple([memory.addresses[each] for each in theirs]),
        )
        last_here, last_there = (
            min([self._sizes[each] for each in ours]) - size,
            min([memory.sizes[each] for each in theirs]) - size,
        )
        if operation is Operation.READ:
            return AddressCopies(size, far, near, there, here, last_there, last_here)
        return AddressCopies(size, near, far, here, there, last_here, last_there)

    def _launch_next(self) -> CudaTransfer | None:
        """Launch kernels of the next transfer in round-robin order; return the transfer.

        None if every transfer is completely launched, or the device's queue is full.
        """
        if not any(transfer.is_launching for transfer in self._transfers):
            return None
        copier = self._entered().copier
        for _ in range(0 if copier.is_full else len(self._transfers)):
            transfer = self._transfers[0]
            self._transfers.rotate(-1)
            if transfer.is_launching:
                until = time.monotonic() + LAUNCH_S
                while transfer.is_launching and not copier.is_full and time.monotonic() < until:
                    self._launch(transfer, copier)
                return transfer
        return None

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

    def _take_ended(self, transfers: Sequence[CudaTransfer]) -> list[Completion]:
        ended = [transfer for transfer in transfers if transfer.has_ended()]
        if not ended:
            return []
        for peer in {transfer.peer for transfer in ended}:
            # Bytes read from a process that has died may be wrong.
            if peer in self._peers and self._peers[peer].has_ended():
                self._drop(peer, has_ended(peer))
        self._transfers = deque(transfer for transfer in self._transfers if transfer not in ended)
        self._moved_at = time.monotonic()
        return [transfer.completion() for transfer in ended]

    def _drop(self, peer: PeerId, why: str) -> None:
        """Drop a peer and close the peer's memory once no kernel touches it.

        Running kernels end within moments, whatever the peer does.
        """
        memory = self._peers.pop(peer, None)
        if memory is None:
            return
        for transfer in self._transfers:
            if transfer.peer == peer:
                transfer.stop(why)
        device = self._entered()
        if any(transfer.peer == peer for transfer in self._transfers):
            device.wait()
        try:
            memory.close()
        except TransportError as error:
            _log.warning("memory of a peer cannot be closed peer=%s reason=%s", peer, error)


def _own_offer(regions: Sequence[Region], device: int) -> CudaOffer:
    """Return our offer, which contains every allocation with a region once."""
    ticks = start_ticks(os.getpid())
    if ticks is None:
        raise LocalProtocolError(
            "/proc does not show this process, so its cache cannot be offered over cuda_ipc; "
            "mount /proc"
        )
    allocations: dict[int, OfferedAllocation] = {}
    for region in regions:
        found = cuda_driver.allocation_of(region.address)
        if region.address + region.size_bytes > found.address + found.size_bytes:
            raise TransportError(f"region {region.name!r} lies in several allocations")
        if found.address not in allocations:
            handle = cuda_driver.export_handle(found)
            allocations[found.address] = OfferedAllocation(handle, found.address, found.size_bytes)
    return CudaOffer(os.getpid(), ticks, cuda_driver.uuid_of(device), list(allocations.values()))
