"""Tests the dashboard page in a real browser, with states made by the router's own builders."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from tests.dashboard.browser import Page, open_page
from tests.dashboard.page_server import Stage, raise_stage
from tests.dashboard.scenes import (
    HOSTILE,
    NOW,
    Scene,
    busy_scene,
    engine_page,
    hostile_scene,
    large_scene,
    watcher,
)

from kvferry.router.fleet.instance_metrics import MetricsWatcher
from kvferry.router.timeline import RequestEvent, RequestOutcome

pytestmark = pytest.mark.slow

LIVE = "document.getElementById('connection').textContent === 'live'"
Play = Callable[[Stage, Page], Awaitable[None]]


@asynccontextmanager
async def opened(
    browser: int, scene: Scene, hash_: str = "", api_key: str = ""
) -> AsyncIterator[tuple[Stage, Page]]:
    """Open the page and wait until it is live. At the end, check that the page had no errors and
    sent requests only to its own server.
    """
    async with raise_stage(scene, api_key) as stage, open_page(browser) as page:
        await page.resize(1280, 900)
        await page.open(stage.url + hash_)
        if not api_key:
            await page.until(LIVE)
        yield stage, page
        assert page.problems == []
        assert [
            url
            for url in page.asked
            if not url.startswith((f"http://127.0.0.1:{stage.port}/dashboard", "data:,"))
        ] == []


def rows(table: str) -> str:
    return (
        f"[...document.querySelectorAll('#{table} tbody tr')].map(row => "
        "[...row.children].map(cell => cell.textContent))"
    )


def perform(browser: int, scene: Scene, play: Play, hash_: str = "") -> None:
    async def show() -> None:
        async with opened(browser, scene, hash_) as (stage, page):
            await play(stage, page)
            assert page.failed_loads == []

    asyncio.run(show())


def test_instances_are_shown_with_role_health_and_load(browser: int) -> None:
    async def play(stage: Stage, page: Page) -> None:
        shown = await page.run(rows("instances"))
        assert [row[:2] for row in shown] == [[one.name, one.role] for one in stage.scene.instances]
        assert [row[2].split(",")[0] for row in shown] == [
            "healthy",
            "healthy",
            "ejected",
            "healthy",
            "half open",
            "draining",
        ]
        assert shown[0][3:7] == ["7", "6", "2", "71 %"]
        assert shown[2][2] == "ejected, 5 failed in a row, tried again in 6.2 s, no metrics"
        assert shown[2][4:7] == ["–", "–", "–"]
        assert "Connection refused" in shown[2][9]
        assert await page.texts("#instances-sum") == ["3 of 6 healthy"]

    perform(browser, busy_scene(), play)


def test_leases_and_transfers_are_shown_for_instances_that_tell(browser: int) -> None:
    async def play(stage: Stage, page: Page) -> None:
        shown = await page.run(rows("kv"))
        assert [row[0] for row in shown] == [
            one.name for one in stage.scene.instances if one.watcher is not None
        ]
        assert shown[0][2:5] == ["14", "896", "0"]
        assert shown[2][4:8] == ["3", "296 MiB/s", "81.7 k", "47.1 GiB"]
        assert await page.texts("#kv-sum") == ["23 leases on 1408 blocks, 4 transfers in flight"]

    perform(browser, busy_scene(), play)


def test_tiers_are_shown_with_hit_rate_fill_and_traffic(browser: int) -> None:
    async def play(stage: Stage, page: Page) -> None:
        shown = await page.run(rows("tiers"))
        assert shown == [
            ["10.0.0.11:8100prefill", "62 %of 12.4 k tokens", "cpu", "100 %32 GiB of 32 GiB",
             "16.4 k", "300 MiB/s", "75 %", "120 MiB/s", "60", ""],
            ["disk", "25 %125 GiB of 500 GiB", "64 k", "100 MiB/s", "25 %", "120 MiB/s", "–",
             "3 refused"],
            ["object", "3 GiB, no limit", "1536", "–", "–", "–", "–", ""],
            ["10.0.0.12:8100prefill", "–", "cpu", "100 %32 GiB of 32 GiB",
             "16.4 k", "–", "–", "–", "–", ""],
            ["disk", "25 %125 GiB of 500 GiB", "64 k", "–", "–", "–", "–", ""],
            ["object", "3 GiB, no limit", "1536", "–", "–", "–", "–", ""],
        ]  # fmt: skip
        assert await page.texts("#tiers-sum") == [
            "62 % of 12.4 k prompt tokens looked up in the last minute came from tiers"
        ]
        assert await page.run(BAR_PARTS) == [
            pytest.approx(part, abs=0.01) for part in (0.62, 1, 0.25, 1, 0.25)
        ]
        # Only the tier that has refused chunks is a warning; a full tier is not.
        assert await page.run(WARNINGS) == ["3 refused"]
        skipped = await page.run("document.querySelector('#tiers .hits').title")
        assert skipped == "300 more tokens were found, but computing them was faster"

    perform(browser, busy_scene(), play)


BAR_PARTS = """[...document.querySelectorAll('#tiers .meter')].filter(bar => bar.checkVisibility())
  .map(bar => bar.firstElementChild.offsetWidth / bar.offsetWidth)"""
"""How much of each visible bar is coloured."""
WARNINGS = """(() => {
  const amber = getComputedStyle(document.documentElement).getPropertyValue('--amber');
  const probe = document.body.appendChild(document.createElement('i'));
  probe.style.color = amber;
  const colour = getComputedStyle(probe).color;
  probe.remove();
  return [...document.querySelectorAll('#tiers tbody td')].filter(cell => getComputedStyle(cell).color === colour).map(cell => cell.textContent);
})()"""  # noqa: E501
"""The texts of the cells that have the colour of a warning."""


def test_the_tiers_follow_an_instance_and_its_tiers(browser: int) -> None:
    async def play(stage: Stage, page: Page) -> None:
        disk_only = b'kvferry:tier_used_bytes{tier="disk"} 5\n'
        stage.scene.instances[0] = replace(stage.scene.instances[0], watcher=watcher(disk_only))
        shown = await page.until(rows("tiers"), lambda found: len(found) == 4)
        assert [len(row) for row in shown] == [10, 10, 8, 8]
        assert shown[0][2:4] == ["disk", "5 B"]
        await page.click("#filter")
        await page.write("10.0.0.12")
        await page.until(rows("tiers"), lambda found: len(found) == 3)

    perform(browser, busy_scene(), play)


def test_without_tiers_the_page_has_no_section_for_them(browser: int) -> None:
    async def play(stage: Stage, page: Page) -> None:
        hidden = "!document.getElementById('tiers-section').checkVisibility()"
        assert await page.run(hidden) is False
        stage.scene.instances = [
            replace(one, watcher=watcher(engine_page(1, 0, 0.5, 0, 0, 0)))
            for one in stage.scene.instances
        ]
        await page.until(hidden)

    perform(browser, busy_scene(), play)


def test_the_page_follows_the_fleet(browser: int) -> None:
    async def play(stage: Stage, page: Page) -> None:
        await page.run("document.querySelector('#instances tbody tr').isSameNode = 'kept'")
        first, *others = stage.scene.instances
        stage.scene.instances = [
            replace(first, state="ejected", last_error="gone"),
            *others[1:],
            replace(others[0], name="10.0.0.99:8100"),
        ]
        shown = await page.until(rows("instances"), lambda found: found[0][2].startswith("ejected"))
        assert [row[0] for row in shown] == [one.name for one in stage.scene.instances]
        # The page changes the row and does not replace it, so the user's selection and focus stay.
        assert await page.run("document.querySelector('#instances tbody tr').isSameNode") == "kept"

    perform(browser, busy_scene(), play)


def test_plots_have_a_point_for_every_second_that_has_a_value(browser: int) -> None:
    scene = Scene()
    for second in range(10):
        scene.time_series.note_end(NOW - 10 + second, relayed_bytes=100)
        if second in (1, 5, 6):
            scene.time_series.note_ttft(0.4, NOW - 10 + second)

    async def play(stage: Stage, page: Page) -> None:
        counts = await page.run(
            "Object.fromEntries([...document.querySelectorAll('path.series')].map(p => "
            "[p.dataset.column, p.dataset.points]))"
        )
        assert (
            counts["requests"],
            counts["errors"],
            counts["ttft_p50"],
            counts["handover_p99"],
        ) == ("10", "10", "3", "0")
        drawn = await page.run(
            "document.querySelector('path[data-column=ttft_p50]').getAttribute('d')"
        )
        # One second alone, then two adjacent ones, at the right edge: 10 s are 10 of 60 units.
        assert [drawn.count(sign) for sign in "MLh"] == [2, 1, 1]
        xs = await page.run(
            "(() => { const box = document.querySelector('path[data-column=requests]').getBBox(); "
            "return [box.x, box.x + box.width]; })()"
        )
        assert xs == [50.5, 59.5]
        assert (await page.texts("figure:nth-of-type(2) .scale span"))[0] == "500 ms"

    perform(browser, scene, play)


def test_a_plot_tells_the_second_under_the_cursor_and_under_the_arrow_keys(browser: int) -> None:
    scene = Scene()
    for second in range(10):
        for _ in range(second):
            scene.time_series.note_end(NOW - 10 + second, relayed_bytes=100)

    async def play(stage: Stage, page: Page) -> None:
        await page.run("document.querySelector('figure svg').focus()")
        await page.press("ArrowLeft", 37)
        assert (await page.texts("figure:first-of-type .value"))[0] == "9"
        await page.press("ArrowLeft", 37)
        assert (await page.texts("figure:first-of-type .value"))[0] == "8"
        assert "2 s ago: all 8" in await page.run(
            "document.querySelector('figure svg').getAttribute('aria-label')"
        )

    perform(browser, scene, play)


BARS = """[...document.querySelectorAll('#phases tbody tr')].map(row => {
  const bar = row.querySelector('.track > span').getBoundingClientRect(), track = row.querySelector('.track').getBoundingClientRect();
  return [row.children[0].textContent, (bar.left - track.left) / track.width, bar.width / track.width, row.children[3].textContent];
})"""  # noqa: E501


def test_a_timeline_shows_its_phases_in_order_and_to_scale(browser: int) -> None:
    async def play(stage: Stage, page: Page) -> None:
        bars = await page.until(BARS)
        names = [
            "queued",
            "prefill",
            "lease",
            "blocks",
            "transfer",
            "confirm",
            "scheduled",
            "first token",
            "streaming",
        ]
        assert [bar[0] for bar in bars] == names
        began = [0, 0.1, 0.4, 0.45, 0.5, 0.65, 0.7, 0.72, 0.8]
        assert [bar[1] for bar in bars] == pytest.approx(began, abs=0.005)
        assert [bar[2] for bar in bars] == pytest.approx(
            [b - a for a, b in zip(began, [*began[1:], 1.0], strict=True)], abs=0.005
        )
        assert bars[4][3] == "10.0.0.21:8200, 12,582,912 bytes in 96 segments by shm"
        assert await page.texts("#timeline-note") == [""]

    perform(browser, busy_scene(), play, "#request=told")


def test_a_timeline_without_d_s_word_says_so(browser: int) -> None:
    async def play(stage: Stage, page: Page) -> None:
        bars = await page.until(BARS)
        assert [bar[0] for bar in bars] == ["queued", "prefill", "decode", "streaming"]
        assert "does not report when it attached" in (await page.texts("#timeline-note"))[0]

    perform(browser, busy_scene(), play, "#request=untold")


def test_a_request_is_opened_by_a_click_followed_to_its_end_and_closed(browser: int) -> None:
    async def play(stage: Stage, page: Page) -> None:
        scene = stage.scene
        one = scene.recent.begin("<live>", "/v1/completions", NOW - 2)
        one.mark(RequestEvent.PREFILL_BEGAN, NOW - 1, "p")
        await page.until(rows("requests"), lambda found: any(row[0] == "<live>" for row in found))
        await page.run(
            "[...document.querySelectorAll('#requests button')].find(b => b.textContent === "
            "'<live>').id = 'wanted'"
        )
        await page.click("#wanted")
        bars = await page.until(BARS, lambda found: len(found) == 2)
        assert [bar[0] for bar in bars] == ["queued", "prefill"]
        one.mark(RequestEvent.PREFILL_ENDED, NOW)
        scene.recent.end(one, RequestOutcome.FAILED, 502, NOW, "<b>no</b>")
        await page.until(
            "document.getElementById('timeline-facts').textContent",
            lambda text: "failed with status 502" in text,
        )
        assert "<b>no</b>" in (await page.texts("#timeline-facts"))[0]
        await page.click("#timeline-close")
        assert await page.run("[document.getElementById('timeline').hidden, location.hash]") == [
            True,
            "",
        ]

    perform(browser, busy_scene(), play)


def test_an_unknown_request_is_said_to_be_unknown(browser: int) -> None:
    async def show() -> None:
        async with opened(browser, busy_scene()) as (_, page):
            await page.click("#find-id")
            await page.write("nobody")
            await page.press("Enter", 13)
            await page.until(
                "document.getElementById('timeline-facts').textContent",
                lambda text: "no record of this request" in text,
            )

    asyncio.run(show())


def test_errors_are_listed_with_how_often_they_happened(browser: int) -> None:
    async def play(stage: Stage, page: Page) -> None:
        shown = await page.run(rows("errors"))
        assert [(row[1], row[2]) for row in shown] == [
            ("1 ×", "–"),
            ("37 ×", "503"),
            ("1 ×", "502"),
        ]
        assert shown[1][3:] == ["the queue is full; try again in a second", "cmpl-refused-36"]
        assert await page.run("document.getElementById('no-errors').hidden") is True

    perform(browser, busy_scene(), play)


def test_words_of_others_are_words_and_nothing_else(browser: int) -> None:
    async def play(stage: Stage, page: Page) -> None:
        await stage.was_asked_again()
        for name in (HOSTILE, "__proto__", "../../state", "a/b?c#d", "y" * 2000):
            await page.run(f"location.hash = '#request=' + encodeURIComponent({json.dumps(name)})")
            title = json.dumps(f"Timeline of {plain(name)}")
            await page.until("document.querySelectorAll('#phases tbody tr').length === 2")
            await page.until(f"document.getElementById('timeline-title').textContent === {title}")
        assert await page.run(
            "[window.hurt, document.querySelectorAll('img, b:not(figcaption b), i, u, main "
            "script').length]"
        ) == [None, 0]
        shown = await page.run(rows("instances"))
        assert shown[0][0] == plain(HOSTILE)
        assert shown[0][8] == "<i>x</i>"
        assert [len(row[0]) for row in shown[1:]] == [5000, 5000]
        tiers = await page.run(rows("tiers"))
        assert tiers[0][2:4] == ["<u>t</u>", "100 %8185 TiB of 0 B"]
        assert (len(tiers[1][0]), tiers[1][1], tiers[1][7]) == (256, "–", "9000 T refused")
        assert any(plain(HOSTILE) in row[3] for row in await page.run(rows("errors")))
        assert await page.run("document.documentElement.scrollWidth <= innerWidth") is True

    perform(browser, hostile_scene(), play)


def plain(text: str) -> str:
    return text.replace("\u202e", "\ufffd")


def test_a_script_that_got_into_the_page_would_not_run(browser: int) -> None:
    """The control: markup in the page would do harm if the security policy allowed it."""

    async def show() -> None:
        async with raise_stage(busy_scene()) as stage, open_page(browser) as page:
            await page.open(stage.url)
            await page.until(LIVE)
            await page.run(
                "document.body.insertAdjacentHTML('beforeend', '<img src=\"data:,\" "
                'onerror="window.hurt=1">\')'
            )
            await page.until(
                "true",
                lambda _: any("Content Security Policy" in problem for problem in page.problems),
            )
            assert await page.run("window.hurt") is None

    asyncio.run(show())


def test_a_lost_router_is_said_to_be_lost_and_found_again(browser: int) -> None:
    async def show() -> None:
        async with opened(browser, busy_scene()) as (stage, page):
            await stage.down()
            await page.until("!document.getElementById('lost').hidden")
            assert (
                await page.texts("#connection"),
                "Connection to the router lost" in (await page.texts("#lost"))[0],
            ) == (
                ["connection lost"],
                True,
            )
            assert len(await page.run(rows("instances"))) == 6
            await stage.up()
            await page.until(LIVE)
            assert await page.run("document.getElementById('lost').hidden") is True
            stage.status = 500
            await page.until(
                "document.getElementById('lost').textContent", lambda text: "status 500" in text
            )
            stage.status = 200
            await page.until(LIVE)

    asyncio.run(show())


def test_a_locked_router_is_opened_with_its_key_which_the_tab_keeps(browser: int) -> None:
    async def show() -> None:
        async with opened(browser, busy_scene(), api_key="secret") as (stage, page):
            await page.until("!document.getElementById('key-form').hidden")
            assert await page.run("document.getElementById('page').hidden") is True
            for key, is_right in (("wrong", False), ("secret", True)):
                await page.click("#key")
                await page.write(key)
                await page.press("Enter", 13)
                if not is_right:
                    await page.until(
                        "document.getElementById('key-refused').textContent",
                        lambda text: "This key was refused" in text,
                    )
            await page.until(LIVE)
            assert await page.run(
                "[document.getElementById('key-form').hidden, sessionStorage.length, "
                "localStorage.length]"
            ) == [
                True,
                1,
                0,
            ]
            assert "secret" not in "".join(page.asked)
            await page.open(stage.url)
            await page.until(LIVE)

    asyncio.run(show())


def test_a_fleet_of_a_hundred_is_shown_and_can_be_searched(browser: int) -> None:
    async def play(stage: Stage, page: Page) -> None:
        assert len(await page.run(rows("instances"))) == 100
        await page.click("#filter")
        await page.write("engine-04")
        shown: Any = await page.until(rows("instances"), lambda found: len(found) == 10)
        assert all(row[0].startswith("engine-04") for row in shown)
        assert (await page.texts("#instances-sum"))[0].endswith("90 not shown")

    perform(browser, large_scene(), play)


def test_a_router_without_instances_or_requests_says_so(browser: int) -> None:
    async def play(stage: Stage, page: Page) -> None:
        ids = ["no-instances", "no-kv", "no-requests", "no-errors"]
        assert await page.run(f"{ids}.map(id => document.getElementById(id).hidden)") == [False] * 4

    perform(browser, Scene(), play)


@pytest.mark.parametrize("width", [400, 1280])
def test_the_page_fits_its_window(browser: int, width: int) -> None:
    async def play(stage: Stage, page: Page) -> None:
        await page.resize(width, 800)
        await stage.was_asked_again()
        await page.until("document.querySelectorAll('#phases tbody tr').length === 9")
        assert await page.run("document.documentElement.scrollWidth") == width

    perform(browser, large_scene(), play, "#request=told")


CONTRASTS = """(() => {
  const channels = (text) => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const light = (colour) => channels(colour).map(c => c / 255).map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (node) => {
    while (node.parentElement && getComputedStyle(node).backgroundColor.startsWith('rgba(0, 0, 0, 0')) node = node.parentElement;
    return getComputedStyle(node).backgroundColor;
  };
  const found = [];
  for (const node of document.querySelectorAll('body *')) {
    if (![...node.childNodes].some(child => child.nodeType === 3 && child.textContent.trim()) || !node.checkVisibility()) continue;
    const [a, b] = [light(getComputedStyle(node).color), light(ground(node))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) found.push([node.textContent.slice(0, 40), ratio]);
  }
  return found;
})()"""  # noqa: E501
"""Finds visible texts whose contrast is below 4.5."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_word_can_be_read_in_both_schemes(browser: int, scheme: str) -> None:
    async def play(stage: Stage, page: Page) -> None:
        await page.set_scheme(scheme)
        await page.until("document.querySelectorAll('#phases tbody tr').length === 9")
        is_dark = (
            "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).every(c => c < 64)"
        )
        assert await page.run(is_dark) is (scheme == "dark")
        assert await page.run(CONTRASTS) == []
        await page.run("document.querySelector('h2').style.color = '#777777'")
        assert len(await page.run(CONTRASTS)) == 1

    perform(browser, busy_scene(), play, "#request=told")


