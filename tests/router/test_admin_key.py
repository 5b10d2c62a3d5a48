"""Tests the admin key that a real `kvferry proxy` makes, and a router behind a real nginx."""

import asyncio
import json
import shutil
import socket
import stat
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tests.ports import reserve_port
from tests.router.proxy_process import ended, proxy_process
from tests.router.stubs import StubEngine, prefills, stub_engine
from tests.router.test_proxy import EVENTS, STREAMED

DEADLINE_S = 60.0
NGINX = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
needs_nginx = pytest.mark.skipif(
    NGINX is None,
    reason="there is no nginx here; `make setup-nginx` installs it (Debian, Ubuntu: as root)",
)
ADMIN_PATHS = (
    ("GET", "/admin/instances"),
    ("POST", "/admin/instances"),
    ("DELETE", "/admin/instances"),
    ("POST", "/admin/instances/drain"),
    ("GET", "/dashboard/state"),
    ("GET", "/dashboard/requests/x"),
)
ORDER = {"role": "decode", "url": "http://127.0.0.1:1"}


def status(url: str, method: str = "GET", key: str = "") -> int:
    request = urllib.request.Request(url, json.dumps(ORDER).encode(), method=method)
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_router_makes_its_own_admin_key_and_says_how_to_use_it(tmp_path: Path) -> None:
    file = tmp_path / "kvferry" / "admin-key"
    with proxy_process(tmp_path) as router:
        assert f'-H "Authorization: Bearer $(cat {file})" {router.url}/admin/inst' in router.printed
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        key = file.read_text()
        assert len(key) == 64
        assert key not in router.printed
        for method, path in ADMIN_PATHS:
            assert status(router.url + path, method) == 401, path
            assert status(router.url + path, method, "0" * 64) == 401, path
        assert status(router.url + "/admin/instances", "POST", key) == 201
        assert status(router.url + "/admin/instances", "DELETE", key) == 200
    with proxy_process(tmp_path) as router:
        assert status(router.url + "/admin/instances", "GET", key) == 200


# -- behind nginx --


@contextmanager
def nginx(directory: Path, upstream: str) -> Iterator[str]:
    """Run nginx in front of a server, with nothing but `proxy_pass` set; yield its URL."""
    port = reserve_port()
    paths = "".join(
        f"{name}_temp_path {directory}/{name};"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (directory / "nginx.conf").write_text(
        f"daemon off; master_process off; pid {directory}/pid; events {{}}\n"
        f"http {{ access_log off; {paths}\n"
        f"server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass {upstream}; }} }} }}\n"
    )
    command = [
        str(NGINX),
        "-p",
        str(directory),
        "-e",
        "stderr",
        "-c",
        str(directory / "nginx.conf"),
    ]
    with subprocess.Popen(command) as process, ended(process):
        _wait_until_listening(port, process)
        yield f"http://127.0.0.1:{port}"


def _wait_until_listening(port: int, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        assert process.poll() is None, "nginx ended"
        assert time.monotonic() < deadline, "nginx does not listen"
        try:
            socket.create_connection(("127.0.0.1", port), DEADLINE_S).close()
        except ConnectionRefusedError:
            time.sleep(0.01)
        else:
            return


@needs_nginx
def test_behind_nginx_the_admin_api_is_refused_and_streams_are_not_held_back(
    tmp_path: Path,
) -> None:
    """A client of nginx has the address 127.0.0.1 and sends a Host that names this machine, which
    is what `proxy_pass` sends by default.
    """

    async def scene() -> None:
        go_on = asyncio.Event()

        async def streams_in_two_parts(
            request: web.Request, body: dict[str, Any]
        ) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(EVENTS[0])
            await go_on.wait()
            await response.write(b"".join(EVENTS[1:]))
            return response

        async with (
            asyncio.timeout(DEADLINE_S),
            stub_engine(StubEngine(prefills)) as p,
            stub_engine(StubEngine(streams_in_two_parts)) as d,
            aiohttp.ClientSession() as session,
        ):
            ports = ("--prefiller-ports", str(p.port), "--decoder-ports", str(d.port))
            with proxy_process(tmp_path, *ports) as router, nginx(tmp_path, router.url) as url:
                for method, path in ADMIN_PATHS:
                    async with session.request(method, url + path, json=ORDER) as answer:
                        assert (answer.status, path) == (401, path)
                key = (tmp_path / "kvferry" / "admin-key").read_text()
                sent = {"Authorization": f"Bearer {key}"}
                async with session.get(f"{url}/admin/instances", headers=sent) as answer:
                    assert len((await answer.json())["instances"]) == 2
                async with session.post(f"{url}/v1/completions", json=STREAMED) as answer:
                    assert await answer.content.readany() == EVENTS[0], "D has sent no more"
                    go_on.set()
                    assert await answer.read() == b"".join(EVENTS[1:])

    asyncio.run(scene())
