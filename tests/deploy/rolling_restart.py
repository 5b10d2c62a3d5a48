"""A rolling restart of a fleet of processes under streams.

Every engine and every router in turn gets SIGTERM, as from a service manager, and starts again at
the same address, while clients keep a number of streams open. Clients know both routers, as a load
balancer does: it sends nothing new to a router that is about to end. `python -m
tests.deploy.rolling_restart --help` runs it by hand.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from tests.e2e.harness import Cluster, Engine, Prompt, ask_all, metrics, new_session, until

from kvferry.engine.make_model.writer import make_model

DRAIN_S = 60.0
LONGEST_STREAM_S = 120.0
EXTRA = {"kv_lease_duration": 60}
"""Longer than a restart, so that blocks that become free were read and did not expire."""


@dataclass(frozen=True, slots=True)
class Stream:
    """One stream as the client has seen it."""

    prompt: Prompt
    token_ids: tuple[int, ...] = ()
    failure: str = ""
    """"": the stream came to its regular end."""


@dataclass(slots=True)
class Restarts:
    """What a rolling restart has shown."""

    streams: list[Stream] = field(default_factory=list)
    num_restarted: int = 0
    num_waited_for: list[int] = field(default_factory=list)
    """Requests and leases that each process still had when it was told to end."""
    took_s: float = 0.0

    @property
    def failures(self) -> list[str]:
        return [stream.failure for stream in self.streams if stream.failure]


class Fleet:
    """P and D engines behind two routers; each process can be restarted at its address."""

    def __init__(self, cluster: Cluster, num_prefill: int, num_decode: int) -> None:
        self.cluster = cluster
        names = [
            *(f"prefill {number}" for number in range(num_prefill)),
            *(f"decode {number}" for number in range(num_decode)),
        ]
        starting = {name: self._start(name) for name in names}
        self.engines = {name: process.ready() for name, process in starting.items()}
        self._num_prefill = num_prefill
        routers = [self._start_router() for _ in range(2)]
        self.routers = [process.ready() for process in routers]

    def _start_router(self, port: int = 0) -> Any:
        engines = list(self.engines.values())
        prefill, decode = engines[: self._num_prefill], engines[self._num_prefill :]
        return self.cluster.proxy(prefill, decode, port=port)

    def _start(self, name: str, port: int = 0) -> Any:
        flags = ("--drain-timeout", f"{DRAIN_S:g}")
        return self.cluster.serve(name, *flags, extra=EXTRA, port=port)

    def restart(self, name: str) -> None:
        """Send SIGTERM, wait until the engine has ended by itself, and start it again."""
        self._stop(self.engines[name])
        self.engines[name] = self._start(name, self.engines[name].address.port).ready()

    def restart_router(self, router: Engine) -> None:
        """The same for a router that clients no longer choose."""
        self._stop(router)
        self.routers.append(self._start_router(router.address.port).ready())

    def _stop(self, engine: Engine) -> None:
        engine.process.terminate()
        engine.process.wait(DRAIN_S + 30)
        self.cluster.dismiss(engine.process)


async def roll(fleet: Fleet, num_streams: int, seed: int = 0) -> Restarts:
    """Restart every process of the fleet while `num_streams` streams are open at any time."""
    found, began, is_over = Restarts(), time.monotonic(), asyncio.Event()
    rng = random.Random(seed)
    prompts = _prompts(rng)
    opening: list[Engine] = []

    async def client(session: aiohttp.ClientSession) -> None:
        while not is_over.is_set():
            router = rng.choice(fleet.routers)
            found.streams.append(await stream(session, router, next(prompts), opening))

    async with new_session(LONGEST_STREAM_S) as session:
        clients = [asyncio.create_task(client(session)) for _ in range(num_streams)]
        try:
            for name in list(fleet.engines):
                found.num_waited_for.append(await _busy(session, fleet.engines[name]))
                await asyncio.to_thread(fleet.restart, name)
                found.num_restarted += 1
                await _until_known(session, fleet)
            for _ in range(len(fleet.routers)):
                router = fleet.routers.pop(0)
                found.num_waited_for.append(await _active(session, router, opening))
                await asyncio.to_thread(fleet.restart_router, router)
                found.num_restarted += 1
                await _until_known(session, fleet)
            # Streams must also go to the last engine that came back.
            await _busy(session, fleet.engines[name])
        finally:
            is_over.set()
            await asyncio.gather(*clients)
    found.took_s = time.monotonic() - began
    return found


async def _busy(session: aiohttp.ClientSession, engine: Engine) -> int:
    """Wait until the engine has requests or leases; return how many."""
    names = ("running", "waiting")
    count = 0

    async def has_work() -> bool:
        nonlocal count
        page = await metrics(session, engine)
        count = int(sum(page[f"vllm:num_requests_{name}"] for name in names))
        count += int(page["kvferry:num_delayed_frees"])
        return count > 0

    await until(f"{engine.process.name} has work", has_work, timeout_s=60)
    return count


async def _until_known(session: aiohttp.ClientSession, fleet: Fleet) -> None:
    """Wait until every router uses all engines again: the next process may end only then."""

    async def is_known() -> bool:
        pages = [await metrics(session, router) for router in fleet.routers]
        usable = [page["kvferry:router_usable_instances"] for page in pages]
        return min(usable) == len(fleet.engines)

    await until("the routers use all engines", is_known, timeout_s=60)


async def _active(session: aiohttp.ClientSession, router: Engine, opening: list[Engine]) -> int:
    """Wait until the router has answered what was on its way. Return how many streams it has."""

    async def has_answered() -> bool:
        return router not in opening

    await until("the router has answered what was on its way", has_answered, timeout_s=60)
    # The page itself is one of the active requests.
    return int((await metrics(session, router))["kvferry:router_active_requests"]) - 1


def _prompts(rng: random.Random) -> Iterator[Prompt]:
    """Yield prompts that differ, so that each needs its own handover."""
    while True:
        token_ids = tuple(rng.randrange(10, 500) for _ in range(rng.randrange(20, 200)))
        yield Prompt(token_ids, max_tokens=rng.randrange(8, 64))


async def stream(
    session: aiohttp.ClientSession, router: Engine, prompt: Prompt, opening: list[Engine]
) -> Stream:
    """Read one stream to its end; a failure of any kind is a value. `opening` has the router until
    it has answered.
    """
    token_ids: list[int] = []
    opening.append(router)
    try:
        try:
            response = await session.post(
                f"{router.url}/v1/completions", json=prompt.body() | {"stream": True}
            )
        finally:
            opening.remove(router)
        async with response:
            if response.status != 200:
                return Stream(prompt, failure=f"{response.status}: {await response.text():.300}")
            async for line in response.content:
                text = line.decode().removeprefix("data: ").strip()
                if text == "[DONE]":
                    return Stream(prompt, tuple(token_ids))
                if text:
                    event = json.loads(text)
                    if "error" in event:
                        return Stream(prompt, failure=f"error event: {event['error']}")
                    token_ids += event["choices"][0].get("token_ids") or ()
    except (aiohttp.ClientError, TimeoutError) as error:
        return Stream(prompt, failure=f"{type(error).__name__}: {error}")
    return Stream(prompt, failure="the stream has no end")


async def wrong(plain: Engine, streams: list[Stream]) -> list[Stream]:
    """The streams whose tokens differ from those of a single engine."""
    answers = await ask_all(plain, [found.prompt for found in streams], concurrency=32)
    return [
        found
        for found, answer in zip(streams, answers, strict=True)
        if answer.token_ids != (found.token_ids,)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--prefill", type=int, default=3)
    parser.add_argument("--decode", type=int, default=3)
    parser.add_argument("--streams", type=int, default=50)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder) / "tiny")
        with Cluster(Path(folder), Path(folder) / "tiny") as cluster:
            plain = cluster.serve("plain", is_plain=True).ready()
            fleet = Fleet(cluster, arguments.prefill, arguments.decode)
            found = asyncio.run(roll(fleet, arguments.streams))
            differ = asyncio.run(wrong(plain, [one for one in found.streams if not one.failure]))
    print(
        f"{found.num_restarted} processes restarted in {found.took_s:.0f} s under "
        f"{arguments.streams} streams: {len(found.streams)} streams, "
        f"{len(found.failures)} failed, {len(differ)} with wrong tokens"
    )
    for failure in found.failures[:10]:
        print(failure)
    raise SystemExit(bool(found.failures or differ))


if __name__ == "__main__":
    main()
