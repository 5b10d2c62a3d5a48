"""Tests streams that end with their connection: only the last event distinguishes a complete stream
from one that a dead instance left incomplete.
"""

import asyncio

import pytest
import uvloop
from tests.router.http.kit import instance, read_request
from tests.router.stubs import AS_ADMIN, prefills, stage
from tests.router.test_proxy import STREAMED

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
FIRST = b'data: {"text":"a"}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize("conversation", [{}, {"conversation_id": "c"}])
@pytest.mark.parametrize(
    ("said", "is_whole"), [(FIRST + DONE, True), (FIRST, False), (FIRST + b"data: [DO", False)]
)
def test_a_part_never_looks_whole(
    said: bytes, is_whole: bool, conversation: dict[str, str]
) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(HEAD + said)
        await writer.drain()

    async def scene() -> None:
        async with instance(talk) as target, stage(prefills, []) as s:
            async with s.session.post(
                f"{s.url}/admin/instances",
                json={"role": "decode", "url": f"http://{target.address}"},
                headers=AS_ADMIN,
            ) as answer:
                assert answer.status == 201
            status, _, body = await s.post(STREAMED | conversation)
            assert (status, body[: len(FIRST)]) == (200, FIRST)
            assert (b"did not complete its answer" in body) is not is_whole
            assert (body == said) is is_whole
            assert s.releases.tickets == ([] if is_whole else ["ticket-1"])

    uvloop.run(scene())
