"""`kvferry bench vllm-handover --device cuda` measures the handover in real vLLM on one GPU.

kvferry over each transport, vLLM's own connector as shipped, and vLLM's own with the one UCX
setting that matters on a single node have a P and a D each. All are alive all the time, and all but
one pair are paused (SIGSTOP). The pairs take turns in short rounds; then each pair serves many
requests, several at a time. docs/benchmarks.md gives the reasons.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvferry.bench.vllm.client import PromptMaker, prefill, read_transfers, time_to_first_token_s
from kvferry.bench.vllm.gpu_report import AtOnce, GpuSamples, Measured, make_rows, milliseconds
from kvferry.bench.vllm.servers import (
    ROLES,
    ServerPair,
    VllmServer,
    launch_servers,
    model_directory,
    print_progress,
    wait_healthy,
)
from kvferry.cli.cluster.vllm_servers import free_ports
from kvferry.errors import KVFerryError

_OURS = {
    "kv_connector": "NixlConnector",
    "kv_connector_module_path": "kvferry.vllm",
    "kv_role": "kv_both",
}
_STOCK = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


@dataclass(frozen=True, slots=True)
class Contender:
    """The configuration of one connector; its servers differ from the others in nothing else."""

    transfer: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)


CONTENDERS = {
    "kvferry cuda_ipc": Contender(
        {**_OURS, "kv_connector_extra_config": {"transports": ["cuda_ipc"]}}
    ),
    "kvferry nixl": Contender({**_OURS, "kv_connector_extra_config": {"transports": ["nixl"]}}),
    "stock": Contender(_STOCK),
    # By default UCX emulates a read of another process's GPU memory through the host.
    "stock tuned": Contender(_STOCK, {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "y"}),
}
SAMPLES_PER_ROUND = 2
SETTLE_S = 1.0
WARM_UPS, WARM_UP_TOKENS = 2, 128
FIRST_REQUESTS = 3
"""How many requests of a pair that has just started are reported one by one."""
NUM_AT_ONCE, AT_ONCE_REQUESTS, AT_ONCE_TOKENS = 8, 32, 4000
SEED = 1
KV_BYTES = 8 << 30
MARGIN_TOKENS = 64
FLAGS = (
    *("--dtype", "bfloat16", "--block-size", "16", "--attention-backend", "FLASH_ATTN"),
    *("--load-format", "dummy", "--kv-cache-memory-bytes", str(KV_BYTES)),
    *("--gpu-memory-utilization", "0.1", "--max-num-batched-tokens", "8192"),
)
"""The size of the cache is given, so vLLM does not need most of the GPU to be free."""
VARIABLES = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}


def measure_on_gpu(
    python: Path, model: Path | None, lengths: Sequence[int], num_samples: int
) -> dict[str, Any]:
    """Run the benchmark and return its result, for JSON and for `gpu_report`.

    A contender whose request fails is not asked again; the result names the error.
    """
    measured = {name: Measured({length: GpuSamples() for length in lengths}) for name in CONTENDERS}
    prompts = PromptMaker(SEED)
    longest = max(*lengths, AT_ONCE_TOKENS)
    with gpu_model_directory(model) as folder, _start_all(python, folder, longest) as pairs:
        for name, pair in pairs.items():
            print_progress(f"the first requests of {name}")
            with _resumed(pair, measured[name]):
                measured[name].first_contact = [
                    _first_contact(pair, prompts.make(AT_ONCE_TOKENS))
                    for _ in range(FIRST_REQUESTS)
                ]
        for number, count in enumerate(_rounds(num_samples), start=1):
            for name, pair in _without_failure(pairs, measured):
                print_progress(f"round {number}: {count} of each length with {name}")
                with _resumed(pair, measured[name]):
                    _measure_round(pair, prompts, count, measured[name], is_first=number == 1)
                shown = [
                    f"{length} tokens {milliseconds(of.handover_s)} ms"
                    for length, of in measured[name].samples.items()
                ]
                print_progress(f"  so far: {', '.join(shown)}")
        for name, pair in _without_failure(pairs, measured):
            print_progress(
                f"{AT_ONCE_REQUESTS} prompts of {AT_ONCE_TOKENS} tokens, {NUM_AT_ONCE} at a time, "
                f"with {name}"
            )
            with _resumed(pair, measured[name]):
                measured[name].at_once = _measure_at_once(pair, prompts)
    return make_rows(measured, NUM_AT_ONCE, AT_ONCE_TOKENS) | {"samples": num_samples}


# -- servers --


@contextmanager
def _start_all(python: Path, model: Path, longest: int) -> Iterator[dict[str, ServerPair]]:
    """Start all servers at the same time; yield when all are healthy and paused."""
    print_progress(f"starting {2 * len(CONTENDERS)} vLLM servers on the GPU (a minute or two)")
    flags = (*FLAGS, "--max-model-len", str(longest + MARGIN_TOKENS))
    ports = iter(free_ports(4 * len(CONTENDERS)))
    with ExitStack() as stack:
        caches = Path(stack.enter_context(TemporaryDirectory(prefix="kvferry-bench-triton-")))
        pairs = {}
        for name, contender in CONTENDERS.items():
            servers = [
                VllmServer(
                    name=f"{name}, {role}",
                    model=model,
                    port=next(ports),
                    side_channel_port=next(ports),
                    transfer=contender.transfer,
                    flags=flags,
                    environment={
                        **VARIABLES,
                        **contender.environment,
                        # vLLM compiles kernels for its first request. With a shared cache, the
                        # first contender would do so for all others.
                        "TRITON_CACHE_DIR": str(caches / f"{name} {role}"),
                    },
                )
                for role in ROLES
            ]
            pairs[name] = ServerPair(stack.enter_context(launch_servers(servers, python)))
        for pair in pairs.values():
            wait_healthy(pair.servers)
        for pair in pairs.values():
            pair.servers.pause()
        yield pairs


@contextmanager
def gpu_model_directory(given: Path | None = None, intermediate_size: int = 1024) -> Iterator[Path]:
    """Yield the operator's model, or one with the KV of Llama-8B; weights are random.

    By default the feed-forward part is narrow, so that the weights of eight servers fit on one GPU.
    A handover and its floor compute one step each, so the width changes both alike.
    """
    if given is not None:
        with model_directory(given) as found:
            yield found
        return
    # Imported here because the modules import torch, which takes a second.
    from kvferry.engine.make_model.weights import FAMILIES, SIZES, make_config
    from kvferry.engine.make_model.writer import make_model

    size = replace(
        SIZES["tiny"],
        num_layers=32,
        hidden_size=4096,
        intermediate_size=intermediate_size,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=1 << 17,
    )
    with TemporaryDirectory(prefix="kvferry-bench-") as directory:
        folder = Path(directory) / "model"
        make_model(folder, family="llama")
        (folder / "config.json").write_text(json.dumps(make_config(FAMILIES["llama"], size)))
        (folder / "model.safetensors").unlink()
        yield folder


def _without_failure(
    pairs: Mapping[str, ServerPair], measured: Mapping[str, Measured]
) -> list[tuple[str, ServerPair]]:
    return [(name, pair) for name, pair in pairs.items() if measured[name].failure is None]


@contextmanager
def _resumed(pair: ServerPair, measured: Measured) -> Iterator[None]:
    """Let the pair run while the block measures it; a failure ends the block and is recorded."""
    pair.servers.resume()
    time.sleep(SETTLE_S)
    try:
        yield
    except KVFerryError as error:
        measured.failure = str(error)
        print_progress(f"  failed: {error}")
    finally:
        pair.servers.pause()


# -- measuring --


def _rounds(samples: int) -> list[int]:
    whole, rest = divmod(samples, SAMPLES_PER_ROUND)
    return [SAMPLES_PER_ROUND] * whole + ([rest] if rest else [])


def _measure_round(
    pair: ServerPair, prompts: PromptMaker, count: int, into: Measured, *, is_first: bool
) -> None:
    # In the first round, each length is sent once without counting: kernels are compiled for it.
    lengths = [WARM_UP_TOKENS] * WARM_UPS + (list(into.samples) if is_first else [])
    for length in lengths:
        _measure(pair, prompts.make(length), GpuSamples())
    for length, samples in into.samples.items():
        for _ in range(count):
            _measure(pair, prompts.make(length), samples)


def _measure(pair: ServerPair, prompt: Sequence[int], into: GpuSamples) -> None:
    """Send a prompt through P and D, then again to D alone."""
    before = read_transfers(pair.decode)
    into.handover_s.append(_hand_over(pair, prompt))
    into.floor_s.append(time_to_first_token_s(pair.decode, prompt))
    # vLLM reports a transfer with the next step, so its figures are available by now.
    after = read_transfers(pair.decode)
    if before is not None and after is not None and after.count > before.count:
        into.transfer_s.append(after.seconds - before.seconds)
        into.descriptors.append(after.descriptors - before.descriptors)


def _measure_at_once(pair: ServerPair, prompts: PromptMaker) -> AtOnce:
    for _ in range(WARM_UPS):
        _hand_over(pair, prompts.make(WARM_UP_TOKENS))
    chosen = [prompts.make(AT_ONCE_TOKENS) for _ in range(AT_ONCE_REQUESTS)]
    since = time.perf_counter()
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        handover_s = list(pool.map(lambda prompt: _hand_over(pair, prompt), chosen))
    return AtOnce(handover_s, time.perf_counter() - since)


def _first_contact(pair: ServerPair, prompt: Sequence[int]) -> tuple[float, float]:
    """Return the seconds of P's answer, and from there to D's first token."""
    since = time.perf_counter()
    params = prefill(pair.prefill, prompt)
    answered = time.perf_counter()
    return answered - since, time_to_first_token_s(pair.decode, prompt, params)


def _hand_over(pair: ServerPair, prompt: Sequence[int]) -> float:
    """Return the seconds from P's answer to D's first token."""
    params = prefill(pair.prefill, prompt)
    return time_to_first_token_s(pair.decode, prompt, params)
