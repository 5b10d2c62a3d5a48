"""Sides for the conformance suite, one maker per plane; module functions, so that a spawned process can make them too."""

import numpy as np

from kvferry.planes.copiers import copy_by_numpy
from kvferry.planes.faulty import FaultyDataPlane, parse_faults
from kvferry.planes.memory import MemoryDataPlane, MemoryNetwork
from kvferry.planes.nixl import NixlDataPlane
from kvferry.planes.shared_memory import SharedMemory
from kvferry.planes.shm import ShmDataPlane
from kvferry.planes.staged_nixl import StagedNixlDataPlane, StagingSettings
from kvferry.planes.tcp import TcpDataPlane
from kvferry.ports.data import DataPlane
from kvferry.testing.plane_sides import MEMORY_BYTES, Side, layout

__all__ = [
    "corrupting_side",
    "delaying_side",
    "failing_side",
    "fenced_memory_side",
    "memory_side",
    "nixl_side",
    "shm_side",
    "shm_side_without_compiler",
    "slow_staged_side",
    "staged_nixl_side",
    "tcp_side",
]

NETWORK = MemoryNetwork()


def memory_side() -> Side:
    return _over_numpy(MemoryDataPlane(NETWORK))


def fenced_memory_side() -> Side:
    return _over_numpy(MemoryDataPlane(NETWORK, fences_writes=True))


def delaying_side() -> Side:
    return _over_numpy(FaultyDataPlane(MemoryDataPlane(NETWORK), parse_faults("delay:polls=3")))


def corrupting_side() -> Side:
    return _over_numpy(FaultyDataPlane(MemoryDataPlane(NETWORK), parse_faults("corrupt:every=1")))


def failing_side() -> Side:
    return _over_numpy(FaultyDataPlane(MemoryDataPlane(NETWORK), parse_faults("fail:every=1")))


def shm_side() -> Side:
    memory = SharedMemory.allocate(MEMORY_BYTES)
    return _registered(ShmDataPlane(memory), memory)


def shm_side_without_compiler() -> Side:
    memory = SharedMemory.allocate(MEMORY_BYTES)
    return _registered(ShmDataPlane(memory, copy_by_numpy), memory)


def nixl_side() -> Side:
    memory = SharedMemory.allocate(MEMORY_BYTES)
    return _registered(NixlDataPlane(), memory)


def staged_nixl_side() -> Side:
    """Everything is staged that is more than one run, through a ring that is much smaller than the large region."""
    memory = SharedMemory.allocate(MEMORY_BYTES)
    settings = StagingSettings(piece_bytes=1 << 40, ring_bytes=2 << 20, chunk_bytes=96 * 1024, min_runs=2)
    return _registered(StagedNixlDataPlane(NixlDataPlane(), settings, b"the secret of these tests"), memory)


def slow_staged_side() -> Side:
    """As above, in chunks so small that a long transfer can be met on its way; and who is silent is not waited for long."""
    memory = SharedMemory.allocate(MEMORY_BYTES)
    settings = StagingSettings(piece_bytes=1 << 40, ring_bytes=256 << 10, chunk_bytes=8192, min_runs=2)
    return _registered(StagedNixlDataPlane(NixlDataPlane(), settings, b"the secret of these tests", reclaim_s=5.0), memory)


def tcp_side() -> Side:
    return _over_numpy(TcpDataPlane("127.0.0.1", "127.0.0.1"))


def _registered(plane: DataPlane, memory: SharedMemory) -> Side:
    regions = layout(memory.address)
    assert plane.register(regions)
    return Side(plane, np.frombuffer(memory.buffer, np.uint8), regions, memory.close)


def _over_numpy(plane: DataPlane) -> Side:
    memory = np.zeros(MEMORY_BYTES, np.uint8)
    regions = layout(memory.ctypes.data)
    assert plane.register(regions)
    return Side(plane, memory, regions, lambda: memory.resize(0, refcheck=False))
