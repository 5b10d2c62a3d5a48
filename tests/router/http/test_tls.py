import asyncio
import socket
import ssl
import subprocess
from pathlib import Path

import pytest
from tests.router.http.kit import (
    answering,
    ask,
    chunked,
    echo,
    instance,
    post,
    run,
    serving,
    upstreams,
)

from kvferry.router.http.messages import (
    ConnectFailed,
    InvalidResponse,
    ServerRequest,
    UpstreamError,
)
from kvferry.router.http.upstream_connection import Target
from kvferry.router.http.writer import ResponseWriter

STREAM = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked([b"a" * 100_000, b"b"])


@pytest.fixture(scope="module")
def cert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for 127.0.0.1, with its key."""
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    name = ["-subj", "/CN=here", "-addext", "subjectAltName=IP:127.0.0.1"]
    key = [
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-keyout",
        str(path),
    ]
    made = subprocess.run(
        ["openssl", "req", "-x509", "-days", "2", *key, *name],
        capture_output=True,
        check=True,
    )
    path.write_bytes(path.read_bytes() + made.stdout)
    return path


def server_side(cert: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert)
    return context


def client_side(cert: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(cert))


def test_requests_go_through_tls_on_both_sides(cert: Path) -> None:
    async def story() -> None:
        async with (
            instance(answering(STREAM, STREAM, STREAM), server_side(cert)) as plain,
            upstreams() as made,
        ):
            target = Target(plain.address, client_side(cert))

            async def handler(request: ServerRequest, reply: ResponseWriter) -> None:
                with await ask(made, target, body=bytes(request.body)) as answer:
                    await answer.relay(reply, [], idle_timeout_s=60)

            async with serving(handler, tls=server_side(cert)) as served:
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", served.port, ssl=client_side(cert)
                )
                for _ in range(2):
                    writer.write(post(b"x" * 50_000))
                    assert await reader.readexactly(len(STREAM)) == STREAM
                assert made.num_connections == 1
                writer.close()

    run(story())


def test_an_instance_whose_certificate_nobody_vouches_for_is_not_reached(cert: Path) -> None:
    async def story() -> None:
        async with instance(answering(STREAM), server_side(cert)) as plain, upstreams() as made:
            with pytest.raises(ConnectFailed, match="TLS"):
                await ask(made, Target(plain.address, ssl.create_default_context()))
            assert made.num_connections == 0

    run(story())


def test_plain_and_tls_do_not_meet(cert: Path) -> None:
    async def story() -> None:
        async with instance(answering(STREAM), server_side(cert)) as plain, upstreams() as made:
            with pytest.raises(UpstreamError):
                await ask(made, plain)
        async with instance(answering(b"not tls at all")) as plain, upstreams() as made:
            with pytest.raises(ConnectFailed):
                # The instance waits for the end of a request, the client for TLS.
                await ask(made, Target(plain.address, client_side(cert)), connect_timeout_s=0.5)
            with pytest.raises(InvalidResponse):
                await ask(made, plain)

    run(story())


def test_what_is_no_tls_is_dropped_and_the_next_client_served(cert: Path) -> None:
    async def story() -> None:
        async with serving(echo, tls=server_side(cert), head_timeout_s=0.3) as served:
            for garbage in (
                post(b"plain"),
                b"\x00" * 100,
                b"\x16\x03\x01\x02\x00" + b"\xff" * 600,
                b"",
            ):
                assert b"200 OK" not in await served.say(garbage)
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", served.port, ssl=client_side(cert)
            )
            writer.write(b"BAD\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
            writer.close()

    run(story())


def test_a_client_that_leaves_by_tls_cancels_its_handler(cert: Path) -> None:
    async def story() -> None:
        entered, cancelled = asyncio.Event(), asyncio.Event()

        async def handler(request: ServerRequest, reply: ResponseWriter) -> None:
            entered.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        async with serving(handler, tls=server_side(cert)) as served:
            _, writer = await asyncio.open_connection(
                "127.0.0.1", served.port, ssl=client_side(cert)
            )
            writer.write(post(b"x"))
            await entered.wait()
            writer.close()
            await cancelled.wait()

    run(story())


def test_a_client_that_reads_nothing_by_tls_is_given_up(cert: Path) -> None:
    async def story() -> None:
        told = asyncio.Event()

        async def handler(request: ServerRequest, reply: ResponseWriter) -> None:
            reply.start(200, [])
            try:
                while True:
                    await reply.write(b"x" * 100_000)
            finally:
                told.set()

        async with serving(handler, tls=server_side(cert), stall_timeout_s=0.3) as served:
            with client_side(cert).wrap_socket(
                socket.socket(), server_hostname="127.0.0.1"
            ) as sock:
                await asyncio.to_thread(sock.connect, ("127.0.0.1", served.port))
                sock.sendall(post(b""))
                await told.wait()

    run(story())
