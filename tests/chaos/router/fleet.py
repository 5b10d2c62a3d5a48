"""A router, its instances, and the faults injected into them. Instances are added through the admin
API; the last one of each role registers itself.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from tests.chaos.cluster import CHUNKED, EXTRA
from tests.chaos.mode import Mode
from tests.chaos.router.verdict import Happened
from tests.e2e.harness import Cluster, Engine, Starting, is_alive, new_session, until
from tests.ports import reserve_port

REUSE: dict[str, Any] = {
    "bidirectional_kv_xfer": True,
    "kv_recompute_threshold": 0,
    "decoder_kv_blocks_ttl": 10,
}
ADMIN_KEY = "sk-admin"
DRAIN_S = 60.0
BACK_S = 60.0
BURIED_S = 60.0
STARTED_AT_ONCE = 2


@dataclass
class Member:
    """One engine with all its incarnations."""

    name: str
    role: str
    index: int
    connector: str
    is_leased: bool
    engine: Engine | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_lives: int = 0

    @property
    def live(self) -> Engine:
        assert self.engine is not None
        return self.engine

    @property
    def named(self) -> dict[str, str]:
        """Return role and URL as the admin API expects them."""
        return {"role": self.role, "url": self.live.url}


class RouterChaosCluster:
    def __init__(self, cluster: Cluster, router: Engine, members: list[Member]) -> None:
        self.cluster = cluster
        self.router = router
        self.members = {member.name: member for member in members}
        self.happened = Happened()
        # At least one instance of each role is always undisturbed.
        self._out = {
            role: asyncio.Semaphore(len(self.names(role)) - 1) for role in ("prefill", "decode")
        }

    @classmethod
    @contextmanager
    def opened(
        cls, directory: Path, model: Path, size: int, mode: Mode
    ) -> Iterator["RouterChaosCluster"]:
        (directory / "router.toml").write_text('[routing]\nwithout_prefill = "recompute"\n')
        key_file = directory / "admin-key"
        key_file.touch(mode=0o600)
        key_file.write_text(ADMIN_KEY)
        with Cluster(directory, model) as cluster:
            flags = ("--config", str(directory / "router.toml"), "--admin-key-file", str(key_file))
            router = cluster.proxy([], [], *flags).ready()
            # With Mode.BOTH, neighbouring P differ.
            connectors = {
                "prefill": [mode.prefill_connectors(index)[0] for index in range(size)],
                "decode": [mode.decode_connectors[0]] * size,
            }
            members = [
                Member(f"{role}-{index}", role, index, connector, index == size - 1)
                for role, by_index in connectors.items()
                for index, connector in enumerate(by_index)
            ]
            chaos_cluster = cls(cluster, router, members)
            # Start a few at a time: on a small machine, starting all at once would take longer than
            # the start timeout.
            for together in (
                members[i : i + STARTED_AT_ONCE] for i in range(0, len(members), STARTED_AT_ONCE)
            ):
                for member, process in [
                    (member, chaos_cluster._serve(member)) for member in together
                ]:
                    member.engine = process.ready()
            yield chaos_cluster

    def names(self, role: str) -> list[str]:
        return [name for name, member in self.members.items() if member.role == role]

    async def join(self) -> None:
        """Add the instances and wait until the router lists all of them."""
        for member in self.members.values():
            if not member.is_leased:
                await self.admin("POST", "/admin/instances", member.named)

        async def is_full() -> bool:
            return len((await self.admin("GET", "/admin/instances"))["instances"]) == len(
                self.members
            )

        await until("everybody is in the fleet", is_full)

    # -- faults --

    @asynccontextmanager
    async def taken(self, member: Member) -> AsyncIterator[None]:
        """Hold the member's lock, so that no other fault hits it, and keep one instance of its role
        undisturbed.
        """
        async with member.lock, self._out[member.role]:
            yield

    def kill(self, member: Member) -> list[psutil.Process]:
        """Kill the engine with SIGKILL without waiting. Returns its processes; `restart` waits for
        their end.
        """
        family = member.live.family()
        if member.role == "decode":
            self.happened.kills.append((time.monotonic(), member.live.url))
        family[0].kill()
        return family

    def restart(self, member: Member, family: list[psutil.Process]) -> None:
        """Start a new incarnation at the same address with the same engine id. Blocking."""
        _, left = psutil.wait_procs(family, timeout=BURIED_S)
        assert not any(map(is_alive, left)), f"left behind by {member.name}: {left}"
        self.cluster.dismiss(member.live.process)
        member.engine = self._serve(member, member.live.address.port).ready()

    async def pause(self, member: Member, length_s: float) -> None:
        member.live.pause()
        try:
            await asyncio.sleep(length_s)
        finally:
            member.live.resume()

    async def drain(self, member: Member) -> None:
        """Drain: the instance gets no new requests, its running ones end, then it is removed."""
        await self.admin("POST", "/admin/instances/drain", member.named)

        async def is_drained() -> bool:
            seen = await self.view(member)
            return seen is not None and seen["running"] == 0

        await until(f"{member.name} is drained", is_drained, DRAIN_S)
        await self.admin("DELETE", "/admin/instances", member.named)

    async def add(self, member: Member) -> None:
        await self.admin("POST", "/admin/instances", member.named)

    def replace(self, member: Member) -> None:
        """Replace a drained instance by one at another address. Blocking."""
        self.cluster.dismiss(member.live.process)
        member.engine = self._serve(member).ready()

    # -- the router's API --

    async def admin(self, method: str, path: str, body: object = None) -> Any:
        async with (
            new_session() as session,
            session.request(
                method,
                f"{self.router.url}{path}",
                json=body,
                headers={"Authorization": f"Bearer {ADMIN_KEY}"},
            ) as answer,
        ):
            found = await answer.json()
            assert answer.status < 300, found
            return found

    async def view(self, member: Member) -> dict[str, Any] | None:
        instances = (await self.admin("GET", "/admin/instances"))["instances"]
        return next(
            (
                seen
                for seen in instances
                if (seen["role"], seen["url"]) == (member.role, member.live.url)
            ),
            None,
        )

    async def answered_legs(self, member: Member) -> float:
        async with new_session() as session:
            return await self._answered_legs(session, member)

    async def wait_until_it_serves(self, member: Member) -> None:
        before = await self.answered_legs(member)
        async with new_session() as session:

            async def serves() -> bool:
                return await self._answered_legs(session, member) > before

            await until(f"{member.name} is given requests again and answers", serves, BACK_S)

    async def _answered_legs(self, session: aiohttp.ClientSession, member: Member) -> float:
        async with session.get(f"{self.router.url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        words = (
            "kvferry:router_legs_total{",
            f'instance="{member.live.url}"',
            f'role="{member.role}"',
            'outcome="answered"',
        )
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in lines if all(word in line for word in words)
        )

    def _serve(self, member: Member, port: int | None = None) -> Starting:
        """Start an incarnation, at a port that no outgoing connection takes between two lives."""
        member.num_lives += 1
        flags = (
            CHUNKED
            if member.role == "prefill"
            else ("--no-enable-prefix-caching",)
            if member.index % 2 == 0
            else ()
        )
        if member.is_leased:
            flags = (*flags, "--router", self.router.url, "--router-role", member.role)
        extra = {
            **EXTRA,
            **REUSE,
            **(
                {"transports": ["tcp"]}
                if member.role == "prefill" and member.index % 2 == 0
                else {}
            ),
        }
        policy = "fail" if member.index % 2 == 0 else "recompute"
        return self.cluster.serve(
            member.name,
            *flags,
            extra=extra,
            policy=policy,
            port=reserve_port() if port is None else port,
            engine_id=member.name,
            connector=member.connector,
        )
