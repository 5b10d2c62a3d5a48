"""The messages of the router benchmark, and how the stub engines check the messages. Pure.

The messages are the client's request, P's answer and D's stream. P numbers its answers. D answers
200 only if a request carries the parameters of one of P's answers, unchanged, and each answer only
once. So the client sees failed requests if a router drops, swaps or changes parameters.
"""

import json
import random
import secrets
from typing import Any

import msgspec

from kvferry.protocol.fingerprints import fingerprint
from kvferry.protocol.tickets import Ticket, TicketKey, runs_from_blocks

PATH = "/v1/completions"
EVENTS = 16
"""The number of events in D's stream before `[DONE]`; each event has one token."""
MODEL = "stub"
TOKEN_BYTES = 4
"""The bytes of prompt text per token, roughly as in English."""
BLOCK_TOKENS = 16
SEED = 7
_WORDS = (
    "the",
    "of",
    "cache",
    "block",
    "prefill",
    "decode",
    "request",
    "router",
    "answers",
    "keeps",
    "token",
    "stream",
    "waits",
    "next",
)
_PARAMS = b'"kv_transfer_params"'
_SERIAL_DIGITS = 10
_NEAR_BYTES = 256
_TRUE = msgspec.Raw(b"true")
_decoder: msgspec.json.Decoder[dict[str, msgspec.Raw] | None] = msgspec.json.Decoder(
    dict[str, msgspec.Raw] | None
)
_HEADERS = (
    b"Host: %b\r\nContent-Type: application/json\r\nAccept: */*\r\nUser-Agent: kvferry-bench\r\n"
)


