"""One generation request from admission to the last byte of its answer, streamed or whole. Runs on the API's loop."""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
from aiohttp import web

from kvferry.engine.api.admission import RequestAdmission
from kvferry.engine.api.assembly import TextAssembler
from kvferry.engine.api.context import REQUEST_ID, context_of
from kvferry.engine.api.generation import Generation
from kvferry.engine.api.logprobs import TokenNames
from kvferry.engine.api.replies import CollectedChoice, ResponseFormatter, UsageCounter
from kvferry.engine.api.schema import GenerationRequest
from kvferry.engine.api.stops import StopMatcher
from kvferry.engine.api.streams import EventStream
from kvferry.engine.api.tokenizer import SpecialTokens
from kvferry.engine.messages import AddRequest
from kvferry.errors import RequestRefused
from kvferry.web.errors import error_body

__all__ = ["GenerationResponder", "Submission"]

_log = logging.getLogger(__name__)
_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class Submission:
    """What was asked of the engine, as replies quote it."""

    request_id: str
    created: int
    """Unix seconds."""
    model: str
    requests: Sequence[AddRequest]

    @property
    def prompts(self) -> list[list[int]]:
        """The prompt of each choice."""
        return [request.prompt_token_ids for request in self.requests]


class GenerationResponder:
    """Lives as long as one HTTP request."""

    def __init__(self, http: web.Request, prefix: str, request: GenerationRequest) -> None:
        self._http = http
        self._context = context_of(http)
        self._request = request
        self._timer = self._context.metrics.timer()
        self._is_client_gone = False
        self.request_id = f"{prefix}-{REQUEST_ID.get()}"
        tokenizer = self._context.tokenizer
        self.names = TokenNames.as_ids(tokenizer) if request.return_tokens_as_token_ids else TokenNames(tokenizer)

    def submission(self, admission: RequestAdmission) -> Submission:
        """Check the request against the model; RequestRefused when it does not fit."""
        self._note_unused_transfer()
        count = len(admission.prompts) * self._request.samples
        requests = admission.add_requests(self._context.engine.ready, [secrets.token_hex(4) for _ in range(count)])
        return Submission(self.request_id, int(time.time()), self._context.model_name, requests)

    def _note_unused_transfer(self) -> None:
        unused = self._context.ignored_transfers
        note = None if unused is None else unused.note(self._request.kv_transfer_params, time.monotonic())
        if note is not None:
            _log.warning("%s request=%s", note, self.request_id)

    async def answer(self, submission: Submission, replies: ResponseFormatter, echo_texts: Sequence[str]) -> web.StreamResponse:
        """Run it and answer. `echo_texts` hold, per prompt, text that precedes each of its choices; may be empty."""
        assemblers = [self._assembler(index, echo_texts) for index in range(len(submission.requests))]
        async with Generation(self._context.engine, submission.requests, assemblers) as generation:
            tally = UsageCounter(submission.prompts, self._request.samples)
            if self._request.is_prefill_for_peer or self._request.is_turn:
                return await self._respond_or_abandon(submission, self._respond(generation, replies, tally))
            return await self._respond(generation, replies, tally)

    async def _respond(self, generation: Generation, replies: ResponseFormatter, tally: UsageCounter) -> web.StreamResponse:
        if self._request.stream:
            return await self._stream(generation, replies, tally)
        return await self._respond_whole(generation, replies, tally)

    async def _respond_or_abandon(self, submission: Submission, answering: Awaitable[web.StreamResponse]) -> web.StreamResponse:
        """Write the answer here and now: if its ticket cannot be delivered, the engine keeps blocks that nobody will come for."""
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
        _log.info("client gone request=%s: %s", self.request_id, error)

    def _assembler(self, index: int, echo_texts: Sequence[str]) -> TextAssembler:
        request = self._request
        special = SpecialTokens.WITH if request.skip_special_tokens is False else SpecialTokens.WITHOUT
        eos = frozenset(self._context.engine.ready.eos_token_ids)
        return TextAssembler(
            index,
            self._context.tokenizer.detokeniser(special),
            # The decode side applies stop strings: cutting the prefill short would throw away the KV it was run for.
            StopMatcher(() if request.is_prefill_for_peer else request.stop_strings),
            min_tokens=request.min_tokens or 0,
            includes_stop=bool(request.include_stop_str_in_output),
            silent_stop_ids=eos.difference(request.stop_token_ids or ()),
            echo_text=echo_texts[index // request.samples] if echo_texts else "",
        )

    async def _respond_whole(self, generation: Generation, replies: ResponseFormatter, tally: UsageCounter) -> web.Response:
        answers = [CollectedChoice(index) for index in range(len(generation.prompts))]
        async with aclosing(generation.deltas()) as deltas:
            async for delta in deltas:
                self._timer.observe(delta)
                answers[delta.index].add(delta)
                tally.add(delta)
        reply = replies.whole(answers)
        reply.usage = tally.usage()
        reply.kv_transfer_params = tally.kv_transfer_params
        return web.Response(body=_encode(reply), content_type="application/json")

    async def _stream(self, generation: Generation, replies: ResponseFormatter, tally: UsageCounter) -> web.StreamResponse:
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
            _log.exception("answering failed request=%s", self.request_id)
            await self._fail(events, RequestRefused("the server failed while answering; its log says why", status=500))
        return events.response

    async def _send_all(self, events: EventStream, generation: Generation, replies: ResponseFormatter, tally: UsageCounter) -> None:
        options = self._request.stream_options
        has_usage = options is not None and bool(options.include_usage)
        has_params = self._request.is_prefill_for_peer
        has_running_usage = options is not None and bool(options.continuous_usage_stats) and has_usage
        async with aclosing(generation.deltas()) as deltas:
            async for delta in deltas:
                self._timer.observe(delta)
                tally.add(delta)
                chunks = replies.chunks(delta)
                for chunk in chunks:
                    if has_usage:
                        chunk.usage = tally.usage() if has_running_usage else None
                if tally.is_complete and not has_usage and has_params and tally.kv_transfer_params is not None:
                    chunks[-1].kv_transfer_params = tally.kv_transfer_params
                await events.send(*map(_encode, chunks))
        if has_usage:
            closing = replies.closing()
            closing.usage = tally.usage()
            if has_params and tally.kv_transfer_params is not None:
                closing.kv_transfer_params = tally.kv_transfer_params
            await events.send(_encode(closing))
        if self._request.is_turn and tally.kv_transfer_params is not None:
            # An event of its own, so that a router can take it out: it is not for the client.
            retained = replies.closing()
            retained.kv_transfer_params = tally.kv_transfer_params
            await events.send(_encode(retained))

    async def _fail(self, events: EventStream, refusal: RequestRefused) -> None:
        """With a status while that is possible, else as an event."""
        if not events.has_started:
            raise refusal
        try:
            await events.send(error_body(refusal))
            await events.finish()
        except ConnectionResetError as error:
            self._note_client_gone(error)
