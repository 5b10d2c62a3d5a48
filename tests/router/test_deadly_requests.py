"""Tests a request that kills every instance that gets it: it may cost as many instances as there
are tries, never the whole fleet.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import uvloop
from tests.router.http.kit import read_request
from tests.router.stubs import AS_ADMIN, prefills, stage
from tests.router.test_proxy import ONE

NUM_INSTANCES = 6
NUM_RETRIES = 2
GOOD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


class Mortal:
    """An instance that answers, and keeps its connections open, until it gets the deadly request;
    then it stops listening.
    """

    def __init__(self) -> None:
        self.num_deaths = 0
        self.port = 0
        self._server: asyncio.Server | None = None

    @asynccontextmanager
    async def living(self) -> AsyncIterator["Mortal"]:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self._server is not None
        try:
            while True:
                _, body = await read_request(reader)
                if b"deadly" in body:
                    self.num_deaths += 1
                    self._server.close()
                    return
                writer.write(GOOD)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()


@pytest.mark.parametrize("is_warm", [False, True])
def test_a_deadly_request_takes_no_more_instances_with_it_than_there_are_tries(
    is_warm: bool,
) -> None:
    """A closed keep-alive connection is replaced once by a fresh one. If no fresh connection can be
    made, the request may still have been sent on the old one.
    """

    async def scene() -> None:
        async with AsyncExitStack() as stack:
            mortals = [
                await stack.enter_async_context(Mortal().living()) for _ in range(NUM_INSTANCES)
            ]
            s = await stack.enter_async_context(
                stage(prefills, [], max_retries=NUM_RETRIES, failures_in_a_row=100)
            )
            for mortal in mortals:
                new = {"role": "decode", "url": f"http://127.0.0.1:{mortal.port}"}
                async with s.session.post(
                    f"{s.url}/admin/instances", json=new, headers=AS_ADMIN
                ) as answer:
                    assert answer.status == 201
            if is_warm:
                for _ in mortals:
                    assert (await s.post(ONE))[0] == 200
            status, _, _ = await s.post(ONE | {"prompt": "deadly"})
            assert status == 502
            assert sum(mortal.num_deaths for mortal in mortals) == 1 + NUM_RETRIES
            assert (await s.post(ONE))[0] == 200, "the others serve"

    uvloop.run(scene())
