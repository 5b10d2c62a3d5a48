"""Tests that only permitted processes can open a shared cache, that a reader verifies that it maps
the offered cache, and that no resource remains.
"""

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import msgspec
import numpy as np
import pytest

from kvferry.errors import ConfigError, TransportError
from kvferry.transports.base import Segments, TransportOffer
from kvferry.transports.locality import ProcessIncarnation, host_identity, start_ticks
from kvferry.transports.shm import SharedMemory, ShmTransport
from kvferry.types import EngineId, Epoch, MemoryKind, PeerId, Region

PEER = PeerId(EngineId("far"), Epoch("1"), 0)
SIZE = 1 << 20
DEADLINE_S = 60.0
OFFSETS = np.array([0], np.int64)


def region_of(memory: SharedMemory) -> Region:
    return Region("kv", memory.address, 4096, 4096, memory.size_bytes // 4096)


@contextlib.contextmanager
def side() -> Iterator[tuple[ShmTransport, SharedMemory]]:
    memory = SharedMemory.allocate(SIZE)
    transport = ShmTransport(memory)
    assert transport.register([region_of(memory)])
    yield transport, memory
    transport.close()
    memory.close()


def serve(pipe: Connection) -> None:
    with side() as (transport, memory):
        memory.buffer[:5] = b"hello"
        pipe.send((transport.offer(), region_of(memory)))
        pipe.recv()


@contextlib.contextmanager
def far_process() -> Iterator[tuple[TransportOffer, Region, BaseProcess]]:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    assert pipe.poll(DEADLINE_S)
    offer, region = pipe.recv()
    yield offer, region, process
    if process.is_alive():
        pipe.send("end")
    process.join(DEADLINE_S)
    assert not process.is_alive()
    for end in (pipe, theirs):
        end.close()


def shared_mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd:kvferry-cache" in line for line in maps)


def test_a_shared_cache_is_zeroed_writable_and_sealed_against_shrinking() -> None:
    with side() as (_, memory):
        assert memory.address % 4096 == 0
        assert memory.size_bytes == len(memory.buffer) == SIZE
        assert not any(memory.buffer)
        memory.buffer[0] = 1
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, 10)


def test_a_shared_cache_is_wholly_mapped_before_anybody_touches_it() -> None:
    # Otherwise the first write to each page would cause a page fault in the middle of a transfer.
    with side():
        resident, is_ours = [], False
        with open("/proc/self/smaps") as maps:
            for line in maps:
                if "-" in line.split()[0]:
                    is_ours = "memfd:kvferry-cache" in line
                elif is_ours and line.startswith("Rss:"):
                    resident.append(int(line.split()[1]) * 1024)
        assert resident == [SIZE]


def test_a_shared_cache_is_closed_under_tensors_without_a_crash() -> None:
    files = len(os.listdir("/proc/self/fd"))
    memory = SharedMemory.allocate(SIZE)
    tensor = np.frombuffer(memory.buffer, np.uint8)
    memory.close()
    memory.close()
    assert not tensor.any()
    del tensor
    assert shared_mappings() == 0
    assert len(os.listdir("/proc/self/fd")) == files


@pytest.mark.parametrize("size", [0, -1])
def test_impossible_sizes_are_a_mistake_of_the_operator(size: int) -> None:
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError):
        SharedMemory.allocate(size)
    assert len(os.listdir("/proc/self/fd")) == files


def test_memory_that_is_not_shared_is_not_carried() -> None:
    with side() as (transport, memory):
        outside = Region("kv", memory.address + SIZE - 4096, 4096, 4096, 2)
        on_gpu = Region("kv", memory.address, 4096, 4096, 1, MemoryKind.VRAM)
        assert not ShmTransport(memory).register([outside])
        assert not ShmTransport(memory).register([on_gpu])
        assert transport.register([region_of(memory)])


