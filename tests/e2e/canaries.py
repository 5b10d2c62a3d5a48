"""Canaries: requests that fill an engine's whole KV cache and run continuously. A byte written into
a block that belongs to a canary changes its tokens.

They check the blocks that a failed transfer has released: nothing of that transfer may be written
into those blocks after they have a new owner.
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

NUM_BLOCKS = 48
SMALL = ("--num-gpu-blocks-override", str(NUM_BLOCKS))
"""A cache that `AT_ONCE` canaries fill: each has 13 blocks at its start and 15 at its end."""
AT_ONCE = 3
PROMPT_TOKENS, NEW_TOKENS = 195, 44
FULL_BLOCKS = AT_ONCE * (PROMPT_TOKENS // 16 + 1)
"""39 of 48 blocks. When so many are in use, every block soon belongs to some canary, because a new
canary starts when one ends.
"""


@dataclass
class Canaries:
    """The canary prompts, and a single engine's answer to each."""

    prompts: Sequence[Prompt]
    right: Sequence[Answer]
    _asked: int = field(default=0, init=False)

    @classmethod
    def hatch(cls, plain: Engine) -> "Canaries":
        """Make more prompts than fit into a cache, so that a prefix cache holds few of them."""
        prompts = [fresh(PROMPT_TOKENS, NEW_TOKENS) for _ in range(4 * AT_ONCE)]
        return cls(prompts, asyncio.run(ask_all(plain, prompts)))

    @asynccontextmanager
    async def fill(self, session: aiohttp.ClientSession, *engines: Engine) -> AsyncIterator[None]:
        """Run the body while canaries fill the caches of these engines. Afterwards let the running
        canaries end, then one more round of them.
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
    """Write into an engine's cache from outside, as a peer does that has mapped it. All layers of a
    block must be contiguous in the cache.
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
                # The shift is not a whole number of tokens: attention does not depend on the order
                # of tokens in the cache.
                cache[block] = np.roll(cache[block], cache.shape[1] // 2 + 8)
            del cache
    finally:
        os.close(fd)


def _link(file: Path) -> str:
    try:
        return os.readlink(file)
    except OSError:  # closed in the meantime
        return ""
