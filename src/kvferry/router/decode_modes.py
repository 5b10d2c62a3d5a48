"""Which decode instances take a push ticket, as their `/metrics` say. Runs on the event loop.

That page is the one place where both engines, the embedded one and vLLM, let a connector speak without a request. An instance is asked
before the first request that could go to it together with P's leg. Later looks are taken in the background: it may have been restarted
with another connector. One that does not say that it pushes is given what P has answered, which is right for every engine.
"""

import asyncio
import time
from dataclasses import dataclass

import aiohttp

from kvferry.router.instance_metrics import MAX_PAGE_BYTES, read_metrics
from kvferry.router.instances import Instance

__all__ = ["DecodeModes", "says_push"]

ASK_TIMEOUT_S = 5.0
LOOK_AGAIN_S = 30.0


def says_push(metrics: bytes) -> bool:
    return read_metrics(metrics).is_push


@dataclass(frozen=True, slots=True)
class _Seen:
    is_push: bool
    at: float


class DecodeModes:
    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._seen: dict[Instance, _Seen] = {}
        self._asking: dict[Instance, asyncio.Task[None]] = {}

    async def pushes(self, instance: Instance) -> bool:
        """Waits only for an instance that nothing is known of, and that for a bounded time."""
        seen = self._seen.get(instance)
        if seen is None or time.monotonic() >= seen.at + LOOK_AGAIN_S:
            asking = self._ask_once(instance)
            if seen is None:
                await asyncio.shield(asking)
                seen = self._seen.get(instance)
        return seen is not None and seen.is_push

    def forget(self, instance: Instance) -> None:
        """It has failed: what comes back may be another life."""
        self._seen.pop(instance, None)

    async def close(self) -> None:
        asking = list(self._asking.values())
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    def _ask_once(self, instance: Instance) -> "asyncio.Task[None]":
        task = self._asking.get(instance)
        if task is None:
            task = self._asking[instance] = asyncio.create_task(self._ask(instance))
            task.add_done_callback(lambda _: self._asking.pop(instance, None))
        return task

    async def _ask(self, instance: Instance) -> None:
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S), self._session.get(f"{instance.url}/metrics", allow_redirects=False) as answer:
                page = await _read(answer) if answer.status == 200 else b""
        except (aiohttp.ClientError, TimeoutError):
            page = b""
        self._seen[instance] = _Seen(says_push(page), time.monotonic())


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    """The page, or its beginning."""
    parts, size = [], 0
    async for part in answer.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > MAX_PAGE_BYTES:
            break
    return b"".join(parts)
