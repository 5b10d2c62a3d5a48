"""Tests a router in front of real engines that serve only clients with an API key."""

import asyncio
from pathlib import Path

import pytest
from tests.e2e.harness import Cluster, Engine, Prompt, new_session, until

pytestmark = pytest.mark.slow


def key_file(directory: Path, key: str) -> str:
    path = directory / key
    path.touch(mode=0o600)
    path.write_text(f"{key}\n")
    return str(path)


def test_a_router_with_the_key_of_its_engines_moves_kv_between_them(
    tmp_path: Path, model: Path
) -> None:
    inner, outer = key_file(tmp_path, "sk-inner"), key_file(tmp_path, "sk-outer")

    async def check(p: Engine, d: Engine, router: Engine) -> None:
        async with new_session() as session:

            async def status(engine: Engine, path: str, key: str = "") -> int:
                sent = {"Authorization": f"Bearer {key}"} if key else {}
                async with session.get(engine.url + path, headers=sent) as answer:
                    return answer.status

            async def is_ready() -> bool:
                return await status(router, "/readyz") == 200

            await until("the router has reached its engines", is_ready)
            for engine in (p, d):
                assert await status(engine, "/metrics") == 401
                assert await status(engine, "/metrics", "sk-inner") == 200
                assert await status(engine, "/health") == 200
            body = Prompt(tuple(range(20, 120))).body()
            for key, expected in (("sk-inner", 401), ("sk-outer", 200)):
                sent = {"Authorization": f"Bearer {key}", "X-Request-Id": "one"}
                async with session.post(
                    f"{router.url}/v1/completions", json=body, headers=sent
                ) as answer:
                    assert answer.status == expected, await answer.text()
            # D has a record of a request only if its KV came from P.
            assert await status(d, "/kvferry/transfers/one", "sk-inner") == 200

    with Cluster(tmp_path, model) as cluster:
        starting = [cluster.serve(name, "--api-key-file", inner) for name in "pd"]
        p, d = (each.ready() for each in starting)
        flags = ("--instance-key-file", inner, "--api-key-file", outer)
        router = cluster.proxy([p], [d], *flags).ready()
        asyncio.run(check(p, d, router))
