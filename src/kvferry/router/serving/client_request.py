"""The two requests that one client's request becomes, and what the first answer says.

Pure. Values are kept as the JSON text the client sent and only the keys that change are replaced,
so that a long prompt is never decoded here and reaches both engines exactly as written.
"""

import re
from dataclasses import dataclass

import msgspec

from kvferry.errors import RemoteProtocolError
from kvferry.types import Address

__all__ = [
    "MAX_CONVERSATION_CHARS",
    "ClientRequest",
    "Handover",
    "InvalidRequest",
    "PushSource",
    "read_client_request",
    "read_prefill_answer",
]

MAX_CONVERSATION_CHARS = 256

_Fields = dict[str, msgspec.Raw]

# Made once: `msgspec.json.decode` with a type works that type out again each time, which takes ten
# times as long as a short text.
_decoder: msgspec.json.Decoder[_Fields] = msgspec.json.Decoder(_Fields)
_name_decoder: msgspec.json.Decoder[str | None] = msgspec.json.Decoder(str | None)
_encoder = msgspec.json.Encoder()

# A client's own kv_transfer_params would point the engines at blocks of somebody else;
# conversation_id is addressed to the router.
_NEVER_FORWARDED = ("kv_transfer_params", "conversation_id")
_NOT_FOR_PREFILL = ("stream_options", "min_tokens", "n", "best_of")
_PREFILL_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_PLAIN_PREFILL_PARAMS = msgspec.Raw(_encoder.encode(_PREFILL_PARAMS))
_NO_CONVERSATION = b'"conversation":null'
_LIST_OF_PROMPTS = re.compile(rb'\[\s*["\[]')
# vLLM takes this from among those, too.
_EXTRA, _TRANSFER = "vllm_xargs", "kv_transfer_params"
_MAX_SMALL_BYTES = 1024 * 1024
"""Of all fields but the large ones together: a million tiny keys would hold up everybody for
seconds.
"""


class _LargeFields(msgspec.Struct):
    prompt: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    tools: msgspec.Raw = msgspec.Raw(b"")
    response_format: msgspec.Raw = msgspec.Raw(b"")
    structured_outputs: msgspec.Raw = msgspec.Raw(b"")
    prompt_embeds: msgspec.Raw = msgspec.Raw(b"")
    documents: msgspec.Raw = msgspec.Raw(b"")
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"")


_large_decoder = msgspec.json.Decoder(_LargeFields)
_one_decoder = msgspec.json.Decoder(tuple[msgspec.Raw])
"""Of a list of one: it stops at the second, however many there are."""


@dataclass(frozen=True, slots=True)
class InvalidRequest:
    """A request that goes to no engine, and the sentence the client gets."""

    status: int
    message: str


@dataclass(frozen=True, slots=True)
class PushSource:
    """A prefill engine that pushes: one life of it, and how the decode side reaches it."""

    engine: str
    epoch: str
    side_channel: Address
    tp_size: int

    def push_handover(self, push_ticket: str) -> "Handover":
        """What the decode leg carries while P has not computed anything yet."""
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine,
            "remote_host": self.side_channel.host,
            "remote_port": self.side_channel.port,
            "tp_size": self.tp_size,
            "transfer_mode": "push",
            "push_ticket": push_ticket,
        }
        return Handover(msgspec.Raw(_encoder.encode(params)), None, None, push_ticket=push_ticket)


class Handover(msgspec.Struct, frozen=True):
    """What P's answer says of the blocks it holds for us, or what we promise D of them before P has
    answered.
    """

    params: msgspec.Raw
    """`kv_transfer_params` as P wrote them."""
    ticket: str | None
    """None: P issues no tickets, nothing can be released early."""
    side_channel: Address | None
    push_source: PushSource | None = None
    """P's answer says that it pushes."""
    push_ticket: str = ""
    """Of a promise: both legs carry it."""


class ClientRequest(msgspec.Struct, frozen=True):
    """A well-formed request, still undecoded below its first level."""

    fields: _Fields
    conversation_id: str | None = None

    @property
    def prompt(self) -> memoryview:
        """The JSON text of what is to be computed."""
        text = self.fields.get("messages") or self.fields.get("prompt")
        return memoryview(b"") if text is None else memoryview(text)

    @property
    def is_streamed(self) -> bool:
        return bytes(self.fields.get("stream", b"")) == b"true"

    def prefill_body(self, push_ticket: str = "", last_turn: bytes | None = None) -> bytes:
        """Computes the prompt, keeps the blocks, answers with one token at once.

        `last_turn`: what D said at the end of the conversation's last turn, so that P can fetch
        what D still has of it.
        """
        leg = {key: value for key, value in self.fields.items() if key not in _NOT_FOR_PREFILL}
        one = msgspec.Raw(b"1")
        leg |= {
            "stream": msgspec.Raw(b"false"),
            "max_tokens": one,
            "kv_transfer_params": _prefill_params(push_ticket, last_turn),
        }
        if "max_completion_tokens" in leg:
            leg["max_completion_tokens"] = one
        return _encoder.encode(leg)

    def decode_body(self, handover: Handover | None, turn_id: str | None = None) -> bytes:
        """The client's request with P's blocks attached; without any, D computes the prompt itself.

        `turn_id`: D is to keep the turn's blocks for the next one, under this word."""
        conversation_field = (
            _NO_CONVERSATION
            if turn_id is None
            else b'"conversation":"%s"' % turn_id.encode("ascii")
        )
        if handover is None:
            return _encoder.encode(
                self.fields
                if turn_id is None
                else self.fields | {"kv_transfer_params": msgspec.Raw(b"{%s}" % conversation_field)}
            )
        return _encoder.encode(
            self.fields | {"kv_transfer_params": _with_field(handover.params, conversation_field)}
        )


