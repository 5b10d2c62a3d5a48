"""The API process's side of an engine: starts the core process and streams its outputs.

`EngineClient` owns the process and a `CoreLink`, an asyncio protocol over the pipe to the core. One
thread, the thread of the event loop, makes every call. The event loop reads and writes the sockets,
so neither a slow core nor a dead core blocks the loop.
"""

import asyncio
import logging
import multiprocessing
import signal
import socket
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import TYPE_CHECKING, Self, cast

import msgspec

from kvferry.engine.ipc import FrameAssembler, pack_frame
from kvferry.engine.messages import (
    AbortRequest,
    AddRequest,
    CoreFailed,
    CoreProgress,
    CoreReady,
    CoreStatus,
    Drain,
    FromCore,
    GetStatus,
    GetTransferRecords,
    Outputs,
    Remaining,
    RequestOutput,
    Shutdown,
    ToCore,
    TransferRecordsReply,
)
from kvferry.engine.options import EngineOptions, EngineSetup
from kvferry.errors import ConfigError, KVFerryError, RemoteProtocolError, TransportError
from kvferry.logs import current_settings
from kvferry.transports.base import TransportKit
from kvferry.web.transfer_records import TransferRecord

if TYPE_CHECKING:
    from kvferry.config import SideChannelConfig


class OutputStream:
    """The outputs of one request, in order, up to and including the output with a finish reason.

    Iterate the stream, and call `close` when leaving early: the core then aborts a request that has
    not ended. When the core dies, the last output has `finish_reason == "error"` and names the
    cause, so a stream always ends.
    """

    def __init__(self, request_id: str, on_close: Callable[["OutputStream"], None]) -> None:
        self._request_id = request_id
        self._on_close = on_close
        self._ready: deque[RequestOutput] = deque()
        self._output_arrived = asyncio.Event()
        self._is_ended = False

    @property
    def request_id(self) -> str:
        return self._request_id

    def put(self, output: RequestOutput) -> None:
        """Append an output; only `CoreLink` calls this."""
        self._ready.append(output)
        self._output_arrived.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._is_ended:
            raise StopAsyncIteration
        while not self._ready:
            self._output_arrived.clear()
            await self._output_arrived.wait()
        output = self._ready.popleft()
        self._is_ended = output.finish_reason is not None
        return output

    def close(self) -> None:
        """Abort the request unless it has ended; idempotent."""
        self._is_ended = True
        self._ready.clear()
        self._on_close(self)

    async def aclose(self) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class CoreLink(asyncio.Protocol):
    """The pipe to the core: sends frames, and gives each reply to the waiting stream or future."""

    def __init__(self, on_progress: Callable[[str], None], on_closed: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[CoreReady] = loop.create_future()
        self.core_exit: asyncio.Future[str] = loop.create_future()
        self.remaining: Remaining | None = None
        self.drained = asyncio.Event()
        self._pending_queries: dict[int, asyncio.Future[CoreStatus | TransferRecordsReply]] = {}
        self.stage = "starting the process"
        self._on_progress = on_progress
        self._on_closed = on_closed
        self._streams: dict[str, OutputStream] = {}
        self._transport: asyncio.WriteTransport | None = None
        self._assembler = FrameAssembler()
        self._decode = msgspec.msgpack.Decoder(FromCore).decode
        self._encode = msgspec.msgpack.Encoder().encode

    @property
    def exit_reason(self) -> str | None:
        return self.core_exit.result() if self.core_exit.done() else None

    # -- callbacks of asyncio --

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods of asyncio's transport classes but do not inherit
        # from these classes.
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        for frame in self._assembler.feed(data):
            self._handle(self._decode(frame))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_closed()

    # -- incoming messages --

    def _handle(self, message: FromCore) -> None:
        match message:
            case Outputs(outputs=outputs):
                for output in outputs:
                    self._deliver(output)
            case CoreStatus(nonce=nonce) | TransferRecordsReply(nonce=nonce):
                waiter = self._pending_queries.pop(nonce, None)
                if waiter is not None and not waiter.done():
                    waiter.set_result(message)
            case Remaining():
                self.remaining = message
                (self.drained.set if message.is_drained else self.drained.clear)()
            case CoreProgress(stage=stage):
                self.stage = stage
                self._on_progress(stage)
            case CoreReady():
                if not self.ready.done():
                    self.ready.set_result(message)
            case CoreFailed(reason=reason, is_config=is_config):
                self.mark_lost(reason, ConfigError(reason) if is_config else KVFerryError(reason))

    def _deliver(self, output: RequestOutput) -> None:
        stream = self._streams.get(output.request_id)
        # Outputs of an aborted request may still arrive after its stream is closed.
        if stream is None:
            return
        if output.finish_reason is not None:
            del self._streams[output.request_id]
        stream.put(output)

    def mark_lost(self, reason: str, error: KVFerryError | None = None) -> None:
        """End all streams and pending queries because the core is gone.

        Only the first reason counts.
        """
        if self.core_exit.done():
            return
        self.core_exit.set_result(reason)
        if not self.ready.done():
            self.ready.set_exception(error or KVFerryError(reason))
            # Mark the exception as retrieved: asyncio warns about a future whose exception is never
            # read.
            self.ready.exception()
        for waiter in self._pending_queries.values():
            if not waiter.done():
                waiter.set_exception(KVFerryError(reason))
        for request_id in list(self._streams):
            self._deliver(_error_output(request_id, reason))

    # -- outgoing messages --

    def add(self, requests: list[AddRequest]) -> list[OutputStream]:
        frame = self._frame_of(requests)
        for request in requests:
            if request.request_id in self._streams:
                raise RemoteProtocolError(f"request id {request.request_id} is already in use")
        streams = [OutputStream(request.request_id, self._drop) for request in requests]
        self._streams.update((stream.request_id, stream) for stream in streams)
        if self._transport is None:
            for stream in streams:
                self._deliver(
                    _error_output(
                        stream.request_id, self.exit_reason or "the engine core is not connected"
                    )
                )
        else:
            self._transport.write(frame)
        return streams

    def _frame_of(self, requests: list[AddRequest]) -> bytes:
        try:
            return pack_frame(self._encode(requests))
        except (OverflowError, TypeError, ValueError, RecursionError, TransportError) as error:
            raise RemoteProtocolError(
                f"the request cannot be sent to the engine core: {error}"
            ) from error

    def abort(self, request_id: str) -> None:
        if request_id in self._streams:
            self._send([AbortRequest(request_id)])
            self._deliver(RequestOutput(request_id, finish_reason="abort"))

    def abandon(self, request_id: str) -> None:
        """Release everything that the core holds for a request, even a finished one.

        The answer did not reach the client, so no peer will fetch the blocks.
        """
        self._send([AbortRequest(request_id)])

    def _drop(self, stream: OutputStream) -> None:
        # A late `close` must not abort a newer request that uses the same id.
        if self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]
            self._send([AbortRequest(stream.request_id)])

    async def send_query(
        self, query: GetStatus | GetTransferRecords
    ) -> CoreStatus | TransferRecordsReply:
        if self._transport is None:
            raise KVFerryError(self.exit_reason or "the engine core is not connected")
        waiter: asyncio.Future[CoreStatus | TransferRecordsReply] = (
            asyncio.get_running_loop().create_future()
        )
        self._pending_queries[query.nonce] = waiter
        self._send([query])
        try:
            return await waiter
        finally:
            self._pending_queries.pop(query.nonce, None)

    def drain(self) -> None:
        self._send([Drain()])

    def shut_down(self) -> None:
        self._send([Shutdown()])

    def _send(self, messages: ToCore) -> None:
        if self._transport is not None:
            self._transport.write(pack_frame(self._encode(messages)))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    @property
    def is_connected(self) -> bool:
        return self._transport is not None


