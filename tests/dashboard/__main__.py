"""Takes the pictures in docs/images: `make screenshots`."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from tests.dashboard.browser import open_page, start_browser
from tests.dashboard.page_server import raise_stage
from tests.dashboard.scenes import busy_scene

IMAGES = Path(__file__).parents[2] / "docs" / "images"
MAX_BYTES = 200_000


@dataclass(frozen=True)
class Picture:
    name: str
    size: tuple[int, int]
    scheme: str
    hash: str = ""
    top: str = ""
    """What is at the top of it."""


PICTURES = (
    Picture("dashboard", (1280, 1080), "light"),
    Picture("dashboard-timeline", (1280, 760), "dark", "#request=told", "requests-title"),
    Picture("dashboard-narrow", (400, 860), "dark"),
)


async def take(port: int, picture: Picture) -> Path:
    path = IMAGES / f"{picture.name}.png"
    async with raise_stage(busy_scene()) as stage, open_page(port) as page:
        await page.resize(*picture.size)
        await page.set_scheme(picture.scheme)
        await page.open(stage.url + picture.hash)
        await page.until("document.getElementById('connection').textContent === 'live'")
        await stage.was_asked_again()
        if picture.top:
            await page.run(
                "(document.activeElement.blur(), "
                f"document.getElementById('{picture.top}').scrollIntoView())"
            )
        await page.photograph(path)
    return path


def main() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    with start_browser() as port:
        for picture in PICTURES:
            path = asyncio.run(take(port, picture))
            size = path.stat().st_size
            print(f"{path.relative_to(IMAGES.parents[1])}: {size:,} bytes")
            if size > MAX_BYTES:
                raise SystemExit(f"{path.name} is over {MAX_BYTES:,} bytes")


if __name__ == "__main__":
    main()
