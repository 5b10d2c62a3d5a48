"""The few calls of CUDA's driver that torch does not have: memory of this process shown to others, and theirs opened here.

Any thread, with the device's context current in it (`enter_device`). Errors are TransportError; a machine without a driver is one too.
"""

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

from kvferry.errors import TransportError
from kvferry.planes.asking import ask_until

__all__ = [
    "HANDLE_BYTES",
    "Allocation",
    "allocation_of",
    "can_reach",
    "close_handle",
    "device_with",
    "export_handle",
    "has_passed",
    "launch",
    "open_handle",
    "read_memory",
    "upload",
    "uuid_of",
    "write_memory",
]

HANDLE_BYTES = 64
UUID_BYTES = 16
LAZY_PEER_ACCESS = 1
NOT_READY = 600


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
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
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
    status = _driver().cuMemcpyHtoDAsync_v2(target, source, size_bytes, stream)
    if status:
        raise _error("cuMemcpyHtoDAsync", status)


def launch(function: int, grid: tuple[int, int, int], threads: int, shared_bytes: int, stream: int, arguments: int) -> None:
    """Start a kernel in the order of a stream. `arguments`: the address of an array of addresses, one for each; they are read at once."""
    status = _driver().cuLaunchKernel(function, *grid, threads, 1, 1, shared_bytes, stream, arguments, None)
    if status:
        raise _error("cuLaunchKernel", status)


def has_passed(event: int, within_s: float) -> bool:
    """Whether the device has come past an event, or has failed. It is asked all the time for so long; other threads of this interpreter go
    on meanwhile."""
    return ask_until(_event_query(), event, NOT_READY, within_s) != NOT_READY


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
    return ctypes.cast(_driver().cuEventQuery, ctypes.c_void_p).value or 0


@functools.cache
def _driver() -> Any:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise TransportError(f"CUDA's driver cannot be loaded ({error})") from error
    driver.cuInit(0)
    # What every transfer calls takes plain numbers.
    pointer = ctypes.c_void_p
    driver.cuMemcpyHtoDAsync_v2.argtypes = (ctypes.c_uint64, pointer, ctypes.c_size_t, pointer)
    driver.cuLaunchKernel.argtypes = (pointer, *[ctypes.c_uint] * 7, pointer, pointer, pointer)
    return driver


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_driver(), name)(*arguments)
    if status:
        raise _error(name, status)


def _error(name: str, status: int) -> TransportError:
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(status, ctypes.byref(text))
    return TransportError(f"{name} failed: {(text.value or b'unknown error').decode()} (CUDA error {status})")
