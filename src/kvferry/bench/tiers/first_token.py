"""The time to the first token of a prompt whose KV comes from a tier, beside computing the prompt.

One embedded engine for each tier, and one without tiers, live side by side as processes, and take
turns. Each round sends a new prompt twice to each engine with a tier: the first time nothing is
stored, which shows what the tiers cost a prompt that they do not have; the second time all of it
comes from the tier. Prefix caching is off, so that the second answer comes from nowhere else.
"""

import json
import os
import random
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from kvferry.bench.figures import ratio, rounded
from kvferry.bench.vllm.client import VllmConnection
from kvferry.cli.cluster.http_client import is_healthy
from kvferry.cli.cluster.local_cluster import child_environment
from kvferry.cli.cluster.processes import ChildProcess, ProcessGroup
from kvferry.cli.runtime import StopRequest
from kvferry.errors import ConfigError, KVFerryError, TransportError
from kvferry.types import Address

COMPUTE = "compute"
MODEL_NAME = "model"
BLOCK_SIZE = 16
START_S = 240.0
STORE_S = 60.0
CLOSE_TIMEOUT_S = 15.0
SEED = 3
VOCABULARY = range(10, 500)
SHORT_PROMPT = (10,)
"""Too short to be stored."""
ROOM_TOKENS = 8
"""Tokens of the model's maximum that are left for the answer."""


@dataclass(frozen=True, slots=True)
class FirstTokenScope:
    rounds: int = 7
    pool_bytes: int = 1 << 30
    disk_bytes: int = 4 << 30


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """One engine: its name in the results, and its tier."""

    name: str
    tier: Mapping[str, Any] | None = None
    """One entry of the setting `tiers`; None: an engine without a connector."""

    @property
    def tier_name(self) -> str:
        return next(iter(self.tier)) if self.tier else ""


@dataclass(frozen=True, slots=True)
class FirstTokenTimes:
    """The times of one engine, in seconds."""

    name: str
    tokens: int
    missed: Sequence[float]
    """When nothing was stored: the engine computes the prompt."""
    hit: Sequence[float] = ()
    """When all of it came from the tier; empty without a tier."""

    def as_json(self, compute: "FirstTokenTimes") -> dict[str, Any]:
        baseline = median(compute.missed)
        row: dict[str, Any] = {
            "tier": self.name,
            "tokens": self.tokens,
            "rounds": len(self.missed),
            "computed_ms": rounded(1000 * median(self.missed)),
            "computed_worst_ms": rounded(1000 * max(self.missed)),
            "computed_of_no_tiers": ratio(median(self.missed), baseline),
            "loaded_ms": None,
            "loaded_worst_ms": None,
            "loaded_of_computing": None,
        }
        if self.hit:
            row |= {
                "loaded_ms": rounded(1000 * median(self.hit)),
                "loaded_worst_ms": rounded(1000 * max(self.hit)),
                "loaded_of_computing": ratio(median(self.hit), baseline),
            }
        return row


def prompt_tokens(model: Path, wanted: int) -> int:
    """The length of the prompts: as wanted, or what the model can take, in whole blocks and one
    token that is always computed.
    """
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        most = int(config["max_position_embeddings"]) - ROOM_TOKENS
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(
            f"--model {model} has no config.json with max_position_embeddings; name the folder of "
            "a checkpoint"
        ) from None
    blocks = (min(wanted, most) - 1) // BLOCK_SIZE
    if blocks < 1:
        raise ConfigError(f"--model {model} takes too few tokens to measure; name another model")
    return blocks * BLOCK_SIZE + 1


def tier_setups(
    scope: FirstTokenScope, disk: Path, object_tier: Mapping[str, Any] | None
) -> list[EngineSetup]:
    """The engines to compare; `object_tier` has the settings of the tier `object`, if any."""
    setups = [
        EngineSetup(COMPUTE),
        EngineSetup("cpu", {"cpu": scope.pool_bytes}),
        EngineSetup("disk", {"disk": {"path": str(disk), "size": scope.disk_bytes}}),
    ]
    if object_tier is not None:
        setups.append(EngineSetup("object", {"object": {**object_tier, "store_after": 1}}))
    return setups


