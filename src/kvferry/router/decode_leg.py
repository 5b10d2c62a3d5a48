"""The second leg: D takes P's blocks and answers, and its bytes reach the client as they come. Runs on the event loop.

Until the client has got something another D may be asked: an answer that says nothing but an error counts as none.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.errors import RemoteProtocolError
from kvferry.router.calls import UNAVAILABLE, Call, Calls, described, excerpt
from kvferry.router.exchange import Answer, Exchange, Setback, passed_headers
from kvferry.router.failures import error_event
from kvferry.router.http1.client import UpstreamAnswer
from kvferry.router.http1.errors import BrokenOff, UpstreamError
from kvferry.router.instances import Instance, Outcome
from kvferry.router.legs import Handover
from kvferry.router.release import Held
from kvferry.router.timeline import Mark
from kvferry.router.turn_keeper import TurnKeeper
from kvferry.router.turns import EventFilter, take_from_answer

__all__ = ["DecodeLeg"]

_log = logging.getLogger(__name__)

_EVENTS = "text/event-stream"
# The first event of a stream, and whether it is an error.
_EVENT = re.compile(rb'(?:^|\n)data:[ \t]*(\{\s*"error"\s*:)?[^\n]*\n')
_MAX_START = 64 * 1024
_DONE, _TAIL_BYTES = b"data: [DONE]", 64


@dataclass(slots=True)
class DecodeLeg:
    calls: Calls
    turns: TurnKeeper

    async def run(
        self, exchange: Exchange, held: Held, instance: Instance, handover: Handover | None, has_begun: asyncio.Event | None = None
    ) -> Setback | None:
        """None: the client has its answer, whatever it is. `has_begun` is set as soon as there is something for the client: P's leg may be
        under way too, and its objection is the answer until then."""
        exchange.mark(Mark.DECODE_BEGAN, instance)
        try:
            result = await self._ask(exchange, held, instance, handover, has_begun)
        except (UpstreamError, RemoteProtocolError) as error:
            if exchange.reply.is_started:
                raise
            result = self.calls.failure(instance, error)
        if result is not None:
            exchange.mark(Mark.DECODE_FAILED, result.sentence)
        return result

    async def _ask(
        self, exchange: Exchange, held: Held, instance: Instance, handover: Handover | None, has_begun: asyncio.Event | None
    ) -> Setback | None:
        body = exchange.client.decode_body(handover, exchange.turn_word)
        with self.calls.counted(instance, exchange.wish) as call, await self.calls.post(exchange, instance, body) as answer:
            if answer.status == UNAVAILABLE:
                return await self.calls.refusal(answer, instance, call)
            if answer.status >= 500:
                return await self.calls.fault(answer, instance, call)
            is_stream = (answer.headers.get("content-type") or "").startswith(_EVENTS)
            whole = None if is_stream else await self.calls.read(answer)
            error = await self._error_at_start(answer) if is_stream else None
            if error is not None:
                self.calls.metrics.failures.add(instance.role, instance.url)
                said = Answer(answer.status, passed_headers(answer.headers), await self.calls.read_rest(answer) or error)
                return Setback(instance, f"{instance} failed: {excerpt(said.body)}", said, needs_prefill=True)
            call.outcome = Outcome.ANSWERED
            if has_begun is not None:
                has_begun.set()
            if answer.status == 200:
                held.hand_over()
            self._note_first(exchange, call)
            headers = [*passed_headers(answer.headers), ("X-Request-Id", exchange.request_id), *exchange.cors]
            if whole is not None:
                self._send(exchange, call, Answer(answer.status, headers, whole))
            else:
                await self._pass_on(exchange, held, instance, answer, headers, call)
        return None

    async def _error_at_start(self, answer: UpstreamAnswer) -> bytes | None:
        """Waits for the first event: an engine may open its answer long before it has anything to say. Comments say nothing."""
        start = await answer.peek(_says_something, self.calls.options.timeouts.idle)
        event = _EVENT.search(start)
        return start[: event.end()] + b"\n" if event is not None and event[1] is not None else None

    def _note_first(self, exchange: Exchange, call: Call) -> None:
        now = time.monotonic()
        self.calls.fleet.note_answer(call.leg, now)
        timeline = exchange.timeline
        timeline.mark(Mark.FIRST_TOKEN, now)
        metrics, signs = self.calls.metrics, self.calls.signs
        metrics.ttft.observe(now - timeline.arrived)
        signs.note_ttft(now - timeline.arrived, now)
        prefilled = timeline.time_of(Mark.PREFILL_ENDED)
        if prefilled is not None:
            metrics.handover.observe(now - prefilled)
            signs.note_handover(now - prefilled, now)

    def _send(self, exchange: Exchange, call: Call, answer: Answer) -> None:
        """A whole answer, which holds D's word for the router where it was asked for one."""
        body = answer.body
        if exchange.turn_word is not None and answer.status == 200:
            params, body = take_from_answer(body)
            self.turns.keep(exchange, call.leg, params)
        exchange.reply.send(answer.status, answer.headers, body)

    async def _pass_on(
        self, exchange: Exchange, held: Held, instance: Instance, answer: UpstreamAnswer, headers: list[tuple[str, str]], call: Call
    ) -> None:
        look = EventFilter() if exchange.turn_word is not None else None
        passing = look.pass_on if look is not None else None
        if not answer.is_chunked and answer.headers.get("content-length") is None:
            passing = _UpToDone(passing).pass_on
        try:
            await answer.relay(
                exchange.reply,
                headers,
                idle_timeout_s=self.calls.options.timeouts.idle,
                filter=passing,
            )
        except UpstreamError as error:
            call.outcome = Outcome.FAILED
            held.take_back()
            await self._break_off(exchange, instance, described(error))
            return
        if look is not None:
            self.turns.keep(exchange, call.leg, look.params)

    async def _break_off(self, exchange: Exchange, instance: Instance, what: str) -> None:
        """D is gone in the middle: say so where the format allows it, and never let the part look like a whole."""
        self.calls.metrics.failures.add(instance.role, instance.url)
        message = f"{instance} broke off its answer: {what}"
        exchange.broken_off = message
        _log.warning("stream broken request=%s: %s", exchange.request_id, message)
        if not exchange.reply.can_write:
            exchange.reply.abort()
            return
        await exchange.reply.write(error_event(502, message))
        await exchange.reply.finish()


class _UpToDone:
    """A body that ends with its connection also ends so when its instance dies: it is whole if its last event says so."""

    def __init__(self, then: Callable[[bytes], bytes] | None) -> None:
        self._then = then
        self._tail = b""

    def pass_on(self, piece: bytes) -> bytes:
        if piece:
            self._tail = (self._tail + piece)[-_TAIL_BYTES:]
        elif _DONE not in self._tail:
            raise BrokenOff("it closed the connection in the middle of its answer", has_answered=True)
        return piece if self._then is None else self._then(piece)


def _says_something(start: bytes) -> bool:
    return _EVENT.search(start) is not None or len(start) > _MAX_START
