"""Connectors that load within the step that computes the rest of a prompt, as vLLM connectors.

vLLM counts the tokens of such a load as computed when it schedules the step. A block that could not
be loaded is reported with the step's result, and vLLM computes it again or fails the request, as
`kv_load_failure_policy` says. So nothing of `RemoteLoads` applies here.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole

from kvferry.connectors import contract
from kvferry.errors import ConfigError
from kvferry.vllm.compatibility import drops_too_few_tokens
from kvferry.vllm.storage import StorageConnector
from kvferry.vllm.translate import BlocksView, null_blocks_as_holes


@dataclass(frozen=True, slots=True)
class StepSlice:
    """An implementation of the contract's `ScheduledSlice`."""

    request_id: str
    start: int
    num_tokens: int
    tables: Callable[[str], tuple[list[int], ...]]

    @property
    def block_ids(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(null_blocks_as_holes(table)) for table in self.tables(self.request_id))


@dataclass(frozen=True, slots=True)
class StepSlices:
    """The part of a step's message that kvferry's connector reads."""

    slices: tuple[StepSlice, ...]


class StepLoadingConnector(StorageConnector):
    """What the connectors of this module have in common."""

    honours_token_range = False

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._layers = {
            layer for group in kv_cache_config.kv_cache_groups for layer in group.layer_names
        }

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._needs.note_admitted(request, num_external_tokens)
        self._inner.update_state_after_alloc(
            self._view(request), BlocksView(blocks), num_external_tokens
        )

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._wrapped(scheduler_output, StepSlices(tuple(self._slices(scheduler_output))))

    def _slices(self, scheduler_output: Any) -> Iterator[StepSlice]:
        counts, tables = scheduler_output.num_scheduled_tokens, self._kv_cache_manager.get_block_ids
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, start in (
            *((new.req_id, new.num_computed_tokens) for new in scheduler_output.scheduled_new_reqs),
            *zip(cached.req_ids, cached.num_computed_tokens, strict=True),
        ):
            yield StepSlice(request_id, start, counts.get(request_id, 0), tables)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if not isinstance(self._inner, contract.SupportsHMA):
            return self.request_finished(request, block_ids[0])
        return super().request_finished_all_groups(request, block_ids)

    # -- worker --

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        # A layer that shares the cache of another layer is in no group.
        if layer_name in self._layers:
            super().save_kv_layer(layer_name, kv_layer, attn_metadata)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._inner.get_block_ids_with_load_errors()


class KVFerryExampleConnector(StepLoadingConnector):
    """Keeps prompts' KV in a shared folder; the connector that docs/writing-a-connector.md
    explains.
    """

    loads_are_optional = True
    inner_name = "ExampleConnector"

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        if drops_too_few_tokens(vllm_config):
            raise ConfigError(
                "vLLM gives wrong tokens if a load within a step fails with async scheduling and "
                "kv_load_failure_policy recompute; use --no-async-scheduling or the policy fail"
            )
        super().__init__(vllm_config, role, kv_cache_config)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        # A CUDA graph of the whole model would not call the connector for each layer.
        return True

    def _accept(self, request: Any) -> None:
        # A LoRA adapter may be replaced while its request runs. The inner connector neither loads
        # nor saves requests that it does not know.
        if request.lora_request is None:
            super()._accept(request)


class KVFerryDecodeBenchConnector(StepLoadingConnector):
    """Fills blocks with made-up KV, to measure decoding."""

    provides_dummy_kv = True
    inner_name = "DecodeBenchConnector"

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        if vllm_config.cache_config.enable_prefix_caching:
            raise ConfigError(
                "DecodeBenchConnector makes up KV, which must not get into the prefix cache; "
                "start vLLM with --no-enable-prefix-caching"
            )
        super().__init__(vllm_config, role, kv_cache_config)


DecodeBenchConnector = KVFerryDecodeBenchConnector
"""The name of vLLM's own connector."""
ExampleConnector = KVFerryExampleConnector
"""The name of vLLM's own connector."""
