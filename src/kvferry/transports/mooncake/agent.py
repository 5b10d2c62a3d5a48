"""The agent: a process that runs Mooncake's Transfer Engine for one transport.

    python -m kvferry.transports.mooncake.agent FILES SETTINGS

It maps the KV cache of the engine that has started it (`process.py`), and

- lets peers read the cache. Over tcp it is mapped without permission to write, so nothing that
  arrives at Mooncake's ports can change KV.
- reads from peers into the cache, one batch at a time on each channel.
- greets: a peer that connects to the transport's port gets a `Greeting` with the place of
  Mooncake's current port. The connection stays open as long as this process lives, so its end tells
  the peer that the greeting is no longer valid.

This is the only module of the transport that imports mooncake.
"""

import glob
import mmap
import secrets
import selectors
import signal
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, cast

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.transports.mooncake.process import AgentWork, run_agent

if TYPE_CHECKING:
    from mooncake.engine import TransferEngine

Bytes = npt.NDArray[np.uint8]

START_S = 20
"""How long Mooncake may take to start; to pin memory for rdma, a second more for each gigabyte."""
RDMA_DEVICES = "/sys/class/infiniband/*"
INCARNATION_BYTES = 8
_MAGIC = b"kvfmoon1"
_GREETING = struct.Struct(f"!{len(_MAGIC)}sHQ{INCARNATION_BYTES}s")
GREETING_BYTES = _GREETING.size
MAX_CONNECTIONS = 500
"""Below the usual limit of open files. For a further peer, the oldest connection of the address
that has the most is closed: strangers must not keep peers out.
"""
ACCEPT_PAUSE_S = 0.5


class AgentSettings(msgspec.Struct, frozen=True):
    """The numbers of files are those that the agent inherits."""

    listener: int
    memory: int
    host: str
    protocol: str
    device_name: str


class ReadCall(msgspec.Struct, frozen=True, array_like=True):
    """One batch of reads. The answer is Mooncake's code: 0 if all bytes have arrived."""

    peer: str
    """host:port of the peer's Transfer Engine."""
    incarnation: bytes
    """Of the peer's agent, from its greeting."""
    local: list[int]
    """Offsets into our cache."""
    remote: list[int]
    """Addresses in the process of the peer's agent."""
    sizes: list[int]


@dataclass(frozen=True, slots=True)
class Greeting:
    """What the agent says about its Transfer Engine."""

    port: int
    address: int
    """Where the agent has mapped the cache for its peers."""
    incarnation: bytes
    """Random for each agent: another one may later have the same port."""

    def encode(self) -> bytes:
        return _GREETING.pack(_MAGIC, self.port, self.address, self.incarnation)

    @classmethod
    def decode(cls, message: bytes) -> Self:
        """ValueError unless this is a greeting."""
        if len(message) != GREETING_BYTES or not message.startswith(_MAGIC):
            raise ValueError("not the greeting of a mooncake transport")
        return cls(*_GREETING.unpack(message)[1:])


class _Greeter:
    """Accepts peers and greets each of them, on a thread of its own."""

    def __init__(self, listener: socket.socket, greeting: Greeting) -> None:
        self._listener = listener
        self._greeting = greeting.encode()
        self._peers: dict[socket.socket, str] = {}
        """The address of each peer, in the order of arrival."""
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    # Peers send nothing: one that does has closed the connection, or does not know
                    # our protocol.
                    self._drop(cast(socket.socket, key.fileobj))

    def _accept(self) -> None:
        try:
            peer, address = self._listener.accept()
        except OSError:
            # The peer has gone already, or this process has no file descriptor left.
            time.sleep(ACCEPT_PAUSE_S)
            return
        if len(self._peers) >= MAX_CONNECTIONS:
            [(crowd, _)] = Counter(self._peers.values()).most_common(1)
            self._drop(next(each for each, host in self._peers.items() if host == crowd))
        peer.setblocking(False)
        self._peers[peer] = address[0]
        self._selector.register(peer, selectors.EVENT_READ)
        # So short that it fits into the empty buffer of a new connection. The peer may have gone.
        with suppress(OSError):
            peer.send(self._greeting)

    def _drop(self, peer: socket.socket) -> None:
        # It may have been dropped for another peer in this round.
        if self._peers.pop(peer, None) is not None:
            self._selector.unregister(peer)
            peer.close()


