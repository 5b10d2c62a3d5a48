"""The loop's side of the pipe to an engine core: frames in, frames out, and who waits for what.

`CoreLink` is an asyncio protocol; the loop's thread makes every call. `EngineClient` owns it.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self, cast

import msgspec

from kvferry.engine.frames import FrameAssembler, pack_frame
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
from kvferry.errors import ConfigError, KVFerryError, RemoteProtocolError, TransportError

__all__ = ["CoreLink", "OutputStream"]


class OutputStream:
    """The outputs of one request, in order, up to and including the one with a finish reason.

    Iterate it, and `close` it when leaving early: a request that has not ended is then aborted in the core. When the core dies, the last
    output has `finish_reason == "error"` and says why, so a stream always ends.
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
        """For the client: one more output has arrived."""
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
        """Abort the request unless it has ended. Idempotent."""
        self._is_ended = True
        self._ready.clear()
        self._on_close(self)

    async def aclose(self) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class CoreLink(asyncio.Protocol):
    """The loop's side of the pipe: frames in, frames out, and who waits for what."""

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

    # -- asyncio calls these ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods of asyncio's classes without being of them.
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        for frame in self._assembler.feed(data):
            self._handle(self._decode(frame))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_closed()

    # -- what arrives ----------------------------------------------------------------------------------------------

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
        if stream is None:
            return
        if output.finish_reason is not None:
            del self._streams[output.request_id]
        stream.put(output)

    def mark_lost(self, reason: str, error: KVFerryError | None = None) -> None:
        """The core is gone: everybody who waits hears it. Only the first reason counts."""
        if self.core_exit.done():
            return
        self.core_exit.set_result(reason)
        if not self.ready.done():
            self.ready.set_exception(error or KVFerryError(reason))
            self.ready.exception()
        for waiter in self._pending_queries.values():
            if not waiter.done():
                waiter.set_exception(KVFerryError(reason))
        for request_id in list(self._streams):
            self._deliver(_error_output(request_id, reason))

    # -- what is sent ----------------------------------------------------------------------------------------------

    def add(self, requests: list[AddRequest]) -> list[OutputStream]:
        frame = self._frame_of(requests)
        for request in requests:
            if request.request_id in self._streams:
                raise RemoteProtocolError(f"request id {request.request_id} is already in use")
        streams = [OutputStream(request.request_id, self._drop) for request in requests]
        self._streams.update((stream.request_id, stream) for stream in streams)
        if self._transport is None:
            for stream in streams:
                self._deliver(_error_output(stream.request_id, self.exit_reason or "the engine core is not connected"))
        else:
            self._transport.write(frame)
        return streams

    def _frame_of(self, requests: list[AddRequest]) -> bytes:
        try:
            return pack_frame(self._encode(requests))
        except (OverflowError, TypeError, ValueError, RecursionError, TransportError) as error:
            raise RemoteProtocolError(f"the request cannot be handed to the engine: {error}") from error

    def abort(self, request_id: str) -> None:
        if request_id in self._streams:
            self._send([AbortRequest(request_id)])
            self._deliver(RequestOutput(request_id, finish_reason="abort"))

    def abandon(self, request_id: str) -> None:
        """Its answer reached nobody: whatever the core keeps for it may go, also when it has finished."""
        self._send([AbortRequest(request_id)])

    def _drop(self, stream: OutputStream) -> None:
        # A late close must not end another request that got the same id meanwhile.
        if self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]
            self._send([AbortRequest(stream.request_id)])

    async def send_query(self, query: GetStatus | GetTransferRecords) -> CoreStatus | TransferRecordsReply:
        if self._transport is None:
            raise KVFerryError(self.exit_reason or "the engine core is not connected")
        waiter: asyncio.Future[CoreStatus | TransferRecordsReply] = asyncio.get_running_loop().create_future()
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
