"""Recognises an answer without a token, by which vLLM ends requests that arrive after SIGTERM.

Pure. The status is 200. A completion or chat has the finish reason `abort`; messages and responses
have no such reason, but they report 0 tokens of output, and every other answer has at least one.
Only these fields are read: other fields of an answer may repeat what the client wrote.
"""

import msgspec

from kvferry.router.routes.table import Api

__all__ = ["is_aborted"]


class _Choice(msgspec.Struct, gc=False):
    finish_reason: str | None = None


class _Usage(msgspec.Struct, gc=False):
    output_tokens: int | None = None


class _Response(msgspec.Struct, gc=False):
    usage: _Usage | None = None


class _Answer(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    response: _Response | None = None
    """In an event of `/v1/responses`."""


_decoder = msgspec.json.Decoder(_Answer)


def is_aborted(api: Api, data: bytes) -> bool:
    """Whether a complete answer, or the first event that shows what D does, has no token."""
    is_completion = api in (Api.OPENAI, Api.TOKENS)
    if api is Api.OTHER or (is_completion and b'"abort"' not in data):
        return False
    try:
        answer = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    if is_completion:
        return any(choice.finish_reason == "abort" for choice in answer.choices)
    usage = answer.usage if answer.response is None else answer.response.usage
    return usage is not None and usage.output_tokens == 0
