"""The front of the router: a generation is read, waits for its turn, is served within its time, and its end is noted.

Runs on the event loop."""

import asyncio
import logging
import time
from dataclasses import dataclass, field

from kvferry.router.access import Gate
from kvferry.router.admission import Admission, Refused, Why
from kvferry.router.exchange import Answer, Exchange, leg_fields
from kvferry.router.failures import error_answer, error_event
from kvferry.router.http1.messages import ServerRequest
from kvferry.router.http1.server import Reply
from kvferry.router.legs import Refusal, read_client_request
from kvferry.router.options import RouterOptions
from kvferry.router.request_ids import choose_request_id
from kvferry.router.serving import Serving
from kvferry.router.time_limits import TimeLimits
from kvferry.router.timeline import Ending, Mark, RecentRequests
from kvferry.router.vital_signs import VitalSigns

__all__ = ["Front"]

_log = logging.getLogger(__name__)
_access_log = logging.getLogger("kvferry.router.access")

_SENTENCES = {
    Why.TENANT: "you have as many requests under way as you may; try again later",
    Why.FULL: "the router has as many requests waiting as it takes; try again later",
    Why.LATE: "the request waited too long for its turn; try again later",
    Why.CLOSING: "the router is stopping: send the request to another",
}


@dataclass(slots=True)
class Front:
    options: RouterOptions
    gate: Gate
    admission: Admission
    serving: Serving
    recent: RecentRequests
    signs: VitalSigns
    limits: TimeLimits = field(default_factory=TimeLimits)

    async def generate(self, request: ServerRequest, reply: Reply) -> None:
        """Completions and chat."""
        headers = request.headers
        request_id = choose_request_id(headers.get("x-request-id"))
        cors = self.gate.cors_headers(headers)
        client = read_client_request(request.body)
        if isinstance(client, Refusal):
            _answer(reply, error_answer(client.status, client.message), request_id, cors)
            return
        fields = leg_fields(headers, request_id, self._authorization(request))
        timeline = self.recent.begin(request_id, request.path, time.monotonic())
        timeline.conversation = client.conversation_id or ""
        exchange = Exchange(request, reply, client, request_id, self.gate.tenant(headers) or "", timeline, fields, cors=cors)
        ending = Ending.ABANDONED
        try:
            entry = await self.admission.enter(exchange.tenant, self.options.timeouts.queue)
            if isinstance(entry, Refused):
                exchange.error = _SENTENCES[entry.why]
                exchange.send(error_answer(entry.status, _SENTENCES[entry.why], entry.retry_after_s))
            else:
                try:
                    timeline.mark(Mark.ADMITTED, time.monotonic())
                    await self._serve_in_time(exchange)
                finally:
                    self.admission.leave(entry)
            ending = _ending(exchange)
        except ConnectionError:
            # The client is gone, or reads nothing.
            reply.abort()
        finally:
            self._note_end(exchange, ending)

    async def _serve_in_time(self, exchange: Exchange) -> None:
        limit = self.limits.begin(self.options.timeouts.request)
        try:
            await self.serving.serve(exchange)
        except asyncio.CancelledError:
            if not limit.end():
                raise
            await self._out_of_time(exchange)
        except ConnectionError:
            raise
        except Exception:
            _log.exception("request failed by a bug request=%s", exchange.request_id)
            if exchange.reply.is_started:
                exchange.broken_off = "the router failed"
                exchange.reply.abort()
            else:
                exchange.send(error_answer(500, "the router failed to serve this request; its log says why"))
        finally:
            limit.end()

    async def _out_of_time(self, exchange: Exchange) -> None:
        message = f"the request took longer than {self.options.timeouts.request:g} s"
        reply = exchange.reply
        if not reply.is_started:
            exchange.error = message
            exchange.send(error_answer(504, message))
            return
        exchange.broken_off = message
        if exchange.client.is_streamed and reply.can_write:
            await reply.write(error_event(504, message))
            await reply.finish()
        else:
            reply.abort()

    def _authorization(self, request: ServerRequest) -> str | None:
        """For instances: their own key, or the client's credentials where they are none of ours."""
        if self.options.access.instance_key:
            return f"Bearer {self.options.access.instance_key}"
        return None if self.gate.keys else request.headers.get("authorization")

    def _note_end(self, exchange: Exchange, ending: Ending) -> None:
        now, timeline, status = time.monotonic(), exchange.timeline, exchange.reply.status
        timeline.relayed_bytes = exchange.reply.num_sent
        self.recent.end(timeline, ending, status, now, exchange.broken_off or exchange.error)
        self.signs.note_end(now, timeline.relayed_bytes, ending.is_error)
        self.serving.calls.metrics.outcome(ending)
        if ending is Ending.ABANDONED:
            self.serving.calls.metrics.aborts.add()
        if self.options.access_log:
            _access_log.info(
                "request",
                extra={
                    "request": exchange.request_id,
                    "trace": _trace_id(exchange),
                    "tenant": exchange.tenant,
                    "route": timeline.route,
                    "status": status,
                    "ending": str(ending),
                    "seconds": round(now - timeline.arrived, 6),
                    "prefill": str(timeline.last_about(Mark.PREFILL_BEGAN) or ""),
                    "decode": str(timeline.last_about(Mark.DECODE_BEGAN) or ""),
                    "retries": timeline.num_retries,
                },
            )


def _answer(reply: Reply, answer: Answer, request_id: str, cors: list[tuple[str, str]]) -> None:
    reply.send(answer.status, [*answer.headers, ("X-Request-Id", request_id), *cors], answer.body)


def _ending(exchange: Exchange) -> Ending:
    status = exchange.reply.status
    if exchange.broken_off:
        return Ending.BROKEN_OFF
    if status in (429, 503):
        return Ending.REFUSED
    if status >= 500:
        return Ending.FAILED
    return Ending.OBJECTED if status >= 400 else Ending.ANSWERED


def _trace_id(exchange: Exchange) -> str:
    """The second part of a W3C `traceparent`."""
    parts = (exchange.http.headers.get("traceparent") or "").split("-")
    return parts[1] if len(parts) >= 4 else ""
