"""The agent: a process that makes the calls to Mooncake Store for one tier.

    python -m kvferry.tiers.mooncake.agent FILES SETTINGS

The tier starts it and talks to it by *lanes*: a channel (`transports/mooncake/process.py`), and
memory that both processes map. The main thread connects to the master.

This is the only module of the tier that imports mooncake.
"""

import ctypes
import mmap
import signal
import socket
import sys
from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from kvferry.transports.mooncake.process import AgentWork, run_agent
from kvferry.types import Address

if TYPE_CHECKING:
    from mooncake.store import MooncakeDistributedStore

CONNECT_S = 1.0
SETUP_S = 15
"""Without lent memory; each gigabyte of it may take a second more to allocate and pin."""
CLOSE_S = 5
LOCAL_BUFFER_BYTES = 16 * 1024 * 1024
"""What Mooncake's client uses for calls that we do not make; it needs some."""


class MooncakePlace(msgspec.Struct, frozen=True):
    """Where the store is, and what this process adds to it."""

    master: Address
    metadata_server: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    device_name: str = ""
    host: str = ""
    """The address of this host for other clients; empty: the address that reaches the master."""
    lent_bytes: int = 0


class AgentSettings(msgspec.Struct, frozen=True):
    memories: list[int]
    """The file with the memory of each lane, which the agent inherits."""
    place: MooncakePlace


class Operation(StrEnum):
    FIND = "find"
    """For each name 1 if the object exists, 0 if not."""
    SIZE = "size"
    """The size of one object."""
    GET = "get"
    """Reads one object into the lane's memory; its size."""
    PUT = "put"
    """Writes the first `size_bytes` of the lane's memory as one object; 0."""
    REMOVE = "remove"
    """For each name 0."""


class Call(msgspec.Struct, frozen=True):
    """The answer is a list of integers: what the operation says, or negative codes of Mooncake. It
    is empty while the agent is not connected to the master.
    """

    operation: Operation
    names: list[str]
    size_bytes: int = 0
    """How many bytes of the lane's memory belong to the call."""


class _StoreCalls(AgentWork):
    """Mooncake's client. The main thread connects it; then any thread may call it."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self.store: MooncakeDistributedStore | None = None

    def load(self) -> None:
        import mooncake.store  # noqa: F401

    def caller(self, number: int) -> Callable[[bytes], list[int]]:
        return _Lane(self, self._settings.memories[number]).answer

    def tick(self) -> None:
        """Try to connect, unless the client is connected; `store` is None if the master cannot be
        reached. Ends the process if Mooncake refuses: the tier starts another one.
        """
        from mooncake.store import MooncakeDistributedStore

        if self.store is not None:
            return
        wanted = self._settings.place
        try:
            with socket.create_connection(
                (wanted.master.host, wanted.master.port), CONNECT_S
            ) as probe:
                own_host = str(probe.getsockname()[0])
        except OSError:
            return
        store = MooncakeDistributedStore()
        # `setup` holds the GIL, for 90 s if the master dies now. Only a signal can end it.
        signal.alarm(SETUP_S + (wanted.lent_bytes >> 30))
        code = store.setup(
            wanted.host or own_host,
            wanted.metadata_server,
            wanted.lent_bytes,
            LOCAL_BUFFER_BYTES,
            wanted.protocol,
            wanted.device_name,
            str(wanted.master),
        )
        signal.alarm(0)
        if code != 0:
            raise SystemExit(f"Mooncake could not join the store (code {code})")
        self.store = store

    def leave(self) -> None:
        """Take the lent memory out of the store, so that no client tries to read it."""
        if self.store is not None and self._settings.place.lent_bytes:
            signal.alarm(CLOSE_S)
            self.store.close()


class _Lane:
    """Makes the calls of one lane, and maps its memory."""

    def __init__(self, calls: _StoreCalls, file: int) -> None:
        self._calls = calls
        self._file = file
        self._memory: ctypes.Array[ctypes.c_char] | None = None

    def answer(self, message: bytes) -> list[int]:
        call = msgspec.msgpack.decode(message, type=Call)
        store = self._calls.store
        if store is None:
            return []
        match call.operation:
            case Operation.FIND:
                return list(store.batch_is_exist(call.names))
            case Operation.SIZE:
                return [store.get_size(call.names[0])]
            case Operation.REMOVE:
                # Mooncake refuses for some seconds to remove what was read, unless it is forced.
                return list(store.batch_remove(call.names, True))
            case Operation.GET:
                address = self._mapped(store, call.size_bytes)
                return [store.get_into(call.names[0], address, call.size_bytes)]
            case Operation.PUT:
                address = self._mapped(store, call.size_bytes)
                return [store.put_from(call.names[0], address, call.size_bytes)]

    def _mapped(self, store: "MooncakeDistributedStore", size_bytes: int) -> int:
        """Map at least this much of the lane's memory, and return its address."""
        if self._memory is None or len(self._memory) < size_bytes:
            if self._memory is not None:
                store.unregister_buffer(ctypes.addressof(self._memory))
            # The tier has made the file as long as it must be. Dropping the array unmaps the old
            # memory, which no call uses any more.
            mapped = mmap.mmap(self._file, 0)
            self._memory = (ctypes.c_char * len(mapped)).from_buffer(mapped)
            code = store.register_buffer(ctypes.addressof(self._memory), len(mapped))
            if code != 0:
                raise RuntimeError(
                    f"Mooncake cannot register {len(mapped)} bytes of memory (code {code}); with "
                    "rdma, raise the limit of locked memory (ulimit -l)"
                )
        return ctypes.addressof(self._memory)


if __name__ == "__main__":
    run_agent(_StoreCalls(msgspec.json.decode(sys.argv[2], type=AgentSettings)))
