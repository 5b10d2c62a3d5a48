"""Staging buffers: the bytes of one batch, contiguous, as process groups send and receive them.

Received bytes stay in a staging buffer until their tag is verified; only then are they copied to
the cache. A buffer belongs to one thread at a time. A copy on a GPU cannot be cancelled, so a copy
from or to the cache has no deadline: its thread waits until the copy is done.
"""

import hmac
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

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

    def __init__(self, like: Region, copying: Callable[[], AbstractContextManager[None]]) -> None:
        """`copying` is entered around each copy from or to the cache."""
        self._copying = copying
        is_device = like.memory is MemoryKind.VRAM
        device = torch.device("cuda", like.device) if is_device else torch.device("cpu")
        self._beside = torch.empty(MAX_BATCH_BYTES, dtype=torch.uint8, device=device)
        self._host = (
            torch.empty(MAX_BATCH_BYTES, dtype=torch.uint8, pin_memory=True) if is_device else None
        )
        self._copier: AddressCopier = copier_for(like)

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
        self._copier.close()

    def _copy(self, sources: Offsets, targets: Offsets, sizes: Offsets) -> None:
        with self._copying():
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
        self._num_buffers = 0
        self._free: list[StagingBuffer] = []
        self._num_copying = 0
        self._is_closed = False
        self._changed = threading.Condition()

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
        taken = self._take()
        try:
            yield taken
        finally:
            with self._changed:
                self._free.append(taken)
                self._changed.notify_all()
                if self._is_closed:
                    self._close_free()

    def close(self) -> None:
        """Wait until no copy touches the cache; none will start afterwards. A buffer in use is
        closed when it is returned.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._num_copying)
            self._close_free()

    def _take(self) -> StagingBuffer:
        with self._changed:
            if not self._changed.wait_for(self._is_available, STALL_TIMEOUT_S):
                raise TransportError(
                    f"all {self._max_buffers} staging buffers are in use; raise mem_pool_size_gb"
                )
            self._check_open()
            if self._free:
                return self._free.pop()
            self._num_buffers += 1
        # Without the lock: copies of other threads must not wait for the allocation.
        try:
            return StagingBuffer(self._like, self._copying)
        except BaseException as error:
            with self._changed:
                self._num_buffers -= 1
                self._changed.notify_all()
            if isinstance(error, RuntimeError | MemoryError):  # torch's class for lack of memory
                raise TransportError(f"no memory for a staging buffer: {error}") from error
            raise

    def _is_available(self) -> bool:
        return self._is_closed or bool(self._free) or self._num_buffers < self._max_buffers

    @contextmanager
    def _copying(self) -> Iterator[None]:
        with self._changed:
            self._check_open()
            self._num_copying += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_copying -= 1
                self._changed.notify_all()

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransportError("the transport was closed")

    def _close_free(self) -> None:
        for each in self._free:
            each.close()
        self._free.clear()


def _starts(sizes: Offsets) -> Offsets:
    return np.cumsum(sizes) - sizes


def _by_size(sources: Offsets, targets: Offsets, sizes: Offsets) -> Sequence[AddressCopies]:
    return [
        AddressCopies(int(size), sources[sizes == size], targets[sizes == size])
        for size in np.unique(sizes)
    ]
