"""Takes the screenshots in docs/images from real engines and a real router under load:
`make screenshots`.

Two prefill engines with storage tiers and two decode engines with a tiny model run behind the
router. Clients hold conversations, ask questions about a few long documents, and send single
requests, short and long, until the screenshots are taken. The prefill engines' own caches are
small, so the documents come from the tiers. The page's plots are one minute wide while the router
is younger than a minute, so the run is that long.
"""

import asyncio
import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from tests.dashboard.browser import open_page, start_browser
from tests.dashboard.tiered_fleet import TieredFleet, start_tiered_fleet

IMAGES = Path(__file__).parents[2] / "docs" / "images"
MAX_BYTES = 400_000
LOAD_S = 53.0
"""Seconds of load before the first screenshot."""
NUM_TALKERS = 8
NUM_SINGLES = 4
MAX_TURNS = 5
NUM_DOCUMENTS = 8
PREFILL_FLAGS = ("--num-gpu-blocks-override", "200")
TEXT = (
    "blocks of the cache move from the engine that computed a prompt to the engine that answers "
    "while its lease holds and every reader confirms what it has read before any token is used"
)


@dataclass(frozen=True)
class Picture:
    name: str
    size: tuple[int, int]
    scheme: str
    shows_timeline: bool = False


PICTURES = (
    Picture("dashboard", (1280, 1130), "light"),
    Picture("dashboard-narrow", (400, 744), "dark"),
    Picture("dashboard-timeline", (1280, 760), "dark", shows_timeline=True),
)


@dataclass
class Load:
    """Clients that send requests to the router until `run` is cancelled."""

    session: aiohttp.ClientSession
    model: str
    long_ids: list[str] = field(default_factory=list)
    """Ids of the long single requests that were answered."""
    _rng: random.Random = field(default_factory=lambda: random.Random(0))
    _documents: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self._documents = [self._text(200, 300) for _ in range(NUM_DOCUMENTS)]

    async def run(self) -> None:
        async with asyncio.TaskGroup() as clients:
            for number in range(NUM_TALKERS):
                clients.create_task(self._hold_conversations(number))
            for number in range(NUM_SINGLES):
                clients.create_task(self._send_singles(number))

    async def _hold_conversations(self, client: int) -> None:
        for talk in range(1_000_000):
            name = f"talk-{client}-{talk}"
            messages: list[dict[str, str]] = []
            for turn in range(self._rng.randint(2, MAX_TURNS)):
                messages.append({"role": "user", "content": self._text(10, 30)})
                body = {"conversation_id": name, "messages": messages, "max_tokens": 16}
                await self._ask("chat/completions", f"{name}-turn-{turn + 1}", body)
                messages.append({"role": "assistant", "content": self._text(5, 10)})
                await asyncio.sleep(self._rng.uniform(0.3, 1.5))

    async def _send_singles(self, client: int) -> None:
        for count in range(1_000_000):
            kind = ("short", "question", "short", "long")[count % 4]
            prompt = self._text(200, 300) if kind == "long" else self._text(10, 40)
            if kind == "question":
                prompt = f"{self._rng.choice(self._documents)} {prompt}"
            name = f"{kind}-{client}-{count}"
            await self._ask("completions", name, {"prompt": prompt, "max_tokens": 16})
            if kind == "long":
                self.long_ids.append(name)
            await asyncio.sleep(self._rng.uniform(0.3, 1.5))

    async def _ask(self, path: str, request_id: str, body: dict[str, Any]) -> None:
        """Send one streamed request and read its answer to the end."""
        async with self.session.post(
            f"/v1/{path}",
            json={"model": self.model, "stream": True, "ignore_eos": True, **body},
            headers={"X-Request-Id": request_id},
        ) as answer:
            text = await answer.text()
            if answer.status != 200:
                raise RuntimeError(f"{request_id}: {answer.status} {text}")

    def _text(self, fewest: int, most: int) -> str:
        return " ".join(self._rng.choices(TEXT.split(), k=self._rng.randint(fewest, most)))


async def take_all(browser_port: int, fleet: TieredFleet) -> None:
    async with aiohttp.ClientSession(fleet.router.url) as session:
        async with session.get("/v1/models") as answer:
            model = (await answer.json())["data"][0]["id"]
        load = Load(session, model)
        running = asyncio.create_task(load.run())
        await asyncio.wait([running], timeout=LOAD_S)
        try:
            for picture in PICTURES:
                if running.done():
                    running.result()
                print(await take(browser_port, fleet.link, picture, load.long_ids[-1]))
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def take(browser_port: int, link: str, picture: Picture, long_id: str) -> str:
    path = IMAGES / f"{picture.name}.png"
    async with open_page(browser_port) as page:
        await page.resize(*picture.size)
        await page.set_scheme(picture.scheme)
        fragment = f"&request={long_id}" if picture.shows_timeline else ""
        await page.open(f"{link}{fragment}")
        await page.until("document.getElementById('connection').textContent === 'live'")
        await page.until("document.querySelectorAll('#requests tbody tr').length > 0")
        if picture.shows_timeline:
            await page.until("document.querySelectorAll('#phases tbody tr').length > 5")
            await page.run(
                "(document.activeElement.blur(), "
                "document.getElementById('requests-title').closest('section').scrollIntoView())"
            )
        await page.photograph(path)
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise SystemExit(f"{path.name} is over {MAX_BYTES:,} bytes")
    return f"{path.relative_to(IMAGES.parents[1])}: {size:,} bytes"


def main() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    with (
        start_browser() as port,
        tempfile.TemporaryDirectory(prefix="kvferry-screenshots-") as directory,
        start_tiered_fleet(Path(directory), *PREFILL_FLAGS, size=2, transports=["nixl"]) as fleet,
    ):
        asyncio.run(take_all(port, fleet))


if __name__ == "__main__":
    main()
