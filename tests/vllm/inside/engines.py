"""An engine made of vLLM's real scheduler, block pool and cache tensors, and our connector in both
roles; only the forward pass is made up.

For every token, the made-up forward writes a number that depends on all tokens up to it into that
token's slot of every layer, as a model would write KV. The number also depends on the engine's
weights, which `load_weights` replaces. Before that it reads all earlier slots of
the request and records every wrong one in `wrong_slots`. So a block that was not loaded, was
loaded from the wrong place or was overwritten is noticed the moment attention would use it. A layer
with a state has one such number for all tokens, in the block of the last token.
"""

import json
import os
import pickle
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from vllm.config import KVEventsConfig, KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.parallel_state import (
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO, get_layerwise_info
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.utils import allocate_kv_cache

from kvferry.connectors.decode_bench import DecodeBenchScheduler
from kvferry.connectors.example import ExampleScheduler
from kvferry.connectors.multi.scheduler import MultiScheduler
from kvferry.connectors.multi.worker import MultiWorker
from kvferry.connectors.nixl.push_mode import PushMode
from kvferry.connectors.offloading.scheduler import OffloadingScheduler
from kvferry.vllm.child import VllmChild
from kvferry.worker.worker import TransferWorkerSnapshot

try:
    from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
except ModuleNotFoundError:  # before 0.33, whose function takes no groups
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

    get_global_kv_cache_groups = None

BLOCK = 32
DEADLINE_S = 60.0
QUEUES = ("waiting", "kv_holding_waiting", "deferred_waiting")
"""The scheduler's queues of requests that do not run."""
_MODULUS = 16_777_213
"""The largest prime that a float32 holds exactly, so that slots can be compared for equality."""


def slot_values(tokens: Sequence[int], seed: int) -> list[int]:
    """Return the number of every token's slot: it depends on `seed` and all tokens up to that
    token.
    """
    return list(
        accumulate(
            tokens,
            lambda value, token: (value * 131 + token + 1) % _MODULUS,
            initial=seed % _MODULUS,
        )
    )[1:]


def next_token(tokens: Sequence[int], seed: int = 0) -> int:
    """Return the token that the made-up model generates after these tokens."""
    return 10 + slot_values(tokens, seed)[-1] % 400


def start_parallel_state(directory: Path) -> None:
    """Create vLLM's process groups for this process alone, as a worker process does first."""
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{directory}/rendezvous", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)


@cache
def vllm_config(model: str, name: str, settings: str) -> VllmConfig:
    """Return the config that `vllm serve` would make. `settings` is JSON of the engine's arguments;
    its key `kv` is the transfer configuration.
    """
    arguments = json.loads(settings)
    transfer: dict[str, Any] = {
        "kv_connector": "NixlConnector",
        "kv_connector_module_path": "kvferry.vllm",
        "kv_role": "kv_both",
        "engine_id": name,
    }
    transfer |= arguments.pop("kv", {})
    if (
        transfer["kv_connector"] == "NixlConnector"
        and "KVFERRY_TEST_PULL_WITHOUT_NIXL" in os.environ
    ):
        transfer["kv_connector_extra_config"] = {
            "transports": ["tcp"],
            **transfer.get("kv_connector_extra_config", {}),
        }
    if "kv_events_config" in arguments:
        arguments["kv_events_config"] = KVEventsConfig(**arguments["kv_events_config"])
    is_async, layout = arguments.pop("is_async", False), arguments.pop("layout", "LBHNC")
    arguments.pop("has_drafter", None)
    state_mode, may_sleep = arguments.pop("state_mode", None), arguments.pop("may_sleep", False)
    defaults = {
        "block_size": BLOCK,
        "enforce_eager": True,
        "dtype": "float32",
        "max_model_len": 512,
        "num_gpu_blocks_override": 64,
    }
    config = EngineArgs(
        model=model, kv_transfer_config=KVTransferConfig(**transfer), **(defaults | arguments)
    ).create_engine_config()
    # vLLM's CPU platform disables async scheduling, but the scheduler works with it on any
    # platform.
    config.scheduler_config.async_scheduling = is_async
    config.cache_config.kv_cache_layout = layout
    # vLLM's CPU platform has no sleep mode.
    config.model_config.enable_sleep_mode = may_sleep
    if state_mode is not None:
        # As vLLM sets them for a hybrid model.
        config.cache_config.mamba_cache_mode = state_mode
        config.cache_config.mamba_block_size = (
            config.cache_config.block_size
            if state_mode == "align"
            else config.model_config.max_model_len
        )
    return config


@dataclass
class Answer:
    """What the engine has sent to the client of one request so far."""

    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    params: dict[str, Any] | None = None


_Layer = tuple[str, int, KVCacheSpec]
"""The name of a layer, its KV cache group and its spec."""


@dataclass
class _Work:
    """One request's share of a step, as the scheduler planned it: `num_tokens` tokens from `start`
    on, in these blocks.
    """

    request_id: str
    start: int
    num_tokens: int
    blocks: tuple[list[int], ...]
    """The blocks of each KV cache group."""
    is_anew: bool
    tokens: list[int]
    num_kept: int
    """How many tokens the request has, of which some may still be computed."""


class Engine:
    """Steps as vLLM's engine core does; with `is_async`, one step ahead of its worker; with
    `has_drafter`, the last layer is a drafter's.

    `answers`: what clients received; `loaded_tokens`: tokens that requests loaded from a peer;
    `moved_bytes`: bytes read for them so far; `computed`: how many tokens the worker has computed
    for each request.
    """

    def __init__(
        self, model: Path, name: str, kind: str = "full attention", **settings: Any
    ) -> None:
        config = vllm_config(str(model), name, json.dumps(settings, sort_keys=True))
        self.name = name
        self.answers: dict[str, Answer] = {}
        self.wrong_slots: list[tuple[str, int]] = []
        self.loaded_tokens = 0
        self.moved_bytes = 0
        self.computed: dict[str, int] = {}
        self._config = config
        self._has_drafter = settings.get("has_drafter", False)
        self._sequences: dict[str, list[int]] = {}
        self._seeds: dict[str, int] = {}
        self._queue: deque[tuple[Any, list[_Work]]] = deque()
        self._depth = config.max_concurrent_batches
        self._model = torch.nn.Linear(8, 8, bias=False)
        self.load_weights(0)
        # The list in which vLLM's loader enters each module of the model of a process.
        LAYERWISE_INFO.clear()
        get_layerwise_info(self._model)
        with set_current_vllm_config(config):
            kv_cache_config = cache_config(config, kind)
            self._block_size, hash_size = resolve_kv_cache_block_sizes(kv_cache_config, config)
            self._layers = [
                (name, index, group.kv_cache_spec)
                for index, group in enumerate(kv_cache_config.kv_cache_groups)
                for name in group.layer_names
            ]
            self.tensors = allocate_kv_cache(
                kv_cache_config,
                torch.device("cpu"),
                config.cache_config.get_resolved_kv_cache_layout(),
            )
            self.worker = KVConnectorFactory.create_connector(
                config, KVConnectorRole.WORKER, kv_cache_config
            )
            self.worker.register_kv_caches(self.tensors)
            self.scheduler = config.scheduler_config.get_scheduler_cls()(
                vllm_config=config,
                kv_cache_config=generate_scheduler_kv_cache_config([kv_cache_config]),
                structured_output_manager=StructuredOutputManager(config),
                block_size=self._block_size,
                hash_block_size=hash_size,
                log_stats=True,
            )
        self.aggregator = KVOutputAggregator.from_connector(self.scheduler.connector, 1)
        handshake = pickle.loads(pickle.dumps(self.worker.get_handshake_metadata()))
        if handshake is not None:
            self.scheduler.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): handshake})
        hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(hash_size, hash_function)

    # -- calls of a client --

    def load_weights(self, seed: int) -> None:
        """Replace the weights, as an update of a running engine does; `seed` adds to that of every
        request.
        """
        self._weights_seed = seed
        self._model.weight.data.copy_(torch.arange(64).view(8, 8) + seed)

    def reorder_weights(self, seed: int) -> None:
        """As `load_weights`, but the new weights are the old elements in other places."""
        self._weights_seed = seed
        self._model.weight.data.copy_(self._model.weight.data.flip(1))

    def reset(self) -> bool:
        """Reset the caches as after an update of the weights."""
        return bool(self.scheduler.reset_prefix_cache(reset_connector=True))

    def add(
        self, request_id: str, tokens: Sequence[int] | None, params: Any = None, **more: Any
    ) -> Request:
        request = self.request(request_id, tokens, params, **more)
        self.admit(request)
        return request

    def request(
        self,
        request_id: str,
        tokens: Sequence[int] | None,
        params: Any = None,
        *,
        max_tokens: int = 4,
        seed: int = 0,
        **more: Any,
    ) -> Request:
        """Make a request. `seed` stands for everything that gives the same tokens another KV (salt,
        LoRA, embeddings); `more` are further arguments of the request.
        """
        stop = more.pop("stop_token_ids", None)
        skips_cache = more.pop("skip_reading_prefix_cache", None)
        sampling = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            stop_token_ids=stop,
            extra_args={"kv_transfer_params": params},
        )
        sampling.skip_reading_prefix_cache = skips_cache
        request = Request(
            request_id,
            None if tokens is None else list(tokens),
            sampling,
            None,
            block_hasher=self._hasher,
            **more,
        )
        self.answers[request_id] = Answer()
        self._seeds[request_id] = seed
        return request

    def admit(self, request: Request) -> None:
        self.scheduler.add_request(request)
        if request.abort_immediately:
            self.abort(request.request_id)

    def abort(self, *request_ids: str) -> None:
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
        for request_id in request_ids:
            self.answers[request_id].finish = self.answers[request_id].finish or "abort"

    def prefill(self, request_id: str, tokens: Sequence[int], **more: Any) -> dict[str, Any]:
        """Compute a prompt for a peer and return the transfer parameters as a router's JSON has
        them.
        """
        self.add(request_id, tokens, {"do_remote_decode": True}, **{"max_tokens": 1, **more})
        run_until(lambda: self.answers[request_id].finish is not None, self)
        params = self.answers[request_id].params
        assert params is not None
        return params

    # -- the engine core's step --

    def step(self) -> None:
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self._queue.append((output, self._work_of(output)))
            if len(self._queue) < self._depth:
                return
        if self._queue:
            output, work = self._queue.popleft()
            self._take(self.scheduler.update_from_output(output, self._execute(output, work)))

    def preempt(self, request_id: str) -> None:
        """Preempt a request as the scheduler does with the last running one when it has no free
        block.
        """
        request = self.scheduler.requests[request_id]
        self.scheduler.running.remove(request)
        # vLLM has no public method for this.
        self.scheduler._preempt_request(  # noqa: SLF001
            request, time.monotonic(), drop_stale_output=True
        )

    def _work_of(self, output: Any) -> list[_Work]:
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        resumed = set(starts) | set(output.scheduled_cached_reqs.resumed_req_ids)
        starts |= dict(
            zip(
                output.scheduled_cached_reqs.req_ids,
                output.scheduled_cached_reqs.num_computed_tokens,
                strict=True,
            )
        )
        cached = output.scheduled_cached_reqs
        outputs = dict(zip(cached.req_ids, cached.num_output_tokens, strict=True))
        work = []
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            blocks = self.scheduler.kv_cache_manager.get_block_ids(request_id)
            request = self.scheduler.requests[request_id]
            tokens = list(request.all_token_ids)
            work.append(
                _Work(
                    request_id,
                    starts[request_id],
                    num_tokens,
                    blocks,
                    request_id in resumed,
                    tokens,
                    request.num_prompt_tokens + outputs[request_id]
                    if request_id in outputs
                    else len(tokens),
                )
            )
        return work

    def _execute(self, output: Any, work: list[_Work]) -> ModelRunnerOutput:
        """Run a worker's step, in the order of vLLM's model runner."""
        self.worker.handle_preemptions(output.kv_connector_metadata)
        self.worker.bind_connector_metadata(
            pickle.loads(pickle.dumps(output.kv_connector_metadata))
        )
        if output.has_sync_kv_loads:
            self.worker.start_load_kv(None)
        drafts = self._has_drafter and bool(work)
        own = len(self._layers) - drafts
        values = [self._values(part) for part in work]
        self._forward(self._layers[:own], work, values)
        sampled = [self._sample(part) for part in work]
        if not output.has_sync_kv_loads:
            self.worker.start_load_kv(None)
        if not drafts:
            self.worker.wait_for_save()
        results = self.worker.get_transfer_results(output.finished_req_ids)
        news = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=self.worker.get_block_ids_with_load_errors(),
            kv_connector_stats=self.worker.get_kv_connector_stats(),
            kv_cache_events=self.worker.get_kv_connector_kv_cache_events(),
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )
        if drafts:
            self._forward(self._layers[own:], work, values)
            self.worker.wait_for_save()
        self.worker.clear_connector_metadata()
        ids = [part.request_id for part in work]
        result = ModelRunnerOutput(
            ids, {name: index for index, name in enumerate(ids)}, sampled, kv_connector_output=news
        )
        whole = self.aggregator.aggregate([pickle.loads(pickle.dumps(result))])
        assert whole is not None
        return whole

    def _values(self, work: _Work) -> torch.Tensor:
        """Return the numbers of the tokens that are in the cache after the step."""
        if work.is_anew:
            self._sequences[work.request_id] = list(work.tokens)
        tokens = self._sequences[work.request_id]
        # vLLM has dropped what was generated from a load that failed.
        del tokens[work.num_kept :]
        end = self.computed[work.request_id] = work.start + work.num_tokens
        return torch.tensor(slot_values(tokens, self._seed(work))[:end], dtype=torch.float32)

    def _seed(self, work: _Work) -> int:
        return self._seeds[work.request_id] + self._weights_seed

    def _forward(self, layers: list[_Layer], work: list[_Work], values: list[torch.Tensor]) -> None:
        for name, _, _ in layers if work else ():
            self.worker.wait_for_layer_load(name)
        for part, numbers in zip(work, values, strict=True):
            for name, group, spec in layers:
                if isinstance(spec, MambaSpec):
                    self._compute_state(self.tensors[name], spec, numbers, part, group)
                    continue
                self._compute_layer(
                    self.tensors[name],
                    spec.block_size,
                    numbers,
                    first_visible_token(spec, part.start),
                    part,
                    part.blocks[group],
                )
        for name, _, _ in layers if work else ():
            self.worker.save_kv_layer(name, self.tensors[name], None)

    def _sample(self, work: _Work) -> list[int]:
        tokens = self._sequences[work.request_id]
        if self.computed[work.request_id] < len(tokens):
            return []
        tokens.append(next_token(tokens, self._seed(work)))
        return [tokens[-1]]

    def _compute_layer(
        self,
        tensor: torch.Tensor,
        size: int,
        values: torch.Tensor,
        seen_from: int,
        work: _Work,
        blocks: list[int],
    ) -> None:
        for index in range(seen_from // size, -(-len(values) // size)):
            first, block = index * size, blocks[index]
            begin, known = (
                min(max(seen_from - first, 0), size),
                min(max(work.start - first, 0), size),
            )
            if not bool(
                (
                    tensor[block, :, begin:known, :] == values[first + begin : first + known, None]
                ).all()
            ):
                self.wrong_slots.append((work.request_id, index))
            fresh = values[first + known : first + size, None]
            tensor[block, :, known : known + len(fresh), :] = fresh

    def _compute_state(
        self, pages: torch.Tensor, spec: MambaSpec, values: torch.Tensor, work: _Work, group: int
    ) -> None:
        """Check the state that the step continues, and write the state after the step. Every
        element of a state has another number.
        """
        blocks = work.blocks[group]
        states = pages[:, 0, 0, : spec.real_page_size_bytes].view(torch.float32)
        offsets = torch.arange(states.shape[1])
        if work.start:
            block = blocks[(work.start - 1) // spec.block_size]
            if not torch.equal(states[block], (values[work.start - 1] + offsets) % _MODULUS):
                self.wrong_slots.append((work.request_id, (work.start - 1) // spec.block_size))
        block = blocks[(len(values) - 1) // spec.block_size]
        states[block] = (values[-1] + offsets) % _MODULUS

    def _take(self, outputs: dict[int, Any]) -> None:
        for stats in (
            client.scheduler_stats
            for client in outputs.values()
            if client.scheduler_stats is not None
        ):
            if stats.connector_prefix_cache_stats is not None:
                self.loaded_tokens += stats.connector_prefix_cache_stats.hits
            told = stats.kv_connector_stats or {}
            # A MultiConnector reports the stats of each child.
            for part in (told, *(row["data"] for row in told.get("children", {}).values())):
                self.moved_bytes += sum(row["bytes"] for row in part.get("transports", {}).values())
        for output in (one for client in outputs.values() for one in client.outputs):
            answer = self.answers[output.request_id]
            answer.tokens += output.new_token_ids
            if output.finish_reason is not None:
                answer.finish = str(output.finish_reason)
            if output.kv_transfer_params is not None:
                answer.params = json.loads(json.dumps(output.kv_transfer_params))

    # -- what the engine still holds --

    @property
    def transfer_worker(self) -> TransferWorkerSnapshot:
        # Only tests read this private state.
        snapshot: TransferWorkerSnapshot = _own_side(self.worker.worker_side).snapshot()
        return snapshot

    @property
    def is_loading(self) -> bool:
        """Whether a request waits for KV from a peer."""
        return any(
            request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            for request in self.scheduler.requests.values()
        )

    def remains(self) -> dict[str, Any]:
        """Return by name everything that must be gone after all requests have ended; empty if all
        of it is.
        """
        scheduler = self.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        held = {
            "requests": list(scheduler.requests),
            "running": list(scheduler.running),
            "waiting": [request for name in QUEUES for request in getattr(scheduler, name, ())],
            "arrived": [
                *scheduler.finished_recving_kv_req_ids,
                *scheduler.failed_recving_kv_req_ids,
            ],
            "deferred frees": list(scheduler.deferred_frees),
            "in flight": list(self._queue),
            "used blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            "block tables": [
                m.req_to_blocks
                for m in scheduler.kv_cache_manager.coordinator.single_type_managers
                if m.req_to_blocks
            ],
            "partly reported": self.aggregator._recv_remaining_count  # noqa: SLF001
            | self.aggregator._send_remaining_count,  # noqa: SLF001
            "shared requests": getattr(scheduler.connector.scheduler_side, "num_requests", 0),
            "shared transfers": getattr(self.worker.worker_side, "num_transfers", 0),
        }
        own = _own_side(scheduler.connector.scheduler_side)
        if isinstance(own, ExampleScheduler):
            held |= {"prompts": own._prompts, "unconfirmed": own._unconfirmed}  # noqa: SLF001
        elif isinstance(own, DecodeBenchScheduler):
            held |= {"fills": [*own._next.blocks[0]]}  # noqa: SLF001
        elif isinstance(own, OffloadingScheduler):
            held |= self._held_for_tiers(own)
        else:
            held |= self._held_for_peers(own)
        return {name: value for name, value in held.items() if value}

    def _held_for_peers(self, half: Any) -> dict[str, Any]:
        mode = half._mode  # noqa: SLF001
        pushes = isinstance(mode, PushMode)
        return {
            "offers": dict(half._loads._offers),  # noqa: SLF001
            "loads": set(half._loads._loading),  # noqa: SLF001
            "commands": list(half._context.commands),  # noqa: SLF001
            "leases": self.transfer_worker.leases,
            "transfers": self.transfer_worker.transfers,
            "reads": self.transfer_worker.reads,
            "registrations": self.transfer_worker.registrations,
            "published": mode._published if pushes else {},  # noqa: SLF001
            "streams": (len(mode._streams) if pushes else 0)  # noqa: SLF001
            + len(self.scheduler.connector._prefills),  # noqa: SLF001
        }

    def _held_for_tiers(self, half: OffloadingScheduler) -> dict[str, Any]:
        loads = half._loads  # noqa: SLF001
        assert loads._lookup is not None  # noqa: SLF001
        thread = _own_side(self.worker.worker_side)._thread  # noqa: SLF001
        return {
            "tracked": dict(half._tracked),  # noqa: SLF001
            "failed": dict(loads._missing),  # noqa: SLF001
            "commands": list(half._commands),  # noqa: SLF001
            "queries": dict(loads._lookup._queries),  # noqa: SLF001
            "jobs": thread.snapshot().has_work,
            "streams": len(self.scheduler.connector._prefills),  # noqa: SLF001
        }

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()


def _own_side(side: Any) -> Any:
    """kvferry's side of a connector, alone or the first one in a MultiConnector."""
    if not isinstance(side, MultiScheduler | MultiWorker):
        return side
    found = [child.side for child in side.children]
    return next((child for child in found if not isinstance(child, VllmChild)), side)


def run_until(condition: Callable[[], bool], *engines: Engine) -> None:
    since = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - since
        assert waited_s < DEADLINE_S, {
            engine.name: (engine.remains(), engine.answers) for engine in engines
        }
        for engine in engines:
            engine.step()
        # A long wait, for example for the end of a lease, steps less often.
        time.sleep(0.0005 if waited_s < 0.1 else 0.005)


def first_visible_token(spec: KVCacheSpec, position: int) -> int:
    """Return the first token that the token at `position` attends to."""
    if isinstance(spec, SlidingWindowSpec):
        return max(0, position - int(spec.sliding_window) + 1)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return position // int(spec.attention_chunk_size) * int(spec.attention_chunk_size)
    return 0


def layer_specs(config: VllmConfig, kind: str) -> dict[str, KVCacheSpec]:
    """Return the KV cache specs of the attention layers of such a model."""
    model, names = (
        config.model_config,
        [
            f"model.layers.{i}.self_attn.attn"
            for i in range(config.model_config.get_total_num_hidden_layers())
        ],
    )
    shape: dict[str, Any] = {"block_size": config.cache_config.block_size, "dtype": model.dtype}
    full = FullAttentionSpec(
        **shape,
        num_kv_heads=model.get_num_kv_heads(config.parallel_config),
        head_size=model.get_head_size(),
    )
    match kind:
        case "full attention":
            return dict.fromkeys(names, full)
        case "MLA":
            return dict.fromkeys(names, MLAAttentionSpec(**shape, num_kv_heads=1, head_size=576))
        case "a window kept whole":
            return {
                name: replace(full, sliding_window=None if index % 2 else 64)
                for index, name in enumerate(names)
            }
        case "windows beside full attention":
            window = SlidingWindowSpec(
                **shape, num_kv_heads=full.num_kv_heads, head_size=full.head_size, sliding_window=48
            )
            return {name: full if index % 2 else window for index, name in enumerate(names)}
        case "chunks beside full attention":
            chunk = ChunkedLocalAttentionSpec(
                **shape,
                num_kv_heads=full.num_kv_heads,
                head_size=full.head_size,
                attention_chunk_size=64,
            )
            return {name: full if index % 2 else chunk for index, name in enumerate(names)}
        case "states beside full attention":
            heads, width, rows = 4, 16, 3
            conv = heads * width + 2 * 2 * width
            state = MambaSpec(
                block_size=config.cache_config.mamba_block_size or 0,
                shapes=(
                    (conv, rows) if is_conv_state_dim_first() else (rows, conv),
                    (heads, width, width),
                ),
                dtypes=(torch.float32, torch.float32),
                page_size_padded=full.page_size_bytes,
                mamba_type=MambaAttentionBackendEnum.MAMBA2,
                mamba_cache_mode=config.cache_config.mamba_cache_mode,
            )
            return {name: full if index % 2 else state for index, name in enumerate(names)}
        case "layers of two sizes":
            return {
                name: replace(
                    full, head_size=64 if index % 2 else 32, head_size_v=64 if index % 2 else 32
                )
                for index, name in enumerate(names)
            }
        case _:
            return dict.fromkeys(names, replace(full, page_size_padded=full.page_size_bytes + 4096))


def cache_config(config: VllmConfig, kind: str) -> KVCacheConfig:
    """Return the cache config that vLLM's engine core makes for those layers."""
    specs = [layer_specs(config, kind)]
    groups = (
        [] if get_global_kv_cache_groups is None else [get_global_kv_cache_groups(config, specs)]
    )
    (kv_cache_config,) = get_kv_cache_configs(config, specs, [1 << 30], *groups)
    kv_cache_config.kv_cache_layout = config.cache_config.kv_cache_layout
    config.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
    return kv_cache_config
