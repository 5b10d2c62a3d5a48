"""Compare the time to the first token of prompts whose KV is in host memory, in real vLLM:
kvferry's OffloadingConnector, vLLM's own, LMCache, and a server without a connector.

    python benchmarks/measure_vllm_tiers.py --device cuda --lengths 4000 32000
    python benchmarks/measure_vllm_tiers.py --only 'no connector' kvferry LMCache
    python benchmarks/measure_vllm_tiers.py --also 'no stores={"kv_connector": …}'

Run it with the Python of vLLM's environment. LMCache takes part if it is installed there and is
named with --only. vLLM's own connector needs a GPU.

First what a connector costs if nothing is found: in each round every server computes one new
prompt, in random order. Then what a load costs: each prompt is sent twice, and in between the
prefix cache of the server is reset. All times are medians in milliseconds; "÷" divides by the
server without a connector in the same round, and is the median of the rounds.
"""

import argparse
import http.client
import json
import random
import secrets
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from kvferry.bench.vllm.client import PromptMaker, time_to_first_token_s
from kvferry.bench.vllm.gpu_handover import FLAGS, MARGIN_TOKENS, VARIABLES, gpu_model_directory
from kvferry.bench.vllm.servers import (
    RunningServers,
    VllmServer,
    launch_servers,
    model_directory,
    wait_healthy,
)
from kvferry.cli.cluster.vllm_servers import free_ports
from kvferry.types import Address

DEVICES = {"cpu": (2, [1000, 4000]), "cuda": (16, [4000, 32000])}
"""GiB of the tier, and lengths of prompts."""
STORE_S = 2.0
PAUSE_S = 0.5
"""Between two requests of a round: a server stores what it has computed."""
START_S = 90.0
GPU_KV_BYTES = 6 << 30
"""So that five servers fit on one GPU."""
WARM_UP_TOKENS = 128
SEED = 11
FEED_FORWARD_SIZE = 14336
"""The width of Llama-8B, so that computing takes as long as in that model."""
OFFLOADING: Mapping[str, Any] = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
PLAIN = "no connector"
CONTENDERS = (PLAIN, "kvferry", "vLLM's own", "LMCache")


def transfer_config(name: str, tier_gib: int, lmcache_port: int) -> Mapping[str, Any] | None:
    size = {"cpu_bytes_to_use": tier_gib << 30}
    match name:
        case "kvferry":
            return {
                **OFFLOADING,
                "kv_connector_module_path": "kvferry.vllm",
                "kv_connector_extra_config": {**size, "break_even": False},
            }
        case "vLLM's own":
            return {**OFFLOADING, "kv_connector_extra_config": size}
        case "LMCache":
            return {
                "kv_connector": "LMCacheMPConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "lmcache.mp.host": "tcp://127.0.0.1",
                    "lmcache.mp.port": lmcache_port,
                },
            }
    return None


