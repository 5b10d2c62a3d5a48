"""One call to an instance: what it counts for, how long it may take, and what its failures are called. Runs on the event loop."""

import ssl
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from kvferry.errors import RemoteProtocolError
from kvferry.router.exchange import Answer, Exchange, Setback, passed_headers
from kvferry.router.failures import error_answer
from kvferry.router.fleet import Fleet, Leg, Wish
from kvferry.router.http1.client import OnLeft, Target, UpstreamAnswer, Upstreams
from kvferry.router.http1.errors import BrokenOff, NotReached, TimedOut, UpstreamError
from kvferry.router.instances import Instance, Outcome, Role
from kvferry.router.metrics import RouterMetrics
from kvferry.router.options import RouterOptions
from kvferry.router.vital_signs import VitalSigns

__all__ = ["UNAVAILABLE", "Call", "Calls", "described", "excerpt"]

UNAVAILABLE = 503
_COME_BACK_S = 1
_EXCERPT_CHARS = 300
_MAX_TARGETS = 4096


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

    _targets: dict[Instance, Target] = field(default_factory=dict, init=False)

    def target(self, instance: Instance) -> Target:
        target = self._targets.get(instance)
        if target is None or (target.tls is not None) is not instance.tls:
            if len(self._targets) >= _MAX_TARGETS:  # instances come and go
                self._targets.clear()
            target = self._targets[instance] = Target(instance.address, self.tls if instance.tls else None)
        return target

    def counted(self, instance: Instance, wish: Wish) -> "Call":
        """Around one leg: the instance's load and health."""
        if self.fleet.get(instance) is None:
            raise NotReached("it has left the fleet")
        return Call(self, self.fleet.begin(instance, time.monotonic(), wish))

    def post(
        self, exchange: Exchange, instance: Instance, body: bytes, on_left: OnLeft | None = None
    ) -> Coroutine[Any, Any, UpstreamAnswer]:
        timeouts = self.options.timeouts
        return self.upstreams.send(
            self.target(instance),
            "POST",
            exchange.http.path,
            exchange.leg_fields,
            body,
            connect_timeout_s=timeouts.connect,
            head_timeout_s=timeouts.answer,
            on_left=on_left,
        )

    async def get(self, instance: Instance, path: str, headers: Sequence[tuple[str, str]]) -> UpstreamAnswer:
        """A page of an instance, which is not asked about anything that takes long."""
        timeouts = self.options.timeouts
        return await self.upstreams.send(
            self.target(instance), "GET", path, headers, connect_timeout_s=timeouts.connect, head_timeout_s=timeouts.probe
        )

    def num_heard(self, instance: Instance) -> int:
        return self.upstreams.num_heard(self.target(instance))

    def give_up(self, instance: Instance) -> int:
        """Fail what waits for it to begin an answer; how much that was."""
        return self.upstreams.give_up(self.target(instance), TimedOut("it was silent, to its health checks too"))

    def read(self, answer: UpstreamAnswer) -> Coroutine[Any, Any, bytes]:
        return answer.read(self.options.limits.max_body_bytes, self.options.timeouts.answer)

    async def read_rest(self, answer: UpstreamAnswer) -> bytes | None:
        """Of an answer that is known to be none: it is not waited for long. None: it did not come whole."""
        try:
            return await answer.read(self.options.limits.max_body_bytes, self.options.timeouts.probe)
        except UpstreamError:
            return None

    async def refusal(self, answer: UpstreamAnswer, instance: Instance, call: "Call") -> Setback:
        """It answered 503. Clients are always told when to come back."""
        call.outcome = Outcome.REFUSED
        body = await self.read_rest(answer)
        self.metrics.refusals.add(instance.role, instance.url)
        sentence, headers = f"{instance} takes no requests now", passed_headers(answer.headers)
        if body is None:
            return Setback(instance, sentence, error_answer(UNAVAILABLE, sentence, _COME_BACK_S), True)
        if answer.headers.get("retry-after") is None:
            headers.append(("Retry-After", str(_COME_BACK_S)))
        return Setback(instance, sentence, Answer(answer.status, headers, body), True)

    def failure(self, instance: Instance, error: Exception) -> Setback:
        self.metrics.failures.add(instance.role, instance.url)
        return Setback(instance, f"{instance} failed: {described(error)}", is_unsent=isinstance(error, NotReached))

    async def fault(self, answer: UpstreamAnswer, instance: Instance, call: "Call") -> Setback:
        """It answered with a 5xx that is no refusal. What D says of it is the client's to know; P is none of its business."""
        body = await self.read_rest(answer)
        call.error = f"it answered with status {answer.status}"
        self.metrics.failures.add(instance.role, instance.url)
        is_told = body is not None and instance.role is Role.DECODE
        said = Answer(answer.status, passed_headers(answer.headers), body or b"") if is_told else None
        return Setback(instance, f"{instance} failed: {call.error}: {excerpt(body or b'')}", said, needs_prefill=True)


class Call:
    """One leg, from its beginning to its end. `outcome` and `error`: what it came to, as far as its instance is to blame or to praise.

    One that is cancelled says nothing about its instance."""

    __slots__ = ("_calls", "error", "leg", "outcome")

    def __init__(self, calls: Calls, leg: Leg) -> None:
        self._calls = calls
        self.leg = leg
        self.outcome = Outcome.FAILED
        self.error = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, UpstreamError | RemoteProtocolError):
            self.error = described(error)
        elif error is not None:
            self.outcome = Outcome.ABANDONED
        self._calls.fleet.end(self.leg, self.outcome, time.monotonic(), self.error)
        self._calls.metrics.leg(self.leg.instance, self.outcome)


def described(error: Exception) -> str:
    if isinstance(error, NotReached):
        return f"it cannot be reached: {error}"
    if isinstance(error, TimedOut):
        return f"it did not answer in time: {error}"
    if isinstance(error, BrokenOff):
        return "it closed the connection in the middle of an answer"
    return str(error)


def excerpt(body: bytes) -> str:
    """In one line: it goes into logs, and engines repeat what clients wrote."""
    text = "".join(sign if sign.isprintable() else " " for sign in body[: 4 * _EXCERPT_CHARS].decode(errors="replace")).strip()
    return text if len(text) <= _EXCERPT_CHARS else text[:_EXCERPT_CHARS] + "…"