class _Engine:
    """A running engine, and requests to it."""

    def __init__(self, setup: EngineSetup, address: Address) -> None:
        self.setup = setup
        self._address = address

    def ask(self, prompt: Sequence[int]) -> tuple[float, list[int]]:
        """Return the seconds to the first token, and the tokens."""
        body = {"model": MODEL_NAME, "prompt": list(prompt), "max_tokens": 2, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
        first: float | None = None
        tokens: list[int] = []
        with VllmConnection(self._address) as connection:
            began = time.perf_counter()
            for line in connection.post(body):
                found = _token_ids(line)
                if found and first is None:
                    first = time.perf_counter() - began
                tokens += found
        if first is None:
            raise KVFerryError(f"the engine {self.setup.name} gave no token")
        return first, tokens

    def count(self, metric: str) -> int:
        """The value of a counter of the engine's tier."""
        start = f"kvferry:tier_{metric}_total{{"
        with VllmConnection(self._address) as connection:
            lines = connection.get("/metrics").decode().splitlines()
        found = [
            line
            for line in lines
            if line.startswith(start) and f'tier="{self.setup.tier_name}"' in line
        ]
        return int(float(found[0].rpartition(" ")[2])) if found else 0

    def wait_stored(self, count: int, stop: StopRequest) -> None:
        deadline = time.monotonic() + STORE_S
        while self.count("stores") < count:
            stop.check()
            if time.monotonic() > deadline:
                raise KVFerryError(
                    f"the tier {self.setup.name} stored {self.count('stores')} of {count} chunks "
                    f"within {STORE_S:g} s"
                )
            self.step()

    def step(self) -> None:
        """Make the engine take a step: it reports what its threads have done at its next one."""
        time.sleep(0.05)
        self.ask(SHORT_PROMPT)


def measure_first_token(
    model: Path, setups: Sequence[EngineSetup], tokens: int, rounds: int, stop: StopRequest
) -> list[FirstTokenTimes]:
    """Measure all engines in turn. The first of `setups` has no tier; answers must be equal."""
    rng = random.Random(SEED)
    missed: dict[str, list[float]] = {setup.name: [] for setup in setups}
    hit: dict[str, list[float]] = {setup.name: [] for setup in setups}
    with _engines(model, setups, stop) as engines:
        for turn in range(-1, rounds):
            prompt = rng.choices(VOCABULARY, k=tokens)
            answers = set()
            shift = turn % len(engines)
            for engine in [*engines[shift:], *engines[:shift]]:
                stop.check()
                took, answer = engine.ask(prompt)
                answers.add(tuple(answer))
                times = [(missed, took)]
                if engine.setup.tier is not None:
                    times.append((hit, _ask_again(engine, prompt, answers, turn + 2, stop)))
                if turn >= 0:
                    for table, seconds in times:
                        table[engine.setup.name].append(seconds)
            if len(answers) > 1:
                raise KVFerryError("engines gave different tokens; please report this as a bug")
    return [
        FirstTokenTimes(setup.name, tokens, missed[setup.name], hit[setup.name]) for setup in setups
    ]


def _ask_again(
    engine: _Engine,
    prompt: Sequence[int],
    answers: set[tuple[int, ...]],
    num_prompts: int,
    stop: StopRequest,
) -> float:
    """Ask for a stored prompt, and check that all its full blocks came from the tier."""
    num_chunks = (len(prompt) - 1) // BLOCK_SIZE
    engine.wait_stored(num_prompts * num_chunks, stop)
    before = engine.count("loads")
    took, answer = engine.ask(prompt)
    answers.add(tuple(answer))
    deadline = time.monotonic() + STORE_S
    while engine.count("loads") - before < num_chunks:  # metrics follow the answer
        if time.monotonic() > deadline:
            raise KVFerryError(
                f"only {engine.count('loads') - before} of {num_chunks} chunks came from the tier "
                f"{engine.setup.name}"
            )
        engine.step()
    return took


# -- processes --


@contextmanager
def _engines(
    model: Path, setups: Sequence[EngineSetup], stop: StopRequest
) -> Iterator[list[_Engine]]:
    """Start one engine for each setup. However the benchmark ends, no process is left behind."""
    directory = Path(tempfile.gettempdir()) / f"kvferry-tiers-{secrets.token_hex(8)}"
    environment = child_environment({**_environ()}, directory / "unused")
    processes: list[ChildProcess] = []
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with (
        tempfile.TemporaryDirectory(prefix="kvferry-bench-", dir=memory) as pool,
        ProcessGroup(directory) as group,
    ):
        try:
            for setup in setups:
                command = _command(model, setup, Path(pool))
                processes.append(ChildProcess(setup.name, command, environment))
                processes[-1].start(group.id)
            addresses = [_wait_healthy(process, stop) for process in processes]
            yield [_Engine(*each) for each in zip(setups, addresses, strict=True)]
        finally:
            for process in reversed(processes):
                process.terminate()
            for process in reversed(processes):
                process.close(CLOSE_TIMEOUT_S)


def _environ() -> dict[str, str]:
    given = {name: value for name, value in os.environ.items() if name != "KVFERRY_SECRET_FILE"}
    return {**given, "KVFERRY_SECRET": secrets.token_hex(32)}


def _command(model: Path, setup: EngineSetup, pool: Path) -> list[str]:
    command = [sys.executable, "-m", "kvferry", "serve", str(model), "--host", "127.0.0.1"]
    command += ["--port", "0", "--served-model-name", MODEL_NAME, "--drain-timeout", "0"]
    command += ["--no-enable-prefix-caching"]
    if setup.tier is None:
        return command
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "tiers": [dict(setup.tier)],
            "pool_path": str(pool / setup.name),
            # The benchmark compares loading with computing, so it must load in any case.
            "break_even": False,
        },
    }
    return [*command, "--kv-transfer-config", json.dumps(transfer)]


def _wait_healthy(process: ChildProcess, stop: StopRequest) -> Address:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        stop.check()
        try:
            address = process.poll_address()
        except KVFerryError as error:
            lines = [f"{error}; last log lines:", *(f"  {line}" for line in process.tail(20))]
            raise KVFerryError("\n".join(lines)) from None
        if address is not None and is_healthy(address):
            return address
        time.sleep(0.1)
    raise KVFerryError(f"the engine {process.name} did not start within {START_S:g} s")


def _token_ids(line: bytes) -> list[int]:
    if not line.startswith(b"data: {"):
        return []
    event = json.loads(line.removeprefix(b"data: "))
    if "error" in event:
        raise TransportError(f"a request was aborted: {event['error']}")
    return [token for choice in event.get("choices", []) for token in choice.get("token_ids") or []]
