"""`kvferry serve` runs one engine with its API; the flags are those of `vllm serve`.

This module is the composition root of an engine. It checks all settings before it starts the
engine's processes, so that a wrong flag is one sentence and not a traceback of another process.
"""

import argparse
import logging
import os
import sys
import threading
from collections.abc import Mapping
from typing import get_type_hints

from kvferry.cli.arguments import NumberOf, Parser, amount, parse_device
from kvferry.cli.checkpoints import find_checkpoint
from kvferry.cli.cluster.addresses import announce_address, check_listenable, curl_command, dialable
from kvferry.cli.register import Registration, check_router_url, role_of
from kvferry.cli.runtime import add_log_arguments, log_settings
from kvferry.cli.tracing import add_traces_argument, find_traces_endpoint
from kvferry.config import (
    ClusterSecret,
    KVTransferConfig,
    NixlExtraConfig,
    P2pNcclExtraConfig,
    SideChannelConfig,
    ignored_variables,
    is_loopback,
    kv_cache_layout_from_environment,
)
from kvferry.config.fields import Port
from kvferry.config.secret import read_private_file
from kvferry.config.side_channel import is_wildcard
from kvferry.connectors.factory import KVConnectorFactory
from kvferry.engine.client import EngineClient
from kvferry.engine.model.config import read_model_config
from kvferry.engine.options import EngineOptions
from kvferry.errors import ConfigError
from kvferry.logs import configure_logs, show
from kvferry.router.fleet.instances import Role, parse_instance
from kvferry.router.fleet.registration import DEFAULT_TTL_S, Registrar
from kvferry.transports.registry import ConfiguredTransportKit
from kvferry.types import Address
from kvferry.web.api_keys import ApiKeys, read_key_file

DESCRIPTION = (
    "Serve one model over the OpenAI API with the embedded engine. Flags are those of `vllm serve`."
)
EXAMPLES = """\
  kvferry serve /models/tiny --port 8100
  kvferry serve Qwen/Qwen3-0.6B
  VLLM_NIXL_SIDE_CHANNEL_PORT=5601 kvferry serve /models/tiny --port 8200 \\
      --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'
  kvferry serve /models/tiny --kv-transfer-config.kv_connector NixlConnector --kv-transfer-config.kv_role kv_both \\
      --kv-transfer-config.kv_connector_extra_config.backends+ LIBFABRIC"""  # noqa: E501

DTYPES = ("auto", "float32", "bfloat16", "float16")
CACHE_DTYPES = (*DTYPES, "fp8", "fp8_e4m3", "fp8_e5m2")
DATA_PARALLEL = (
    "--data-parallel-size",
    "-dp",
    "--data-parallel-size-local",
    "--data-parallel-rank",
    "--data-parallel-address",
)
KINDS = get_type_hints(EngineOptions, include_extras=True)
DEFAULTS = {name: field.default for name, field in EngineOptions.__dataclass_fields__.items()}


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="folder of a checkpoint, or owner/name on the Hugging Face hub, fetched if needed",
    )
    parser.add_argument(
        "--revision", metavar="NAME", help="branch, tag or commit on the hub (default: main)"
    )
    parser.add_argument(
        "--host",
        help="address to listen on (default: localhost; the side channel's address if other hosts "
        "can reach the side channel)",
    )
    parser.add_argument(
        "--port",
        type=NumberOf(Port),
        default=8000,
        help="port to listen on; 0: any free port (default: %(default)s)",
    )
    parser.add_argument(
        "--served-model-name",
        metavar="NAME",
        default="",
        help="model name that clients use (default: MODEL)",
    )
    parser.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="file with the keys that clients must send, `TENANT KEY` or `KEY` in each line; "
        "routers send the key in their --instance-key-file",
    )
    _add_compute_arguments(parser)
    _add_shutdown_arguments(parser)
    _add_scheduler_arguments(parser)
    _add_cache_arguments(parser)
    _add_router_arguments(parser)
    add_log_arguments(parser)
    add_traces_argument(parser)
    for name in DATA_PARALLEL:
        parser.add_unsupported(
            name, advice="start several engines and list them all for `kvferry proxy`"
        )
    for name in ("--pipeline-parallel-size", "-pp"):
        parser.add_unsupported(name, advice="use --tensor-parallel-size to split a model")


