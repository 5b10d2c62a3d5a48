"""Requests that no client should send, and a check of the answers to them."""

import http.client
import json
import socket
from contextlib import suppress
from dataclasses import dataclass

from hypothesis import strategies as st
from tests.router.stubs import AS_ADMIN

DEADLINE_S = 60.0
"""Time limit for one answer. A complete request must be answered."""
NOTHING_S = 0.05
"""How long the tests wait for an answer to incomplete data. The server may wait for the rest."""

GENERATING = ("/v1/completions", "/v1/chat/completions")
PAGES = (
    "/health",
    "/healthz",
    "/readyz",
    "/metrics",
    "/v1/models",
    "/dashboard",
    "/dashboard/",
    "/dashboard/state",
    "/dashboard/requests/x",
)
ADMIN = ("/admin/instances", "/admin/instances/drain", "/admin/register")
METHODS = (
    "GET",
    "POST",
    "PUT",
    "DELETE",
    "HEAD",
    "OPTIONS",
    "PATCH",
    "TRACE",
    "get",
    "X-Y",
    "PROPFIND",
)

# -- JSON --

NUMBERS = (
    "0",
    "-0",
    "1",
    "2",
    "-1",
    "1.5",
    "1e2",
    "1E400",
    "-1e-400",
    "9" * 400,
    "2147483648",
    "9223372036854775808",
    "0.1" + "0" * 300,
)
NOT_JSON = (
    "NaN",
    "Infinity",
    "-Infinity",
    "01",
    "+1",
    "1.",
    "undefined",
    "'x'",
    "True",
    "",
    "\\",
    "{",
    "]",
    '"',
    '{"a":}',
    '{"a" 1}',
    "[1,]",
)
KEYS = (
    "model",
    "prompt",
    "messages",
    "stream",
    "n",
    "max_tokens",
    "max_completion_tokens",
    "conversation_id",
    "kv_transfer_params",
)
MORE_KEYS = (
    "stream_options",
    "stop",
    "seed",
    "temperature",
    "tools",
    "logprobs",
    "echo",
    "best_of",
    "min_tokens",
    "response_format",
)


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def objects(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


strings = st.one_of(
    st.text(max_size=20).map(json.dumps),
    st.text(max_size=20).map(
        lambda text: (
            json.dumps(text, ensure_ascii=False).encode("utf-8", "surrogatepass").decode("latin-1")
        )
    ),
    st.sampled_from(
        [
            '"\\ud800"',
            '"\\udc00x"',
            '"\\u0000"',
            '"\\x"',
            '"\xff\xfe"',
            '"\xed\xa0\x80"',
            '"\n"',
            '"tiny"',
            '"' + "x" * 5000 + '"',
        ]
    ),
)
"""Each character stands for one byte, so the strings need not be valid UTF-8."""
atoms = st.one_of(
    st.sampled_from(NUMBERS), st.sampled_from(["true", "false", "null", "[]", "{}"]), strings
)
deep = st.sampled_from([100, 500, 1000, 20_000, 200_000]).flatmap(
    lambda depth: st.sampled_from([nested(depth), objects(depth)])
)
messages = st.lists(
    st.builds(
        lambda role, content: f'{{"role":{role},"content":{content}}}',
        st.one_of(st.just('"user"'), atoms),
        atoms,
    ),
    max_size=3,
).map(lambda entries: f"[{','.join(entries)}]")
values = st.recursive(
    st.one_of(atoms, st.sampled_from(NOT_JSON), deep, messages),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map(lambda entries: f"[{','.join(entries)}]"),
        st.lists(st.tuples(strings, inner), max_size=4).map(
            lambda pairs: "{" + ",".join(f"{key}:{value}" for key, value in pairs) + "}"
        ),
    ),
    max_leaves=8,
)
keys = st.one_of(st.sampled_from([f'"{key}"' for key in (*KEYS, *MORE_KEYS)]), strings)
GOOD = (
    '"model":"tiny"',
    '"prompt":"x"',
    '"prompt":[5,6,7]',
    '"messages":[{"role":"user","content":"x"}]',
    '"max_tokens":2',
)
pairs = st.one_of(
    st.sampled_from(GOOD), st.tuples(keys, values).map(lambda pair: f"{pair[0]}:{pair[1]}")
)
requests = st.lists(pairs, max_size=8).map(
    lambda entries: '{"max_tokens":2,' + ",".join(['"n":1', *entries]) + "}"
)
bodies = st.one_of(
    requests, requests, values, st.binary(max_size=60).map(lambda data: data.decode("latin-1"))
).map(lambda text: text.encode("latin-1"))

# -- HTTP --


@dataclass(frozen=True)
class Fuzzed:
    """A complete request, which must be answered."""

    method: str
    data: bytes

    def __repr__(self) -> str:
        return repr(self.data[:3000])


visible = st.text(
    st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="#"), max_size=30
)
paths = st.one_of(
    st.sampled_from([*GENERATING, *PAGES, *ADMIN]),
    visible.map(lambda text: "/" + text),
    st.sampled_from(["/dashboard/", "/dashboard/requests/", "/v1/", "/admin/", "/"]).flatmap(
        lambda start: visible.map(lambda end: start + end)
    ),
    st.sampled_from(
        [
            "/dashboard/../../etc/passwd",
            "/dashboard/%2e%2e/x",
            "/%00",
            "/?" + "q" * 2000,
            "//",
            "/v1/completions?x=1",
            "*",
        ]
    ),
)
header_values = st.text(
    st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=40
)
HEADERS = (
    "Authorization",
    "Content-Type",
    "X-Request-Id",
    "traceparent",
    "tracestate",
    "Origin",
    "Accept-Encoding",
    "Content-Encoding",
)
headers = st.lists(
    st.tuples(
        st.sampled_from([*HEADERS, "X-Any", "Cookie", "Range", "If-Match", "Upgrade"]),
        header_values,
    ),
    max_size=5,
)


