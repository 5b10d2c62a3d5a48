"""The routers under test, each started as its users start the router.

This module has the command lines, the required packages, start and stop, and the assignment of
cores. However the benchmark ends, no process is left behind (see `kvferry.cli.cluster.processes`).
"""

import asyncio
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvferry.bench.process_usage import cpu_seconds, process_tree, read_usage, run_queue_wait_s
from kvferry.bench.router.load import LoadSpec, connect_router_client, run_load
from kvferry.bench.router.messages import BenchMessages
from kvferry.bench.router.report import Router
from kvferry.cli.cluster.processes import ChildProcess, ProcessGroup
from kvferry.cli.cluster.vllm_servers import free_ports
from kvferry.errors import ConfigError, KVFerryError
from kvferry.types import Address

LOOPBACK = "127.0.0.1"
START_S = 60.0
POLL_INTERVAL_S = 0.1
IMPORT_S = 60.0
CLOSE_TIMEOUT_S = 15.0
TOY_PROGRAM = Path(__file__).with_name("toy_proxy.py")
AIOHTTP_PROGRAM = Path(__file__).with_name("aiohttp_proxy.py")
INSTALL = (
    "`make setup-vllm` makes .venv-router, which has it; or name an interpreter that has it with "
    "--router-python"
)


NEEDS = {Router.TOY: ("fastapi", "httpx", "uvicorn"), Router.VLLM_ROUTER: ("vllm_router",)}


@dataclass(frozen=True, slots=True)
class Tools:
    """The interpreter and the program for the other projects' routers."""

    python: Path
    toy_program: Path = TOY_PROGRAM


@dataclass(frozen=True, slots=True)
class Cores:
    """The cores of the routers, and of the load client with the stub engines.

    Both are empty where there are too few cores to divide.
    """

    router: frozenset[int] = frozenset()
    load: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class RunningRouter:
    """A started router process."""

    process: ChildProcess
    address: Address

    def cpu_s(self) -> float:
        """Return the CPU time so far of all processes and threads of the router."""
        return sum(cpu_seconds(pid) for pid in process_tree(self.process.pid))

    def waited_s(self) -> float:
        """Return the time so far in which threads of the router were runnable and waited for a
        core.
        """
        return sum(run_queue_wait_s(pid) for pid in process_tree(self.process.pid))

    def rss_bytes(self) -> int:
        return sum(read_usage(pid).rss_bytes for pid in process_tree(self.process.pid))


def default_router_python() -> Path:
    """Return the interpreter of the environment that `make setup-vllm` makes, if in this directory.

    Otherwise return our own interpreter.
    """
    beside = Path(".venv-router/bin/python")
    return beside.absolute() if beside.exists() else Path(sys.executable)


def missing_packages(router: Router, tools: Tools) -> str | None:
    """Return which packages this router lacks and how to install the packages; None if nothing is
    missing.

    A program that the user names with --toy-proxy is not checked.
    """
    needs = NEEDS.get(router, ())
    if router is Router.TOY and tools.toy_program != TOY_PROGRAM:
        if not tools.toy_program.is_file():
            raise ConfigError(
                f"--toy-proxy {tools.toy_program} is no file; name a program with the flags of "
                "vLLM's toy proxy"
            )
        return None
    if not needs:
        return None
    code = (
        f"import importlib.util as u; print(*[name for name in {needs!r} if u.find_spec(name) is "
        "None])"
    )
    try:
        done = subprocess.run(
            [str(tools.python), "-c", code],
            capture_output=True,
            text=True,
            timeout=IMPORT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"--router-python {tools.python} cannot be run ({error}); name an interpreter"
        ) from None
    absent = done.stdout.split()
    return f"{router} needs {', '.join(absent)}: {INSTALL}" if absent else None


@contextmanager
def split_cores() -> Iterator[Cores]:
    """Reserve the last core for routers and the first core for this process, until the context
    ends.
    """
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        yield Cores()
        return
    ours, theirs = min(before), max(before)
    os.sched_setaffinity(0, {ours})
    try:
        yield Cores(frozenset({theirs}), frozenset({ours}))
    finally:
        os.sched_setaffinity(0, before)