def _add_compute_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="dtype of weights and activations (default: %(default)s)",
    )
    parser.add_argument(
        "--compute-dtype",
        choices=(*DTYPES, "float64"),
        default="auto",
        help="dtype of the arithmetic (default: %(default)s)",
    )
    parser.add_argument(
        "--device",
        type=parse_device,
        default=DEFAULTS["device"],
        help="device to compute on: cpu, cuda or cuda:N; further ranks take the next GPUs "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--num-threads",
        type=NumberOf(KINDS["num_threads"]),
        default=DEFAULTS["num_threads"],
        help="torch threads per rank (default: %(default)s)",
    )


def _add_shutdown_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--shutdown-timeout",
        type=NumberOf(KINDS["shutdown_timeout_s"]),
        default=DEFAULTS["shutdown_timeout_s"],
        metavar="SECONDS",
        help="seconds for requests to finish after Ctrl-C (default: %(default)s)",
    )
    parser.add_argument(
        "--drain-timeout",
        type=NumberOf(KINDS["drain_timeout_s"]),
        default=DEFAULTS["drain_timeout_s"],
        metavar="SECONDS",
        help="seconds after SIGTERM for requests to finish and for peers to read their blocks; 0: "
        "none (default: %(default)s)",
    )


def _add_scheduler_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--seed",
        type=NumberOf(KINDS["seed"]),
        default=DEFAULTS["seed"],
        help="seed for requests without a seed (default: %(default)s)",
    )
    parser.add_argument(
        "--max-model-len",
        type=amount(0),
        default=DEFAULTS["max_model_len"],
        help="most tokens per request, prompt included (default: the checkpoint's limit)",
    )
    parser.add_argument(
        "--tensor-parallel-size",
        "-tp",
        type=NumberOf(KINDS["tensor_parallel_size"]),
        default=DEFAULTS["tensor_parallel_size"],
        help="tensor-parallel ranks, one process each (default: 1)",
    )
    parser.add_argument(
        "--max-num-seqs",
        type=NumberOf(KINDS["max_num_seqs"]),
        default=DEFAULTS["max_num_seqs"],
        help="most sequences per step (default: %(default)s)",
    )
    parser.add_argument(
        "--max-num-batched-tokens",
        type=amount(1),
        default=DEFAULTS["max_num_batched_tokens"],
        help="most tokens per step (default: %(default)s)",
    )
    parser.add_switch(
        "--enable-chunked-prefill",
        default=True,
        meaning="compute long prompts in chunks, so that other requests get steps in between",
    )
    parser.add_argument(
        "--enforce-eager",
        action="store_true",
        help="accepted without effect; this engine is always eager",
    )


def _add_cache_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--kv-cache-dtype",
        choices=CACHE_DTYPES,
        default="auto",
        help="dtype of the KV cache; fp8 is fp8_e4m3 (default: %(default)s, as --dtype)",
    )
    parser.add_argument(
        "--block-size",
        type=NumberOf(KINDS["block_size"]),
        default=DEFAULTS["block_size"],
        help="tokens per block (default: %(default)s)",
    )
    parser.add_argument(
        "--num-gpu-blocks-override",
        type=NumberOf(KINDS["num_blocks"]),
        default=0,
        metavar="N",
        help="blocks in the cache (default: as many as fit)",
    )
    parser.add_argument(
        "--kv-cache-memory-bytes",
        type=amount(0),
        help="cache size per rank (default: 256 MiB on CPUs, what --gpu-memory-utilization leaves "
        "on GPUs)",
    )
    parser.add_switch(
        "--enable-prefix-caching",
        default=True,
        meaning="reuse cached blocks for prompts with the same beginning",
    )
    parser.add_argument(
        "--gpu-memory-utilization",
        type=NumberOf(KINDS["gpu_memory_utilization"]),
        default=DEFAULTS["gpu_memory_utilization"],
        metavar="SHARE",
        help="share of a GPU's memory that may be in use, by all processes, after the cache is "
        "allocated (default: %(default)s)",
    )


def _add_router_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--router",
        nargs="+",
        metavar="URL",
        help="routers to register with while this engine serves",
    )
    parser.add_argument(
        "--router-role",
        choices=[role.value for role in Role],
        help="role to register for; required with --router",
    )
    parser.add_argument(
        "--router-url",
        metavar="URL",
        help="address at which routers reach this engine (default: the side channel's host)",
    )


