"""The scheduler's role of a `MultiConnector`, in the embedded engine and in vLLM.

Both engines make the same calls with the same names, so this class takes the requests, blocks and
outputs of either; `EngineView` is the part that differs. Every call of a child is isolated
(`children.py`). Runs on the engine's main thread and never blocks.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from copy import copy
from itertools import chain
from typing import Any, Protocol

from kvferry.connectors.multi.children import Children
from kvferry.connectors.multi.lookup import LoadPlan, PendingLookups, find_plan
from kvferry.connectors.multi.metadata import MultiMetadata, MultiWorkerMetadata
from kvferry.connectors.multi.requests import FinishedTransfers, RequestState, RequestTable

_log = logging.getLogger(__name__)


class EngineView(Protocol):
    """How one engine's objects are shown to a child with something left out."""

    def without(self, scheduler_output: Any, requests: Collection[str]) -> Any:
        """The step without these requests."""

    def limited(self, request: Any, num_computed_tokens: int) -> Any:
        """The request as if it had computed only this many tokens."""

    def partly_computed(self, scheduler_output: Any) -> set[str]:
        """The requests in their first step that have a part of the prompt to compute after it."""


class MultiScheduler:
    """The state and decisions of a `MultiConnector` in the process that schedules."""

    def __init__(
        self,
        children: Children,
        view: EngineView,
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
        self._view = view
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

    def announce(self, method: str, request: Any) -> None:
        """Pass a request that has arrived to every child. A child that raises an exception here is
        told nothing more about the request.
        """
        state = self._requests.get(str(request.request_id))
        has_adapter_or_salt = any(
            getattr(request, name, None) for name in ("lora_request", "cache_salt")
        )
        for child in self._children.enabled:
            if has_adapter_or_salt and self._children.traits[child].names_kv_by_tokens_only:
                state.excluded.add(child)
                continue
            accepted = self._children.call(child, method, request, default=_REFUSED)
            if accepted is _REFUSED:
                state.excluded.add(child)

    # -- loads --

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        request_id = str(request.request_id)
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

        plan = find_plan(
            traits, ask, num_computed_tokens, int(request.num_tokens), self._block_size
        )
        for child in traits:
            if child.follows_lookups and child.index not in asked:
                self._children.call(
                    child.index, "get_num_new_matched_tokens", request, num_computed_tokens
                )
        self._requests.offer(request_id, num_computed_tokens, plan or LoadPlan())
        return (None, False) if plan is None else (plan.num_tokens, plan.is_async)

    def _ask(self, child: int, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        count, is_async = self._children.call(
            child, "get_num_new_matched_tokens", request, num_computed_tokens, default=(0, False)
        )
        request_id = str(request.request_id)
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

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        request_id = str(request.request_id)
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

    def get_loaded_kv_cache_group_ids(self, request: Any) -> set[int] | None:
        """The groups that every child of the plan fills; None if no child says which."""
        state = self._requests.find(str(request.request_id))
        plan = LoadPlan() if state is None else state.plan
        answers = [
            self._children.call(part.child, "get_loaded_kv_cache_group_ids", request)
            for part in plan.ranges
        ]
        stated = [groups for groups in answers if groups is not None]
        return set.intersection(*stated) if stated else None

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        state = self._requests.find(str(request.request_id))
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

    def is_load_optional(
        self, request_id: str, is_optional: Callable[[int], bool] = lambda child: False
    ) -> bool:
        """Whether only children have failed whose loads merely save computation. `is_optional` says
        so of a child for this request.
        """
        state = self._requests.find(request_id)
        if state is None:
            return False
        broken = (state.failed | state.given_up) or {part.child for part in state.admitted.ranges}
        return bool(broken) and all(
            self._children.traits[child].loads_are_optional or is_optional(child)
            for child in broken
        )

    # -- every step --

    def build_connector_meta(self, scheduler_output: Any) -> MultiMetadata:
        parts: list[Any] = [None] * len(self._children)
        for child in self._children.enabled:
            hidden = self._requests.hidden_from(child)
            if self._children.traits[child].saves_in_first_step:
                # The child gets the message of a request that it loads for in any case.
                hidden |= {
                    request
                    for request in self._view.partly_computed(scheduler_output)
                    if self._requests.get(request).part_of(child) is None
                }
            step = self._view.without(scheduler_output, hidden) if hidden else scheduler_output
            parts[child] = self._children.call(
                child, "build_connector_meta", step, is_decisive=True
            )
        step_to_send, self._next = self._next, _NextStep()
        return step_to_send.message(parts)

    def has_pending_push_work(self) -> bool:
        # Every child is asked: the adapters to vLLM act when they are asked.
        return any(
            [
                self._next.disabled,
                *self._children.call_all("has_pending_push_work", default=False),
            ]
        )

    def is_loading(self, request_id: str) -> bool:
        """Whether a child loads KV for a request between steps."""
        state = self._requests.find(request_id)
        return state is not None and bool(state.loading)

    def has_sends_beside(self, children: Collection[int]) -> bool:
        """Whether any other child still reads the blocks of a finished request."""
        return bool(self._requests.senders - set(children))

    def take_output(
        self, output: Any, report: MultiWorkerMetadata | None, events: Mapping[int, Any]
    ) -> FinishedTransfers:
        """Process the ranks' report: tell each child what concerns it, and change
        `output.finished_recving` and `output.finished_sending` into what the engine may act on.
        `events` are the children's KV events.
        """
        report = report or MultiWorkerMetadata()
        for request, failed in report.failed.items():
            self._requests.note_failed(request, failed)
            self._num_failed_loads.update(self._children.names[child] for child in failed)
        for request, given_up in report.given_up.items():
            self._requests.note_given_up(request, given_up)
        for child, reason in report.disabled.items():
            self._children.disable(child, reason)
        news = self._requests.take_finished(
            output.finished_recving or (), output.finished_sending or ()
        )
        for child in self._children.enabled:
            part = copy(output)
            part.finished_recving = news.by_child_recving.get(child, set())
            part.failed_recving = news.by_child_failed.get(child, set())
            part.finished_sending = news.by_child_sending.get(child, set())
            part.kv_connector_worker_meta = self._children.aggregate(
                child, report.parts.get(child, [])
            )
            part.kv_cache_events = events.get(child)
            self._children.call(child, "update_connector_output", part)
        output.finished_recving = news.recving
        output.finished_sending = news.sending
        return news

    # -- the end of a request --

    def request_finished(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        request_id = str(request.request_id)
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
        self, child: int, state: RequestState, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if state.is_hidden_from(child):
            request, block_ids = self._view.limited(request, 0), tuple([] for _ in block_ids)
        elif not state.is_complete:
            # Children must not save or hand out blocks that a load has not filled.
            num_blocks = -(-state.num_local // self._block_size)
            request = self._view.limited(request, state.num_local)
            block_ids = tuple(group[:num_blocks] for group in block_ids)
        takes_groups = hasattr(self._children[child], "request_finished_all_groups")
        method = "request_finished_all_groups" if takes_groups else "request_finished"
        # A child that fails here may still read the blocks. It is disabled, and the engine keeps
        # the blocks until the ranks have shut the child down.
        answer: tuple[bool, dict[str, Any] | None] = self._children.call(
            child,
            method,
            request,
            block_ids if takes_groups else block_ids[0],
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

    def bar_loads(self, request_ids: Collection[str]) -> None:
        """Let the engine compute these requests, whose loaded KV it must not use."""
        for request_id in request_ids:
            self._requests.bar(request_id)

    def reset_cache(self) -> bool:
        """Drop all cached KV; False if a child could not. A child that raises an exception is
        disabled, because it may still offer KV of other weights.
        """
        results = self._children.call_all("reset_cache", default=False, is_decisive=True)
        return all(result is not False for result in results)

    def take_events(self) -> list[Any]:
        return list(chain.from_iterable(self._children.call_all("take_events", default=())))

    def register_finished_partial_tail(
        self, request: Any, block_ids: tuple[list[int], ...], tails: Any
    ) -> bool:
        """Offer the tail of a request that is about to finish to the children that may see it. The
        blocks are kept until every child that accepts has reported.
        """
        state = self._requests.get(str(request.request_id))
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

    def take_counts(self) -> dict[str, dict[str, int]]:
        """The own counters of this role since the last call, by child."""
        counts = {
            "child_lookup_timeouts": dict(self._num_timed_out),
            "child_failed_loads": dict(self._num_failed_loads),
            "child_disabled": dict.fromkeys(self._newly_disabled, 1),
        }
        self._num_timed_out, self._num_failed_loads = Counter(), Counter()
        self._newly_disabled = []
        return {name: rows for name, rows in counts.items() if rows}


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
