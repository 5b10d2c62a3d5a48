"""A router finds P and D by DNS: real processes, a real resolver, a name server that fails."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from tests.deploy.dns_server import Failure, NameServer
from tests.deploy.rolling_restart import stream
from tests.e2e.harness import (
    Cluster,
    Engine,
    Host,
    Prompt,
    ask,
    assert_said,
    metrics,
    new_session,
    until,
)
from tests.ports import reserve_port

from kvferry.engine.make_model.writer import make_model

pytestmark = pytest.mark.slow

PREFILL, DECODE = "prefill.kv.test", "decode.kv.test"
P, D1, D2 = "127.77.0.1", "127.77.0.2", "127.77.0.3"
ADMIN_KEY = "operator"
PROMPT = Prompt(tuple(range(10, 130)))
LONG = Prompt(tuple(range(20, 140)), max_tokens=400)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    make_model(tmp_path / "tiny")
    with Cluster(tmp_path, tmp_path / "tiny") as made:
        yield made


class World:
    """Three engines with one port on three addresses, and a router that knows two names."""

    def __init__(self, cluster: Cluster, folder: Path, server: NameServer) -> None:
        self.port = reserve_port()
        starting = [
            cluster.serve(
                host,
                port=self.port,
                at=Host(address=host, variables={"KVFERRY_SIDE_CHANNEL_HOST": "127.0.0.1"}),
            )
            for host in (P, D1, D2)
        ]
        self.p, self.d1, self.d2 = (process.ready() for process in starting)
        (folder / "admin").write_text(ADMIN_KEY)
        (folder / "admin").chmod(0o600)
        (folder / "router.toml").write_text(
            # Named twice, as in a configuration that a script has put together.
            f'prefillers = ["dns://{PREFILL}:{self.port}", "dns://{PREFILL}:{self.port}"]\n'
            "[discovery]\ninterval_s = 0.1\ntimeout_s = 0.5\n"
        )
        flags = ("--config", str(folder / "router.toml"), "--admin-key-file", str(folder / "admin"))
        decoders = ("--decoders", f"dns://{DECODE}:{self.port}")
        self.router: Engine = cluster.proxy([], [], *flags, *decoders, at=server.host()).ready()

    async def members(self, session: aiohttp.ClientSession) -> dict[str, str]:
        """The state of each member by host."""
        key = {"Authorization": f"Bearer {ADMIN_KEY}"}
        async with session.get(f"{self.router.url}/admin/instances", headers=key) as response:
            found = (await response.json())["instances"]
        return {
            member["url"].removeprefix("http://").rpartition(":")[0]: member["state"]
            for member in found
        }

    async def until_hosts(self, session: aiohttp.ClientSession, *hosts: str) -> None:
        async def are_members() -> bool:
            return set(await self.members(session)) == set(hosts)

        await until(f"the members are {hosts}", are_members)


def test_a_router_follows_the_records_of_its_services(cluster: Cluster, tmp_path: Path) -> None:
    with NameServer(tmp_path) as server:
        server.zone |= {PREFILL: [P], DECODE: [D1]}
        world = World(cluster, tmp_path, server)

        async def check() -> None:
            async with new_session() as session:
                await world.until_hosts(session, P, D1)
                right = await ask(session, world.d2, PROMPT)
                assert (await ask(session, world.router, PROMPT)) == right
                assert (await metrics(session, world.d1))["kvferry:finished_loads_total"] == 1

                # A pod with addresses of two families is one instance.
                server.zone[DECODE] = [D1, D2, "fd00::2"]
                await world.until_hosts(session, P, D1, D2)

                server.zone[DECODE] = [D1]
                await world.until_hosts(session, P, D1)
                running = asyncio.create_task(stream(session, world.router, LONG, []))
                await until("D1 generates", lambda: is_busy(session, world.d1))
                server.zone[DECODE] = [D2]
                await until("D1 drains", lambda: has_state(session, D1, "draining"))
                assert not running.done(), "the stream was too short to show anything"
                assert (await running).failure == ""
                await world.until_hosts(session, P, D2)
                assert (await ask(session, world.router, PROMPT)) == right

                for failure in Failure:
                    server.zone[DECODE] = failure
                    await assert_said(world.router, SAID[failure])
                    assert await world.members(session) == {P: "healthy", D2: "healthy"}
                    assert (await ask(session, world.router, PROMPT)) == right
                server.zone[DECODE] = [D1, D2]
                await world.until_hosts(session, P, D1, D2)

        async def has_state(session: aiohttp.ClientSession, host: str, state: str) -> bool:
            return (await world.members(session)).get(host) == state

        asyncio.run(check())


SAID = {
    Failure.UNKNOWN_NAME: "Name or service not known): the known instances stay",
    Failure.SERVER_FAILED: "Temporary failure in name resolution): the known instances stay",
    Failure.SILENCE: "no answer within 0.5 s): the known instances stay",
}


async def is_busy(session: aiohttp.ClientSession, engine: Engine) -> bool:
    return (await metrics(session, engine))["vllm:num_requests_running"] > 0
