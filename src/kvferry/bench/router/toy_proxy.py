"""A stand-in for vLLM's toy proxy, with the same libraries; needs an interpreter with those
libraries.

Written for the benchmark from a description of the toy proxy's behaviour. One httpx client per
instance, without limits or timeouts. P gets a request for one token; D gets the client's request
with P's parameters. Instances are chosen round-robin. The response starts before D gets the
request, and its content type is JSON. Needs fastapi, httpx and uvicorn, and nothing of kvferry.
"""

import argparse
import itertools
import os
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

PREFILL_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Proxy:
    """The proxy: one client per instance of both roles."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str]) -> None:
        self._urls = {"prefill": prefill, "decode": decode}
        self._turns: dict[str, Iterator[httpx.AsyncClient]] = {}

    @asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with AsyncExitStack() as stack:
            for role, urls in self._urls.items():
                clients = [
                    httpx.AsyncClient(timeout=None, base_url=url, limits=limits) for url in urls
                ]
                for client in clients:
                    await stack.enter_async_context(client)
                self._turns[role] = itertools.cycle(clients)
            yield

    async def completions(self, request: Request) -> StreamingResponse:
        return await self._serve("/v1/completions", request)

    async def chat(self, request: Request) -> StreamingResponse:
        return await self._serve("/v1/chat/completions", request)

    async def health(self) -> dict[str, Any]:
        return {
            "status": "ok",
            "prefill_instances": len(self._urls["prefill"]),
            "decode_instances": len(self._urls["decode"]),
        }

    async def _serve(self, path: str, request: Request) -> StreamingResponse:
        body = await request.json()
        headers = {
            "Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY')}",
            "X-Request-Id": str(uuid.uuid4()),
        }
        answer = await next(self._turns["prefill"]).post(
            path, json=_prefill_leg(body), headers=headers
        )
        answer.raise_for_status()
        params = answer.json().get("kv_transfer_params")
        if params:
            body["kv_transfer_params"] = params
        chunks = _relay(next(self._turns["decode"]), path, body, headers)
        return StreamingResponse(chunks, media_type="application/json")


async def _relay(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], headers: dict[str, str]
) -> AsyncIterator[bytes]:
    async with client.stream("POST", path, json=body, headers=headers) as answer:
        answer.raise_for_status()
        async for chunk in answer.aiter_bytes():
            yield chunk


def _prefill_leg(body: dict[str, Any]) -> dict[str, Any]:
    leg = {key: value for key, value in body.items() if key not in ("stream_options", "min_tokens")}
    leg |= {"kv_transfer_params": PREFILL_PARAMS, "stream": False, "max_tokens": 1}
    if "max_completion_tokens" in leg:
        leg["max_completion_tokens"] = 1
    return leg


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="localhost")
    parser.add_argument("--port", type=int, default=8000)
    for role, port in (("prefiller", 8100), ("decoder", 8200)):
        parser.add_argument(f"--{role}-hosts", f"--{role}-host", nargs="+", default=["localhost"])
        parser.add_argument(
            f"--{role}-ports", f"--{role}-port", nargs="+", type=int, default=[port]
        )
    given = parser.parse_args()
    prefill = [
        f"http://{host}:{port}"
        for host, port in zip(given.prefiller_hosts, given.prefiller_ports, strict=True)
    ]
    decode = [
        f"http://{host}:{port}"
        for host, port in zip(given.decoder_hosts, given.decoder_ports, strict=True)
    ]
    proxy = Proxy(prefill, decode)
    app = FastAPI(lifespan=proxy.lifespan)
    app.add_api_route("/v1/completions", proxy.completions, methods=["POST"], response_model=None)
    app.add_api_route("/v1/chat/completions", proxy.chat, methods=["POST"], response_model=None)
    for path in ("/healthcheck", "/health"):
        app.add_api_route(path, proxy.health, methods=["GET"])
    uvicorn.run(app, host=given.host, port=given.port)


if __name__ == "__main__":
    main()
