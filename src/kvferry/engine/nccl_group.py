"""The sums of tensor-parallel ranks that have a GPU each: NCCL adds up between the GPUs, gloo keeps the promises of `parallel`.

NCCL's operations are kernels: the host does not wait for them, and they wait for a rank that has died for ever. So at the end of each
step's operations the ranks meet once over gloo, where a death is noticed at once, and then wait for the device with a deadline.
Owned by the worker's engine thread.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import PrefixStore, Store

from kvferry.connectors.contract import ParallelConfig
from kvferry.engine.parallel import GlooGroup
from kvferry.errors import TransportError

__all__ = ["NcclGroup", "has_nccl"]

POLL_INTERVAL_S = 0.0001
MONITORING_VARIABLE = "TORCH_NCCL_ENABLE_MONITORING"
"""A thread of torch that looks into the store for as long as the group lives. Ours is gone once all ranks have met."""


def has_nccl() -> bool:
    """Whether torch was built with it."""
    return hasattr(_distributed_c10d, "ProcessGroupNCCL")


class NcclGroup:
    def __init__(self, parallel: ParallelConfig, store: Store, gloo: GlooGroup, device: torch.device, timeout_s: float) -> None:
        """Meet the other ranks at `store`; blocks until all are there, and uses it no more afterwards. `gloo` joins the same ranks, and
        is closed with this."""
        self._size = parallel.tp_size
        self._rank_name = f"tensor-parallel rank {parallel.tp_rank} of {parallel.tp_size}"
        self._gloo = gloo
        self._timeout_s = timeout_s
        self._has_failed = False
        with self._as_transport_error("could not join the other ranks' GPUs"):
            self._nccl: Any = _nccl(parallel, PrefixStore("nccl", store), timeout_s)
        try:  # the first operation is what connects the GPUs
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
            self._gloo.barrier()
            self._wait_for_device()
        return result

    def close(self) -> None:
        """Leave the other ranks; kernels that wait for one that is gone are ended. Idempotent."""
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
                raise TransportError(f"{self._rank_name} waited {self._timeout_s:g} s for the other ranks' GPUs")
            time.sleep(POLL_INTERVAL_S)

    @contextmanager
    def _as_transport_error(self, what: str) -> Iterator[None]:
        try:
            yield
        except TransportError:
            self._has_failed = True
            raise
        except RuntimeError as error:  # all that NCCL and its stores raise
            self._has_failed = True
            raise TransportError(f"{self._rank_name} {what}: {error}") from error


def _nccl(parallel: ParallelConfig, store: Store, timeout_s: float) -> Any:
    # As with gloo: the class itself, without a global group.
    os.environ.setdefault(MONITORING_VARIABLE, "0")
    made: Any = _distributed_c10d.ProcessGroupNCCL  # only in builds for CUDA
    options = made.Options()
    # Torch's own watchdog ends the process; ours has spoken long before.
    options._timeout = timedelta(seconds=2 * timeout_s + 60)  # noqa: SLF001
    return made(store, parallel.tp_rank, parallel.tp_size, options)
