"""The load client of the router benchmark: each connection sends the next request after its answer.

Runs on one event loop with callbacks, because a coroutine per request would cost time. Every answer
is compared with the bytes that D sent. The time of a request ends at the first byte of the body,
because some routers send the head before the router has sent a request to P or D.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from kvferry.bench.router.http1 import MalformedHttp, ParsedResponse, ResponseReader
from kvferry.bench.router.messages import BenchMessages, post
from kvferry.errors import KVFerryError
from kvferry.types import Address

DIAL_S = 10.0
PATIENCE_S = 60.0
"""The time that requests in progress have to finish when the time of the run is over."""


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """The length of a run: a time, or a number of requests."""

    seconds: float | None = None
    requests: int | None = None


@dataclass(slots=True)
class LoadResult:
    """The measurements of one run."""

    ttfb_s: list[float] = field(default_factory=list)
    """The time to first byte of each correct answer."""
    failures: Counter[str] = field(default_factory=Counter)
    wall_s: float = 0.0

    @property
    def num_failed(self) -> int:
        return sum(self.failures.values())

    @property
    def rps(self) -> float:
        """The correct answers per second."""
        return len(self.ttfb_s) / self.wall_s if self.wall_s else 0.0


Done = Callable[["LoadClient", float, str | None], None]
"""A callback with the client, the time to the first byte of the body, and the fault of the answer,
if any.
"""


class LoadClient(Protocol):
    """One client with one request at a time."""

    def ask(self, done: Done) -> None: ...

    def close(self) -> None: ...


class _HttpConnection(asyncio.Protocol):
    """One connection: sends a request, reports the response, and reconnects when the peer has
    closed.
    """

    def __init__(
        self,
        address: Address,
        on_answer: Callable[[ParsedResponse], None],
        on_body: Callable[[], None],
    ) -> None:
        self._address = address
        self._on_answer = on_answer
        self._on_body = on_body
        self._reader = ResponseReader()
        self._transport: asyncio.Transport | None = None
        self._is_waiting = False
        self._has_body = False
        self._dialing: asyncio.Task[None] | None = None

    async def dial(self) -> None:
        try:
            async with asyncio.timeout(DIAL_S):
                await asyncio.get_running_loop().create_connection(
                    lambda: self, self._address.host, self._address.port
                )
        except (OSError, TimeoutError) as error:
            raise KVFerryError(f"nobody answers on {self._address}: {error}") from None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def send(self, message: bytes) -> None:
        self._is_waiting, self._has_body = True, False
        if self._transport is None or self._transport.is_closing():
            self._dialing = asyncio.get_running_loop().create_task(self._send_again(message))
        else:
            self._transport.write(message)

    async def _send_again(self, message: bytes) -> None:
        try:
            await self.dial()
        except KVFerryError as error:
            self._finish(ParsedResponse(0, str(error).encode(), keeps_alive=False))
            return
        assert self._transport is not None
        self._transport.write(message)

    def data_received(self, data: bytes) -> None:
        try:
            answer = self._reader.feed(data)
        except MalformedHttp as error:
            self._give_up(str(error))
            return
        if not self._has_body and (answer is not None or self._reader.has_body):
            self._has_body = True
            self._on_body()
        if answer is not None:
            if not answer.keeps_alive:
                self._drop()
            self._finish(answer)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._is_waiting:
            answer = self._reader.end()
            self._finish(answer) if answer is not None else self._give_up(
                "the connection was closed before the answer was whole"
            )

    def close(self) -> None:
        self._is_waiting = False
        if self._dialing is not None:
            self._dialing.cancel()
        self._drop()

    def _give_up(self, why: str) -> None:
        self._drop()
        self._finish(ParsedResponse(0, why.encode(), keeps_alive=False))

    def _finish(self, answer: ParsedResponse) -> None:
        self._is_waiting = False
        self._on_answer(answer)

    def _drop(self) -> None:
        self._reader = ResponseReader()
        if self._transport is not None:
            self._transport.abort()
            self._transport = None


class _RouterClient:
    """A client of a router."""

    def __init__(self, messages: BenchMessages, router: Address) -> None:
        self._expected = messages.stream_body
        self._message = post(str(router), messages.request_body)
        self._connection = _HttpConnection(router, self._answered, self._begun)
        self._done: Done | None = None
        self._asked_at = 0.0
        self._ttfb_s = 0.0

    async def dial(self) -> None:
        await self._connection.dial()

    def ask(self, done: Done) -> None:
        self._done = done
        self._asked_at = time.perf_counter()
        self._connection.send(self._message)

    def close(self) -> None:
        self._connection.close()

    def _begun(self) -> None:
        self._ttfb_s = time.perf_counter() - self._asked_at

    def _answered(self, answer: ParsedResponse) -> None:
        assert self._done is not None
        self._done(self, self._ttfb_s, _mismatch(answer, self._expected))


class _DirectClient:
    """A client without a router: sends requests to P, then to D with P's parameters."""

    def __init__(self, messages: BenchMessages, prefill: Address, decode: Address) -> None:
        self._messages = messages
        self._decode_host = str(decode)
        self._prefill_message = post(str(prefill), messages.prefill_body)
        self._prefill = _HttpConnection(prefill, self._prefilled, _ignore)
        self._decode = _HttpConnection(decode, self._answered, self._begun)
        self._done: Done | None = None
        self._asked_at = 0.0
        self._ttfb_s = 0.0

    async def dial(self) -> None:
        await self._prefill.dial()
        await self._decode.dial()

    def ask(self, done: Done) -> None:
        self._done = done
        self._asked_at = time.perf_counter()
        self._prefill.send(self._prefill_message)

    def close(self) -> None:
        self._prefill.close()
        self._decode.close()

    def _prefilled(self, answer: ParsedResponse) -> None:
        if answer.status != 200:
            self._answered(answer)
            return
        self._decode.send(post(self._decode_host, self._messages.decode_body(answer.body)))

    def _begun(self) -> None:
        self._ttfb_s = time.perf_counter() - self._asked_at

    def _answered(self, answer: ParsedResponse) -> None:
        assert self._done is not None
        self._done(self, self._ttfb_s, _mismatch(answer, self._messages.stream_body))


