"""Malformed requests that every kvferry server must refuse before it calls a handler, with the
status of each answer; None stands for any 4xx.
"""

import asyncio
import json

MALFORMED = [
    (b"GE\xdfsecret / HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    (b"secret\r\n\r\n", 400),
    (b"GET / HTTP/secret\r\nHost: x\r\n\r\n", 400),
    (b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n" % (b"secret" * 10000), None),
    (b"GET / HTTP/1.1\r\nHost: x\r\nX: %s\r\n\r\n" % (b"secret" * 10000), None),
    (b"GET / HTTP/1.1\r\nHost: x\r\nsec ret: x\r\n\r\n", 400),
    (b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", None),
    (b"GET /%ff HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 404),
    (b"GET http://[::1 HTTP/1.1\r\nHost: x\r\n\r\n", None),
    (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: secret\r\nContent-Length: 0\r\n\r\n",
        417,
    ),
    (b"POST /nowhere HTTP/1.1\r\nHost: x\r\nExpect: secret\r\nContent-Length: 0\r\n\r\n", None),
    (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nsecret\r\n",
        400,
    ),
    (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        b"Content-Length: 99999999999\r\n\r\n",
        413,
    ),
]


async def assert_refused_without_echo(url: str, sent: bytes, status: int | None) -> None:
    """The answer is a JSON error with that status and contains nothing that the client sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
    writer.write(sent)
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1])
        for line in head.split(b"\r\n")
        if line.lower().startswith(b"content-length")
    )
    body = await reader.readexactly(length)
    writer.close()
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert b"application/json" in head
    assert status in (None, error["code"])
    assert 400 <= error["code"] < 500
    assert b"secret" not in head + body
