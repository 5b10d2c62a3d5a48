"""A name server on a loopback address, and hosts whose resolver asks it.

`getaddrinfo` reads /etc/resolv.conf and asks port 53. So the server binds port 53 of an address of
127.0.0.0/8, and processes run in a mount namespace with a resolv.conf of their own. Needs root.
"""

import os
import shutil
import socket
import threading
from enum import Enum, auto
from pathlib import Path
from typing import Any, Self

import pytest
from tests.e2e.harness import Host

dnslib = pytest.importorskip("dnslib", reason="needs dnslib, from the extra [dev]")


class Failure(Enum):
    """What the server answers instead of records."""

    UNKNOWN_NAME = auto()
    SERVER_FAILED = auto()
    SILENCE = auto()


class NameServer:
    """Answers with the records in `zone`, from a thread of its own."""

    def __init__(self, folder: Path) -> None:
        if os.geteuid() != 0 or shutil.which("unshare") is None:
            pytest.skip("a resolv.conf for one process needs root and unshare")
        self.zone: dict[str, list[str] | Failure] = {}
        """Addresses by name; a test replaces the values."""
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        pid = os.getpid()
        self._socket.bind((f"127.53.{pid >> 8 & 255}.{pid & 255}", 53))
        self._file = folder / "resolv.conf"
        self._file.write_text(
            f"nameserver {self._socket.getsockname()[0]}\noptions timeout:1 attempts:1\n"
        )
        self._thread = threading.Thread(target=self._run, name="name server")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        where = self._socket.getsockname()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as waker:
            waker.sendto(b"", where)
        self._thread.join(60)
        self._socket.close()

    def host(self) -> Host:
        """Where processes run whose resolver asks this server."""
        script = 'mount --bind "$0" /etc/resolv.conf && exec "$@"'
        inside = ("unshare", "--mount", "--propagation", "private", "sh", "-c", script)
        return Host(inside=(*inside, str(self._file)))

    def _run(self) -> None:
        while packet := self._socket.recvfrom(4096):
            data, sender = packet
            if not data:
                return
            reply = self._reply(dnslib.DNSRecord.parse(data))
            if reply is not None:
                self._socket.sendto(reply, sender)

    def _reply(self, query: Any) -> bytes | None:
        reply, name = query.reply(), str(query.q.qname).rstrip(".")
        found = self.zone.get(name, Failure.UNKNOWN_NAME)
        if found is Failure.SILENCE:
            return None
        if found is Failure.SERVER_FAILED:
            reply.header.rcode = dnslib.RCODE.SERVFAIL
        elif isinstance(found, Failure):
            reply.header.rcode = dnslib.RCODE.NXDOMAIN
        else:
            for address in found:
                record = dnslib.AAAA(address) if ":" in address else dnslib.A(address)
                kind = dnslib.QTYPE.AAAA if ":" in address else dnslib.QTYPE.A
                if query.q.qtype == kind:
                    reply.add_answer(dnslib.RR(name, kind, rdata=record, ttl=1))
        return bytes(reply.pack())
