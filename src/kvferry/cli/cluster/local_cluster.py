"""Which processes make a cluster on one machine: their command lines and environments. Pure."""

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from kvferry.cli.cluster.http_client import is_healthy
from kvferry.cli.cluster.processes import ChildProcess
from kvferry.errors import ConfigError, KVFerryError
from kvferry.types import Address

__all__ = [
    "CONNECTORS",
    "Launch",
    "LocalCluster",
    "LocalLaunch",
    "StartupView",
    "UpOptions",
    "child_environment",
]


LOOPBACK = "127.0.0.1"
TINY = "tiny"
CONNECTORS = {"pull": "NixlConnector", "push": "NixlPushConnector"}
"""By `--mode`."""
GPU_CACHE_BYTES = "1G"


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What `kvferry up` was asked for."""

    prefill: int = 1
    decode: int = 1
    model: Path | None = None
    """None: a tiny one is made for the occasion."""
    port: int = 8000
    transports: tuple[str, ...] = ()
    """Empty: the best that works here."""
    tensor_parallel_size: int = 1
    mode: str = "pull"
    device: str = "cpu"

    def __post_init__(self) -> None:
        for flag, value in (
            ("--prefill", self.prefill),
            ("--decode", self.decode),
            ("--tensor-parallel-size", self.tensor_parallel_size),
        ):
            if value < 1:
                raise ConfigError(f"{flag} must be at least 1, got {value}")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"--port must be from 0 to 65535, got {self.port}")
        if self.model is not None and not self.model.is_dir():
            raise ConfigError(
                f"--model {self.model} is not a directory; name a folder with config.json and "
                "safetensors, or leave it out"
            )

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        return TINY if self.model is None else self.model.resolve().name


class Launch(Protocol):
    """The command lines of one cluster."""

    def engine(self) -> Sequence[str]: ...

    def router(
        self, prefillers: Sequence[Address], decoders: Sequence[Address]
    ) -> Sequence[str]: ...


@dataclass(frozen=True, slots=True)
class LocalLaunch:
    """Embedded engines that take any free port, and a router on the one the user asked for."""

    options: UpOptions
    model: Path

    def engine(self) -> list[str]:
        extra = (
            {"kv_connector_extra_config": {"transports": list(self.options.transports)}}
            if self.options.transports
            else {}
        )
        transfer = {"kv_connector": CONNECTORS[self.options.mode], "kv_role": "kv_both", **extra}
        return [
            *_kvferry("serve", str(self.model), "--host", LOOPBACK, "--port", "0"),
            *("--served-model-name", self.options.model_name),
            *("--tensor-parallel-size", str(self.options.tensor_parallel_size)),
            *self._device(),
            # Peers that could fetch what an engine keeps end together with it.
            *("--drain-timeout", "0"),
            *("--kv-transfer-config", json.dumps(transfer)),
        ]

    def _device(self) -> list[str]:
        """Engines that share a GPU must not each take what is left of it."""
        device = self.options.device
        return (
            []
            if device == "cpu"
            else ["--device", device, "--kv-cache-memory-bytes", GPU_CACHE_BYTES]
        )

    def router(self, prefillers: Sequence[Address], decoders: Sequence[Address]) -> list[str]:
        command = _kvferry("proxy", "--host", LOOPBACK, "--port", str(self.options.port))
        for name, addresses in (("prefiller", prefillers), ("decoder", decoders)):
            command += [f"--{name}-hosts", *(address.host for address in addresses)]
            command += [f"--{name}-ports", *(str(address.port) for address in addresses)]
        return command

    def make_model(self) -> list[str]:
        """With as many KV heads as there are ranks, where the usual two are too few."""
        ranks = self.options.tensor_parallel_size
        return _kvferry(
            "make-model", str(self.model), *(("--heads", str(2 * ranks)) if ranks > 2 else ())
        )


def child_environment(environ: Mapping[str, str], secret_file: Path) -> dict[str, str]:
    """Side channels take any free port of the loopback; the secret is the operator's, or one for
    this cluster alone.
    """
    own = {
        "KVFERRY_SIDE_CHANNEL_HOST": LOOPBACK,
        "KVFERRY_SIDE_CHANNEL_BIND": LOOPBACK,
        "KVFERRY_SIDE_CHANNEL_PORT": "0",
        "PYTHONUNBUFFERED": "1",
    }
    if not environ.get("KVFERRY_SECRET") and not environ.get("KVFERRY_SECRET_FILE"):
        own["KVFERRY_SECRET_FILE"] = str(secret_file)
    return {**environ, **own}


def _kvferry(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvferry", *arguments]


# -------------------- startup view -------------------- What `kvferry up` shows while processes
# start: a spinner each on a terminal, plain lines elsewhere.


class StartupView:
    """`begin`, `show` and `finish` each step by name, in any order. A context manager: the display
    ends with it.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._since: dict[str, float] = {}
        self._tasks: dict[str, TaskID] = {}
        columns = (
            SpinnerColumn(finished_text="[green]✓[/]"),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=console) if console.is_terminal else None

    def begin(self, name: str, what: str) -> None:
        self._since[name] = time.monotonic()
        if self._progress is not None:
            self._tasks[name] = self._progress.add_task(
                f"[bold]{escape(name)}[/] {escape(what)}", total=1
            )
        else:
            self._console.print(f"{name}: {what}", markup=False, highlight=False, soft_wrap=True)

    def show(self, name: str, what: str) -> None:
        """A stage on the way; elsewhere than on a terminal it would only be noise."""
        if self._progress is not None:
            self._progress.update(
                self._tasks[name], description=f"[bold]{escape(name)}[/] {escape(what)}"
            )

    def finish(self, name: str, what: str) -> None:
        took_s = time.monotonic() - self._since[name]
        if self._progress is not None:
            self._progress.update(
                self._tasks[name],
                completed=1,
                description=f"[bold]{escape(name)}[/] {escape(what)}",
            )
        else:
            self._console.print(
                f"{name}: {what} after {took_s:.1f} s",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )

    def __enter__(self) -> "StartupView":
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()


