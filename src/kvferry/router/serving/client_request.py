"""A client's request, and the bodies of its prefill leg and decode leg.

Pure. Values stay the JSON text that the client sent, and only the keys that change are replaced. A
long prompt is therefore never decoded here and reaches both engines exactly as written. The module
also reads the `kv_transfer_params` of P's answer.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from kvferry.config.fields import Count
from kvferry.errors import RemoteProtocolError
from kvferry.router.routes.table import Api
from kvferry.types import Address

MAX_CONVERSATION_CHARS = 256
MAX_PROMPTS = 256
"""Largest number of prompts in one request. Each prompt is served as a request of its own."""

_Fields = dict[str, msgspec.Raw]
LegBody = list[bytes | memoryview]
"""The body of a leg, in parts."""
_MAX_COPIED_BYTES = 256 * 1024
_NO_FIELDS: Mapping[str, msgspec.Raw] = MappingProxyType({})

# Decoders are made once: `msgspec.json.decode` with a type analyses the type on every call, which
# takes ten times as long as decoding a short text.
_decoder: msgspec.json.Decoder[_Fields] = msgspec.json.Decoder(_Fields)
_name_decoder: msgspec.json.Decoder[str | None] = msgspec.json.Decoder(str | None)
_scalar_decoder: msgspec.json.Decoder[bool | int | float | str] = msgspec.json.Decoder(
    bool | int | float | str
)
_encoder = msgspec.json.Encoder()

# A client's own kv_transfer_params could point the engines at another client's blocks;
# conversation_id is meant for the router.
_NEVER_FORWARDED = ("kv_transfer_params", "conversation_id")
# The prefill leg produces one token, is not streamed, and answers the router: fields that only make
# the answer longer are for D.
_NOT_FOR_PREFILL = frozenset(
    (
        "stream_options",
        "min_tokens",
        "n",
        "best_of",
        "echo",
        "logprobs",
        "top_logprobs",
        "logprob_token_ids",
        "prompt_logprobs",
        "return_token_ids",
        "return_prompt_text",
    )
)
# Of a response: P stores nothing, and its request has an id of its own.
_NOT_FOR_PREFILL_OF_RESPONSES = frozenset(("background", "include", "previous_response_id"))
_PREFILL_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_ONE, _FALSE_TEXT = msgspec.Raw(b"1"), msgspec.Raw(b"false")
# In the order in which engines put them into the prompt.
_PROMPT_FIELDS = {
    Api.RESPONSES: ("instructions", "input"),
    Api.MESSAGES: ("system", "messages"),
    Api.TOKENS: ("token_ids",),
    Api.OTHER: (),
}
_PLAIN_PREFILL_PARAMS = msgspec.Raw(_encoder.encode(_PREFILL_PARAMS))
_LIST_OF_PROMPTS = re.compile(rb'\[\s*["\[]')
# In the spellings of a boolean that vLLM accepts, strings in either case. 1.0 and true equal 1.
_TRUE: frozenset[object] = frozenset((1, "1", "t", "true", "y", "yes", "on"))
_FALSE: frozenset[object] = frozenset((0, "0", "f", "false", "n", "no", "off"))
# A string that vLLM reads as a count, without the spaces around it: 2, +2, 2.0, 02, 2_0 (twenty).
_COUNT = re.compile(r"\+?([0-9]+(?:_[0-9]+)*)(?:\.0+)?")
_MAX_COUNT_CHARS = 64
_MAX_CHOICES = 10**9
# vLLM also accepts kv_transfer_params inside vllm_xargs.
_EXTRA, _TRANSFER = "vllm_xargs", "kv_transfer_params"
_MAX_SMALL_BYTES = 1024 * 1024
"""Limit on all fields except the large ones, together: decoding a million tiny keys would block the
event loop for seconds.
"""


class _LargeFields(msgspec.Struct):
    """Fields that may be large; large fields do not count towards `_MAX_SMALL_BYTES`."""

    prompt: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    tools: msgspec.Raw = msgspec.Raw(b"")
    response_format: msgspec.Raw = msgspec.Raw(b"")
    structured_outputs: msgspec.Raw = msgspec.Raw(b"")
    prompt_embeds: msgspec.Raw = msgspec.Raw(b"")
    documents: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")
    instructions: msgspec.Raw = msgspec.Raw(b"")
    system: msgspec.Raw = msgspec.Raw(b"")
    tokens: msgspec.Raw = msgspec.Raw(b"")
    token_ids: msgspec.Raw = msgspec.Raw(b"")
    features: msgspec.Raw = msgspec.Raw(b"")
    items: msgspec.Raw = msgspec.Raw(b"")
    queries: msgspec.Raw = msgspec.Raw(b"")
    query: msgspec.Raw = msgspec.Raw(b"")
    text_1: msgspec.Raw = msgspec.Raw(b"")
    text_2: msgspec.Raw = msgspec.Raw(b"")
    data: msgspec.Raw = msgspec.Raw(b"")
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"")


_large_decoder = msgspec.json.Decoder(_LargeFields)
_prompts_decoder = msgspec.json.Decoder(
    msgspec.defstruct(
        "_Prompts",
        [(f"prompt_{number}", msgspec.Raw, msgspec.Raw(b"")) for number in range(MAX_PROMPTS)],
        array_like=True,
        forbid_unknown_fields=True,
    )
)
"""Decodes a list of prompts; fails at the first prompt too many, however long the list is."""


@dataclass(frozen=True, slots=True)
class InvalidRequest:
    """A request that is sent to no engine, with the status and message for the client."""

    status: int
    message: str


@dataclass(frozen=True, slots=True)
class PushSource:
    """One incarnation of a prefill engine that pushes, and its address for D."""

    engine: str
    epoch: str
    side_channel: Address
    tp_size: int

    def push_handover(self, push_ticket: str) -> "Handover":
        """The `kv_transfer_params` of a decode leg that starts before P has answered."""
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine,
            "remote_host": self.side_channel.host,
            "remote_port": self.side_channel.port,
            "tp_size": self.tp_size,
            "push_ticket": push_ticket,
        }
        return Handover(
            msgspec.Raw(_encoder.encode(params)),
            None,
            self.side_channel,
            push_ticket=push_ticket,
        )


class Handover(msgspec.Struct, frozen=True):
    """The `kv_transfer_params` that the decode leg carries.

    Either P's answer describes the blocks that P holds, or, for a push, the router makes the
    parameters before P has answered.
    """

    params: msgspec.Raw
    """`kv_transfer_params` as JSON text; from P unless `push_ticket` is set."""
    ticket: str | None
    """P's ticket for the blocks. None: P issues no tickets, or has not answered yet."""
    side_channel: Address | None
    """P's side channel, where `ticket` or `push_ticket` is released."""
    push_source: PushSource | None = None
    """Set if P's answer reports push mode."""
    push_ticket: str = ""
    """Push ticket carried by both legs; empty if P answered first."""
    answer: bytes = b""
    """P's whole answer if the client's answer may begin with P's token (`first_token.py`)."""


