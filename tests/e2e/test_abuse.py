"""Tests that input of clients, forgers and port scanners kills no engine, and that the next good
request works.
"""

import asyncio
import base64
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from tests.e2e.conftest import Fleet
from tests.e2e.forgeries import forged_params, knock, malformed_params, send_as_member
from tests.e2e.harness import Prompt, ask, assert_quiescent, metrics, new_session, post, prefill

from kvferry.protocol import messages as codec
from kvferry.protocol.messages import WIRE_VERSION, HandshakeRequest
from kvferry.protocol.tickets import TicketKey
from kvferry.transports.zmq import CurveKeys, ZmqTransport

pytestmark = pytest.mark.slow

COUNTED = ("rejected_params", "transfers", "failed_handshakes")
PROMPT = Prompt(tuple(range(40, 120)))


def test_params_without_or_with_a_forged_ticket_get_the_failure_policy(fleet: Fleet) -> None:
    p, strict, lenient = fleet.p, fleet.strict, fleet.lenient

    async def check() -> None:
        async with new_session() as session:
            before = await metrics(session, strict)
            for number, params in enumerate(forged_params()):
                prompt = Prompt(tuple(range(50 + number, 150 + number)))
                refused = await ask(session, strict, prompt, kv_transfer_params=params)
                assert refused.status == 502
                assert "ticket" in refused.message
                assert await ask(session, lenient, prompt, kv_transfer_params=params) == await ask(
                    session, p, prompt
                )
            after = await metrics(session, strict)
            grown = {
                name: after.get(name, 0) - before.get(name, 0)
                for name in ("kvferry:rejected_params_total", "kvferry:transfers_total")
            }
            assert grown == {
                "kvferry:rejected_params_total": len(forged_params()),
                "kvferry:transfers_total": 0,
            }
            await assert_quiescent(session, strict, lenient)

    asyncio.run(check())


def test_a_ticket_whose_bits_were_changed_is_refused_and_the_true_one_works(fleet: Fleet) -> None:
    cluster, p, strict = fleet.cluster, fleet.p, fleet.strict

    async def check() -> None:
        async with new_session() as session:
            params = await prefill(session, p, PROMPT)
            raw = bytearray(base64.urlsafe_b64decode(params["ticket"]))
            raw[len(raw) // 2] ^= 1
            changed = {**params, "ticket": base64.urlsafe_b64encode(raw).decode()}
            assert (await ask(session, strict, PROMPT, kv_transfer_params=changed)).status == 502
            other = TicketKey(b"another cluster").sign(
                TicketKey(cluster.secret).open(params["ticket"])
            )
            assert (
                await ask(session, strict, PROMPT, kv_transfer_params={**params, "ticket": other})
            ).status == 502
            # D ignores the parameters beside the ticket.
            lies = {
                **params,
                "remote_host": "192.0.2.1",
                "remote_port": 1,
                "remote_block_ids": [[99999]],
                "tp_size": 64,
            }
            assert await ask(session, strict, PROMPT, kv_transfer_params=lies) == await ask(
                session, p, PROMPT
            )
            await assert_quiescent(session, p, strict)

    asyncio.run(check())


def test_malformed_values_of_every_kind_never_kill_an_engine(fleet: Fleet) -> None:
    p, strict = fleet.p, fleet.strict
    loop = asyncio.new_event_loop()
    session = loop.run_until_complete(_open_session())

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(malformed_params)
    def attack(params: Any) -> None:
        body = {**PROMPT.body(), "max_tokens": 1, "kv_transfer_params": params}
        answer = loop.run_until_complete(post(session, strict, body))
        assert answer.status in (200, 400, 502)

    try:
        attack()
        good = loop.run_until_complete(prefill(session, p, PROMPT))
        assert loop.run_until_complete(ask(session, strict, PROMPT, kv_transfer_params=good)).is_ok
        loop.run_until_complete(assert_quiescent(session, p, strict))
    finally:
        loop.run_until_complete(session.close())
        loop.close()


async def _open_session() -> Any:
    return new_session()


def test_garbage_and_a_thousand_connects_leave_the_side_channel_standing(fleet: Fleet) -> None:
    cluster, p, strict = fleet.cluster, fleet.p, fleet.strict

    async def find() -> tuple[str, int]:
        async with new_session() as session:
            params = await prefill(session, p, PROMPT)
            return params["remote_host"], params["remote_port"]

    host, port = asyncio.run(find())
    held = knock(host, port, times=1000)
    send_as_member(cluster.secret, f"tcp://{host}:{port}")

    async def check() -> None:
        async with new_session() as session:
            params = await prefill(session, p, PROMPT)
            assert await ask(session, strict, PROMPT, kv_transfer_params=params) == await ask(
                session, p, PROMPT
            )
            await assert_quiescent(session, p, strict)

    asyncio.run(check())
    for raw in held:
        raw.close()


def test_a_stranger_without_the_secret_gets_no_answer(fleet: Fleet) -> None:
    p = fleet.p

    async def find() -> str:
        async with new_session() as session:
            params = await prefill(session, p, PROMPT)
            return f"tcp://{params['remote_host']}:{params['remote_port']}"

    stranger = ZmqTransport(
        "127.0.0.1", "127.0.0.1", 0, CurveKeys.from_secret(b"some other cluster's secret")
    )
    try:
        stranger.send(asyncio.run(find()), codec.encode(HandshakeRequest(1, WIRE_VERSION, 0)))
        assert not any(hasattr(news, "frame") for _ in range(5) for news in stranger.poll(0.2))
    finally:
        stranger.close()
