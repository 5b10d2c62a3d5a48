"""Ports for servers that tests start, and addresses at which no server listens."""

import random
import socket

from kvferry.cli.cluster.vllm_servers import non_ephemeral_ports

_reserved: list[socket.socket] = []


def reserve_port() -> int:
    """Return a port that no other process takes until this process ends, also between two
    incarnations of a server that uses the port.

    A bound socket that does not listen holds the port: Linux lets a server bind the port as well if
    both sockets have SO_REUSEADDR, which servers set, but gives the port to no outgoing connection.
    Another test process asks for it here, without SO_REUSEADDR, and is refused.
    """
    candidates = non_ephemeral_ports()
    for port in random.SystemRandom().sample(candidates, len(candidates)):
        reservation = socket.socket()
        try:
            reservation.bind(("", port))
        except OSError:
            reservation.close()
            continue
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _reserved.append(reservation)
        return port
    raise AssertionError("no port is free")


def reserve_ports(count: int) -> list[int]:
    return [reserve_port() for _ in range(count)]
