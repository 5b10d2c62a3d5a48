"""Compare the time to the first token of prompts whose KV is in host memory, in real vLLM on one
GPU: kvferry's OffloadingConnector, vLLM's own, and a server without a connector.

    python scripts/measure_gpu_tiers.py --lengths 4000 32000 --samples 5

Each prompt is sent twice; in between, the prefix cache of the server is reset. The first time shows
what a connector costs if nothing is found, the second what a load costs. Servers take turns. All
times are medians in milliseconds.
"""

import argparse
import http.client
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
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
    wait_healthy,
)
from kvferry.types import Address

TIER_BYTES = 24 << 30
STORE_S = 2.0
WARM_UP_TOKENS = 128
SEED = 11
OFFLOADING: Mapping[str, Any] = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
CONTENDERS: Mapping[str, Mapping[str, Any] | None] = {
    "no connector": None,
    "kvferry": {
        **OFFLOADING,
        "kv_connector_module_path": "kvferry.vllm",
        "kv_connector_extra_config": {"cpu_bytes_to_use": TIER_BYTES, "break_even": False},
    },
    "vLLM's own": {
        **OFFLOADING,
        "kv_connector_extra_config": {"cpu_bytes_to_use": TIER_BYTES},
    },
}


@dataclass(slots=True)
class Times:
    """Seconds of one contender and length."""

    first: list[float] = field(default_factory=list)
    second: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4000, 32000])
    parser.add_argument("--samples", type=int, default=5, help="prompts of each length")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=[*CONTENDERS])
    parser.add_argument("--log-lines", type=int, default=0, help="of each server, at the end")
    options = parser.parse_args()
    times = {(length, name): Times() for length in options.lengths for name in options.only}
    with ExitStack() as stack:
        model = stack.enter_context(gpu_model_directory())
        running = start(stack, model, max(options.lengths), options.only)
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


def start(stack: ExitStack, model: Path, longest: int, contenders: Sequence[str]) -> RunningServers:
    flags = (*FLAGS, "--max-model-len", str(longest + MARGIN_TOKENS))
    secret = {"KVFERRY_SECRET": secrets.token_hex(32), "VLLM_SERVER_DEV_MODE": "1"}
    ports = iter(free_ports(2 * len(contenders)))
    servers = [
        VllmServer(
            name=name,
            model=model,
            port=next(ports),
            side_channel_port=next(ports),
            transfer=CONTENDERS[name],
            flags=flags,
            environment={**VARIABLES, **secret},
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