def run(arguments: argparse.Namespace) -> int:
    configure_logs(log_settings(arguments))
    options = engine_options(arguments, os.environ)
    side_channel = SideChannelConfig.from_environment(os.environ)
    secret = None
    if options.kv_transfer is not None:
        secret = ClusterSecret.load(os.environ)
        secret.check_reach(side_channel)
    kit = ConfiguredTransportKit.from_settings(
        side_channel, secret, options.kv_transfer, os.environ
    )
    address = Address(api_host(arguments.host, side_channel), arguments.port)
    api_keys = read_api_keys(arguments.api_key_file)
    check_before_start(options, address)
    for sentence in [*ignored_variables(os.environ), *open_to_all(address.host, api_keys)]:
        logging.getLogger(__name__).warning(sentence)
    _register_with_proxy(arguments, options.kv_transfer)
    registrations = _Registrations(arguments, side_channel)
    # Imported here, as below, because `kvferry serve --help` must work without the extra [engine].
    from kvferry.engine.api.serve import run_on_fast_loop

    return run_on_fast_loop(_serve(options, kit, side_channel, address, api_keys, registrations))


def engine_options(arguments: argparse.Namespace, environ: Mapping[str, str]) -> EngineOptions:
    """Return the engine options for parsed arguments; ConfigError names the wrong setting."""
    transfer = (
        None
        if arguments.kv_transfer_config is None
        else KVTransferConfig.from_mapping(arguments.kv_transfer_config)
    )
    if transfer is not None and transfer.kv_buffer_device == "cuda" and arguments.device == "cpu":
        raise ConfigError(
            "kv_buffer_device cannot be cuda with --device cpu; remove it, or set it to cpu"
        )
    return EngineOptions(
        model=find_checkpoint(arguments.model, arguments.revision),
        served_model_name=arguments.served_model_name or arguments.model,
        dtype=arguments.dtype,
        kv_cache_dtype=arguments.kv_cache_dtype,
        compute_dtype=arguments.compute_dtype,
        device=arguments.device,
        block_size=arguments.block_size,
        num_blocks=arguments.num_gpu_blocks_override,
        kv_cache_memory_bytes=arguments.kv_cache_memory_bytes,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        kv_cache_layout=kv_cache_layout_from_environment(environ),
        cross_layer_blocks=transfer is not None and _wants_cross_layer_blocks(transfer),
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        tensor_parallel_size=arguments.tensor_parallel_size,
        enable_prefix_caching=arguments.enable_prefix_caching,
        enable_chunked_prefill=arguments.enable_chunked_prefill,
        num_threads=arguments.num_threads,
        seed=arguments.seed,
        shutdown_timeout_s=arguments.shutdown_timeout,
        drain_timeout_s=arguments.drain_timeout,
        kv_transfer=transfer,
        otlp_traces_endpoint=find_traces_endpoint(
            "serve", arguments.otlp_traces_endpoint or "", environ
        ),
    )


def _wants_cross_layer_blocks(transfer: KVTransferConfig) -> bool:
    """Return whether any connector, also inside a MultiConnector, asks for cross-layer blocks."""
    return any(
        isinstance(connector.extra, NixlExtraConfig) and connector.extra.enable_cross_layers_blocks
        for connector in transfer.connectors
    )


def check_before_start(options: EngineOptions, address: Address) -> None:
    """Check early what would otherwise fail seconds later, in another process; raise
    ConfigError.
    """
    if options.kv_transfer is not None:
        for connector in (options.kv_transfer, *options.kv_transfer.connectors):
            KVConnectorFactory.describe(connector)
    model = read_model_config(options.model)
    model.max_model_len(options.max_model_len)
    model.check_tensor_parallel(options.tensor_parallel_size)
    if address.port:
        check_listenable(address)


def api_host(given: str | None, side_channel: SideChannelConfig) -> str:
    """Return the address on which the API listens.

    An operator who opens the side channel to other machines wants the API reachable from the same
    machines too.
    """
    if given is not None or side_channel.is_local:
        return given or "localhost"
    return "0.0.0.0" if is_wildcard(side_channel.bind_host) else side_channel.bind_host


