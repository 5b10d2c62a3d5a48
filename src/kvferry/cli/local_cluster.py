"""Prefill, decode and router processes on this machine, from start to a clean end. Used by one thread."""

import time
from collections.abc import Iterable, Mapping

from kvferry.cli.http_client import is_healthy
from kvferry.cli.launch import Launch
from kvferry.cli.processes import ChildProcess
from kvferry.cli.startup_view import StartupView
from kvferry.errors import KVFerryError
from kvferry.types import Address

__all__ = ["LocalCluster"]

_POLL_INTERVAL_S = 0.05
CLOSE_TIMEOUT_S = 15.0
"""More than an engine's own `--shutdown-timeout`, so that its streams can end with a word."""
_STAGE_PREFIX = "kvferry: "


class LocalCluster:
    """Starts engines side by side, then the router that knows their ports. `close` ends all that was started."""

    def __init__(self, launch: Launch, environment: Mapping[str, str], group: int, start_timeout_s: float) -> None:
        self._launch = launch
        self._environment = environment
        self._group = group
        self._start_timeout_s = start_timeout_s
        self._children: list[ChildProcess] = []
        self.decoders: tuple[Address, ...] = ()

    def start(self, prefill: int, decode: int, view: StartupView) -> Address:
        """The router's address, once everybody is healthy. KVFerryError names the one that failed."""
        names = [f"prefill-{i}" for i in range(prefill)] + [f"decode-{i}" for i in range(decode)]
        engines = [self._start(name, self._launch.engine(), view) for name in names]
        addresses = self._wait_healthy(engines, view)
        self.decoders = tuple(addresses[prefill:])
        router = self._start("router", self._launch.router(addresses[:prefill], addresses[prefill:]), view)
        return self._wait_healthy([router], view)[0]

    def run_to_end(self, name: str, command: Iterable[str], view: StartupView) -> None:
        """A preparatory process that does its work and goes."""
        child = self._start(name, list(command), view)
        child.wait(self._start_timeout_s)
        view.finish(name, "done")

    def check_alive(self) -> None:
        for child in self._children:
            if child.is_serving:
                child.check_alive()

    def last_log_lines(self) -> list[tuple[str, list[str]]]:
        """Name and last log lines of everyone who has ended badly, or, when all live, of everyone."""
        ended = [child for child in self._children if child.has_failed]
        return [(child.name, child.tail()) for child in ended or self._children]

    def close(self) -> None:
        """The router first, so that nobody is asked who is gone. Requests get the time that router and engines give them after Ctrl-C."""
        for child in reversed(self._children):
            child.interrupt()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for child in reversed(self._children):
            child.close(max(0.0, deadline - time.monotonic()))

    def terminate_all(self) -> None:
        """Let `close` wait for no request. May be called from a signal handler in the middle of it."""
        for child in reversed(self._children):
            child.terminate()

    def _start(self, name: str, command: Iterable[str], view: StartupView) -> ChildProcess:
        child = ChildProcess(name, list(command), self._environment)
        self._children.append(child)
        view.begin(name, "starting")
        child.start(self._group)
        return child

    def _wait_healthy(self, children: list[ChildProcess], view: StartupView) -> list[Address]:
        deadline = time.monotonic() + self._start_timeout_s
        found: dict[str, Address] = {}
        while len(found) < len(children):
            for child in [child for child in children if child.name not in found]:
                view.show(child.name, _stage(child))
                address = child.poll_address()
                if address is not None and is_healthy(address):
                    found[child.name] = address
                    view.finish(child.name, f"ready on {address}")
            self.check_alive()
            if time.monotonic() > deadline:
                late = ", ".join(child.name for child in children if child.name not in found)
                raise KVFerryError(f"{late} did not become healthy within {self._start_timeout_s:g} s")
            time.sleep(_POLL_INTERVAL_S)
        return [found[child.name] for child in children]


def _stage(child: ChildProcess) -> str:
    """What it last said of itself to people, as opposed to its log."""
    stages = [line.removeprefix(_STAGE_PREFIX) for line in child.tail() if line.startswith(_STAGE_PREFIX)]
    return stages[-1] if stages else "starting"
