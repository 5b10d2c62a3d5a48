"""Transport sides for the conformance suite, one function per transport. They are module functions,
so that a spawned process can make them too.
"""

import numpy as np

from kvferry.testing.transport_pairs import MEMORY_BYTES, TransportSide, layout
from kvferry.transports.base import DataTransport
from kvferry.transports.copy.gather import copy_by_numpy
from kvferry.transports.faulty import FaultyTransport, parse_faults
from kvferry.transports.memory import MemoryNetwork, MemoryTransport
from kvferry.transports.mooncake.transport import MooncakeSettings, MooncakeTransport
from kvferry.transports.nixl.bounce.settings import BounceSettings
from kvferry.transports.nixl.bounce.transport import BounceNixlTransport
from kvferry.transports.nixl.transport import NixlTransport
from kvferry.transports.shm import SharedMemory, ShmTransport
from kvferry.transports.tcp.transport import TcpTransport
from kvferry.transports.torch_dist.transport import DistTransport

NETWORK = MemoryNetwork()


def memory_side() -> TransportSide:
    return _over_numpy(MemoryTransport(NETWORK))


def write_grant_memory_side() -> TransportSide:
    return _over_numpy(MemoryTransport(NETWORK, supports_write_grants=True))


def delaying_side() -> TransportSide:
    return _over_numpy(FaultyTransport(MemoryTransport(NETWORK), parse_faults("delay:polls=3")))


def corrupting_side() -> TransportSide:
    return _over_numpy(FaultyTransport(MemoryTransport(NETWORK), parse_faults("corrupt:every=1")))


def failing_side() -> TransportSide:
    return _over_numpy(FaultyTransport(MemoryTransport(NETWORK), parse_faults("fail:every=1")))


def shm_side() -> TransportSide:
    memory = SharedMemory.allocate(MEMORY_BYTES)
    return _registered(ShmTransport(memory), memory)


def shm_side_without_compiler() -> TransportSide:
    memory = SharedMemory.allocate(MEMORY_BYTES)
    return _registered(ShmTransport(memory, copy_by_numpy), memory)


def nixl_side() -> TransportSide:
    memory = SharedMemory.allocate(MEMORY_BYTES)
    return _registered(NixlTransport(), memory)


def bounce_nixl_side() -> TransportSide:
    """Segments that are not contiguous use a bounce buffer much smaller than the large region."""
    memory = SharedMemory.allocate(MEMORY_BYTES)
    settings = BounceSettings(
        segment_bytes=1 << 40, buffer_bytes=2 << 20, chunk_bytes=96 * 1024, min_descriptors=2
    )
    return _registered(BounceNixlTransport(settings, b"the secret of these tests"), memory)


def slow_bounce_side() -> TransportSide:
    """Like `bounce_nixl_side`, but with chunks so small that a test can interrupt a long transfer,
    and with a short timeout for silent peers.
    """
    memory = SharedMemory.allocate(MEMORY_BYTES)
    settings = BounceSettings(
        segment_bytes=1 << 40, buffer_bytes=256 << 10, chunk_bytes=8192, min_descriptors=2
    )
    return _registered(
        BounceNixlTransport(settings, b"the secret of these tests", reclaim_s=5.0),
        memory,
    )


def mooncake_side(settings: MooncakeSettings | None = None) -> TransportSide:
    memory = SharedMemory.allocate(MEMORY_BYTES)
    return _registered(MooncakeTransport(memory, "127.0.0.1", "127.0.0.1", settings), memory)


def tcp_side() -> TransportSide:
    return _over_numpy(TcpTransport("127.0.0.1", "127.0.0.1"))


def dist_side() -> TransportSide:
    return _over_numpy(DistTransport("127.0.0.1", "127.0.0.1"))


def _registered(transport: DataTransport, memory: SharedMemory) -> TransportSide:
    regions = layout(memory.address)
    assert transport.register(regions)
    return TransportSide(transport, np.frombuffer(memory.buffer, np.uint8), regions, memory.close)


def _over_numpy(transport: DataTransport) -> TransportSide:
    memory = np.zeros(MEMORY_BYTES, np.uint8)
    regions = layout(memory.ctypes.data)
    assert transport.register(regions)
    return TransportSide(transport, memory, regions, lambda: memory.resize(0, refcheck=False))
