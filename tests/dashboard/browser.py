"""Drives a real headless browser over the DevTools protocol: opens pages, clicks, takes
screenshots, and records what the page logs and requests.
"""

import asyncio
import base64
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

MISSING = "there is no Chromium here; `make setup-browser` installs it (Debian, Ubuntu: as root)"
DEADLINE_S = 60.0
_FLAGS = (
    "--headless",
    "--no-sandbox",  # no sandbox is available as root and in containers; the pages are our own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-port=0",
    "--window-size=1280,900",
)


def find_browser() -> str | None:
    named = os.environ.get("KVFERRY_BROWSER")
    return named or next(
        (
            found
            for name in ("chromium", "chromium-browser", "google-chrome")
            if (found := shutil.which(name))
        ),
        None,
    )


class Page:
    """One tab. Records from the start what the page logs and requests."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._reader = asyncio.create_task(self._read())
        self.asked: list[str] = []
        """URLs that the page requested."""
        self.problems: list[str] = []
        """Exceptions, console errors and violations of the page's security policy."""
        self.failed_loads: list[str] = []
        """The browser's messages about requests that failed or got no response."""

    async def call(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        await self._socket.send_str(json.dumps({"id": number, "method": method, "params": params}))
        async with asyncio.timeout(DEADLINE_S):
            return await answer

    async def start(self) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until("location.href !== 'about:blank' && document.readyState === 'complete'")

    async def run(self, script: str) -> Any:
        """Evaluate an expression in the page and return its value."""
        result = await self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in result:
            raise AssertionError(f"{script!r}: {result['exceptionDetails']}")
        return result["result"].get("value")

    async def until(self, script: str, is_right: Callable[[Any], object] = bool) -> Any:
        """Evaluate the expression until `is_right` accepts its value, and return the value; fails
        at the deadline.
        """
        value: Any = None
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not is_right(value := await self.run(script)):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(
                f"{script!r} never became right; it is {value!r}; problems: {self.problems}"
            ) from None
        return value

    async def texts(self, selector: str) -> list[str]:
        found: list[str] = await self.run(
            f"[...document.querySelectorAll({json.dumps(selector)})].map(node => node.textContent)"
        )
        return found

    async def click(self, selector: str) -> None:
        """Click the middle of the element with mouse events, as a user does."""
        box = await self.run(
            f"(() => {{ const node = document.querySelector({json.dumps(selector)}); "
            f"node.scrollIntoView({{block: 'center'}});"
            " const box = node.getBoundingClientRect(); return [box.left + box.width / 2, box.top "
            "+ box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.call(
                "Input.dispatchMouseEvent",
                type=kind,
                x=box[0],
                y=box[1],
                button="left",
                clickCount=1,
            )

    async def write(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, code: int) -> None:
        text = {"text": "\r"} if key == "Enter" else {}
        await self.call(
            "Input.dispatchKeyEvent",
            type="keyDown",
            key=key,
            code=key,
            windowsVirtualKeyCode=code,
            **text,
        )
        await self.call(
            "Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code
        )

    async def resize(self, width: int, height: int) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    async def set_scheme(self, scheme: str) -> None:
        await self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )

    async def photograph(self, path: Path) -> None:
        shot = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=False)
        path.write_bytes(base64.b64decode(shot["data"]))

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._socket.close()

    async def _read(self) -> None:
        async for message in self._socket:
            news = json.loads(message.data)
            if "id" in news:
                waiting = self._waiting.pop(news["id"], None)
                if waiting is not None and not waiting.done():
                    if "error" in news:
                        waiting.set_exception(AssertionError(str(news["error"])))
                    else:
                        waiting.set_result(news["result"])
            else:
                self._note(news["method"], news["params"])

    def _note(self, event: str, params: Any) -> None:
        match event:
            case "Network.requestWillBeSent":
                self.asked.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.problems.append(str(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.problems.append(str(params["args"]))
            case "Log.entryAdded" if params["entry"]["source"] == "network":
                self.failed_loads.append(params["entry"]["text"])
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.problems.append(params["entry"]["text"])


@contextmanager
def start_browser() -> Iterator[int]:
    """Start a browser and yield its DevTools port; end it and delete its profile afterwards."""
    browser = find_browser()
    assert browser is not None, MISSING
    with tempfile.TemporaryDirectory(prefix="kvferry-browser-", ignore_cleanup_errors=True) as home:
        process = subprocess.Popen(
            [browser, *_FLAGS, f"--user-data-dir={home}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield _port(Path(home), process)
        finally:
            # The browser's helper processes are in its process group, and no others are.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _port(home: Path, process: "subprocess.Popen[bytes]") -> int:
    """Return the port; the browser writes it to a file once it listens."""
    written, deadline = home / "DevToolsActivePort", time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline and process.poll() is None:
        lines = written.read_text().splitlines() if written.exists() else []
        if len(lines) > 1:
            return int(lines[0])
        time.sleep(0.05)
    raise AssertionError(f"the browser did not start; it ended with {process.poll()}")


@asynccontextmanager
async def open_page(port: int) -> AsyncIterator[Page]:
    """Open a new tab, and close it afterwards."""
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        async with session.put("/json/new?about:blank") as answer:
            tab = await answer.json()
        page = Page(await session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0))
        try:
            await page.start()
            yield page
        finally:
            await page.close()
            async with session.get(f"/json/close/{tab['id']}") as answer:
                await answer.read()