def read_api_keys(path: str | None) -> ApiKeys:
    """Return the keys in the file of `--api-key-file`; ConfigError if the file holds none."""
    if path is None:
        return ApiKeys()
    text = read_private_file(path, "--api-key-file names").decode("utf-8", "surrogateescape")
    keys = ApiKeys.of(read_key_file(text))
    if not keys:
        raise ConfigError(f"--api-key-file names {path}, which holds no key; write one into it")
    return keys


def open_to_all(host: str, api_keys: ApiKeys) -> list[str]:
    """Return a warning if other machines can reach the API and no client needs a key."""
    if api_keys or is_loopback(host):
        return []
    return [
        f"the API listens on {host} without API keys, so every machine that can reach it can use "
        "it; give --api-key-file"
    ]


def _register_with_proxy(arguments: argparse.Namespace, transfer: KVTransferConfig | None) -> None:
    """Take the router and the role from the settings of P2pNcclConnector, unless `--router` names
    routers.
    """
    for connector in transfer.connectors if transfer is not None else ():
        if isinstance(connector.extra, P2pNcclExtraConfig) and not arguments.router:
            url = connector.extra.router_url
            arguments.router = [] if url is None else [url]
            arguments.router_role = role_of(connector).value


class _Registrations:
    """Registers this engine with the routers of `--router`, from listening to the first signal."""

    def __init__(self, arguments: argparse.Namespace, side_channel: SideChannelConfig) -> None:
        """Raise ConfigError if the flags for routers are wrong."""
        self._arguments = arguments
        self._side_channel = side_channel
        self._routers = [check_router_url(url) for url in arguments.router or ()]
        if self._routers and arguments.router_role is None:
            raise ConfigError("--router needs --router-role: prefill or decode")
        self._registrar = Registrar(ClusterSecret.load(os.environ).key) if self._routers else None
        self._running: Registration | None = None

    def listening(self, model_name: str, address: Address) -> None:
        _listening(model_name, address)
        if self._registrar is None:
            return
        host = dialable(address).host
        if not self._side_channel.is_local:
            host = self._side_channel.advertised_host
        url = self._arguments.router_url or f"http://{Address(host, address.port)}"
        instance = parse_instance(Role(self._arguments.router_role), url)
        self._running = Registration(instance, self._routers, self._registrar, DEFAULT_TTL_S)
        # A daemon thread, so that registration never delays the exit: routers notice an engine that
        # no longer renews, and an engine that refuses requests.
        threading.Thread(target=self._running.run, name="kvferry-registration", daemon=True).start()

    def leave(self) -> None:
        """Ask the routers for no more requests, at the beginning of a drain."""
        if self._running is not None:
            self._running.stop()


async def _serve(
    options: EngineOptions,
    kit: ConfiguredTransportKit,
    side_channel: SideChannelConfig,
    address: Address,
    api_keys: ApiKeys,
    registrations: _Registrations,
) -> int:
    """Start and serve an engine; return the exit code.

    The code is 0, or the signal's exit code when a signal arrived before the engine was ready.
    """
    from kvferry.engine.api.context import ApiSettings
    from kvferry.engine.api.serve import StoppedBySignal, serve, stop_signals

    # The core logs its start-up stages at INFO; printing the stages too would show each stage
    # twice.
    on_progress = None if logging.getLogger(__name__).isEnabledFor(logging.INFO) else _show_stage
    with stop_signals() as signals:
        signals.on_first.append(registrations.leave)
        starting = EngineClient.start(
            options, kit, secret=kit.secret, side_channel=side_channel, on_progress=on_progress
        )
        client = await signals.run_unless_stopped(starting)
        if isinstance(client, StoppedBySignal):
            return client.exit_code
        try:
            await serve(
                client,
                options,
                address.host,
                address.port,
                signals=signals,
                settings=ApiSettings(api_keys=api_keys),
                on_listening=registrations.listening,
            )
        finally:
            await client.close()
    return 0


def _show_stage(stage: str) -> None:
    show(f"kvferry: {stage}", stream=sys.stderr)


def _listening(model_name: str, address: Address) -> None:
    """Print the address and a request to try, and announce the address to the parent process."""
    from kvferry.engine.api.serve import announce

    announce(model_name, dialable(address))
    request = {"model": model_name, "prompt": "Hello", "max_tokens": 16, "stream": True}
    show(f"kvferry: try {curl_command(address, request)}")
    announce_address(address, os.environ)