class _Reads(AgentWork):
    """Serves one cache to peers, and reads from peers into it.

    There is one Transfer Engine, unless a port of a peer has changed hands. A Transfer Engine never
    forgets what it once knew of a port. If another process has the port now, reads fail for ever,
    so another Transfer Engine has to make them. The old ones stay: their destructors are not safe.
    """

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._engines: list[TransferEngine] = []
        """The first serves peers, the last reads from them."""
        self._known: dict[str, bytes] = {}
        """The incarnation of each peer that the last engine has read from."""
        self._lock = threading.Lock()

    def load(self) -> None:
        self._served, self._cache = _mapped(self._settings)
        self._engines.append(_started(self._settings, self._served))
        greeting = Greeting(
            self._engines[0].get_rpc_port(),
            self._served.ctypes.data,
            secrets.token_bytes(INCARNATION_BYTES),
        )
        greeter = _Greeter(socket.socket(fileno=self._settings.listener), greeting)
        threading.Thread(target=greeter.run, daemon=True).start()

    def caller(self, number: int) -> Callable[[bytes], int]:
        return self._read

    def _read(self, message: bytes) -> int:
        call = msgspec.msgpack.decode(message, type=ReadCall)
        cache = self._cache.ctypes.data
        with self._lock:
            if self._known.setdefault(call.peer, call.incarnation) != call.incarnation:
                self._engines.append(_started(self._settings, self._served))
                self._known = {call.peer: call.incarnation}
            engine = self._engines[-1]
        local = [cache + offset for offset in call.local]
        return int(engine.batch_transfer_sync_read(call.peer, local, call.remote, call.sizes))


def _started(settings: AgentSettings, served: Bytes) -> "TransferEngine":
    """A Transfer Engine that serves this memory. OSError if Mooncake refuses."""
    from mooncake.engine import TransferEngine

    if settings.protocol == "rdma" and not any(glob.iglob(RDMA_DEVICES)):
        # Mooncake would use tcp instead, without a word.
        raise OSError("protocol is rdma, but this host has no RDMA device")
    engine = TransferEngine()
    # Mooncake holds the GIL while it starts; only a signal could end it.
    signal.alarm(START_S + (len(served) >> 30))
    if engine.initialize(settings.host, "P2PHANDSHAKE", settings.protocol, settings.device_name):
        raise OSError(f"Mooncake cannot use {settings.protocol} on {settings.host}")
    if engine.register_memory(served.ctypes.data, len(served)):
        raise OSError(
            f"Mooncake cannot register {len(served)} bytes of memory; with rdma, raise the limit "
            "of locked memory (ulimit -l)"
        )
    signal.alarm(0)
    return engine


def _mapped(settings: AgentSettings) -> tuple[Bytes, Bytes]:
    """Map the cache for peers, and for our own reads. Mooncake writes for a peer only into
    registered memory, and over tcp our own reads need none, so peers get a mapping of their own
    that cannot be written. An RDMA device needs both in one, with permission to write.
    """
    landing = np.frombuffer(mmap.mmap(settings.memory, 0), np.uint8)
    if settings.protocol != "tcp":
        return landing, landing
    return np.frombuffer(mmap.mmap(settings.memory, 0, prot=mmap.PROT_READ), np.uint8), landing


if __name__ == "__main__":
    run_agent(_Reads(msgspec.json.decode(sys.argv[2], type=AgentSettings)))
