"""`kvferry up` runs prefill, decode and router on this machine, shows one request, and serves.

However the command ends, kill -9 included, no process, socket or file is left behind (see
`kvferry.cli.cluster.processes`).
"""

import argparse
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvferry.cli.arguments import Parser, parse_device, parse_port
from kvferry.cli.cluster.addresses import check_listenable, curl_command
from kvferry.cli.cluster.http_client import (
    TransportTotals,
    complete,
    read_transport_totals,
    sum_transport_totals,
)
from kvferry.cli.cluster.local_cluster import (
    CONNECTORS,
    LOOPBACK,
    LocalCluster,
    LocalLaunch,
    UpOptions,
    child_environment,
)
from kvferry.cli.cluster.processes import ProcessGroup
from kvferry.cli.runtime import STOP_SIGNALS, add_log_arguments, log_settings, stop_signals
from kvferry.engine.model.config import read_model_config
from kvferry.errors import ConfigError, KVFerryError
from kvferry.types import Address

__all__ = ["DESCRIPTION", "EXAMPLES", "add_arguments", "run"]

DESCRIPTION = (
    "Run prefill, decode and router on this machine, show one request, and serve the OpenAI API "
    "until Ctrl-C."
)
EXAMPLES = """\
  kvferry up
  kvferry up --prefill 2 --decode 2 --transports nixl
  kvferry up --model ~/models/Qwen3-0.6B --port 9000
  kvferry up --mode push
  kvferry up --once"""

PROMPT = (
    "A ferry carries people, carts and letters over a river that has no bridge. It does not care "
    "what is written in the letters, "
    "but it must not lose one, nor deliver one twice, nor hand one to a stranger."
)
SAMPLE_TOKENS = 16
START_TIMEOUT_S = 300.0
SAMPLE_TIMEOUT_S = 120.0
POLL_INTERVAL_S = 0.25


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--prefill",
        type=int,
        default=1,
        metavar="N",
        help="prefill instances (default: %(default)s)",
    )
    parser.add_argument(
        "--decode", type=int, default=1, metavar="M", help="decode instances (default: %(default)s)"
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="checkpoint in the layout of Hugging Face (default: a tiny generated one)",
    )
    parser.add_argument(
        "--port",
        type=parse_port,
        default=8000,
        help="port of the router; 0: any free port (default: %(default)s)",
    )
    parser.add_argument(
        "--transports",
        choices=("shm", "cuda_ipc", "nixl", "tcp"),
        help="data transport to use (default: the fastest that works here)",
    )
    parser.add_argument(
        "--tensor-parallel-size",
        type=int,
        default=1,
        metavar="K",
        help="tensor-parallel ranks of each engine (default: %(default)s)",
    )
    parser.add_argument(
        "--device",
        type=parse_device,
        default="cpu",
        help="device of all engines: cpu, cuda or cuda:N (default: %(default)s)",
    )
    modes = "pull: after prefill; push: while prefill computes (default: %(default)s)"
    parser.add_argument(
        "--mode",
        choices=tuple(CONNECTORS),
        default="pull",
        help=f"when decode gets the KV; {modes}",
    )
    parser.add_argument("--once", action="store_true", help="exit after the sample request")
    add_log_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    options = UpOptions(
        prefill=arguments.prefill,
        decode=arguments.decode,
        model=arguments.model,
        port=arguments.port,
        transports=(arguments.transports,) if arguments.transports else (),
        tensor_parallel_size=arguments.tensor_parallel_size,
        mode=arguments.mode,
        device=arguments.device,
    )
    if options.model is not None:
        read_model_config(options.model).check_tensor_parallel(options.tensor_parallel_size)
    if options.port:
        check_listenable(Address(LOOPBACK, options.port))
    with (
        stop_signals(),
        _cluster(options, arguments) as (cluster, launch),
        _show_logs_on_failure(cluster),
    ):
        router = _start_cluster(cluster, launch)
        totals = _show_sample(cluster, router, options)
        if arguments.once:
            return 0 if totals else 1
        _show_address(router, launch)
        return _serve_until_stopped(cluster)


