"""Compare the time to the first token of prompts whose KV is in host memory, in real vLLM:
kvferry's OffloadingConnector, vLLM's own, LMCache, and a server without a connector.

    python scripts/measure_vllm_tiers.py --device cuda --lengths 4000 32000
    python scripts/measure_vllm_tiers.py --only 'no connector' kvferry LMCache

Run it with the Python of vLLM's environment. LMCache takes part if it is installed there and is
named with --only. vLLM's own connector needs a GPU.

Each prompt is sent twice; in between, the prefix cache of the server is reset. The first time shows
what a connector costs if nothing is found, the second what a load costs. Servers take turns. All
times are medians in milliseconds.
"""

import argparse
import http.client
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
from typing import Any

from kvferry.bench.figures import quantile
from kvferry.bench.vllm.client import PromptMaker, time_to_first_token_s
from kvferry.bench.vllm.gpu_handover import FLAGS, MARGIN_TOKENS, VARIABLES, gpu_model_directory
from kvferry.bench.vllm.servers import (
    RunningServers,
    VllmServer,
    free_ports,
    launch_servers,
    model_directory,
    wait_healthy,
)
from kvferry.types import Address

DEVICES = {"cpu": (2, [1000, 4000]), "cuda": (24, [4000, 32000])}
"""GiB of the tier, and lengths of prompts."""
STORE_S = 2.0
START_S = 90.0
WARM_UP_TOKENS = 128
SEED = 11
OFFLOADING: Mapping[str, Any] = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
CONTENDERS = ("no connector", "kvferry", "vLLM's own", "LMCache")


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
    command = [str(Path(sys.executable).with_name("lmcache")), "server", "--disable-observability"]
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

    first: list[float] = field(default_factory=list)
    second: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--samples", type=int, default=5, help="prompts of each length")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS)
    parser.add_argument("--log-lines", type=int, default=0, help="of each server, at the end")
    options = parser.parse_args()
    options.lengths = options.lengths or DEVICES[options.device][1]
    options.only = options.only or CONTENDERS[: 2 if options.device == "cpu" else 3]
    times = {(length, name): Times() for length in options.lengths for name in options.only}
    with ExitStack() as stack:
        running = start(stack, options.device, max(options.lengths), options.only)
        servers = dict(zip(options.only, running.addresses, strict=True))
        prompts = PromptMaker(SEED)
        for length in (WARM_UP_TOKENS, *options.lengths):
            for address in servers.values():
                measure(address, prompts.make(length), Times())
        for length in options.lengths:
            for name in options.only * options.samples:
                measure(servers[name], prompts.make(length), times[length, name])
        for process in running.processes:
            print(*process.tail(options.log_lines), sep="\n")
    print("| tokens | server | first time ms | from the tier ms | worst |")
    print("|---|---|---|---|---|")
    for (length, name), taken in times.items():
        first, second = (1e3 * quantile(each, 0.5) for each in (taken.first, taken.second))
        print(f"| {length} | {name} | {first:.1f} | {second:.1f} | {1e3 * max(taken.second):.1f} |")


def start(stack: ExitStack, device: str, longest: int, contenders: Sequence[str]) -> RunningServers:
    model = stack.enter_context(
        gpu_model_directory() if device == "cuda" else model_directory(None)
    )
    flags = [*(FLAGS if device == "cuda" else ()), "--max-model-len", str(longest + MARGIN_TOKENS)]
    variables = VARIABLES if device == "cuda" else {}
    secret = {"KVFERRY_SECRET": secrets.token_hex(32), "VLLM_SERVER_DEV_MODE": "1"}
    ports = iter(free_ports(2 * len(contenders) + 1))
    tier_gib, lmcache_port = DEVICES[device][0], next(ports)
    if "LMCache" in contenders:
        stack.enter_context(lmcache_server(device, tier_gib, lmcache_port))
    servers = [
        VllmServer(
            name=name,
            model=model,
            port=next(ports),
            side_channel_port=next(ports),
            transfer=transfer_config(name, tier_gib, lmcache_port),
            flags=flags,
            environment={**variables, **secret},
        )
        for name in contenders
    ]
    running = stack.enter_context(launch_servers(servers, Path(sys.executable)))
    wait_healthy(running)
    return running


def measure(address: Address, prompt: list[int], times: Times) -> None:
    times.first.append(time_to_first_token_s(address, prompt))
    time.sleep(STORE_S)
    with closing(http.client.HTTPConnection(address.host, address.port, timeout=60)) as connection:
        connection.request("POST", "/reset_prefix_cache")
        answer = connection.getresponse()
        if answer.status != 200:
            raise SystemExit(f"the prefix cache was not reset: status {answer.status}")
        answer.read()
    times.second.append(time_to_first_token_s(address, prompt))


if __name__ == "__main__":
    main()
