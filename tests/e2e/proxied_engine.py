"""An engine whose side channel and control channel go through fault proxies; its KV and HTTP do
not.

The engine announces 127.0.0.2 to its peers and listens on 127.0.0.1. The proxies listen on
127.0.0.2 and forward to the same ports on 127.0.0.1. Works without root.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import psutil
from tests.e2e.harness import Engine, Host

from kvferry.testing.fault_proxy import FaultProxy
from kvferry.types import Address

INNER, OUTER = "127.0.0.1", "127.0.0.2"
BEHIND = Host(variables={"KVFERRY_SIDE_CHANNEL_HOST": OUTER, "KVFERRY_SIDE_CHANNEL_BIND": INNER})
"""The host for an engine that will be put behind `Channels`."""


@dataclass(frozen=True)
class Channels:
    proxies: list[FaultProxy]

    @classmethod
    @contextmanager
    def opened(cls, engine: Engine) -> Iterator["Channels"]:
        with ExitStack() as stack:
            ports = sorted(listening_ports(engine))
            assert len(ports) == 2, (
                f"a side channel and a control channel were expected, there is {ports}"
            )
            yield cls(
                [
                    stack.enter_context(FaultProxy(Address(INNER, port), Address(OUTER, port)))
                    for port in ports
                ]
            )

    def all(self, command: Callable[[FaultProxy], None]) -> None:
        for proxy in self.proxies:
            command(proxy)

    def flow(self) -> None:
        self.all(FaultProxy.flow)


def listening_ports(engine: Engine) -> set[int]:
    """Return the engine's ZeroMQ ports. ZeroMQ's sockets also speak IPv6; HTTP and UCX listen on
    the plain IPv4 address.
    """
    found: set[int] = set()
    for member in engine.family():
        connections = member.net_connections("tcp")
        found |= {
            each.laddr.port
            for each in connections
            if each.status == psutil.CONN_LISTEN and each.laddr.ip == f"::ffff:{INNER}"
        }
    return found
