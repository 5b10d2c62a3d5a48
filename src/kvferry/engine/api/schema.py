"""The request bodies of the API as types; decoding checks a body once. Pure.

Field names and meanings are vLLM's. Unknown fields are ignored, as in vLLM; known fields that the
engine does not support and that would change the output are refused (`_refuse_unserved`).
"""

import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from kvferry.errors import RequestRefused

_INT64_MAX = 2**63 - 1
_MAX_NESTING = 32
"""The nesting limit of kv_transfer_params and chat values.

The core and the templates walk through these values recursively and must not overflow the stack.
"""

_Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_PositiveCount = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_StopString = Annotated[str, Meta(min_length=1, max_length=1024)]


class StreamOptions(msgspec.Struct, frozen=True):
    """The options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class UnservedFields(msgspec.Struct, frozen=True, kw_only=True):
    """Known fields that this engine does not support; values that change nothing are accepted."""

    frequency_penalty: Any = None
    presence_penalty: Any = None
    repetition_penalty: Any = None
    min_p: Any = None
    logit_bias: Any = None
    logits_processors: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    use_beam_search: Any = None
    prompt_logprobs: Any = None
    truncate_prompt_tokens: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    prompt_embeds: Any = None
    suffix: Any = None
    tool_choice: Any = None
    functions: Any = None
    chat_template: Any = None
    continue_final_message: Any = None


class AnswerFields(UnservedFields, frozen=True, kw_only=True):
    """The fields that choose the model and the form of the answer."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None
    user: str | None = None


class SamplingFields(AnswerFields, frozen=True, kw_only=True):
    """The fields that control sampling and the end of generation."""

    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    max_tokens: _PositiveCount | None = None
    min_tokens: _Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    seed: Annotated[int, Meta(ge=-_INT64_MAX - 1, le=_INT64_MAX)] | None = None
    stop: _StopString | Annotated[list[_StopString], Meta(max_length=32)] | None = None
    stop_token_ids: Annotated[list[_Count], Meta(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None


class GenerationRequest(SamplingFields, frozen=True, kw_only=True):
    """The fields and properties that completions and chat share."""

    @property
    def is_prefill_for_peer(self) -> bool:
        """Whether a decode peer will fetch the KV of this prefill; one prefill serves all `n`
        samples.
        """
        return bool(
            self.kv_transfer_params and self.kv_transfer_params.get("do_remote_decode") is True
        )

    @property
    def is_turn(self) -> bool:
        """Whether this request is a turn of a conversation.

        The engine may retain the blocks of a turn for the next turn, and the answer tells the
        router so.
        """
        return (
            not self.is_prefill_for_peer
            and (self.kv_transfer_params or {}).get("conversation") is not None
        )

    @property
    def samples(self) -> int:
        return 1 if self.is_prefill_for_peer or self.n is None else self.n

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: str | list[Any] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: int | None = None


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation."""

    role: str
    content: str | list[Any] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: _PositiveCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /tokenize: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: list[_Count]


Body = TypeVar("Body", bound=msgspec.Struct)


def max_values(max_model_len: int) -> int:
    """Return how many JSON values a request may have: the token ids of 16 prompts of the greatest
    length, and enough for the other fields, for many short prompts and for tools.
    """
    return 16 * max_model_len + 65_536


_SLICE_BYTES = 256 * 1024


def has_more_values(text: bytes, limit: int) -> bool:
    """Return whether JSON text has more than `limit` values, without decoding the text.

    Decoding millions of small values takes many seconds, in one call that holds the GIL. A value
    follows a comma or an opening bracket outside of strings, and those are quick to count. The text
    is counted in slices, so that other threads can run in between, and only up to the limit.
    """
    if len(text) <= limit:
        return False
    num_values, is_string, escape = 1, False, b""
    for start in range(0, len(text), _SLICE_BYTES):
        piece = escape + text[start : start + _SLICE_BYTES]
        kept = piece.rstrip(b"\\")
        escape = b"\\" * ((len(piece) - len(kept)) % 2)  # belongs to the next slice
        # Without escaped quotes, every quote begins or ends a string.
        parts = kept.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        outside = b"".join(parts[is_string::2])
        is_string ^= len(parts) % 2 == 0
        num_values += outside.count(b",") + outside.count(b"[") + outside.count(b"{")
        if num_values > limit:
            return True
    return False


def decode_body(raw: bytes, kind: type[Body], limit: int) -> Body:
    """Decode and check a request body; RequestRefused names the fault and its place in the body.

    `limit`: how many JSON values the body may have.
    """
    if not raw.strip():
        raise RequestRefused("the request body is empty: send a JSON object")
    if has_more_values(raw, limit):
        raise RequestRefused(
            f"the request body has more than {limit} JSON values, which is more than this model "
            "can use: send fewer",
            status=413,
        )
    try:
        body = msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise _refusal_of_validation(str(error)) from error
    except RecursionError as error:
        raise RequestRefused("the request body is nested too deeply") from error
    except ValueError as error:  # msgspec.DecodeError and UnicodeDecodeError
        raise RequestRefused(f"the request body is not valid JSON: {error}") from error
    for name in ("kv_transfer_params", "tools", "messages", "chat_template_kwargs"):
        _refuse_extremes(getattr(body, name, None), name, depth=0)
    if isinstance(body, GenerationRequest):
        _refuse_unserved(body)
    return body


# The two forms of msgspec's validation messages: with a location, and for a missing field.
_LOCATION = re.compile(r"^(?P<what>.*) - at `\$\.?(?P<where>(?P<field>\w*).*)`$", re.DOTALL)

_MISSING = re.compile(r"missing required field `(?P<field>\w+)`(?: - at `\$\.?(?P<where>.*)`)?$")


def _refusal_of_validation(message: str) -> RequestRefused:
    missing = _MISSING.search(message)
    if missing is not None:
        path = f"{missing['where']}.{missing['field']}" if missing["where"] else missing["field"]
        return RequestRefused(f"the required field {path} is missing", param=path)
    located = _LOCATION.match(message)
    if located is None:
        return RequestRefused(f"the request body is not valid: {_lower_first(message)}")
    where = located["where"] or "the request body"
    return RequestRefused(
        f"{where} is not valid: {_lower_first(located['what'])}", param=located["field"] or None
    )


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def _refuse_extremes(value: Any, name: str, depth: int) -> None:
    """Refuse values that the core's message format or a template cannot handle: deep nesting,
    integers over 64 bits.
    """
    if depth > _MAX_NESTING:
        raise RequestRefused(f"{name} is nested more than {_MAX_NESTING} levels deep", param=name)
    if isinstance(value, int) and not -_INT64_MAX - 1 <= value <= _INT64_MAX:
        raise RequestRefused(f"{name} holds an integer beyond 64 bits", param=name)
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return
    for entry in value:
        _refuse_extremes(entry, name, depth + 1)


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
}
"""Values that change nothing, besides null, 0, false and empty values, which are always
accepted.
"""


def _refuse_unserved(request: GenerationRequest) -> None:
    for name in UnservedFields.__struct_fields__:
        value = getattr(request, name)
        if value and value not in _NEUTRAL.get(name, ()):
            raise RequestRefused(f"this engine does not support {name}: leave it out", param=name)
    if isinstance(request, CompletionRequest) and request.best_of not in (None, request.n or 1):
        raise RequestRefused(
            "best_of is only supported when it equals n: leave it out", param="best_of"
        )
    if request.stream_options is not None and not request.stream:
        raise RequestRefused(
            "stream_options is only allowed when stream is true", param="stream_options"
        )
