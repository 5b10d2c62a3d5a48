"""The engines and the router of a chaos run, and the faults injected into them.

As root, each engine runs in its own network namespace. Otherwise its side channel and control
channel go through proxies that can be stalled. All calls block; the caller must not inject two
faults into one member at the same time.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.mode import Mode
from tests.chaos.plan import LEASE_S
from tests.e2e.harness import Cluster, Engine, Host, Starting
from tests.e2e.hosts import Hosts, why_impossible
from tests.e2e.proxied_engine import BEHIND, Channels
from tests.ports import reserve_port

from kvferry.errors import KVFerryError
from kvferry.testing.fault_proxy import FaultProxy

ROUTER = "router"
DEADLINES = {
    "handshake_timeout": 2,
    "confirm_timeout": 2,
    "read_timeout": 5,
    "receive_timeout": 10,
    "push_registration_timeout": 10,
    "step_timeout": LEASE_S,
}
EXTRA: dict[str, Any] = {"kv_lease_duration": LEASE_S, **DEADLINES}
CHUNKED = ("--max-num-batched-tokens", "64")
"""With this limit a prompt takes several steps, so push has chunks to send between them."""


@dataclass
class Member:
    """One engine with all its incarnations."""

    name: str
    policy: str
    flags: tuple[str, ...]
    extra: Mapping[str, Any]
    at: Host
    connectors: tuple[str, ...]
    """The connector of each incarnation in turn; after the last one the list starts again."""
    num_lives: int = 0
    engine: Engine | None = None
    channels: ExitStack = field(default_factory=ExitStack)
    proxies: Channels | None = None


class ChaosCluster:
    def __init__(self, cluster: Cluster, hosts: Hosts | None, members: dict[str, Member]) -> None:
        self._cluster = cluster
        self._hosts = hosts
        self._members = members
        self._router: Engine | None = None

    @classmethod
    @contextmanager
    def opened(
        cls, directory: Path, model: Path, prefill: int, decode: int, mode: Mode
    ) -> Iterator["ChaosCluster"]:
        """Start all engines and the router. Failure policies alternate among D, transports among P.
        Every second D has no prefix cache, so that it must fetch KV.
        """
        with ExitStack() as stack:
            hosts = (
                None if why_impossible() else stack.enter_context(Hosts.opened(prefill + decode))
            )
            cluster = stack.enter_context(Cluster(directory, model))
            members = {}
            for number in range(prefill + decode):
                index = number if number < prefill else number - prefill
                name = f"prefill-{index}" if number < prefill else f"decode-{index}"
                extra = (
                    {**EXTRA, "transports": ["tcp"]}
                    if number < prefill and index % 2 == 0
                    else EXTRA
                )
                flags = (
                    CHUNKED
                    if number < prefill
                    else ("--no-enable-prefix-caching",)
                    if index % 2 == 0
                    else ()
                )
                at = BEHIND if hosts is None else hosts[number]
                connectors = (
                    mode.prefill_connectors(index) if number < prefill else mode.decode_connectors
                )
                members[name] = Member(
                    name, "fail" if index % 2 == 0 else "recompute", flags, extra, at, connectors
                )
            chaos_cluster = cls(cluster, hosts, members)
            stack.callback(chaos_cluster.close)
            chaos_cluster.start()
            yield chaos_cluster

    @property
    def hosts_are_namespaces(self) -> bool:
        return self._hosts is not None

    @property
    def prefill(self) -> list[str]:
        return [name for name in self._members if name.startswith("prefill")]

    @property
    def decode(self) -> list[str]:
        return [name for name in self._members if name.startswith("decode")]

    @property
    def engines(self) -> dict[str, Engine]:
        return {
            name: member.engine
            for name, member in self._members.items()
            if member.engine is not None
        }

    @property
    def router(self) -> Engine:
        assert self._router is not None
        return self._router

    def start(self) -> None:
        starting = {name: self._serve(member) for name, member in self._members.items()}
        for name, process in starting.items():
            self._take_in(self._members[name], process)
        self._router = self._start_router(reserve_port())

    def restart(self, name: str) -> None:
        """Kill the process with SIGKILL; start a new incarnation at the same address with the same
        engine id.
        """
        self._process(name).kill()
        self._replace(name)

    def replace_if_dead(self, name: str) -> list[str]:
        """Replace a process that has died without an injected fault, and return that violation with
        its last log lines.
        """
        process = self._process(name).process
        try:
            process.check_alive()
        except KVFerryError as error:
            last_log_lines = "\n".join(process.tail(60))
            self._replace(name)
            return [f"{error}, by itself; its last log lines:\n{last_log_lines}"]
        return []

    def _process(self, name: str) -> Engine:
        return self.router if name == ROUTER else self.engines[name]

    def _replace(self, name: str) -> None:
        self._cluster.dismiss(self._process(name).process)
        if name == ROUTER:
            self._router = self._start_router(self.router.address.port)
            return
        member = self._members[name]
        member.channels.close()
        self._take_in(member, self._serve(member))

    def cut(self, name: str) -> None:
        member = self._members[name]
        if self._hosts is not None:
            self._hosts.cut(self._hosts[list(self._members).index(name)])
        elif member.proxies is not None:
            member.proxies.all(FaultProxy.stall)

    def heal(self, name: str) -> None:
        member = self._members[name]
        if self._hosts is not None:
            self._hosts.heal(self._hosts[list(self._members).index(name)])
        elif member.proxies is not None:
            member.proxies.flow()

    def close(self) -> None:
        for member in self._members.values():
            member.channels.close()

    def _serve(self, member: Member) -> Starting:
        connector = member.connectors[member.num_lives % len(member.connectors)]
        member.num_lives += 1
        return self._cluster.serve(
            member.name,
            *member.flags,
            extra=dict(member.extra),
            policy=member.policy,
            # A port that no outgoing connection takes between two lives of the engine.
            port=member.engine.address.port if member.engine is not None else reserve_port(),
            engine_id=member.name,
            at=member.at,
            connector=connector,
        )

    def _take_in(self, member: Member, process: Starting) -> None:
        member.engine = process.ready()
        if self._hosts is None:
            member.channels = ExitStack()
            member.proxies = member.channels.enter_context(Channels.opened(member.engine))

    def _start_router(self, port: int) -> Engine:
        engines = self.engines
        return self._cluster.proxy(
            [engines[name] for name in self.prefill],
            [engines[name] for name in self.decode],
            port=port,
        ).ready()
