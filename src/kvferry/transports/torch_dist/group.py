"""Process groups of two members, made for one pair of transports and thrown away with it.

The groups are built from their classes, not by `init_process_group`, so the engine's own groups
stay as they are. The members find each other through `ChannelStore`, over the authenticated
channel: there is no TCPStore, whose port would be open to strangers.
"""

# ruff: noqa: SLF001  torch names the options of process groups with an underscore

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
from torch import distributed

from kvferry.errors import ConfigError, TransportError
from kvferry.transports.torch_dist.channel import STALL_TIMEOUT_S, Channel

RENDEZVOUS_TIMEOUT_S = 30.0
GLOO_CONNECT_TIMEOUTS = 5
"""How many times its own timeout gloo waits for a connection to the peer."""
MAX_FRAMES = 64
"""Most frames that a peer may send in one rendezvous, in which two members exchange addresses."""
END_OF_RENDEZVOUS = ""
NEVER = timedelta(days=1000)
POLL_S = 50e-6
_ENVIRONMENT = threading.Lock()
"""Held while the environment is changed: several threads make groups."""


class Backend(IntEnum):
    """The library that moves the bytes of a group; the value is sent on the channel."""

    GLOO = 1
    NCCL = 2


class Member(IntEnum):
    """The rank of each side in its group."""

    PRODUCER = 0
    DIALLER = 1


class ChannelStore(distributed.Store):  # type: ignore[misc, name-defined]
    """The key-value store through which two members exchange their addresses. TransportError if
    the peer sends too much, or does not finish in time.
    """

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel: Channel | None = channel
        self._values: dict[str, bytes] = {}
        self._frames_left = MAX_FRAMES
        self._deadline = time.monotonic() + RENDEZVOUS_TIMEOUT_S

    def set(self, key: str, value: Any) -> None:
        encoded = value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = encoded
        if self._channel is not None:
            self._channel.send_frame(key, encoded)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        while not self.check(keys):
            if self._channel is None:
                raise TransportError("the rendezvous of this group is over")
            self._take_frame(self._channel)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def end(self) -> None:
        """Leave the channel to the requests. NCCL keeps the store and asks it now and then."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.send_frame(END_OF_RENDEZVOUS, b"")
            while self._take_frame(channel):
                pass

    def _take_frame(self, channel: Channel) -> bool:
        self._frames_left -= 1
        if self._frames_left < 0 or time.monotonic() > self._deadline:
            raise TransportError("the peer does not end the rendezvous of a process group")
        key, value = channel.receive_frame()
        if key != END_OF_RENDEZVOUS:
            self._values[key] = value
        return key != END_OF_RENDEZVOUS


class _GlooStore(ChannelStore):
    """Refuses addresses that gloo cannot parse: it trusts the lengths in them, and a wrong one ends
    the process.
    """

    def get(self, key: str) -> bytes:
        address = super().get(key)
        if len({_form(each) for each in self._values.values()}) > 1:
            raise TransportError("the peer's gloo address is malformed; run one torch on all sides")
        return address


class PairGroup:
    """A connected group. One thread sends and receives; any thread may `abort`.

    `send` and `receive` raise TransportError if the peer does not take part in time, or is gone;
    the group is then of no more use, and does not touch the tensor any more.
    """

    def __init__(self, backend: Backend, group: Any, me: Member) -> None:
        self.backend = backend
        self._group = group
        self._peer = 1 - me
        self._is_aborted = False

    @classmethod
    def meet(cls, channel: Channel, backend: Backend, me: Member, num_channels: int) -> "PairGroup":
        """Make the group together with the peer, which calls this too."""
        store = _GlooStore(channel) if backend is Backend.GLOO else ChannelStore(channel)
        try:
            if backend is Backend.GLOO:
                made = cls(backend, _gloo(store, me, channel.local_host), me)
            else:
                made = cls(backend, _nccl(store, me, num_channels), me)
                made._exchange_first_bytes(me)
            store.end()
        except RuntimeError as error:  # of torch, which has no narrower class
            raise TransportError(f"no process group with the peer: {_first_line(error)}") from error
        return made

    def send(self, tensor: torch.Tensor) -> None:
        self._finish(lambda: self._group.send([tensor], self._peer, 0))

    def receive(self, tensor: torch.Tensor) -> None:
        self._finish(lambda: self._group.recv([tensor], self._peer, 0))

    def abort(self) -> None:
        """End the group and every wait in it. Idempotent."""
        if not self._is_aborted:
            self._is_aborted = True
            self._group.abort()

    def _finish(self, start: Callable[[], Any]) -> None:
        try:
            work = start()
            if self.backend is Backend.GLOO:
                work.wait(timedelta(seconds=STALL_TIMEOUT_S))
            else:
                _wait_for_device(work)
        except (RuntimeError, TransportError) as error:
            if self.backend is Backend.NCCL:
                self.abort()  # a kernel may still wait for the peer, and would write late bytes
            raise TransportError(f"the process group has failed: {_first_line(error)}") from error

    def _exchange_first_bytes(self, me: Member) -> None:
        """NCCL connects at the first transfer, and asks the store for the peer's address then. The
        thread's current device is that of the cache.
        """
        byte = torch.zeros(1, dtype=torch.uint8, device="cuda")
        (self.send if me is Member.PRODUCER else self.receive)(byte)
        (self.receive if me is Member.PRODUCER else self.send)(byte)


def nccl_device(device: int) -> str:
    """The identity of a GPU; empty if this torch has no NCCL."""
    if not distributed.is_nccl_available():
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def _gloo(store: ChannelStore, me: Member, host: str) -> Any:
    gloo: Any = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=RENDEZVOUS_TIMEOUT_S / GLOO_CONNECT_TIMEOUTS)
    options._threads = 1
    # Without a host, gloo would listen on the address of the host's name.
    options._devices = [gloo.create_device(hostname=host)]
    return gloo(store, me, 2, options)


def _form(address: bytes) -> tuple[int, bytes]:
    """What both sides' gloo addresses have in common: the bytes after the host's name, which begin
    with the length of the socket's address.
    """
    name_ends = 8 + int.from_bytes(address[:8], "little")
    return len(address) - name_ends, address[name_ends : name_ends + 8]


def _nccl(store: ChannelStore, me: Member, num_channels: int) -> Any:
    if not distributed.is_nccl_available():
        raise ConfigError("this torch has no NCCL; set backend to gloo")
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = NEVER
    if num_channels:
        options.config.min_ctas = options.config.max_ctas = num_channels
    with _environment(TORCH_NCCL_ASYNC_ERROR_HANDLING="0", TORCH_NCCL_ENABLE_MONITORING="0"):
        return distributed.ProcessGroupNCCL(store, me, 2, options)


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """NCCL's groups read these when they are made. By default a group whose peer has died ends its
    process; here the group's owner ends the group.
    """
    with _ENVIRONMENT:
        before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _wait_for_device(work: Any) -> None:
    deadline = time.monotonic() + STALL_TIMEOUT_S
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise TransportError(f"no batch arrived within {STALL_TIMEOUT_S:g} s")
        time.sleep(POLL_S)
    work.wait()


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
