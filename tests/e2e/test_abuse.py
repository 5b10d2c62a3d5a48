"""What clients, forgers and port scanners send changes nothing: nothing dies, and the next good request works."""

import asyncio
import base64
import os
import socket
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.e2e.conftest import Fleet
from tests.e2e.harness import Cluster, Prompt, ask, assert_quiescent, metrics, new_session, post, prefill

from kvferry.planes.zmq import CurveKeys, ZmqControlPlane
from kvferry.protocol import codec
from kvferry.protocol.messages import WIRE_VERSION, Confirm, HandshakeReply, HandshakeRequest, Release
from kvferry.protocol.tickets import TicketKey

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

COUNTED = ("rejected_params", "transfers", "failed_handshakes")
PROMPT = Prompt(tuple(range(40, 120)))


def forged_params() -> list[dict[str, Any]]:
    """Parameters that look right, with a ticket that is not."""
    base: dict[str, Any] = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[0, 1, 2, 3, 4]],
        "remote_engine_id": "somebody",
        "remote_request_id": "cmpl-1-0-00000000",
        "remote_host": "127.0.0.1",
        "remote_port": 9,
        "tp_size": 1,
    }
    tickets: list[Any] = [None, "", "x", 7, [], {}, "A" * 5000, base64.urlsafe_b64encode(os.urandom(200)).decode(), "🦊", True]
    return [{"do_remote_prefill": True}, base, *({**base, "ticket": ticket} for ticket in tickets)]


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
                assert await ask(session, lenient, prompt, kv_transfer_params=params) == await ask(session, p, prompt)
            after = await metrics(session, strict)
            grown = {
                name: after.get(name, 0) - before.get(name, 0) for name in ("kvferry:rejected_params_total", "kvferry:transfers_total")
            }
            assert grown == {"kvferry:rejected_params_total": len(forged_params()), "kvferry:transfers_total": 0}
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
            other = TicketKey(b"another cluster").sign(TicketKey(cluster.secret).open(params["ticket"]))
            assert (await ask(session, strict, PROMPT, kv_transfer_params={**params, "ticket": other})).status == 502
            # What a client types beside the ticket is not used.
            lies = {**params, "remote_host": "192.0.2.1", "remote_port": 1, "remote_block_ids": [[99999]], "tp_size": 64}
            assert await ask(session, strict, PROMPT, kv_transfer_params=lies) == await ask(session, p, PROMPT)
            await assert_quiescent(session, p, strict)

    asyncio.run(check())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=8,
)
param_keys = st.sampled_from(
    ["do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_engine_id", "remote_host", "remote_port", "tp_size", "ticket"]
)


def test_malformed_values_of_every_kind_never_kill_an_engine(fleet: Fleet) -> None:
    p, strict = fleet.p, fleet.strict
    loop = asyncio.new_event_loop()
    session = loop.run_until_complete(_open_session())

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.one_of(json_values, st.dictionaries(param_keys, json_values, max_size=6)))
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
    held = []
    for number in range(1000):
        raw = socket.create_connection((host, port), timeout=5)
        if number % 3 == 0:
            raw.sendall(os.urandom(64))
        elif number % 3 == 1:
            raw.sendall(b"GET / HTTP/1.0\r\n\r\n")
        if number % 50 == 0:
            held.append(raw)
        else:
            raw.close()
    _member_garbage(cluster, f"tcp://{host}:{port}")

    async def check() -> None:
        async with new_session() as session:
            params = await prefill(session, p, PROMPT)
            assert await ask(session, strict, PROMPT, kv_transfer_params=params) == await ask(session, p, PROMPT)
            await assert_quiescent(session, p, strict)

    asyncio.run(check())
    for raw in held:
        raw.close()


def _member_garbage(cluster: Cluster, address: str) -> None:
    """What a member of the cluster with a bug would send: it has the keys, so all of it arrives."""
    plane = ZmqControlPlane("127.0.0.1", "127.0.0.1", 0, CurveKeys.from_secret(cluster.secret))
    try:
        frames = [b"", b"\xc1", os.urandom(500), b"\x91" * 50_000, codec.encode(Confirm("e", "l", "r")), codec.encode(Release("forged"))]
        frames += [codec.encode(HandshakeRequest(n, version, rank)) for n, (version, rank) in enumerate([(0, 0), (1, 7), (1, -(2**60))])]
        for frame in frames:
            plane.send(address, frame)
        plane.send(address, codec.encode(HandshakeRequest(77, WIRE_VERSION, 0)))
        answers = []
        for _ in range(50):
            answers += [codec.decode(news.frame) for news in plane.poll(0.2) if hasattr(news, "frame")]
            if any(isinstance(answer, HandshakeReply) and answer.nonce == 77 for answer in answers):
                return
        raise AssertionError(f"no answer after the garbage, only {answers}")
    finally:
        plane.close()


def test_a_stranger_without_the_secret_gets_no_answer(fleet: Fleet) -> None:
    p = fleet.p

    async def find() -> str:
        async with new_session() as session:
            params = await prefill(session, p, PROMPT)
            return f"tcp://{params['remote_host']}:{params['remote_port']}"

    stranger = ZmqControlPlane("127.0.0.1", "127.0.0.1", 0, CurveKeys.from_secret(b"some other cluster's secret"))
    try:
        stranger.send(asyncio.run(find()), codec.encode(HandshakeRequest(1, WIRE_VERSION, 0)))
        assert not any(hasattr(news, "frame") for _ in range(5) for news in stranger.poll(0.2))
    finally:
        stranger.close()
