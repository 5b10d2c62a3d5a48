"""Probes the `/health` and `/metrics` pages of the instances. Runs on the event loop.

`/metrics` is the only place where the embedded engine and vLLM both let a connector publish data
without a request. Each probe is a separate task, so that an instance that hangs delays no other
probe.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from kvferry.logs import repeats_of
from kvferry.router.fleet.health import BreakerPhase
from kvferry.router.fleet.instance_metrics import (
    MAX_PAGE_BYTES,
    InstanceReading,
    MetricsWatcher,
    read_metrics,
)
from kvferry.router.fleet.instances import Instance
from kvferry.router.http.messages import UpstreamError
from kvferry.router.http.via import LOOP_DETECTED
from kvferry.router.serving.instance_client import LEADS_BACK, InstanceClient, describe_error
from kvferry.types import Address

_log = logging.getLogger(__name__)

_IDLE_S = 1.0
_CLEANUP_INTERVAL_S = 30.0
_REPROBE_INTERVAL_S = 1.0
_SETTLE_S = 1.0
"""Time in which an instance begins to work on a request that was sent to it."""


@dataclass(slots=True)
class _SignsOfLife:
    """What the probes of one instance have shown."""

    answered_at: float = -inf
    """When the last probe began that the instance answered."""
    silent_since: float = inf
    """End of the first failed probe since which the instance has sent nothing."""
    received_when_ill: int | None = None
    """`num_received` at the last failed probe; None if the last probe was answered."""

    def is_suspect(self, sent_at: float) -> bool:
        """True if a request sent at this time may have made the instance silent: the instance
        answered no probe after the request, and was not silent before it.
        """
        return self.answered_at - _SETTLE_S < sent_at < self.silent_since


@dataclass(slots=True)
class InstanceWatcher:
    """Runs the probes and keeps the latest reading of each instance."""

    instance_client: InstanceClient
    on_instance_gone: Callable[[Instance], object]
    """Called when an instance has left the fleet or has restarted: its blocks are gone."""
    latest: dict[Instance, MetricsWatcher] = field(default_factory=dict)
    """Latest figures of each instance."""
    cleanup: Callable[[float], object] = lambda now: None
    """Called every `_CLEANUP_INTERVAL_S` with the time, to drop expired entries."""
    _cleanup_at: float = 0.0
    _probed_at: dict[Instance, float] = field(default_factory=dict)
    _readings: dict[Instance, InstanceReading] = field(default_factory=dict)
    """Latest transfer mode and side channel of each instance. Unlike figures, a reading stays valid
    until a leg fails or another incarnation answers.
    """
    _signs: dict[Instance, _SignsOfLife] = field(default_factory=dict)
    _process_start: dict[Instance, float] = field(default_factory=dict)
    """Start time of each instance's process; a change means a restart."""
    _probes: dict[Instance, "asyncio.Task[None]"] = field(default_factory=dict)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Probe and expire instances until cancelled."""
        while True:
            now = time.monotonic()
            for instance in self.instance_client.fleet.expire(now):
                _log.info(
                    "instance did not renew its registration in time instance=%s", instance.url
                )
                self.forget_instance(instance)
            if now >= self._cleanup_at:
                self._cleanup_at = now + _CLEANUP_INTERVAL_S
                self.cleanup(now)
            for instance in self.instance_client.fleet.take_probes(now):
                self._start_probe(instance)
            due = self.instance_client.fleet.next_deadline()
            # At least 10 ms, so that overdue probes cannot turn this into a busy loop.
            wait_s = _IDLE_S if due is None else min(_IDLE_S, max(0.01, due - now))
            self._wake.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def probe_now(self) -> None:
        """Wake the loop, because an instance has joined or changed."""
        self._wake.set()

    async def supports_push(self, instance: Instance) -> bool:
        """Whether the instance accepts push tickets; waits as `side_channel` does."""
        reading = await self._reading(instance)
        return reading is not None and reading.is_push

    async def _reading(self, instance: Instance) -> InstanceReading | None:
        """The latest reading. Waits for a probe only if nothing is known about the instance, for a
        bounded time, and at most once a second.
        """
        if (
            instance not in self._readings
            and time.monotonic() >= self._probed_at.get(instance, -inf) + _REPROBE_INTERVAL_S
        ):
            # Shielded: the probe serves other waiters even if this request is cancelled.
            await asyncio.shield(self._start_probe(instance))
        return self._readings.get(instance)

    def forget_mode(self, instance: Instance) -> None:
        """Drop the transfer mode and the side channel of a failed instance, which may return as a
        new incarnation with others: the next request that needs them waits for a probe.
        """
        self._readings.pop(instance, None)
        self._probed_at.pop(instance, None)

    def forget_instance(self, instance: Instance) -> None:
        """Drop everything about an instance that has left the fleet."""
        self.forget_mode(instance)
        for known in (self.latest, self._signs, self._process_start):
            known.pop(instance, None)
        self.instance_client.metrics.forget(instance)
        self.on_instance_gone(instance)

    async def side_channel(self, instance: Instance) -> Address | None:
        """The instance's side channel, if reported. Waits for a probe if nothing is known about
        the instance.
        """
        return _side_channel(await self._reading(instance))

    def known_side_channel(self, instance: Instance) -> Address | None:
        """The instance's side channel according to its last probe; None if it is not known."""
        return _side_channel(self._readings.get(instance))

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
        began = time.monotonic()
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
        self._signs[instance] = _SignsOfLife(answered_at=began)
        if status == 200:
            self.instance_client.fleet.note_probe_passed(instance, now)
        else:
            reason = LEADS_BACK if status == LOOP_DETECTED else f"its health is {status}"
            self.instance_client.fleet.note_probe_failed(instance, now, reason)
        reading = read_metrics(page if page_status == 200 else b"")
        self._readings[instance] = reading
        self._note_restart(instance, reading, now)
        counts = (reading.load.generated_tokens, reading.load.prompt_tokens)
        self.instance_client.fleet.note_tokens(instance, counts, now)
        growth = watcher.note(reading, now)
        self.instance_client.time_series.note_instances(
            growth.tokens, growth.moved_bytes, now, growth.over_s
        )

    def _fail_pending_if_silent(self, instance: Instance) -> None:
        """Fail pending requests of an instance that is ejected and silent.

        If no bytes arrived between two failed probes, requests without the beginning of an answer
        are retried elsewhere at once instead of at the end of a long timeout, except those that may
        have made the instance silent. Streams that have begun continue, because no other instance
        can take over a stream.
        """
        signs = self._signs.setdefault(instance, _SignsOfLife())
        received = self.instance_client.num_received(instance)
        if signs.received_when_ill != received:
            signs.received_when_ill, signs.silent_since = received, time.monotonic()
            return
        member = self.instance_client.fleet.get(instance)
        if member is not None and member.breaker.phase is BreakerPhase.EJECTED:
            num_given_up = self.instance_client.fail_pending(instance, signs.is_suspect)
            if num_given_up:
                _log.warning(
                    "failed %d waiting legs, because the instance does not answer instance=%s",
                    num_given_up,
                    instance.url,
                    extra=repeats_of(instance),
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


def _side_channel(reading: InstanceReading | None) -> Address | None:
    return None if reading is None else Address.parse(reading.side_channel)
