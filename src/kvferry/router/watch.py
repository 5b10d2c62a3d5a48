"""Looks after the instances: whether they are well, and what their `/metrics` say of them. Runs on the event loop.

That page is the one place where both engines, the embedded one and vLLM, let a connector speak without a request. Each instance is looked
at in turn, on its own: one that hangs holds up no other.
"""

import asyncio
import logging
import time
from dataclasses import dataclass, field

from kvferry.router.fleet import Fleet
from kvferry.router.http1.client import Target, Upstreams
from kvferry.router.http1.errors import UpstreamError
from kvferry.router.instance_metrics import InstanceMetrics, read_instance_metrics
from kvferry.router.instances import Instance
from kvferry.router.options import RouterOptions

__all__ = ["Watch"]

_log = logging.getLogger(__name__)

MAX_PAGE_BYTES = 16 * 1024 * 1024
_IDLE_S = 1.0


@dataclass(slots=True)
class Watch:
    options: RouterOptions
    fleet: Fleet
    upstreams: Upstreams
    seen: dict[Instance, InstanceMetrics] = field(default_factory=dict)
    """What each said last."""
    _looking: dict[Instance, "asyncio.Task[None]"] = field(default_factory=dict)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            now = time.monotonic()
            for instance in self.fleet.take_probes(now):
                self._look(instance)
            due = self.fleet.next_deadline()
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
        """Whether it takes a push ticket. Waits only for an instance that nothing is known of, and that for a bounded time."""
        if instance not in self.seen:
            await asyncio.shield(self._look(instance))
        seen = self.seen.get(instance)
        return seen is not None and seen.transfer_mode == "push"

    def forget(self, instance: Instance) -> None:
        """It has failed: what comes back may be another life."""
        self.seen.pop(instance, None)

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
            async with asyncio.timeout(self.options.health.timeout):
                status, _ = await self._get(instance, "/health")
                page_status, page = await self._get(instance, "/metrics")
        except (UpstreamError, TimeoutError) as error:
            self.fleet.note_probe(instance, False, time.monotonic(), str(error))
            return
        self.fleet.note_probe(instance, status == 200, time.monotonic(), "" if status == 200 else f"its health is {status}")
        metrics = read_instance_metrics(page if page_status == 200 else b"")
        before = self.seen.get(instance)
        if before is not None and before.started_at != metrics.started_at:
            _log.info("instance restarted instance=%s", instance.url)
            self.fleet.restarted(instance, time.monotonic())
        self.seen[instance] = metrics

    async def _get(self, instance: Instance, path: str) -> tuple[int, bytes]:
        timeout_s = self.options.health.timeout
        key = self.options.access.instance_key
        headers = [("Authorization", f"Bearer {key}")] if key else []
        target = Target(instance.address, instance.tls)
        async with await self.upstreams.send(
            target, "GET", path, headers, b"", connect_timeout_s=timeout_s, head_timeout_s=timeout_s
        ) as answer:
            return answer.status, await answer.read(MAX_PAGE_BYTES, timeout_s)