# -------------------- local cluster -------------------- Prefill, decode and router processes on
# this machine, from start to a clean end. Used by one thread.


_POLL_INTERVAL_S = 0.05
CLOSE_TIMEOUT_S = 15.0
"""More than an engine's own `--shutdown-timeout`, so that its streams can end with a word."""
_STAGE_PREFIX = "kvferry: "


class LocalCluster:
    """Starts engines side by side, then the router that knows their ports. `close` ends all that
    was started.
    """

    def __init__(
        self, launch: Launch, environment: Mapping[str, str], group: int, start_timeout_s: float
    ) -> None:
        self._launch = launch
        self._environment = environment
        self._group = group
        self._start_timeout_s = start_timeout_s
        self._children: list[ChildProcess] = []
        self.decoders: tuple[Address, ...] = ()

    def start(self, prefill: int, decode: int, view: StartupView) -> Address:
        """The router's address, once everybody is healthy. KVFerryError names the one that
        failed.
        """
        names = [f"prefill-{i}" for i in range(prefill)] + [f"decode-{i}" for i in range(decode)]
        engines = [self._start(name, self._launch.engine(), view) for name in names]
        addresses = self._wait_healthy(engines, view)
        self.decoders = tuple(addresses[prefill:])
        router = self._start(
            "router", self._launch.router(addresses[:prefill], addresses[prefill:]), view
        )
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
        """Name and last log lines of everyone who has ended badly, or, when all live, of
        everyone.
        """
        ended = [child for child in self._children if child.has_failed]
        return [(child.name, child.tail()) for child in ended or self._children]

    def close(self) -> None:
        """The router first, so that nobody is asked who is gone. Requests get the time that router
        and engines give them after Ctrl-C.
        """
        for child in reversed(self._children):
            child.interrupt()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for child in reversed(self._children):
            child.close(max(0.0, deadline - time.monotonic()))

    def terminate_all(self) -> None:
        """Let `close` wait for no request. May be called from a signal handler in the middle of
        it.
        """
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
                raise KVFerryError(
                    f"{late} did not become healthy within {self._start_timeout_s:g} s"
                )
            time.sleep(_POLL_INTERVAL_S)
        return [found[child.name] for child in children]


def _stage(child: ChildProcess) -> str:
    """What it last said of itself to people, as opposed to its log."""
    stages = [
        line.removeprefix(_STAGE_PREFIX) for line in child.tail() if line.startswith(_STAGE_PREFIX)
    ]
    return stages[-1] if stages else "starting"