class ClientRequest(msgspec.Struct, frozen=True):
    """A well-formed request; only its top-level keys are decoded."""

    fields: _Fields
    conversation_id: str | None = None
    prompts: tuple[msgspec.Raw, ...] = ()
    """The prompts of a request with several prompts; empty if the request has one."""
    num_choices: int = 1
    """The number of choices for each of several prompts; not read if the request has one."""
    api: Api = Api.OPENAI
    previous_response_id: str | None = None
    """The stored response that this one continues."""

    @property
    def prompt(self) -> memoryview:
        """The JSON text of the fields that the prompt begins with."""
        if self.api is not Api.OPENAI:
            names = _PROMPT_FIELDS[self.api]
            named = [memoryview(self.fields[name]) for name in names if name in self.fields]
            largest = max(named, key=len, default=memoryview(b""))
            # Copying a large prompt would block the event loop.
            return largest if len(largest) > _MAX_SMALL_BYTES else memoryview(b"".join(named))
        text = self.fields.get("messages") or self.fields.get("prompt")
        return memoryview(b"") if text is None else memoryview(text)

    @property
    def needs_one_instance(self) -> bool:
        """Whether one decode instance serves the request alone: P does not have the stored
        response that the request continues, and a response that is made in the background would
        fetch P's blocks after the router has stopped watching.
        """
        return self.api is Api.RESPONSES and (
            self.previous_response_id is not None
            or bytes(self.fields.get("background", b"")) == b"true"
        )

    @property
    def is_streamed(self) -> bool:
        """Whether the engine will stream; `read_client_request` has normalised the field."""
        return bytes(self.fields.get("stream", b"")) == b"true"

    @property
    def num_repeated_bytes(self) -> int:
        """Bytes of the fields besides `prompt` that the requests for all prompts have together."""
        return len(self.prompts) * sum(
            len(memoryview(value)) for key, value in self.fields.items() if key != "prompt"
        )

    def with_prompt(self, prompt: msgspec.Raw) -> "ClientRequest":
        """The same request for one of its prompts."""
        return ClientRequest(self.fields | {"prompt": prompt})

    def prefill_body(
        self,
        push_ticket: str = "",
        last_turn: bytes | None = None,
        leg_id: str = "",
        *,
        extra: Mapping[str, msgspec.Raw] = _NO_FIELDS,
    ) -> "LegBody":
        """Body of the prefill leg: P computes the prompt, retains the blocks and returns one token.

        `last_turn`: the parameters that D returned at the end of the conversation's last turn.
        With the parameters P fetches the blocks that D has retained. `leg_id`: the router may ask
        P under this id why the leg failed, or release the leg. `extra`: further fields.
        """
        leg = {key: value for key, value in self.fields.items() if key not in _NOT_FOR_PREFILL}
        leg |= {
            "stream": _FALSE_TEXT,
            **_one_token(leg, self.api),
            "kv_transfer_params": _prefill_params(push_ticket, last_turn, leg_id),
        }
        return _encode({**leg, **extra})

    def with_id(self, response_id: str) -> "ClientRequest":
        """The same request for a response that gets this id from its engine."""
        text = msgspec.Raw(b'"%b"' % response_id.encode("ascii"))
        return msgspec.structs.replace(self, fields=self.fields | {"request_id": text})

    def decode_body(
        self, handover: Handover | None, turn_id: str | None = None, leg_id: str = ""
    ) -> "LegBody":
        """Body of the decode leg: the client's request with P's blocks attached.

        Without `handover`, D computes the prompt itself. `turn_id`: D retains the blocks of this
        turn under this id for the next turn. `leg_id`: as for the prefill leg."""
        # With null D retains nothing; without the key D retains the turn by default.
        added = (
            b'"conversation":null'
            if turn_id is None
            else b'"conversation":"%s"' % turn_id.encode("ascii")
        )
        if handover is None:
            return _encode(
                self.fields
                if turn_id is None
                else self.fields | {"kv_transfer_params": msgspec.Raw(b"{%s}" % added)}
            )
        if leg_id:
            added = b"%b,%b" % (_leg_id_field(leg_id), added)
        params = _with_fields(handover.params, added)
        return _encode(self.fields | {"kv_transfer_params": params})


