"""Tests legs that run in parallel once P is known to push: what each leg carries, and what happens
to one leg when the other fails.
"""

import asyncio
import json
from typing import Any

import pytest
import uvloop
from aiohttp import web
from tests.router.stubs import (
    DEADLINE_S,
    KEEP_NOTHING,
    Behaviour,
    Stage,
    answers,
    completes,
    drops_connection,
    hangs,
    prefills,
    stage,
    streams,
)

from kvferry.protocol.tickets import PushTicket, PushTicketKey
from kvferry.router.serving import push as last_look

KEY = PushTicketKey(b"secret")
ONE = {"prompt": "hello", "max_tokens": 4}
PUSHED = {
    "do_remote_prefill": True,
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "ticket": "ticket-1",
    "remote_engine_id": "p",
    "remote_epoch": "e1",
    "tp_size": 2,
}


async def pushes(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"id": "p", "choices": [{"text": "x"}], "kv_transfer_params": PUSHED})


def first_then(first: Behaviour, then: Behaviour) -> Behaviour:
    """Behaves as `first` for the first request and as `then` afterwards."""
    turns = iter([first])

    async def behave(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await next(turns, then)(request, body)

    return behave


async def let_the_loop_run() -> None:
    """Run the event loop 500 times. Client, router and engines share it, and an answer needs fewer
    iterations to get from one of them to another.
    """
    for _ in range(500):
        await asyncio.sleep(0)


def leg(stage: Stage, number: int = -1) -> tuple[dict[str, Any], dict[str, Any]]:
    """The transfer parameters that P and D received."""
    return stage.p.calls[number].body["kv_transfer_params"], stage.d.calls[number].body[
        "kv_transfer_params"
    ]


def test_p_is_asked_first_once_and_both_at_once_from_then_on() -> None:
    async def scene() -> None:
        arrived = asyncio.Event()

        async def waits_for_d(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await arrived.wait()
            return await pushes(request, body)

        async def arrives(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            arrived.set()
            return await completes(request, body)

        async with stage(
            first_then(pushes, waits_for_d), first_then(completes, arrives), push_key=KEY
        ) as s:
            assert (await s.post(ONE))[0] == 200
            assert leg(s)[1] == PUSHED | KEEP_NOTHING
            assert (await s.post(ONE, X_Request_Id="same"))[0] == 200
            to_p, to_d = leg(s)
            ticket = KEY.open(to_d["push_ticket"])
            assert ticket == PushTicket(ticket.match_id, "p", "e1", "127.0.0.1", 5600, 2)
            assert (to_p["push_ticket"], to_p["do_remote_decode"]) == (to_d["push_ticket"], True)
            assert (to_d["do_remote_prefill"], "ticket" in to_d) == (True, False)
            assert [engine.calls[-1].headers["X-Request-Id"] for engine in (s.p, s.d)] == [
                "same",
                "same",
            ]
            assert s.releases.handovers == []

    uvloop.run(scene())


def test_every_request_has_a_handover_of_its_own() -> None:
    async def scene() -> None:
        async with stage(pushes, completes, push_key=KEY) as s:
            for _ in range(3):
                await s.post(ONE)
            handovers = [KEY.open(leg(s, number)[1]["push_ticket"]).match_id for number in (1, 2)]
            assert len(set(handovers)) == 2

    uvloop.run(scene())


@pytest.mark.parametrize(("behaviour", "key"), [(prefills, KEY), (pushes, None)])
def test_p_is_always_asked_first_if_it_does_not_push_or_nothing_can_be_signed(
    behaviour: Behaviour, key: PushTicketKey | None
) -> None:
    async def scene() -> None:
        async with stage(behaviour, completes, push_key=key) as s:
            for _ in range(2):
                await s.post(ONE)
            assert "push_ticket" not in leg(s)[0]
            assert leg(s)[1]["ticket"] == "ticket-1"

    uvloop.run(scene())


def test_a_p_that_objects_ends_d_and_is_the_answer() -> None:
    async def scene() -> None:
        objects = answers(400, '{"error":{"message":"too long"}}')
        async with stage(
            first_then(pushes, objects), first_then(completes, hangs), push_key=KEY
        ) as s:
            await s.post(ONE)
            status, _, body = await s.post(ONE)
            assert (status, json.loads(body)["error"]["message"]) == (400, "too long")
            await s.d.cancelled.wait()

    uvloop.run(scene())


def test_a_p_that_fails_ends_d_and_is_asked_first_again() -> None:
    async def scene() -> None:
        dies_once = first_then(pushes, first_then(answers(500, "boom"), pushes))
        async with stage(
            dies_once, first_then(completes, first_then(hangs, completes)), push_key=KEY
        ) as s:
            await s.post(ONE)
            status, _, body = await s.post(ONE)
            assert (status, "prefill instance" in json.loads(body)["error"]["message"]) == (
                502,
                True,
            )
            await s.d.cancelled.wait()
            assert (await s.post(ONE))[0] == 200
            assert leg(s)[1]["ticket"] == "ticket-1"

    uvloop.run(scene())


def test_a_d_that_fails_ends_p() -> None:
    async def scene() -> None:
        async with stage(
            first_then(pushes, hangs), first_then(completes, drops_connection), push_key=KEY
        ) as s:
            await s.post(ONE)
            status, _, body = await s.post(ONE)
            assert (status, "decode instance" in json.loads(body)["error"]["message"]) == (
                502,
                True,
            )
            await s.p.cancelled.wait()

    uvloop.run(scene())


def test_a_d_that_fails_after_p_has_answered_has_the_blocks_given_back() -> None:
    async def scene() -> None:
        answered = asyncio.Event()

        async def pushes_and_says_so(
            request: web.Request, body: dict[str, Any]
        ) -> web.StreamResponse:
            answered.set()
            return await pushes(request, body)

        async def fails_later(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await answered.wait()
            await let_the_loop_run()
            return await drops_connection(request, body)

        async with stage(
            first_then(pushes, pushes_and_says_so), first_then(completes, fails_later), push_key=KEY
        ) as s:
            await s.post(ONE)
            assert (await s.post(ONE))[0] == 502
            await s.releases.happened.wait()
            assert s.releases.tickets == ["ticket-1"]

    uvloop.run(scene())


def test_a_d_that_could_not_get_the_kv_has_p_asked_first_next_time() -> None:
    async def scene() -> None:
        fails = answers(502, '{"error":{"message":"restarted"}}')
        async with stage(
            pushes, first_then(completes, first_then(fails, completes)), push_key=KEY
        ) as s:
            assert [(await s.post(ONE))[0] for _ in range(3)] == [200, 502, 200]
            assert leg(s)[1]["ticket"] == "ticket-1"

    uvloop.run(scene())


def test_a_p_that_refuses_is_replaced_by_another() -> None:
    async def scene() -> None:
        refuses = answers(503, '{"error":{"message":"draining"}}')
        async with stage([first_then(pushes, refuses), pushes], completes, push_key=KEY) as s:
            assert [(await s.post(ONE))[0] for _ in range(4)] == [200] * 4
            assert "push_ticket" in s.prefillers[1].calls[-1].body["kv_transfer_params"]

    uvloop.run(scene())


def test_a_client_that_leaves_ends_both_legs() -> None:
    async def scene() -> None:
        async with stage(
            first_then(pushes, hangs), first_then(completes, hangs), push_key=KEY
        ) as s:
            await s.post(ONE)
            for engine in (s.p, s.d):
                engine.entered.clear()
            client = asyncio.create_task(s.post(ONE))
            await asyncio.gather(s.p.entered.wait(), s.d.entered.wait())
            client.cancel()
            await asyncio.gather(s.p.cancelled.wait(), s.d.cancelled.wait())
            # P's answer may be lost with its connection, although P holds blocks.
            assert s.releases.push_tickets == [leg(s)[1]["push_ticket"]]

    uvloop.run(scene())


def test_the_push_ticket_of_a_request_that_d_answers_is_not_released() -> None:
    async def scene() -> None:
        async with stage(pushes, completes, push_key=KEY) as s:
            for _ in range(3):
                assert (await s.post(ONE))[0] == 200
            assert leg(s)[1]["push_ticket"]
            assert s.releases.push_tickets == []

    uvloop.run(scene())


def test_what_becomes_of_p_changes_no_stream_that_has_begun() -> None:
    async def scene() -> None:
        fails_later = asyncio.Event()

        async def dies(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await fails_later.wait()
            return await drops_connection(request, body)

        async def answers_slowly(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(b"data: 1\n\n")
            fails_later.set()
            await let_the_loop_run()
            await response.write(b"data: [DONE]\n\n")
            return response

        async with stage(
            first_then(pushes, dies), first_then(completes, answers_slowly), push_key=KEY
        ) as s:
            await s.post(ONE)
            status, _, body = await s.post({**ONE, "stream": True})
            assert (status, body) == (200, b"data: 1\n\ndata: [DONE]\n\n")

    uvloop.run(scene())


def test_a_stream_arrives_byte_for_byte() -> None:
    async def scene() -> None:
        chunks = [b'data: {"text":"a"}\n\n', b"data: [DONE]\n\n"]
        async with stage(pushes, first_then(completes, streams(chunks)), push_key=KEY) as s:
            await s.post(ONE)
            assert (await s.post({**ONE, "stream": True}))[2] == b"".join(chunks)

    uvloop.run(scene())


def says(status: int, start: bytes, content_type: str, said: asyncio.Event) -> Behaviour:
    """Begins an answer and never ends it."""

    async def behave(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(status=status, headers={"Content-Type": content_type})
        await response.prepare(request)
        if start:
            await response.write(start)
        said.set()
        return await hangs(request, body)

    return behave


def after(event: asyncio.Event, then: Behaviour) -> Behaviour:
    async def behave(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await event.wait()
        await let_the_loop_run()
        return await then(request, body)

    return behave


async def read_raw(stage: Stage, body: dict[str, Any], until: asyncio.Event) -> bytes:
    """What the client has received when P has finished, which `until` signals."""
    host, port = stage.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data
    )
    raw = await reader.read(1)
    await until.wait()
    await let_the_loop_run()
    writer.write_eof()
    raw += await reader.read()
    writer.close()
    return raw


@pytest.mark.parametrize("objects", [True, False])
def test_a_client_gets_one_answer_when_both_legs_object(objects: bool) -> None:
    async def scene() -> None:
        said, through = asyncio.Event(), asyncio.Event()

        async def ends(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            through.set()
            return await (answers(400, '{"error":"P"}') if objects else drops_connection)(
                request, body
            )

        begins = says(400, b'{"error":{"mess', "application/json", said)
        async with stage(
            first_then(pushes, after(said, ends)), first_then(completes, begins), push_key=KEY
        ) as s:
            await s.post(ONE)
            raw = await read_raw(s, ONE, through)
            assert raw.count(b"HTTP/1.1") == 1, raw
            assert b"HTTP/1.1 400" in raw or not objects

    uvloop.run(scene())


@pytest.mark.parametrize("start", [b"", b": hello\n\n"])
@pytest.mark.parametrize(
    ("p_ends", "status"),
    [(answers(400, "{}"), 400), (answers(503, "{}"), 503), (drops_connection, 502)],
)
def test_a_d_that_has_opened_its_stream_but_said_nothing_is_ended_by_a_p_that_fails(
    start: bytes, p_ends: Behaviour, status: int
) -> None:
    async def scene() -> None:
        said = asyncio.Event()
        begins = says(200, start, "text/event-stream", said)
        async with stage(
            first_then(pushes, after(said, p_ends)), first_then(completes, begins), push_key=KEY
        ) as s:
            await s.post(ONE)
            assert (await s.post({**ONE, "stream": True}))[0] == status
            await s.d.cancelled.wait()

    uvloop.run(scene())


def test_what_d_has_said_before_its_first_event_reaches_the_client() -> None:
    async def scene() -> None:
        chunks = [b": hello\n\n", b"data: 1\n\n", b"data: [DONE]\n\n"]
        async with stage(pushes, first_then(completes, streams(chunks)), push_key=KEY) as s:
            await s.post(ONE)
            assert (await s.post({**ONE, "stream": True}))[2] == b"".join(chunks)

    uvloop.run(scene())


def test_a_client_whose_d_needs_nothing_does_not_wait_for_p(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(last_look, "GRACE_S", 10 * DEADLINE_S)

    async def scene() -> None:
        served = asyncio.Event()
        async with stage(first_then(pushes, after(served, pushes)), completes, push_key=KEY) as s:
            for _ in range(4):
                assert (await s.post(ONE))[0] == 200
            served.set()

    uvloop.run(scene())


def test_a_ticket_that_comes_just_after_d_has_failed_is_given_back() -> None:
    async def scene() -> None:
        failed = asyncio.Event()

        async def fails(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            failed.set()
            return await drops_connection(request, body)

        async with stage(
            first_then(pushes, after(failed, pushes)), first_then(completes, fails), push_key=KEY
        ) as s:
            await s.post(ONE)
            assert (await s.post(ONE))[0] == 502
            await s.releases.happened.wait()
            assert s.releases.tickets == ["ticket-1"]

    uvloop.run(scene())
