"""A router that does what the toy proxy of vLLM's own tests does, and no more, as a program.

One request to P with `max_tokens` 1, then the client's request to D with the parameters P answered. It has no deadline, no retry, gives
nothing back to P, answers 200 before it has asked D, and calls every answer JSON: a connector has to live with routers like it.
"""

import argparse
import uuid
from collections.abc import AsyncIterator
from itertools import cycle
from typing import Any

import aiohttp
from aiohttp import web

PREFILL_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
SESSION = web.AppKey("SESSION", aiohttp.ClientSession)


def make_app(prefill: list[str], decode: list[str]) -> web.Application:
    prefillers, decoders = cycle(prefill), cycle(decode)

    async def forward(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        headers = {"X-Request-Id": str(uuid.uuid4())}
        session = request.app[SESSION]
        async with session.post(f"{next(prefillers)}{request.path}", json=prefill_leg(body), headers=headers) as answered:
            answered.raise_for_status()
            params = (await answered.json()).get("kv_transfer_params")
        if params:
            body["kv_transfer_params"] = params
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        async with session.post(f"{next(decoders)}{request.path}", json=body, headers=headers) as answered:
            answered.raise_for_status()
            async for chunk in answered.content.iter_any():
                await response.write(chunk)
        return response

    app = web.Application(client_max_size=64 << 20)
    app.cleanup_ctx.append(_session)
    app.add_routes([web.post("/v1/completions", forward), web.post("/v1/chat/completions", forward)])
    app.add_routes([web.get("/healthcheck", _healthy), web.get("/health", _healthy)])
    return app


def prefill_leg(body: dict[str, Any]) -> dict[str, Any]:
    leg = {key: value for key, value in body.items() if key not in ("stream_options", "min_tokens")}
    leg |= {"kv_transfer_params": PREFILL_PARAMS, "stream": False, "max_tokens": 1}
    if "max_completion_tokens" in leg:
        leg["max_completion_tokens"] = 1
    return leg


async def _session(app: web.Application) -> AsyncIterator[None]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as app[SESSION]:
        yield


async def _healthy(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefill", nargs="+", required=True)
    parser.add_argument("--decode", nargs="+", required=True)
    given = parser.parse_args()
    web.run_app(make_app(given.prefill, given.decode), host="127.0.0.1", port=given.port, print=None)
