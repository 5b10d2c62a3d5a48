"""An S3 server in its own process, and an HTTP server in front of it that answers with errors."""

import http.client
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from tests.ports import reserve_port

from kvferry.types import Address

DEADLINE_S = 60.0
SIGNED = (
    "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, "
    "Signature=0"
)


@contextmanager
def s3_server() -> Iterator[Address]:
    """Run moto's server and wait until it accepts connections."""
    address = Address("127.0.0.1", reserve_port())
    command = [sys.executable, "-m", "moto.server", "-H", address.host, "-p", str(address.port)]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            assert process.poll() is None, "moto's server ended"
            with suppress(OSError):
                socket.create_connection((address.host, address.port), 1.0).close()
                break
            assert time.monotonic() < deadline, "moto's server does not listen"
            time.sleep(0.05)
        yield address
    finally:
        process.kill()
        process.wait()


def request(address: Address, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """Make one request as an operator or an attacker would, around the tier. moto checks that a
    request is signed, but not the signature.
    """
    with closing(_connection(address)) as connection:
        connection.request(method, path, body, {"Authorization": SIGNED})
        answer = connection.getresponse()
        return answer.status, answer.read()


def _connection(address: Address) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(address.host, address.port, timeout=DEADLINE_S)


class SeenRequest(NamedTuple):
    method: str
    path: str
    authorization: str


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # the default of 5 makes parallel connections wait a second


class ErrorServer:
    """Forwards requests to an S3 server. On command it answers with errors, holds requests that
    read objects, or cuts their answers off.
    """

    def __init__(self, upstream: Address) -> None:
        self.seen: list[SeenRequest] = []
        self.statuses: list[int | None] = []
        """The statuses with which the next requests are answered; None: as the server answers."""
        self.status: int | None = None
        """The status with which every request is answered."""
        self.put_status: int | None = None
        """The status with which every PUT is answered."""
        self.put_barrier = threading.Barrier(1)
        """The PUTs that it holds are answered together."""
        self.gets = threading.Event()
        """While it is cleared, GETs wait; look-ups do not."""
        self.gets.set()
        self.is_cutting = False
        """Whether connections break in the middle of the objects that they carry."""
        self._server = _Server(("127.0.0.1", 0), self._handler(upstream))
        self._thread = threading.Thread(target=self._server.serve_forever, name="error-server")

    @property
    def address(self) -> Address:
        return Address("127.0.0.1", self._server.server_address[1])

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(DEADLINE_S)
        self._server.server_close()

    def _handler(self, upstream: Address) -> type[BaseHTTPRequestHandler]:
        errors = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                num_bytes = int(self.headers.get("Content-Length", "0"))
                if errors.is_cutting and self.command == "PUT":
                    self.rfile.read(num_bytes // 2)
                    return
                body = self.rfile.read(num_bytes)
                signed = self.headers.get("Authorization", "")
                errors.seen.append(SeenRequest(self.command, self.path, signed))
                if self.command == "PUT" and errors.put_status is not None:
                    errors.put_barrier.wait(DEADLINE_S)
                    self._send(errors.put_status, {}, b"")
                    return
                status = errors.statuses.pop(0) if errors.statuses else errors.status
                if status is not None:
                    text = f"<Error><AWSAccessKeyId>{signed}</AWSAccessKeyId></Error>".encode()
                    self._send(status, {}, text)
                    return
                if self.command == "GET":
                    assert errors.gets.wait(DEADLINE_S)
                with closing(_connection(upstream)) as connection:
                    connection.request(self.command, self.path, body, dict(self.headers))
                    answer = connection.getresponse()
                    self._send(answer.status, dict(answer.headers), answer.read())

            def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
                self.send_response_only(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    if name not in ("Transfer-Encoding", "Connection"):
                        self.send_header(name, value)
                self.send_header("Connection", "close")
                self.end_headers()
                self.wfile.write(body[: len(body) // 2] if errors.is_cutting else body)

            def log_message(self, format: str, *args: object) -> None:
                pass

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _answer

        return Handler
