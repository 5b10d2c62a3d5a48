"""Prompts that fill an engine's whole cache and go on and on: a byte that lands in a block that it
was not meant for changes their tokens.

For blocks that a transfer which went wrong has given back: whoever owns them next must not find
anything of it in them, then or later.
"""

import asyncio
import mmap
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np
from tests.e2e.handovers import count, fresh
from tests.e2e.harness import Answer, Engine, Prompt, ask, ask_all, until

__all__ = ["SMALL", "Canaries", "disturb"]

NUM_BLOCKS = 48
SMALL = ("--num-gpu-blocks-override", str(NUM_BLOCKS))
"""A cache that `AT_ONCE` of them fill: 15 blocks each when they end, 13 when they begin."""
AT_ONCE = 3
PROMPT_TOKENS, NEW_TOKENS = 195, 44
FULL_BLOCKS = AT_ONCE * (PROMPT_TOKENS // 16 + 1)
"""39 of 48: then every block has soon had one of them for an owner, and a new one comes when one
ends.
"""


@dataclass
class Canaries:
    """What is asked again and again, and what a single engine answers."""

    prompts: Sequence[Prompt]
    right: Sequence[Answer]
    _asked: int = field(default=0, init=False)

    @classmethod
    def hatch(cls, plain: Engine) -> "Canaries":
        """More than fit into a cache, so that few are found in one."""
        prompts = [fresh(PROMPT_TOKENS, NEW_TOKENS) for _ in range(4 * AT_ONCE)]
        return cls(prompts, asyncio.run(ask_all(plain, prompts)))

    @asynccontextmanager
    async def fill(self, session: aiohttp.ClientSession, *engines: Engine) -> AsyncIterator[None]:
        """The body runs while they hold the blocks of all these engines; afterwards those under way
        end, and another generation of them.
        """
        stop = asyncio.Event()
        tasks = [
            asyncio.create_task(self._go_on(session, engine, stop))
            for engine in engines
            for _ in range(AT_ONCE)
        ]
        try:
            await until(
                "the canaries fill the caches", lambda: self._are_full(session, engines, tasks)
            )
            yield
            stop.set()
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def check(self, session: aiohttp.ClientSession, *engines: Engine) -> None:
        async with self.fill(session, *engines):
            pass

    async def _are_full(
        self,
        session: aiohttp.ClientSession,
        engines: Sequence[Engine],
        tasks: "Sequence[asyncio.Task[None]]",
    ) -> bool:
        for task in tasks:
            if task.done():
                task.result()
        return all(
            [
                await count(session, engine, "kvferry:num_used_blocks") >= FULL_BLOCKS
                for engine in engines
            ]
        )

    async def _go_on(
        self, session: aiohttp.ClientSession, engine: Engine, stop: asyncio.Event
    ) -> None:
        is_last = False
        while not is_last:
            is_last = stop.is_set()
            number = self._asked % len(self.prompts)
            self._asked += 1
            answer = await ask(session, engine, self.prompts[number])
            assert answer == self.right[number], (
                f"a canary died: {answer}, right: {self.right[number]}"
            )


def disturb(engine: Engine, *blocks: int) -> None:
    """Write into an engine's cache from outside, as a peer does that has it mapped. All layers of a
    block must lie side by side in it.
    """
    files = [
        each
        for member in engine.family()
        for each in Path(f"/proc/{member.pid}/fd").iterdir()
        if "kvferry-cache" in _link(each)
    ]
    assert len({each.stat().st_ino for each in files}) == 1, (
        f"an engine that knows no peers has one cache: {files}"
    )
    fd = os.open(files[0], os.O_RDWR)
    try:
        with mmap.mmap(fd, 0) as pages:
            cache = np.frombuffer(pages, np.uint8).reshape(NUM_BLOCKS, -1)
            for block in blocks:
                # Not by whole tokens: attention does not see in which order they lie.
                cache[block] = np.roll(cache[block], cache.shape[1] // 2 + 8)
            del cache
    finally:
        os.close(fd)


def _link(file: Path) -> str:
    try:
        return os.readlink(file)
    except OSError:  # closed meanwhile
        return ""
