"""`python -m benchmarks first-token` measures what it gains to send the client P's token.

One prefill engine and one decode engine, embedded or real vLLM, stand behind two routers that
differ only in `--first-token-from-prefill`. The routers get the same prompts in turn, in a random
order, and must give the same tokens. Every request has a cache salt of its own, so no engine has
its prompt cached.
"""

import argparse
import json
import os
import platform
import random
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.bench.figures import quantile, ratio, rounded
from kvferry.bench.vllm.client import PromptMaker, VllmConnection
from kvferry.bench.vllm.servers import (
    COUNT,
    MODEL_NAME,
    OURS,
    TRANSFER_CONFIGS,
    VllmServer,
    add_vllm_arguments,
    model_directory,
    print_progress,
    vllm_python,
)
from kvferry.cli.arguments import Parser
from kvferry.cli.cluster.http_client import is_healthy
from kvferry.cli.cluster.processes import ChildProcess, ProcessGroup
from kvferry.cli.cluster.vllm_servers import LOOPBACK, free_ports
from kvferry.cli.runtime import stop_signals
from kvferry.errors import KVFerryError, TransportError
from kvferry.types import Address

DESCRIPTION = (
    "Measure the time to the first token through the router, from D (the usual path) and from P "
    "(--first-token-from-prefill),\nwith the same engines and the same prompts in turn."
)
EXAMPLES = """\
  python -m benchmarks first-token
  python -m benchmarks first-token --engine vllm --samples 20 --json"""
SEED = 1
ANSWER_TOKENS = 8
WARM_UPS = 3
LENGTHS = (128, 512, 1536)
START_S = 240.0
POLL_INTERVAL_S = 0.1
CLOSE_TIMEOUT_S = 15.0
TAKES_FROM_P = {False: "D", True: "P"}
"""Which engine's token is the first that the client gets, by the router's setting."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The times of one answer, in seconds since the request was sent."""

    prompt_tokens: int
    is_from_p: bool
    first_s: float
    second_s: float
    last_s: float


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--engine",
        choices=("embedded", "vllm"),
        default="embedded",
        help="engines to measure with (default: %(default)s)",
    )
    parser.add_argument(
        "--samples",
        type=COUNT,
        default=20,
        metavar="N",
        help="answers per length and setting (default: %(default)s)",
    )
    add_vllm_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    is_vllm = arguments.engine == "vllm"
    python = vllm_python(arguments.vllm_python) if is_vllm else Path(sys.executable)
    with (
        stop_signals(),
        model_directory(arguments.model) as model,
        _start(model, python if is_vllm else None) as routers,
    ):
        samples = _measure(routers, arguments.samples)
    rows = make_rows(samples)
    machine = {"cores": os.cpu_count(), "machine": platform.machine()}
    facts = {"engine": arguments.engine, "samples": arguments.samples, **machine}
    print(json.dumps({**facts, "rows": rows}) if arguments.json else _table(rows))
    return 0


# -- processes --


@contextmanager
def _start(model: Path, python: Path | None) -> Iterator[dict[bool, Address]]:
    """Start P, D and both routers; yield the routers' addresses by their setting. `python`: the
    interpreter of vLLM; None: embedded engines.
    """
    directory = Path(tempfile.gettempdir()) / f"kvferry-first-token-{secrets.token_hex(8)}"
    shared = {**os.environ, "KVFERRY_SECRET": secrets.token_hex(32), "OMP_NUM_THREADS": "1"}
    processes: list[ChildProcess] = []
    with ProcessGroup(directory) as group:

        def start(name: str, command: list[str], more: Mapping[str, str]) -> ChildProcess:
            processes.append(ChildProcess(name, command, {**shared, **more}))
            processes[-1].start(group.id)
            return processes[-1]

        try:
            print_progress("starting engines and routers")
            if python is None:
                engines = [
                    start(name, _embedded(model), {"KVFERRY_SIDE_CHANNEL_PORT": "0"})
                    for name in ("prefill", "decode")
                ]
                addresses = [_wait_healthy(engine) for engine in engines]
            else:
                servers = _vllm_servers(model)
                engines = [
                    start(server.name, server.command(python), server.variables())
                    for server in servers
                ]
                addresses = [
                    _wait_healthy(engine, server.address)
                    for engine, server in zip(engines, servers, strict=True)
                ]
            routers = {
                is_from_p: start(f"router {is_from_p}", _router(addresses, is_from_p), {})
                for is_from_p in (False, True)
            }
            yield {is_from_p: _wait_healthy(router) for is_from_p, router in routers.items()}
        finally:
            for process in reversed(processes):
                process.terminate()
            for process in reversed(processes):
                process.close(CLOSE_TIMEOUT_S)


def _embedded(model: Path) -> list[str]:
    transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    command = [sys.executable, "-m", "kvferry", "serve", str(model), "--host", LOOPBACK]
    command += ["--port", "0", "--served-model-name", MODEL_NAME, "--drain-timeout", "0"]
    return [*command, "--kv-transfer-config", json.dumps(transfer)]