def _encode(fields: Mapping[str, msgspec.Raw]) -> LegBody:
    """The JSON object with these fields. Large values are not copied: that would block the event
    loop for a moment in each leg.
    """
    if all(len(memoryview(value)) <= _MAX_COPIED_BYTES for value in fields.values()):
        return [_encoder.encode(fields)]
    body: LegBody = []
    small: dict[str, msgspec.Raw] = {}
    for name, value in fields.items():
        if len(memoryview(value)) <= _MAX_COPIED_BYTES:
            small[name] = value
        else:
            body += [b",", _encoder.encode(name), b":", memoryview(value)]
    rest = _encoder.encode(small)
    return [b"{", *body[1:], b"," if small else b"", rest[1:]]


def _one_token(leg: _Fields, api: Api) -> _Fields:
    """The fields that let P generate one token; removes from `leg` what contradicts them."""
    if api is Api.RESPONSES:
        for key in _NOT_FOR_PREFILL_OF_RESPONSES:
            leg.pop(key, None)
        return {"max_output_tokens": _ONE, "store": _FALSE_TEXT}
    if api is Api.TOKENS:
        sampling = _object(leg.get("sampling_params"))
        kept = {key: value for key, value in sampling.items() if key not in _NOT_FOR_PREFILL}
        return {"sampling_params": msgspec.Raw(_encoder.encode(kept | {"max_tokens": _ONE}))}
    if "max_completion_tokens" in leg:
        return {"max_tokens": _ONE, "max_completion_tokens": _ONE}
    return {"max_tokens": _ONE}


def _object(text: msgspec.Raw | None) -> _Fields:
    """The members of a JSON object; none if the text is something else."""
    try:
        return _decoder.decode(text) if text is not None else {}
    except msgspec.ValidationError:
        return {}


def _prefill_params(push_ticket: str, last_turn: bytes | None, leg_id: str) -> msgspec.Raw:
    params = _PLAIN_PREFILL_PARAMS
    if push_ticket or last_turn is not None:
        asked: dict[str, object] = dict(_PREFILL_PARAMS)
        if last_turn is not None:
            asked |= _decoder.decode(last_turn)
            asked |= {"do_remote_decode": True, "do_remote_prefill": False}
        if push_ticket:
            asked["push_ticket"] = push_ticket
        params = msgspec.Raw(_encoder.encode(asked))
    return _with_fields(params, _leg_id_field(leg_id)) if leg_id else params


