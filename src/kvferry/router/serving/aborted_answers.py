"""Recognises the answers with status 200 by which vLLM refuses a request before its first token.

Pure. vLLM aborts requests that arrive after SIGTERM: a completion or chat has the finish reason
`abort`. Messages and responses have no such reason, but they report 0 tokens of output, where every
other answer reports at least one. While vLLM is paused, a stream begins with an error whose code is
503. No other field may decide: some repeat what the client wrote.
"""

from dataclasses import dataclass

import msgspec

from kvferry.router.routes.table import Api
from kvferry.web.errors import MALFORMED_JSON


class _Choice(msgspec.Struct, gc=False):
    finish_reason: str | None = None


class _Usage(msgspec.Struct, gc=False):
    output_tokens: int | None = None


class _Response(msgspec.Struct, gc=False):
    usage: _Usage | None = None


class _Error(msgspec.Struct, gc=False):
    message: str = ""
    type: str | None = None
    code: int | str | None = None


class _Answer(msgspec.Struct, gc=False):
    error: _Error | None = None
    choices: list[_Choice] = []
    usage: _Usage | None = None
    response: _Response | None = None
    """In an event of `/v1/responses`."""


_decoder = msgspec.json.Decoder(_Answer)


@dataclass(frozen=True, slots=True)
class Refusal:
    """What the engine did with a request that it refused."""

    what: str
    details: str = ""
    """What the engine wrote, for the client only."""


_ABORTED = Refusal("is stopping: it aborted the request")
_RETRYABLE = (503, "503")
_OVERLOADED = "overloaded_error"
"""The type of a 503 in errors of messages, which have no code."""


def find_refusal(api: Api, data: bytes) -> Refusal | None:
    """Whether the engine refused the request. `data`: a complete answer, or the first event of a
    stream that can have a token.
    """
    is_completion = api in (Api.OPENAI, Api.TOKENS)
    # Almost all completions end here, without being parsed.
    has_mark = b'"abort"' in data or b'"error"' in data
    if api is Api.OTHER or (is_completion and not has_mark):
        return None
    try:
        answer = _decoder.decode(data)
    except MALFORMED_JSON:
        return None
    if answer.error is not None:
        is_retryable = answer.error.code in _RETRYABLE or answer.error.type == _OVERLOADED
        return Refusal("accepts no requests now", answer.error.message) if is_retryable else None
    if is_completion:
        is_aborted = any(choice.finish_reason == "abort" for choice in answer.choices)
        return _ABORTED if is_aborted else None
    usage = answer.usage if answer.response is None else answer.response.usage
    return _ABORTED if usage is not None and usage.output_tokens == 0 else None
