"""Recognises the answers without a token that vLLM gives to requests that arrive after SIGTERM.

Pure. Such an answer has the status 200. A completion or chat has the finish reason `abort`.
Messages and responses have no such reason, but they report 0 tokens of output, where every other
answer reports at least one. No other field may decide: some repeat what the client wrote.
"""

import msgspec

from kvferry.router.routes.table import Api
from kvferry.web.errors import MALFORMED_JSON


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
    """Whether the engine aborted the request before its first token. `data`: a complete answer, or
    the first event of a stream that can have a token.
    """
    is_completion = api in (Api.OPENAI, Api.TOKENS)
    # Almost all completions end here, without being parsed.
    if api is Api.OTHER or (is_completion and b'"abort"' not in data):
        return False
    try:
        answer = _decoder.decode(data)
    except MALFORMED_JSON:
        return False
    if is_completion:
        return any(choice.finish_reason == "abort" for choice in answer.choices)
    usage = answer.usage if answer.response is None else answer.response.usage
    return usage is not None and usage.output_tokens == 0
