"""Prefill engines, a decode engine and a router of the multi-turn benchmark as processes, and what is asked of them. Blocking; every wait
has a deadline. Whatever ends the one who started them, no process is left behind (see `kvferry.cli.processes`).
"""

import json
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from kvferry.bench.vllm_client import VllmConnection
from kvferry.cli.http_client import is_healthy
from kvferry.cli.launch import child_environment
from kvferry.cli.processes import ChildProcess, ProcessGroup
from kvferry.errors import KVFerryError, TransportError
from kvferry.types import Address

__all__ = ["MODEL_NAME", "Arrangement", "BenchFleet", "PrefillCounts", "TurnAnswer", "start_fleets"]

LOOPBACK = "127.0.0.1"
MODEL_NAME = "tiny"
NOWHERE = Address(LOOPBACK, 0)
START_S = 240.0
POLL_INTERVAL_S = 0.1
CLOSE_TIMEOUT_S = 15.0
_BY_SOURCE = "vllm:prompt_tokens_by_source_total"
_MOVED = "kvferry:transfer_bytes_total"


@dataclass(frozen=True, slots=True)
class Arrangement:
    """What a fleet has in front of its one decode engine."""

    prefill_engines: int
    prefix_caching: bool
    """Of the prefill engines."""

    def __str__(self) -> str:
        engines = "one prefill engine" if self.prefill_engines == 1 else f"{self.prefill_engines} prefill engines in turn"
        return f"{engines}, {'with' if self.prefix_caching else 'without'} prefix cache"


@dataclass(frozen=True, slots=True)
class PrefillCounts:
    """By all prefill engines so far: prompt tokens by where their KV came from, and bytes that they fetched."""

    computed: int
    cached: int
    pulled: int
    pulled_bytes: int

    def since(self, before: "PrefillCounts") -> "PrefillCounts":
        return PrefillCounts(
            self.computed - before.computed,
            self.cached - before.cached,
            self.pulled - before.pulled,
            self.pulled_bytes - before.pulled_bytes,
        )


@dataclass(frozen=True, slots=True)
class TurnAnswer:
    """One turn's answer."""

    ttft_s: float
    token_ids: list[int]


@dataclass(slots=True)
class BenchFleet:
    arrangement: Arrangement
    reuse: bool
    prefill: list[Address] = field(default_factory=list)
    decode: list[Address] = field(default_factory=list)
    router: Address = NOWHERE

    def ask(self, conversation: str, prompt: Sequence[int], answer_tokens: int) -> TurnAnswer:
        """One turn, streamed. The clock stops at the first event that has a token."""
        body = {"model": MODEL_NAME, "prompt": list(prompt), "max_tokens": answer_tokens, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "return_token_ids": True, "conversation_id": conversation}
        tokens: list[int] = []
        with VllmConnection(self.router) as connection:
            since = time.perf_counter()
            first: float | None = None
            for line in connection.post(body):
                found = _token_ids(line)
                if found and first is None:
                    first = time.perf_counter() - since
                tokens += found
        if first is None or len(tokens) != answer_tokens:
            raise KVFerryError(f"a turn of {len(prompt)} tokens was answered with {len(tokens)} tokens instead of {answer_tokens}")
        return TurnAnswer(first, tokens)

    def counts(self) -> PrefillCounts:
        tokens = {"local_compute": 0, "local_cache_hit": 0, "external_kv_transfer": 0}
        moved = 0
        for address in self.prefill:
            with VllmConnection(address) as connection:
                text = connection.get("/metrics").decode()
            for sample in (sample for family in text_string_to_metric_families(text) for sample in family.samples):
                if sample.name == _BY_SOURCE:
                    tokens[sample.labels["source"]] += int(sample.value)
                elif sample.name == _MOVED:
                    moved += int(sample.value)
        return PrefillCounts(tokens["local_compute"], tokens["local_cache_hit"], tokens["external_kv_transfer"], moved)


@contextmanager
def start_fleets(model: Path, arrangement: Arrangement, transport: str) -> Iterator[dict[bool, BenchFleet]]:
    """Two that differ in one thing, by it: whether what D has of an earlier turn is used again."""
    directory = Path(tempfile.gettempdir()) / f"kvferry-multiturn-{secrets.token_hex(8)}"
    given = {name: value for name, value in os.environ.items() if name != "KVFERRY_SECRET_FILE"}
    environment = child_environment({**given, "KVFERRY_SECRET": secrets.token_hex(32)}, directory / "unused")
    fleets = {reuse: BenchFleet(arrangement, reuse) for reuse in (False, True)}
    processes: list[ChildProcess] = []
    with ProcessGroup(directory) as group:

        def start(name: str, command: list[str]) -> ChildProcess:
            processes.append(ChildProcess(name, command, environment))
            processes[-1].start(group.id)
            return processes[-1]

        try:
            engines = {reuse: _start_engines(fleet, model, transport, start) for reuse, fleet in fleets.items()}
            for reuse, fleet in fleets.items():
                addresses = [_wait_healthy(process) for process in engines[reuse]]
                fleet.prefill, fleet.decode = addresses[:-1], addresses[-1:]
                fleet.router = _wait_healthy(start(f"router, reuse {reuse}", _router(fleet)))
            yield fleets
        finally:
            for process in reversed(processes):
                process.terminate()
            for process in reversed(processes):
                process.close(CLOSE_TIMEOUT_S)


def _start_engines(fleet: BenchFleet, model: Path, transport: str, start: Callable[[str, list[str]], ChildProcess]) -> list[ChildProcess]:
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"transports": [transport], "bidirectional_kv_xfer": fleet.reuse},
    }
    command = [sys.executable, "-m", "kvferry", "serve", str(model), "--host", LOOPBACK, "--port", "0", "--served-model-name", MODEL_NAME]
    command += ["--drain-timeout", "0", "--kv-transfer-config", json.dumps(transfer)]
    caching = [] if fleet.arrangement.prefix_caching else ["--no-enable-prefix-caching"]
    prefill = [start(f"prefill-{i}, reuse {fleet.reuse}", command + caching) for i in range(fleet.arrangement.prefill_engines)]
    return [*prefill, start(f"decode, reuse {fleet.reuse}", command)]


def _router(fleet: BenchFleet) -> list[str]:
    # Turns go from one P to the next, as they do in a large fleet: what the other has is not there.
    command = [sys.executable, "-m", "kvferry", "proxy", "--host", LOOPBACK, "--port", "0", "--prefill-policy", "round_robin"]
    for role, addresses in (("prefiller", fleet.prefill), ("decoder", fleet.decode)):
        command += [f"--{role}-hosts", *(address.host for address in addresses)]
        command += [f"--{role}-ports", *(str(address.port) for address in addresses)]
    return command


def _wait_healthy(process: ChildProcess) -> Address:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            address = process.poll_address()
        except KVFerryError as error:
            raise KVFerryError("\n".join([f"{error}; last log lines:", *(f"  {line}" for line in process.tail(40))])) from None
        if address is not None and is_healthy(address):
            return address
        time.sleep(POLL_INTERVAL_S)
    raise KVFerryError(f"{process.name} did not become healthy within {START_S:g} s")


def _token_ids(line: bytes) -> list[int]:
    """Of one event; none where it has no choice. TransportError for an error in the middle of the stream."""
    if not line.startswith(b"data: {"):
        return []
    event = json.loads(line.removeprefix(b"data: "))
    if "error" in event:
        raise TransportError(f"a turn broke off: {event['error']}")
    return [token for choice in event.get("choices", []) for token in choice.get("token_ids") or []]
