"""Log probabilities in the two forms of the OpenAI API: completions (columns) and chat (one record
per token). Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from kvferry.engine.api.assembly import Delta
from kvferry.engine.api.tokenizer import ModelTokenizer
from kvferry.engine.messages import SampledToken

__all__ = [
    "ChatLogprobs",
    "CollectedChoice",
    "CompletionLogprobs",
    "ResponseBody",
    "ResponseFormatter",
    "TokenNames",
    "Usage",
    "UsageCounter",
    "chat_logprobs",
    "completion_logprobs",
]


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
    """How tokens are spelled in logprobs: as text, or as `token_id:17` when the client asked for
    that.
    """

    def __init__(self, tokenizer: ModelTokenizer, template: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._template = template

    @classmethod
    def as_ids(cls, tokenizer: ModelTokenizer) -> "TokenNames":
        return cls(tokenizer, "token_id:{}")

    def name(self, token_id: int) -> str:
        return (
            self._tokenizer.text_of(token_id)
            if self._template is None
            else self._template.format(token_id)
        )

    def bytes_of(self, token_id: int) -> list[int]:
        return list(self._tokenizer.bytes_of(token_id))


def completion_logprobs(
    tokens: Sequence[SampledToken], names: TokenNames, limit: int, offset: int
) -> CompletionLogprobs:
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
        top_logprobs=[
            {names.name(token_id): _finite(value) for token_id, value in _ranked(token, limit)}
            for token in tokens
        ],
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


# -------------------- replies -------------------- What completions and chat answers have in
# common: usage, collected choices, and the seam between answering and shaping. Pure.


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ResponseBody(msgspec.Struct, kw_only=True):
    """One JSON body, whole or one chunk of a stream. What is UNSET is left out of it."""

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[Any]
    usage: Usage | UnsetType | None = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


@dataclass(slots=True)
class CollectedChoice:
    """One choice, collected."""

    index: int
    parts: list[str] = field(default_factory=list)
    tokens: list[SampledToken] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        return "".join(self.parts)

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]

    def add(self, delta: Delta) -> None:
        self.parts.append(delta.text)
        self.tokens += delta.tokens
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason


class ResponseFormatter(Protocol):
    """How one kind of request is answered."""

    def whole(self, answers: Sequence[CollectedChoice]) -> ResponseBody:
        """Everything at once; the caller adds usage and kv_transfer_params."""

    def chunks(self, delta: Delta) -> Sequence[ResponseBody]:
        """One step of a stream: usually one chunk; at a choice's beginning there may be one before
        it.
        """

    def closing(self) -> ResponseBody:
        """A last chunk without choices, for usage."""


class UsageCounter:
    """Counts what has been generated, for `usage`, and remembers the first choice's
    kv_transfer_params.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], samples: int) -> None:
        self._prompt_tokens = sum(len(prompt) for prompt in prompts[::samples])
        self._samples = samples
        self._unfinished = len(prompts)
        self._completion_tokens = 0
        self._cached: dict[int, int] = {}
        self.kv_transfer_params: dict[str, Any] | None = None

    @property
    def is_complete(self) -> bool:
        return self._unfinished == 0

    def add(self, delta: Delta) -> None:
        self._completion_tokens += len(delta.tokens)
        self._unfinished -= delta.finish_reason is not None
        if delta.index % self._samples == 0:
            self._cached[delta.index] = max(
                self._cached.get(delta.index, 0), delta.num_cached_tokens
            )
        if delta.kv_transfer_params is not None and (
            delta.index == 0 or self.kv_transfer_params is None
        ):
            self.kv_transfer_params = delta.kv_transfer_params

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            total_tokens=self._prompt_tokens + self._completion_tokens,
            prompt_tokens_details=PromptTokensDetails(sum(self._cached.values())),
        )
