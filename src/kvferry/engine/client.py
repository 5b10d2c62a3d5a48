"""The API process's end of an engine: starts the core in its own process and turns its messages into streams of outputs.

Everything here runs on one asyncio loop. Sockets are read and written by the loop, so neither a slow core nor a dead one blocks it.
"""

import asyncio
import logging
import multiprocessing
import signal
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING

from kvferry.engine.link import CoreLink, OutputStream
from kvferry.engine.messages import (
    AddRequest,
    CoreReady,
    CoreStatus,
    GetStatus,
    GetTransferRecords,
    Remaining,
    RequestOutput,
    TransferRecordsReply,
)
from kvferry.engine.options import EngineOptions
from kvferry.engine.setup import EngineSetup
from kvferry.errors import KVFerryError
from kvferry.ports.kit import TransportKit
from kvferry.web.handover_records import TransferRecord

if TYPE_CHECKING:
    from kvferry.config import SideChannelConfig

__all__ = ["EngineClient", "OutputStream"]

_log = logging.getLogger(__name__)

_KILL_TIMEOUT_S = 5.0
"""How long a killed process may take to be gone."""

_STOP_TIMEOUT_S = 5.0
"""How long the core may take, at least, to stop by itself, also where requests get no time."""

_ABANDON_GRACE_S = 1.0
"""How long a core that will not be used may take to end by itself."""