@contextmanager
def _cluster(
    options: UpOptions, arguments: argparse.Namespace
) -> Iterator[tuple[LocalCluster, LocalLaunch]]:
    """Make the process group, the directory and the cluster; close all at the end.

    The reaper gets the name of the directory before the directory exists, so at no moment can a
    kill leave the directory behind.
    """
    directory = Path(tempfile.gettempdir()) / f"kvferry-up-{secrets.token_hex(8)}"
    with ProcessGroup(directory) as group:
        directory.mkdir(mode=0o700)
        secret_file, key_file = directory / "secret", directory / "admin-key"
        for file in (secret_file, key_file):
            file.touch(mode=0o600)
            file.write_text(secrets.token_hex(32))
        launch = LocalLaunch(options, options.model or directory / "model", key_file)
        is_shown = arguments.log_level or arguments.log_format
        cluster = LocalCluster(
            launch,
            child_environment({**os.environ, **log_settings(arguments).environment}, secret_file),
            group.id,
            START_TIMEOUT_S,
            _show_line if is_shown else None,
        )
        try:
            yield cluster, launch
        finally:
            # From here on a signal shortens the clean-up instead of interrupting the clean-up.
            for number in STOP_SIGNALS:
                signal.signal(number, lambda number, frame: cluster.terminate_all())
            cluster.close()


def _start_cluster(cluster: LocalCluster, launch: LocalLaunch) -> Address:
    # Imported here because `kvferry up --help` must work without rich.
    from rich.console import Console

    from kvferry.cli.cluster.startup_view import StartupView

    with StartupView(Console()) as view:
        if launch.options.model is None:
            cluster.run_to_end("model", launch.make_model(), view)
        return cluster.start(launch.options.prefill, launch.options.decode, view)


def _show_sample(
    cluster: LocalCluster, router: Address, options: UpOptions
) -> list[TransportTotals]:
    request = {
        "model": options.model_name,
        "prompt": PROMPT,
        "max_tokens": SAMPLE_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    since = time.monotonic()
    text = complete(router, request, SAMPLE_TIMEOUT_S)
    took_s = time.monotonic() - since
    totals = sum_transport_totals(
        part for address in cluster.decoders for part in read_transport_totals(address)
    )
    _print(f"\nprompt: {PROMPT}\nanswer: {text!r} ({SAMPLE_TOKENS} tokens, {took_s * 1000:.0f} ms)")
    for part in totals:
        rate = f" at {_bytes(part.bytes_per_s)}/s" if part.seconds > 0 else ""
        _print(
            f"moved:  {_bytes(part.total_bytes)} of KV cache by {part.transport} in "
            f"{part.transfers} transfer(s){rate}"
        )
    if not totals:
        _print("moved:  nothing; the decode instance computed the prompt")
    return totals


def _show_address(router: Address, launch: LocalLaunch) -> None:
    model_name, key = launch.options.model_name, launch.admin_key_file.read_text()
    _print(f"\nserving on http://{router}; try\n  {curl_command(router, model_name)}")
    # A browser does not send the part after # to the server.
    _print(f"dashboard: http://{router}/dashboard#key={key}\nCtrl-C stops all processes.")


def _serve_until_stopped(cluster: LocalCluster) -> int:
    try:
        while True:
            cluster.check_alive()
            time.sleep(POLL_INTERVAL_S)
    except KeyboardInterrupt:
        return 0


def _show_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def _show_logs_on_failure(cluster: LocalCluster) -> Iterator[None]:
    """On failure, show the last log lines of the processes."""
    try:
        yield
    except ConfigError:
        raise
    except KVFerryError:
        for name, lines in cluster.last_log_lines():
            _print("\n".join([f"\nlast lines of {name}:", *(f"  {line}" for line in lines)]))
        raise


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _print(text: str) -> None:
    print(text, flush=True)
