"""Serves the dashboard page as the router does. A test can change the state behind the page,
protect it with a key, and stop the server.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
from aiohttp import web
from tests.dashboard.scenes import Scene

from kvferry.router.dashboard.files import DATA_HEADERS, DashboardFiles
from kvferry.router.dashboard.request_view import view_request
from kvferry.router.dashboard.state import build_state, encode_state


@dataclass
class Stage:
    scene: Scene
    api_key: str = ""
    port: int = 0
    status: int = 200
    """HTTP status of the responses to state requests."""
    num_asked: int = 0
    files: DashboardFiles = field(default_factory=DashboardFiles.load)
    _runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/dashboard"

    async def up(self) -> None:
        app = web.Application()
        app.router.add_get("/dashboard/state", self._state)
        app.router.add_get("/dashboard/requests/{id}", self._request)
        app.router.add_get("/{path:.*}", self._file)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def down(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def was_asked_again(self) -> None:
        """Wait for two more state requests: after the second, the page shows the response to the
        first.
        """
        wanted = self.num_asked + 2
        async with asyncio.timeout(40):
            while self.num_asked < wanted:
                await asyncio.sleep(0.02)

    async def _file(self, request: web.Request) -> web.Response:
        found = self.files.find(request.path)
        if found is None:
            return web.Response(status=404)
        return web.Response(body=found.body, headers=dict(found.headers))

    async def _state(self, request: web.Request) -> web.Response:
        self.num_asked += 1
        if not self._is_let_in(request):
            return web.Response(status=401, body=b"{}", headers=dict(DATA_HEADERS))
        scene = self.scene
        state = build_state(
            scene.router, scene.instances, scene.time_series, scene.recent, scene.now
        )
        return web.Response(
            status=self.status, body=encode_state(state), headers=dict(DATA_HEADERS)
        )

    async def _request(self, request: web.Request) -> web.Response:
        if not self._is_let_in(request):
            return web.Response(status=401, body=b"{}", headers=dict(DATA_HEADERS))
        scene, name = self.scene, request.match_info["id"]
        timeline = scene.recent.find(name)
        if timeline is None:
            return web.Response(status=404, body=b"{}", headers=dict(DATA_HEADERS))
        view = view_request(timeline, scene.records.get(name, ()), scene.now)
        return web.Response(body=msgspec.json.encode(view), headers=dict(DATA_HEADERS))

    def _is_let_in(self, request: web.Request) -> bool:
        return not self.api_key or request.headers.get("Authorization") == f"Bearer {self.api_key}"


@asynccontextmanager
async def raise_stage(scene: Scene, api_key: str = "") -> AsyncIterator[Stage]:
    stage = Stage(scene, api_key)
    await stage.up()
    try:
        yield stage
    finally:
        await stage.down()
