"""One transfer by kernels of ours: its segments as addresses, a launch at a time. Owned by the
transport's thread.
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
from kvferry.transports.base import Completion, Handle, Segments, TransportOffer
from kvferry.transports.copy.gather import AddressCopies, CopyDirection, Timing
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

__all__ = ["CudaIpcTransport", "CudaTransfer"]


class CudaTransfer:
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
        """Whether all of it is launched at once, by one kernel: then nothing of it moves if one of
        its offsets is impossible.
        """
        return len(self._copies) == 1 and is_one_launch(self._copies[0])

    def launch(self, copier: "CudaAddressCopier") -> None:
        """Some more of it."""
        assert self._next is not None, "all of it has been launched"
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
        """Launch no more of it; the first reason counts."""
        self._next = None
        self.error = self.error or why

    def has_ended(self) -> bool:
        """Whether no kernel of it touches memory any more, and none will."""
        try:
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


# -------------------- cuda ipc -------------------- The `cuda_ipc` data transport: caches on GPUs
# of one host. A peer's memory is opened here, and a kernel of ours copies what we want.
#
# Owned by one thread. Every allocation that holds a region is opened once per peer and life; a
# transfer is one kernel over all its segments (more where they are very many, or very unequal), on
# streams of our own. No engine waits for it: `poll` asks for a moment whether it is through, and
# lets other threads of the interpreter go on meanwhile. Facts of CUDA 13:
#
# - Memory that is open here stays as it is when its owner dies, until it is closed. So a dead peer
#   costs its transfers, never this process; but what is open would hold its whole cache on the
#   device, so peers are looked at every now and then.
# - A kernel that touches memory which is not there ends the process's use of the GPU for good. So
#   what a peer offers is believed only as far as the driver confirms it: the length of every
#   allocation is asked for here.
# - Handles of a process cannot be opened by itself, and of memory from CUDA's virtual memory calls
#   (torch's expandable segments) there are none.


DEATH_CHECK_S = 2.0
"""How often peers that nothing is read from are looked at."""
LAUNCH_S = 500e-6
"""How long one poll hands over what is to be copied: the device is not to wait for the rest of a
turn.
"""
WATCH_S = 250e-6
"""How long one poll looks at the kernels under way: most are through by then."""
BUSY_S = 2e-3
"""So long after the last launch or end they are looked at all the time: a GiB takes a quarter of
that.
"""

_log = logging.getLogger(__name__)


class CudaIpcTransport:
    """Implements `ports.data.DataTransport`. Nothing of CUDA is loaded before `register` is given
    memory of a device.
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
        """When something was last launched, or over."""

    @property
    def name(self) -> str:
        return "cuda_ipc"

    def register(self, regions: Sequence[Region]) -> bool:
        if {region.memory for region in regions} != {MemoryKind.VRAM} or len(
            {region.device for region in regions}
        ) != 1:
            return False
        # Imported only where there is a device: it takes torch with CUDA.
        from kvferry.transports.copy.cuda import CudaDevice

        device = CudaDevice(regions[0].device)
        try:
            device.enter()
            self._offer = _own_offer(regions, device.number)
            device.prepare()
        except (
            TransportError,
            RuntimeError,
        ) as error:  # torch's are RuntimeErrors: no memory left, say
            _log.warning("this cache cannot be shown to other processes over cuda_ipc: %s", error)
            return False
        self._device, self._regions = device, tuple(regions)
        self._addresses, self._sizes = (
            [region.address for region in regions],
            [region.size_bytes for region in regions],
        )
        return True

    def offer(self) -> TransportOffer:
        if self._offer is None:
            raise LocalProtocolError(
                "the cuda_ipc transport is used before its memory is registered"
            )
        return TransportOffer(self.name, host_identity(), msgspec.msgpack.encode(self._offer))

    def connect(self, peer: PeerId, offer: TransportOffer, regions: Sequence[Region]) -> None:
        device = self._entered()
        check_regions(regions, peer)
        decoded = decode_offer(peer, offer)
        if decoded.pid == os.getpid():
            raise TransportError(
                f"{peer} is this very process, whose memory cannot be opened again; drop this peer"
            )
        self.disconnect(peer)
        self._peers[peer] = PeerMemory(
            peer, decoded, tuple(regions), device.number, device.copier.reaches_other_gpus
        )

    def disconnect(self, peer: PeerId) -> None:
        self._drop(peer, f"peer {peer} was disconnected")

    def read(self, peer: PeerId, segments: Sequence[Segments]) -> Handle:
        return self._start(peer, segments, CopyDirection.READ)

    def write(self, peer: PeerId, segments: Sequence[Segments], number: int = 0) -> Handle:
        return self._start(peer, segments, CopyDirection.WRITE)

    @property
    def supports_write_grants(self) -> bool:
        return False

    def grant_writes(self, number: int, blocks: Sequence[Sequence[int]]) -> None:
        raise write_grants_unsupported(self.name)

    def revoke_writes(self, number: int) -> Handle:
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
        """Whether completions say how long the device was at it, from now on. That costs some
        microseconds.
        """
        self._entered().copier.timing = timing

    def close(self) -> None:
        """Waits for the kernels under way: they may be touching memory that is given back next."""
        if self._device is None:
            return
        for peer in list(self._peers):
            self.disconnect(peer)
        self._transfers.clear()
        device, self._device = self._device, None
        device.close()

    def _entered(self) -> "CudaDevice":
        if self._device is None:
            raise LocalProtocolError(
                "the cuda_ipc transport is used before its memory is registered, or after it is "
                "closed"
            )
        self._device.work()
        return self._device

    def _start(
        self, peer: PeerId, segments: Sequence[Segments], direction: CopyDirection
    ) -> Handle:
        memory = self._peers.get(peer)
        if memory is None:
            raise TransportError(f"peer {peer} is not connected over cuda_ipc")
        check_segment_fields(segments, self._regions, memory.regions, peer)
        copies = [self._copies(group, memory, direction) for group in group_by_offsets(segments)]
        self._last_handle += 1
        transfer = CudaTransfer(Handle(self._last_handle), peer, copies)
        copier = self._entered().copier
        is_next = (
            transfer.is_launching
            and not copier.is_full
            and not any(each.is_launching for each in self._transfers)
        )
        # Offsets are looked at when they are written down. Whether few of them are possible is
        # known before anything moves; to look at very many takes as long as to move a good part of
        # them.
        if sum(part.num_rows for part in copies) <= FIRST_ROWS and not (
            is_next and transfer.is_one_launch
        ):
            check_segments(segments, self._regions, memory.regions, peer)
        if is_next:
            self._launch(transfer, copier)
            if transfer.error is not None:
                check_segments(segments, self._regions, memory.regions, peer)
        self._transfers.append(transfer)
        return transfer.handle

    def _copies(
        self, group: Sequence[Segments], memory: PeerMemory, direction: CopyDirection
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
        if direction is CopyDirection.READ:
            return AddressCopies(size, far, near, there, here, last_there, last_here)
        return AddressCopies(size, near, far, here, there, last_here, last_there)

    def _launch_next(self) -> CudaTransfer | None:
        """Hand over some of the transfer whose turn it is: that transfer. None when all are handed
        over.
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
        """Until a kernel is through, or for a while. Where several transfers are under way another
        may be through before the oldest.
        """
        try:
            self._entered().copier.watch(WATCH_S if len(self._transfers) == 1 else WATCH_S / 10)
        except RuntimeError:  # the device has failed, which each transfer finds
            return

    def _is_moving(self, now: float) -> bool:
        """Whether kernels end as soon as they should. If not, others keep the device busy, and
        nobody needs to look all the time.
        """
        return now < self._moved_at + BUSY_S

    def _take_ended(self, transfers: Sequence[CudaTransfer]) -> list[Completion]:
        ended = [transfer for transfer in transfers if transfer.has_ended()]
        if not ended:
            return []
        for peer in {transfer.peer for transfer in ended}:
            # What was read from a process that has gone may be anything.
            if peer in self._peers and self._peers[peer].has_ended():
                self._drop(peer, has_ended(peer))
        self._transfers = deque(transfer for transfer in self._transfers if transfer not in ended)
        self._moved_at = time.monotonic()
        return [transfer.completion() for transfer in ended]

    def _drop(self, peer: PeerId, why: str) -> None:
        """Its memory is closed once no kernel touches it: those under way are through in a moment,
        whatever the peer does.
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
    """Every allocation that holds a region, once."""
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
