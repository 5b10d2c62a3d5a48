"""First token from P: the client gets the token that P sampled, and D continues after it.

Pure. P samples the first token of the answer at the end of its prefill leg. D then gets a
completion whose prompt is the tokens of the client's prompt and P's token, and `FirstToken` joins
both parts to one answer. That answer must be exactly what one engine gives: `may_continue` decides
this from the request, `read_first_token` from P's answer. If it is not certain, the router drops
P's token and D samples it again. docs/decisions/062-first-token-from-p.md has the rules and their
reasons.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

import msgspec

from kvferry.errors import RemoteProtocolError
from kvferry.router.routes.table import Api
from kvferry.router.serving.client_request import ClientRequest, Handover
from kvferry.router.serving.event_splitter import event_data
from kvferry.web.errors import MALFORMED_JSON

CONTINUED_PATH = "/v1/completions"
"""The route of a decode leg that continues after P's token, and of its retries."""

_Fields = dict[str, msgspec.Raw]
_decoder: msgspec.json.Decoder[_Fields] = msgspec.json.Decoder(_Fields)
_list_decoder: msgspec.json.Decoder[list[_Fields]] = msgspec.json.Decoder(list[_Fields])
_encode = msgspec.json.Encoder().encode
_NULL = msgspec.Raw(b"null")
_Decoded = TypeVar("_Decoded")

# -- which requests --
# A request with a field that is in none of these tables takes the usual path: D samples the first
# token, because the field's effect on an answer that two engines write is unknown.

_PROMPT_FIELDS = frozenset(
    (
        "prompt",
        "messages",
        "add_special_tokens",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "chat_template_kwargs",
        "documents",
    )
)
"""Fields that only decide which tokens the prompt has. D gets the tokens instead."""
_FORWARDED = frozenset(
    (
        "model",
        "stream",
        "stream_options",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        # Counts the tokens of prompt and answer alike, so P's token counts in either place.
        "repetition_penalty",
        "seed",
        "logit_bias",
        "allowed_token_ids",
        "stop_token_ids",
        "ignore_eos",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "return_token_ids",
        "cache_salt",
        "priority",
        "user",
    )
)
"""Fields that act on each token alone. D gets them as the client wrote them."""
_COUNTS = frozenset(("max_tokens", "max_completion_tokens"))
_NEUTRAL: dict[str, frozenset[bytes]] = {
    name: frozenset(texts)
    for name, *texts in (
        ("n", b"1"),
        ("best_of", b"1", b"null"),
        ("echo", b"false"),
        ("logprobs", b"null"),
        ("top_logprobs", b"0"),
        ("prompt_logprobs", b"null"),
        ("presence_penalty", b"0", b"0.0", b"null"),
        ("frequency_penalty", b"0", b"0.0", b"null"),
        ("stop", b"[]", b"null"),
        ("bad_words", b"[]"),
        ("min_tokens", b"0"),
        ("use_beam_search", b"false"),
        ("spaces_between_special_tokens", b"true"),
        ("response_format", b"null", b'{"type":"text"}', b'{"type": "text"}'),
        ("structured_outputs", b"null"),
        ("tools", b"null"),
        ("tool_choice", b"null", b'"none"'),
        ("parallel_tool_calls", b"true", b"false", b"null"),
    )
}
"""Fields that must have one of these JSON texts, which change nothing. D gets no such field."""
_ZERO = frozenset((b"0", b"0.0"))
_DEFAULT_MAX_TOKENS = 16
"""The limit of a completion without `max_tokens`, in vLLM and in the embedded engine."""
_COUNT = re.compile(rb"[1-9][0-9]{0,9}")


class _StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False


_stream_options_decoder = msgspec.json.Decoder(_StreamOptions | None)