def _error_output(request_id: str, reason: str) -> RequestOutput:
    return RequestOutput(request_id, finish_reason="error", error=reason, error_status=503)


# -- client --
# Starts and ends the core process.


_log = logging.getLogger(__name__)

_KILL_TIMEOUT_S = 5.0
"""How long a killed process may take to exit."""

_STOP_TIMEOUT_S = 5.0
"""The minimum time that the core gets to stop by itself, even if running requests get none."""

_ABANDON_GRACE_S = 1.0
"""How long a core may take to exit by itself when its start has failed or was cancelled."""


class EngineClient:
    """One running engine; create it with `start` and end it with `close`."""

    def __init__(
        self, process: BaseProcess, options: EngineOptions, on_progress: Callable[[str], None]
    ) -> None:
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
        """Spawn the core and wait until the core is ready.

        `on_progress` receives each stage of the start. Raises ConfigError when a setting or the
        model is wrong, and KVFerryError for every other failure. No process is left behind after an
        error or a cancellation.
        """
        setup = EngineSetup(
            options, kit, secret=secret, side_channel=side_channel, logs=current_settings()
        )
        ours, theirs = socket.socketpair()
        process = multiprocessing.get_context("spawn").Process(
            target=_run_core, args=(setup, theirs), name="kvferry-core"
        )
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
            # If the cancellation arrives while the process is being spawned, wait for the process
            # and then end it as usual.
            await asyncio.wait([spawning])
            theirs.close()
            await client._abandon(ours)
            if isinstance(error, TimeoutError):
                raise KVFerryError(
                    f"the engine core was not ready within {timeout_s:g} s; last stage: "
                    f"{link.stage}"
                ) from None
            raise
        return client

    @property
    def ready(self) -> CoreReady:
        """The message with which the core announced that it is ready."""
        return self._link.ready.result()

    @property
    def options(self) -> EngineOptions:
        return self._options

    @property
    def pid(self) -> int | None:
        """The process id of the core."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._link.exit_reason is None

    async def died(self) -> str:
        """Wait until the core is gone, also after `close`, and return the reason."""
        return await asyncio.shield(self._link.core_exit)

    def add(self, requests: Sequence[AddRequest]) -> list[OutputStream]:
        """Submit requests that enter the engine before the same step; one stream per request.

        Never waits. Raises RemoteProtocolError when a request cannot be encoded (a number beyond 64
        bits in the parameters) or the request id is in use.
        """
        return self._link.add(list(requests))

    async def generate(self, request: AddRequest) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of one request.

        Leaving the iteration early, or a cancellation inside it, aborts the request.
        """
        (stream,) = self.add([request])
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    def abort(self, request_id: str) -> None:
        """End a request; the stream ends with `finish_reason == "abort"`.

        Unknown ids are ignored.
        """
        self._link.abort(request_id)

    def abandon(self, request_id: str) -> None:
        """Report that the answer of a request did not reach the client.

        No peer will fetch the blocks of the request, so the core frees the blocks even if the
        request has finished.
        """
        self._link.abandon(request_id)

    async def status(self, timeout_s: float = 5.0) -> CoreStatus:
        """Return a snapshot of the core.

        Raises KVFerryError when the core is dead or does not answer in time.
        """
        self._next_nonce += 1
        answer = await self._query(GetStatus(self._next_nonce), timeout_s)
        assert isinstance(answer, CoreStatus)
        return answer

    async def transfer_records(
        self, name: str = "", timeout_s: float = 5.0
    ) -> list[TransferRecord]:
        """Return how long each phase took for requests whose KV came from a peer.

        A non-empty `name` selects the requests of that name; otherwise the newest requests are
        returned. Raises as `status` does.
        """
        self._next_nonce += 1
        answer = await self._query(GetTransferRecords(self._next_nonce, name), timeout_s)
        assert isinstance(answer, TransferRecordsReply)
        return answer.records

    async def _query(
        self, query: GetStatus | GetTransferRecords, timeout_s: float
    ) -> CoreStatus | TransferRecordsReply:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._link.send_query(query)
        except TimeoutError:
            raise KVFerryError(f"the engine core did not answer within {timeout_s:g} s") from None

    def drain(self) -> None:
        """Make the core report its remaining work from now on."""
        self._link.drain()

    @property
    def remaining(self) -> Remaining | None:
        """The last report of the core's remaining work; None before the first report.

        The core reports after `drain`.
        """
        return self._link.remaining

    async def drained(self) -> None:
        """Wait until the core has no request and no lease left; call `drain` first."""
        await self._link.drained.wait()

    async def close(self) -> None:
        """Stop the core, gracefully first, and wait until its process is gone; idempotent."""
        self._link.shut_down()
        await self._end(max(self._options.shutdown_timeout_s, _STOP_TIMEOUT_S))
        self._link.close()

    def _on_closed(self) -> None:
        self._end(_KILL_TIMEOUT_S)

    def _end(self, grace_s: float) -> asyncio.Future[None]:
        """Return the one task that ends the process; the first call creates the task.

        There is one task because the exit code of a process can be collected only once.
        """
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
            # A core that has reported its failure, or that is cancelled during its start, is
            # expected to end: no warning then.
            level = (
                logging.WARNING
                if self._link.ready.done() and self._link.exit_reason is None
                else logging.DEBUG
            )
            _log.log(level, "the engine core did not stop within %g s, so it is killed", grace_s)
            self._process.kill()
            await loop.run_in_executor(None, self._process.join, _KILL_TIMEOUT_S)
        self._link.mark_lost(f"the engine core {_describe_exit(self._process.exitcode)}")

    async def _abandon(self, sock: socket.socket) -> None:
        # Send SIGTERM before closing the pipe: a core that finds its pipe closed while loading logs
        # that the API process is dead.
        if self._process.pid is not None and self._link.exit_reason is None:
            self._process.terminate()
        if self._link.is_connected:
            self._link.close()
        else:
            sock.close()
        await self._end(_ABANDON_GRACE_S)


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "exited with an unknown code"
    return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"


def _ignore_stage(stage: str) -> None:
    return None


def _spawn(process: BaseProcess) -> None:
    """Start the process with SIGINT blocked.

    Ctrl-C reaches the core from its first moment on, long before the core can ignore SIGINT.
    """
    # Starting the resource tracker unblocks SIGINT, so the tracker must run before the signal is
    # blocked.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run_core(setup: EngineSetup, sock: socket.socket) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # Import in the child only, so that the API process never loads torch.
    from kvferry.engine.core import run_core

    run_core(setup, sock)
