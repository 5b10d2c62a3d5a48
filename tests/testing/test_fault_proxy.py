"""Tests that the fault proxy, on which tests of bad networks rely, causes only requested faults."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from kvferry.testing.fault_proxy import FaultProxy, ProxyDirection, ProxySide
from kvferry.types import Address

PATIENCE_S = 60.0
SOON_S = 0.2


class Echo:
    """A server that sends back all bytes it receives, on each connection until it ends."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self._listener.getsockname()[1])
        self.endings: list[str] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._threads.append(threading.Thread(target=self._echo, args=(connection,)))
                self._threads[-1].start()

    def _echo(self, connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(4096):
                    connection.sendall(data)
                self.endings.append("closed")
            except ConnectionResetError:
                self.endings.append("reset")

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


@pytest.fixture
def echo() -> Iterator[Echo]:
    made = Echo()
    yield made
    made.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[FaultProxy]:
    with FaultProxy(echo.address, Address("127.0.0.1", 0)) as made:
        yield made


@pytest.fixture
def client(proxy: FaultProxy) -> Iterator[socket.socket]:
    with dial(proxy) as made:
        made.sendall(b"hello")
        assert received(made, 5) == b"hello"
        yield made


def dial(proxy: FaultProxy) -> socket.socket:
    return socket.create_connection((proxy.address.host, proxy.address.port), timeout=PATIENCE_S)


def received(client: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (part := client.recv(size - len(data))):
        data += part
    return data


def is_silent(client: socket.socket) -> bool:
    client.settimeout(SOON_S)
    try:
        return not client.recv(1)
    except TimeoutError:
        return True
    finally:
        client.settimeout(PATIENCE_S)


def test_bytes_go_through_unchanged_and_are_counted(
    proxy: FaultProxy, client: socket.socket
) -> None:
    sent = bytes(range(256)) * 4000
    sender = threading.Thread(target=client.sendall, args=(sent,))
    sender.start()
    assert received(client, len(sent)) == sent
    sender.join(PATIENCE_S)
    assert (
        proxy.carried_bytes(ProxyDirection.TO_SERVER)
        == proxy.carried_bytes(ProxyDirection.TO_CLIENT)
        == len(sent) + 5
    )
    assert proxy.num_accepted == 1


def test_a_client_that_closes_is_closed_at_the_server(client: socket.socket, echo: Echo) -> None:
    client.shutdown(socket.SHUT_WR)
    assert client.recv(1) == b""
    assert echo.endings == ["closed"]


@pytest.mark.parametrize("direction", list(ProxyDirection))
def test_a_stall_holds_everything_back_and_loses_nothing(
    proxy: FaultProxy, client: socket.socket, direction: ProxyDirection
) -> None:
    proxy.stall(direction)
    client.sendall(b"one")
    assert is_silent(client)
    with dial(proxy) as another:
        another.sendall(b"two")
        assert is_silent(another)
        proxy.flow()
        assert received(another, 3) == b"two"
    assert received(client, 3) == b"one"


def test_a_delay_holds_bytes_back_for_a_while_and_keeps_their_order(
    proxy: FaultProxy, client: socket.socket
) -> None:
    proxy.delay(2 * SOON_S, ProxyDirection.TO_SERVER)
    client.sendall(b"one")
    assert is_silent(client)
    client.sendall(b"two")
    assert received(client, 6) == b"onetwo"


def test_a_reset_reaches_both_sides_and_the_next_connection_works(
    proxy: FaultProxy, client: socket.socket, echo: Echo
) -> None:
    proxy.reset()
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    with dial(proxy) as another:
        another.sendall(b"again")
        assert received(another, 5) == b"again"
    assert echo.endings[0] == "reset"


def test_a_cut_lets_so_many_bytes_pass(proxy: FaultProxy, client: socket.socket) -> None:
    proxy.cut_after(3, ProxyDirection.TO_CLIENT)
    client.sendall(b"hello")
    with contextlib.suppress(ConnectionResetError):
        assert b"hel".startswith(received(client, 5))
    assert proxy.carried_bytes(ProxyDirection.TO_CLIENT) == 8


def test_a_vanished_server_is_not_noticed_by_its_client(
    proxy: FaultProxy, client: socket.socket, echo: Echo
) -> None:
    proxy.vanish(ProxySide.SERVER)
    client.sendall(b"anybody?")
    assert is_silent(client)
    assert client.send(b"still open") == 10
    assert echo.endings == ["reset"]


def test_a_vanished_client_is_not_noticed_by_its_server(
    proxy: FaultProxy, client: socket.socket, echo: Echo
) -> None:
    proxy.vanish(ProxySide.CLIENT)
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    assert echo.endings == []


def test_a_proxy_that_refuses_leaves_old_connections_alone(
    proxy: FaultProxy, client: socket.socket
) -> None:
    proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        dial(proxy)
    client.sendall(b"old")
    assert received(client, 3) == b"old"
    proxy.accept()
    with dial(proxy) as another:
        another.sendall(b"new")
        assert received(another, 3) == b"new"


def test_closing_twice_is_closing_once(echo: Echo) -> None:
    proxy = FaultProxy(echo.address, Address("127.0.0.1", 0))
    proxy.start()
    proxy.close()
    proxy.close()
