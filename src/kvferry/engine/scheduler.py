"""Continuous batching over a paged KV cache, and the scheduler's half of the connector contract.

    add, abort  ->  schedule() -> StepPlan  ->  (workers)  ->  update(plan, StepResult) -> outputs

Blocks are published in the prefix cache only when a finished step or a confirmed load has filled
them. A finished request keeps its blocks while a load writes into them or the connector asks for
it, and gives them back when the connector names it.

Pure but for the calls to the connector: no clock, thread or socket. What a connector reports of
unknown requests is counted and noted, never fatal.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from kvferry.connectors.contract import (
    KVConnectorBase_V1,
    KVConnectorOutput,
    RequestStatus,
    SupportsHMA,
)
from kvferry.engine.batch import Batcher, StepBatch
from kvferry.engine.cache.allocator import BlockAllocator
from kvferry.engine.cache.blocks import BlockPool
from kvferry.engine.limits import (
    FINISH_REASONS,
    SchedulerLimits,
    choose_draw_seed,
    find_length_error,
    find_stop,
    find_validation_error,
)
from kvferry.engine.messages import (
    AddRequest,
    CoreStatus,
    RequestOutput,
    SampledToken,
    SequenceSlice,
    StepPlan,
    StepResult,
)
from kvferry.engine.sequence import Counters, Hold, KVSource, Sequence, SequenceQueues
from kvferry.errors import LocalProtocolError
from kvferry.types import FailurePolicy

__all__ = ["Scheduler"]

_BAD_REQUEST, _BAD_GATEWAY = 400, 502


class Scheduler:
    def __init__(
        self, limits: SchedulerLimits, connector: KVConnectorBase_V1 | None = None
    ) -> None:
        self._limits = limits
        self._connector = connector
        self._pool = BlockPool(limits.num_blocks, len(limits.groups))
        self._allocator = BlockAllocator(limits, self._pool)
        self._queues = SequenceQueues()
        self._counters = Counters()
        self._batcher = Batcher(limits, self._allocator, self._queues, self._counters, connector)
        self._batch = StepBatch(limits)
        self._finished_ids: set[str] = set()
        self._load_failures: dict[str, str] = {}
        self._warnings: list[str] = []
        self._num_steps = 0
        self._has_changed = False

    # -- what the core asks --

    @property
    def counters(self) -> Counters:
        return self._counters

    @property
    def block_pool(self) -> BlockPool:
        """For connectors that look at it; only the scheduler changes it."""
        return self._pool

    @property
    def wants_step(self) -> bool:
        """Whether a step now could compute something or has finished requests to tell of. False:
        wait for a message or a wake-up.
        """
        has_candidates = self._queues.running or self._queues.ready or self._queues.waiting
        return bool((self._has_changed and has_candidates) or self._finished_ids)

    @property
    def wants_push(self) -> bool:
        """Whether the connector asks for a step, even an empty one."""
        return self._connector is not None and self._connector.has_pending_push_work()

    @property
    def is_lookup_pending(self) -> bool:
        """Whether the connector was unsure in the last step, so that a request waits for nothing
        but to be asked about again.
        """
        return self._batch.is_lookup_pending

    @property
    def has_transfers(self) -> bool:
        """Whether the connector still has to report the end of something."""
        return self._queues.has_blocks_in_transfer

    def take_warnings(self) -> list[str]:
        """Oddities for the log since the last call."""
        notes, self._warnings = self._warnings, []
        return notes

    def status(self, nonce: int = 0) -> CoreStatus:
        queues, counters = self._queues, self._counters
        return CoreStatus(
            nonce=nonce,
            num_running=len(queues.running),
            num_waiting=len(queues.waiting) + len(queues.ready),
            num_waiting_for_remote_kvs=queues.num_loading,
            num_blocks=self._limits.num_blocks,
            num_used_blocks=self._pool.num_used,
            num_delayed_frees=len(queues.held),
            prompt_tokens_total=counters.prompt_tokens,
            generation_tokens_total=counters.generation_tokens,
            prompt_tokens_by_source=dict(counters.prompt_tokens_by_source),
            preemptions_total=counters.preemptions,
            requests_finished_by_reason=dict(counters.finished_by_reason),
        )

    def evict_retained(self) -> None:
        """Have the connector let go of all it keeps for nobody in particular."""
        if self._connector is not None:
            self._connector.reclaim_blocks(self._limits.num_blocks)

    def check(self) -> None:
        """LocalProtocolError unless every held block belongs to exactly the sequences that list
        it.
        """
        self._pool.check(self._queues.held_blocks())

    # -- requests come and go --

    def add(self, request: AddRequest) -> RequestOutput | None:
        """Take a request in. An output at once means that it is refused."""
        invalid = find_validation_error(request, self._limits)
        if request.request_id in self._queues.known:
            invalid = f"request id {request.request_id} is still in use"
        if invalid is not None:
            return RequestOutput(
                request.request_id, finish_reason="error", error=invalid, error_status=_BAD_REQUEST
            )
        arrival = self._counters.arrivals
        self._counters.arrivals += 1
        request = msgspec.structs.replace(
            request, draw_seed=choose_draw_seed(request, self._limits.seed, arrival)
        )
        seq = Sequence(request, arrival)
        self._queues.known[seq.request_id] = seq
        self._queues.wait(seq)
        self._has_changed = True
        if self._connector is not None:
            self._connector.on_new_request(seq)
        too_long = find_length_error(request, self._limits)
        # The connector knows the request by now, so that it lets go of what a peer may hold for it.
        return self._fail(seq, too_long, _BAD_REQUEST) if too_long else None

    def abort(self, request_id: str) -> None:
        """End a request without an output. A finished one whose blocks wait for a peer is waited
        for no more; unknown ones are ignored.
        """
        seq = self._queues.known.get(request_id)
        if seq is None:
            return
        if not seq.status.is_finished:
            self._finish(seq, RequestStatus.FINISHED_ABORTED)
        elif Hold.SENDING in seq.hold and self._connector is not None:
            self._connector.request_abandoned(request_id)

    def _fail(self, seq: Sequence, reason: str, error_status: int) -> RequestOutput:
        params = self._finish(seq, RequestStatus.FINISHED_ERROR)
        return RequestOutput(
            seq.request_id,
            finish_reason="error",
            error=reason,
            error_status=error_status,
            kv_transfer_params=params,
            num_cached_tokens=seq.num_saved_tokens,
        )

    def _finish(self, seq: Sequence, status: RequestStatus) -> dict[str, Any] | None:
        """The one way for a request to end. What the connector wants the client to know is
        returned.
        """
        self._queues.leave(seq)
        seq.status = status
        self._has_changed = True
        self._counters.finished_by_reason[FINISH_REASONS[status]] += 1
        params = None
        if self._connector is not None:
            self._finished_ids.add(seq.request_id)
            if seq.tables and not seq.hold:
                # A peer computes the last token again, so what that one looks at is all that is
                # worth keeping for it.
                self._allocator.free_unseen_blocks(seq, max(0, seq.num_computed_tokens - 1))
            is_delayed, params = self._notify_connector(self._connector, seq)
            if is_delayed:
                seq.hold |= Hold.SENDING
        self._release_or_hold(seq)
        return params

    def _notify_connector(
        self, connector: KVConnectorBase_V1, seq: Sequence
    ) -> tuple[bool, dict[str, Any] | None]:
        num_blocks = self._limits.blocks_for(seq.num_computed_tokens)
        block_ids = tuple(table.block_ids[:num_blocks] for table in seq.tables) or tuple(
            [] for _ in self._limits.groups
        )
        if isinstance(connector, SupportsHMA):
            return connector.request_finished_all_groups(seq, block_ids)
        return connector.request_finished(seq, block_ids[0])

    def _release_or_hold(self, seq: Sequence) -> None:
        """Forget a finished request, or keep its blocks while somebody touches them."""
        if seq.hold:
            self._queues.held[seq.request_id] = seq
            return
        self._allocator.release(seq)
        self._queues.held.pop(seq.request_id, None)
        del self._queues.known[seq.request_id]

    # -- one step --

    def schedule(self) -> StepPlan:
        """What the workers do next. It may be nothing but what the connector has to tell them."""
        self._has_changed = False
        self._batch = self._batcher.build()
        finished, self._finished_ids = frozenset(self._finished_ids), set()
        plan = StepPlan(self._num_steps, tuple(self._batch.slices), finished)
        self._num_steps += 1
        if self._connector is None:
            return plan
        return replace(plan, connector_metadata=self._connector.build_connector_meta(plan))

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Take in what the workers did with the plan of the last `schedule`."""
        connector_output = result.connector_output
        outputs: list[RequestOutput] = []
        if self._connector is not None and connector_output is not None:
            self._connector.update_connector_output(connector_output)
            # What the connector was unsure of it may know by now.
            self._has_changed = (
                self._has_changed or connector_output.kv_connector_worker_meta is not None
            )
            outputs += self._drop_invalid(connector_output.invalid_block_ids)
        for part in plan.slices:
            output = self._advance(part, result.tokens.get(part.request_id))
            if output is not None:
                outputs.append(output)
        if connector_output is not None:
            outputs += self._take_transfers(connector_output)
        self._has_changed = self._has_changed or bool(plan.slices)
        return outputs

    def _advance(self, part: SequenceSlice, token: SampledToken | None) -> RequestOutput | None:
        seq = self._queues.known.get(part.request_id)
        if (
            seq is None
            or seq.status is not RequestStatus.RUNNING
            or seq.num_computed_tokens != part.start
        ):
            # Its blocks turned out to be invalid in this step: what was computed from them does not
            # count.
            return None
        seq.num_computed_tokens += len(part.token_ids)
        self._allocator.publish(seq)
        if part.sampling is None:
            return None
        if token is None:
            raise LocalProtocolError(f"the workers sampled no token for request {seq.request_id}")
        return self._append(seq, token)

    def _append(self, seq: Sequence, token: SampledToken) -> RequestOutput:
        if not seq.num_output_tokens:
            self._counters.count_prompt(seq)
        self._counters.generation_tokens += 1
        seq.token_ids.append(token.token_id)
        stop = find_stop(seq, self._limits)
        if stop is None:
            return RequestOutput(seq.request_id, [token], num_cached_tokens=seq.num_saved_tokens)
        return RequestOutput(
            seq.request_id,
            [token],
            finish_reason=FINISH_REASONS[stop.status],
            stop_reason=stop.token_id,
            kv_transfer_params=self._finish(seq, stop.status),
            num_cached_tokens=seq.num_saved_tokens,
        )

    # -- what the connector reports --

    def _take_transfers(self, connector_output: KVConnectorOutput) -> list[RequestOutput]:
        outputs = self._give_up_loads(connector_output.given_up_recving)
        for request_id in sorted(connector_output.failed_recving):
            if request_id in self._queues.loading:
                reason = connector_output.failure_reasons.get(
                    request_id, "the connector gave no reason"
                )
                self._load_failures.setdefault(request_id, reason)
        for request_id in sorted(connector_output.finished_recving):
            outputs += self._end_load(request_id)
        for request_id in sorted(connector_output.finished_sending):
            self._end_sending(request_id)
        return outputs

    def _give_up_loads(self, given_up: Mapping[str, str]) -> list[RequestOutput]:
        """A client need not wait until the last byte of a load that has failed is sure not to come;
        its blocks do.
        """
        if self._limits.load_failure_policy is not FailurePolicy.FAIL:
            return []
        loading = [
            (self._queues.loading.get(request_id), reason)
            for request_id, reason in sorted(given_up.items())
        ]
        lost = [
            (seq, reason)
            for seq, reason in loading
            if seq and not seq.status.is_finished and not self._is_optional(seq)
        ]
        return [self._fail(seq, _fetch_error(reason), _BAD_GATEWAY) for seq, reason in lost]

    def _is_optional(self, seq: Sequence) -> bool:
        return self._connector is not None and self._connector.is_load_optional(seq.request_id)

    def _end_load(self, request_id: str) -> list[RequestOutput]:
        seq = self._queues.loading.pop(request_id, None)
        failure = self._load_failures.pop(request_id, None)
        if seq is None:
            self._note_unknown("finished_recving", request_id)
            return []
        self._has_changed = True
        seq.hold &= ~Hold.RECEIVING
        if seq.status.is_finished:
            self._release_or_hold(seq)
        elif failure is not None:
            return self._fail_or_recompute(seq, failure)
        else:
            self._accept_load(seq)
        return []

    def _accept_load(self, seq: Sequence) -> None:
        seq.source = KVSource.LOADED
        loaded = seq.num_computed_tokens + seq.matched.external_tokens
        # The last token is computed again for its logits; its block is published after that, never
        # written while shared.
        seq.num_computed_tokens = min(loaded, seq.num_tokens - 1)
        self._allocator.publish(seq)
        self._queues.make_ready(seq)

    def _fail_or_recompute(self, seq: Sequence, failure: str) -> list[RequestOutput]:
        """By the failure policy: an error for the client, or everything computed here from now on.
        That, too, if it was only to save computing.
        """
        if self._limits.load_failure_policy is FailurePolicy.FAIL and not self._is_optional(seq):
            return [self._fail(seq, _fetch_error(failure), _BAD_GATEWAY)]
        self._warnings.append(
            f"request={seq.request_id} is computed here because its KV could not be fetched: "
            f"{failure}"
        )
        self._has_changed = True
        self._batcher.withdraw(seq)
        seq.source = KVSource.LOCAL_ONLY
        self._queues.wait(seq)
        return []

    def _end_sending(self, request_id: str) -> None:
        seq = self._queues.held.get(request_id)
        if seq is None or Hold.SENDING not in seq.hold:
            self._note_unknown("finished_sending", request_id)
            return
        self._has_changed = True
        seq.hold &= ~Hold.SENDING
        self._release_or_hold(seq)

    def _drop_invalid(self, block_ids: set[int]) -> list[RequestOutput]:
        """Blocks that a load should have filled and did not: nothing that was computed from them
        counts.
        """
        block_ids = {block for block in block_ids if 0 <= block < self._limits.num_blocks}
        if not block_ids:
            return []
        for block in block_ids:
            self._pool.forget(block)
        reason = f"{len(block_ids)} blocks were reported as not loaded"
        for request_id, seq in self._queues.loading.items():
            if any(not block_ids.isdisjoint(table.block_ids) for table in seq.tables):
                self._load_failures.setdefault(request_id, reason)
        outputs: list[RequestOutput] = []
        for seq in [*self._queues.ready, *self._queues.running]:
            num_used = self._limits.blocks_for(seq.num_computed_tokens)
            if any(not block_ids.isdisjoint(table.block_ids[:num_used]) for table in seq.tables):
                self._queues.leave(seq)
                outputs += self._fail_or_recompute(seq, reason)
        return outputs

    def _note_unknown(self, what: str, request_id: str) -> None:
        self._counters.unknown_transfers += 1
        self._warnings.append(
            f"the connector reported {what} of request={request_id}, which has no such transfer; "
            "ignored"
        )


def _fetch_error(reason: str) -> str:
    return f"the KV cache of this request could not be fetched: {reason}"