def _prefill_params(push_ticket: str, last_turn: bytes | None) -> msgspec.Raw:
    if not push_ticket and last_turn is None:
        return _PLAIN_PREFILL_PARAMS
    asked: dict[str, object] = dict(_PREFILL_PARAMS)
    if last_turn is not None:
        asked |= _decoder.decode(last_turn) | {"do_remote_decode": True, "do_remote_prefill": False}
    if push_ticket:
        asked["push_ticket"] = push_ticket
    return msgspec.Raw(_encoder.encode(asked))


def _with_field(params: msgspec.Raw, conversation_field: bytes) -> msgspec.Raw:
    """One key more in an object that is kept as the text it came in."""
    rest = bytes(params)[1:].lstrip()
    return msgspec.Raw(
        b"{%s%s%s" % (conversation_field, b"" if rest.startswith(b"}") else b",", rest)
    )


def read_client_request(body: bytes) -> ClientRequest | InvalidRequest:
    if not body.strip():
        return InvalidRequest(400, "the request body is empty: send a JSON object")
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
        if _EXTRA in fields:
            fields[_EXTRA] = _without_transfer(fields[_EXTRA])
    except msgspec.ValidationError:
        return InvalidRequest(400, "the request body must be a JSON object")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return InvalidRequest(400, f"the request body is not valid JSON: {error}")
    except RecursionError:
        return InvalidRequest(400, "the request body is not valid JSON: it is nested too deeply")
    if _has_several_prompts(fields.get("prompt")):
        return InvalidRequest(
            400,
            "prompt is a list of several prompts; the router takes one prompt per request, send "
            "one request for each",
        )
    conversation = _conversation(fields.get("conversation_id"))
    if conversation is not None and not 0 < len(conversation) <= MAX_CONVERSATION_CHARS:
        return InvalidRequest(
            400, f"conversation_id must be a string of 1 to {MAX_CONVERSATION_CHARS} characters"
        )
    for key in _NEVER_FORWARDED:
        fields.pop(key, None)
    return ClientRequest(fields, conversation)


def _conversation(name: msgspec.Raw | None) -> str | None:
    """None: there is none; empty: what stands there is no name."""
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
    transfer_mode: str | None = None
    remote_engine_id: str | None = None
    remote_epoch: str | None = None
    tp_size: int | None = None


_answer_decoder: msgspec.json.Decoder[_PrefillAnswer] = msgspec.json.Decoder(_PrefillAnswer)
_params_decoder: msgspec.json.Decoder[_Params | None] = msgspec.json.Decoder(_Params | None)


def read_prefill_answer(body: bytes) -> Handover | None:
    """P's blocks; None when P kept none (it may: a prompt with nothing worth moving).
    RemoteProtocolError for anything malformed.
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
        raise RemoteProtocolError(f"its answer cannot be read: {error}") from None
    if params is None:
        return None
    address = _side_channel(params)
    return Handover(raw.copy(), params.ticket or None, address, _push_source(params, address))


def _push_source(params: _Params, address: Address | None) -> PushSource | None:
    if (
        params.transfer_mode != "push"
        or address is None
        or not (params.remote_engine_id and params.remote_epoch and params.tp_size)
    ):
        return None
    return PushSource(params.remote_engine_id, params.remote_epoch, address, params.tp_size)


def _side_channel(params: _Params) -> Address | None:
    if not params.remote_host or params.remote_port is None or not 0 < params.remote_port < 65536:
        return None
    return Address(params.remote_host, params.remote_port)


def _has_several_prompts(prompt: msgspec.Raw | None) -> bool:
    # Token ids are by far the longest lists, and are told apart by the first character after the
    # bracket.
    text = memoryview(prompt) if prompt is not None else memoryview(b"")
    if not _LIST_OF_PROMPTS.match(text):
        return False
    try:
        _one_decoder.decode(text)
    except msgspec.ValidationError:
        return True
    return False


def _is_utf8(body: bytes) -> bool:
    """Texts that are not decoded here are not looked into by the decoder either."""
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True


def _small_bytes(body: bytes) -> int:
    large = _large_decoder.decode(body)
    return len(body) - sum(
        len(memoryview(getattr(large, name))) for name in _LargeFields.__struct_fields__
    )


def _without_transfer(extra: msgspec.Raw) -> msgspec.Raw:
    """Whatever is not an object is the engine's to refuse."""
    try:
        fields = _decoder.decode(extra)
    except msgspec.ValidationError:
        return extra
    return (
        msgspec.Raw(_encoder.encode(fields)) if fields.pop(_TRANSFER, None) is not None else extra
    )
