"""`kvferry serve`: one engine with its API, flags as `vllm serve`. The composition root of an engine."""

import argparse
import logging
import os
import sys
from collections.abc import Mapping

from kvferry.cli.announce import announce_address
from kvferry.cli.parser import Parser
from kvferry.cli.planes import Kit
from kvferry.cli.sizes import parse_size
from kvferry.config import (
    ClusterSecret,
    KVTransferConfig,
    SideChannelConfig,
    find_checkpoint,
    kv_cache_layout_from_environment,
)
from kvferry.engine.api.serve import announce, run_on_fast_loop
from kvferry.engine.api.serve import serve as serve_api
from kvferry.engine.client import EngineClient
from kvferry.engine.options import EngineOptions
from kvferry.errors import ConfigError
from kvferry.types import Address

__all__ = ["DESCRIPTION", "EXAMPLES", "add_arguments", "api_host", "engine_options", "run"]

DESCRIPTION = "Serve one model over the OpenAI API with the embedded engine. Flags are those of `vllm serve`."
EXAMPLES = """\
  kvferry serve /models/tiny --port 8100
  VLLM_NIXL_SIDE_CHANNEL_PORT=5601 kvferry serve /models/tiny --port 8200 \\
      --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'
  kvferry serve /models/tiny --kv-transfer-config.kv_connector NixlConnector --kv-transfer-config.kv_role kv_both \\
      --kv-transfer-config.kv_connector_extra_config.backends+ LIBFABRIC"""

DTYPES = ("auto", "float32", "bfloat16", "float16")
LOG_LEVELS = ("debug", "info", "warning", "error")
DEFAULTS = {name: field.default for name, field in EngineOptions.__dataclass_fields__.items()}


def add_arguments(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder of a Hugging Face checkpoint, or owner/name in the Hugging Face cache")
    parser.add_argument("--host", help="address to listen on (default: localhost; every interface when the side channel is for others)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0: any free one (default: %(default)s)")
    parser.add_argument("--served-model-name", metavar="NAME", default="", help="what clients call the model (default: MODEL)")
    _add_model_arguments(parser)
    _add_cache_arguments(parser)
    parser.add_argument("--log-level", choices=LOG_LEVELS, default="info", help="(default: %(default)s)")


def _add_model_arguments(parser: Parser) -> None:
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of weights and activations (default: %(default)s)")
    parser.add_argument("--compute-dtype", choices=(*DTYPES, "float64"), default="auto", help="of arithmetic (default: %(default)s)")
    parser.add_argument("--device", default=DEFAULTS["device"], help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--num-threads", type=int, default=DEFAULTS["num_threads"], help="torch threads per rank (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=DEFAULTS["seed"], help="of sampling without a seed (default: %(default)s)")
    parser.add_argument(
        "--max-model-len", type=parse_size, default=DEFAULTS["max_model_len"], help="tokens (default: the checkpoint's limit)"
    )
    parser.add_argument(
        "--tensor-parallel-size", "-tp", type=int, default=DEFAULTS["tensor_parallel_size"], help="ranks, one process each (default: 1)"
    )
    parser.add_argument("--max-num-seqs", type=int, default=DEFAULTS["max_num_seqs"], help="sequences per step (default: %(default)s)")
    parser.add_argument(
        "--max-num-batched-tokens", type=parse_size, default=DEFAULTS["max_num_batched_tokens"], help="per step (default: %(default)s)"
    )
    parser.add_argument("--enable-chunked-prefill", action=argparse.BooleanOptionalAction, default=DEFAULTS["enable_chunked_prefill"])
    parser.add_argument("--enforce-eager", action="store_true", help="accepted; this engine is always eager")


def _add_cache_arguments(parser: Parser) -> None:
    parser.add_argument("--kv-cache-dtype", choices=DTYPES, default="auto", help="of the KV cache (default: %(default)s, as --dtype)")
    parser.add_argument("--block-size", type=int, default=DEFAULTS["block_size"], help="tokens per block (default: %(default)s)")
    parser.add_argument("--num-gpu-blocks-override", type=int, default=0, metavar="N", help="blocks in the cache (default: what fits)")
    parser.add_argument(
        "--kv-cache-memory-bytes", type=parse_size, default=DEFAULTS["kv_cache_memory_bytes"], help="cache per rank (default: %(default)s)"
    )
    parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=DEFAULTS["enable_prefix_caching"])
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9, help="accepted; --kv-cache-memory-bytes decides here")


def run(arguments: argparse.Namespace) -> int:
    logging.basicConfig(level=arguments.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    options = engine_options(arguments, os.environ)
    side_channel = SideChannelConfig.from_environment(os.environ)
    secret = None
    if options.kv_transfer is not None:
        secret = ClusterSecret.load(os.environ)
        secret.check_reach(side_channel)
    kit = Kit.from_settings(side_channel, secret, options.kv_transfer, os.environ)
    run_on_fast_loop(_serve(options, kit, side_channel, Address(api_host(arguments.host, side_channel), arguments.port)))
    return 0


def engine_options(arguments: argparse.Namespace, environ: Mapping[str, str]) -> EngineOptions:
    """The options that parsed arguments ask for. ConfigError names what is wrong."""
    transfer = None if arguments.kv_transfer_config is None else KVTransferConfig.from_mapping(arguments.kv_transfer_config)
    if transfer is not None and transfer.kv_buffer_device == "cuda" and arguments.device == "cpu":
        raise ConfigError("kv_buffer_device cannot be cuda with --device cpu; remove it, or set it to cpu")
    return EngineOptions(
        model=find_checkpoint(arguments.model, environ),
        served_model_name=arguments.served_model_name or arguments.model,
        dtype=arguments.dtype,
        kv_cache_dtype=arguments.kv_cache_dtype,
        compute_dtype=arguments.compute_dtype,
        device=arguments.device,
        block_size=arguments.block_size,
        num_blocks=arguments.num_gpu_blocks_override,
        kv_cache_memory_bytes=arguments.kv_cache_memory_bytes,
        kv_cache_layout=kv_cache_layout_from_environment(environ),
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        tensor_parallel_size=arguments.tensor_parallel_size,
        enable_prefix_caching=arguments.enable_prefix_caching,
        enable_chunked_prefill=arguments.enable_chunked_prefill,
        num_threads=arguments.num_threads,
        seed=arguments.seed,
        kv_transfer=transfer,
    )


def api_host(given: str | None, side_channel: SideChannelConfig) -> str:
    """Whoever opened the side channel to other machines means the API to be reached from there too, as with vLLM."""
    return given or ("localhost" if side_channel.is_local else "0.0.0.0")


async def _serve(options: EngineOptions, kit: Kit, side_channel: SideChannelConfig, address: Address) -> None:
    # The core logs its stages too; nobody needs to read them twice.
    on_progress = None if logging.getLogger().isEnabledFor(logging.INFO) else _show_stage
    client = await EngineClient.start(options, kit, secret=kit.secret, side_channel=side_channel, on_progress=on_progress)
    try:
        await serve_api(client, options, address.host, address.port, on_listening=_listening)
    finally:
        await client.close()


def _show_stage(stage: str) -> None:
    print(f"kvferry: {stage}", file=sys.stderr, flush=True)


def _listening(model_name: str, address: Address) -> None:
    announce(model_name, address)
    announce_address(address, os.environ)