def framed(
    methods: st.SearchStrategy[str], paths: st.SearchStrategy[str], bodies: st.SearchStrategy[bytes]
) -> st.SearchStrategy[Fuzzed]:
    return st.builds(_frame, methods, paths, headers, bodies, st.booleans())


def _frame(
    method: str, path: str, fields: list[tuple[str, str]], body: bytes, is_chunked: bool
) -> Fuzzed:
    lines = [
        f"{method} {path} HTTP/1.1",
        "Host: localhost",
        *(f"{name}: {value}" for name, value in fields),
    ]
    if all(name != "Authorization" for name, _ in fields):
        lines.append(f"Authorization: {AS_ADMIN['Authorization']}")
    if is_chunked:
        lines.append("Transfer-Encoding: chunked")
        segments = [body[at : at + 700] for at in range(0, min(len(body), 7000), 700)] + (
            [body[7000:]] if len(body) > 7000 else []
        )
        body = (
            b"".join(b"%x\r\n%s\r\n" % (len(segment), segment) for segment in segments)
            + b"0\r\n\r\n"
        )
    else:
        lines.append(f"Content-Length: {len(body)}")
    return Fuzzed(method, "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body)


any_request = framed(st.sampled_from(METHODS), paths, bodies)

# -- bytes that are not a request --

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
PARTS = (
    HEAD,
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\r\n",
    b"\r\n\r\n",
    b"\n",
    b"Content-Length: 5\r\n",
    b"Content-Length: -1\r\n",
    b"Content-Length: 99999999999999999999\r\n",
    b"Content-Length: 5, 5\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: gzip, chunked\r\n",
    b"Transfer-Encoding : chunked\r\n",
    b"Expect: 100-continue\r\n",
    b"Expect: a-miracle\r\n",
    b"Host: two\r\n",
    b" folded\r\n",
    b"Bad\x00Name: x\r\n",
    b"X: \x00\r\n",
    b"0\r\n\r\n",
    b"5\r\nhello\r\n",
    b"fffffffffffffffff\r\n",
    b"-5\r\n",
    b"{}",
    b'{"prompt":"x"}',
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET / HTTP/0.9\r\n\r\n",
    b"GET  / HTTP/1.1\r\n\r\n",
    b"A" * 70_000,
    b"X-Long: " + b"a" * 70_000 + b"\r\n",
    b"X: y\r\n" * 300,
)
soups = st.lists(
    st.one_of(st.sampled_from(PARTS), st.binary(max_size=30)), min_size=1, max_size=7
).map(b"".join)
sizes = st.one_of(
    st.integers(0, 40).map(lambda size: b"%x" % size),
    st.sampled_from(
        [
            b"",
            b" 5",
            b"5 ",
            b"0x5",
            b"+5",
            b"-1",
            b"5;a=b",
            b'5;a="\r\n"',
            b"G",
            b"1" * 40,
            b"5;" + b"x" * 20_000,
            b"\xff",
        ]
    ),
)
wrong_chunks = st.lists(
    st.tuples(
        sizes,
        st.sampled_from([b"\r\n", b"\n", b"\r", b""]),
        st.binary(max_size=12),
        st.sampled_from([b"\r\n", b"\n", b"", b"xx"]),
    ),
    min_size=1,
    max_size=5,
).map(
    lambda chunks: (
        HEAD
        + b"Transfer-Encoding: chunked\r\n\r\n"
        + b"".join(b"".join(chunk) for chunk in chunks)
        + b"0\r\n\r\n"
    )
)


# -- answers --


@dataclass(frozen=True)
class Seen:
    status: int
    content_type: str
    body: bytes


def send(port: int, data: bytes, method: str = "POST", is_whole: bool = True) -> Seen | None:
    """The first answer; None if the data is not a complete request and no answer came."""
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as sock:
        with suppress(
            BrokenPipeError, ConnectionResetError
        ):  # the server may refuse before it has read everything: there is an answer
            sock.sendall(data)
        if not is_whole:
            sock.settimeout(NOTHING_S)
        answer = http.client.HTTPResponse(sock, method=method)
        try:
            answer.begin()
            sock.settimeout(DEADLINE_S)
            return Seen(answer.status, answer.headers.get("Content-Type", ""), answer.read())
        except (TimeoutError, http.client.RemoteDisconnected, ConnectionResetError):
            if is_whole:
                raise
            return None
        finally:
            answer.close()


def check(seen: Seen, method: str = "POST") -> None:
    """No request may cause a server error, and a refusal is a JSON error in OpenAI's shape."""
    assert 200 <= seen.status < 300 or 400 <= seen.status < 500 or seen.status == 307, seen
    if seen.status >= 400 and method != "HEAD":
        error = json.loads(seen.body)["error"]
        assert (seen.content_type.split(";")[0], type(error["message"]), type(error["type"])) == (
            "application/json",
            str,
            str,
        ), seen
        assert error["message"], seen
