"""Prometheus scrapes a real fleet, with the project's own configuration, alerts and dashboard."""

import asyncio
import json
import re
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml  # type: ignore[import-untyped]
from tests.e2e.harness import Cluster, Engine, Prompt, ask, new_session, post, prefill, until
from tests.monitoring.prometheus import (
    ALERTS,
    CONFIG,
    Server,
    expressions,
    program,
    prometheus,
)

from kvferry.engine.make_model.writer import make_model

pytestmark = pytest.mark.slow

SCRAPE_S, WAIT_S = 1, 60.0
KEY = "sk-admin"
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
SHORT = {"kv_lease_duration": 1, "handshake_timeout": 2}
ROUTER_CONFIG = """
[access]
admin_key_file = "{key}"
"""


@dataclass
class Fleet:
    p: Engine
    d: Engine
    stranger: Engine
    """A prefill engine with another cache dtype, which D refuses."""
    router: Engine
    server: Server


def own_config(directory: Path, router: Engine) -> Path:
    """The example of a configuration for this router, with short intervals; alerts wait for one
    second instead of minutes.
    """
    config = yaml.safe_load(CONFIG.read_text())
    config["global"] = {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"}
    routers, engines = config["scrape_configs"]
    routers["static_configs"] = [{"targets": [str(router.address)]}]
    (discovery,) = engines["http_sd_configs"]
    discovery["url"] = discovery["url"].replace("router:8000", str(router.address))
    discovery["refresh_interval"] = f"{SCRAPE_S}s"
    (directory / "alerts.yml").write_text(re.sub(r"for: \w+", "for: 1s", ALERTS.read_text()))
    path = directory / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    program("prometheus")
    directory = tmp_path_factory.mktemp("fleet")
    make_model(directory / "tiny")
    key = directory / "admin-key"
    key.touch(mode=0o600)
    key.write_text(KEY)
    config = directory / "router.toml"
    config.write_text(ROUTER_CONFIG.format(key=key))
    tier = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "tiers": [{"cpu": "1MiB"}],
            "pool_path": str(directory / "pool"),
            "break_even": False,
        },
    }
    with Cluster(directory, directory / "tiny") as cluster:
        starting = [
            cluster.serve("p", extra=SHORT, port=0),
            cluster.serve(
                "d",
                "--no-enable-prefix-caching",
                connector="MultiConnector",
                extra={"connectors": [{**NIXL, "kv_connector_extra_config": SHORT}, tier]},
                policy="recompute",
            ),
            cluster.serve("stranger", "--kv-cache-dtype", "bfloat16", extra=SHORT),
        ]
        p, d, stranger = (each.ready() for each in starting)
        router = cluster.proxy([p], [d], "--config", str(config)).ready()
        asyncio.run(until_reached(router))
        with prometheus(own_config(directory, router), directory) as server:
            yield Fleet(p, d, stranger, router, server)


async def until_reached(router: Engine) -> None:
    async with new_session() as session:

        async def is_ready() -> bool:
            async with session.get(f"{router.url}/readyz") as answer:
                shown = await answer.json()
                return bool(shown.get("prefill_usable") and shown.get("decode_usable"))

        await until("the router has reached its engines", is_ready)


async def good_requests(session: aiohttp.ClientSession, fleet: Fleet, number: int) -> None:
    for offset in range(3):
        prompt = Prompt(tuple(range(20 + offset, 140 + offset)), max_tokens=4)
        body: dict[str, Any] = {**prompt.body(), "conversation_id": f"c{number}"}
        assert (await post(session, fleet.router, body)).is_ok


async def mishaps(fleet: Fleet) -> None:
    """One lease that expires, one ticket that is forged, one peer with another cache."""
    prompt = Prompt(tuple(range(30, 200)), max_tokens=2)
    async with new_session() as session:
        params = await prefill(session, fleet.p, prompt)
        forged = {**params, "ticket": params["ticket"][:-4] + "AAAA"}
        await ask(session, fleet.d, prompt, kv_transfer_params=forged)
        wrong = await prefill(session, fleet.stranger, prompt)
        await ask(session, fleet.d, prompt, kv_transfer_params=wrong)
        await good_requests(session, fleet, 1)


async def kill_p_among_requests(fleet: Fleet) -> None:
    """Requests go on while P dies, so some of them fail on P before the router avoids it."""
    async with new_session() as session:
        await good_requests(session, fleet, 2)
        killing = asyncio.create_task(asyncio.to_thread(fleet.p.kill))
        while not killing.done():
            await good_requests(session, fleet, 3)
        await killing


def test_every_panel_has_data_and_alerts_fire_for_what_went_wrong(fleet: Fleet) -> None:
    server = fleet.server
    server.until("all targets are scraped", lambda: server.values("sum(up)") == [3.0], WAIT_S)
    assert not server.firing()
    asyncio.run(mishaps(fleet))
    expected = {"KvferryLeasesExpire", "KvferryTicketsRefused", "KvferryWrongPeer"}
    server.until(f"{expected} fire", lambda: expected <= server.firing(), WAIT_S)
    assert not server.firing() & {"KvferryEngineDown", "KvferryNoInstance", "KvferryRouterDown"}

    asyncio.run(kill_p_among_requests(fleet))
    killed = {"KvferryEngineDown", "KvferryInstanceEjected", "KvferryNoInstance"}
    server.until(f"{killed} fire", lambda: killed <= server.firing(), WAIT_S)
    assert "KvferryRouterDown" not in server.firing()
    missing = expressions()
    """The expressions without data so far."""

    def all_have_data() -> bool:
        for name, text in list(missing.items()):
            if server.values(text.replace("$__rate_interval", "2m")):
                del missing[name]
        return not missing

    server.until(missing, all_have_data, WAIT_S)
    assert_all_names_exist(_page(fleet.router), _page(fleet.d))


def assert_all_names_exist(*pages: str) -> None:
    """Also those without a sample so far: routers and engines name all their metrics."""
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", "".join(pages), re.MULTILINE))
    exported = {f"{name}_bucket" if kind == "histogram" else name for name, kind in kinds.items()}
    text = "\n".join([*expressions().values(), ALERTS.read_text()])
    assert set(re.findall(r"(?:kvferry|vllm):[a-z_]+", text)) - exported == set()


def _page(engine: Engine) -> str:
    request = urllib.request.Request(f"{engine.url}/metrics")
    with urllib.request.urlopen(request, timeout=60) as answer:
        return bytes(answer.read()).decode()


def test_the_router_lists_its_instances_for_prometheus(fleet: Fleet) -> None:
    request = urllib.request.Request(
        f"{fleet.router.url}/admin/targets", headers={"Authorization": f"Bearer {KEY}"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        groups = json.load(answer)
    assert groups == [
        {
            "targets": [str(engine.address)],
            "labels": {"__scheme__": "http", "role": role},
        }
        for role, engine in (("prefill", fleet.p), ("decode", fleet.d))
    ]
