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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvferry.cli.arguments import (
    NumberOf,
    Parser,
    parse_device,
    parse_model,
    parse_path,
    show_argument,
)
from kvferry.cli.checkpoints import find_checkpoint, has_chat_template, is_hub_name, prefetch
from kvferry.cli.cluster.addresses import check_listenable, curl_command
from kvferry.cli.cluster.http_client import (
    Completion,
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
from kvferry.cli.cluster.vllm_cluster import VllmCluster
from kvferry.cli.cluster.vllm_servers import (
    VllmFleet,
    VllmProcess,
    place_servers,
    probe_vllm,
    with_socket_directory,
)
from kvferry.cli.runtime import STOP_SIGNALS, add_log_arguments, log_settings, stop_signals
from kvferry.config.fields import Port
from kvferry.engine.model.config import read_model_config
from kvferry.engine.options import ProcessCount
from kvferry.errors import ConfigError, KVFerryError, RequestRefused, TransportError
from kvferry.types import Address

DESCRIPTION = (
    "Run prefill, decode and router on this machine, show one request, and serve the OpenAI API "
    "until Ctrl-C."
)
EXAMPLES = """\
  kvferry up
  kvferry up --prefill 2 --decode 2 --transports nixl
  kvferry up --model Qwen/Qwen3-0.6B
  kvferry up --model ~/models/Qwen3-0.6B --port 9000
  kvferry up --mode push
  kvferry up --once
  kvferry up --vllm Qwen/Qwen3-0.6B --prefill 2 --decode 1
  kvferry up --vllm ~/models/Qwen3-8B --prefill-tp 2 -- --max-model-len 16384
  kvferry up --vllm Qwen/Qwen3-0.6B --vllm-python ~/vllm/bin/python --mode push"""

SYSTEM_MESSAGE = "You are a helpful assistant."
QUESTION = "What is a KV cache?"
NEXT_QUESTION = "Tell me a joke."
SAMPLE_TOKENS = 64
START_TIMEOUT_S = 300.0
VLLM_START_TIMEOUT_S = 3600.0
"""vLLM may have to fetch a model, load it and compile it."""
SAMPLE_TIMEOUT_S = 120.0
POLL_INTERVAL_S = 0.25


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--prefill",
        type=NumberOf(ProcessCount),
        default=1,
        metavar="N",
        help="prefill instances (default: %(default)s)",
    )
    parser.add_argument(
        "--decode",
        type=NumberOf(ProcessCount),
        default=1,
        metavar="M",
        help="decode instances (default: %(default)s)",
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="folder of a checkpoint, or owner/name on the Hugging Face hub, fetched if needed "
        "(default: a small model that comes with kvferry)",
    )
    parser.add_argument(
        "--revision", metavar="NAME", help="branch, tag or commit on the hub (default: main)"
    )
    parser.add_argument(
        "--port",
        type=NumberOf(Port),
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
        type=NumberOf(ProcessCount),
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
    _add_vllm_arguments(parser)


def _add_vllm_arguments(parser: Parser) -> None:
    parser.unknown_advice = "; with --vllm, flags for vLLM go after `--`"
    parser.add_argument(
        "--vllm",
        type=parse_model,
        metavar="MODEL",
        help="run real vLLM servers with this model, a folder or a name of the hub, instead of "
        "embedded engines",
    )
    parser.add_argument(
        "--vllm-python",
        type=parse_path,
        metavar="PATH",
        help="interpreter with vLLM and kvferry installed (default: this one)",
    )
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}-tp",
            type=NumberOf(ProcessCount),
            metavar="K",
            help=f"with --vllm: tensor-parallel ranks of {role} servers (default: "
            "--tensor-parallel-size)",
        )
    parser.add_argument(
        "--connector",
        metavar="NAME",
        help="with --vllm: connector of all servers (default: the one of --mode)",
    )
    parser.add_argument(
        "--log-dir",
        type=parse_path,
        metavar="DIR",
        help="with --vllm: folder for one log file per server (default: a new one in the temporary "
        "directory; it stays)",
    )
    parser.add_argument(
        "vllm_flags",
        nargs="*",
        metavar="-- FLAGS",
        help="with --vllm: more flags for every server",
    )


