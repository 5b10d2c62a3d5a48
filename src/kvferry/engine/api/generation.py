"""The sequences of one HTTP request, running in the engine: their outputs merged as they come, and aborted when the request is left.

Runs on the API's loop. Whatever way a handler ends (answer sent, stop string, error, client gone), leaving the context
closes every stream, and that aborts what still runs.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Self

from kvferry.engine.api.assembly import Delta, TextAssembler
from kvferry.engine.api.engine import Engine
from kvferry.engine.link import OutputStream
from kvferry.engine.messages import AddRequest, RequestOutput
from kvferry.errors import RemoteProtocolError, RequestRefused

__all__ = ["Generation"]


class Generation:
    """An async context; entering it hands the requests to the engine, all in one frame."""

    def __init__(self, engine: Engine, requests: Sequence[AddRequest], assemblers: Sequence[TextAssembler]) -> None:
        assert len(requests) == len(assemblers)
        self._engine = engine
        self._requests = requests
        self._assemblers = assemblers
        self._streams: list[OutputStream] = []

    @property
    def prompts(self) -> list[list[int]]:
        """The prompt of each choice."""
        return [request.prompt_token_ids for request in self._requests]

    async def __aenter__(self) -> Self:
        try:
            self._streams = self._engine.add(self._requests)
        except RemoteProtocolError as error:
            raise RequestRefused(str(error)) from error
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for stream in self._streams:
            stream.close()

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """What each choice gains, as it comes, until all have finished. RequestRefused when the engine fails one of them."""
        async with aclosing(_merged(self._streams)) as outputs:
            async for position, output in outputs:
                if output.finish_reason == "error":
                    raise RequestRefused(output.error or "the engine could not finish this request", status=_error_status(output))
                delta = self._assemblers[position].push(output)
                if delta.finish_reason is not None:
                    self._streams[position].close()
                yield delta


def _error_status(output: RequestOutput) -> int:
    return output.error_status if 400 <= output.error_status <= 599 else 500


async def _merged(streams: Sequence[OutputStream]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs of all streams with their position, in order of arrival. A stream closed by the consumer is not asked again."""
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    waiting = {asyncio.ensure_future(anext(stream)): position for position, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                position = waiting.pop(task)
                try:
                    output = task.result()
                except StopAsyncIteration:
                    continue
                yield position, output
                waiting[asyncio.ensure_future(anext(streams[position]))] = position
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