def _leg_id_field(leg_id: str) -> bytes:
    return b'"leg_id":"%b"' % leg_id.encode("ascii")


def _with_fields(params: msgspec.Raw, added: bytes) -> msgspec.Raw:
    """Add keys to a JSON object that stays undecoded text."""
    rest = bytes(params)[1:].lstrip()
    return msgspec.Raw(b"{%b%b%b" % (added, b"" if rest.startswith(b"}") else b",", rest))


def read_client_request(
    body: bytes | bytearray, api: Api = Api.OPENAI
) -> ClientRequest | InvalidRequest:
    """Parse and check the body of a client's request."""
    if not body or body.isspace():
        return InvalidRequest(400, "the request body is empty: send a JSON object")
    # msgspec does not check the UTF-8 of values that stay Raw.
    if not body.isascii() and not _is_utf8(body):
        return InvalidRequest(400, "the request body is not valid JSON: it is not UTF-8")
    try:
        if len(body) > _MAX_SMALL_BYTES and _small_bytes(body) > _MAX_SMALL_BYTES:
            return InvalidRequest(
                413,
                f"fields other than {', '.join(_LargeFields.__struct_fields__[:-1])} take more "
                f"than {_MAX_SMALL_BYTES} bytes",
            )
        fields = _decoder.decode(body)
        _normalise(fields, api)
    except msgspec.ValidationError:
        return InvalidRequest(400, "the request body must be a JSON object")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return InvalidRequest(400, f"the request body is not valid JSON: {error}")
    except RecursionError:
        return InvalidRequest(400, "the request body is not valid JSON: it is nested too deeply")
    prompts = _several_prompts(fields) if api is Api.OPENAI else ()
    if isinstance(prompts, InvalidRequest):
        return prompts
    conversation = _conversation(fields.get("conversation_id"))
    if conversation is not None and not 0 < len(conversation) <= MAX_CONVERSATION_CHARS:
        return InvalidRequest(
            400, f"conversation_id must be a string of 1 to {MAX_CONVERSATION_CHARS} characters"
        )
    if prompts and conversation is not None:
        return InvalidRequest(
            400,
            "a turn of a conversation has one prompt, but prompt is a list of several prompts: "
            "leave out conversation_id, or send one prompt",
        )
    for key in _NEVER_FORWARDED:
        fields.pop(key, None)
    if prompts:
        return _with_choices(fields, prompts)
    client = ClientRequest(fields, conversation, api=api)
    return _with_previous_response(client) if api is Api.RESPONSES else client


def _with_previous_response(client: ClientRequest) -> ClientRequest | InvalidRequest:
    # The id of a response says which instance has it, so the router chooses the id.
    client.fields.pop("request_id", None)
    previous = client.fields.get("previous_response_id")
    try:
        name = None if previous is None else _name_decoder.decode(previous)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return InvalidRequest(400, "previous_response_id must be a string")
    return msgspec.structs.replace(client, previous_response_id=name)


def _conversation(name: msgspec.Raw | None) -> str | None:
    """The conversation id; None if absent, empty if the value is not a string."""
    if name is None:
        return None
    try:
        return _name_decoder.decode(name)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""


class _PrefillAnswer(msgspec.Struct, gc=False):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


class _Params(msgspec.Struct, gc=False):
    ticket: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    remote_engine_id: str | None = None
    remote_epoch: str | None = None
    """Set by a P that pushes."""
    tp_size: Count | None = None


_answer_decoder: msgspec.json.Decoder[_PrefillAnswer] = msgspec.json.Decoder(_PrefillAnswer)
_params_decoder: msgspec.json.Decoder[_Params | None] = msgspec.json.Decoder(_Params | None)


def read_prefill_answer(body: bytes) -> Handover | None:
    """Read P's answer; None if P holds no blocks (nothing in the prompt was worth moving).

    Raises RemoteProtocolError if the answer is malformed.
    """
    try:
        raw = _answer_decoder.decode(body).kv_transfer_params
        params = _params_decoder.decode(raw)
    except (
        msgspec.DecodeError,
        msgspec.ValidationError,
        UnicodeDecodeError,
        RecursionError,
    ) as error:
        raise RemoteProtocolError(f"its answer cannot be decoded: {error}") from None
    if params is None:
        return None
    address = _side_channel(params)
    return Handover(raw.copy(), params.ticket or None, address, _push_source(params, address))


def _push_source(params: _Params, address: Address | None) -> PushSource | None:
    if address is None or not (params.remote_engine_id and params.remote_epoch and params.tp_size):
        return None
    return PushSource(params.remote_engine_id, params.remote_epoch, address, params.tp_size)


