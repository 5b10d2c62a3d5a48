"""The parts that completion and chat answers share: logprobs, usage, collected choices. Pure.

`ResponseFormatter` is the contract between answering (`kvferry.engine.api.generation`) and the two
answer formats (`kvferry.engine.api.completions`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from kvferry.engine.api.assembly import Delta
from kvferry.engine.api.tokenizer import ModelTokenizer
from kvferry.engine.messages import SampledToken

# -- logprobs --
# Log probabilities in the two forms of the OpenAI API: columns for completions, one record per
# token for chat.


_LEAST = -9999.0
"""The value that stands for minus infinity, because JSON has no infinity."""


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Logprobs of a completion: one list per column, one entry per token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class TopLogprob(msgspec.Struct, frozen=True):
    """One alternative to a token of a chat answer."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    """One token of a chat answer with its alternatives."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Logprobs of a chat answer."""

    content: list[ChatTokenLogprob]


class TokenNames:
    """Spells tokens in logprobs: as text, or as `token_id:17` if the client asked for token ids."""

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
    """Return the columns for `tokens`; `offset` is the total length of all earlier token names."""
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
    """Return the alternatives, plus the chosen token if the alternatives do not include that
    token.
    """
    top = list(token.top_logprobs[:limit])
    if token.logprob is not None and all(token_id != token.token_id for token_id, _ in top):
        top.append((token.token_id, token.logprob))
    return top


def _finite(value: float | None) -> float:
    return _LEAST if value is None else max(value, _LEAST)


# -- replies --
# Usage, collected choices and the contract of a formatter.


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ResponseBody(msgspec.Struct, kw_only=True):
    """One JSON body: a whole answer or one chunk of a stream. UNSET fields are left out of the
    JSON.
    """

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
    """All the text and tokens of one choice, for an answer that is not streamed."""

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
    """Formats the answers to one kind of request."""

    def whole(self, answers: Sequence[CollectedChoice]) -> ResponseBody:
        """Return the whole answer; the caller adds usage and kv_transfer_params."""

    def chunks(self, delta: Delta) -> Sequence[ResponseBody]:
        """Return the chunks for one delta: usually one; the first delta of a choice may need
        two.
        """

    def closing(self) -> ResponseBody:
        """Return a chunk without choices, for usage or kv_transfer_params at the end of a
        stream.
        """


class UsageCounter:
    """Counts tokens for `usage`, and holds the kv_transfer_params of the first choice."""

    def __init__(self, prompts: Sequence[Sequence[int]], samples: int) -> None:
        # Choices of one prompt are adjacent, so every `samples`-th entry is a new prompt.
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