def test_everything_that_can_be_used_can_be_reached_by_keyboard_and_has_a_name(
    browser: int,
) -> None:
    async def play(stage: Stage, page: Page) -> None:
        await page.until("document.querySelectorAll('#phases tbody tr').length === 9")
        tree = (await page.call("Accessibility.getFullAXTree"))["nodes"]
        used = [
            node
            for node in tree
            if node.get("role", {}).get("value")
            in ("button", "searchbox", "textbox", "table", "image", "region", "link")
        ]
        assert len(used) > 20
        nameless = [
            node["role"]["value"]
            for node in used
            if not node.get("name", {}).get("value") and node["role"]["value"] != "table"
        ]
        assert nameless == []
        reached = set()
        await page.run("document.querySelector('svg').focus()")
        for _ in range(60):
            await page.press("Tab", 9)
            reached.add(
                await page.run("document.activeElement.id || document.activeElement.tagName")
            )
        assert {"filter", "find-id", "timeline-close", "svg", "BUTTON", "DIV"} <= reached

    perform(browser, busy_scene(), play, "#request=told")


def test_silence_of_metrics_is_shown_as_silence_and_not_as_nothing(browser: int) -> None:
    scene = busy_scene()
    scene.instances = [replace(one, watcher=MetricsWatcher()) for one in scene.instances]

    async def play(stage: Stage, page: Page) -> None:
        assert {cell for row in await page.run(rows("instances")) for cell in row[4:8]} == {"–"}
        assert await page.run(rows("kv")) == []

    perform(browser, scene, play)