def run(arguments: argparse.Namespace) -> int:
    _check_vllm_arguments(arguments)
    options = UpOptions(
        prefill=arguments.prefill,
        decode=arguments.decode,
        port=arguments.port,
        transports=(arguments.transports,) if arguments.transports else (),
        tensor_parallel_size=arguments.tensor_parallel_size,
        mode=arguments.mode,
        device=arguments.device,
    )
    if options.port:
        check_listenable(Address(LOOPBACK, options.port))
    vllm = _vllm_servers(options, arguments)
    if vllm is not None:
        fleet = vllm.fleet
        options = replace(
            options,
            model=fleet.directory,
            model_name=fleet.model_name,
            revision=fleet.tokenizer_revision,
        )
    else:
        if arguments.model is not None:
            folder = find_checkpoint(arguments.model, arguments.revision)
            name = arguments.model if is_hub_name(arguments.model) else folder.resolve().name
            options = replace(options, model=folder, model_name=name)
        read_model_config(options.model).check_tensor_parallel(options.tensor_parallel_size)
    with (
        stop_signals(),
        _cluster(options, arguments, vllm) as (cluster, launch),
        _show_logs_on_failure(cluster),
    ):
        router = _start_cluster(cluster, launch)
        try:
            totals = _show_sample(cluster, router, options)
        except (RequestRefused, TransportError) as error:
            # The servers may have taken minutes to start, and may answer other requests.
            if arguments.once:
                raise
            _print(f"\nthe sample request failed: {error}")
        else:
            if arguments.once:
                return 0 if totals else 1
        _show_address(router, launch)
        return _serve_until_stopped(cluster)


_VLLM_ONLY = ("vllm_python", "prefill_tp", "decode_tp", "connector", "log_dir", "vllm_flags")


def _check_vllm_arguments(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for an argument that has no effect with, or without, `--vllm`."""
    if arguments.revision is not None and arguments.model is None:
        raise ConfigError(
            "--revision needs --model OWNER/NAME; with --vllm, write `-- --revision NAME`"
        )
    flags = arguments.vllm_flags
    if flags and not flags[0].startswith("-"):
        raise ConfigError(
            f"{show_argument(flags[0])} is an unexpected argument of `kvferry up`; name a model "
            "with --model, or with --vllm for real vLLM servers"
        )
    given = [name for name in _VLLM_ONLY if getattr(arguments, name) not in (None, [])]
    if arguments.vllm is None and given:
        name = "flags after `--`" if given[0] == "vllm_flags" else f"--{given[0].replace('_', '-')}"
        raise ConfigError(f"{name} needs --vllm MODEL: embedded engines do not use it")
    if arguments.vllm is not None and (arguments.model is not None or arguments.device != "cpu"):
        raise ConfigError(
            "--vllm names the model, and vLLM chooses the device; leave --model and --device out"
        )


@dataclass(frozen=True, slots=True)
class _VllmServers:
    """The vLLM servers to start, and what clients and operators need to know of them."""

    fleet: VllmFleet
    servers: Sequence[VllmProcess]
    logs: Path


def _vllm_servers(options: UpOptions, arguments: argparse.Namespace) -> _VllmServers | None:
    if arguments.vllm is None:
        return None
    prefill_tp, decode_tp = (
        options.tensor_parallel_size if size is None else size
        for size in (arguments.prefill_tp, arguments.decode_tp)
    )
    fleet = VllmFleet(
        arguments.vllm,
        prefill=options.prefill,
        decode=options.decode,
        prefill_tp=prefill_tp,
        decode_tp=decode_tp,
        connector=arguments.connector or CONNECTORS[options.mode],
        transports=options.transports,
        flags=tuple(arguments.vllm_flags),
    )
    # Not resolved: the interpreter of a virtual environment is a link.
    python = Path(arguments.vllm_python or sys.executable).absolute()
    machine = probe_vllm(python, os.environ.get("CUDA_VISIBLE_DEVICES"))
    revision = fleet.hub_revision(os.environ)
    if is_hub_name(fleet.model) and revision is not None:
        prefetch(fleet.model, revision)
    servers = place_servers(fleet, machine, python, os.environ)
    logs = arguments.log_dir
    with _explained_writes("--log-dir" if logs else "TMPDIR", logs or "the temporary directory"):
        logs = logs or Path(tempfile.mkdtemp(prefix="kvferry-up-logs-"))
        logs.mkdir(parents=True, exist_ok=True)
        for server in servers:
            (logs / f"{server.name}.log").open("ab").close()
    for server in servers:
        _print(f"{server.name}: {server.place}")
    _print(f"logs: {logs}")
    return _VllmServers(fleet, servers, logs)


@contextmanager
def _explained_writes(setting: str, folder: Path | str) -> Iterator[None]:
    """Turn an error of the file system, such as a full disk, into one sentence."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"no file can be written to {folder} ({error.strerror}); set {setting} to another "
            "folder, or free some space"
        ) from error


