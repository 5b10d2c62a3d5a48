"""The few calls of CUDA's driver that torch does not have: memory of this process shown to others,
and theirs opened here.

Any thread, with the device's context current in it (`enter_device`). Errors are TransportError; a
machine without a driver is one too.
"""

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

from kvferry.errors import TransportError
from kvferry.transports.copy import native as driver_calls
from kvferry.transports.copy.native import Kernel

__all__ = [
    "HANDLE_BYTES",
    "Allocation",
    "allocation_of",
    "can_reach",
    "close_handle",
    "device_with",
    "export_handle",
    "ignore_captures",
    "is_complete",
    "open_handle",
    "read_memory",
    "start_kernel",
    "upload",
    "uuid_of",
    "write_memory",
]

HANDLE_BYTES = 64
UUID_BYTES = 16
LAZY_PEER_ACCESS = 1
NOT_READY = 600
RELAXED = 2
KERNEL_CALLS = ("cuMemcpyHtoDAsync_v2", "cuLaunchKernel", "cuEventRecord")


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


@dataclass(frozen=True, slots=True)
class Allocation:
    """One allocation of device memory: where it begins, and how long it is."""

    address: int
    size_bytes: int


def allocation_of(address: int) -> Allocation:
    """The allocation that an address lies in."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    _call(
        "cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
    )
    return Allocation(base.value, size.value)


def export_handle(allocation: Allocation) -> bytes:
    """By which another process of this host opens it."""
    handle = _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(allocation.address))
    return bytes(ctypes.string_at(ctypes.addressof(handle), HANDLE_BYTES))


def open_handle(handle: bytes) -> int:
    """The address here of another process's allocation. Close it."""
    opened, address = _Handle(), ctypes.c_uint64()
    ctypes.memmove(ctypes.addressof(opened), handle, HANDLE_BYTES)
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), opened, ctypes.c_uint(LAZY_PEER_ACCESS))
    return address.value


def close_handle(address: int) -> None:
    _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))


def read_memory(address: int, size_bytes: int) -> bytes:
    """What lies there, once the device has come to it."""
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


def start_kernel(
    kernel: Kernel,
    table: tuple[int, int, int],
    grid: tuple[int, int],
    numbers: tuple[int, int],
    stream: int,
    event: int,
) -> None:
    """In the order of a stream: copy a table (its address there, where it is pinned, its bytes) to
    the device, start a kernel, record an event. Returns at once.
    """
    call, status = driver_calls.start_kernel(
        _kernel_calls(), table, kernel, grid, numbers, stream, event
    )
    if status:
        raise _error(KERNEL_CALLS[call], status)


def is_complete(event: int, within_s: float) -> bool:
    """Whether the device has come past an event, or has failed. It is asked all the time for so
    long; other threads of this interpreter go on meanwhile.
    """
    return driver_calls.poll_until(_event_query(), event, NOT_READY, within_s) != NOT_READY


def ignore_captures() -> None:
    """For the calling thread: nothing is forbidden to it while another thread captures a graph of
    kernels, and it does not spoil that.
    """
    _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(RELAXED)))


def uuid_of(device: int) -> bytes:
    """Names the GPU the same in every process, however they number theirs."""
    number, name = ctypes.c_int(), ctypes.create_string_buffer(UUID_BYTES)
    _call("cuDeviceGet", ctypes.byref(number), ctypes.c_int(device))
    _call("cuDeviceGetUuid_v2", name, number)
    return name.raw


def device_with(uuid: bytes) -> int | None:
    """The number of a GPU in this process; None when it does not see that one."""
    count = ctypes.c_int()
    _call("cuDeviceGetCount", ctypes.byref(count))
    return next((number for number in range(count.value) if uuid_of(number) == uuid), None)


def can_reach(device: int, other: int) -> bool:
    """Whether kernels on one GPU can touch the memory of another."""
    answer = ctypes.c_int()
    _call("cuDeviceCanAccessPeer", ctypes.byref(answer), ctypes.c_int(device), ctypes.c_int(other))
    return bool(answer.value)


@functools.cache
def _event_query() -> int:
    return _address("cuEventQuery")


@functools.cache
def _kernel_calls() -> tuple[int, int, int]:
    upload, launch, record = map(_address, KERNEL_CALLS)
    return upload, launch, record


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
