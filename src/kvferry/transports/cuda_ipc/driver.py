"""Calls of the CUDA driver that torch does not offer: sharing device memory between processes.

Callable from any thread in which the device's context is current (`enter_device`). Errors raise
TransportError, including the lack of a driver on the machine.
"""

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

from kvferry.errors import TransportError
from kvferry.transports.copy import native as driver_calls
from kvferry.transports.copy.native import Kernel

HANDLE_BYTES = 64
UUID_BYTES = 16
LAZY_PEER_ACCESS = 1
"""`cuIpcOpenMemHandle` flag: enables peer access between the two GPUs when needed."""
NOT_READY = 600
"""CUDA_ERROR_NOT_READY: the event has been recorded, but is not complete yet."""
RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED."""
KERNEL_CALLS = ("cuMemcpyHtoDAsync_v2", "cuLaunchKernel", "cuEventRecord")


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


@dataclass(frozen=True, slots=True)
class Allocation:
    """One allocation of device memory: first address and size."""

    address: int
    size_bytes: int


def allocation_of(address: int) -> Allocation:
    """Return the allocation that contains an address."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    _call(
        "cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
    )
    return Allocation(base.value, size.value)


def export_handle(allocation: Allocation) -> bytes:
    """Return a handle by which another process of this host can open the allocation."""
    handle = _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(allocation.address))
    return bytes(ctypes.string_at(ctypes.addressof(handle), HANDLE_BYTES))


def open_handle(handle: bytes) -> int:
    """Map another process's allocation; return the local address. The caller closes the handle."""
    opened, address = _Handle(), ctypes.c_uint64()
    ctypes.memmove(ctypes.addressof(opened), handle, HANDLE_BYTES)
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), opened, ctypes.c_uint(LAZY_PEER_ACCESS))
    return address.value


def close_handle(address: int) -> None:
    _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))


def read_memory(address: int, size_bytes: int) -> bytes:
    """Read device memory, after the device has finished earlier work."""
    here = ctypes.create_string_buffer(size_bytes)
    _call("cuMemcpyDtoH_v2", here, ctypes.c_uint64(address), ctypes.c_size_t(size_bytes))
    return here.raw


def write_memory(address: int, content: bytes) -> None:
    _call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), content, ctypes.c_size_t(len(content)))


def upload(target: int, source: int, size_bytes: int, stream: int) -> None:
    """Copy pinned memory to the device, in the order of a stream. Returns at once."""
    _call(
        "cuMemcpyHtoDAsync_v2",
        ctypes.c_uint64(target),
        ctypes.c_void_p(source),
        ctypes.c_size_t(size_bytes),
        ctypes.c_void_p(stream),
    )


def copy_async(target: int, source: int, size_bytes: int, stream: int) -> None:
    """Copy between the device and pinned memory, in the order of a stream. Returns at once."""
    _call(
        "cuMemcpyAsync",
        ctypes.c_uint64(target),
        ctypes.c_uint64(source),
        ctypes.c_size_t(size_bytes),
        ctypes.c_void_p(stream),
    )


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes: the copies read their sources in the order of the stream."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("hints", ctypes.c_int * 4),
        ("flags", ctypes.c_uint),
    )


@functools.cache
def can_copy_in_batches() -> bool:
    """Whether the driver is that of CUDA 12.8 or newer."""
    return hasattr(_driver(), "cuMemcpyBatchAsync")


def copy_batch(targets: Any, sources: Any, sizes: Any, stream: int) -> None:
    """Copy between the device and pinned memory by the device's copy engines, in the order of a
    stream. The three are contiguous numpy arrays of unsigned 64-bit numbers. Returns at once.
    """
    attributes, first, failed = _CopyAttributes(1), ctypes.c_size_t(0), ctypes.c_size_t(0)
    _call(
        "cuMemcpyBatchAsync",
        ctypes.c_void_p(targets.ctypes.data),
        ctypes.c_void_p(sources.ctypes.data),
        ctypes.c_void_p(sizes.ctypes.data),
        ctypes.c_size_t(len(targets)),
        ctypes.byref(attributes),
        ctypes.byref(first),
        ctypes.c_size_t(1),
        ctypes.byref(failed),
        ctypes.c_void_p(stream),
    )


def start_kernel(
    kernel: Kernel,
    table: tuple[int, int, int],
    grid: tuple[int, int],
    numbers: tuple[int, int],
    stream: int,
    event: int,
) -> None:
    """Copy a table to the device, start a kernel and record an event, in the order of a stream.

    `table` is (device address, address in pinned memory, bytes). Returns at once.
    """
    if driver_calls.start_kernel is None:
        raise TransportError("kvferry was installed without a compiler")
    call, status = driver_calls.start_kernel(
        _kernel_calls(), table, kernel, grid, numbers, stream, event
    )
    if status:
        raise _error(KERNEL_CALLS[call], status)


def is_complete(event: int, within_s: float) -> bool:
    """Whether the device has passed an event, or has failed.

    Polls without pause for up to `within_s`, without the GIL, so that the remaining Python threads
    run. See docs/decisions/041-polling-a-device-without-the-gil.md.
    """
    return (
        driver_calls.poll_until(_address("cuEventQuery"), event, NOT_READY, within_s) != NOT_READY
    )


def ignore_captures() -> None:
    """Allow all calls in the calling thread while another thread captures a CUDA graph.

    Without this, calls of this thread would fail, or invalidate the capture.
    """
    _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(RELAXED)))


def uuid_of(device: int) -> bytes:
    """Return the UUID of a GPU, which is the same in every process, unlike the device number."""
    number, name = ctypes.c_int(), ctypes.create_string_buffer(UUID_BYTES)
    _call("cuDeviceGet", ctypes.byref(number), ctypes.c_int(device))
    _call("cuDeviceGetUuid_v2", name, number)
    return name.raw


def device_with(uuid: bytes) -> int | None:
    """Return the device number of a GPU in this process; None if the GPU is not visible here."""
    count = ctypes.c_int()
    _call("cuDeviceGetCount", ctypes.byref(count))
    return next((number for number in range(count.value) if uuid_of(number) == uuid), None)


def can_reach(device: int, other: int) -> bool:
    """Whether kernels on one GPU can access the memory of another."""
    answer = ctypes.c_int()
    _call("cuDeviceCanAccessPeer", ctypes.byref(answer), ctypes.c_int(device), ctypes.c_int(other))
    return bool(answer.value)


@functools.cache
def _kernel_calls() -> tuple[int, int, int]:
    upload, launch, record = map(_address, KERNEL_CALLS)
    return upload, launch, record


@functools.cache
def _address(name: str) -> int:
    return ctypes.cast(getattr(_driver(), name), ctypes.c_void_p).value or 0


@functools.cache
def _driver() -> Any:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise TransportError(f"CUDA's driver cannot be loaded ({error})") from error
    driver.cuInit(0)
    return driver


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_driver(), name)(*arguments)
    if status:
        raise _error(name, status)


def _error(name: str, status: int) -> TransportError:
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(status, ctypes.byref(text))
    return TransportError(
        f"{name} failed: {(text.value or b'unknown error').decode()} (CUDA error {status})"
    )
