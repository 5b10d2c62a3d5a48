"""A stand-in of the Hugging Face hub on loopback, for the real client of `huggingface_hub`.

It has the endpoints that a download uses: what a model holds (`/api/models/…`), and its files
(`/…/resolve/…`, with HEAD and ranges). `Faults` says what goes wrong.
"""

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

COMMIT = "c0ffee" + 34 * "0"
OTHER_COMMIT = "beef" + 36 * "0"


@dataclass
class Hub:
    """One model, its files, and what the server has sent."""

    model: str
    files: dict[str, bytes]
    status: int = 200
    """The answer to every request."""
    error_code: str = ""
    """The X-Error-Code of an answer that is not 200."""
    token: str | None = None
    """The token that the client must send; without it the model is gated."""
    cut_after: int | None = None
    """The connection ends after so many bytes of a file."""
    cuts: int = 0
    """How many answers are cut."""
    dies_of_cut: bool = False
    """Every request after a cut gets the status 500."""
    stalls: str = ""
    """The file of which the server sends one byte and then nothing."""
    stalled: threading.Event = field(default_factory=threading.Event)
    is_silent: bool = False
    """The server reads requests and never answers."""
    sent: dict[str, int] = field(default_factory=dict)
    """The bytes sent of each file."""
    requests: list[str] = field(default_factory=list)
    url: str = ""
    closing: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def of_folder(cls, model: str, folder: Path, **faults: Any) -> "Hub":
        return cls(model, {path.name: path.read_bytes() for path in folder.iterdir()}, **faults)

    @contextmanager
    def serving(self) -> Iterator["Hub"]:
        handler = type("Handler", (_Handler,), {"hub": self})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield self
        finally:
            self.closing.set()
            server.shutdown()
            thread.join()
            server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.hub, urlsplit(self.path).path
        hub.requests.append(f"{self.command} {path}")
        if hub.is_silent:
            hub.closing.wait()
            self.close_connection = True
            return None
        if hub.token is not None and self.headers["Authorization"] != f"Bearer {hub.token}":
            return self._send(403, b"", {"X-Error-Code": "GatedRepo"})
        if hub.status != 200:
            return self._send(hub.status, b"", {"X-Error-Code": hub.error_code})
        name = re.escape(hub.model)
        if found := re.fullmatch(rf"/api/models/{name}(/revision/[^/]+)?", path):
            return self._send_info(found[1])
        if re.fullmatch(rf"/api/models/{name}/tree/{COMMIT}", path):
            return self._send_json([_entry(name, content) for name, content in hub.files.items()])
        if found := re.fullmatch(rf"/{name}/resolve/(main|v1|{COMMIT})/(.+)", path):
            return self._send_file(found[2])
        return self._send(404, b"", {"X-Error-Code": "RepoNotFound"})

    def _send_info(self, revision: str | None) -> None:
        if revision not in (None, "/revision/main", "/revision/v1", f"/revision/{COMMIT}"):
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        files = [{"rfilename": name, "size": len(c)} for name, c in self.hub.files.items()]
        return self._send_json({"id": self.hub.model, "sha": COMMIT, "siblings": files})

    def _send_file(self, name: str) -> None:
        hub, content = self.hub, self.hub.files.get(name)
        if content is None:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{sha1(content).hexdigest()}"'}
        start = 0
        if found := re.fullmatch(r"bytes=(\d+)-", self.headers["Range"] or ""):
            start = int(found[1])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        body = content[start:]
        sent = body
        if self.command == "GET":
            if hub.cuts and hub.cut_after is not None and len(body) > hub.cut_after:
                hub.cuts -= 1
                sent = body[: hub.cut_after]
                hub.status = 500 if hub.dies_of_cut else 200
            hub.sent[name] = hub.sent.get(name, 0) + len(sent)
            if name == hub.stalls:
                sent = sent[:1]
        self._send(206 if start else 200, sent, headers, length=len(body))
        if self.command == "GET" and name == hub.stalls:
            hub.stalled.set()
            hub.closing.wait()
        if len(sent) < len(body):
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        return None

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(
        self, status: int, body: bytes, headers: dict[str, str], length: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
            self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:
        return


def _entry(name: str, content: bytes) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(content), "oid": sha1(content).hexdigest()}