@asynccontextmanager
async def start_routers(
    routers: Sequence[Router],
    engines: tuple[Address, Address],
    tools: Tools,
    cores: Cores,
    messages: BenchMessages,
) -> AsyncIterator[dict[Router, RunningRouter]]:
    """Start the routers; each has given one correct answer when this function yields.

    KVFerryError names a router that did not answer correctly, with its last log lines.
    """
    directory = Path(tempfile.gettempdir()) / f"kvferry-routers-{secrets.token_hex(8)}"
    environment = {**os.environ, "KVFERRY_SECRET": secrets.token_hex(32), "PYTHONUNBUFFERED": "1"}
    running: dict[Router, RunningRouter] = {}
    with ProcessGroup(directory) as group:
        try:
            for router in routers:
                port, spare = free_ports(2)
                process = ChildProcess(
                    router, _command(router, port, spare, engines, tools), environment
                )
                running[router] = RunningRouter(process, Address(LOOPBACK, port))
                _start_on(process, group.id, cores)
            for each in running.values():
                await _wait_ready(each, messages)
            yield running
        finally:
            for each in running.values():
                each.process.terminate()
            for each in running.values():
                each.process.close(CLOSE_TIMEOUT_S)


def _command(
    router: Router, port: int, spare: int, engines: tuple[Address, Address], tools: Tools
) -> list[str]:
    prefill, decode = engines
    if router is Router.VLLM_ROUTER:
        # At its default log level vllm-router logs seven lines per request, which cost more than
        # the request itself; without those lines vllm-router is fastest.
        return [
            *(
                str(tools.python),
                "-m",
                "vllm_router.launch_router",
                "--host",
                LOOPBACK,
                "--port",
                str(port),
            ),
            *(
                "--vllm-pd-disaggregation",
                "--kv-connector",
                "nixl",
                "--prefill",
                f"http://{prefill}",
                "--decode",
                f"http://{decode}",
            ),
            *(
                "--policy",
                "round_robin",
                "--worker-startup-check-interval",
                "1",
                "--prometheus-port",
                str(spare),
            ),
            *("--log-level", "error"),
        ]
    seeds = ["--host", LOOPBACK, "--port", str(port)]
    for role, address in (("prefiller", prefill), ("decoder", decode)):
        seeds += [f"--{role}-hosts", address.host, f"--{role}-ports", str(address.port)]
    if router is Router.TOY:
        # Without -P Python would first look for modules in the folder of the program.
        return [str(tools.python), "-P", str(tools.toy_program), *seeds]
    if router is Router.AIOHTTP:
        return [sys.executable, "-P", str(AIOHTTP_PROGRAM), *seeds]
    return [sys.executable, "-m", "kvferry", "proxy", *seeds]


def _start_on(process: ChildProcess, group: int, cores: Cores) -> None:
    """Start a process on the routers' cores: a child inherits the cores of the thread that starts
    it.
    """
    if cores.router:
        os.sched_setaffinity(0, cores.router)
    try:
        process.start(group)
    finally:
        if cores.load:
            os.sched_setaffinity(0, cores.load)


async def _wait_ready(router: RunningRouter, messages: BenchMessages) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + START_S
    mismatch = "it does not listen"
    while loop.time() < deadline:
        try:
            router.process.check_alive()
        except KVFerryError as error:
            raise KVFerryError(_with_log(router.process, str(error))) from None
        try:
            client = await connect_router_client(messages, router.address)
        except KVFerryError:
            await asyncio.sleep(POLL_INTERVAL_S)
            continue
        try:
            result = await run_load([client], LoadSpec(requests=1))
        finally:
            client.close()
        if not result.num_failed:
            return
        mismatch = next(iter(result.failures))
        await asyncio.sleep(POLL_INTERVAL_S)
    raise KVFerryError(
        _with_log(
            router.process,
            f"{router.process.name} answered no request as it should within {START_S:.0f} s: "
            f"{mismatch}",
        )
    )


def _with_log(process: ChildProcess, what: str) -> str:
    return "\n".join([f"{what}; last log lines:", *(f"  {line}" for line in process.tail(40))])
