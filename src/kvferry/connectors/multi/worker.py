"""The worker side of a `MultiConnector` on one rank.

The rank reports a load when all children that load for the request have finished, and a send when
all children that asked for the blocks have reported. A child that is disabled is shut down first,
so that it can touch the cache no more; then its loads fail and its sends count as done.

Runs on the worker process's main thread.
"""

from collections.abc import Callable, Mapping
from typing import Any

from kvferry.connectors.contract import (
    KVConnectorMetadata,
    KVConnectorTransferResults,
    WorkerSide,
)
from kvferry.connectors.multi.children import CallAll, Child, Children
from kvferry.connectors.multi.metadata import (
    MultiHandshakeMetadata,
    MultiMetadata,
    MultiWorkerMetadata,
)
from kvferry.connectors.multi.stats import MultiStats
from kvferry.connectors.multi.transfers import Load, RankTransfers
from kvferry.errors import TransportError


class MultiWorker(WorkerSide):
    """The children of one rank."""

    def __init__(self, children: Children, num_groups: int) -> None:
        self.children = children
        self._num_groups = num_groups
        self._transfers = RankTransfers()
        self._sync_blocks: Mapping[int, frozenset[int]] = {}
        """The blocks that each child fills in this step."""
        self._invalid_blocks: set[int] = set()
        self._is_forward_over = False
        self._has_saved_layer = False
        self._has_failed_sync_load = False
        self._report = MultiWorkerMetadata()
        self._wake: Callable[[], None] = lambda: None
        children.watch_disabled(self._settle)

    @property
    def num_transfers(self) -> int:
        """How many loads and sends this rank waits for, for tests of leaks."""
        return len(self._transfers)

    def set_wakeup(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self.children.call_all_unguarded("set_wakeup", wake)

    # -- the cache --

    register_kv_caches: Any = CallAll(is_start=True)
    unregister_kv_caches: Any = CallAll(is_start=True)
    restore_kv_caches: Any = CallAll(is_start=True)

    def get_handshake_metadata(self) -> MultiHandshakeMetadata | None:
        parts = self.children.call_all_unguarded("get_handshake_metadata")
        given = {child: part for child, part in enumerate(parts) if part is not None}
        return MultiHandshakeMetadata(given) if given else None

    # -- one step, in the order of the calls --

    def handle_preemptions(self, metadata: KVConnectorMetadata) -> None:
        self._call_with_parts("handle_preemptions", metadata)

    def bind_connector_metadata(self, metadata: KVConnectorMetadata) -> None:
        assert isinstance(metadata, MultiMetadata)
        self._is_forward_over = self._has_saved_layer = self._has_failed_sync_load = False
        self._sync_blocks = metadata.sync_blocks
        for request, children in metadata.loads.items():
            blocks = metadata.load_blocks.get(request, frozenset())
            self._transfers.begin_load(request, children, blocks)
        for request, children in metadata.sends.items():
            self._transfers.begin_send(request, children)
        for index, reason in metadata.disabled.items():
            self.children[index].disable(reason)
        # The message may announce transfers of a child that this rank disabled earlier.
        for child in self.children:
            if child.disabled:
                self._drop(child)
        self._call_with_parts("bind_connector_metadata", metadata)

    def _call_with_parts(self, method: str, metadata: KVConnectorMetadata) -> None:
        assert isinstance(metadata, MultiMetadata)
        for child in self.children.enabled:
            part = metadata.parts[child.index]
            if part is not None:
                child.call(method, part)

    def clear_connector_metadata(self) -> None:
        self.children.call_all("clear_connector_metadata")
        self._sync_blocks = {}

    start_load_kv: Any = CallAll()
    wait_for_layer_load: Any = CallAll()

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        if self._has_failed_sync_load:
            # The forward pass read blocks that were not filled: its KV must be saved nowhere.
            return
        self._has_saved_layer = True
        self.children.call_all("save_kv_layer", layer_name, kv_layer, attn_metadata, **kwargs)

    finish_forward: Any = CallAll()

    def wait_for_save(self) -> None:
        self._is_forward_over = True
        if not self._has_failed_sync_load or self._has_saved_layer:
            self.children.call_all("wait_for_save")

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        # With a drafter, vLLM asks before `wait_for_save`; the model itself has run by then.
        self._is_forward_over = True
        results = KVConnectorTransferResults()
        for child in self.children.enabled:
            part = child.call("get_transfer_results", finished_req_ids)
            errors = child.call("get_block_ids_with_load_errors")
            if part is None or errors is None:
                # The child has been disabled, and its loads have failed.
                continue
            if child.traits.reports_failed_blocks:
                # A child may name blocks before those that it loads, which other requests use.
                failure = f"{child.name}: the child reported failed blocks"
                errors = self._transfers.fail_blocks(child.index, errors, failure)
            self._invalid_blocks |= errors
            self._absorb(child, part, results)
        for child in self.children:
            # What a child loaded in the step that disabled it may be incomplete.
            if child.disabled and not child.traits.provides_dummy_kv:
                self._invalid_blocks |= self._sync_blocks.get(child.index, frozenset())
        for load in self._transfers.take_loaded():
            self._add(load, results)
        results.finished_sending = self._transfers.take_sent()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        blocks, self._invalid_blocks = self._invalid_blocks, set()
        return blocks

    def get_kv_connector_kv_cache_events(self) -> Any:
        parts = {
            child.index: child.call("get_kv_connector_kv_cache_events")
            for child in self.children.enabled
        }
        return {child: part for child, part in parts.items() if part is not None} or None

    reset_capture_state: Any = CallAll()

    def get_kv_connector_stats(self) -> MultiStats | None:
        return MultiStats.of(self.children.take_stats(), self.children.take_counts())

    def shutdown(self) -> None:
        self.children.shutdown()

    def build_connector_worker_meta(self) -> MultiWorkerMetadata | None:
        for child in self.children.enabled:
            part = child.call("build_connector_worker_meta")
            if part is not None:
                self._report.parts[child.index] = [part]
        report, self._report = self._report, MultiWorkerMetadata()
        return None if report.is_empty else report

    # -- inside --

    def _absorb(
        self, child: Child, part: KVConnectorTransferResults, results: KVConnectorTransferResults
    ) -> None:
        """Add one child's results."""
        for request, reason in part.given_up_recving.items():
            is_optional = child.traits.loads_are_optional
            if self._transfers.is_loading(child.index, request) and not is_optional:
                results.given_up_recving[request] = f"{child.name}: {reason}"
        for request in part.finished_recving | part.failed_recving:
            failure = None
            if request in part.failed_recving:
                reason = part.failure_reasons.get(request, "the child gave no reason")
                failure = f"{child.name}: {reason}"
            is_optional = failure is not None and request in part.optional_failures
            self._transfers.end_load(child.index, request, failure, is_optional=is_optional)
            if child.traits.reports_failed_blocks:
                # A request that ended while it loaded has nothing to save, and LMCache reports
                # only the end of such a load.
                self._transfers.end_send(child.index, request)
        for request in part.finished_sending:
            self._transfers.end_send(child.index, request)
        for request, times in part.recving_times.items():
            results.recving_times.setdefault(request, []).extend(times)

    def _add(self, load: Load, results: KVConnectorTransferResults) -> None:
        """Add an ended load to the results."""
        results.finished_recving.add(load.request)
        if not load.failures:
            return
        results.failed_recving.add(load.request)
        results.failure_reasons[load.request] = "; ".join(load.failures.values())
        self._report.failed[load.request] = set(load.failures)
        required = load.failures.keys() - load.optional_failures
        if all(self.children[child].traits.loads_are_optional for child in required):
            results.optional_failures.add(load.request)

    def _settle(self, child: Child) -> None:
        """Report a child that has just been disabled, and settle what it owes. The child is shut
        down already.
        """
        self._report.disabled[child.index] = child.disabled
        self._drop(child)
        # The step in which the rank could report the settled transfers may be over.
        self._wake()

    def _drop(self, child: Child) -> None:
        self._transfers.drop_child(child.index, child.disabled)
        blocks = self._sync_blocks.get(child.index, frozenset())
        if not blocks or self._is_forward_over or child.traits.provides_dummy_kv:
            return
        if self._num_groups > 1:
            raise TransportError(
                f"{child.disabled}; the forward pass needs the KV that the child was to load in "
                "this step, and an engine with several KV-cache groups cannot take back single "
                "blocks"
            )
        self._has_failed_sync_load = True
        self._invalid_blocks |= blocks
