"""The process group of an engine's tensor-parallel ranks: sums and concatenations over all ranks.

Ranks are processes of one machine. gloo over loopback joins the ranks, and NCCL joins them too if
each rank has its own GPU. If a rank dies, the operations of the other ranks fail at once (the
sockets of the dead rank close); if a rank hangs, they fail after `timeout_s`. Both are a
TransportError. Blocking; the worker's engine thread makes every call.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import FileStore, PrefixStore, ProcessGroupGloo, Store, TCPStore

from kvferry.connectors.contract import ParallelConfig
from kvferry.engine.model.device import CPU, RankDevice
from kvferry.errors import ConfigError, TransportError


class TensorParallelGroup(Protocol):
    """The operations that a model needs from the group of its ranks."""

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, with the same bits on each rank; may overwrite `part`."""

    def concatenate(self, part: torch.Tensor) -> torch.Tensor:
        """Concatenate all ranks' parts along the last dimension, in rank order.

        All parts have the same shape.
        """

    def close(self) -> None: ...


class SoloGroup:
    """The group of an engine with one rank, without a process group."""

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def concatenate(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def close(self) -> None:
        return None


class GlooGroup:
    """Computes sums in host memory; tensors on a device are copied to the host and back."""

    def __init__(self, parallel: ParallelConfig, store: Store, timeout_s: float) -> None:
        """Join the other ranks at `store`; blocks until all ranks have joined."""
        self._size = parallel.tp_size
        self._rank_name = f"tensor-parallel rank {parallel.tp_rank} of {parallel.tp_size}"
        with self._as_transport_error("could not join the other ranks"):
            self._gloo: Any = _gloo_on_loopback(parallel, store, timeout_s)

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        on_host = part.contiguous().cpu()
        with self._as_transport_error("lost another rank during a sum"):
            self._gloo.allreduce([on_host]).wait()
        return on_host.to(part.device)

    def concatenate(self, part: torch.Tensor) -> torch.Tensor:
        on_host = part.contiguous().cpu()
        parts = [torch.empty_like(on_host) for _ in range(self._size)]
        with self._as_transport_error("lost another rank during a gather"):
            self._gloo.allgather([parts], [on_host]).wait()
        return torch.cat(parts, dim=-1).to(part.device)

    def barrier(self) -> None:
        """Wait until all ranks reach this call."""
        with self._as_transport_error("lost another rank"):
            self._gloo.barrier().wait()

    def close(self) -> None:
        """Close the sockets and threads; idempotent."""
        self._gloo = None

    @contextmanager
    def _as_transport_error(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # gloo and the stores raise nothing else
            raise TransportError(f"{self._rank_name} {what}: {error}") from error


def join_group(
    parallel: ParallelConfig, rendezvous: str, timeout_s: float, device: RankDevice = CPU
) -> TensorParallelGroup:
    """Join the group of this rank.

    `rendezvous` is `file:///path` or `tcp://127.0.0.1:port`. Prefer a file in a private directory,
    because a TCP store listens on every interface. The caller removes the file.
    """
    if parallel.tp_size == 1:
        return SoloGroup()
    store = _store(parallel, rendezvous, timeout_s)
    gloo = GlooGroup(parallel, store, timeout_s)
    if not device.has_own_gpus:
        return gloo

    return NcclGroup(parallel, store, gloo, device.torch_device, timeout_s) if has_nccl() else gloo


def _store(parallel: ParallelConfig, rendezvous: str, timeout_s: float) -> Store:
    url = urlsplit(rendezvous)
    if url.scheme == "file" and url.path:
        store: Store = FileStore(url.path, parallel.tp_size)
        store.set_timeout(timedelta(seconds=timeout_s))
        return store
    if url.scheme != "tcp" or not url.hostname or not url.port:
        raise ConfigError(
            f"rendezvous must be file:///path or tcp://127.0.0.1:port, got {rendezvous!r}"
        )
    try:
        return TCPStore(
            url.hostname,
            url.port,
            parallel.tp_size,
            is_master=parallel.tp_rank == 0,
            timeout=timedelta(seconds=timeout_s),
        )
    except RuntimeError as error:
        raise TransportError(
            f"tensor-parallel rank {parallel.tp_rank} could not reach {rendezvous}: {error}"
        ) from error


def _gloo_on_loopback(parallel: ParallelConfig, store: Store, timeout_s: float) -> Any:
    # The usual entry point takes the device from the host name and stores the group in a global;
    # the class does neither.
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()  # noqa: SLF001  the only way to choose the interface
    options._devices = [gloo.create_device(hostname="127.0.0.1")]  # noqa: SLF001
    options._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001
    return gloo(store, parallel.tp_rank, parallel.tp_size, options)


# -- nccl --
# Sums of ranks that have a GPU each: NCCL adds on the GPUs, and gloo detects dead ranks. NCCL
# operations are kernels: the host does not wait for a kernel, and a kernel waits forever for a rank
# that has died. So at the end of each step's operations the ranks meet once over gloo, which
# notices a death at once, and then wait for the device with a deadline.


POLL_INTERVAL_S = 0.0001
MONITORING_VARIABLE = "TORCH_NCCL_ENABLE_MONITORING"
"""The switch of a torch thread that reads the store as long as the group exists.

Our store is gone once all ranks have joined, so the thread must not run.
"""


def has_nccl() -> bool:
    """True if torch was built with NCCL."""
    return hasattr(_distributed_c10d, "ProcessGroupNCCL")


class NcclGroup:
    """NCCL between the GPUs of the ranks, with gloo as a barrier."""

    def __init__(
        self,
        parallel: ParallelConfig,
        store: Store,
        gloo: GlooGroup,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        """Join the other ranks at `store`; blocks until all ranks have joined.

        `store` is not used afterwards. `gloo` joins the same ranks; `close` closes `gloo` too.
        """
        self._size = parallel.tp_size
        self._rank_name = f"tensor-parallel rank {parallel.tp_rank} of {parallel.tp_size}"
        self._gloo = gloo
        self._timeout_s = timeout_s
        self._has_failed = False
        with self._as_transport_error("could not join the other ranks' GPUs"):
            self._nccl: Any = _nccl(parallel, PrefixStore("nccl", store), timeout_s)
        try:  # the first operation connects the GPUs
            self.concatenate(self.sum(torch.zeros(1, device=device)))
        except BaseException:
            self._has_failed = True
            self.close()
            raise

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        part = part.contiguous()
        with self._as_transport_error("lost another rank during a sum"):
            self._nccl.allreduce([part]).wait()  # the stream waits, not the host
        return part

    def concatenate(self, part: torch.Tensor) -> torch.Tensor:
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self._size)]
        with self._as_transport_error("lost another rank during a gather"):
            self._nccl.allgather([parts], [part]).wait()
            result = torch.cat(parts, dim=-1)
            # gloo notices a dead rank at once; the NCCL kernel would wait forever.
            self._gloo.barrier()
            self._wait_for_device()
        return result

    def close(self) -> None:
        """Leave the group and abort kernels that wait for a rank that is gone; idempotent."""
        nccl, self._nccl = self._nccl, None
        self._gloo.close()
        if nccl is not None:
            with suppress(RuntimeError):
                nccl.abort() if self._has_failed else nccl.shutdown()

    def _wait_for_device(self) -> None:
        done = torch.cuda.Event()
        done.record()
        deadline = time.monotonic() + self._timeout_s
        while not done.query():
            if time.monotonic() > deadline:
                raise TransportError(
                    f"{self._rank_name} waited {self._timeout_s:g} s for the other ranks' GPUs"
                )
            time.sleep(POLL_INTERVAL_S)

    @contextmanager
    def _as_transport_error(self, what: str) -> Iterator[None]:
        try:
            yield
        except TransportError:
            self._has_failed = True
            raise
        except RuntimeError as error:  # NCCL and the stores raise nothing else
            self._has_failed = True
            raise TransportError(f"{self._rank_name} {what}: {error}") from error


def _nccl(parallel: ParallelConfig, store: Store, timeout_s: float) -> Any:
    # Use the class itself, without a global group, as with gloo.
    os.environ.setdefault(MONITORING_VARIABLE, "0")
    made: Any = _distributed_c10d.ProcessGroupNCCL  # exists only in CUDA builds
    options = made.Options()
    # Torch's own watchdog kills the process, so its timeout is longer than ours, which raises an
    # error first.
    options._timeout = timedelta(seconds=2 * timeout_s + 60)  # noqa: SLF001
    return made(store, parallel.tp_rank, parallel.tp_size, options)