class EngineClient:
    """One running engine. Make it with `start`, end it with `close`."""

    def __init__(self, process: BaseProcess, options: EngineOptions, on_progress: Callable[[str], None]) -> None:
        self._process = process
        self._options = options
        self._link = CoreLink(on_progress, self._on_closed)
        self._next_nonce = 0
        self._ending: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        options: EngineOptions,
        kit: TransportKit,
        *,
        secret: bytes = b"",
        side_channel: "SideChannelConfig | None" = None,
        timeout_s: float = 600.0,
        on_progress: Callable[[str], None] | None = None,
    ) -> "EngineClient":
        """Spawn the core and wait until it serves. `on_progress` hears each stage of the start.

        ConfigError when a setting or the model is to blame, KVFerryError for everything else; no process is left behind then, nor when
        this is cancelled."""
        level = logging.getLogger().getEffectiveLevel()
        setup = EngineSetup(options, kit, secret=secret, side_channel=side_channel, log_level=level)
        ours, theirs = socket.socketpair()
        process = multiprocessing.get_context("spawn").Process(target=_run_core, args=(setup, theirs), name="kvferry-core")
        loop = asyncio.get_running_loop()
        client = cls(process, options, on_progress or _ignore_stage)
        link = client._link
        spawning = loop.run_in_executor(None, _spawn, process)
        try:
            await asyncio.shield(spawning)
            theirs.close()
            await loop.create_unix_connection(lambda: link, sock=ours)
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(link.ready)
        except BaseException as error:
            # A process that is being born when we are cancelled has to be ended like any other.
            await asyncio.wait([spawning])
            theirs.close()
            await client._abandon(ours)
            if isinstance(error, TimeoutError):
                raise KVFerryError(f"the engine core was not ready within {timeout_s:g} s; last stage: {link.stage}") from None
            raise
        return client

    @property
    def ready(self) -> CoreReady:
        """What the core said of itself when it was ready."""
        return self._link.ready.result()

    @property
    def options(self) -> EngineOptions:
        return self._options

    @property
    def pid(self) -> int | None:
        """The core's process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._link.exit_reason is None

    async def died(self) -> str:
        """Wait until the core is gone, also after `close`; the reason as one sentence."""
        return await asyncio.shield(self._link.core_exit)

    def add(self, requests: Sequence[AddRequest]) -> list[OutputStream]:
        """Hand in requests that enter the engine before the same step; one stream each. Never waits.

        RemoteProtocolError when a request cannot be put on the wire (a number beyond 64 bits in its parameters) or its id is in use."""
        return self._link.add(list(requests))

    async def generate(self, request: AddRequest) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of one request. Leaving the iteration early, or being cancelled in it, aborts the request."""
        (stream,) = self.add([request])
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    def abort(self, request_id: str) -> None:
        """End a request; its stream ends with `finish_reason == "abort"`. Unknown ids are ignored."""
        self._link.abort(request_id)

    def abandon(self, request_id: str) -> None:
        """The answer of this request reached nobody: no peer will come for its blocks, even if it has finished."""
        self._link.abandon(request_id)

    async def status(self, timeout_s: float = 5.0) -> CoreStatus:
        """A snapshot of the core. KVFerryError when it is dead or does not answer in time."""
        self._next_nonce += 1
        answer = await self._query(GetStatus(self._next_nonce), timeout_s)
        assert isinstance(answer, CoreStatus)
        return answer

    async def transfer_records(self, name: str = "", timeout_s: float = 5.0) -> list[TransferRecord]:
        """Where the time of requests went whose KV came from a peer: of those of that name, or of the newest. Raises as `status` does."""
        self._next_nonce += 1
        answer = await self._query(GetTransferRecords(self._next_nonce, name), timeout_s)
        assert isinstance(answer, TransferRecordsReply)
        return answer.records

    async def _query(self, query: GetStatus | GetTransferRecords, timeout_s: float) -> CoreStatus | TransferRecordsReply:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._link.send_query(query)
        except TimeoutError:
            raise KVFerryError(f"the engine core did not answer within {timeout_s:g} s") from None

    def drain(self) -> None:
        """Have the core say what is left of its work, from now on."""
        self._link.drain()

    @property
    def remaining(self) -> Remaining | None:
        """What is left of the core's work, as it said last; None before `drain` and its first word."""
        return self._link.remaining

    async def drained(self) -> None:
        """After `drain`: wait until no request and no lease is left in the core."""
        await self._link.drained.wait()

    async def close(self) -> None:
        """Stop the core, gracefully first, and wait until its process is gone. Idempotent."""
        self._link.shut_down()
        await self._end(max(self._options.shutdown_timeout_s, _STOP_TIMEOUT_S))
        self._link.close()

    def _on_closed(self) -> None:
        self._end(_KILL_TIMEOUT_S)

    def _end(self, grace_s: float) -> asyncio.Future[None]:
        """One task waits for the process, whoever asked first: only one can be told its exit code."""
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._end_process(grace_s))
        return asyncio.shield(self._ending)

    async def _end_process(self, grace_s: float) -> None:
        loop = asyncio.get_running_loop()
        if self._process.pid is None:
            self._link.mark_lost("the engine core could not be started")
            return
        await loop.run_in_executor(None, self._process.join, grace_s)
        if self._process.is_alive():
            # Whoever has said why it ends, or was told to before it could serve, surprises nobody.
            level = logging.WARNING if self._link.ready.done() and self._link.exit_reason is None else logging.DEBUG
            _log.log(level, "the engine core did not stop within %g s and is killed", grace_s)
            self._process.kill()
            await loop.run_in_executor(None, self._process.join, _KILL_TIMEOUT_S)
        self._link.mark_lost(f"the engine core has ended {_describe_exit(self._process.exitcode)}")

    async def _abandon(self, sock: socket.socket) -> None:
        # Told first: a core that finds its pipe closed while it is loading takes us for dead.
        if self._process.pid is not None and self._link.exit_reason is None:
            self._process.terminate()
        if self._link.is_connected:
            self._link.close()
        else:
            sock.close()
        await self._end(_ABANDON_GRACE_S)


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "in a way the operating system does not tell"
    return f"by signal {-code}" if code < 0 else f"with exit code {code}"


def _ignore_stage(stage: str) -> None:
    return None


def _spawn(process: BaseProcess) -> None:
    """Ctrl-C reaches the core from its first moment on, long before it can say that it does not care: it is born with SIGINT blocked."""
    # Starting it unblocks the signal, so it must not happen in between.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run_core(setup: EngineSetup, sock: socket.socket) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # Imported in the child only: the API process never pays for torch.
    from kvferry.engine.core import run_core

    run_core(setup, sock)
