"""The agent: a process that makes the calls to Mooncake Store for one tier.

    python -m kvferry.tiers.mooncake.agent SETTINGS

Mooncake's client may end its process or hold the GIL for minutes (decision 056), so no engine loads
it. The tier starts this process and talks to it by *lanes*: a socket for one call at a time, and
memory that both processes map. A message on such a socket arrives whole or not at all. One thread
serves each lane. The main thread connects to the master, and ends the process when the tier has
closed the control pipe or its process is gone.

This is the only module that imports mooncake.
"""

import ctypes
import mmap
import os
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from enum import StrEnum
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from mooncake.store import MooncakeDistributedStore

POLL_S = 1.0
CONNECT_S = 1.0
SETUP_S = 15
"""Without lent memory; each gigabyte of it may take a second more to allocate and pin."""
CLOSE_S = 5
MAX_CALL_BYTES = 128 * 1024
LOCAL_BUFFER_BYTES = 16 * 1024 * 1024
"""What Mooncake's client uses for calls that we do not make; it needs some."""


class LaneFiles(msgspec.Struct, frozen=True):
    """The file descriptors that the agent inherits for one lane."""

    socket: int
    memory: int


class AgentSettings(msgspec.Struct, frozen=True):
    """The agent's argument, as JSON."""

    parent: int
    control: int
    lanes: list[LaneFiles]
    master_host: str
    master_port: int
    metadata_server: str
    protocol: str
    device_name: str
    host: str
    """The address of this host for other clients; empty: the address that reaches the master."""
    lent_bytes: int


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


class _Client:
    """Mooncake's client. The main thread connects it; then any thread may call it."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self.store: MooncakeDistributedStore | None = None

    def connect(self) -> None:
        """Try once to connect; `store` is None if the master cannot be reached. Ends the process if
        Mooncake refuses: the tier starts another one.
        """
        from mooncake.store import MooncakeDistributedStore

        wanted = self._settings
        master = (wanted.master_host, wanted.master_port)
        try:
            with socket.create_connection(master, CONNECT_S) as probe:
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
            _joined(wanted.master_host, wanted.master_port),
        )
        signal.alarm(0)
        if code != 0:
            raise SystemExit(f"Mooncake could not join the store (code {code})")
        self.store = store

    def leave(self) -> None:
        """Take the lent memory out of the store, so that no client tries to read it."""
        if self.store is not None and self._settings.lent_bytes:
            signal.alarm(CLOSE_S)
            self.store.close()


class _Lane(threading.Thread):
    """Serves the calls of one lane until the tier closes it."""

    def __init__(self, client: _Client, files: LaneFiles) -> None:
        super().__init__(daemon=True)
        self._client = client
        self._socket = socket.socket(fileno=files.socket)
        self._file = files.memory
        self._memory: ctypes.Array[ctypes.c_char] | None = None

    def run(self) -> None:
        # The tier closes the socket, also during a call.
        with suppress(OSError):
            while message := self._socket.recv(MAX_CALL_BYTES):
                self._socket.send(self._answer_or_exit(message))

    def _answer_or_exit(self, message: bytes) -> bytes:
        try:
            answer = self._answer(msgspec.msgpack.decode(message, type=Call))
            return msgspec.msgpack.encode(answer)
        # Top of a call: the tier notices the end of the process and starts another one. It would
        # not notice the end of one thread.
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def _answer(self, call: Call) -> list[int]:
        store = self._client.store
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


def main() -> None:
    settings = msgspec.json.decode(sys.argv[1], type=AgentSettings)
    control = Connection(settings.control)
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        control.send_bytes(str(error).encode())
        raise SystemExit(1) from None
    control.send_bytes(b"")
    client = _Client(settings)
    client.connect()
    # Only now, so that the first calls wait for the first attempt to connect.
    for files in settings.lanes:
        _Lane(client, files).start()
    while not control.poll(POLL_S) and os.getppid() == settings.parent:
        if client.store is None:
            client.connect()
    client.leave()
    # Not `exit`: Mooncake's destructors would free what its threads still use.
    os._exit(0)


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


if __name__ == "__main__":
    main()
