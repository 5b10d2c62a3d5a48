"""Tests the transfer record of a real D: its times are in order, it is found by the id that the
client gave the router, and its bytes equal those in D's metrics.
"""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.e2e.conftest import Pair
from tests.e2e.harness import Engine, Prompt, ask, assert_quiescent, metrics, new_session, prefill

from kvferry.router.dashboard.request_view import view_request
from kvferry.router.timeline import RecentRequests, RequestEvent, RequestOutcome
from kvferry.web.transfer_records import TransferRecord, read_transfer_records

pytestmark = pytest.mark.slow


def prompt(seed: int, count: int = 100) -> Prompt:
    rng = random.Random(f"transfer records {seed}")
    return Prompt(tuple(rng.randrange(10, 500) for _ in range(count)))


async def look(
    session: aiohttp.ClientSession, engine: Engine, name: str
) -> tuple[int, list[TransferRecord]]:
    async with session.get(f"{engine.url}/kvferry/transfers{name and f'/{name}'}") as answer:
        return answer.status, list(read_transfer_records(await answer.read()))


async def through_router(
    session: aiohttp.ClientSession, pair: Pair, name: str, asked: Prompt, **changes: Any
) -> None:
    body = json.dumps({**asked.body(), **changes})
    async with session.post(
        f"{pair.router.url}/v1/completions", data=body, headers={"X-Request-Id": name}
    ) as answer:
        assert answer.status == 200, await answer.text()
        await answer.read()


def test_a_request_through_the_router_is_told_by_its_id_with_its_times_in_order(
    patient: Pair,
) -> None:
    async def check() -> None:
        async with new_session() as session:
            before = (await metrics(session, patient.d)).get("kvferry:transfer_bytes_total", 0)
            await through_router(session, patient, "seen-1", prompt(1))
            moved = (await metrics(session, patient.d))["kvferry:transfer_bytes_total"] - before
            status, (record,) = await look(session, patient.d, "seen-1")
            assert status == 200
            times = [
                record.attached_s,
                record.read_began_s,
                record.read_ended_s,
                record.confirmed_s,
                record.scheduled_s,
                record.first_token_s,
                record.age_s,
            ]
            known = [moment for moment in times if moment is not None]
            assert len(known) == len(times)
            assert known == sorted(known)
            assert (record.bytes, record.transport, record.failure) == (moved, "shm", "")
            assert record.segments > 0
            assert (await look(session, patient.d, "seen-2"))[0] == 404
            # P fetched nothing, so it has no record.
            assert (await look(session, patient.p, "seen-1"))[0] == 404
            await assert_quiescent(session, patient.p, patient.d)

    asyncio.run(check())


def test_choices_share_a_name_and_the_one_that_read_is_shown(patient: Pair) -> None:
    async def check() -> None:
        async with new_session() as session:
            await through_router(session, patient, "seen-n", prompt(2), n=3, temperature=1.0)
            _, records = await look(session, patient.d, "seen-n")
            assert len(records) == 3
            assert sum(record.bytes > 0 for record in records) == 1
            recent = RecentRequests()
            timeline = recent.begin("seen-n", "/v1/completions", 0.0)
            timeline.mark(RequestEvent.DECODE_BEGAN, 0.0, "d")
            recent.end(timeline, RequestOutcome.ANSWERED, 200, 1000.0)
            names = [
                phase.name
                for phase in view_request(
                    timeline, records, max(record.age_s for record in records)
                ).phases
            ]
            assert "transfer" in names

    asyncio.run(check())


def test_a_receive_that_fails_says_why(patient: Pair) -> None:
    async def check() -> None:
        async with new_session() as session:
            params = await prefill(session, patient.p, prompt(3))
            params["ticket"] = "forged"
            body = json.dumps({**prompt(3).body(), "kv_transfer_params": params})
            async with session.post(
                f"{patient.d.url}/v1/completions", data=body, headers={"X-Request-Id": "seen-bad"}
            ) as answer:
                assert answer.status == 502
            _, (record,) = await look(session, patient.d, "seen-bad")
            assert "could not be fetched" in record.failure
            assert (record.first_token_s, record.bytes) == (None, 0)

    asyncio.run(check())


def test_the_newest_come_first_and_plain_requests_are_not_among_them(
    patient: Pair, model: Path
) -> None:
    async def check() -> None:
        async with new_session() as session:
            await through_router(session, patient, "seen-a", prompt(4))
            await through_router(session, patient, "seen-b", prompt(5))
            assert (await ask(session, patient.d, prompt(6))).is_ok
            _, records = await look(session, patient.d, "")
            newest = [record.request_id.removeprefix("cmpl-")[:6] for record in records[:2]]
            assert newest == ["seen-b", "seen-a"]

    asyncio.run(check())