async def connect_router_client(messages: BenchMessages, router: Address) -> LoadClient:
    client = _RouterClient(messages, router)
    await client.dial()
    return client


async def connect_direct_client(
    messages: BenchMessages, prefill: Address, decode: Address
) -> LoadClient:
    client = _DirectClient(messages, prefill, decode)
    await client.dial()
    return client


async def run_load(clients: Sequence[LoadClient], load: LoadSpec) -> LoadResult:
    """Run all clients until the load is done and every request is answered.

    Raise KVFerryError when an answer does not arrive in time.
    """
    runner = _LoadRunner(clients, load)
    try:
        async with asyncio.timeout((load.seconds or 0.0) + PATIENCE_S):
            return await runner.run()
    except TimeoutError:
        raise KVFerryError(f"an answer did not come within {PATIENCE_S:.0f} s") from None


class _LoadRunner:
    """Keeps every client busy until the load is done."""

    def __init__(self, clients: Sequence[LoadClient], load: LoadSpec) -> None:
        self._clients = clients
        self._result = LoadResult()
        self._left = load.requests if load.requests is not None else 1 << 60
        self._seconds = load.seconds if load.seconds is not None else 1e9
        self._deadline = 0.0
        self._num_in_flight = 0
        self._is_over = asyncio.get_running_loop().create_future()

    async def run(self) -> LoadResult:
        started = time.perf_counter()
        self._deadline = started + self._seconds
        for client in self._clients:
            self._send_next(client)
        if self._num_in_flight:
            await self._is_over
        self._result.wall_s = time.perf_counter() - started
        return self._result

    def _send_next(self, client: LoadClient) -> None:
        if self._left > 0:
            self._left -= 1
            self._num_in_flight += 1
            client.ask(self._done)

    def _done(self, client: LoadClient, ttfb_s: float, mismatch: str | None) -> None:
        self._num_in_flight -= 1
        if mismatch is None:
            self._result.ttfb_s.append(ttfb_s)
        else:
            self._result.failures[mismatch] += 1
        if time.perf_counter() < self._deadline:
            self._send_next(client)
        if self._num_in_flight == 0 and not self._is_over.done():
            self._is_over.set_result(None)


def _mismatch(answer: ParsedResponse, expected: bytes) -> str | None:
    """Return a short reason why this answer is not what D sent; None if the answer is correct."""
    if answer.status == 200 and answer.body == expected:
        return None
    if answer.status == 200:
        return (
            f"the stream is not what D sent ({answer.body.count(b'data: ')} of "
            f"{expected.count(b'data: ')} events)"
        )
    return (
        f"status {answer.status}: {_message(answer.body)}"
        if answer.status
        else answer.body.decode(errors="replace")
    )


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])[:200]
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")


def _ignore() -> None:
    return
