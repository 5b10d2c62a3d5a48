"""Tests that a client gets the reason of a failed transfer although the engine's answer lacks it:
vLLM answers `500 Internal server error`, or starts its stream with that error.
"""

import asyncio
import json
import logging
from concurrent.futures import Future

import pytest
import uvloop
from tests.router.stubs import (
    Behaviour,
    StubEngine,
    answers,
    completes,
    instance,
    prefills,
    stage,
    streams,
)

from kvferry.router.fleet.instances import Instance, Role
from kvferry.router.serving.legs import make_failure_query_by
from kvferry.types import Address

REASON = 'the lease of "cmpl-a" had expired'
SILENT = json.dumps({"error": {"message": "Internal server error", "code": 500}})
EVENT = b"data: %b\n\n" % SILENT.encode()
SILENT_ANSWERS = {
    "whole": answers(500, SILENT),
    "stream": streams([EVENT, b"data: [DONE]\n\n"]),
}


def leg_id(engine: StubEngine, number: int = -1) -> str:
    found: str = engine.calls[number].body["kv_transfer_params"]["leg_id"]
    return found


def message(body: bytes) -> str:
    text: str = json.loads(body)["error"]["message"]
    return text


class SideChannel:
    """Knows the reason for every failed leg, and records who was asked about which leg."""

    def __init__(self, reason: str = REASON) -> None:
        self.reason = reason
        self.asked: list[tuple[Role, str]] = []

    async def __call__(self, asked: Instance, leg: str) -> str:
        self.asked.append((asked.role, leg))
        return self.reason


@pytest.mark.parametrize("kind", SILENT_ANSWERS)
def test_the_client_and_the_log_get_the_reason_that_d_did_not_give(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> None:
        side_channel = SideChannel()
        async with stage(
            prefills, SILENT_ANSWERS[kind], ask_failure=side_channel, max_retries=1
        ) as s:
            with caplog.at_level(logging.INFO, "kvferry"):
                status, _, body = await s.post(
                    {"prompt": "a", "stream": kind == "stream"}, X_Request_Id="mine"
                )
            assert status == 502
            assert REASON in message(body)
            # The retry is a leg of its own.
            assert side_channel.asked == [
                (Role.DECODE, leg_id(s.d, 0)),
                (Role.DECODE, leg_id(s.d, 1)),
            ]
            assert leg_id(s.d, 0) != leg_id(s.d, 1)
            assert len(s.releases.tickets) == 2
        lines = [text for text in caplog.messages if REASON in text]
        assert [text.partition(": ")[0] for text in lines] == [
            "retrying request=mine",
            "request failed request=mine",
        ]

    uvloop.run(scene())


@pytest.mark.parametrize("kind", SILENT_ANSWERS)
def test_the_control_without_a_reason_the_client_gets_ds_own_words(kind: str) -> None:
    async def scene() -> None:
        async with stage(prefills, SILENT_ANSWERS[kind], ask_failure=SideChannel("")) as s:
            status, _, body = await s.post({"prompt": "a", "stream": kind == "stream"})
            assert (status, body.startswith(EVENT if kind == "stream" else SILENT.encode())) == (
                500 if kind == "whole" else 200,
                True,
            )

    uvloop.run(scene())


def test_a_d_that_gives_the_reason_itself_is_quoted_as_it_is() -> None:
    async def scene() -> None:
        told = json.dumps({"error": {"message": f"transfer failed: {REASON}"}})
        async with stage(prefills, answers(500, told), ask_failure=SideChannel()) as s:
            status, _, body = await s.post({"prompt": "a"})
            assert (status, body) == (500, told.encode())

    uvloop.run(scene())


def test_the_reason_of_p_is_in_the_error_if_there_is_no_other_answer() -> None:
    async def scene() -> None:
        side_channel = SideChannel()
        async with stage(answers(500, SILENT), completes, ask_failure=side_channel) as s:
            status, _, body = await s.post({"prompt": "a"})
            assert status == 502
            assert REASON in message(body)
            assert side_channel.asked == [(Role.PREFILL, leg_id(s.p))]

    uvloop.run(scene())


@pytest.mark.parametrize("behave", [answers(503, SILENT), answers(400, SILENT), completes])
def test_nobody_is_asked_about_legs_without_a_failed_transfer(behave: Behaviour) -> None:
    async def scene() -> None:
        side_channel = SideChannel()
        async with stage(prefills, behave, ask_failure=side_channel) as s:
            await s.post({"prompt": "a"})
            assert side_channel.asked == []

    uvloop.run(scene())


def test_each_of_several_prompts_has_its_own_reason() -> None:
    async def scene() -> None:
        async with stage(prefills, SILENT_ANSWERS["whole"], ask_failure=SideChannel()) as s:
            status, _, body = await s.post({"prompt": ["a", "b"]})
            assert status == 502
            assert message(body).startswith("prompt ")
            assert REASON in message(body)

    uvloop.run(scene())


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_side_channel_that_says_nothing_costs_a_bounded_time(is_silent: bool) -> None:
    async def scene() -> None:
        asked: list[tuple[Address, str]] = []
        answer: Future[str] = Future()

        def query(address: Address, leg: str) -> "Future[str]":
            asked.append((address, leg))
            if not is_silent:
                answer.set_result(REASON)
            return answer

        async def find_side_channel(asked: Instance) -> Address | None:
            return Address("10.0.0.1", 5600)

        ask = make_failure_query_by(query, find_side_channel)
        async with asyncio.timeout(60):
            assert await ask(instance(Role.DECODE, 1), "leg") == (None if is_silent else REASON)
        assert asked == [(Address("10.0.0.1", 5600), "leg")]
        await asyncio.sleep(0)  # the cancellation is passed on in the next tick
        assert answer.cancelled() == is_silent

    uvloop.run(scene())
