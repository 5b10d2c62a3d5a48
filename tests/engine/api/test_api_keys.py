"""Tests that an engine with API keys serves only clients that send one."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.engine.api.stage import ScriptedEngine, stage

from kvferry.engine.api.context import CONTEXT, ApiSettings
from kvferry.web.api_keys import ApiKeys

SETTINGS = ApiSettings(api_keys=ApiKeys.of([("router", "sk-one"), ("own", "sk-two")]))


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/completions", 200),
        ("POST", "/v1/chat/completions", 200),
        ("POST", "/tokenize", 200),
        ("POST", "/detokenize", 200),
        ("GET", "/v1/models", 200),
        ("GET", "/version", 200),
        ("GET", "/metrics", 200),
        ("GET", "/kvferry/transfers", 200),
        ("GET", "/kvferry/transfers/x", 404),
        ("GET", "/nowhere", 404),
    ],
)
def test_every_route_needs_a_key(model: Path, method: str, path: str, status: int) -> None:
    async def scene() -> None:
        engine = ScriptedEngine()
        async with stage(engine, model, SETTINGS) as s:
            body: dict[str, Any] = {"prompt": "x", "max_tokens": 1, "tokens": [5]}
            if "chat" in path:
                body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
            for sent, expected in (
                ({}, 401),
                ({"Authorization": "Bearer sk-three"}, 401),
                ({"Authorization": "sk-one"}, 401),
                ({"Authorization": "Bearer sk-one"}, status),
                ({"Authorization": "bearer sk-two"}, status),
            ):
                before = len(engine.frames)
                async with s.session.request(
                    method, s.url + path, json=body, headers=sent
                ) as answer:
                    text = await answer.text()
                    assert (answer.status, sent) == (expected, sent), text
                if expected == 401:
                    assert answer.headers["WWW-Authenticate"] == "Bearer"
                    assert "the API key is missing or unknown" in text
                    assert len(engine.frames) == before

    asyncio.run(scene())


def test_health_needs_no_key_but_says_no_more_than_that_the_server_drains(model: Path) -> None:
    async def scene() -> None:
        async with stage(ScriptedEngine(), model, SETTINGS) as s:
            async with s.session.get(f"{s.url}/health") as answer:
                assert (answer.status, await answer.read()) == (200, b"")
            s.app[CONTEXT].drain.close()
            for sent, names in (
                ({}, {"status"}),
                (
                    {"Authorization": "Bearer sk-one"},
                    {"status", "requests", "leases", "blocks"},
                ),
            ):
                async with s.session.get(f"{s.url}/health", headers=sent) as answer:
                    assert (answer.status, set(await answer.json())) == (503, names)

    asyncio.run(scene())
