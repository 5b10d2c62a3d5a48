"""Compare the time to the first token by pull and by push, in real vLLM on one GPU.

    python benchmarks/measure_gpu_push.py --lengths 8000 32000 --samples 5

A P and a D with `NixlConnector` and a P and a D with `NixlPushConnector`, each pair behind a
kvferry router. Requests go to the pairs in turn. Beside the time to the first token through the
router, the script measures P's time for such a prompt alone, and D's time for a prompt that is
wholly in its own cache (the floor). All times are medians in milliseconds.
"""

import argparse
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kvferry.bench.figures import quantile
from kvferry.bench.vllm.client import PromptMaker, time_to_first_token_s
from kvferry.bench.vllm.gpu_handover import FLAGS, MARGIN_TOKENS, VARIABLES, gpu_model_directory
from kvferry.bench.vllm.servers import ROLES, ServerPair, VllmServer, launch_servers, wait_healthy
from kvferry.cli.cluster.http_client import is_healthy
from kvferry.cli.cluster.vllm_servers import LOOPBACK, free_ports
from kvferry.types import Address

CONNECTORS = {"pull": "NixlConnector", "push": "NixlPushConnector"}
START_S, STOP_S = 60.0, 10.0
WARM_UP_TOKENS = 128
SEED = 7


@dataclass(slots=True)
class Times:
    """Seconds of one mode and length."""

    routed: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    floor: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 8000, 32000])
    parser.add_argument("--samples", type=int, default=5, help="requests of each length and mode")
    parser.add_argument("--chunk-tokens", type=int, default=2048, help="tokens per step of P")
    options = parser.parse_args()
    times = {(length, mode): Times() for length in options.lengths for mode in CONNECTORS}
    with ExitStack() as stack:
        model = stack.enter_context(gpu_model_directory())
        fleets = start_fleets(stack, model, max(options.lengths), options.chunk_tokens)
        prompts = PromptMaker(SEED)
        for length in (WARM_UP_TOKENS, *options.lengths):
            for router, _ in fleets.values():
                time_to_first_token_s(router, prompts.make(length))
        for length in options.lengths:
            for mode in [*CONNECTORS] * options.samples:
                (router, pair), taken = fleets[mode], times[length, mode]
                taken.prefill.append(time_to_first_token_s(pair.prefill, prompts.make(length)))
                prompt = prompts.make(length)
                taken.routed.append(time_to_first_token_s(router, prompt))
                taken.floor.append(time_to_first_token_s(pair.decode, prompt))
    print_table(times)


def start_fleets(
    stack: ExitStack, model: Path, longest: int, chunk_tokens: int
) -> dict[str, tuple[Address, ServerPair]]:
    """Start both pairs at once, then a router for each; return routers and pairs by mode."""
    secret = {"KVFERRY_SECRET": secrets.token_hex(32)}
    flags = (
        *FLAGS,
        *("--max-model-len", str(longest + MARGIN_TOKENS)),
        *("--max-num-batched-tokens", str(chunk_tokens)),
    )
    pairs = {}
    for mode, connector in CONNECTORS.items():
        transfer = {
            "kv_connector": connector,
            "kv_connector_module_path": "kvferry.vllm",
            "kv_role": "kv_both",
        }
        servers = [
            VllmServer(
                name=f"{mode}, {role}",
                model=model,
                port=port,
                side_channel_port=side_channel_port,
                transfer=transfer,
                flags=flags,
                environment={**VARIABLES, **secret},
            )
            for role in ROLES
            for port, side_channel_port in [free_ports(2)]
        ]
        running = stack.enter_context(launch_servers(servers, Path(sys.executable)))
        pairs[mode] = ServerPair(running)
    for pair in pairs.values():
        wait_healthy(pair.servers)
    return {
        mode: (stack.enter_context(running_router(pair, secret)), pair)
        for mode, pair in pairs.items()
    }


@contextmanager
def running_router(pair: ServerPair, secret: dict[str, str]) -> Iterator[Address]:
    (port,) = free_ports(1)
    address = Address(LOOPBACK, port)
    command = [sys.executable, "-m", "kvferry", "proxy", "--host", LOOPBACK, "--port", str(port)]
    for role, engine in (("prefiller", pair.prefill), ("decoder", pair.decode)):
        command += [f"--{role}-hosts", engine.host, f"--{role}-ports", str(engine.port)]
    process = subprocess.Popen(command, env=os.environ | secret, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_S
        while not is_healthy(address):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the router did not start")
            time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()


def print_table(times: dict[tuple[int, str], Times]) -> None:
    print("prompt  mode  first token  P alone  after P  floor of D")
    for (length, mode), taken in times.items():
        routed, prefill, floor = map(_median_ms, (taken.routed, taken.prefill, taken.floor))
        print(
            f"{length:6}  {mode}  {routed:11.1f}  {prefill:7.1f}  {routed - prefill:7.1f}  "
            f"{floor:10.1f}"
        )


def _median_ms(seconds: Sequence[float]) -> float:
    return 1e3 * (quantile(seconds, 0.5) or 0.0)


if __name__ == "__main__":
    main()
