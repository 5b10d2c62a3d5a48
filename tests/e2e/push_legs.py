"""P and two D that push, one D per failure policy. Tests send both legs themselves, as a router
does, at the moment that they choose.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp
from tests.e2e.handovers import FINISHED, assert_ended_well, count, fresh
from tests.e2e.harness import (
    HERE,
    Answer,
    Cluster,
    Engine,
    Host,
    Prompt,
    Starting,
    ask,
    new_session,
    prefill,
    until,
)

from kvferry.errors import KVFerryError
from kvferry.protocol.tickets import PushTicket, PushTicketKey

EXPIRED = "kvferry:kv_expired_reqs_total"
REGISTERED = "kvferry:num_registrations"
POLICIES = ("fail", "recompute")


async def count_now(session: aiohttp.ClientSession, engine: Engine, name: str) -> float:
    """Read a metric after a step: an engine that only waits does not update its metrics until its
    next step.
    """
    assert (await ask(session, engine, Prompt((11, 12), max_tokens=1))).is_ok
    return await count(session, engine, name)


@dataclass(frozen=True)
class Shape:
    """The settings of P and both D."""

    extra: dict[str, Any]
    p_flags: tuple[str, ...] = ()
    d_flags: tuple[str, ...] = ()
    at: Sequence[Host] = (HERE, HERE, HERE)
    """The hosts of P and of the two D, in the order of `POLICIES`."""
    connector: str = "NixlPushConnector"

    def start_p(self, cluster: Cluster, port: int = 0) -> Starting:
        return cluster.serve(
            "prefill",
            *self.p_flags,
            extra=self.extra,
            connector=self.connector,
            engine_id="p",
            port=port,
            at=self.at[0],
        )

    def start_d(self, cluster: Cluster, policy: str) -> Starting:
        at = self.at[1 + POLICIES.index(policy)]
        return cluster.serve(
            f"decode {policy}",
            *self.d_flags,
            extra=self.extra,
            policy=policy,
            connector=self.connector,
            at=at,
        )


async def coordinates(p: Engine) -> dict[str, Any]:
    """Return what a router learns from P's first answer. The blocks of that request stay held until
    its lease expires.
    """
    async with new_session() as session:
        return await prefill(session, p, Prompt((7, 8, 9)))


@dataclass
class Legs:
    cluster: Cluster
    shape: Shape
    p: Engine
    decoders: dict[str, Engine]
    """The decode engines by failure policy."""
    coordinates: dict[str, Any]

    @classmethod
    def start(cls, cluster: Cluster, shape: Shape) -> "Legs":
        starting = [
            shape.start_p(cluster),
            *(shape.start_d(cluster, policy) for policy in POLICIES),
        ]
        p, *decoders = (process.ready() for process in starting)
        return cls(
            cluster,
            shape,
            p,
            dict(zip(POLICIES, decoders, strict=True)),
            asyncio.run(coordinates(p)),
        )

    @classmethod
    @contextmanager
    def opened(cls, directory: Path, model: Path, shape: Shape) -> Iterator["Legs"]:
        with Cluster(directory, model) as cluster:
            yield cls.start(cluster, shape)

    @property
    def engines(self) -> list[Engine]:
        return [self.p, *self.decoders.values()]

    def ticket(self) -> str:
        told = self.coordinates
        address = (told["remote_host"], told["remote_port"])
        ticket = PushTicket(
            uuid4().hex, told["remote_engine_id"], told["remote_epoch"], *address, told["tp_size"]
        )
        return PushTicketKey(self.cluster.secret).sign(ticket)

    async def replace_p(self) -> None:
        """Start a new incarnation of P at the same address with the same engine id."""
        self.cluster.dismiss(self.p.process)
        self.p = self.shape.start_p(self.cluster, self.p.address.port).ready()
        self.coordinates = await coordinates(self.p)

    async def replace_p_if_dead(self) -> None:
        try:
            self.p.process.check_alive()
        except KVFerryError:
            await self.replace_p()

    def replace_d(self, policy: str) -> None:
        self.cluster.dismiss(self.decoders[policy].process)
        self.decoders[policy] = self.shape.start_d(self.cluster, policy).ready()

    async def prefill_leg(
        self, session: aiohttp.ClientSession, prompt: Prompt, ticket: str
    ) -> Answer:
        return await ask(
            session,
            self.p,
            prompt,
            max_tokens=1,
            kv_transfer_params={"do_remote_decode": True, "push_ticket": ticket},
        )

    async def decode_leg(
        self, session: aiohttp.ClientSession, d: Engine, prompt: Prompt, ticket: str
    ) -> Answer:
        return await ask(
            session,
            d,
            prompt,
            kv_transfer_params={"do_remote_prefill": True, "push_ticket": ticket},
        )

    def decode_legs(
        self, session: aiohttp.ClientSession, prompt: Prompt, ticket: str
    ) -> "dict[str, asyncio.Task[Answer]]":
        """Send decode legs to both D for one prefill, as when a router switches from one D to
        another.
        """
        return {
            policy: asyncio.create_task(self.decode_leg(session, d, prompt, ticket))
            for policy, d in self.decoders.items()
        }

    async def hand_over(self, session: aiohttp.ClientSession, d: Engine, prompt: Prompt) -> Answer:
        ticket = self.ticket()
        _, answer = await asyncio.gather(
            self.prefill_leg(session, prompt, ticket), self.decode_leg(session, d, prompt, ticket)
        )
        return answer

    async def assert_recovers(
        self, session: aiohttp.ClientSession, d: Engine, plain: Engine
    ) -> None:
        """Check that KV is transferred again without any restart, and that every answer until then
        is right or an error.
        """

        async def comes_over() -> bool:
            prompt, before = fresh(), await count(session, d, FINISHED)
            answer, right = (
                await self.hand_over(session, d, prompt),
                await ask(session, plain, prompt),
            )
            assert not answer.is_ok or answer == right, (answer, right)
            return answer.is_ok and await count(session, d, FINISHED) > before

        await until("KV comes over again", comes_over)

    async def until_registered(self, session: aiohttp.ClientSession, num_registered: int) -> None:
        async def is_so() -> bool:
            return await count_now(session, self.p, REGISTERED) == num_registered

        await until(f"there are {num_registered} registrations at P", is_so)


async def assert_all_ended_well(
    legs: "dict[str, asyncio.Task[Answer]]", right: Answer, *reasons: str
) -> None:
    for policy, task in legs.items():
        assert_ended_well(await task, right, policy, *reasons)
