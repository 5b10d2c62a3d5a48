"""The scheduler side of a `MultiConnector`. Every call of a child is isolated (`children.py`). Runs
on the engine's main thread and never blocks.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from copy import copy
from itertools import chain
from typing import Any

from kvferry.connectors.contract import (
    KVCacheBlocks,
    KVConnectorHandshakeMetadata,
    KVConnectorOutput,
    Request,
    SchedulerSide,
    Step,
)
from kvferry.connectors.multi.children import CallAll, Child, Children
from kvferry.connectors.multi.lookup import LoadPlan, find_plan
from kvferry.connectors.multi.metadata import (
    MultiMetadata,
    MultiWorkerMetadata,
    split_handshakes,
)
from kvferry.connectors.multi.requests import (
    LimitedRequest,
    LimitedStep,
    RequestState,
    RequestTable,
)
from kvferry.connectors.multi.stats import MultiStats

_log = logging.getLogger(__name__)


class MultiScheduler(SchedulerSide):
    """The state and decisions of a `MultiConnector` in the process that schedules."""

    def __init__(
        self,
        children: Children,
        block_size: int,
        lookup_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        may_load_within_steps: bool = True,
    ) -> None:
        """`may_load_within_steps` is False if the engine would give wrong tokens after a load
        within a step has failed. Then only children with made-up KV may load within a step.
        """
        self.children = children
        self._block_size = block_size
        self._lookup_timeout_s = lookup_timeout_s
        self._clock = clock
        self._may_load_within_steps = may_load_within_steps
        self._requests = RequestTable(
            [child.index for child in children if child.traits.provides_dummy_kv]
        )
        self._next = MultiMetadata()
        """The next message to the ranks."""
        self._differing_keys: set[str] = set()
        children.watch_disabled(self._note_disabled)

    @property
    def num_requests(self) -> int:
        """How many requests are known, for tests of leaks."""
        return len(self._requests)

    def _note_disabled(self, child: Child) -> None:
        self._next.disabled[child.index] = child.disabled
        child.counts["child_disabled"] += 1

    # -- arrival --

    def on_new_request(self, request: Request) -> None:
        self._announce("on_new_request", request)

    def expect_request(self, request: Request) -> None:
        self._announce("expect_request", request)

    def _announce(self, method: str, request: Request) -> None:
        """Pass a request that has arrived to every child. A child that raises an exception here is
        told nothing more about the request.
        """
        state = self._requests.get(request.request_id)
        for child in self.children.enabled:
            is_unnamed = child.traits.names_kv_by_tokens_only and request.cache_salt != ""
            if is_unnamed or not child.call(method, request):
                state.excluded.add(child.index)

    # -- loads --

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        state = self._requests.get(request.request_id)
        candidates = [child for child in self.children.enabled if state.may_load_from(child.index)]
        asked: set[int] = set()

        def ask(child: int, count: int) -> tuple[int | None, bool]:
            asked.add(child)
            return self._ask(self.children[child], state, request, count)

        plan = find_plan(
            [child.traits for child in candidates],
            ask,
            num_computed_tokens,
            request.num_tokens,
            self._block_size,
        )
        for child in candidates:
            if child.traits.follows_lookups and child.index not in asked:
                child.call("get_num_new_matched_tokens", request, num_computed_tokens)
        self._requests.offer(request.request_id, num_computed_tokens, plan or LoadPlan())
        return (None, False) if plan is None else (plan.num_tokens, plan.is_async)

    def _ask(
        self, child: Child, state: RequestState, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        count, is_async = child.call("get_num_new_matched_tokens", request, num_computed_tokens)
        now = self._clock()
        if count is None:
            since = state.waiting_since.setdefault(child.index, now)
            if now - since < self._lookup_timeout_s:
                return None, False
            child.counts["child_lookup_timeouts"] += 1
            if child.is_first("lookup timeout"):
                _log.warning(
                    "lookup timed out child=%s request=%s; the request does not load from the "
                    "child",
                    child.name,
                    request.request_id,
                )
            return 0, False
        child.note_duration("lookup", now - state.waiting_since.pop(child.index, now))
        may_load = is_async or self._may_load_within_steps or child.traits.provides_dummy_kv
        if count and not may_load:
            if child.is_first("load within a step"):
                _log.warning(
                    "child=%s loads within a step, and after a failed load the engine would give "
                    "wrong tokens with async scheduling and kv_load_failure_policy recompute; the "
                    "child loads nothing. Use --no-async-scheduling or the policy fail",
                    child.name,
                )
            return 0, False
        return count, is_async

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        request_id = request.request_id
        accepted = self._requests.admit(request_id, num_external_tokens)
        counts = {part.child: part.num_tokens for part in accepted.ranges}
        if accepted.is_async:
            self._next.loads[request_id] = tuple(counts)
            if any(self.children[child].traits.reports_failed_blocks for child in counts):
                ids = frozenset(chain.from_iterable(blocks.get_block_ids()))
                self._next.load_blocks[request_id] = ids
        else:
            self._note_sync_blocks(accepted, blocks)
        state = self._requests.get(request_id)
        for child in self.children.enabled:
            if child.index not in state.excluded:
                count = counts.get(child.index, 0)
                # A child that fails here may or may not have begun to load. It is disabled, so that
                # this step's message does not reach its workers, and the workers settle the load.
                child.call(
                    "update_state_after_alloc", request, blocks, count, is_decisive=count > 0
                )

    def _note_sync_blocks(self, plan: LoadPlan, blocks: KVCacheBlocks) -> None:
        for part in plan.ranges:
            first, last = part.start // self._block_size, -(-part.end // self._block_size)
            ids = {block for group in blocks.get_block_ids() for block in group[first:last]}
            known = self._next.sync_blocks.get(part.child, frozenset())
            self._next.sync_blocks[part.child] = known | ids

    def get_loaded_kv_cache_group_ids(self, request: Request) -> set[int] | None:
        """The groups that every child of the plan fills; None if no child says which."""
        plan = self._requests.find(request.request_id).plan
        answers = [
            self.children[part.child].call("get_loaded_kv_cache_group_ids", request)
            for part in plan.ranges
        ]
        stated = [groups for groups in answers if groups is not None]
        return set.intersection(*stated) if stated else None

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[Any, int]:
        plan = self._requests.find(request.request_id).admitted
        sources: Counter[Any] = Counter()
        for part in plan.first(num_external_tokens).ranges:
            sources.update(
                self.children[part.child].call(
                    "get_external_cache_hit_sources", request, part.num_tokens
                )
            )
        return dict(sources)

    withdraw: Any = CallAll()

    # -- every step --

    def build_connector_meta(self, scheduler_output: Step) -> MultiMetadata:
        parts: list[Any] = [None] * len(self.children)
        for child in self.children.enabled:
            hidden = self._requests.hidden_from(child.traits)
            step = LimitedStep(scheduler_output, hidden) if hidden else scheduler_output
            parts[child.index] = child.call("build_connector_meta", step)
        metadata, self._next = self._next, MultiMetadata()
        metadata.parts = tuple(parts)
        return metadata

    needs_slices: Any = CallAll(any)
    has_pending_block_frees: Any = CallAll(any)
    reclaim_blocks: Any = CallAll()

    def has_pending_push_work(self) -> bool:
        # Every child is asked: connectors of vLLM may act when they are asked.
        return any([*self.children.call_all("has_pending_push_work"), self._next.disabled])

    def has_urgent_work(self) -> bool:
        """Whether a child has work, or a child that needs polling still reads the blocks of a
        finished request.
        """
        polled = {child.index for child in self.children if child.traits.needs_polling}
        return bool(self._next.disabled or self._requests.senders & polled) or any(
            self.children.call_all("has_urgent_work")
        )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Process the ranks' report: tell each child what concerns it, and change
        `finished_recving` and `finished_sending` into what the engine may act on. If blocks were
        not filled within a step, add the requests whose loads only save computation.
        """
        report = connector_output.kv_connector_worker_meta or MultiWorkerMetadata()
        assert isinstance(report, MultiWorkerMetadata)
        events = connector_output.kv_cache_events or {}
        for request, failed in report.failed.items():
            self._requests.note_failed(request, failed)
            for index in failed:
                self.children[index].counts["child_failed_loads"] += 1
        for index, reason in report.disabled.items():
            self.children[index].disable(reason)
        finished, by_child = self._requests.take_finished(
            connector_output.finished_recving, connector_output.finished_sending
        )
        for child in self.children.enabled:
            part, its = copy(connector_output), by_child[child.index]
            part.finished_recving, part.failed_recving = its.recving, its.failed
            part.finished_sending = its.sending
            part.kv_connector_worker_meta = child.aggregate(report.parts.get(child.index, []))
            part.kv_cache_events = events.get(child.index)
            child.call("update_connector_output", part)
        connector_output.finished_recving = finished.recving
        connector_output.finished_sending = finished.sending
        if connector_output.invalid_block_ids:
            optional = {child.index for child in self.children if child.traits.loads_are_optional}
            connector_output.optional_failures |= self._requests.depending_on(optional)

    # -- the end of a request --

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        request_id = request.request_id
        state = self._requests.get(request_id)
        senders = set(state.sending)
        params: dict[str, Any] = {}
        for child in self.children.enabled:
            if child.index in state.excluded:
                continue
            shown = self._limited(request, block_ids, state, child)
            is_delayed, child_params = child.call("request_finished_all_groups", *shown)
            if is_delayed:
                senders.add(child.index)
            if child_params:
                params = self._merged(params, child_params, child)
        is_delayed = self._requests.finish(request_id, senders)
        if senders:
            self._next.sends[request_id] = tuple(sorted(senders))
        return is_delayed, params or None

    def _limited(
        self, request: Request, block_ids: tuple[list[int], ...], state: RequestState, child: Child
    ) -> tuple[Any, tuple[list[int], ...]]:
        """A finished request as the child may see it."""
        if state.is_hidden_from(child.traits):
            return LimitedRequest(request, 0), tuple([] for _ in block_ids)
        if state.is_complete:
            return request, block_ids
        # Children must not save or hand out blocks that a load has not filled.
        num_blocks = -(-state.num_local // self._block_size)
        table = tuple(group[:num_blocks] for group in block_ids)
        return LimitedRequest(request, state.num_local), table

    def _merged(
        self, params: dict[str, Any], more: Mapping[str, Any], child: Child
    ) -> dict[str, Any]:
        """Add a child's parameters for the client. The first child that has a key wins."""
        for key in params.keys() & more.keys():
            if params[key] != more[key] and key not in self._differing_keys:
                self._differing_keys.add(key)
                _log.warning(
                    "kv_transfer_params of two children differ key=%s ignored_child=%s; the value "
                    "of the child that is listed first is used",
                    key,
                    child.name,
                )
        return {**more, **params}

    request_abandoned: Any = CallAll()

    def register_finished_partial_tail(
        self, request: Request, block_ids: tuple[list[int], ...], tails: Any
    ) -> bool:
        """Offer the tail of a request that is about to finish to the children that may see it. The
        blocks are kept until every child that accepts has reported.
        """
        state = self._requests.get(request.request_id)
        for child in self.children.enabled:
            if (
                state.is_complete
                and not state.is_hidden_from(child.traits)
                and child.call("register_finished_partial_tail", request, block_ids, tails)
            ):
                state.sending.add(child.index)
        return bool(state.sending)

    # -- the engine --

    set_wakeup: Any = CallAll(is_start=True)
    bind_kv_cache_manager: Any = CallAll(is_start=True)
    publish_events: Any = CallAll(is_start=True)
    set_weights_version: Any = CallAll()
    take_events: Any = CallAll(lambda events: list(chain.from_iterable(events)))

    def set_xfer_handshake_metadata(
        self, metadata: Mapping[int, KVConnectorHandshakeMetadata]
    ) -> None:
        for child, parts in split_handshakes(metadata).items():
            self.children[child].side.set_xfer_handshake_metadata(parts)

    def reset_cache(self) -> bool:
        """Drop all cached KV; False if a child could not. A child that raises an exception is
        disabled, because it may still offer KV of other weights.
        """
        results = self.children.call_all("reset_cache")
        # KV that a child loaded before, or is loading now, may be of other weights.
        self._requests.bar_loads()
        return all(result is not False for result in results)

    def get_kv_connector_stats(self) -> MultiStats | None:
        return MultiStats.of(self.children.take_stats(), self.children.take_counts())

    def shutdown(self) -> None:
        self.children.shutdown()
