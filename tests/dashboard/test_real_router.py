"""Tests that the dashboard page of a real router shows the requests and instances that it
served.
"""

import asyncio
from typing import Any

import aiohttp
import pytest
from tests.dashboard.browser import Page, open_page
from tests.router.stubs import (
    AS_ADMIN,
    Stage,
    answers,
    completes,
    drops_connection,
    prefills,
    stage,
    streams,
)

pytestmark = pytest.mark.slow

ASK = {"prompt": "hello", "max_tokens": 3}
LIVE = "document.getElementById('connection').textContent === 'live'"
PHASES = (
    "[...document.querySelectorAll('#phases tbody tr')].map(row => [row.children[0].textContent, "
    "row.children[3].textContent])"
)


def rows(table: str) -> str:
    return (
        f"[...document.querySelectorAll('#{table} tbody tr')].map(row => "
        "[...row.children].map(cell => cell.textContent))"
    )


async def told(request: Any, body: dict[str, Any]) -> Any:
    """A fake D that also reports its transfers, as the embedded engine does."""
    if request.path.startswith("/kvferry/transfers/"):
        record = {
            "request_id": "cmpl-a:1-0-00000000",
            "age_s": 0.0,
            "attached_s": 0.0,
            "read_began_s": 0.0,
            "read_ended_s": 0.0,
            "bytes": 7,
        }
        return aiohttp.web.json_response(
            {"transfers": [{**record, "segments": 1, "transport": "shm", "confirmed_s": 0.0}]}
        )
    return await completes(request, body)


async def watcher(browser: int, s: Stage, page: Page, hash_: str = "") -> None:
    await page.resize(1280, 900)
    await page.open(f"{s.url}/dashboard#key=sk-admin{hash_}")
    await page.until(LIVE)


def test_requests_instances_and_errors_of_a_real_router_are_on_its_page(browser: int) -> None:
    async def scene() -> None:
        async with (
            stage([prefills, drops_connection], [told], probe_interval_s=0.2) as s,
            open_page(browser) as page,
        ):
            assert (await s.post(ASK, X_Request_Id="a:1"))[0] == 200
            assert (await s.post(ASK, X_Request_Id="a:2"))[0] == 502
            await watcher(browser, s, page, "&request=a%3A1")
            shown = {row[0]: row for row in await page.run(rows("requests"))}
            assert (shown["a:1"][1:3], shown["a:2"][1:3]) == (
                ["answered", "200"],
                ["failed", "502"],
            )
            assert shown["a:1"][6:8] == [
                f"http://127.0.0.1:{s.p.port}",
                f"http://127.0.0.1:{s.d.port}",
            ]
            instances = await page.run(rows("instances"))
            assert [row[1] for row in instances] == ["prefill", "prefill", "decode"]
            assert "closed the connection" in instances[1][9]
            (error,) = await page.run(rows("errors"))
            assert (error[1:3], error[4]) == (["1 ×", "502"], "a:2")
            phases = await page.until(PHASES)
            assert [phase[0] for phase in phases if phase[0] != "received"] == [
                "queued", "prefill", "lease", "blocks",
                "transfer", "confirm", "first token", "streaming",
            ]  # fmt: skip
            assert any("7 bytes in 1 segments by shm" in phase[1] for phase in phases)
            await page.until(
                "document.querySelector('path[data-column=requests]').dataset.points > 0"
            )
            assert page.problems == page.failed_loads == []
            assert [
                url for url in page.asked if not url.startswith((f"{s.url}/dashboard", "data:,"))
            ] == []

    asyncio.run(scene())


def test_a_d_that_tells_nothing_is_said_to_tell_nothing(browser: int) -> None:
    async def scene() -> None:
        d = streams([b"data: {}\n\n", b"data: [DONE]\n\n"])
        async with stage(prefills, d) as s, open_page(browser) as page:
            s.d.behaviour = unless_transfers(d)
            assert (await s.post({**ASK, "stream": True}, X_Request_Id="b"))[0] == 200
            await watcher(browser, s, page, "&request=b")
            assert [phase[0] for phase in await page.until(PHASES)] == [
                "queued",
                "prefill",
                "decode",
                "streaming",
            ]
            assert "does not report" in (await page.texts("#timeline-note"))[0]
            assert "relayed" in (await page.texts("#timeline-facts"))[0]

    asyncio.run(scene())


def unless_transfers(otherwise: Any) -> Any:
    async def behave(request: Any, body: dict[str, Any]) -> Any:
        if request.path.startswith("/kvferry"):
            return await answers(404, "{}")(request, body)
        return await otherwise(request, body)

    return behave


def test_a_router_with_an_admin_key_shows_nothing_without_it(browser: int) -> None:
    async def scene() -> None:
        async with stage(prefills, completes, admin_key="open") as s, open_page(browser) as page:
            assert (await s.post(ASK, X_Request_Id="secret.js"))[0] == 200
            for path in ("state", "requests/secret.js", "requests/none"):
                async with s.session.get(f"{s.url}/dashboard/{path}") as answer:
                    assert answer.status == 401, path
            async with s.session.get(
                f"{s.url}/dashboard/requests/secret.js", headers={"Authorization": "Bearer open"}
            ) as answer:
                assert (answer.status, (await answer.json())["id"]) == (200, "secret.js")
            await page.open(f"{s.url}/dashboard/")
            await page.until("!document.getElementById('key-form').hidden")
            assert "this path needs the admin key" in (await page.texts("#key-refused"))[0]
            await page.click("#key")
            await page.write("open")
            await page.press("Enter", 13)
            await page.until(LIVE)
            assert page.problems == []

    asyncio.run(scene())


def test_an_unchanged_file_is_not_sent_again() -> None:
    async def scene() -> None:
        async with stage(prefills, completes) as s:
            async with s.session.get(f"{s.url}/dashboard") as first:
                etag = first.headers["ETag"]
            async with s.session.get(
                f"{s.url}/dashboard", headers={"If-None-Match": etag}
            ) as second:
                assert (second.status, await second.read()) == (304, b"")
            async with s.session.get(f"{s.url}/dashboard/nothing.js") as missing:
                assert missing.status == 404

    asyncio.run(scene())


def test_a_refused_request_says_why_in_the_errors() -> None:
    async def scene() -> None:
        async with stage(prefills, completes, max_running=1, max_waiting=0) as s:
            entered = asyncio.Event()

            async def waits(request: Any, body: dict[str, Any]) -> Any:
                entered.set()
                await asyncio.Event().wait()

            s.d.behaviour = waits
            first = asyncio.create_task(s.post(ASK))
            await entered.wait()
            assert (await s.post(ASK))[0] == 503
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            async with s.session.get(f"{s.url}/dashboard/state", headers=AS_ADMIN) as answer:
                errors = (await answer.json())["errors"]
            assert [("queue is full" in error["text"], error["status"]) for error in errors] == [
                (True, 503)
            ]

    asyncio.run(scene())
