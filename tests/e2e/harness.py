"""Starts real engines and routers as child processes, sends them requests and reads their metrics.
Every wait has a deadline.
"""

import asyncio
import json
import os
import random
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import psutil
from tests.forkserver.client import ForkServer

from kvferry.cli.cluster.processes import ChildProcess, ProcessGroup, ProcessStarter, spawn_process
from kvferry.types import Address

START_S = 90.0
REQUEST_S = 60.0
SETTLE_S = 60.0
ALL_LINES = 10_000
LOOK_AGAIN_S, LATER_S, SELDOM_S = 0.05, 2.0, 0.2
"""Poll intervals. A long wait (for example for the end of a lease) polls less often after
`LATER_S`, because every poll costs the engines time.
"""
OURS = ForkServer(
    Path(sys.executable),
    (
        "kvferry.cli.serve",
        "kvferry.cli.proxy",
        "kvferry.transports.registry",
        "kvferry.engine.api.serve",
        "kvferry.engine.core",
        "kvferry.connectors.nixl",
        "kvferry.router.server",
    ),
)
GIVEN = frozenset(os.environ)
"""Environment variables that were set before any test ran."""
QUIET = (
    "kvferry:num_used_blocks",
    "kvferry:num_delayed_frees",
    "kvferry:num_requests_waiting_for_remote_kvs",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
)


@dataclass(frozen=True)
class Prompt:
    """One completion request."""

    token_ids: tuple[int, ...]
    max_tokens: int = 16
    temperature: float = 0.0
    seed: int | None = None
    n: int = 1

    def body(self) -> dict[str, Any]:
        return {
            "model": "tiny",
            "prompt": list(self.token_ids),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "n": self.n,
            "ignore_eos": True,
            "return_token_ids": True,
        }


@dataclass(frozen=True)
class Answer:
    status: int
    token_ids: tuple[tuple[int, ...], ...] = ()
    body: Any = field(default=None, compare=False)

    @property
    def is_ok(self) -> bool:
        return self.status == 200

    @property
    def message(self) -> str:
        return str(self.body["error"]["message"])


