"""Tests what health probes change for requests: which instances are ready, and what happens to legs
at an instance that no longer answers.
"""

import asyncio
import json
from typing import Any

import pytest
import uvloop
from aiohttp import web
from tests.router.stubs import (
    AS_ADMIN,
    Behaviour,
    Stage,
    StubEngine,
    completes,
    hangs,
    prefills,
    stage,
    streams,
)
from tests.router.test_several_prompts import echoes

from kvferry.types import FailurePolicy

ONE = {"prompt": "hello"}
QUICK: dict[str, Any] = {
    "probe": 0.05,
    "probe_interval_s": 0.05,
    "probe_ejected_s": 0.05,
    "max_retries": 1,
}


async def readiness(s: Stage) -> tuple[int, int, int]:
    async with s.session.get(f"{s.url}/readyz") as answer:
        state = json.loads(await answer.read())
        return answer.status, state["prefill_usable"], state["decode_usable"]


async def until_ready(s: Stage, wanted: tuple[int, int, int]) -> None:
    while await readiness(s) != wanted:
        await asyncio.sleep(0.01)


def test_an_instance_that_nobody_has_reached_is_not_ready() -> None:
    async def scene() -> None:
        async with stage(
            prefills, completes, **QUICK, without_prefill=FailurePolicy.RECOMPUTE
        ) as s:
            await until_ready(s, (200, 1, 1))
            s.p.is_stopped = True
            await until_ready(s, (200, 0, 1))
            s.d.is_stopped = True
            await until_ready(s, (503, 0, 0))
            s.p.is_stopped = s.d.is_stopped = False
            await until_ready(s, (200, 1, 1))

    uvloop.run(scene())


def test_from_the_start_only_those_are_ready_that_have_answered() -> None:
    async def scene() -> None:
        patient = QUICK | {"probe": 5.0}
        async with stage([prefills, prefills], completes, **patient) as s:
            for engine in (*s.prefillers, s.d):
                engine.is_stopped = True
            assert await readiness(s) == (503, 0, 0)

    uvloop.run(scene())


def test_where_nobody_looks_instances_are_taken_on_trust() -> None:
    async def scene() -> None:
        async with stage(hangs, hangs, probe_interval_s=0.0) as s:
            assert await readiness(s) == (200, 1, 1)

    uvloop.run(scene())


PATIENT = QUICK | {"probe": 0.5}
"""A probe fails only if the engine is stopped, also on a busy machine."""
TWO_OF_EACH: tuple[list[Behaviour], list[Behaviour]] = (
    [prefills, prefills],
    [completes, completes],
)


async def until_probed(engine: StubEngine) -> None:
    """Wait until the engine has answered probes for longer than a request needs to take effect."""
    num_looks = engine.num_looks + 1.5 / QUICK["probe_interval_s"]
    while engine.num_looks < num_looks:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("is_prefill", [True, False])
def test_a_leg_at_an_instance_that_has_gone_silent_is_tried_elsewhere(is_prefill: bool) -> None:
    """The leg is retried long before `timeouts.answer`, which is 600 s here, because health probes
    show that the instance no longer answers. The leg is not to blame: the instance answered probes
    after it.
    """

    async def scene() -> None:
        async with stage(*TWO_OF_EACH, **PATIENT) as s:
            asked = (s.prefillers if is_prefill else s.decoders)[0]
            await until_ready(s, (200, 2, 2))
            asked.behaviour = hangs
            sent = [asyncio.create_task(s.post(ONE)) for _ in range(2)]
            await asked.entered.wait()
            await until_probed(asked)
            asked.is_stopped = True
            assert [(await task)[0] for task in sent] == [200, 200]
            assert await s.metric("kvferry:router_retries_total") == 1
            await asked.cancelled.wait()

    uvloop.run(scene())


@pytest.mark.parametrize("is_prefill", [True, False])
def test_a_request_that_may_have_silenced_an_instance_is_sent_to_no_other(is_prefill: bool) -> None:
    """Requests sent when the instance had already gone silent are not to blame."""

    async def scene() -> None:
        settings = PATIENT | {
            "max_failed_probes": 4,
            "without_prefill": FailurePolicy.RECOMPUTE,
        }
        async with stage(*TWO_OF_EACH, **settings) as s:
            await until_ready(s, (200, 2, 2))
            asked, other = s.prefillers if is_prefill else s.decoders

            async def falls_silent(request: web.Request, body: Any) -> web.StreamResponse:
                asked.is_stopped = True
                return await hangs(request, body)

            asked.behaviour = falls_silent
            while not asked.calls:
                bad = asyncio.create_task(s.post(ONE | {"user": "bad"}))
                entered = asyncio.create_task(asked.entered.wait())
                await asyncio.wait([bad, entered], return_when=asyncio.FIRST_COMPLETED)
            before = num_bad(other, *s.decoders)
            while asked.num_ignored < 2:
                await asyncio.sleep(0.01)
            later = [asyncio.create_task(s.post(ONE)) for _ in range(2)]
            status, _, body = await bad
            assert (status, b"it may be the cause" in body) == (502, True)
            assert [(await task)[0] for task in later] == [200, 200]
            assert num_bad(other, *s.decoders) == before

    uvloop.run(scene())


