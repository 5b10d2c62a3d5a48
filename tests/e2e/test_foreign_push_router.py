"""Tests push behind a router that signs no tickets and does not wait for P's answer, like vLLM's
own push demo: P and D match the legs by their X-Request-Id.
"""

import asyncio
import secrets
from typing import Any

import aiohttp
import pytest
from tests.e2e.harness import (
    PREFILL_PARAMS,
    Answer,
    Cluster,
    Engine,
    Prompt,
    ask_all,
    assert_quiescent,
    metrics,
    new_session,
)
from tests.ports import reserve_ports

pytestmark = pytest.mark.slow

PROMPTS = [Prompt(tuple(range(10 + number, 31 + 17 * number))) for number in range(24)]


class Foreign:
    """Such a router knows P's engine id and side channel from its command line."""

    def __init__(self, p: Engine, d: Engine, port: int) -> None:
        self.p, self.d = p, d
        self.named = {
            "do_remote_prefill": True,
            "remote_engine_id": "prefill-1",
            "remote_host": "127.0.0.1",
            "remote_port": port,
            "tp_size": 1,
        }

    async def leg(
        self, session: aiohttp.ClientSession, engine: Engine, body: dict[str, Any], name: str
    ) -> dict[str, Any]:
        async with session.post(
            f"{engine.url}/v1/completions", json=body, headers={"X-Request-Id": name}
        ) as answer:
            return {"status": answer.status, **await answer.json()}

    async def ask(
        self, session: aiohttp.ClientSession, prompt: Prompt, is_serial: bool, name: str = ""
    ) -> Answer:
        name = name or secrets.token_hex(8)
        to_p = {**prompt.body(), "max_tokens": 1, "kv_transfer_params": PREFILL_PARAMS}
        to_d = {**prompt.body(), "kv_transfer_params": {**self.named, "remote_request_id": name}}
        if is_serial:
            await self.leg(session, self.p, to_p, name)
            found = await self.leg(session, self.d, to_d, name)
        else:
            _, found = await asyncio.gather(
                self.leg(session, self.p, to_p, name), self.leg(session, self.d, to_d, name)
            )
        if found["status"] != 200:
            return Answer(found["status"], body=found)
        return Answer(
            200, tuple(tuple(choice.get("token_ids") or ()) for choice in found["choices"]), found
        )


def started(cluster: Cluster) -> Foreign:
    of_p, of_d = reserve_ports(2)
    starting = [
        cluster.serve(
            name,
            extra={"kv_lease_duration": 12, "peers": [f"127.0.0.1:{other}"]},
            environment={
                "KVFERRY_SIDE_CHANNEL_PORT": str(own),
                "KVFERRY_SIDE_CHANNEL_HOST": "127.0.0.1",
            },
            connector="NixlPushConnector",
            engine_id=name,
        )
        for name, own, other in (("prefill-1", of_p, of_d), ("decode-1", of_d, of_p))
    ]
    p, d = (process.ready() for process in starting)
    return Foreign(p, d, of_p)


def test_tokens_equal_a_single_engines_in_either_order_and_two_of_one_id_are_never_mixed_up(
    cluster: Cluster, plain: Engine
) -> None:
    """Requests with the same id may be refused, and D may even receive the KV of another one; but
    no answer uses it.
    """
    router = started(cluster)

    async def check() -> None:
        expected = await ask_all(plain, PROMPTS)
        async with new_session() as session:
            for is_serial, part in ((True, slice(0, 12)), (False, slice(12, 24))):
                answers = await asyncio.gather(
                    *(router.ask(session, prompt, is_serial) for prompt in PROMPTS[part])
                )
                assert answers == expected[part]
            seen = await metrics(session, router.d)
            assert (seen["kvferry:finished_loads_total"], seen["kvferry:failed_loads_total"]) == (
                len(PROMPTS),
                0,
            )
            await assert_quiescent(session, router.p, router.d)
            same = await asyncio.gather(
                *(
                    router.ask(session, prompt, is_serial=False, name="same")
                    for prompt in PROMPTS[:6]
                )
            )
            assert all(
                got == right or not got.is_ok for got, right in zip(same, expected[:6], strict=True)
            )
            # Until its lease ends, P holds a prefill that matches no decode leg.
            await assert_quiescent(session, router.p, router.d)
            again = await router.ask(
                session, Prompt(tuple(range(30, 230))), is_serial=False, name="same"
            )
            assert again.is_ok

    asyncio.run(check())