def test_an_idle_peer_that_dies_is_unmapped() -> None:
    with side() as (transport, _), far_process() as (offer, region, process):
        transport.connect(PEER, offer, [region])
        before = shared_mappings()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + DEADLINE_S
        while shared_mappings() == before:
            assert time.monotonic() < deadline
            interval_s = transport.poll_interval_s()
            assert interval_s is not None
            time.sleep(min(interval_s, 0.05))
            transport.poll()
        assert transport.poll_interval_s() is None


def test_reads_do_not_map_a_peer_for_writing() -> None:
    with side() as (transport, memory), far_process() as (offer, region, process):
        transport.connect(PEER, offer, [region])
        inode = os.stat(f"/proc/{process.pid}/fd/{msgspec.msgpack.decode(offer.blob)[2]}").st_ino

        def ways() -> list[str]:
            with open("/proc/self/maps") as maps:
                return sorted(line.split()[1] for line in maps if line.split()[4] == str(inode))

        transport.read(PEER, [Segments(0, 0, 4096, OFFSETS, OFFSETS)])
        assert any(transport.poll() for _ in range(10))
        assert bytes(memory.buffer[:5]) == b"hello"
        assert ways() == ["r--s"]
        transport.write(PEER, [Segments(0, 0, 4096, OFFSETS, OFFSETS)])
        assert ways() == ["r--s", "rw-s"]


def test_an_offer_of_another_life_file_host_or_shape_is_refused() -> None:
    with side() as (transport, _), side() as (far, memory):
        offer, region = far.offer(), region_of(memory)
        pid, ticks, fd, device, inode, address, size = msgspec.msgpack.decode(offer.blob)
        with open("/proc/self/stat", "rb") as other:
            wrong = [
                (pid, ticks + 1, fd, device, inode, address, size),
                (2**22 + 5, ticks, fd, device, inode, address, size),
                (pid, ticks, other.fileno(), device, inode, address, size),
                (pid, ticks, fd, device, inode + 1, address, size),
                (pid, ticks, fd, device, inode, address, size * 2),
                (pid, ticks, fd, device, inode, address + 4096, size),
                (pid, ticks, -1, device, inode, address, size),
                (pid, ticks, fd, device, inode, address),
                ("pid", ticks, fd, device, inode, address, size),
            ]
            for fields in wrong:
                with pytest.raises(TransportError):
                    transport.connect(
                        PEER,
                        TransportOffer("shm", offer.reach, msgspec.msgpack.encode(fields)),
                        [region],
                    )
        with pytest.raises(TransportError, match="another host"):
            transport.connect(PEER, TransportOffer("shm", "elsewhere", offer.blob), [region])
        transport.connect(PEER, offer, [region])


def test_a_file_that_could_shrink_is_refused() -> None:
    with side() as (transport, _):
        fd = os.memfd_create("unsealed")
        os.ftruncate(fd, SIZE)
        file, ticks = os.fstat(fd), start_ticks(os.getpid())
        blob = msgspec.msgpack.encode(
            (os.getpid(), ticks, fd, file.st_dev, file.st_ino, 4096, SIZE)
        )
        with pytest.raises(TransportError):
            transport.connect(
                PEER,
                TransportOffer("shm", host_identity(), blob),
                [Region("kv", 4096, 4096, 4096, 1)],
            )
        os.close(fd)


def test_a_process_life_ends_with_the_process_and_not_before() -> None:
    with far_process() as (_, _, process):
        assert process.pid is not None
        ticks = start_ticks(process.pid)
        assert ticks is not None
        assert ProcessIncarnation.watch(process.pid, ticks - 1) is None
        incarnation = ProcessIncarnation.watch(process.pid, ticks)
        unaided = ProcessIncarnation(process.pid, ticks, None)
        assert incarnation is not None
        assert not incarnation.has_ended()
        assert not unaided.has_ended()
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert incarnation.has_ended()
        assert unaided.has_ended(), "a corpse is taken for a living process"
        incarnation.close()
        incarnation.close()