@contextmanager
def lmcache_server(device: str, tier_gib: int, port: int) -> Iterator[None]:
    command = [sys.executable, "-c", "from lmcache.cli.main import main; main()", "server"]
    command += ["--disable-observability"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--http-port", str(free_ports(1)[0])]
    command += ["--l1-size-gb", str(tier_gib), "--eviction-policy", "LRU"]
    if device == "cpu":
        name = f"kvferry-measures-{port}"
        command += ["--supported-transfer-mode", "engine_driven", "--shm-name", name]
        command += ["--no-l1-use-lazy"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_listening(process, command, port)
        yield
    finally:
        process.terminate()
        process.wait(30)


def wait_listening(process: "subprocess.Popen[bytes]", command: list[str], port: int) -> None:
    """Without a server, a vLLM with LMCache would wait for minutes."""
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(0.5)
    raise SystemExit(f"LMCache's server does not run; try it by hand: {shlex.join(command)}")


@dataclass(slots=True)
class Times:
    """Seconds of one contender and length."""

    computed: list[float] = field(default_factory=list)
    loaded: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--rounds", type=int, default=20, help="of prompts that nothing provides")
    parser.add_argument("--samples", type=int, default=5, help="prompts that are loaded")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS)
    parser.add_argument(
        "--also", nargs="+", default=[], metavar="NAME=JSON", help="more --kv-transfer-config"
    )
    parser.add_argument("--log-lines", type=int, default=0, help="of each server, at the end")
    options = parser.parse_args()
    lengths = options.lengths or DEVICES[options.device][1]
    names = options.only or CONTENDERS[: 2 if options.device == "cpu" else 3]
    also = dict(each.split("=", 1) for each in options.also)
    transfers = {name: json.loads(text) for name, text in also.items()}
    with ExitStack() as stack:
        running = start(stack, options.device, max(lengths), names, transfers)
        servers = dict(zip((*names, *transfers), running.addresses, strict=True))
        prompts = PromptMaker(SEED)
        print("| tokens | server | computed ms | worst | ÷ | from the tier ms | worst |")
        print("|---|---|---|---|---|---|---|")
        for length in lengths:
            for address in servers.values():
                load(address, prompts.make(WARM_UP_TOKENS))
                load(address, prompts.make(length))
            times = measure(servers, prompts, length, options.rounds, options.samples)
            for name, taken in times.items():
                print_row(length, name, taken, times.get(PLAIN, taken))
        for process in running.processes if options.log_lines else ():
            print(*process.tail(options.log_lines), sep="\n")


def measure(
    servers: Mapping[str, Address], prompts: PromptMaker, length: int, rounds: int, samples: int
) -> dict[str, Times]:
    times = {name: Times() for name in servers}
    order = random.Random(SEED)
    for _ in range(rounds):
        for name in order.sample(list(servers), len(servers)):
            taken = time_to_first_token_s(servers[name], prompts.make(length))
            times[name].computed.append(taken)
            time.sleep(PAUSE_S)
    for _ in range(samples):
        for name, address in servers.items():
            times[name].loaded.append(load(address, prompts.make(length)))
    return times


def print_row(length: int, name: str, times: Times, plain: Times) -> None:
    pairs = zip(times.computed, plain.computed, strict=True)
    ratio = median([own / theirs for own, theirs in pairs])
    cells = [f"{1e3 * median(times.computed):.1f}", f"{1e3 * max(times.computed):.1f}"]
    cells += [f"{ratio:.3f}", f"{1e3 * median(times.loaded):.1f}"]
    print(
        f"| {length} | {name} | {' | '.join(cells)} | {1e3 * max(times.loaded):.1f} |", flush=True
    )


def start(
    stack: ExitStack,
    device: str,
    longest: int,
    names: Sequence[str],
    also: Mapping[str, Mapping[str, Any]],
) -> RunningServers:
    model = stack.enter_context(
        gpu_model_directory(intermediate_size=FEED_FORWARD_SIZE)
        if device == "cuda"
        else model_directory(None)
    )
    flags = ["--max-model-len", str(longest + MARGIN_TOKENS)]
    if device == "cuda":
        flags += [*FLAGS, "--kv-cache-memory-bytes", str(GPU_KV_BYTES)]
    variables = VARIABLES if device == "cuda" else {}
    secret = {"KVFERRY_SECRET": secrets.token_hex(32), "VLLM_SERVER_DEV_MODE": "1"}
    ports = iter(free_ports(2 * (len(names) + len(also)) + 1))
    tier_gib, lmcache_port = DEVICES[device][0], next(ports)
    if "LMCache" in names:
        stack.enter_context(lmcache_server(device, tier_gib, lmcache_port))
    transfers = {name: transfer_config(name, tier_gib, lmcache_port) for name in names}
    servers = [
        VllmServer(
            name=name,
            model=model,
            port=next(ports),
            side_channel_port=next(ports),
            transfer=transfer,
            flags=flags,
            environment={**variables, **secret},
        )
        for name, transfer in {**transfers, **also}.items()
    ]
    running = stack.enter_context(launch_servers(servers, Path(sys.executable)))
    wait_healthy(running)
    return running


def load(address: Address, prompt: list[int]) -> float:
    """Let a server compute a prompt, drop it from the prefix cache, and send it again."""
    time_to_first_token_s(address, prompt)
    time.sleep(STORE_S)
    with closing(http.client.HTTPConnection(address.host, address.port, timeout=60)) as connection:
        connection.request("POST", "/reset_prefix_cache")
        answer = connection.getresponse()
        if answer.status != 200:
            raise SystemExit(f"the prefix cache was not reset: status {answer.status}")
        answer.read()
    return time_to_first_token_s(address, prompt)


if __name__ == "__main__":
    main()
