"""Tests that `/readyz` reports what a request would find."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest
import uvloop
from aiohttp import web
from tests.ports import reserve_port
from tests.router.stubs import (
    AS_ADMIN,
    Stage,
    StubEngine,
    answers,
    completes,
    prefills,
    stage,
    stub_engine,
)
from tests.router.test_proxy import ONE

from kvferry.types import FailurePolicy

PROBED: dict[str, Any] = {"probe_interval_s": 0.02, "probe_ejected_s": 0.02, "probe": 1.0}


async def readiness(s: Stage) -> tuple[int, str]:
    async with s.session.get(f"{s.url}/readyz") as answer:
        return answer.status, (await answer.json())["status"]


async def becomes(s: Stage, status: int) -> str:
    """Waits until `/readyz` answers with `status`, and returns its text; the stage's deadline
    bounds the wait.
    """
    while True:
        now, words = await readiness(s)
        if now == status:
            return words
        await asyncio.sleep(0.01)


async def join(s: Stage, role: str, port: int) -> None:
    async with s.session.post(
        f"{s.url}/admin/instances",
        json={"role": role, "url": f"http://127.0.0.1:{port}"},
        headers=AS_ADMIN,
    ) as answer:
        assert answer.status == 201


def test_a_router_whose_only_decode_instance_is_down_is_not_ready_and_is_again_when_it_is_up() -> (
    None
):
    """The last instance of a role is never ejected, so that no request is refused by mistake. But
    clients should not be sent to this router because of that.
    """

    async def scene() -> None:
        async with AsyncExitStack() as stack:
            s = await stack.enter_async_context(stage(prefills, [], **PROBED))
            while await readiness(s) != (
                503,
                "no decode instance is available",
            ):  # until a probe has reached P
                await asyncio.sleep(0.01)
            engine = StubEngine(completes)
            async with stub_engine(engine):
                await join(s, "decode", engine.port)
                assert await becomes(s, 200) == "ready"
            assert await becomes(s, 503) == "no decode instance is available"
            app = await stack.enter_async_context(stub_engine(StubEngine(completes)))
            await join(s, "decode", app.port)
            assert await becomes(s, 200) == "ready"
            assert (await s.post(ONE))[0] == 200

    uvloop.run(scene())


def test_a_router_whose_instances_failed_requests_but_are_well_is_ready() -> None:
    """Otherwise no client would send the request that shows whether the instances still fail."""

    async def scene() -> None:
        is_ill = True

        async def fails_for_a_while(
            request: web.Request, body: dict[str, Any]
        ) -> web.StreamResponse:
            return await (answers(500, "{}") if is_ill else completes)(request, body)

        async with stage(prefills, fails_for_a_while, failures_in_a_row=2, **PROBED) as s:
            for _ in range(3):
                assert (await s.post(ONE))[0] == 500
            num_looks = s.d.num_looks
            while s.d.num_looks < num_looks + 3:
                assert (await readiness(s))[0] == 200
                await asyncio.sleep(0.01)
            is_ill = False
            assert (await s.post(ONE))[0] == 200

    uvloop.run(scene())


@pytest.mark.parametrize("without_prefill", list(FailurePolicy))
def test_prefill_instances_are_needed_only_where_decode_instances_may_not_compute(
    without_prefill: FailurePolicy,
) -> None:
    async def scene() -> None:
        async with stage([], completes, without_prefill=without_prefill, **PROBED) as s:
            await join(s, "prefill", reserve_port())
            wanted = (
                (503, "no prefill instance is available")
                if without_prefill is FailurePolicy.FAIL
                else (200, "ready")
            )
            while await readiness(s) != wanted:
                await asyncio.sleep(0.01)
            assert (await s.post(ONE))[0] == (502 if without_prefill is FailurePolicy.FAIL else 200)

    uvloop.run(scene())
