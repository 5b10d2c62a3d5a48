"""Log probabilities in the two forms of the OpenAI API: completions (columns) and chat (one record per token). Pure."""

from collections.abc import Sequence

import msgspec

from kvferry.engine.api.tokenizer import ModelTokenizer
from kvferry.engine.step import SampledToken

__all__ = ["ChatLogprobs", "CompletionLogprobs", "TokenNames", "chat_logprobs", "completion_logprobs"]

_LEAST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


class CompletionLogprobs(msgspec.Struct, frozen=True):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatTokenLogprob]


class TokenNames:
    """How tokens are spelled in logprobs: as text, or as `token_id:17` when the client asked for that."""

    def __init__(self, tokenizer: ModelTokenizer, template: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._template = template

    @classmethod
    def as_ids(cls, tokenizer: ModelTokenizer) -> "TokenNames":
        return cls(tokenizer, "token_id:{}")

    def name(self, token_id: int) -> str:
        return self._tokenizer.text_of(token_id) if self._template is None else self._template.format(token_id)

    def bytes_of(self, token_id: int) -> list[int]:
        return list(self._tokenizer.bytes_of(token_id))


def completion_logprobs(tokens: Sequence[SampledToken], names: TokenNames, limit: int, offset: int) -> CompletionLogprobs:
    """`offset` is the length of all token names before these."""
    spelled = [names.name(token.token_id) for token in tokens]
    offsets: list[int] = []
    for name in spelled:
        offsets.append(offset)
        offset += len(name)
    return CompletionLogprobs(
        text_offset=offsets,
        token_logprobs=[_finite(token.logprob) for token in tokens],
        tokens=spelled,
        top_logprobs=[{names.name(token_id): _finite(value) for token_id, value in _ranked(token, limit)} for token in tokens],
    )


def chat_logprobs(tokens: Sequence[SampledToken], names: TokenNames, limit: int) -> ChatLogprobs:
    return ChatLogprobs(
        [
            ChatTokenLogprob(
                token=names.name(token.token_id),
                logprob=_finite(token.logprob),
                bytes=names.bytes_of(token.token_id),
                top_logprobs=[
                    TopLogprob(names.name(token_id), _finite(value), names.bytes_of(token_id))
                    for token_id, value in token.top_logprobs[:limit]
                ],
            )
            for token in tokens
        ]
    )


def _ranked(token: SampledToken, limit: int) -> list[tuple[int, float]]:
    """The alternatives, and the chosen token if it is not one of them."""
    top = list(token.top_logprobs[:limit])
    if token.logprob is not None and all(token_id != token.token_id for token_id, _ in top):
        top.append((token.token_id, token.logprob))
    return top


def _finite(value: float | None) -> float:
    return _LEAST if value is None else max(value, _LEAST)
