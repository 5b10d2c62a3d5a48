"""Stops P in the middle of a push: both D have received part of a prompt's KV, and the rest is
missing.

With transports of a single host, P runs for a moment at a time, so that its chunks are far apart;
between hosts, the cable is throttled.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import aiohttp
from tests.e2e.canaries import SMALL
from tests.e2e.handovers import fresh, is_loading
from tests.e2e.harness import Answer, Prompt, assert_quiescent
from tests.e2e.hosts import Hosts, skip_unless_possible
from tests.e2e.push_legs import Legs, Shape, count_now

LONG = 600
"""Prompt length in tokens, 4 KiB each: many chunks, and several seconds at `RATE`."""
CHUNKED = ("--num-gpu-blocks-override", "120", "--max-num-batched-tokens", "16")
RATE = "6mbit"
SOME_BYTES = 400_000
MOMENT_S = 0.01
PATIENCE_S = 60.0
ATTEMPTS = 5
EXTRA = {
    "kv_lease_duration": 6,
    "handshake_timeout": 2,
    "confirm_timeout": 2,
    "read_timeout": 12,
    "receive_timeout": 25,
    "push_registration_timeout": 10,
}


@dataclass
class PartialPush:
    prompt: Prompt
    prefilling: "asyncio.Task[Answer]"
    decoding: "dict[str, asyncio.Task[Answer]]"
    """The decode legs by failure policy."""

    @property
    def tasks(self) -> "list[asyncio.Task[Answer]]":
        return [self.prefilling, *self.decoding.values()]

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@dataclass
class Stage:
    legs: Legs
    transport: str
    hosts: Hosts | None
    """None if all engines run on one host."""
    is_p_stopped: bool = False

    @classmethod
    @contextmanager
    def opened(cls, transport: str, directory: Path, model: Path) -> Iterator["Stage"]:
        """Start all engines on one host."""
        with Legs.opened(
            directory, model, Shape({**EXTRA, "transports": [transport]}, CHUNKED, SMALL)
        ) as legs:
            yield cls(legs, transport, None)

    @classmethod
    @contextmanager
    def between_hosts(cls, transport: str, directory: Path, model: Path) -> Iterator["Stage"]:
        skip_unless_possible()
        with Hosts.opened(3) as hosts:
            shape = Shape({**EXTRA, "transports": [transport]}, CHUNKED, SMALL, hosts.members)
            with Legs.opened(directory, model, shape) as legs:
                yield cls(legs, transport, hosts)

    def stop_p(self) -> None:
        self.legs.p.pause()
        self.is_p_stopped = True

    def continue_p(self) -> None:
        if self.is_p_stopped:
            self.legs.p.resume()
            self.is_p_stopped = False

    def kill_p(self) -> None:
        """Kill P, also if it is stopped."""
        self.legs.p.kill(is_stopped=self.is_p_stopped)
        self.is_p_stopped = False

    @asynccontextmanager
    async def partial_push(self, session: aiohttp.ClientSession) -> AsyncIterator[PartialPush]:
        """Start both legs and run the body in the middle of the push. P is stopped until the body
        continues it or ends.
        """
        with self._slow_cable():
            begun = await self._begin(session)
            try:
                yield begun
            finally:
                self.continue_p()
                await begun.end()

    async def settle(self, session: aiohttp.ClientSession) -> None:
        """Wait until every block is free and P has no registration."""
        await assert_quiescent(session, *self.legs.engines)
        await self.legs.until_registered(session, 0)

    @contextmanager
    def _slow_cable(self) -> Iterator[None]:
        if self.hosts is None:
            yield
            return
        self.hosts[0].throttle(RATE)
        try:
            yield
        finally:
            self.hosts[0].hurry()

    async def _begin(self, session: aiohttp.ClientSession) -> PartialPush:
        """Start requests until one is stopped in the middle: on a busy machine, a request may end
        before the test can stop P.
        """
        for _ in range(ATTEMPTS):
            prompt, ticket = fresh(LONG), self.legs.ticket()
            moved = await self._moved(session)
            decoding = self.legs.decode_legs(session, prompt, ticket)
            await self.legs.until_registered(session, len(decoding))
            if self.hosts is None:
                self.stop_p()
            begun = PartialPush(
                prompt,
                asyncio.create_task(self.legs.prefill_leg(session, prompt, ticket)),
                decoding,
            )
            try:
                await self._go_on_until(partial(self._has_moved, session, begun, moved))
                self.stop_p()
                if await self._is_midway(session, begun):
                    return begun
            except BaseException:
                self.continue_p()
                await begun.end()
                raise
            self.continue_p()
            await asyncio.gather(*begun.tasks)
        raise AssertionError("no request was seen in the middle")

    async def _go_on_until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not await condition():
            assert time.monotonic() < deadline, f"nothing has moved within {PATIENCE_S:g} s"
            if self.hosts is None:
                self.continue_p()
            await asyncio.sleep(MOMENT_S)
            if self.hosts is None:
                self.stop_p()

    async def _has_moved(
        self, session: aiohttp.ClientSession, begun: PartialPush, before: list[float]
    ) -> bool:
        is_over = any(task.done() for task in begun.decoding.values())
        return is_over or all(
            now > then for now, then in zip(await self._moved(session), before, strict=True)
        )

    async def _is_midway(self, session: aiohttp.ClientSession, begun: PartialPush) -> bool:
        return not any(task.done() for task in begun.decoding.values()) and await is_loading(
            session, self.legs.decoders.values()
        )

    async def _moved(self, session: aiohttp.ClientSession) -> list[float]:
        """Bytes moved so far. Between hosts: how often P's host has sent `SOME_BYTES`, which is
        more than control messages need. On one host: the bytes that each D has received.
        """
        if self.hosts is not None:
            return [self.hosts[0].sent_bytes() // SOME_BYTES]
        return [
            await count_now(session, d, f"kvferry:transfer_bytes_total/{self.transport}")
            for d in self.legs.decoders.values()
        ]