class Host:
    """A host that runs processes. The default is this machine's loopback; `hosts.py` has others."""

    def __init__(
        self,
        inside: Sequence[str] = (),
        address: str = "127.0.0.1",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """`inside`: the command prefix that runs a command there. `address`: where it serves HTTP
        to us.
        """
        self.inside = tuple(inside)
        self.address = address
        self.variables = dict(variables or {"KVFERRY_SIDE_CHANNEL_HOST": "127.0.0.1"})


HERE = Host()


class Engine:
    """One running `kvferry serve` or `kvferry proxy`, with its child processes."""

    def __init__(self, process: ChildProcess, address: Address) -> None:
        self.process = process
        self.address = address

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def kill(self, *, is_stopped: bool = False) -> None:
        """Kill the engine as the kernel's out-of-memory killer would, and wait for the end of all
        its processes. Stopped child processes cannot notice that their parent died, so with
        `is_stopped` each one is killed.
        """
        family = self.family()
        for member in family if is_stopped else family[:1]:
            member.kill()
        _, alive = psutil.wait_procs(family, timeout=SETTLE_S)
        assert not any(map(is_alive, alive)), f"left behind: {alive}"

    def family(self) -> list[psutil.Process]:
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def pause(self) -> None:
        for member in self.family():
            member.suspend()

    def resume(self) -> None:
        for member in self.family():
            member.resume()


def is_alive(process: psutil.Process) -> bool:
    """A zombie counts as dead: it only waits for its parent to reap it."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class ProcessRegistry:
    """Owns child processes; none of them outlives the `with` block."""

    def __init__(self, directory: Path, grace_s: float, *forkservers: ForkServer) -> None:
        """`grace_s`: how long each process may take to end. `forkservers`: forkservers for
        processes that run with another Python interpreter.
        """
        self._forkservers = (OURS, *forkservers)
        self._group = ProcessGroup(directory, grace_s)
        self._grace_s = grace_s
        self._children: list[ChildProcess] = []

    def __enter__(self) -> Self:
        self._group.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for child in self._children:
            child.terminate()
        for child in self._children:
            if error is not None:
                print(f"--- last lines of {child.name}", *child.tail(60), sep="\n")
            child.close(self._grace_s)
        self._group.close()

    def add(self, name: str, command: list[str], environment: Mapping[str, str]) -> ChildProcess:
        # Transports that tests open in this process set variables of these libraries; a child
        # process must get only the operator's variables.
        ours = {
            name: value
            for name, value in os.environ.items()
            if name in GIVEN or not name.startswith(("UCX_", "NIXL_"))
        }
        child = ChildProcess(name, command, {**ours, **environment}, self.way_to_start(command))
        self._children.append(child)
        child.start(self._group.id)
        return child

    def way_to_start(self, command: Sequence[str]) -> ProcessStarter:
        return next(
            (forkserver.start for forkserver in self._forkservers if forkserver.can_start(command)),
            spawn_process,
        )

    def dismiss(self, child: ChildProcess) -> None:
        """End a process early, or forget one that has died."""
        self._children.remove(child)
        child.close(self._grace_s)


class Cluster(ProcessRegistry):
    """Starts embedded engines and routers."""

    def __init__(self, directory: Path, model: Path) -> None:
        super().__init__(directory / "group", grace_s=5.0)
        self._model = model
        self._secret = secrets.token_hex(32)

    @property
    def secret(self) -> bytes:
        return self._secret.encode()

    def serve(
        self,
        name: str,
        *flags: str,
        extra: dict[str, Any] | None = None,
        policy: str = "fail",
        environment: dict[str, str] | None = None,
        is_plain: bool = False,
        port: int = 0,
        engine_id: str = "",
        at: Host = HERE,
        connector: str = "NixlConnector",
        role: str = "kv_both",
        model: Path | None = None,
    ) -> "Starting":
        """Start an engine; call `ready` on the result to wait for it. `is_plain`: an engine without
        a connector. `model`: another one than the cluster's.
        """
        transfer = {
            "kv_connector": connector,
            "kv_role": role,
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": extra or {},
        }
        if engine_id:
            transfer["engine_id"] = engine_id
        command = [
            sys.executable,
            "-m",
            "kvferry",
            "serve",
            str(model or self._model),
            "--host",
            at.address,
            "--port",
            str(port),
        ]
        # Tests of draining set their own timeout; other tests need nothing from an engine that they
        # stop.
        command += [
            "--served-model-name",
            "tiny",
            "--kv-cache-memory-bytes",
            str(64 << 20),
            "--drain-timeout",
            "0",
            *flags,
        ]
        if not is_plain:
            command += ["--kv-transfer-config", json.dumps(transfer)]
        return self._start(name, command, environment or {}, at)

    def proxy(
        self,
        prefill: Sequence[Engine],
        decode: Sequence[Engine],
        *flags: str,
        port: int = 0,
        at: Host = HERE,
    ) -> "Starting":
        command = [
            sys.executable,
            "-m",
            "kvferry",
            "proxy",
            "--host",
            at.address,
            "--port",
            str(port),
            *flags,
        ]
        for role, engines in (("prefiller", prefill), ("decoder", decode)):
            if not engines:  # engines join later; `flags` name a config file
                continue
            command += [f"--{role}-hosts", *(engine.address.host for engine in engines)]
            command += [f"--{role}-ports", *(str(engine.address.port) for engine in engines)]
        return self._start("router", command, {}, at)

    def _start(
        self, name: str, command: list[str], environment: dict[str, str], at: Host
    ) -> "Starting":
        own = {
            "KVFERRY_SECRET": self._secret,
            "KVFERRY_SIDE_CHANNEL_PORT": "0",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        return Starting(
            self.add(name, [*at.inside, *command], {**own, **at.variables, **environment})
        )


class Starting:
    """A process that is starting; `ready` waits for it."""

    def __init__(self, child: ChildProcess) -> None:
        self.child = child

    def ready(self) -> Engine:
        deadline = time.monotonic() + START_S
        while (address := self.child.poll_address()) is None:
            assert time.monotonic() < deadline, "\n".join(
                [f"{self.child.name} did not start", *self.child.tail(40)]
            )
            time.sleep(0.05)
        return Engine(self.child, address)


async def ask(
    session: aiohttp.ClientSession, engine: Engine, prompt: Prompt, **changes: Any
) -> Answer:
    return await post(session, engine, {**prompt.body(), **changes})


async def post(
    session: aiohttp.ClientSession, engine: Engine, body: Any, path: str = "/v1/completions"
) -> Answer:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with session.post(
        f"{engine.url}{path}", data=data, headers={"Content-Type": "application/json"}
    ) as response:
        raw = await response.read()
        try:
            found = json.loads(raw)
        except ValueError:
            raise AssertionError(
                f"status {response.status} with a body that is no JSON: {raw[:200]!r}"
            ) from None
        if response.status != 200:
            assert "message" in found["error"], found
            return Answer(response.status, body=found)
        return Answer(
            200, tuple(tuple(choice.get("token_ids") or ()) for choice in found["choices"]), found
        )


def new_session(timeout_s: float = REQUEST_S) -> aiohttp.ClientSession:
    # A connection for each request: a server may close an idle one just when a request is written.
    connector = aiohttp.TCPConnector(force_close=True)
    return aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=timeout_s)
    )


async def ask_all(
    engine: Engine,
    prompts: Sequence[Prompt],
    concurrency: int = 16,
    timeout_s: float = REQUEST_S,
    **changes: Any,
) -> list[Answer]:
    gate = asyncio.Semaphore(concurrency)

    async def one(session: aiohttp.ClientSession, prompt: Prompt) -> Answer:
        async with gate:
            return await ask(session, engine, prompt, **changes)

    async with new_session(timeout_s) as session:
        return list(await asyncio.gather(*(one(session, prompt) for prompt in prompts)))


PREFILL_PARAMS = {"do_remote_decode": True, "do_remote_prefill": False}


async def prefill(session: aiohttp.ClientSession, engine: Engine, prompt: Prompt) -> dict[str, Any]:
    """Send the prefill leg as a router does, and return the parameters for D."""
    answer = await ask(session, engine, prompt, max_tokens=1, kv_transfer_params=PREFILL_PARAMS)
    assert answer.is_ok, answer.body
    params = answer.body["kv_transfer_params"]
    assert isinstance(params, dict)
    return params


async def metrics(session: aiohttp.ClientSession, engine: Engine) -> dict[str, float]:
    """Return the samples by name, summed over labels, and also by `name/transport` and
    `name/tier`.
    """
    async with session.get(f"{engine.url}/metrics") as response:
        text = await response.text()
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("#") or not line.strip():
            continue
        name, _, value = line.rpartition(" ")
        plain, _, labels = name.partition("{")
        found[plain] = found.get(plain, 0.0) + float(value)
        for label in ("transport", "tier"):
            if f'{label}="' in labels:
                labelled = labels.split(f'{label}="')[1].split('"')[0]
                found[f"{plain}/{labelled}"] = float(value)
    return found


async def until(
    what: str, condition: Callable[[], Awaitable[bool]], timeout_s: float = SETTLE_S
) -> None:
    since = time.monotonic()
    while not await condition():
        waited_s = time.monotonic() - since
        assert waited_s < timeout_s, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(LOOK_AGAIN_S if waited_s < LATER_S else SELDOM_S)


async def assert_said(engine: Engine, what: str) -> None:
    """Check that the engine logs `what`. The log has its own pipe, so a line may arrive after the
    response that followed it; and an engine holds repeats back, so an earlier line counts.
    """

    async def is_said() -> bool:
        return any(what in line for line in engine.process.tail(ALL_LINES))

    try:
        await until(f"{engine.process.name} says {what!r}", is_said)
    except AssertionError as error:
        raise AssertionError("\n".join([*engine.process.tail(50), str(error)])) from None


async def assert_quiescent(session: aiohttp.ClientSession, *engines: Engine) -> None:
    """Wait until no block is in use and no request is running, waiting, held or being
    transferred.
    """

    left: list[dict[str, float]] = []

    async def is_quiet() -> bool:
        seen = [await metrics(session, engine) for engine in engines]
        left[:] = [{name: found[name] for name in QUIET if found[name]} for found in seen]
        return not any(left)

    try:
        await until("all blocks free and nothing waiting", is_quiet)
    except AssertionError as error:
        said = [
            line
            for engine, rest in zip(engines, left, strict=True)
            if rest
            for line in engine.process.tail(30)
        ]
        names = [engine.process.name for engine in engines]
        raise AssertionError(
            "\n".join([*said, f"{error}; still there: {list(zip(names, left, strict=True))}"])
        ) from None


async def assert_leaving_costs_nothing(
    router: Engine, *engines: Engine, num_tokens: int, count: int = 24, **options: Any
) -> None:
    """Disconnect clients at random moments; check that these engines hold nothing for them
    afterwards and serve the next client.
    """
    rng = random.Random(7)
    prompts = [
        Prompt(tuple(rng.randrange(10, 500) for _ in range(num_tokens)), max_tokens=50)
        for _ in range(count)
    ]

    async def leave(session: aiohttp.ClientSession, prompt: Prompt) -> None:
        asking = asyncio.create_task(ask(session, router, prompt, **options))
        await asyncio.sleep(rng.random() * 0.6)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    async with new_session() as session:
        await asyncio.gather(*(leave(session, prompt) for prompt in prompts))
        await assert_quiescent(session, *engines)
        assert (await ask(session, router, prompts[0])).is_ok
