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
    KVTensor,
    WorkerSide,
)
from kvferry.connectors.multi.children import Children
from kvferry.connectors.multi.metadata import (
    MultiHandshakeMetadata,
    MultiMetadata,
    MultiWorkerMetadata,
)
from kvferry.connectors.multi.stats import MultiStats
from kvferry.connectors.multi.transfers import FinishedLoad, RankTransfers
from kvferry.errors import TransportError


class MultiWorker(WorkerSide):
    """The children of one rank."""

    def __init__(self, children: Children, num_groups: int) -> None:
        self._children = children
        self._num_groups = num_groups
        self._transfers = RankTransfers()
        self._bound: set[int] = set()
        self._sync_blocks: Mapping[int, frozenset[int]] = {}
        """The blocks that each child fills in this step."""
        self._invalid_blocks: set[int] = set()
        self._is_forward_over = False
        self._has_saved_layer = False
        self._has_failed_sync_load = False
        self._optional_failures: dict[str, set[int]] = {}
        """The children whose part of a load has failed although the request need not fail."""
        self._report = MultiWorkerMetadata()
        self._wake: Callable[[], None] = _no_wakeup
        children.watch_disabled(self._settle)

    @property
    def num_transfers(self) -> int:
        """How many loads and sends this rank waits for, for tests of leaks."""
        return len(self._transfers)

    def set_wakeup(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._children.call_all_unguarded("set_wakeup", wake)

    # -- the cache --

    def register_kv_caches(self, kv_caches: Mapping[str, KVTensor]) -> None:
        self._children.call_all_unguarded("register_kv_caches", kv_caches)

    def unregister_kv_caches(self) -> None:
        self._children.call_all_unguarded("unregister_kv_caches")

    def restore_kv_caches(self) -> None:
        self._children.call_all_unguarded("restore_kv_caches")

    def get_handshake_metadata(self) -> MultiHandshakeMetadata | None:
        parts = self._children.call_all_unguarded("get_handshake_metadata")
        given = {child: part for child, part in enumerate(parts) if part is not None}
        return MultiHandshakeMetadata(given) if given else None

    # -- one step, in the order of the calls --

    def handle_preemptions(self, metadata: KVConnectorMetadata) -> None:
        assert isinstance(metadata, MultiMetadata)
        for child in self._children.enabled:
            if metadata.parts[child] is not None:
                # After a failure here the child may still read blocks that are overwritten next.
                self._children.call(
                    child, "handle_preemptions", metadata.parts[child], is_decisive=True
                )

    def bind_connector_metadata(self, metadata: KVConnectorMetadata) -> None:
        assert isinstance(metadata, MultiMetadata)
        self._is_forward_over = self._has_saved_layer = self._has_failed_sync_load = False
        self._sync_blocks = metadata.sync_blocks
        for request, children in metadata.loads.items():
            blocks = metadata.load_blocks.get(request, frozenset())
            self._transfers.begin_load(request, children, blocks)
        for request, children in metadata.sends.items():
            self._transfers.begin_send(request, children)
        for child, reason in metadata.disabled.items():
            self._children.disable(child, reason)
        # The message may announce transfers of a child that this rank disabled earlier.
        for child, reason in self._children.disabled.items():
            self._drop(child, reason)
        self._bound = set()
        for child in self._children.enabled:
            if metadata.parts[child] is not None:
                self._bound.add(child)
                self._children.call(
                    child, "bind_connector_metadata", metadata.parts[child], is_decisive=True
                )

    def clear_connector_metadata(self) -> None:
        self._call_bound("clear_connector_metadata")
        self._bound, self._sync_blocks = set(), {}

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._call_bound("start_load_kv", forward_context, is_decisive=True, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._call_bound("wait_for_layer_load", layer_name, is_decisive=True)

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        if self._has_failed_sync_load:
            # The forward pass read blocks that were not filled: its KV must be saved nowhere.
            return
        self._has_saved_layer = True
        self._call_bound("save_kv_layer", layer_name, kv_layer, attn_metadata, **kwargs)

    def finish_forward(self) -> None:
        self._call_bound("finish_forward")

    def wait_for_save(self) -> None:
        self._is_forward_over = True
        if not self._has_failed_sync_load or self._has_saved_layer:
            self._call_bound("wait_for_save", is_decisive=True)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        # With a drafter, vLLM asks before `wait_for_save`; the model itself has run by then.
        self._is_forward_over = True
        results = KVConnectorTransferResults()
        for child in self._children.enabled:
            part = self._children.call(
                child, "get_transfer_results", finished_req_ids, is_decisive=True
            )
            errors = self._children.call(child, "get_block_ids_with_load_errors", is_decisive=True)
            if part is None or errors is None:
                # The child has been disabled, and its loads have failed.
                continue
            if self._children.traits[child].reports_failed_blocks:
                # A child may name blocks before those that it loads, which other requests use.
                failure = f"{self._children.names[child]}: the child reported failed blocks"
                errors = self._transfers.fail_blocks(child, errors, failure)
            self._invalid_blocks |= errors
            self._absorb(child, part, results)
        for child in self._bound.difference(self._children.enabled):
            # What a child loaded in the step that disabled it may be incomplete.
            if not self._children.traits[child].provides_dummy_kv:
                self._invalid_blocks |= self._sync_blocks.get(child, frozenset())
        for load in self._transfers.take_loaded():
            self._add(load, results)
        results.finished_sending = self._transfers.take_sent()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        blocks, self._invalid_blocks = self._invalid_blocks, set()
        return blocks

    def get_kv_connector_kv_cache_events(self) -> Any:
        parts = dict(self._children.call_each("get_kv_connector_kv_cache_events"))
        return {child: part for child, part in parts.items() if part is not None} or None

    def reset_capture_state(self) -> None:
        self._children.call_all("reset_capture_state")

    def get_kv_connector_stats(self) -> MultiStats | None:
        return self._children.take_stats({})

    def shutdown(self) -> None:
        self._children.shutdown()

    def build_connector_worker_meta(self) -> MultiWorkerMetadata | None:
        for child, part in self._children.call_each("build_connector_worker_meta"):
            if part is not None:
                self._report.parts[child] = [part]
        report, self._report = self._report, MultiWorkerMetadata()
        return None if report.is_empty else report

    # -- inside --

    def _call_bound(self, method: str, *args: Any, is_decisive: bool = False, **more: Any) -> None:
        for child in self._children.enabled:
            if child in self._bound:
                self._children.call(child, method, *args, is_decisive=is_decisive, **more)

    def _absorb(
        self, child: int, part: KVConnectorTransferResults, results: KVConnectorTransferResults
    ) -> None:
        """Add one child's results."""
        name = self._children.names[child]
        for request, reason in part.given_up_recving.items():
            is_optional = self._children.traits[child].loads_are_optional
            if self._transfers.is_loading(child, request) and not is_optional:
                results.given_up_recving[request] = f"{name}: {reason}"
        for request in part.finished_recving | part.failed_recving:
            failure = None
            if request in part.failed_recving:
                failure = f"{name}: {part.failure_reasons.get(request, 'the child gave no reason')}"
                if request in part.optional_failures and self._transfers.is_loading(child, request):
                    self._optional_failures.setdefault(request, set()).add(child)
            self._transfers.end_load(child, request, failure)
            if self._children.traits[child].reports_failed_blocks:
                # A request that ended while it loaded has nothing to save, and LMCache reports
                # only the end of such a load.
                self._transfers.end_send(child, request)
        for request in part.finished_sending:
            self._transfers.end_send(child, request)
        for request, times in part.recving_times.items():
            results.recving_times.setdefault(request, []).extend(times)

    def _add(self, load: FinishedLoad, results: KVConnectorTransferResults) -> None:
        """Add an ended load to the results."""
        optional = self._optional_failures.pop(load.request, set())
        results.finished_recving.add(load.request)
        if not load.failures:
            return
        results.failed_recving.add(load.request)
        results.failure_reasons[load.request] = "; ".join(load.failures.values())
        self._report.failed[load.request] = set(load.failures)
        if all(
            child in optional or self._children.traits[child].loads_are_optional
            for child in load.failures
        ):
            results.optional_failures.add(load.request)

    def _settle(self, child: int, reason: str) -> None:
        """Report a child that has just been disabled, and settle what it owes. The child is shut
        down already.
        """
        self._report.disabled[child] = reason
        self._drop(child, reason)
        # The step in which the rank could report the settled transfers may be over.
        self._wake()

    def _drop(self, child: int, reason: str) -> None:
        self._transfers.drop_child(child, reason)
        blocks = self._sync_blocks.get(child, frozenset())
        if blocks and not self._is_forward_over:
            self._fail_sync_load(child, blocks, reason)

    def _fail_sync_load(self, child: int, blocks: frozenset[int], reason: str) -> None:
        if self._children.traits[child].provides_dummy_kv:
            return
        if self._num_groups > 1:
            raise TransportError(
                f"{reason}; the forward pass needs the KV that the child was to load in this step, "
                "and an engine with several KV-cache groups cannot take back single blocks"
            )
        self._has_failed_sync_load = True
        self._invalid_blocks |= blocks


def _no_wakeup() -> None:
    return None