def _vllm_servers(model: Path) -> list[VllmServer]:
    ports = free_ports(4)
    return [
        VllmServer(
            name=role,
            model=model,
            port=ports[core],
            side_channel_port=ports[2 + core],
            core=core,
            transfer=TRANSFER_CONFIGS[OURS],
        )
        for core, role in enumerate(("prefill", "decode"))
    ]


def _router(engines: Sequence[Address], is_from_p: bool) -> list[str]:
    command = [sys.executable, "-m", "kvferry", "proxy", "--host", LOOPBACK, "--port", "0"]
    for role, engine in zip(("prefiller", "decoder"), engines, strict=True):
        command += [f"--{role}-hosts", engine.host, f"--{role}-ports", str(engine.port)]
    return [*command, *(["--first-token-from-prefill"] if is_from_p else [])]


def _wait_healthy(process: ChildProcess, address: Address | None = None) -> Address:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            process.check_alive()
            found = address or process.poll_address()
        except KVFerryError as error:
            log = (f"  {line}" for line in process.tail(40))
            raise KVFerryError("\n".join([f"{error}; last log lines:", *log])) from None
        if found is not None and is_healthy(found):
            return found
        time.sleep(POLL_INTERVAL_S)
    raise KVFerryError(f"{process.name} did not become healthy within {START_S:g} s")


# -- measurement --


def _measure(routers: Mapping[bool, Address], num_samples: int) -> list[Sample]:
    rng, prompts = random.Random(SEED), PromptMaker(SEED)
    for _ in range(WARM_UPS):
        _ask_both(routers, prompts.make(LENGTHS[0]), rng)
    samples: list[Sample] = []
    for number in range(num_samples):
        for length in LENGTHS:
            samples += _ask_both(routers, prompts.make(length), rng)
        print_progress(f"round {number + 1} of {num_samples}")
    return samples


def _ask_both(
    routers: Mapping[bool, Address], prompt: list[int], rng: random.Random
) -> list[Sample]:
    """Send the prompt through both routers; the tokens must be equal."""
    samples, answers = [], []
    for is_from_p in rng.sample(sorted(routers), k=len(routers)):
        times, tokens = _ask(routers[is_from_p], prompt)
        samples.append(Sample(len(prompt), is_from_p, times[0], times[1], times[-1]))
        answers.append(tokens)
    if answers[0] != answers[1]:
        raise KVFerryError(f"the routers gave different tokens: {answers[0]} and {answers[1]}")
    return samples


def _ask(router: Address, prompt: list[int]) -> tuple[list[float], list[int]]:
    """Return when each event with a token came, and the tokens."""
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "stream": True}
    body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    body["cache_salt"] = secrets.token_hex(8)
    times: list[float] = []
    tokens: list[int] = []
    with VllmConnection(router) as connection:
        since = time.perf_counter()
        for line in connection.post(body):
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                raise TransportError(f"a stream was aborted: {event['error']}")
            found = [token for choice in event["choices"] for token in choice["token_ids"]]
            times += [time.perf_counter() - since] * len(found)
            tokens += found
    if len(tokens) != ANSWER_TOKENS:
        raise KVFerryError(f"an answer has {len(tokens)} tokens instead of {ANSWER_TOKENS}")
    return times, tokens


# -- report --


def make_rows(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Return one row per prompt length and setting."""
    rows = []
    for length in dict.fromkeys(sample.prompt_tokens for sample in samples):
        usual: float | None = None
        for is_from_p in (False, True):
            mine = [
                sample
                for sample in samples
                if (sample.prompt_tokens, sample.is_from_p) == (length, is_from_p)
            ]
            first = quantile([sample.first_s for sample in mine], 0.5)
            usual = first if usual is None else usual
            rows.append(
                {
                    "prompt_tokens": length,
                    "first_token_from": TAKES_FROM_P[is_from_p],
                    "ttft_ms_p50": _ms([sample.first_s for sample in mine], 0.5),
                    "ttft_ms_worst": _ms([sample.first_s for sample in mine], 1.0),
                    "of_usual": ratio(first, usual),
                    "second_token_ms_p50": _ms([sample.second_s for sample in mine], 0.5),
                    "last_token_ms_p50": _ms([sample.last_s for sample in mine], 0.5),
                }
            )
    return rows


def _ms(values: Sequence[float], share: float) -> float | None:
    found = quantile(values, share)
    return None if found is None else rounded(found * 1000)


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = {
        "prompt": "prompt_tokens",
        "from": "first_token_from",
        "first p50": "ttft_ms_p50",
        "worst": "ttft_ms_worst",
        "÷ usual": "of_usual",
        "second p50": "second_token_ms_p50",
        "last p50": "last_token_ms_p50",
    }
    lines = ["".join(f"{title:>12}" for title in columns)]
    lines += ["".join(f"{row[key]!s:>12}" for key in columns.values()) for row in rows]
    note = f"milliseconds until the client has the token; an answer has {ANSWER_TOKENS} tokens"
    return "\n".join([*lines, "", note])