def num_bad(*engines: StubEngine) -> int:
    return sum(call.body.get("user") == "bad" for engine in engines for call in engine.calls)


def test_a_leg_at_the_last_instance_waits_for_it() -> None:
    """No other instance could answer, and this one may continue: a pause is not a death."""

    async def scene() -> None:
        goes_on = asyncio.Event()

        async def pauses(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            s.d.is_stopped = True
            await goes_on.wait()
            s.d.is_stopped = False
            return await completes(request, body)

        async with stage(prefills, pauses, **QUICK) as s:
            await until_ready(s, (200, 1, 1))
            asked = asyncio.create_task(s.post(ONE))
            await until_ready(s, (503, 1, 0))
            await asyncio.sleep(0.3)  # several more probes
            goes_on.set()
            assert ((await asked)[0], len(s.d.calls)) == (200, 1)

    uvloop.run(scene())


def test_a_stream_that_has_begun_is_not_given_up() -> None:
    async def scene() -> None:
        goes_on = asyncio.Event()

        async def pauses(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(b'data: {"n": 1}\n\n')
            s.d.is_stopped = True
            await goes_on.wait()
            await response.write(b"data: [DONE]\n\n")
            return response

        async with stage(prefills, [pauses, streams([b"data: {}\n\n"])], **QUICK) as s:
            await until_ready(s, (200, 1, 2))
            while not s.d.calls:
                asked = asyncio.create_task(s.post(ONE | {"stream": True}))
                await asyncio.wait(
                    [asked, asyncio.create_task(s.d.entered.wait())],
                    return_when=asyncio.FIRST_COMPLETED,
                )
            await until_ready(s, (200, 1, 1))
            await asyncio.sleep(0.3)
            goes_on.set()
            assert (await asked)[2] == b'data: {"n": 1}\n\ndata: [DONE]\n\n'

    uvloop.run(scene())


def test_an_instance_that_still_sends_is_not_silent() -> None:
    """Its health probes fail because the instance is busy. But one of its streams still sends data,
    so it is right that a leg keeps waiting for the instance.
    """

    async def scene() -> None:
        goes_on = asyncio.Event()

        async def busy(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            if not body.get("stream"):
                await goes_on.wait()
                return await completes(request, body)
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            while not goes_on.is_set():
                await response.write(b"data: {}\n\n")
                await asyncio.sleep(0.005)
            return response

        async with stage(prefills, [busy, echoes], **QUICK) as s:
            await until_ready(s, (200, 1, 2))
            # Instances take turns: of two requests of each kind, one goes to the busy instance.
            asked = [
                asyncio.create_task(s.post(ONE | {"stream": is_stream}))
                for is_stream in (False, False, True, True)
            ]
            while len(s.d.calls) < 2:
                await asyncio.sleep(0.01)
            assert {call.body["stream"] for call in s.d.calls} == {False, True}
            s.d.is_stopped = True
            await until_ready(s, (200, 1, 1))
            await asyncio.sleep(0.3)
            assert sum(task.done() for task in asked) == 2
            goes_on.set()
            assert [(await task)[0] for task in asked] == [200] * 4
            assert await s.metric("kvferry:router_retries_total") == 0

    uvloop.run(scene())


ODD_TIERS = b"".join(
    b'kvferry:%s{tier="%s"} %s\n' % (name, tier, value)
    for name in (b"tier_used_bytes", b"tier_max_bytes", b"tier_loaded_bytes_total")
    for tier in (b"<script>", b"\xff\xfe", b"\\", b'a"b', b"}", b"__proto__", b"y" * 10_000)
    for value in (b"NaN", b"-1", b"1e999", b"5e-324", b"9e15", b"", b"0x1", b"\x00")
)


def test_odd_tiers_of_an_instance_change_nothing_but_its_own_figures() -> None:
    async def scene() -> None:
        async with stage(prefills, completes, **QUICK | {"probe": 5.0}) as s:
            s.p.more_metrics = ODD_TIERS + b"kvferry:offload_hit_tokens_total 7\n" * 1000
            s.d.more_metrics = b'kvferry:tier_used_bytes{tier="cpu"} 8\n'
            offloads: list[Any] = [None, None]
            while None in offloads:
                async with s.session.get(f"{s.url}/dashboard/state", headers=AS_ADMIN) as answer:
                    assert answer.status == 200
                    offloads = [one["offload"] for one in (await answer.json())["instances"]]
            odd, good = ([(one["name"], one["used_bytes"]) for one in x["tiers"]] for x in offloads)
            assert good == [("cpu", 8)]
            assert ("<script>", 9e15) in odd
            assert all(len(name) <= 256 for name, _ in odd)
            assert (await readiness(s), (await s.post(ONE))[0]) == ((200, 1, 1), 200)

    uvloop.run(scene())