@contextmanager
def _cluster(
    options: UpOptions, arguments: argparse.Namespace, vllm: _VllmServers | None
) -> Iterator[tuple[LocalCluster, LocalLaunch]]:
    """Make the process group, the directory and the cluster; close all at the end.

    The reaper gets the name of the directory before the directory exists, so at no moment can a
    kill leave the directory behind.
    """
    with _explained_writes("TMPDIR", "the temporary directory"):
        directory = Path(tempfile.gettempdir()) / f"kvferry-up-{secrets.token_hex(8)}"
    with ProcessGroup(directory) as group:
        secret_file, key_file = directory / "secret", directory / "admin-key"
        with _explained_writes("TMPDIR", directory):
            directory.mkdir(mode=0o700)
            for file in (secret_file, key_file):
                file.touch(mode=0o600)
                file.write_text(secrets.token_hex(32))
        launch = LocalLaunch(options, key_file)
        environment = child_environment(
            {**os.environ, **log_settings(arguments).environment}, secret_file
        )
        on_line = _show_line if arguments.log_level or arguments.log_format else None
        cluster = (
            LocalCluster(launch, environment, group.id, START_TIMEOUT_S, on_line)
            if vllm is None
            else VllmCluster(
                launch,
                with_socket_directory(environment, directory),
                group.id,
                VLLM_START_TIMEOUT_S,
                vllm.servers,
                vllm.logs,
                on_line,
            )
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
        return cluster.start(launch.options.prefill, launch.options.decode, view)


def _show_sample(
    cluster: LocalCluster, router: Address, options: UpOptions
) -> list[TransportTotals]:
    since = time.monotonic()
    try:
        answer = _ask(router, options, SYSTEM_MESSAGE, QUESTION)
    except RequestRefused:
        # The chat templates of some models refuse system messages.
        answer = _ask(router, options, QUESTION)
    took_s = time.monotonic() - since
    totals = sum_transport_totals(
        part for address in cluster.decoders for part in read_transport_totals(address)
    )
    _print(f"\nprompt: {QUESTION}\nanswer: {answer.text.strip()}")
    _print(f"took:   {took_s * 1000:.0f} ms for {answer.tokens} tokens")
    for part in totals:
        rate = f" at {_bytes(part.bytes_per_s)}/s" if part.seconds > 0 else ""
        _print(
            f"moved:  {_bytes(part.total_bytes)} of KV cache by {part.transport} in "
            f"{part.transfers} transfer(s){rate}"
        )
    if not totals:
        _print("moved:  nothing; the decode instance computed the prompt")
    return totals


def _ask(router: Address, options: UpOptions, *messages: str) -> Completion:
    request = sample_request(options, *messages)
    return complete(router, request | {"temperature": 0}, SAMPLE_TIMEOUT_S)


def sample_request(options: UpOptions, *messages: str) -> dict[str, Any]:
    """Return a chat whose last message is the user's; a completion if the model has no chats."""
    request = {"model": options.model_name, "max_tokens": SAMPLE_TOKENS}
    if not has_chat_template(options.model, options.revision):
        return {**request, "prompt": " ".join(messages)}
    roles = ("system", "user")[-len(messages) :]
    chat = [{"role": r, "content": m} for r, m in zip(roles, messages, strict=True)]
    return {**request, "messages": chat}


def _show_address(router: Address, launch: LocalLaunch) -> None:
    request = sample_request(launch.options, NEXT_QUESTION)
    key = launch.admin_key_file.read_text()
    _print(f"\nserving on http://{router}; try\n  {curl_command(router, request)}")
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
