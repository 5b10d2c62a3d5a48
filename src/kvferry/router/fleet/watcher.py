"""Looks after the instances: whether they are well, and what their `/metrics` say of them. Runs on
the event loop.

That page is the one place where both engines, the embedded one and vLLM, let a connector speak
without a request. Each instance is looked at in turn, on its own: one that hangs holds up no other.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from kvferry.router.fleet.health import BreakerPhase
from kvferry.router.fleet.instance_metrics import (
    MAX_PAGE_BYTES,
    InstanceReading,
    MetricsWatcher,
    read_metrics,
)
from kvferry.router.fleet.instances import Instance
from kvferry.router.http.messages import UpstreamError
from kvferry.router.serving.instance_client import InstanceClient, describe_error
from kvferry.types import Address

__all__ = ["InstanceWatcher"]

_log = logging.getLogger(__name__)

_IDLE_S = 1.0
_CLEANUP_INTERVAL_S = 30.0
_REPROBE_INTERVAL_S = 1.0


@dataclass(slots=True)
class InstanceWatcher:
    instance_client: InstanceClient
    on_instance_gone: Callable[[Instance], object]
    """It has left the fleet, or is another incarnation of itself: what it had is gone."""
    latest: dict[Instance, MetricsWatcher] = field(default_factory=dict)
    """What each said last."""
    cleanup: Callable[[float], object] = lambda now: None
    """Whatever wants to be looked through now and then."""
    _cleanup_at: float = 0.0
    _probed_at: dict[Instance, float] = field(default_factory=dict)
    _readings: dict[Instance, InstanceReading] = field(default_factory=dict)
    """What each said of itself when it last spoke: how it hands over, where it is asked. It holds
    until a leg fails or another incarnation speaks, unlike its figures, which are of the moment.
    """
    _received_when_ill: dict[Instance, int] = field(default_factory=dict)
    """How much had come from one that was found unhealthy, then."""
    _process_start: dict[Instance, float] = field(default_factory=dict)
    _probes: dict[Instance, "asyncio.Task[None]"] = field(default_factory=dict)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            now = time.monotonic()
            for instance in self.instance_client.fleet.expire(now):
                _log.info("instance has not renewed its registration instance=%s", instance.url)
                self.forget_instance(instance)
            if now >= self._cleanup_at:
                self._cleanup_at = now + _CLEANUP_INTERVAL_S
                self.cleanup(now)
            for instance in self.instance_client.fleet.take_probes(now):
                self._start_probe(instance)
            due = self.instance_client.fleet.next_deadline()
            wait_s = _IDLE_S if due is None else min(_IDLE_S, max(0.01, due - now))
            self._wake.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def probe_now(self) -> None:
        """Somebody has joined."""
        self._wake.set()

    async def supports_push(self, instance: Instance) -> bool:
        """Whether it takes a push ticket. Waits only for an instance that nothing is known of, for
        a bounded time, once a second.
        """
        if (
            instance not in self._readings
            and time.monotonic() >= self._probed_at.get(instance, -inf) + _REPROBE_INTERVAL_S
        ):
            await asyncio.shield(self._start_probe(instance))
        reading = self._readings.get(instance)
        return reading is not None and reading.is_push

    def forget(self, instance: Instance) -> None:
        """It has failed: what comes back may be another incarnation."""
        for known in (self.latest, self._readings, self._received_when_ill, self._probed_at):
            known.pop(instance, None)

    def forget_instance(self, instance: Instance) -> None:
        """It has left the fleet."""
        self.forget(instance)
        self._process_start.pop(instance, None)
        self.instance_client.metrics.forget(instance)
        self.on_instance_gone(instance)

    def side_channel(self, instance: Instance) -> Address | None:
        """Where it answers questions of the cluster's members, if it has said so."""
        reading = self._readings.get(instance)
        host, _, port = (
            reading.side_channel.rpartition(":") if reading is not None else ("", "", "")
        )
        return (
            Address(host.strip("[]"), int(port))
            if host and port.isdecimal() and 0 < int(port) < 65536
            else None
        )

    async def close(self) -> None:
        probes = list(self._probes.values())
        for task in probes:
            task.cancel()
        await asyncio.gather(*probes, return_exceptions=True)

    def _start_probe(self, instance: Instance) -> "asyncio.Task[None]":
        task = self._probes.get(instance)
        if task is None:
            task = self._probes[instance] = asyncio.create_task(self._probe(instance))
            task.add_done_callback(lambda _: self._probes.pop(instance, None))
        return task

    async def _probe(self, instance: Instance) -> None:
        try:
            await self._probe_pages(instance, self.latest.setdefault(instance, MetricsWatcher()))
        finally:
            self._probed_at[instance] = time.monotonic()

    async def _probe_pages(self, instance: Instance, watcher: MetricsWatcher) -> None:
        try:
            async with asyncio.timeout(self.instance_client.options.timeouts.probe):
                status, _ = await self._get(instance, "/health")
                page_status, page = await self._get(instance, "/metrics")
        except (UpstreamError, TimeoutError) as error:
            self.instance_client.fleet.note_probe_failed(
                instance, time.monotonic(), describe_error(error)
            )
            watcher.forget()
            self._fail_pending_if_silent(instance)
            return
        now = time.monotonic()
        self._received_when_ill.pop(instance, None)
        if status == 200:
            self.instance_client.fleet.note_probe_passed(instance, now)
        else:
            self.instance_client.fleet.note_probe_failed(instance, now, f"its health is {status}")
        reading = read_metrics(page if page_status == 200 else b"")
        self._readings[instance] = reading
        self._note_restart(instance, reading, now)
        growth = watcher.note(reading, now)
        self.instance_client.time_series.note_instances(
            growth.tokens, growth.moved_bytes, now, growth.over_s
        )

    def _fail_pending_if_silent(self, instance: Instance) -> None:
        """Not a byte has come from it between two looks in vain, and its role can do without it:
        what waits for it to begin an answer is tried elsewhere rather than at the end of a long
        deadline. Streams that have begun stay, as nobody else can go on with them.
        """
        before, received = (
            self._received_when_ill.get(instance),
            self.instance_client.num_received(instance),
        )
        self._received_when_ill[instance] = received
        member = self.instance_client.fleet.get(instance)
        if (
            before == received
            and member is not None
            and member.breaker.phase is BreakerPhase.EJECTED
        ):
            num_given_up = self.instance_client.fail_pending(instance)
            if num_given_up:
                _log.warning(
                    "given up %d waiting legs: instance is silent instance=%s",
                    num_given_up,
                    instance.url,
                )

    def _note_restart(self, instance: Instance, reading: InstanceReading, now: float) -> None:
        if reading.started_at is None:
            return
        before = self._process_start.get(instance)
        self._process_start[instance] = reading.started_at
        if before is not None and before != reading.started_at:
            _log.info("instance restarted instance=%s", instance.url)
            self.instance_client.fleet.restarted(instance, now)
            self.on_instance_gone(instance)

    async def _get(self, instance: Instance, path: str) -> tuple[int, bytes]:
        key = self.instance_client.options.access.instance_key
        with await self.instance_client.get(
            instance, path, [("Authorization", f"Bearer {key}")] if key else []
        ) as answer:
            return answer.status, await answer.read(
                MAX_PAGE_BYTES, self.instance_client.options.timeouts.probe
            )
