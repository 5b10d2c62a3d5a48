"""Reads large request bodies in a process of its own, so that other clients do not wait.

Decoding a body of 60 MB takes 0.1 to 0.3 s, and Python's GIL is held all the while, so a thread
would not help. Each large body gets a process that ends with it: such requests are rare, and their
prompts take an engine far longer than the start of a process. The process returns where the values
are in the body, and the router uses them there. Runs on the event loop; `main` is the process.
"""

import asyncio
import logging
import sys
from dataclasses import dataclass, field

import msgspec

from kvferry.router.routes.table import Api
from kvferry.router.serving.client_request import (
    ClientRequest,
    InvalidRequest,
    read_client_request,
)

_log = logging.getLogger(__name__)

MAX_INLINE_BYTES = 4 * 1024 * 1024
"""Largest body that is read on the event loop, which takes up to 20 ms."""
_MAX_PROCESSES = 2
_TIMEOUT_S = 60.0
_MAX_RETURNED_BYTES = 64 * 1024
"""Largest value that the process returns as it is. Of larger ones it returns the place."""

_Text = bytes | tuple[int, int]
"""A JSON text, or its start and end in the body."""


class _Found(msgspec.Struct):
    """What the process has read: a `ClientRequest`, or an `InvalidRequest`."""

    fields: dict[str, _Text] = {}
    prompts: list[_Text] = []
    conversation_id: str | None = None
    num_choices: int = 1
    previous_response_id: str | None = None
    status: int = 0
    message: str = ""


_decoder = msgspec.msgpack.Decoder(_Found)


@dataclass(slots=True)
class BodyReader:
    """Reads the bodies of requests, the large ones in other processes."""

    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MAX_PROCESSES))

    async def read(self, body: bytes | bytearray, api: Api) -> ClientRequest | InvalidRequest:
        if len(body) > MAX_INLINE_BYTES:
            async with self._slots:
                try:
                    async with asyncio.timeout(_TIMEOUT_S):
                        return restored(await _ask_process(body, api), body, api)
                # RuntimeError: uvloop raises it if the process has ended before the first write.
                except (OSError, TimeoutError, RuntimeError, msgspec.DecodeError) as error:
                    _log.warning(
                        "a process that reads a large request failed (%r); other clients wait "
                        "while the router reads it",
                        error,
                    )
        return read_client_request(body, api)


async def _ask_process(body: bytes | bytearray, api: Api) -> bytes:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", __name__, api),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the router, which lets its requests end
    )
    try:
        found, _ = await process.communicate(body)
    finally:
        if process.returncode is None:
            process.kill()
    return found


def restored(found: bytes, body: bytes | bytearray, api: Api) -> ClientRequest | InvalidRequest:
    """What the process has read, with the values where they are in our copy of the body."""
    request, view = _decoder.decode(found), memoryview(body)
    if request.status:
        return InvalidRequest(request.status, request.message)

    def raw(text: _Text) -> msgspec.Raw:
        return msgspec.Raw(text if isinstance(text, bytes) else view[text[0] : text[1]])

    return ClientRequest(
        {name: raw(text) for name, text in request.fields.items()},
        request.conversation_id,
        tuple(map(raw, request.prompts)),
        request.num_choices,
        api,
        request.previous_response_id,
    )


# -- the process --


def describe(body: bytes, api: Api) -> bytes:
    """Read a body; `restored` makes a request of the result. Pure."""
    request = read_client_request(body, api)
    if isinstance(request, InvalidRequest):
        return msgspec.msgpack.encode(_Found(status=request.status, message=request.message))

    def text(value: msgspec.Raw) -> _Text:
        raw = bytes(value)
        # An equal text at another place in the body does as well.
        start = body.find(raw) if len(raw) > _MAX_RETURNED_BYTES else -1
        return raw if start < 0 else (start, start + len(raw))

    return msgspec.msgpack.encode(
        _Found(
            {name: text(value) for name, value in request.fields.items()},
            [text(prompt) for prompt in request.prompts],
            request.conversation_id,
            request.num_choices,
            request.previous_response_id,
        )
    )


def main() -> None:
    """Read one body from the standard input and describe it on the standard output."""
    sys.stdout.buffer.write(describe(sys.stdin.buffer.read(), Api(sys.argv[1])))


if __name__ == "__main__":
    main()