class BenchMessages:
    """All messages for one prompt, made in advance."""

    def __init__(self, prompt_bytes: int, writes: int = 1) -> None:
        self.prompt_bytes = prompt_bytes
        fields = {
            "model": MODEL,
            "prompt": _prompt(prompt_bytes),
            "max_tokens": EVENTS,
            "temperature": 0,
            "stream": True,
        }
        self.request_body = _json(fields)
        """The body that a client sends to a router and, with parameters added, to D."""
        nothing = dict.fromkeys(
            ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
        )
        requested = {"do_remote_decode": True, "do_remote_prefill": False, **nothing}
        self.prefill_body = _json(
            fields | {"stream": False, "max_tokens": 1, "kv_transfer_params": requested}
        )
        self.params = _params(-(-prompt_bytes // TOKEN_BYTES))
        """The parameters of P's answers, except for the number in `remote_request_id`."""
        whole = json_answer(200, _json(_completion() | {"kv_transfer_params": self.params}))
        self._answer_start, _, self._answer_end = whole.partition(_number(0))
        self.events = [_event(number) for number in range(EVENTS)] + [b"data: [DONE]\n\n"]
        self.stream_body = b"".join(self.events)
        self.stream = _stream(self.events, writes)
        """D's stream, in as many parts as D writes."""

    def answer(self, number: int) -> bytes:
        """Return P's answer with this number."""
        return self._answer_start + _number(number) + self._answer_end

    def decode_body(self, answer_body: bytes) -> bytes:
        """Return the body that a client without a router sends to D."""
        params = _cut_params(answer_body)
        return b"%b,%b:%b}" % (self.request_body[:-1], _PARAMS, params or b"null")


class PrefillLedger:
    """The numbers of P's answers that D has not seen yet.

    The `*_mismatch` methods return None for a correct request, else the fault.
    """

    def __init__(self, messages: BenchMessages) -> None:
        self.messages = messages
        self._count = 0
        self._open: set[int] = set()
        self._expected = {
            key: msgspec.Raw(_json(value))
            for key, value in messages.params.items()
            if key != "remote_request_id"
        }

    def prefill_mismatch(self, body: bytes) -> str | None:
        requested = _read_params(body)
        if requested is None or requested.get("do_remote_decode") != _TRUE:
            return "P was not asked to keep its blocks"
        return None if len(body) > self.messages.prompt_bytes else "P did not get the prompt"

    def next_answer(self) -> bytes:
        self._count += 1
        self._open.add(self._count)
        return self.messages.answer(self._count)

    def decode_mismatch(self, body: bytes) -> str | None:
        if len(body) <= self.messages.prompt_bytes:
            return "D did not get the prompt"
        params = _read_params(body)
        if not params:
            return "D did not get P's parameters"
        number = _read_number(bytes(params.pop("remote_request_id", b"")))
        if number not in self._open:
            return "D got parameters that P did not write for this request"
        self._open.remove(number)
        return None if _hold(params, self._expected) else "D got parameters other than P wrote"


def post(host: str, body: bytes) -> bytes:
    return b"POST %b HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n%b" % (
        PATH.encode(),
        _HEADERS % host.encode(),
        len(body),
        body,
    )


def json_answer(status: int, body: bytes) -> bytes:
    head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, b"OK" if status == 200 else b"Bad Request", len(body)) + body


def _prompt(prompt_bytes: int) -> str:
    """Return words and line breaks whose JSON text has this many bytes."""
    rng = random.Random(SEED)
    lines: list[str] = []
    size = 0
    while size < prompt_bytes:
        lines.append(" ".join(rng.choices(_WORDS, k=12)))
        size += len(lines[-1]) + 2
    text = json.dumps("\n".join(lines))[1:-1][:prompt_bytes]
    text = text[:-1] + "." if text.endswith("\\") else text
    return str(json.loads(f'"{text}"'))


def _params(num_tokens: int) -> dict[str, Any]:
    """Return the 13 keys of vLLM's connector and our own signed ticket.

    The blocks are scattered, in runs of eight.
    """
    rng = random.Random(SEED)
    count = -(-num_tokens // BLOCK_TOKENS)
    starts = rng.sample(range(8192), -(-count // 8))
    blocks = [8 * start + i for start in starts for i in range(8)][:count]
    tokens = fingerprint(rng.choices(range(150_000), k=num_tokens), BLOCK_TOKENS, "")
    name, request, port = (
        "5f0c1a6e-94c2-4a2b-8f59-4f1d6b0c7e21",
        f"cmpl-{_number(0).decode()}",
        5600,
    )
    runs = [runs_from_blocks(blocks)]
    ticket = Ticket(
        name, "0" * 32, request, 1, "127.0.0.1", port, 1, BLOCK_TOKENS, runs, tokens, 30.0
    )
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [blocks],
        "remote_engine_id": name,
        "remote_request_id": request,
        "remote_host": "127.0.0.1",
        "remote_port": port,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": num_tokens,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "ticket": TicketKey(secrets.token_bytes(32)).sign(ticket),
    }


def _completion() -> dict[str, Any]:
    choice = {
        "index": 0,
        "text": " the",
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    usage = {
        "prompt_tokens": 256,
        "total_tokens": 257,
        "completion_tokens": 1,
        "prompt_tokens_details": None,
    }
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1700000000,
        "model": MODEL,
        "choices": [choice],
        "usage": usage,
    }


def _event(number: int) -> bytes:
    choice = {
        "index": 0,
        "text": f" token{number}",
        "logprobs": None,
        "finish_reason": None,
        "stop_reason": None,
        "token_ids": None,
    }
    event = {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1700000000,
        "model": MODEL,
        "choices": [choice],
        "usage": None,
    }
    return b"data: " + _json(event) + b"\n\n"


def _stream(events: list[bytes], writes: int) -> list[bytes]:
    """Return the stream with one HTTP chunk per event, in equal parts, one part per write.

    The first part includes the head, the last part the end of the stream.
    """
    chunks = [b"%x\r\n%b\r\n" % (len(event), event) for event in events]
    tail = [*chunks[EVENTS:], b"0\r\n\r\n"]
    step = -(-EVENTS // writes)
    parts = [b"".join(chunks[at : min(at + step, EVENTS)]) for at in range(0, EVENTS, step)]
    parts[0] = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
        b"transfer-encoding: chunked\r\n\r\n" + parts[0]
    )
    parts[-1] += b"".join(tail)
    return parts


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _number(number: int) -> bytes:
    return b"request-%0*d" % (_SERIAL_DIGITS, number)


def _read_number(name: bytes) -> int | None:
    """Return the number in the JSON text of a request id."""
    digits = name[-1 - _SERIAL_DIGITS : -1]
    return int(digits) if digits.isdigit() and name[-1:] == b'"' else None


def _read_params(body: bytes) -> dict[str, msgspec.Raw] | None:
    text = _cut_params(body)
    if text is None:
        return None
    try:
        return _decoder.decode(text)
    except msgspec.DecodeError:
        return None


def _hold(params: dict[str, msgspec.Raw], expected: dict[str, msgspec.Raw]) -> bool:
    """Return whether `params` has all expected keys with equal values.

    Usually the JSON texts are identical. Decoding the texts would cost the stub engines, and so
    every router alike, more time than some routers take.
    """
    if params.items() >= expected.items():
        return True
    return params.keys() >= expected.keys() and all(
        _is_same(params[key], value) for key, value in expected.items()
    )


def _is_same(value: msgspec.Raw, expected: msgspec.Raw) -> bool:
    """Compare as JSON, because some routers serialise the parameters again."""
    if bytes(value).translate(None, b" ") == bytes(expected):
        return True
    return bool(msgspec.json.decode(value) == msgspec.json.decode(expected))


def _cut_params(body: bytes) -> bytes | None:
    """Return the JSON text of the parameters, which contain no nested object.

    Routers put the parameters near the front or at the end; only otherwise is the whole prompt
    searched.
    """
    at = body.find(_PARAMS, 0, _NEAR_BYTES)
    if at < 0:
        at = body.rfind(_PARAMS)
    start, end = body.find(b"{", at), body.find(b"}", at)
    return body[start : end + 1] if 0 <= at < start < end else None
