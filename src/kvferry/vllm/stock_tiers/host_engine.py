"""The vLLM engine around a secondary tier: what the tier may store under which name, and when the
engine's weights may have changed.

vLLM passes a tier only the configuration of offloading, which has neither the weights nor the
requests. So the tier finds the engine's objects by the frames of the constructor that builds it.
Runs on the engine's main thread. Reads the weight files at the start.
"""

import inspect
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.platforms import current_platform
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import FullAttentionSpec

import vllm
from kvferry.errors import ConfigError
from kvferry.tiers.keys import Namespace
from kvferry.vllm.factors import model_identity
from kvferry.vllm.weights import find_model

__all__ = ["HostEngine"]

READ_ONLY_CALLS = frozenset(
    {"compute_weight_checksums", "get_model_inspection", "list_loras", "synchronize_device"}
)
"""Remote calls to vLLM's workers that change no weights. Any other call, such as a method of the
trainer's own worker extension, may change them.
"""
CACHE_OPTIONS = (
    "mamba_block_size",
    "mamba_cache_dtype",
    "mamba_cache_mode",
    "mamba_ssm_cache_dtype",
    "replayssm_buffer_len",
    "swa_bounded_replay",
    "use_kda_recoverssm",
    "use_replayssm",
)
"""Options of vLLM's cache that change recurrent states and windows. kvferry's connectors refuse
such caches at start-up, so `model_identity` does not have these options.
"""
CPU_FLAGS = ("amx_tile", "avx512_bf16", "avx512f", "sve")
"""Features of a CPU by which vLLM's CPU attention chooses the arrangement of bytes in a block."""


@dataclass(frozen=True, slots=True)
class HostEngine:
    vllm_config: Any
    kv_cache_config: Any
    scheduler: Any
    core: Any
    """None if the scheduler was built without an engine."""

    @classmethod
    def find(cls) -> "HostEngine":
        """Find the engine that is being constructed around the caller; `ConfigError` if this vLLM
        builds its tiers in another way.
        """
        connector = _find_owner(KVConnectorBase_V1)
        scheduler = _find_owner(SchedulerInterface)
        if connector is None or scheduler is None:
            raise ConfigError(
                f"vLLM {vllm.__version__} builds secondary tiers in a way that kvferry does not "
                "know, so kvferry cannot identify the weights; use vLLM 0.30 to 0.32"
            )
        return cls(
            connector._vllm_config,  # noqa: SLF001  vLLM passes no other way
            connector._kv_cache_config,  # noqa: SLF001
            scheduler,
            _find_owner(EngineCore),
        )

    def check_supported(self) -> None:
        """Raise `ConfigError` if stored objects could be confused with others."""
        algorithm = str(self.vllm_config.cache_config.prefix_caching_hash_algo)
        if algorithm.startswith("xxhash"):
            raise ConfigError(
                f"--prefix-caching-hash-algo {algorithm} is not collision-resistant, and names "
                "chunks differently in every process, so no chunk could be found again; use "
                "sha256_cbor"
            )
        model, load = self.vllm_config.model_config, self.vllm_config.load_config
        name = model.model_weights or model.model
        is_dummy = load.load_format == "dummy"
        if not is_dummy and find_model(name, model.revision, load.download_dir) is None:
            raise ConfigError(
                f"the weights of {name} are not files on this host, so kvferry cannot tell the KV "
                "of one checkpoint from the KV of another; download the model and name its folder"
            )

    def namespace(self, config: Any, row_bytes: int) -> Namespace:
        """Everything that changes the bytes of a chunk. `config` is vLLM's OffloadingConfig."""
        backends = get_current_attn_backends(self.vllm_config)
        identity = model_identity(
            self.vllm_config, ",".join(sorted({backend.get_name() for backend in backends}))
        )
        parallel, options = config.parallel, self.vllm_config.cache_config
        return Namespace(
            {
                "contents": "a chunk of vLLM's OffloadingConnector, all ranks",
                "vllm": vllm.__version__,
                "device": _device(),
                **asdict(identity),
                "settings": dict(sorted(identity.settings.items())),
                "groups": [
                    [group.group_id, group.tokens_per_block, list(group.layer_names)]
                    for group in config.groups
                ],
                "caches": [repr(group.kv_cache_spec) for group in self._groups],
                "cache_options": {
                    name: str(getattr(options, name, None)) for name in CACHE_OPTIONS
                },
                "cache_dtype": config.model.dtype,
                "kv_cache_layout": str(config.kv_cache_layout),
                "canonical_layout": config.canonical_layout,
                "replicated_layout": config.replicated_layout,
                "tokens_per_hash": config.cache.tokens_per_hash,
                "blocks_per_chunk": config.cache.blocks_per_chunk,
                "row_bytes": row_bytes,
                "world_size": parallel.world_size,
                "tp_size": parallel.tp_size,
                "pp_size": parallel.pp_size,
                "pcp_size": parallel.pcp_size,
                "dcp_size": parallel.dcp_size,
                "hash": str(options.prefix_caching_hash_algo),
            }
        )

    @property
    def asks_for_prefixes(self) -> bool:
        """Whether vLLM looks the chunks of a prompt up from the first on."""
        return len(self._groups) == 1 and isinstance(
            self._groups[0].kv_cache_spec, FullAttentionSpec
        )

    @property
    def _groups(self) -> list[Any]:
        return list(self.kv_cache_config.kv_cache_groups)

    def find_request(self, request_id: str) -> Any:
        """vLLM's request; None if the scheduler has no such request."""
        return self.scheduler.requests.get(request_id)

    def are_blocks_free(self) -> bool:
        """Whether no request has blocks: then a reset has emptied vLLM's prefix cache."""
        pool = self.scheduler.kv_cache_manager.block_pool
        # The null block is always in use.
        return bool(pool.get_num_free_blocks() == pool.num_gpu_blocks - 1)

    def has_cached_blocks(self) -> bool:
        """Whether vLLM's prefix cache may hold KV."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return not self.are_blocks_free() or any(
            block.block_hash is not None for block in pool.blocks
        )

    def watch_weights(self, before_change: Callable[[str], None]) -> None:
        """Call `before_change` with the name of every remote call to the engine's workers that may
        change weights. vLLM does not tell connectors, so this wraps the engine's method.
        """
        if self.core is None:
            return
        call = self.core.collective_rpc

        # `wraps` keeps the signature, by which vLLM decodes the arguments of remote calls.
        @wraps(call)
        def collective_rpc(method: Any, *args: Any, **kwargs: Any) -> Any:
            if method not in READ_ONLY_CALLS:
                before_change(str(getattr(method, "__name__", method)))
            return call(method, *args, **kwargs)

        self.core.collective_rpc = collective_rpc


def _find_owner(kind: type) -> Any:
    """The nearest object of this type whose method is calling us."""
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, kind):
            return owner
        frame = frame.f_back
    return None


def _device() -> list[str]:
    """What vLLM chooses its attention kernels by, besides options: the scheduler does not know
    which kernels its workers have chosen.
    """
    if not current_platform.is_cpu():
        return [current_platform.device_name, str(current_platform.get_device_name())]
    words = set(Path("/proc/cpuinfo").read_text().split())
    return ["cpu", platform.machine(), *(flag for flag in CPU_FLAGS if flag in words)]