def may_continue(client: ClientRequest) -> bool:
    """Whether an answer to this request may begin with P's token."""
    fields = client.fields
    if client.api is not Api.OPENAI or client.prompts:
        return False
    # The route decides which of the two an engine reads, and D's leg has another route.
    if "prompt" in fields and "messages" in fields:
        return False
    if not all(_is_allowed(name, fields) for name in fields):
        return False
    # The router adds the ids of P's token if this field is true. Engines also accept 1 and "true".
    if bytes(fields.get("return_token_ids", b"null")) not in (b"true", b"false", b"null"):
        return False
    # A seed sets the state of a random generator. D's generator would begin in that state, and not
    # in the state after the first token.
    if _has_seed(fields) and not _is_greedy(fields):
        return False
    return _has_known_stream_options(client) and _has_valid_limit(fields)


def _is_allowed(name: str, fields: _Fields) -> bool:
    if name in _PROMPT_FIELDS or name in _FORWARDED or name in _COUNTS:
        return True
    text = bytes(fields[name])
    # A chat with `"logprobs": false` asks for none. In a completion, vLLM reads false as 0, which
    # asks for the logprob of the sampled token.
    is_chat_without_logprobs = name == "logprobs" and text == b"false" and "messages" in fields
    return is_chat_without_logprobs or text in _NEUTRAL.get(name, ())


def _has_seed(fields: _Fields) -> bool:
    return bytes(fields.get("seed", b"null")) != b"null"


def _is_greedy(fields: _Fields) -> bool:
    return bytes(fields.get("temperature", b"")) in _ZERO


def _has_known_stream_options(client: ClientRequest) -> bool:
    # P's leg has no `stream_options`, so P does not refuse wrong ones. A request that an engine may
    # refuse takes the usual path, where D checks the field.
    text = client.fields.get("stream_options")
    if text is None:
        return True
    try:
        options = _stream_options_decoder.decode(text)
    except MALFORMED_JSON:
        return False
    return options is None or client.is_streamed


def _has_valid_limit(fields: _Fields) -> bool:
    texts = [bytes(fields[name]) for name in _COUNTS if name in fields]
    is_chat = "messages" in fields
    return all(_COUNT.fullmatch(text) or (is_chat and text == b"null") for text in texts)


# -- P's answer --


class _Limits(msgspec.Struct):
    max_model_len: int


class _Params(msgspec.Struct):
    first_token: _Limits | None = None
    """P sends it if its token is the first token of the answer (`first_token_params`)."""


class _Message(msgspec.Struct):
    role: str
    content: str | None = None


_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class _Choice(msgspec.Struct):
    text: str = ""
    message: _Message | None = None
    """The message of a chat; None for a completion."""
    finish_reason: str | None = None
    token_ids: list[_TokenId] = []
    prompt_token_ids: list[_TokenId] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage
    prompt_token_ids: list[_TokenId] | None = None


_params_decoder = msgspec.json.Decoder(_Params | None)
_answer_decoder = msgspec.json.Decoder(_Answer)


@dataclass(frozen=True, slots=True)
class _Token:
    """P's token, and the prompt for which P sampled it."""

    role: str | None
    """The role of a chat's message; None for a completion."""
    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    """Empty if P did not report the tokens of the prompt."""

    @property
    def can_be_continued(self) -> bool:
        """Whether D can be asked for the tokens after this one."""
        # A token without text, or with part of a character, gets its text with the next tokens.
        has_whole_text = bool(self.text) and "\ufffd" not in self.text
        return has_whole_text and len(self.token_ids) == 1 and bool(self.prompt_token_ids)


def read_first_token(
    client: ClientRequest, handover: Handover | None, seed: int
) -> "FirstToken | None":
    """Read P's token from P's answer; None if the client's answer must not begin with it.

    `seed`: a random number, by which D draws its tokens if the client named no seed.
    """
    # In push mode D may have begun before P answered.
    if handover is None or not handover.answer or handover.push_source is not None:
        return None
    if not may_continue(client):
        return None
    try:
        params = _params_decoder.decode(handover.params)
        answer = _answer_decoder.decode(handover.answer)
        fields = _decoder.decode(handover.answer)
        choices = _list_decoder.decode(fields["choices"])
    except MALFORMED_JSON:
        return None
    if params is None or params.first_token is None or len(choices) != 1:
        return None
    room = params.first_token.max_model_len - answer.usage.prompt_tokens
    limit = _limit(client.fields, room)
    finish_reason = answer.choices[0].finish_reason
    if limit < 1 or finish_reason not in ("stop", "length"):
        return None
    token, continued = _read_token(answer), None
    # P was asked for one token, so P reports "length" also where the client's limit is larger.
    if finish_reason == "length" and limit != 1:
        is_whole_prompt = len(token.prompt_token_ids) == answer.usage.prompt_tokens
        if not (token.can_be_continued and is_whole_prompt):
            return None
        continued = _continued_request(client, token, limit - 1, seed)
    return FirstToken(client, continued, token, fields, choices[0])


