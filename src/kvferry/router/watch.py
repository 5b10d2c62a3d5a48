"""Looks after the instances: whether they are well, and what their `/metrics` say of them. Runs on the event loop.

That page is the one place where both engines, the embedded one and vLLM, let a connector speak without a request. Each instance is looked
at in turn, on its own: one that hangs holds up no other.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from kvferry.router.calls import Calls, described
from kvferry.router.health import Phase
from kvferry.router.http1.errors import UpstreamError
from kvferry.router.instance_metrics import MAX_PAGE_BYTES, InstanceReading, MetricsWatch, read_metrics
from kvferry.router.instances import Instance
from kvferry.types import Address

__all__ = ["Watch"]

_log = logging.getLogger(__name__)

_IDLE_S = 1.0
_TIDY_S = 30.0
_LOOK_AGAIN_S = 1.0


@dataclass(slots=True)
class Watch:
    calls: Calls
    on_gone: Callable[[Instance], object]
    """It has left the fleet, or is another life of itself: what it had is gone."""
    seen: dict[Instance, MetricsWatch] = field(default_factory=dict)
    """What each said last."""
    tidy: Callable[[float], object] = lambda now: None
    """Whatever wants to be looked through now and then."""
    _tidy_at: float = 0.0
    _looked_at: dict[Instance, float] = field(default_factory=dict)
    _said: dict[Instance, InstanceReading] = field(default_factory=dict)
    """What each said of itself when it last spoke: how it hands over, where it is asked. It holds until a leg fails or another life speaks,
    unlike its figures, which are of the moment."""
    _heard: dict[Instance, int] = field(default_factory=dict)
    """How much had come from one that was found ill, then."""
    _lives: dict[Instance, float] = field(default_factory=dict)
    _looking: dict[Instance, "asyncio.Task[None]"] = field(default_factory=dict)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            now = time.monotonic()
            for instance in self.calls.fleet.expire(now):
                _log.info("instance has not renewed its registration instance=%s", instance.url)
                self.gone(instance)
            if now >= self._tidy_at:
                self._tidy_at = now + _TIDY_S
                self.tidy(now)
            for instance in self.calls.fleet.take_probes(now):
                self._look(instance)
            due = self.calls.fleet.next_deadline()
            wait_s = _IDLE_S if due is None else min(_IDLE_S, max(0.01, due - now))
            self._news.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await self._news.wait()
            except TimeoutError:
                pass

    def look_now(self) -> None:
        """Somebody has joined."""
        self._news.set()

    async def pushes(self, instance: Instance) -> bool:
        """Whether it takes a push ticket. Waits only for an instance that nothing is known of, for a bounded time, once a second."""
        if instance not in self._said and time.monotonic() >= self._looked_at.get(instance, -inf) + _LOOK_AGAIN_S:
            await asyncio.shield(self._look(instance))
        said = self._said.get(instance)
        return said is not None and said.is_push

    def forget(self, instance: Instance) -> None:
        """It has failed: what comes back may be another life."""
        for known in (self.seen, self._said, self._heard, self._looked_at):
            known.pop(instance, None)

    def gone(self, instance: Instance) -> None:
        """It has left the fleet."""
        self.forget(instance)
        self._lives.pop(instance, None)
        self.calls.metrics.forget(instance)
        self.on_gone(instance)

    def side_channel(self, instance: Instance) -> Address | None:
        """Where it answers questions of the cluster's members, if it has said so."""
        said = self._said.get(instance)
        host, _, port = said.side_channel.rpartition(":") if said is not None else ("", "", "")
        return Address(host.strip("[]"), int(port)) if host and port.isdecimal() and 0 < int(port) < 65536 else None

    async def close(self) -> None:
        looking = list(self._looking.values())
        for task in looking:
            task.cancel()
        await asyncio.gather(*looking, return_exceptions=True)

    def _look(self, instance: Instance) -> "asyncio.Task[None]":
        task = self._looking.get(instance)
        if task is None:
            task = self._looking[instance] = asyncio.create_task(self._look_at(instance))
            task.add_done_callback(lambda _: self._looking.pop(instance, None))
        return task

    async def _look_at(self, instance: Instance) -> None:
        try:
            await self._look_closely(instance, self.seen.setdefault(instance, MetricsWatch()))
        finally:
            self._looked_at[instance] = time.monotonic()

    async def _look_closely(self, instance: Instance, watch: MetricsWatch) -> None:
        try:
            async with asyncio.timeout(self.calls.options.timeouts.probe):
                status, _ = await self._get(instance, "/health")
                page_status, page = await self._get(instance, "/metrics")
        except (UpstreamError, TimeoutError) as error:
            self.calls.fleet.note_probe_ill(instance, time.monotonic(), described(error))
            watch.forget()
            self._give_up_on_silent(instance)
            return
        now = time.monotonic()
        self._heard.pop(instance, None)
        if status == 200:
            self.calls.fleet.note_probe_well(instance, now)
        else:
            self.calls.fleet.note_probe_ill(instance, now, f"its health is {status}")
        reading = read_metrics(page if page_status == 200 else b"")
        self._said[instance] = reading
        self._note_life(instance, reading, now)
        growth = watch.note(reading, now)
        self.calls.signs.note_engines(growth.tokens, growth.moved_bytes, now, growth.over_s)

    def _give_up_on_silent(self, instance: Instance) -> None:
        """Not a byte has come from it between two looks in vain, and its role can do without it: what waits for it to begin an answer is
        tried elsewhere rather than at the end of a long deadline. Streams that have begun stay, as nobody else can go on with them."""
        before, heard = self._heard.get(instance), self.calls.num_heard(instance)
        self._heard[instance] = heard
        member = self.calls.fleet.get(instance)
        if before == heard and member is not None and member.breaker.phase is Phase.EJECTED:
            num_given_up = self.calls.give_up(instance)
            if num_given_up:
                _log.warning("given up %d waiting legs: instance is silent instance=%s", num_given_up, instance.url)

    def _note_life(self, instance: Instance, reading: InstanceReading, now: float) -> None:
        if reading.started_at is None:
            return
        before = self._lives.get(instance)
        self._lives[instance] = reading.started_at
        if before is not None and before != reading.started_at:
            _log.info("instance restarted instance=%s", instance.url)
            self.calls.fleet.restarted(instance, now)
            self.on_gone(instance)

    async def _get(self, instance: Instance, path: str) -> tuple[int, bytes]:
        key = self.calls.options.access.instance_key
        with await self.calls.get(instance, path, [("Authorization", f"Bearer {key}")] if key else []) as answer:
            return answer.status, await answer.read(MAX_PAGE_BYTES, self.calls.options.timeouts.probe)
