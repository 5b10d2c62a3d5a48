"""Several hosts on one machine: network namespaces, each with two cables. The management cable
leads to the test process and always works, so that a test can reach an engine over HTTP. The other
cable leads to a switch that connects the peers; tests cut and throttle this one.

    us ── management switch ── 10.x.r.1, 10.x.r.2 …    HTTP
       └─ peers' switch ────── 10.y.r.1, 10.y.r.2 …    side channel, control channel, NIXL over TCP

Needs root and iproute2. Names contain our pid, so the next run removes what a killed run left
behind.
"""

import itertools
import json
import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.e2e.harness import Host

OURS = 254
END_S = 120.0
"""How long a command may take; the kernel changes one network device at a time."""
NAME = re.compile(r"kvf([0-9a-f]+)-")
_numbers = itertools.count()


def ip(*words: str) -> str:
    return run("ip", *words)


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=END_S)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def why_impossible() -> str:
    """Return why network namespaces cannot be made here; "" if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"network namespaces need the command {missing[0]} (Debian: iproute2)" if missing else ""


def skip_unless_possible() -> None:
    if why := why_impossible():
        pytest.skip(why)


class Namespace(Host):
    """One of the hosts, and its cable to the other hosts."""

    def __init__(self, name: str, port: str, address: str, dialled: str) -> None:
        variables = {
            "KVFERRY_SIDE_CHANNEL_HOST": dialled,
            "UCX_TLS": "tcp",
            "UCX_NET_DEVICES": "peers",
        }
        super().__init__(("ip", "netns", "exec", name), address, variables)
        self.name = name
        self.dialled = dialled
        self._port = port

    def cut(self) -> None:
        """Cut the cable without any notice: packets in both directions are lost."""
        ip("link", "set", self._port, "nomaster")

    def heal(self, switch: str) -> None:
        ip("link", "set", self._port, "master", switch)

    def throttle(self, rate: str) -> None:
        """Limit the rate of what this host sends to the other hosts, for example `4mbit`."""
        run(
            "tc",
            "-n",
            self.name,
            "qdisc",
            "replace",
            "dev",
            "peers",
            "root",
            "tbf",
            "rate",
            rate,
            "burst",
            "32kb",
            "latency",
            "100ms",
        )

    def hurry(self) -> None:
        """Remove the limit that `throttle` has set."""
        run("tc", "-n", self.name, "qdisc", "del", "dev", "peers", "root")

    def sent_bytes(self) -> int:
        """Return how many bytes this host has sent to the other hosts. Reading the counter of the
        cable's other end needs no command, which would wait for the kernel's lock on network
        devices.
        """
        return int(Path(f"/sys/class/net/{self._port}/statistics/rx_bytes").read_text())


class Hosts:
    """Network namespaces and their switches; they exist from `opened` to the end of its `with`
    block.
    """

    def __init__(self, members: list[Namespace], switch: str) -> None:
        self.members = members
        self._switch = switch

    def __getitem__(self, index: int) -> Namespace:
        return self.members[index]

    def cut(self, member: Namespace) -> None:
        member.cut()

    def heal(self, member: Namespace) -> None:
        member.heal(self._switch)

    @classmethod
    @contextmanager
    def opened(cls, count: int) -> Iterator["Hosts"]:
        remove_leftovers()
        tag = f"kvf{os.getpid():x}-{next(_numbers)}"
        net = secrets.choice(free_nets())
        with ExitStack() as undo:
            for suffix, second in (("m", 231), ("p", 232)):
                ip("link", "add", tag + suffix, "type", "bridge")
                undo.callback(ip, "link", "del", tag + suffix)
                ip("addr", "add", f"10.{second}.{net}.{OURS}/24", "dev", tag + suffix)
                ip("link", "set", tag + suffix, "up")
            members = [_add(undo, tag, index, net) for index in range(count)]
            yield cls(members, f"{tag}p")


def _add(undo: ExitStack, tag: str, index: int, net: int) -> Namespace:
    name = f"{tag}-{index}"
    ip("netns", "add", name)
    undo.callback(ip, "netns", "del", name)
    ip("-n", name, "link", "set", "lo", "up")
    addresses = []
    for suffix, second, device in (("m", 231, "us"), ("p", 232, "peers")):
        port = f"{tag}{index}{suffix}"
        ip("link", "add", port, "type", "veth", "peer", "name", device, "netns", name)
        ip("link", "set", port, "master", tag + suffix, "up")
        addresses.append(f"10.{second}.{net}.{index + 1}")
        ip("-n", name, "addr", "add", f"{addresses[-1]}/24", "dev", device)
        ip("-n", name, "link", "set", device, "up")
    return Namespace(name, f"{tag}{index}p", *addresses)


def free_nets() -> list[int]:
    """Return the subnets that no other test run on this machine uses."""
    shown = json.loads(ip("-j", "-4", "addr", "show"))
    taken = {
        address["local"].split(".")[2]
        for link in shown
        for address in link.get("addr_info", [])
        if address["local"].startswith("10.23")
    }
    return [net for net in range(1, 251) if str(net) not in taken]


def remove_leftovers() -> None:
    """Remove the namespaces and switches of runs that were killed."""
    spaces = [line.split()[0] for line in ip("netns", "list").splitlines()]
    switches = [
        link["ifname"]
        for link in json.loads(ip("-j", "link", "show", "type", "bridge") or "[]")
        if link
    ]
    for name in filter(_is_left_over, spaces):
        ip("netns", "del", name)
    for name in filter(_is_left_over, switches):
        ip("link", "del", name)


def _is_left_over(name: str) -> bool:
    match = NAME.match(name)
    return match is not None and not Path(f"/proc/{int(match[1], 16)}").exists()