def _read_token(answer: _Answer) -> _Token:
    [choice] = answer.choices
    # vLLM reports the prompt of a chat beside the choices, and that of a completion in the choice.
    prompt = answer.prompt_token_ids or choice.prompt_token_ids or []
    if choice.message is None:
        return _Token(None, choice.text, choice.token_ids, prompt)
    return _Token(choice.message.role, choice.message.content or "", choice.token_ids, prompt)


def _limit(fields: _Fields, room: int) -> int:
    """The most tokens that the answer may have; 0 if that depends on the engine. `room`: the
    tokens that the model's length leaves for the answer.
    """
    is_chat = "messages" in fields
    for name in ("max_completion_tokens", "max_tokens") if is_chat else ("max_tokens",):
        text = bytes(fields.get(name, b"null"))
        if text != b"null":
            # Beyond `room`, some engines answer 400 and some answer with fewer tokens.
            return int(text) if int(text) <= room else 0
    return room if is_chat else min(room, _DEFAULT_MAX_TOKENS)


def _continued_request(
    client: ClientRequest, token: _Token, max_tokens: int, seed: int
) -> ClientRequest:
    """The request for the tokens after P's token."""
    fields = {name: text for name, text in client.fields.items() if name in _FORWARDED}
    # P and D that were started with the same seed may draw the same random numbers one after the
    # other. The second token would then depend on the draw of the first one.
    if not _has_seed(fields) and not _is_greedy(fields):
        fields["seed"] = msgspec.Raw(b"%d" % seed)
    fields["prompt"] = msgspec.Raw(_encode(token.prompt_token_ids + token.token_ids))
    fields["max_tokens"] = msgspec.Raw(b"%d" % max_tokens)
    return ClientRequest(fields, client.conversation_id)


# -- the client's answer --