def _side_channel(params: _Params) -> Address | None:
    if not params.remote_host or params.remote_port is None or not 0 < params.remote_port < 65536:
        return None
    return Address(params.remote_host, params.remote_port)


def _several_prompts(fields: _Fields) -> tuple[msgspec.Raw, ...] | InvalidRequest:
    """The prompts of a completion that has several; empty if it has one, in whatever spelling."""
    # A list of token ids is by far the longest kind of list; the first character after the bracket
    # distinguishes token ids from prompts. A chat has messages, and no engine reads its `prompt`.
    text = memoryview(fields.get("prompt", b""))
    if "messages" in fields or not _LIST_OF_PROMPTS.match(text):
        return ()
    try:
        decoded = msgspec.structs.astuple(_prompts_decoder.decode(text))
    except msgspec.ValidationError:
        return InvalidRequest(
            400,
            f"prompt is a list of several prompts, more than the {MAX_PROMPTS} that one request "
            "may have: send several requests",
        )
    prompts = tuple(prompt for prompt in decoded if bytes(memoryview(prompt)[:1]))
    if len(prompts) == 1:
        return ()
    if len({bytes(memoryview(prompt)[:1]) for prompt in prompts}) != 1:
        return InvalidRequest(
            400,
            "prompt is a list of several prompts of different kinds: all must be strings, or all "
            "must be lists of token ids",
        )
    if "prompt_embeds" in fields:
        return InvalidRequest(
            400,
            "prompt is a list of several prompts and prompt_embeds is set too: send prompt_embeds "
            "in a request of its own",
        )
    return prompts


def _with_choices(
    fields: _Fields, prompts: tuple[msgspec.Raw, ...]
) -> ClientRequest | InvalidRequest:
    num_choices = _take_num_choices(fields)
    if num_choices is None:
        return InvalidRequest(400, "n must be a count of choices, 1 or more")
    return ClientRequest(fields, None, prompts, num_choices)


def _take_num_choices(fields: _Fields) -> int | None:
    """The number of choices for each prompt; None if `n` is no count.

    The router computes the indices of all choices from it, so engines get the number as read here,
    not the client's spelling of it.
    """
    text = fields.get("n")
    if text is None or bytes(text) == b"null":
        return 1
    try:
        value = _scalar_decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if isinstance(value, str):
        # Python refuses to read numbers of thousands of digits.
        count = _COUNT.fullmatch(value.strip()) if len(value) <= _MAX_COUNT_CHARS else None
        value = int(count[1]) if count is not None else 0
    if not 1 <= value <= _MAX_CHOICES or value != int(value):
        return None
    fields["n"] = msgspec.Raw(b"%d" % value)
    return int(value)


def _is_utf8(body: bytes | bytearray) -> bool:
    """Whether the body is UTF-8. msgspec does not check values that stay undecoded."""
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True


def _small_bytes(body: bytes | bytearray) -> int:
    large = _large_decoder.decode(body)
    return len(body) - sum(
        len(memoryview(getattr(large, name))) for name in _LargeFields.__struct_fields__
    )


def _normalise(fields: _Fields, api: Api) -> None:
    """Replace the values that engines must not get as the client wrote them."""
    if _EXTRA in fields:
        fields[_EXTRA] = _without_transfer(fields[_EXTRA])
    for flag in ("stream", "background") if api is Api.RESPONSES else ("stream",):
        if flag in fields:
            fields[flag] = _normalised_flag(fields[flag])
    if api is Api.TOKENS:
        sampling = _object(fields.get("sampling_params"))
        if "extra_args" in sampling:
            sampling["extra_args"] = _without_transfer(sampling["extra_args"])
            fields["sampling_params"] = msgspec.Raw(_encoder.encode(sampling))


def _normalised_flag(text: msgspec.Raw) -> msgspec.Raw:
    """`true` or `false` for any spelling of these; engines refuse what is no spelling of either."""
    if bytes(text) in (b"true", b"false"):
        return text
    try:
        value = _scalar_decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return text
    value = value.lower() if isinstance(value, str) else value
    if value in _TRUE:
        return msgspec.Raw(b"true")
    return msgspec.Raw(b"false") if value in _FALSE else text


def _without_transfer(extra: msgspec.Raw) -> msgspec.Raw:
    """Remove kv_transfer_params from vllm_xargs; the engine checks a value that is no object."""
    try:
        fields = _decoder.decode(extra)
    except msgspec.ValidationError:
        return extra
    return (
        msgspec.Raw(_encoder.encode(fields)) if fields.pop(_TRANSFER, None) is not None else extra
    )
