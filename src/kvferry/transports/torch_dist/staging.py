"""Staging buffers: the bytes of one batch, contiguous, as process groups send and receive them.

Received bytes stay in a staging buffer until their tag is verified; only then are they copied to
the cache. A buffer belongs to one thread at a time. A copy on a GPU cannot be cancelled, so a copy
from or to the cache has no deadline: its thread waits until the copy is done.
"""

import hmac
import logging
import math
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from kvferry.errors import TransportError
from kvferry.transports.copy.gather import AddressCopier, AddressCopies
from kvferry.transports.copy.segments import Offsets
from kvferry.transports.nixl.bounce.memory import copier_for
from kvferry.transports.tcp.wire import MAX_BATCH_BYTES
from kvferry.transports.torch_dist.channel import STALL_TIMEOUT_S, TAG_BYTES, Channel
from kvferry.transports.torch_dist.group import Backend, PairGroup
from kvferry.types import MemoryKind, Region

COPY_PAUSE_S = 20e-6
SLOW_COPY_S = 10.0
"""A copy that takes longer is logged, once."""

_log = logging.getLogger(__name__)


class StagingBuffer:
    """Memory for one batch, beside the cache; with a cache on a GPU also pinned host memory, which
    gloo needs.
    """

    def __init__(self, like: Region) -> None:
        is_device = like.memory is MemoryKind.VRAM
        device = torch.device("cuda", like.device) if is_device else torch.device("cpu")
        self._beside = torch.empty(MAX_BATCH_BYTES, dtype=torch.uint8, device=device)
        self._host = (
            torch.empty(MAX_BATCH_BYTES, dtype=torch.uint8, pin_memory=True) if is_device else None
        )
        self._copier: AddressCopier = copier_for(like)
        self._copying = threading.Lock()
        self._is_closed = False

    def gather(self, addresses: Offsets, sizes: Offsets) -> None:
        """Copy segments of the cache into the buffer, one after the other."""
        self._copy(addresses, self._beside.data_ptr() + _starts(sizes), sizes)

    def scatter(self, addresses: Offsets, sizes: Offsets) -> None:
        """Copy the buffer's bytes to segments of the cache."""
        self._copy(self._beside.data_ptr() + _starts(sizes), addresses, sizes)

    def send(self, channel: Channel, group: PairGroup, size_bytes: int) -> None:
        if group.backend is Backend.NCCL:
            group.send(self._beside[:size_bytes])
            return
        payload = self._beside[:size_bytes]
        if self._host is not None:
            payload = self._host[:size_bytes].copy_(payload)
        channel.send(channel.next_tag(payload.numpy().data))
        group.send(payload)

    def receive(self, channel: Channel, group: PairGroup, size_bytes: int) -> None:
        """TransportError if the bytes are not those that the peer sent."""
        if group.backend is Backend.NCCL:
            group.receive(self._beside[:size_bytes])
            return
        tag = channel.receive(TAG_BYTES)
        payload = (self._beside if self._host is None else self._host)[:size_bytes]
        group.receive(payload)
        if not hmac.compare_digest(tag, channel.next_tag(payload.numpy().data)):
            raise TransportError("the bytes that arrived are not the bytes that the peer sent")
        if self._host is not None:
            self._beside[:size_bytes].copy_(payload)

    def close(self) -> None:
        """Wait until no copy touches the cache. Any thread may call this; later copies raise
        TransportError.
        """
        with self._copying:
            self._is_closed = True
            self._copier.close()

    def _copy(self, sources: Offsets, targets: Offsets, sizes: Offsets) -> None:
        with self._copying:
            if self._is_closed:
                raise TransportError("the transport was closed")
            job = self._copier.start(_by_size(sources, targets, sizes))
            slow_at = time.monotonic() + SLOW_COPY_S
            while not job.is_done():
                if time.monotonic() > slow_at:
                    slow_at = math.inf
                    _log.warning(
                        "dist transport: the device has not copied a batch within %g s; its blocks "
                        "stay in use until it has",
                        SLOW_COPY_S,
                    )
                self._copier.pause(COPY_PAUSE_S)


class StagingPool:
    """The staging buffers of one transport for one purpose, at most `max_bytes` of them."""

    def __init__(self, like: Region, max_bytes: int) -> None:
        self._like = like
        self._max_buffers = max(1, max_bytes // MAX_BATCH_BYTES)
        self._made: list[StagingBuffer] = []
        self._is_closed = False
        self._idle: queue.LifoQueue[StagingBuffer | None] = queue.LifoQueue()
        """The buffers that no thread uses, above a None for each buffer that may still be made."""
        for _ in range(self._max_buffers):
            self._idle.put(None)

    def enter_device(self) -> None:
        """Make the cache's device current in the calling thread, which is going to use buffers."""
        if self._like.memory is MemoryKind.VRAM:
            # Imported only for device memory: the module needs torch with CUDA.
            from kvferry.transports.copy.cuda import enter_device
            from kvferry.transports.cuda_ipc import driver as cuda_driver

            enter_device(self._like.device)
            cuda_driver.ignore_captures()

    @contextmanager
    def buffer(self) -> Iterator[StagingBuffer]:
        """Lend a buffer. TransportError if none is returned in time."""
        try:
            taken = self._idle.get(timeout=STALL_TIMEOUT_S)
        except queue.Empty:
            raise TransportError(
                f"all {self._max_buffers} staging buffers are in use; raise mem_pool_size_gb"
            ) from None
        try:
            taken = taken or self._make()
            yield taken
        finally:
            self._idle.put(taken)

    def close(self) -> None:
        """Wait until no copy touches the cache; none will start afterwards."""
        self._is_closed = True
        for each in list(self._made):
            each.close()

    def _make(self) -> StagingBuffer:
        try:
            made = StagingBuffer(self._like)
        except (RuntimeError, MemoryError) as error:  # RuntimeError: torch's lack of memory
            raise TransportError(f"no memory for a staging buffer: {error}") from error
        # In this order: either this thread or that of `close` sees what the other one did first.
        self._made.append(made)
        if self._is_closed:
            made.close()
        return made


def _starts(sizes: Offsets) -> Offsets:
    return np.cumsum(sizes) - sizes


def _by_size(sources: Offsets, targets: Offsets, sizes: Offsets) -> Sequence[AddressCopies]:
    return [
        AddressCopies(int(size), sources[sizes == size], targets[sizes == size])
        for size in np.unique(sizes)
    ]
