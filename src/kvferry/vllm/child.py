"""A connector of vLLM, or of another project for vLLM, as a child of `MultiConnector`.

The child gets vLLM's own objects, not kvferry's views of them, with the same things left out.
"""

from collections.abc import Collection, Mapping
from copy import copy
from dataclasses import fields, replace
from typing import Any

from vllm.v1.request import RequestStatus

from kvferry.connectors.contract import Request, SchedulerSide, Step
from kvferry.connectors.multi.requests import LimitedRequest, LimitedStep
from kvferry.protocol.tickets import NO_BLOCK
from kvferry.vllm.engine.progress import VllmStep
from kvferry.vllm.messages import VllmOutput
from kvferry.vllm.translate import NULL_BLOCK, BlocksView, VllmRequestView


class VllmChild:
    """One connector in one role."""

    def __init__(self, connector: Any, *, saves_in_first_step: bool) -> None:
        """`saves_in_first_step`: the connector saves a prompt in the first step of its request,
        computed or not. So it must not see a request of which that step computes only a part.
        """
        self.connector = connector
        self.kv_caches: Mapping[str, Any] = {}
        """vLLM's own tensors, by layer."""
        self._saves_in_first_step = saves_in_first_step
        self._loads: set[str] = set()
        """The requests for which the connector loads."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.connector, name)
        if not callable(found):
            return found
        return lambda *args, **more: found(*map(_theirs, args), **more)

    # Calls that only kvferry's engines and connectors make.
    expect_request = SchedulerSide.expect_request
    has_urgent_work = SchedulerSide.has_urgent_work
    needs_slices = SchedulerSide.needs_slices
    publish_events = SchedulerSide.publish_events
    reclaim_blocks = SchedulerSide.reclaim_blocks
    request_abandoned = SchedulerSide.request_abandoned
    set_wakeup = SchedulerSide.set_wakeup
    set_weights_version = SchedulerSide.set_weights_version
    withdraw = SchedulerSide.withdraw

    # -- scheduler --

    def update_state_after_alloc(
        self, request: Request, blocks: BlocksView, num_external_tokens: int
    ) -> None:
        if num_external_tokens:
            self._loads.add(request.request_id)
        self.connector.update_state_after_alloc(
            _theirs(request), blocks.blocks, num_external_tokens
        )

    def build_connector_meta(self, scheduler_output: Step) -> Any:
        hidden: set[str] = set()
        step = scheduler_output
        if isinstance(step, LimitedStep):
            hidden.update(step.hidden)
            step = step.step
        assert isinstance(step, VllmStep)
        if self._saves_in_first_step:
            # The child gets the message of a request that it loads for in any case.
            hidden |= _partly_computed(step.scheduler_output) - self._loads
        theirs = step.scheduler_output
        return self.connector.build_connector_meta(_without(theirs, hidden) if hidden else theirs)

    def register_finished_partial_tail(
        self, request: Request, block_ids: tuple[list[int], ...], tails: Any
    ) -> Any:
        tables = tuple(map(_holes_as_null_blocks, block_ids))
        return self.connector.register_finished_partial_tail(_theirs(request), tables, tails)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> Any:
        self._loads.discard(request.request_id)
        tables = tuple(map(_holes_as_null_blocks, block_ids))
        if hasattr(self.connector, "request_finished_all_groups"):
            return self.connector.request_finished_all_groups(_theirs(request), tables)
        return self.connector.request_finished(_theirs(request), tables[0])

    # -- worker --

    def register_kv_caches(self, kv_caches: object) -> None:
        self.connector.register_kv_caches(self.kv_caches)


def _theirs(value: Any) -> Any:
    """vLLM's object behind one of kvferry's views; any other value as it is."""
    if isinstance(value, LimitedRequest):
        request = copy(_theirs(value.request))
        request.num_computed_tokens = value.num_computed_tokens
        request.num_in_flight_tokens = 0
        request.status = RequestStatus.FINISHED_ABORTED
        return request
    if isinstance(value, VllmRequestView):
        return value.request
    if isinstance(value, VllmOutput):
        output = copy(value.theirs)
        output.finished_recving = value.finished_recving
        output.failed_recving = value.failed_recving
        output.finished_sending = value.finished_sending
        output.kv_connector_worker_meta = value.kv_connector_worker_meta
        output.kv_cache_events = value.kv_cache_events
        return output
    return value


def _holes_as_null_blocks(block_ids: list[int]) -> list[int]:
    return [NULL_BLOCK if block == NO_BLOCK else block for block in block_ids]


def _partly_computed(scheduler_output: Any) -> set[str]:
    """The requests in their first step that have a part of the prompt to compute after it."""
    return {
        new.req_id
        for new in scheduler_output.scheduled_new_reqs
        if new.num_computed_tokens + scheduler_output.num_scheduled_tokens[new.req_id]
        < len(new.prompt_token_ids or ())
    }


def _without(scheduler_output: Any, requests: Collection[str]) -> Any:
    """vLLM's step without some requests."""
    step = copy(scheduler_output)
    step.scheduled_new_reqs = [
        new for new in scheduler_output.scheduled_new_reqs if new.req_id not in requests
    ]
    step.scheduled_cached_reqs = _without_cached(scheduler_output.scheduled_cached_reqs, requests)
    for name in (
        "num_scheduled_tokens",
        "scheduled_spec_decode_tokens",
        "scheduled_encoder_inputs",
    ):
        rows = getattr(scheduler_output, name)
        setattr(step, name, {key: rows[key] for key in rows if key not in requests})
    step.total_num_scheduled_tokens = sum(step.num_scheduled_tokens.values())
    return step


def _without_cached(cached: Any, requests: Collection[str]) -> Any:
    """vLLM's `CachedRequestData`, whose lists have one entry per request, without some requests."""
    kept = [index for index, name in enumerate(cached.req_ids) if name not in requests]
    changed: dict[str, Any] = {}
    for field in fields(cached):
        value = getattr(cached, field.name)
        if isinstance(value, list) and len(value) == len(cached.req_ids):
            changed[field.name] = [value[index] for index in kept]
        elif isinstance(value, dict):
            changed[field.name] = {key: value[key] for key in value if key not in requests}
        elif isinstance(value, set):
            changed[field.name] = value - set(requests)
    return replace(cached, **changed)
