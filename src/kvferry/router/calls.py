"""One call to an instance: what it counts for, how long it may take, and what its failures are called. Runs on the event loop."""

import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvferry.errors import RemoteProtocolError
from kvferry.router.exchange import Answer, Exchange, Setback, passed_headers
from kvferry.router.fleet import Fleet, Leg, Wish
from kvferry.router.http1.client import Target, UpstreamAnswer, Upstreams
from kvferry.router.http1.errors import BrokenOff, NotReached, TimedOut, UpstreamError
from kvferry.router.instances import Instance, Outcome, Role
from kvferry.router.metrics import RouterMetrics
from kvferry.router.options import RouterOptions
from kvferry.router.vital_signs import VitalSigns

__all__ = ["UNAVAILABLE", "Call", "Calls", "described", "excerpt"]

UNAVAILABLE = 503
_EXCERPT_CHARS = 300


@dataclass(slots=True)
class Call:
    """What a leg came to, as far as its instance is to blame or to praise."""

    leg: Leg
    outcome: Outcome = Outcome.FAILED
    error: str = ""


@dataclass(slots=True)
class Calls:
    """Makes calls on behalf of requests."""

    options: RouterOptions
    fleet: Fleet
    upstreams: Upstreams
    metrics: RouterMetrics
    signs: VitalSigns
    tls: ssl.SSLContext | None = None
    """For instances that speak TLS."""

    def target(self, instance: Instance) -> Target:
        return Target(instance.address, self.tls if instance.tls else None)

    @contextmanager
    def counted(self, instance: Instance, wish: Wish) -> Iterator[Call]:
        """Around one leg: the instance's load and health. A leg that is cancelled says nothing about its instance."""
        if self.fleet.get(instance) is None:
            raise NotReached("it has left the fleet")
        call = Call(self.fleet.begin(instance, time.monotonic(), wish))
        try:
            yield call
        except (UpstreamError, RemoteProtocolError) as error:
            call.error = described(error)
            raise
        except BaseException:
            call.outcome = Outcome.ABANDONED
            raise
        finally:
            self.fleet.end(call.leg, call.outcome, time.monotonic(), call.error)
            self.metrics.leg(instance, call.outcome)

    async def post(self, exchange: Exchange, instance: Instance, body: bytes) -> UpstreamAnswer:
        timeouts = self.options.timeouts
        return await self.upstreams.send(
            self.target(instance),
            "POST",
            exchange.http.path,
            exchange.leg_headers(),
            body,
            connect_timeout_s=timeouts.connect,
            head_timeout_s=timeouts.answer,
        )

    async def get(self, instance: Instance, path: str, headers: Sequence[tuple[str, str]]) -> UpstreamAnswer:
        """A page of an instance, which is not asked about anything that takes long."""
        timeouts = self.options.timeouts
        return await self.upstreams.send(
            self.target(instance), "GET", path, headers, connect_timeout_s=timeouts.connect, head_timeout_s=timeouts.probe
        )

    async def read(self, answer: UpstreamAnswer) -> bytes:
        return await answer.read(self.options.limits.max_body_bytes, self.options.timeouts.answer)

    async def refusal(self, answer: UpstreamAnswer, instance: Instance, call: Call) -> Setback:
        """It answered 503."""
        body = await self.read(answer)
        call.outcome = Outcome.REFUSED
        self.metrics.refusals.labels(instance.role, instance.url).inc()
        return Setback(instance, f"{instance} takes no requests now", Answer(answer.status, passed_headers(answer.headers), body), True)

    def failure(self, instance: Instance, error: Exception) -> Setback:
        self.metrics.failures.labels(instance.role, instance.url).inc()
        return Setback(instance, f"{instance} failed: {described(error)}")

    async def fault(self, answer: UpstreamAnswer, instance: Instance, call: Call) -> Setback:
        """It answered with a 5xx that is no refusal. What D says of it is the client's to know; P is none of its business."""
        body = await self.read(answer)
        call.error = f"it answered with status {answer.status}"
        self.metrics.failures.labels(instance.role, instance.url).inc()
        said = Answer(answer.status, passed_headers(answer.headers), body) if instance.role is Role.DECODE else None
        return Setback(instance, f"{instance} failed: {call.error}: {excerpt(body)}", said, needs_prefill=True)


def described(error: Exception) -> str:
    if isinstance(error, NotReached):
        return f"it cannot be reached: {error}"
    if isinstance(error, TimedOut):
        return "it did not answer in time"
    if isinstance(error, BrokenOff):
        return "it closed the connection in the middle of an answer"
    return str(error)


def excerpt(body: bytes) -> str:
    text = body.decode(errors="replace").strip()
    return text if len(text) <= _EXCERPT_CHARS else text[:_EXCERPT_CHARS] + "…"
