"""Logs of a real fleet at level debug: ids of both legs in one line, and never a secret."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.harness import Cluster, Engine, Prompt, new_session, prefill, until

from kvferry.cli.main import main

pytestmark = pytest.mark.slow

API_KEY, ADMIN_KEY, INSTANCE_KEY = "sk-tenant-canary", "sk-admin-canary", "sk-instance-canary"
AWS = {"AWS_ACCESS_KEY_ID": "AKIACANARY", "AWS_SECRET_ACCESS_KEY": "aws-secret-canary"}
FORGED = "tiny\n2026-01-01 00:00:00,000 INFO kvferry: forged"
WORDS = "canary words of a prompt"
CONNECTORS = [
    {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
    {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            # No server listens there: every store and lookup fails, and the log says why.
            "tiers": [{"object": {"bucket": "b", "endpoint": "http://127.0.0.1:9"}}]
        },
    },
]
TEXT_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ (core |rank\d+ )?[\w.]+: ")


def key_file(directory: Path, key: str, tenant: str = "") -> str:
    path = directory / f"file of {key}"
    path.touch(mode=0o600)
    path.write_text(f"{tenant} {key}\n".lstrip())
    return str(path)


async def traffic(p: Engine, d: Engine, routers: list[Engine]) -> list[str]:
    """Send good and bad requests; return the tickets that P issued."""
    inner = {"Authorization": f"Bearer {INSTANCE_KEY}"}
    prompt = Prompt(tuple(range(20, 120)))
    async with new_session() as session:

        async def post(engine: Engine, body: Any, key: str, **headers: str) -> int:
            sent = {"Authorization": f"Bearer {key}", **headers}
            url = f"{engine.url}/v1/completions"
            async with session.post(url, json=body, headers=sent) as answer:
                await answer.read()
                return answer.status

        for number, router in enumerate(routers):

            async def is_ready(router: Engine = router) -> bool:
                async with session.get(f"{router.url}/readyz") as answer:
                    return answer.status == 200

            await until("the router has reached its engines", is_ready)
            named = {"X-Request-Id": f"mine-{number}"}
            assert await post(router, prompt.body(), API_KEY, **named) == 200
            assert await post(router, {**prompt.body(), "prompt": WORDS}, API_KEY) == 200
            assert await post(router, {**prompt.body(), "model": FORGED}, API_KEY) == 404
            assert await post(router, prompt.body(), "wrong-canary") == 401
            admin = {"Authorization": f"Bearer {ADMIN_KEY}"}
            async with session.get(f"{router.url}/admin/instances", headers=admin) as answer:
                assert answer.status == 200
    async with new_session() as session:
        session.headers.update(inner)
        params = await prefill(session, p, prompt)
        bad = {**params, "ticket": params["ticket"][:-4] + "AAAA"}
        for used in (bad, params):
            await post(d, {**prompt.body(), "kv_transfer_params": used}, INSTANCE_KEY)
    return [params["ticket"], bad["ticket"]]


def test_the_log_of_a_fleet_at_debug_has_no_secret_and_no_forged_line(
    tmp_path: Path, model: Path
) -> None:
    inner = key_file(tmp_path, INSTANCE_KEY)
    flags = (
        *("--api-key-file", key_file(tmp_path, API_KEY, "acme")),
        *("--admin-key-file", key_file(tmp_path, ADMIN_KEY)),
        *("--instance-key-file", inner),
        *("--access-log", "--log-level", "debug"),
    )
    with Cluster(tmp_path, model) as cluster:
        starting = [
            cluster.serve(
                f"engine {format}",
                *("--api-key-file", inner, "--log-level", "debug", "--log-format", format),
                connector="MultiConnector",
                extra={"connectors": CONNECTORS},
                policy="recompute",
                environment=AWS,
            )
            for format in ("text", "json")
        ]
        p, d = (each.ready() for each in starting)
        routers = [
            cluster.proxy([p], [d], *flags, "--log-format", format).ready()
            for format in ("text", "json")
        ]
        tickets = asyncio.run(traffic(p, d, routers))
        logs = {engine: engine.process.tail(10_000) for engine in (p, d, *routers)}
        secrets = [cluster.secret.decode(), *tickets, API_KEY, ADMIN_KEY, INSTANCE_KEY]
    for lines in logs.values():
        written = "\n".join(lines)
        for secret in [*secrets, *AWS.values(), "wrong-canary", WORDS]:
            assert secret not in written
    for engine in (p, routers[0]):
        assert any(TEXT_LINE.match(line) for line in logs[engine])
        assert not any(line.startswith("2026-01-01") for line in logs[engine])
    assert any("INFO kvferry: forged" in line for line in logs[routers[0]])
    for engine, words in ((d, "serving tiny on http://"), (routers[1], "kvferry proxy listens on")):
        logged = [json.loads(line) for line in logs[engine]]
        assert any(line["level"] == "debug" for line in logged)
        assert any(line["message"].startswith(words) for line in logged)
    assert any("KV cannot be" in line for line in logs[p])
    assert any("kv_transfer_params refused" in line for line in logs[d])
    check_access_line(logs[routers[1]], p, d)


def check_access_line(lines: list[str], p: Engine, d: Engine) -> None:
    """Check the line of the request with the id `mine-1`, which names the requests on P and D."""
    shown = [json.loads(line) for line in lines]
    (line,) = [entry for entry in shown if entry.get("request") == "mine-1"]
    assert (line["status"], line["outcome"], line["tenant"]) == (200, "answered", "acme")
    assert (line["prefill"], line["decode"]) == (p.url, d.url)
    assert "mine-1" in line["prefill_request"][0]
    assert "mine-1" in line["decode_request"][0]
    assert (line["model"], line["prompt_tokens"], line["completion_tokens"]) == ("tiny", 100, 16)
    assert any(entry.get("model") == FORGED and entry["status"] == 404 for entry in shown)


@pytest.mark.parametrize(
    "arguments",
    [
        "register --role decode --url http://127.0.0.1:1 --router http://u:canary@127.0.0.1:1",
        "register --role decode --url http://u:canary@127.0.0.1:1 --router http://127.0.0.1:1",
    ],
)
def test_a_url_with_a_password_is_refused_without_showing_it(
    arguments: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFERRY_SECRET", "s" * 64)
    assert main(arguments.split()) == 2
    printed = capsys.readouterr()
    assert "is not the address of" in printed.err
    assert "canary" not in printed.out + printed.err
