"""NIXL without kvferry: what somebody gets who asks it for every block by a descriptor of its own.

As its own examples use it: descriptor lists of all blocks are prepared beforehand, a move names indices in them. Only the progress
thread is off, because it would take one of the cores that everything else is measured on; both sides make progress by calling in.
"""

import contextlib
import time
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from kvferry.cli.interrupts import StopRequest
from kvferry.errors import KVFerryError
from kvferry.planes.nixl import load_nixl
from kvferry.planes.runs import Offsets
from kvferry.types import MemoryKind

__all__ = ["DescriptorList", "PreparedTransfer", "RawNixl"]

NUM_THREADS = 4
"""As vLLM asks for; our own transport does without."""


@dataclass(frozen=True, slots=True, eq=False)
class DescriptorList:
    """One side of a move: `count` blocks from an address on, one after the other, and which of them move."""

    address: int
    segment_bytes: int
    count: int
    chosen: Offsets


@dataclass(frozen=True, slots=True, eq=False)
class PreparedTransfer:
    """What was prepared: an operation, and for each side a list of NIXL's with indices in it."""

    operation: str
    local: Any
    local_indices: list[int]
    remote: Any
    remote_indices: list[int]


class RawNixl:
    """One side's agent over one range of memory. Close it."""

    def __init__(self, address: int, size_bytes: int, kind: MemoryKind = MemoryKind.DRAM, device: int = 0) -> None:
        nixl, self._errors = load_nixl(kind)
        config = nixl.nixl_agent_config(enable_prog_thread=False, num_threads=NUM_THREADS, backends=["UCX"])
        self._agent: Any = nixl.nixl_agent(f"bench-{uuid4().hex}", config)
        self._kind = kind.value
        self._device = device
        self._registration = self._agent.register_memory(np.array([(address, size_bytes, device)], np.uint64), self._kind)
        self._peer = ""
        self._prepared: list[PreparedTransfer] = []

    def metadata(self) -> bytes:
        return bytes(self._agent.get_agent_metadata())

    def progress(self) -> None:
        self._agent.get_new_notifs()

    def connect(self, metadata: bytes) -> None:
        self._peer = self._agent.add_remote_agent(metadata).decode()

    def prepare(self, operation: str, local: DescriptorList, remote: DescriptorList) -> PreparedTransfer:
        """Not timed: the lists of all blocks on both sides, and which of them move. `operation`: READ or WRITE."""
        near = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", self._rows(local), self._kind)
        far = self._agent.prep_xfer_dlist(self._peer, self._rows(remote), self._kind)
        move = PreparedTransfer(operation, near, local.chosen.tolist(), far, remote.chosen.tolist())
        self._prepared.append(move)
        return move

    def overwrite(self) -> None:
        """Let go of what was prepared."""
        for move in self._prepared:
            for side in (move.local, move.remote):
                self._agent.release_dlist_handle(side)
        self._prepared.clear()

    def run(self, move: PreparedTransfer, deadline: float, stop: StopRequest) -> None:
        """The timed part, until everything has arrived."""
        verb = move.operation.lower()
        try:
            handle = self._agent.make_prepped_xfer(move.operation, move.local, move.local_indices, move.remote, move.remote_indices)
            state = self._agent.transfer(handle)
            while state == "PROC" and time.monotonic() < stop.earlier_deadline(deadline):
                state = self._agent.check_xfer_state(handle)
            self._agent.release_xfer_handle(handle)
        except self._errors as error:
            stop.check()
            raise KVFerryError(f"a {verb} by raw NIXL failed ({error})") from error
        if state != "DONE":
            stop.check()
            raise KVFerryError(f"a {verb} by raw NIXL did not end ({state}); is the machine overloaded?")

    def close(self) -> None:
        """Without this the agent may crash the interpreter when that ends."""
        with contextlib.suppress(*self._errors):
            self.overwrite()
            if self._peer:
                self._agent.remove_remote_agent(self._peer)
            self._agent.deregister_memory(self._registration)
        self._agent = None

    def _rows(self, side: DescriptorList) -> npt.NDArray[np.uint64]:
        rows = np.empty((side.count, 3), np.uint64)
        rows[:, 0] = side.address + np.arange(side.count, dtype=np.int64) * side.segment_bytes
        rows[:, 1], rows[:, 2] = side.segment_bytes, self._device
        return rows
