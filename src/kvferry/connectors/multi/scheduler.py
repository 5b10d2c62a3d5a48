"""The scheduler side of a `MultiConnector`. Every call of a child is isolated (`children.py`). Runs
on the engine's main thread and never blocks.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
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
from kvferry.connectors.multi.children import Children
from kvferry.connectors.multi.lookup import LoadPlan, PendingLookups, find_plan
from kvferry.connectors.multi.metadata import (
    MultiHandshakeMetadata,
    MultiMetadata,
    MultiWorkerMetadata,
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
        self._may_load_within_steps = may_load_within_steps
        self._children = children
        self._block_size = block_size
        self._clock = clock
        self._requests = RequestTable(
            frozenset(child.index for child in children.traits if child.follows_lookups)
        )
        self._lookups = PendingLookups(lookup_timeout_s)
        self._next = _NextStep()
        self._num_timed_out: Counter[str] = Counter()
        self._num_failed_loads: Counter[str] = Counter()
        self._newly_disabled: list[str] = []
        self._logged_timeouts: set[int] = set()
        self._logged_refusals: set[int] = set()
        self._logged_keys: set[str] = set()
        children.watch_disabled(self._note_disabled)

    @property
    def num_requests(self) -> int:
        """How many requests are known, for tests of leaks."""
        return len(self._requests)

    def _note_disabled(self, child: int, reason: str) -> None:
        self._next.disabled[child] = reason
        self._newly_disabled.append(self._children.names[child])

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
        for child in self._children.enabled:
            if self._children.traits[child].names_kv_by_tokens_only and request.cache_salt != "":
                state.excluded.add(child)
                continue
            accepted = self._children.call(child, method, request, default=_REFUSED)
            if accepted is _REFUSED:
                state.excluded.add(child)

    # -- loads --

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        request_id = request.request_id
        state = self._requests.get(request_id)
        enabled = set(self._children.enabled)
        traits = [
            child
            for child in self._children.traits
            if child.index in enabled and state.may_load_from(child.index)
        ]
        asked: set[int] = set()

        def ask(child: int, count: int) -> tuple[int | None, bool]:
            asked.add(child)
            return self._ask(child, request, count)

        plan = find_plan(traits, ask, num_computed_tokens, request.num_tokens, self._block_size)
        for child in traits:
            if child.follows_lookups and child.index not in asked:
                self._children.call(
                    child.index, "get_num_new_matched_tokens", request, num_computed_tokens
                )
        self._requests.offer(request_id, num_computed_tokens, plan or LoadPlan())
        return (None, False) if plan is None else (plan.num_tokens, plan.is_async)

    def _ask(
        self, child: int, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        count, is_async = self._children.call(
            child, "get_num_new_matched_tokens", request, num_computed_tokens, default=(0, False)
        )
        request_id = request.request_id
        if count is not None:
            waited_s = self._lookups.note_answer(request_id, child, self._clock())
            self._children.note_duration(child, "lookup", waited_s)
            if count and not is_async and not self._may_load_within_steps:
                return self._refuse_load_within_step(child, count), False
            return count, is_async
        if not self._lookups.note_pending(request_id, child, self._clock()):
            return None, False
        name = self._children.names[child]
        if child not in self._logged_timeouts:
            self._logged_timeouts.add(child)
            _log.warning(
                "lookup timed out child=%s request=%s; the request does not load from the child",
                name,
                request_id,
            )
        self._num_timed_out[name] += 1
        return 0, False

    def _refuse_load_within_step(self, child: int, count: int) -> int:
        """How many tokens the child may load within a step: none, unless its KV is made up."""
        if self._children.traits[child].provides_dummy_kv:
            return count
        if child not in self._logged_refusals:
            self._logged_refusals.add(child)
            _log.warning(
                "child=%s loads within a step, and after a failed load the engine would give wrong "
                "tokens with async scheduling and kv_load_failure_policy recompute; the child "
                "loads nothing. Use --no-async-scheduling or the policy fail",
                self._children.names[child],
            )
        return 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        request_id = request.request_id
        self._lookups.end(request_id)
        dummies = [child.index for child in self._children.traits if child.provides_dummy_kv]
        accepted = self._requests.admit(request_id, num_external_tokens, dummies)
        if accepted.is_async:
            self._next.loads[request_id] = tuple(part.child for part in accepted.ranges)
            if any(
                self._children.traits[part.child].reports_failed_blocks for part in accepted.ranges
            ):
                ids = {block for group in blocks.get_block_ids() for block in group}
                self._next.load_blocks[request_id] = frozenset(ids)
        else:
            self._note_sync_blocks(accepted, blocks)
        counts = {part.child: part.num_tokens for part in accepted.ranges}
        for child in self._children.enabled:
            if child not in self._requests.get(request_id).excluded:
                count = counts.get(child, 0)
                # A child that fails here may or may not have begun to load. It is disabled, so that
                # this step's message does not reach its workers, and the workers settle the load.
                self._children.call(
                    child,
                    "update_state_after_alloc",
                    request,
                    blocks,
                    count,
                    is_decisive=count > 0,
                )

    def _note_sync_blocks(self, plan: LoadPlan, blocks: Any) -> None:
        for part in plan.ranges:
            first, last = part.start // self._block_size, -(-part.end // self._block_size)
            ids = {block for group in blocks.get_block_ids() for block in group[first:last]}
            self._next.sync_blocks[part.child] = (
                self._next.sync_blocks.get(part.child, frozenset()) | ids
            )

    def get_loaded_kv_cache_group_ids(self, request: Request) -> set[int] | None:
        """The groups that every child of the plan fills; None if no child says which."""
        state = self._requests.find(request.request_id)
        plan = LoadPlan() if state is None else state.plan
        answers = [
            self._children.call(part.child, "get_loaded_kv_cache_group_ids", request)
            for part in plan.ranges
        ]
        stated = [groups for groups in answers if groups is not None]
        return set.intersection(*stated) if stated else None

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[Any, int]:
        state = self._requests.find(request.request_id)
        plan = LoadPlan() if state is None else state.admitted.first(num_external_tokens)
        sources: Counter[Any] = Counter()
        for part in plan.ranges:
            sources.update(
                self._children.call(
                    part.child,
                    "get_external_cache_hit_sources",
                    request,
                    part.num_tokens,
                    default={},
                )
            )
        return dict(sources)

    def withdraw(self, request_id: str) -> None:
        # A child that fails here could save KV under a wrong name.
        self._children.call_all("withdraw", request_id, is_decisive=True)

    # -- every step --

    def build_connector_meta(self, scheduler_output: Step) -> MultiMetadata:
        parts: list[Any] = [None] * len(self._children)
        for child in self._children.enabled:
            hidden = self._requests.hidden_from(child)
            step = LimitedStep(scheduler_output, hidden) if hidden else scheduler_output
            parts[child] = self._children.call(
                child, "build_connector_meta", step, is_decisive=True
            )
        step_to_send, self._next = self._next, _NextStep()
        return step_to_send.message(parts)

    def needs_slices(self, request_id: str) -> bool:
        return any(self._children.call_all("needs_slices", request_id, default=False))

    def has_pending_push_work(self) -> bool:
        # Every child is asked: connectors of vLLM may act when they are asked.
        return any(
            [
                self._next.disabled,
                *self._children.call_all("has_pending_push_work", default=False),
            ]
        )

    def has_urgent_work(self) -> bool:
        """Whether a child has work, or a child that needs polling still reads the blocks of a
        finished request.
        """
        polled = {child.index for child in self._children.traits if child.needs_polling}
        return bool(self._next.disabled or self._requests.senders & polled) or any(
            self._children.call_all("has_urgent_work", default=False)
        )

    def has_pending_block_frees(self) -> bool:
        return any(self._children.call_all("has_pending_block_frees", default=False))

    def reclaim_blocks(self, num_blocks: int) -> None:
        self._children.call_all("reclaim_blocks", num_blocks)

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
            self._num_failed_loads.update(self._children.names[child] for child in failed)
        for child, reason in report.disabled.items():
            self._children.disable(child, reason)
        news = self._requests.take_finished(
            connector_output.finished_recving, connector_output.finished_sending
        )
        for child in self._children.enabled:
            part = copy(connector_output)
            part.finished_recving = news.by_child_recving.get(child, set())
            part.failed_recving = news.by_child_failed.get(child, set())
            part.finished_sending = news.by_child_sending.get(child, set())
            part.kv_connector_worker_meta = self._children.aggregate(
                child, report.parts.get(child, [])
            )
            part.kv_cache_events = events.get(child)
            self._children.call(child, "update_connector_output", part)
        connector_output.finished_recving = news.recving
        connector_output.finished_sending = news.sending
        if connector_output.invalid_block_ids:
            optional = {each.index for each in self._children.traits if each.loads_are_optional}
            connector_output.optional_failures |= self._requests.depending_on(optional)

    # -- the end of a request --

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        request_id = request.request_id
        self._lookups.end(request_id)
        state = self._requests.get(request_id)
        senders = set(state.sending)
        params: dict[str, Any] = {}
        for child in self._children.enabled:
            if child in state.excluded:
                continue
            is_delayed, child_params = self._finish_in(child, state, request, block_ids)
            if is_delayed:
                senders.add(child)
            if child_params:
                params = self._merged(params, child_params, child)
        is_delayed = self._requests.finish(request_id, senders)
        if senders:
            self._next.sends[request_id] = tuple(sorted(senders))
        return is_delayed, params or None

    def _finish_in(
        self, child: int, state: RequestState, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if state.is_hidden_from(child):
            request, block_ids = LimitedRequest(request, 0), tuple([] for _ in block_ids)
        elif not state.is_complete:
            # Children must not save or hand out blocks that a load has not filled.
            num_blocks = -(-state.num_local // self._block_size)
            request = LimitedRequest(request, state.num_local)
            block_ids = tuple(group[:num_blocks] for group in block_ids)
        # A child that fails here may still read the blocks. It is disabled, and the engine keeps
        # the blocks until the ranks have shut the child down.
        answer: tuple[bool, dict[str, Any] | None] = self._children.call(
            child,
            "request_finished_all_groups",
            request,
            block_ids,
            default=(True, None),
            is_decisive=True,
        )
        return answer

    def _merged(
        self, params: dict[str, Any], more: Mapping[str, Any], child: int
    ) -> dict[str, Any]:
        """Add a child's parameters for the client. The first child that has a key wins."""
        for key in params.keys() & more.keys():
            if params[key] != more[key] and key not in self._logged_keys:
                self._logged_keys.add(key)
                _log.warning(
                    "kv_transfer_params of two children differ key=%s ignored_child=%s; the value "
                    "of the child that is listed first is used",
                    key,
                    self._children.names[child],
                )
        return {**more, **params}

    # -- the rest --

    def request_abandoned(self, request_id: str) -> None:
        self._children.call_all("request_abandoned", request_id)

    def set_xfer_handshake_metadata(
        self, metadata: Mapping[int, KVConnectorHandshakeMetadata]
    ) -> None:
        for child, parts in split_handshakes(metadata).items():
            self._children[child].set_xfer_handshake_metadata(parts)

    def set_wakeup(self, wake: Callable[[], None]) -> None:
        self._children.call_all_unguarded("set_wakeup", wake)

    def bind_kv_cache_manager(self, manager: Any) -> None:
        self._children.call_all_unguarded("bind_kv_cache_manager", manager)

    def set_weights_version(self, version: str) -> None:
        # A child that fails here could exchange KV of other weights.
        self._children.call_all("set_weights_version", version, is_decisive=True)

    def reset_cache(self) -> bool:
        """Drop all cached KV; False if a child could not. A child that raises an exception is
        disabled, because it may still offer KV of other weights.
        """
        results = self._children.call_all("reset_cache", default=False, is_decisive=True)
        # KV that a child loaded before, or is loading now, may be of other weights.
        self._requests.bar_loads()
        return all(result is not False for result in results)

    def publish_events(self, describe: Any) -> None:
        self._children.call_all_unguarded("publish_events", describe)

    def take_events(self) -> Iterable[Any]:
        return list(chain.from_iterable(self._children.call_all("take_events", default=())))

    def get_kv_connector_stats(self) -> MultiStats | None:
        counts = {
            "child_lookup_timeouts": dict(self._num_timed_out),
            "child_failed_loads": dict(self._num_failed_loads),
            "child_disabled": dict.fromkeys(self._newly_disabled, 1),
        }
        self._num_timed_out, self._num_failed_loads = Counter(), Counter()
        self._newly_disabled = []
        return self._children.take_stats({name: rows for name, rows in counts.items() if rows})

    def shutdown(self) -> None:
        self._children.shutdown()

    def register_finished_partial_tail(
        self, request: Request, block_ids: tuple[list[int], ...], tails: Any
    ) -> bool:
        """Offer the tail of a request that is about to finish to the children that may see it. The
        blocks are kept until every child that accepts has reported.
        """
        state = self._requests.get(request.request_id)
        for child in self._children.enabled:
            if state.is_complete and not state.is_hidden_from(child):
                accepted = self._children.call(
                    child,
                    "register_finished_partial_tail",
                    request,
                    block_ids,
                    tails,
                    default=True,
                    is_decisive=True,
                )
                if accepted:
                    state.sending.add(child)
        return bool(state.sending)


def split_handshakes(metadata: Mapping[Any, Any]) -> dict[int, dict[Any, Any]]:
    """The handshake data of each child by rank."""
    parts: dict[int, dict[Any, Any]] = {}
    for rank, whole in metadata.items():
        assert isinstance(whole, MultiHandshakeMetadata)
        for child, part in whole.parts.items():
            parts.setdefault(child, {})[rank] = part
    return parts


_REFUSED = object()
"""Stands for the answer of a child that raised an exception."""


class _NextStep:
    """What the next message to the ranks announces."""

    def __init__(self) -> None:
        self.loads: dict[str, tuple[int, ...]] = {}
        self.load_blocks: dict[str, frozenset[int]] = {}
        self.sends: dict[str, tuple[int, ...]] = {}
        self.sync_blocks: dict[int, frozenset[int]] = {}
        self.disabled: dict[int, str] = {}

    def message(self, parts: list[Any]) -> MultiMetadata:
        return MultiMetadata(
            parts=tuple(parts),
            loads=self.loads,
            load_blocks=self.load_blocks,
            sends=self.sends,
            sync_blocks=self.sync_blocks,
            disabled=self.disabled,
        )
