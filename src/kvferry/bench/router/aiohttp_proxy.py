"""A minimal P/D proxy on aiohttp, as a baseline for a router that uses a framework for its HTTP.

Written for the benchmark. P gets a request for one token; D gets the client's request with P's
parameters, and its stream is passed on as it arrives. There is one instance of each role, and
nothing of what a router adds: no health checks, no policy, no retries, no limits. Like our router
it runs on uvloop. It needs aiohttp and uvloop, and nothing of kvferry.
"""

import argparse
import json
from collections.abc import AsyncIterator
from typing import Any

import uvloop
from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

MAX_BODY_BYTES = 64 * 1024 * 1024
PREFILL_LEG = {"stream": False, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
JSON = {"Content-Type": "application/json"}


class AiohttpProxy:
    """The proxy: one session with keep-alive connections to both instances."""

    def __init__(self, prefill: str, decode: str) -> None:
        self._prefill = prefill
        self._decode = decode
        self._session: ClientSession | None = None

    async def open_session(self, _: web.Application) -> AsyncIterator[None]:
        """Keep a session without limits open for as long as the application runs."""
        async with ClientSession(
            connector=TCPConnector(limit=0), timeout=ClientTimeout(), auto_decompress=False
        ) as self._session:
            yield

    async def serve(self, request: web.Request) -> web.StreamResponse:
        assert self._session is not None
        body: dict[str, Any] = json.loads(await request.read())
        leg = json.dumps(body | PREFILL_LEG).encode()
        async with self._session.post(
            self._prefill + request.path, data=leg, headers=JSON
        ) as answer:
            answer.raise_for_status()
            body["kv_transfer_params"] = json.loads(await answer.read())["kv_transfer_params"]
        leg = json.dumps(body).encode()
        async with self._session.post(
            self._decode + request.path, data=leg, headers=JSON
        ) as answer:
            reply = web.StreamResponse(status=answer.status)
            reply.content_type = answer.content_type
            await reply.prepare(request)
            async for data in answer.content.iter_any():
                await reply.write(data)
            await reply.write_eof()
        return reply


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="localhost")
    parser.add_argument("--port", type=int, default=8000)
    for role, port in (("prefiller", 8100), ("decoder", 8200)):
        parser.add_argument(f"--{role}-hosts", default="localhost")
        parser.add_argument(f"--{role}-ports", type=int, default=port)
    given = parser.parse_args()
    proxy = AiohttpProxy(
        f"http://{given.prefiller_hosts}:{given.prefiller_ports}",
        f"http://{given.decoder_hosts}:{given.decoder_ports}",
    )
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.cleanup_ctx.append(proxy.open_session)
    for path in ("/v1/completions", "/v1/chat/completions"):
        app.router.add_post(path, proxy.serve)
    loop = uvloop.new_event_loop()
    web.run_app(app, host=given.host, port=given.port, access_log=None, print=None, loop=loop)


if __name__ == "__main__":
    main()
