"""The two sides of a KV connector: one in the process that schedules, one in each rank.

A connector implements `SchedulerSide` and `WorkerSide`, inherits their defaults, and describes
itself by one `ConnectorDescription`. An engine makes the calls of each step in this order:

    scheduler  on_new_request* -> get_num_new_matched_tokens -> update_state_after_alloc
               -> build_connector_meta
    worker     handle_preemptions -> bind_connector_metadata -> start_load_kv
               -> (per layer: wait_for_layer_load, save_kv_layer) -> wait_for_save
               -> get_transfer_results -> get_kv_connector_stats -> clear_connector_metadata
    scheduler  update_connector_output (aggregated over ranks) -> request_finished_all_groups

Steps without tokens make the same calls. If vLLM drafts tokens, `wait_for_save` follows after the
results, because the drafter's layers run between them. The names, the order and the return values
are those of vLLM 0.33. Calls that vLLM does not have are marked "kvferry only".
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kvferry.connectors.engine_types import (
    ConnectorConfig,
    KVCacheBlocks,
    KVCacheConfig,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    KVTensor,
    Request,
    Step,
)

if TYPE_CHECKING:
    from kvferry.config import KVTransferConfig
    from kvferry.connectors.stats import KVConnectorStats

BlockTables = tuple[list[int], ...]
"""The blocks of a request in each KV-cache group."""


class Side(Protocol):
    """The calls that both sides have."""

    def set_wakeup(self, wake: Callable[[], None]) -> None:
        """kvferry only. Set the callback that asks the engine to step soon and collect results. Any
        thread may call `wake`.
        """
        return None

    def get_kv_connector_stats(self) -> "KVConnectorStats | None":
        """The stats since the last call."""
        return None

    def shutdown(self) -> None:
        """Stop all threads and release all resources. Idempotent."""
        return None


class SchedulerSide(Side, Protocol):
    """A connector in the process that schedules, on the engine's main thread. No call may block."""

    # -- requests --

    def on_new_request(self, request: Request) -> None:
        """A request has entered the engine but is not scheduled yet. Called once per request."""
        return None

    def expect_request(self, request: Request) -> None:
        """kvferry only. A request has entered the engine while the version of the weights is
        unknown. `on_new_request` follows when the version is known or the request ends.
        """
        return None

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens beyond `num_computed_tokens` can be loaded, and whether the load happens
        between steps.

        None: ask again later. Called at every scheduling attempt, so the call must be safe to
        repeat. An asynchronous answer is > 0.
        """

    @abstractmethod
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """The engine has allocated the blocks of a request. Called for every admitted request, with
        0 external tokens too, and again (with 0) after an asynchronous load.
        """

    def withdraw(self, request_id: str) -> None:
        """kvferry only. Save nothing more of a request: its salt may not fit its KV any more."""
        return None

    def request_finished_all_groups(
        self, request: Request, block_ids: BlockTables
    ) -> tuple[bool, dict[str, Any] | None]:
        """Called once per request, for every way to finish. (True, …): the engine keeps the blocks
        until `finished_sending` names the request.
        """
        return False, None

    def request_abandoned(self, request_id: str) -> None:
        """kvferry only. The parameters of a finished request reached no client, so no peer will
        fetch the request's blocks.
        """
        return None

    # -- steps --

    @abstractmethod
    def build_connector_meta(self, scheduler_output: Step) -> KVConnectorMetadata:
        """Build this step's message to the workers and reset all per-step state."""

    def needs_slices(self, request_id: str) -> bool:
        """kvferry only. Whether `build_connector_meta` has a use for slices of the request."""
        return False

    def has_pending_push_work(self) -> bool:
        """Whether the engine must take a step although no request is scheduled."""
        return False

    def has_urgent_work(self) -> bool:
        """kvferry only. Whether an idle engine must not wait before its next step."""
        return self.has_pending_push_work()

    def has_pending_block_frees(self) -> bool:
        """Whether blocks will be freed soon, so that waiting is better than preempting."""
        return False

    def reclaim_blocks(self, num_blocks: int) -> None:
        """kvferry only. The engine lacks `num_blocks` blocks for a request: evict retained blocks
        that no peer has asked for. Called before `build_connector_meta`, at every attempt that
        fails. `has_pending_block_frees` reports whether blocks are on the way back.
        """
        return None

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """The workers' report of a step."""
        return None

    # -- the engine --

    def set_xfer_handshake_metadata(
        self, metadata: Mapping[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Accept the workers' handshake data by TP rank. Called after registration, and again after
        `restore_kv_caches`; may repeat what was accepted before.
        """
        return None

    def set_weights_version(self, version: str) -> None:
        """kvferry only. Exchange KV only with engines whose weights have this version."""
        return None

    def reset_cache(self) -> bool | None:
        """Drop all cached KV. False if dropping failed."""
        return None

    def publish_events(self, describe: Any) -> None:
        """kvferry only. Make KV events from now on, which `take_events` returns. `describe`
        describes a request's blocks as the engine's own events do.
        """
        return None

    def take_events(self) -> Iterable[Any]:
        return ()

    # -- for vLLM's own connectors as children of a `MultiConnector`; kvferry's need no answer --

    def get_loaded_kv_cache_group_ids(self, request: Request) -> Iterable[int] | None:
        """The KV-cache groups that a load fills; None for all groups."""
        return None

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> Mapping[Any, int]:
        return {}

    def register_finished_partial_tail(
        self, request: Request, block_ids: BlockTables, tails: Any
    ) -> bool:
        return False

    def bind_kv_cache_manager(self, manager: Any) -> None:
        """Called once, when the engine's block manager exists."""
        return None


class WorkerSide(Side, Protocol):
    """A connector in the process of one tensor-parallel rank, on the rank's main thread."""

    def register_kv_caches(self, kv_caches: Mapping[str, KVTensor]) -> None:
        """Accept the cache tensors by layer name. Called once, before any transfer."""
        return None

    def unregister_kv_caches(self) -> None:
        """The memory of the caches is about to be freed, because the engine goes to sleep. No
        request holds blocks. Steps without tokens may follow before `restore_kv_caches`.
        Idempotent.
        """
        return None

    def restore_kv_caches(self) -> None:
        """The caches have memory again, at the same addresses and with undefined content.
        Idempotent.
        """
        return None

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return None

    # -- a step, in the order of the calls --

    def handle_preemptions(self, metadata: KVConnectorMetadata) -> None:
        """The blocks of preempted requests are about to be overwritten."""
        return None

    def bind_connector_metadata(self, metadata: KVConnectorMetadata) -> None:
        """A step begins: begin its loads. A load between steps must not block."""
        return None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """The forward pass is about to begin; or, in vLLM, is over if nothing loads within it."""
        return None

    def wait_for_layer_load(self, layer_name: str) -> None:
        return None

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        return None

    def wait_for_save(self) -> None:
        return None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """The results since the last call. Each rank reports each id once; failed receives also
        count as finished.
        """
        return KVConnectorTransferResults()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The blocks that a load within this step did not fill."""
        return set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """This rank's message to the scheduler side."""
        return None

    def clear_connector_metadata(self) -> None:
        return None

    # -- for vLLM's own connectors as children of a `MultiConnector`; kvferry's need no answer --

    def finish_forward(self) -> None:
        return None

    def get_kv_connector_kv_cache_events(self) -> Any:
        return None

    def reset_capture_state(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class ConnectorDescription:
    """A connector: how its sides are made, and the facts by which engines and `MultiConnector`
    decide. Two connectors with the same facts are treated alike.
    """

    make_scheduler: Callable[[ConnectorConfig, KVCacheConfig], SchedulerSide]
    make_worker: Callable[[ConnectorConfig, KVCacheConfig], WorkerSide]
    honours_token_range: bool = False
    """The connector loads exactly the tokens that `update_state_after_alloc` counts, from the
    `num_computed_tokens` of the last lookup on, even while another connector still loads the tokens
    before or after them.
    """
    loads_are_optional: bool = False
    """Loads only save computation: if one fails, the engine computes the request whatever the
    failure policy says.
    """
    provides_dummy_kv: bool = False
    """The connector fills blocks with values that no model computed; no other connector may save
    them, and the engine must not share them between requests.
    """
    moves_states: bool = False
    """The connector supports groups whose layers keep a state (`StateLayout`)."""
    supports_hma: bool = True
    """The connector supports several KV-cache groups, and windows."""
    opens_side_channel: bool = False
    """The connector opens the engine's side channel, so an engine has at most one of them."""
    requires_kv_delivery: bool = True
    """Whether a producer must drop a preempted request's output in flight because the request's
    blocks are to be transferred.
    """
    needs_polling: bool = False
    """The connector never calls the function of `set_wakeup`, so that the engine must step in order
    to learn of finished transfers.
    """
    transfer_mode: str = ""
    """`pull` or `push`; empty if KV does not move between engines. A router starts both legs at
    once if both sides push.
    """
    required_layout: Callable[[ConnectorConfig], str | None] = lambda config: None
    configured: "Callable[[KVTransferConfig], ConnectorDescription] | None" = None
    """Returns the description with the facts that depend on the settings."""
