"""NIXL without kvferry: what somebody gets who asks it for every block by a descriptor of its own.

As its own examples use it: descriptor lists of all blocks are prepared beforehand, a move names indices in them. Only the progress
thread is off, because it would take one of the cores that everything else is measured on; both sides make progress by calling in.
"""

import contextlib
import time
from typing import Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from kvferry.bench.transfer_moves import Blocks, Move
from kvferry.cli.interrupts import StopRequest
from kvferry.errors import KVFerryError
from kvferry.planes.nixl import load_nixl
from kvferry.planes.runs import Offsets
from kvferry.types import MemoryKind

__all__ = ["RawNixl"]

NUM_THREADS = 4
"""As vLLM asks for; our own plane does without."""


class RawNixl:
    """One side's agent over one range of memory. Close it."""

    def __init__(self, address: int, size_bytes: int) -> None:
        nixl, self._errors = load_nixl(MemoryKind.DRAM)
        config = nixl.nixl_agent_config(enable_prog_thread=False, num_threads=NUM_THREADS, backends=["UCX"])
        self._agent: Any = nixl.nixl_agent(f"bench-{uuid4().hex}", config)
        self._address = address
        self._registration = self._agent.register_memory(np.array([(address, size_bytes, 0)], np.uint64), "DRAM")
        self._peer = ""
        self._peer_address = 0
        self._prepared: tuple[Any, Any] | None = None
        self._indices: tuple[list[int], list[int]] = ([], [])

    def metadata(self) -> bytes:
        return bytes(self._agent.get_agent_metadata())

    def progress(self) -> None:
        self._agent.get_new_notifs()

    def connect(self, metadata: bytes, address: int) -> None:
        self._peer = self._agent.add_remote_agent(metadata).decode()
        self._peer_address = address

    def prepare(self, blocks: Blocks, move: Move) -> None:
        """Not timed: the lists of all blocks on both sides, and which of them move."""
        self._forget()
        starts = np.arange(blocks.count, dtype=np.int64) * blocks.piece_bytes
        local = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", self._rows(self._address + starts, blocks.piece_bytes), "DRAM")
        remote = self._agent.prep_xfer_dlist(self._peer, self._rows(self._peer_address + starts, blocks.piece_bytes), "DRAM")
        self._prepared = local, remote
        self._indices = move.local_blocks.tolist(), move.remote_blocks.tolist()

    def read(self, deadline: float, stop: StopRequest) -> None:
        """The timed part, until everything has arrived."""
        assert self._prepared is not None
        local, remote = self._prepared
        try:
            handle = self._agent.make_prepped_xfer("READ", local, self._indices[0], remote, self._indices[1])
            state = self._agent.transfer(handle)
            while state == "PROC" and time.monotonic() < stop.sooner(deadline):
                state = self._agent.check_xfer_state(handle)
            self._agent.release_xfer_handle(handle)
        except self._errors as error:
            stop.check()
            raise KVFerryError(f"a read by raw NIXL failed ({error})") from error
        if state != "DONE":
            stop.check()
            raise KVFerryError(f"a read by raw NIXL did not end ({state}); is the machine overloaded?")

    def close(self) -> None:
        """Without this the agent may crash the interpreter when that ends."""
        with contextlib.suppress(*self._errors):
            self._forget()
            if self._peer:
                self._agent.remove_remote_agent(self._peer)
            self._agent.deregister_memory(self._registration)
        self._agent = None

    def _forget(self) -> None:
        if self._prepared is not None:
            for prepared in self._prepared:
                self._agent.release_dlist_handle(prepared)
            self._prepared = None

    @staticmethod
    def _rows(addresses: Offsets, piece_bytes: int) -> npt.NDArray[np.uint64]:
        rows = np.empty((len(addresses), 3), np.uint64)
        rows[:, 0], rows[:, 1], rows[:, 2] = addresses, piece_bytes, 0
        return rows
