"""Generation runs one HTTP request in the engine and sends the answer, streamed or whole.

A `GenerationResponder` submits the choices of the request, a `Generation` merges the outputs of the
choices, and an `EventStream` writes server-sent events. Runs on the event loop of the API process.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import msgspec
from aiohttp import web

from kvferry.connectors.nixl.params import first_token_params
from kvferry.engine.api.admission import RequestAdmission
from kvferry.engine.api.assembly import Delta, StopMatcher, TextAssembler
from kvferry.engine.api.context import REQUEST_ID, Engine, context_of
from kvferry.engine.api.responses import (
    CollectedChoice,
    ResponseFormatter,
    TokenNames,
    UsageCounter,
)
from kvferry.engine.api.schema import GenerationRequest
from kvferry.engine.api.tokenizer import SpecialTokens
from kvferry.engine.client import OutputStream
from kvferry.engine.messages import AddRequest, RequestOutput
from kvferry.errors import RemoteProtocolError, RequestRefused
from kvferry.tracing.context import read_trace_context
from kvferry.web.errors import error_body

# -- event stream --
# Server-sent events to one client. Headers are sent with the first event, so a failure before the
# first event can still be answered with an HTTP status. A client that does not read delays only its
# own request, and only until the stall timeout.


_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # Without this header nginx collects events until its buffer of 4 KiB is full.
    "X-Accel-Buffering": "no",
}


class EventStream:
    """One streamed response; ConnectionResetError from any method means that the client is gone."""

    def __init__(self, http: web.Request, stall_timeout_s: float) -> None:
        self._http = http
        self._stall_timeout_s = stall_timeout_s
        self.response = web.StreamResponse(headers=_HEADERS)

    @property
    def has_started(self) -> bool:
        return self.response.prepared

    async def send(self, *payloads: bytes) -> None:
        """Write the events with one write; return when the client's buffer has room again."""
        if not self.response.prepared:
            await self.response.prepare(self._http)
        await self._bounded(
            self.response.write(b"".join(b"data: " + payload + b"\n\n" for payload in payloads))
        )

    async def finish(self) -> None:
        """Send the end marker of the OpenAI API and end the response."""
        await self.send(b"[DONE]")
        await self._bounded(self.response.write_eof())

    async def _bounded(self, writing: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await writing
        except TimeoutError:
            if self._http.transport is not None:
                self._http.transport.abort()
            raise ConnectionResetError(
                f"the client has not read for {self._stall_timeout_s:g} s"
            ) from None


# -- generation --
# The sequences of one HTTP request in the engine. However a handler ends (answer sent, stop string,
# error, client gone), leaving the context closes every stream, and closing a stream aborts a
# sequence that still runs.


class Generation:
    """An async context that submits requests to the engine on entry, all in one message."""

    def __init__(
        self, engine: Engine, requests: Sequence[AddRequest], assemblers: Sequence[TextAssembler]
    ) -> None:
        assert len(requests) == len(assemblers)
        self._engine = engine
        self._requests = requests
        self._assemblers = assemblers
        self._streams: list[OutputStream] = []

    @property
    def prompts(self) -> list[list[int]]:
        """The prompt of each choice."""
        return [request.prompt_token_ids for request in self._requests]

    async def __aenter__(self) -> Self:
        try:
            self._streams = self._engine.add(self._requests)
        except RemoteProtocolError as error:
            raise RequestRefused(str(error)) from error
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for stream in self._streams:
            stream.close()

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Yield the delta of each output in order of arrival, until all choices have finished.

        Raise RequestRefused when the engine fails one of the choices.
        """
        async with aclosing(_merged(self._streams)) as outputs:
            async for position, output in outputs:
                if output.finish_reason == "error":
                    raise RequestRefused(
                        output.error or "the engine could not finish this request",
                        status=_error_status(output),
                    )
                delta = self._assemblers[position].push(output)
                # A stop string ends the choice here while the engine still generates: closing
                # aborts the request.
                if delta.finish_reason is not None:
                    self._streams[position].close()
                yield delta


def _error_status(output: RequestOutput) -> int:
    return output.error_status if 400 <= output.error_status <= 599 else 500


async def _merged(
    streams: Sequence[OutputStream],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield the outputs of all streams with the stream's position, in order of arrival.

    A stream that the consumer has closed ends and is not read again.
    """
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    # One pending `anext` per stream; the tasks are replaced as outputs arrive.
    waiting = {
        asyncio.ensure_future(anext(stream)): position for position, stream in enumerate(streams)
    }
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                position = waiting.pop(task)
                try:
                    output = task.result()
                except StopAsyncIteration:
                    continue
                yield position, output
                waiting[asyncio.ensure_future(anext(streams[position]))] = position
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


# -- answering --
# One generation request, from admission to the last byte of the answer.


_log = logging.getLogger(__name__)
_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class Submission:
    """The requests that were submitted to the engine, with the values that every reply repeats."""

    request_id: str
    created: int
    """The creation time in Unix seconds."""
    model: str
    requests: Sequence[AddRequest]

    @property
    def prompts(self) -> list[list[int]]:
        """The prompt of each choice."""
        return [request.prompt_token_ids for request in self.requests]


class GenerationResponder:
    """Answers one generation request; one instance per HTTP request."""

    def __init__(self, http: web.Request, prefix: str, request: GenerationRequest) -> None:
        self._http = http
        self._context = context_of(http)
        self._request = request
        self._timer = self._context.metrics.timer()
        self._is_client_gone = False
        self.request_id = f"{prefix}-{REQUEST_ID.get()}"
        tokenizer = self._context.tokenizer
        self.names = (
            TokenNames.as_ids(tokenizer)
            if request.return_tokens_as_token_ids
            else TokenNames(tokenizer)
        )

    def submission(self, admission: RequestAdmission) -> Submission:
        """Check the request against the model; raise RequestRefused when the request does not
        fit.
        """
        self._note_unused_transfer()
        count = len(admission.prompts) * self._request.samples
        requests = admission.add_requests(
            self._context.engine.ready,
            [secrets.token_hex(4) for _ in range(count)],
            read_trace_context(self._http.headers.get),
        )
        return Submission(self.request_id, int(time.time()), self._context.model_name, requests)

    def _note_unused_transfer(self) -> None:
        unused = self._context.ignored_transfers
        note = (
            None
            if unused is None
            else unused.note(self._request.kv_transfer_params, time.monotonic())
        )
        if note is not None:
            _log.warning("%s request=%s", note, self.request_id)

    async def answer(
        self, submission: Submission, replies: ResponseFormatter, echo_texts: Sequence[str]
    ) -> web.StreamResponse:
        """Run the submission and answer the client.

        `echo_texts` holds, per prompt, the text in front of each choice of the prompt, or is empty.
        """
        assemblers = [
            self._assembler(index, echo_texts) for index in range(len(submission.requests))
        ]
        async with Generation(self._context.engine, submission.requests, assemblers) as generation:
            tally = UsageCounter(submission.prompts, self._request.samples)
            if self._request.is_prefill_for_peer or self._request.is_turn:
                return await self._respond_or_abandon(
                    submission, self._respond(generation, replies, tally)
                )
            return await self._respond(generation, replies, tally)

    async def _respond(
        self, generation: Generation, replies: ResponseFormatter, tally: UsageCounter
    ) -> web.StreamResponse:
        if self._request.stream:
            return await self._stream(generation, replies, tally)
        return await self._respond_whole(generation, replies, tally)

    async def _respond_or_abandon(
        self, submission: Submission, answering: Awaitable[web.StreamResponse]
    ) -> web.StreamResponse:
        """Send the answer before returning to aiohttp, to learn whether the client received the
        answer.

        If the ticket in the answer is not delivered, no peer will ever fetch the blocks, and the
        engine must free the blocks at once (docs/decisions/010-tickets-that-reach-no-reader.md).
        """
        try:
            response = await answering
            if not response.prepared:
                await self._write(response)
        except asyncio.CancelledError:
            self._abandon(submission)
            raise
        if self._is_client_gone:
            self._abandon(submission)
        return response

    async def _write(self, response: web.StreamResponse) -> None:
        try:
            await response.prepare(self._http)
            await response.write_eof()
        except ConnectionError as error:
            self._note_client_gone(error)

    def _abandon(self, submission: Submission) -> None:
        for request in submission.requests:
            self._context.engine.abandon(request.request_id)

    def _note_client_gone(self, error: ConnectionError) -> None:
        self._is_client_gone = True
        _log.info("client disconnected request=%s: %s", self.request_id, error)

    def _assembler(self, index: int, echo_texts: Sequence[str]) -> TextAssembler:
        request = self._request
        special = (
            SpecialTokens.WITH if request.skip_special_tokens is False else SpecialTokens.WITHOUT
        )
        eos = frozenset(self._context.engine.ready.eos_token_ids)
        return TextAssembler(
            index,
            self._context.tokenizer.detokeniser(special),
            # The decode side applies stop strings. Ending the prefill leg at a stop string would
            # discard the KV that the decode leg needs.
            StopMatcher(() if request.is_prefill_for_peer else request.stop_strings),
            min_tokens=request.min_tokens or 0,
            includes_stop=bool(request.include_stop_str_in_output),
            silent_stop_ids=eos.difference(request.stop_token_ids or ()),
            echo_text=echo_texts[index // request.samples] if echo_texts else "",
        )

    async def _respond_whole(
        self, generation: Generation, replies: ResponseFormatter, tally: UsageCounter
    ) -> web.Response:
        answers = [CollectedChoice(index) for index in range(len(generation.prompts))]
        async with aclosing(generation.deltas()) as deltas:
            async for delta in deltas:
                self._timer.observe(delta)
                answers[delta.index].add(delta)
                tally.add(delta)
        reply = replies.whole(answers)
        reply.usage = tally.usage()
        reply.kv_transfer_params = self._with_first_token(tally.kv_transfer_params)
        return web.Response(body=_encode(reply), content_type="application/json")

    def _with_first_token(self, params: dict[str, Any] | None) -> dict[str, Any] | None:
        """Tell the router that a decode side may continue after the token of this prefill leg."""
        ready, tokenizer = self._context.engine.ready, self._context.tokenizer
        is_possible = ready.samples_first_tokens and tokenizer.is_byte_level
        if params is None or not self._request.is_prefill_for_peer or not is_possible:
            return params
        return params | first_token_params(ready.max_model_len)

    async def _stream(
        self, generation: Generation, replies: ResponseFormatter, tally: UsageCounter
    ) -> web.StreamResponse:
        events = EventStream(self._http, self._context.settings.stall_timeout_s)
        try:
            await self._send_all(events, generation, replies, tally)
            await events.finish()
        except ConnectionResetError as error:
            self._note_client_gone(error)
        except RequestRefused as refusal:
            await self._fail(events, refusal)
        except asyncio.CancelledError:
            if not self._context.drain.is_cancelling:
                raise
            await self._fail(events, self._context.drain.refusal)
        except Exception:
            _log.exception("failed to answer request=%s", self.request_id)
            await self._fail(
                events,
                RequestRefused("the server failed while answering; its log says why", status=500),
            )
        return events.response

    async def _send_all(
        self,
        events: EventStream,
        generation: Generation,
        replies: ResponseFormatter,
        tally: UsageCounter,
    ) -> None:
        options = self._request.stream_options
        has_usage = options is not None and bool(options.include_usage)
        has_params = self._request.is_prefill_for_peer
        has_running_usage = (
            options is not None and bool(options.continuous_usage_stats) and has_usage
        )
        async with aclosing(generation.deltas()) as deltas:
            async for delta in deltas:
                self._timer.observe(delta)
                tally.add(delta)
                chunks = replies.chunks(delta)
                for chunk in chunks:
                    if has_usage:
                        chunk.usage = tally.usage() if has_running_usage else None
                if (
                    tally.is_complete
                    and not has_usage
                    and has_params
                    and tally.kv_transfer_params is not None
                ):
                    chunks[-1].kv_transfer_params = tally.kv_transfer_params
                await events.send(*map(_encode, chunks))
        if has_usage:
            closing = replies.closing()
            closing.usage = tally.usage()
            if has_params and tally.kv_transfer_params is not None:
                closing.kv_transfer_params = tally.kv_transfer_params
            await events.send(_encode(closing))
        if self._request.is_turn and tally.kv_transfer_params is not None:
            # A separate event, so that a router can remove the event: the parameters of the
            # retained turn are not meant for the client.
            retained = replies.closing()
            retained.kv_transfer_params = tally.kv_transfer_params
            await events.send(_encode(retained))

    async def _fail(self, events: EventStream, refusal: RequestRefused) -> None:
        """Report the error as an HTTP status if no event has been sent yet, else as an event."""
        if not events.has_started:
            raise refusal
        try:
            await events.send(error_body(refusal))
            await events.finish()
        except ConnectionResetError as error:
            self._note_client_gone(error)
