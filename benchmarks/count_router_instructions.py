"""Count the instructions that a router executes per request, in one or more checkouts.

    python benchmarks/count_router_instructions.py ../before . --requests 300

A noisy machine cannot show a difference of 5 % in requests per second. The number of instructions,
counted by valgrind (Debian, Ubuntu: apt install valgrind), differs by 0.1 % between two runs with
the same settings. The count leaves out the kernel's work and waits for memory. All checkouts run in
this Python's environment, with the stub engines and the client of `kvferry bench router` beside
them, and without health probes.
"""

import argparse
import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from kvferry.bench.router.load import LoadSpec, connect_router_client, run_load
from kvferry.bench.router.messages import BenchMessages
from kvferry.bench.router.stubs import start_stubs
from kvferry.cli.cluster.vllm_servers import free_ports
from kvferry.types import Address

CONFIG = """\
[health]
probe_interval_s = 3600
"""
START_S = 300
"""valgrind slows the router down about fifty times."""
CONTROL_S = 60
WARM_UPS = 20
"""Requests of each client that are not counted."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", nargs="+", type=Path, help="folders with kvferry's src/")
    parser.add_argument("--requests", type=int, default=300, help="counted requests per figure")
    parser.add_argument("--prompt-bytes", type=int, nargs="+", default=[1024, 65536])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    print("instructions per request, in thousands")
    for prompt_bytes in options.prompt_bytes:
        for concurrency in options.concurrency:
            for checkout in options.checkouts:
                counts = [
                    asyncio.run(count(checkout, prompt_bytes, concurrency, options.requests))
                    for _ in range(options.repeats)
                ]
                shown = " ".join(f"{number / 1000:8.1f}" for number in counts)
                print(f"{prompt_bytes:6} bytes, {concurrency:2} at once, {checkout}: {shown}")
                sys.stdout.flush()


async def count(checkout: Path, prompt_bytes: int, concurrency: int, requests: int) -> float:
    """Start the checkout's router under valgrind and count while it serves `requests` requests."""
    messages = BenchMessages(prompt_bytes, writes=4)
    (port,) = free_ports(1)
    router = Address("127.0.0.1", port)
    with tempfile.TemporaryDirectory() as folder:
        async with start_stubs(messages) as stubs:
            process = start_router(Path(folder), checkout, port, stubs.prefill, stubs.decode)
            try:
                await until_ready(router, process, Path(folder) / "log")
                clients = [
                    await connect_router_client(messages, router) for _ in range(concurrency)
                ]
                await run_load(clients, LoadSpec(requests=WARM_UPS * concurrency))
                await control("--zero", process.pid)
                result = await run_load(clients, LoadSpec(requests=requests))
                await control("--dump", process.pid)
                for client in clients:
                    client.close()
            finally:
                process.send_signal(signal.SIGKILL)
                process.wait()
        if result.failures:
            raise SystemExit(f"requests failed: {result.failures}")
        (dump,) = Path(folder).glob("callgrind.out.*.1")
        totals = re.search(r"^(?:totals|summary): (\d+)", dump.read_text(), re.MULTILINE)
        assert totals is not None
        return int(totals[1]) / requests


def start_router(
    folder: Path, checkout: Path, port: int, prefill: Address, decode: Address
) -> subprocess.Popen[bytes]:
    config = folder / "router.toml"
    config.write_text(CONFIG)
    command = [
        "valgrind",
        "--tool=callgrind",
        f"--callgrind-out-file={folder}/callgrind.out.%p",
        sys.executable,
        "-m",
        "kvferry",
        "proxy",
        *("--config", str(config), "--host", "127.0.0.1", "--port", str(port)),
        *("--prefiller-hosts", prefill.host, "--prefiller-ports", str(prefill.port)),
        *("--decoder-hosts", decode.host, "--decoder-ports", str(decode.port)),
    ]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(
            [str(checkout.resolve() / "src"), os.environ.get("PYTHONPATH", "")]
        ),
        "PYTHONHASHSEED": "0",
        "XDG_RUNTIME_DIR": str(folder),
    }
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


async def until_ready(router: Address, process: subprocess.Popen[bytes], log: Path) -> None:
    async with asyncio.timeout(START_S):
        while True:
            if process.poll() is not None:
                raise SystemExit(f"the router ended under valgrind:\n{log.read_text()[-2000:]}")
            try:
                _, writer = await asyncio.open_connection(router.host, router.port)
            except OSError:
                await asyncio.sleep(0.5)
            else:
                writer.close()
                return


async def control(action: str, pid: int) -> None:
    process = await asyncio.create_subprocess_exec(
        "callgrind_control", action, str(pid), stdout=subprocess.DEVNULL
    )
    async with asyncio.timeout(CONTROL_S):
        status = await process.wait()
    if status:
        raise SystemExit(f"callgrind_control {action} failed")


if __name__ == "__main__":
    main()