@dataclass(slots=True)
class FirstToken:
    """P's token, and the answer that begins with it.

    Fields of P's answer that D's answer does not change reach the client as P wrote them.
    """

    client: ClientRequest
    continued: ClientRequest | None
    """The request for the rest of the answer; None if the answer ends with P's token."""
    _token: _Token
    _answer: _Fields
    _choice: _Fields
    has_continued: bool = field(default=False, init=False)
    """Whether the client has received more of a stream than P's token."""

    @property
    def _shows_ids(self) -> bool:
        return bytes(self.client.fields.get("return_token_ids", b"")) == b"true"

    # -- as a stream --

    def events(self) -> bytes:
        """The events of P's token; of the whole answer if the answer ends with it."""
        token, prompt = self._token, {}
        chunk: dict[str, Any] = {"index": 0, "text": token.text, "logprobs": None}
        if self.continued is None:
            chunk |= {name: self._choice.get(name) for name in ("finish_reason", "stop_reason")}
        else:
            chunk["finish_reason"] = None
        if self._shows_ids:
            chunk["token_ids"] = token.token_ids
            prompt = {"prompt_token_ids": token.prompt_token_ids or None}
        if token.role is None:
            events = self._event([chunk | prompt])
        else:
            opening = {"index": 0, "delta": {"role": token.role, "content": ""}}
            events = self._event([opening | {"logprobs": None, "finish_reason": None}], prompt)
            events += self._event([_as_chat_choice(chunk)])
        return events if self.continued is not None else events + self._last_events()

    def translate(self, event: bytes) -> bytes:
        """Turn an event of D's stream into one for the client. RemoteProtocolError if the event is
        malformed.
        """
        data = event_data(event)
        if not data or data == b"[DONE]":
            return event + b"\n\n"
        answer = _decode(_decoder, data)
        if "error" in answer:
            return event + b"\n\n"
        choices: list[dict[str, Any]] = []
        for choice in _decode(_list_decoder, answer.get("choices", b"[]")):
            # Not the client's prompt, which P's event contained: D's prompt ends with P's token.
            choice.pop("prompt_token_ids", None)
            choices.append(choice if self._token.role is None else _as_chat_choice(choice))
        return self._event(choices, answer | _usage_of_both(answer.get("usage", _NULL)))

    def _last_events(self) -> bytes:
        text = self.client.fields.get("stream_options")
        options = _stream_options_decoder.decode(text) if text is not None else None
        has_usage = options is not None and options.include_usage
        usage = self._event([], {"usage": self._answer["usage"]}) if has_usage else b""
        return usage + b"data: [DONE]\n\n"

    def _event(
        self, choices: list[dict[str, Any]], more: Mapping[str, Any] = MappingProxyType({})
    ) -> bytes:
        """An event with these choices and fields; all events have P's id, time and model."""
        kind = "text_completion" if self._token.role is None else "chat.completion.chunk"
        same = {name: self._answer.get(name) for name in ("id", "created", "model")}
        return b"data: %b\n\n" % _encode({**more, **same, "object": kind, "choices": choices})

    # -- as one body --

    def body(self, rest: bytes | None = None) -> bytes:
        """The complete answer. `rest`: D's answer; None if the answer ends with P's token.

        RemoteProtocolError if `rest` is no completion.
        """
        fields: dict[str, Any] = dict(self._answer) | {"kv_transfer_params": None}
        choice: dict[str, Any] = dict(self._choice)
        text = self._token.text
        if rest is not None:
            answer = _decode(_rest_decoder, rest)
            [added] = answer.choices
            text += added.text
            choice |= {"finish_reason": added.finish_reason, "stop_reason": added.stop_reason}
            choice["token_ids"] = self._token.token_ids + (added.token_ids or [])
            fields |= {"usage": None} | _usage_of_both(answer.usage)
        if self._token.role is None:
            choice["text"] = text
        else:
            choice["message"] = dict(_decoder.decode(self._choice["message"])) | {"content": text}
        if not self._shows_ids:
            for part in (fields, choice):
                part.pop("token_ids", None)
                part.pop("prompt_token_ids", None)
        return _encode(fields | {"choices": [choice]})


def _as_chat_choice(chunk: Mapping[str, Any]) -> dict[str, Any]:
    """A choice of a completion's stream as a choice of a chat's stream."""
    rest = {name: value for name, value in chunk.items() if name not in ("index", "text")}
    return {"index": 0, "delta": {"content": chunk.get("text", "")}, **rest}


class _RestChoice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: msgspec.Raw = _NULL
    stop_reason: msgspec.Raw = _NULL


class _Rest(msgspec.Struct):
    """D's complete answer."""

    choices: tuple[_RestChoice]
    usage: msgspec.Raw = _NULL


class _Counts(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


_rest_decoder = msgspec.json.Decoder(_Rest)
_usage_decoder = msgspec.json.Decoder(_Fields | None)
_counts_decoder = msgspec.json.Decoder(_Counts)


def _decode(decoder: msgspec.json.Decoder[_Decoded], data: bytes | msgspec.Raw) -> _Decoded:
    """Decode a part of D's answer."""
    try:
        return decoder.decode(data)
    except MALFORMED_JSON as error:
        raise RemoteProtocolError(f"its answer is not a completion: {error}") from None


def _usage_of_both(text: msgspec.Raw) -> dict[str, Any]:
    """D's usage, with P's token as part of the answer. D counts it as part of the prompt."""
    usage = _decode(_usage_decoder, text)
    if usage is None:
        return {}
    counts = _decode(_counts_decoder, text)
    changed = {
        "prompt_tokens": counts.prompt_tokens - 1,
        "completion_tokens": counts.completion_tokens + 1,
    }
    return {"usage": usage | changed}
