"""The scheduler: continuous batching over a paged KV cache, and the connector's scheduler role.

    add, abort  ->  schedule() -> StepPlan  ->  (workers)  ->  update(plan, StepResult) -> outputs

The scheduler publishes a block in the prefix cache only after a finished step or a confirmed load
has filled the block. A finished request keeps its blocks while a load still writes into the blocks,
or while the connector asks for a delayed free. The scheduler frees the blocks when the connector
reports the end of the transfer.

Pure except for the calls to the connector: no clock, thread or socket. If the connector reports an
unknown request, the scheduler counts the report and notes a warning; an unknown request is never
fatal.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from kvferry.connectors.contract import KVConnectorOutput, RequestStatus, SchedulerSide
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
    shorten_prefill_leg,
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

_BAD_REQUEST, _BAD_GATEWAY = 400, 502


class Scheduler:
    """Owns the sequences and blocks of one engine and drives the connector's scheduler role."""

    def __init__(self, limits: SchedulerLimits, connector: SchedulerSide | None = None) -> None:
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
        self._optional_failures: set[str] = set()
        self._warnings: list[str] = []
        self._num_steps = 0
        self._has_changed = False

    # -- queries of the engine core --

    @property
    def counters(self) -> Counters:
        return self._counters

    @property
    def block_pool(self) -> BlockPool:
        """The block pool, for connectors that inspect the pool; only the scheduler changes it."""
        return self._pool

    @property
    def wants_step(self) -> bool:
        """True if a step could compute tokens, or if workers must learn of finished requests.

        When False, the core sleeps until a message or a wake-up arrives.
        """
        has_candidates = self._queues.running or self._queues.ready or self._queues.waiting
        return bool((self._has_changed and has_candidates) or self._finished_ids)

    @property
    def wants_push(self) -> bool:
        """True if the connector asks for a step, even an empty step."""
        return self._connector is not None and self._connector.has_pending_push_work()

    @property
    def is_lookup_pending(self) -> bool:
        """True if the connector could not answer a lookup in the last step.

        The request then waits only until the scheduler asks the connector again.
        """
        return self._batch.is_lookup_pending

    @property
    def begun_loads(self) -> list[str]:
        """The requests whose loads began in the last step."""
        return self._batch.begun_loads

    @property
    def has_transfers(self) -> bool:
        """True if the connector still has to report the end of a load or of a delayed free."""
        return self._queues.has_blocks_in_transfer

    def take_warnings(self) -> list[str]:
        """Return and clear the warnings collected since the last call."""
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
        """Make the connector free all blocks that it retains for no particular request."""
        if self._connector is not None:
            self._connector.reclaim_blocks(self._limits.num_blocks)

    def check(self) -> None:
        """Raise LocalProtocolError unless the sequences list exactly the held blocks."""
        self._pool.check(self._queues.held_blocks())

    # -- adding and ending requests --

    def add(self, request: AddRequest) -> RequestOutput | None:
        """Queue a request; a returned output means that the request is refused."""
        invalid = find_validation_error(request, self._limits)
        if request.request_id in self._queues.known:
            invalid = f"request id {request.request_id} is still in use"
        if invalid is not None:
            return RequestOutput(
                request.request_id, finish_reason="error", error=invalid, error_status=_BAD_REQUEST
            )
        arrival = self._counters.arrivals
        self._counters.arrivals += 1
        request = shorten_prefill_leg(request, self._limits)
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
        # Fail only after `on_new_request`: the connector then also releases the blocks that a peer
        # may hold for the request.
        return self._fail(seq, too_long, _BAD_REQUEST) if too_long else None

    def abort(self, request_id: str) -> None:
        """End a request without an output; unknown ids are ignored.

        If the request has finished and its blocks wait for a peer, the connector stops waiting for
        the peer.
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
        """End a request and return the connector's params for the client.

        Every ending of a request uses this method.
        """
        self._queues.leave(seq)
        seq.status = status
        self._has_changed = True
        self._counters.finished_by_reason[FINISH_REASONS[status]] += 1
        params = None
        if self._connector is not None:
            self._finished_ids.add(seq.request_id)
            if seq.tables and not seq.hold:
                # The peer computes the last token again, so the peer needs only the blocks which
                # that last token attends to.
                self._allocator.free_unseen_blocks(seq, max(0, seq.num_computed_tokens - 1))
            num_blocks = self._limits.blocks_for(seq.num_computed_tokens)
            block_ids = tuple(table.block_ids[:num_blocks] for table in seq.tables) or tuple(
                [] for _ in self._limits.groups
            )
            is_delayed, params = self._connector.request_finished_all_groups(seq, block_ids)
            if is_delayed:
                seq.hold |= Hold.SENDING
        self._release_or_hold(seq)
        return params

    def _release_or_hold(self, seq: Sequence) -> None:
        """Forget a finished request, or hold its blocks while a load or a peer uses the blocks."""
        if seq.hold:
            self._queues.held[seq.request_id] = seq
            return
        self._allocator.release(seq)
        self._queues.held.pop(seq.request_id, None)
        del self._queues.known[seq.request_id]

    # -- one step --

    def schedule(self) -> StepPlan:
        """Plan the next step; the plan may hold nothing but connector metadata."""
        self._has_changed = False
        self._batch = self._batcher.build()
        finished, self._finished_ids = frozenset(self._finished_ids), set()
        plan = StepPlan(
            self._num_steps,
            tuple(self._batch.slices),
            finished,
            preempted_req_ids=frozenset(self._batch.preempted_req_ids),
        )
        self._num_steps += 1
        if self._connector is None:
            return plan
        return replace(plan, connector_metadata=self._connector.build_connector_meta(plan))

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Apply the result of the plan that the last `schedule` returned."""
        connector_output = result.connector_output
        outputs: list[RequestOutput] = []
        if self._connector is not None and connector_output is not None:
            self._connector.update_connector_output(connector_output)
            # The worker metadata may contain the answer to a pending lookup, so the next step asks
            # again.
            self._has_changed = (
                self._has_changed or connector_output.kv_connector_worker_meta is not None
            )
            # Invalid blocks first: a sequence that used an invalid block must not advance below.
            self._optional_failures |= connector_output.optional_failures
            outputs += self._drop_invalid(connector_output.invalid_block_ids)
        for part in plan.slices:
            output = self._advance(part, result.tokens.get(part.request_id))
            if output is not None:
                outputs.append(output)
        if connector_output is not None:
            outputs += self._take_transfers(connector_output)
            self._optional_failures &= self._load_failures.keys()
        self._has_changed = self._has_changed or bool(plan.slices)
        return outputs

    def _advance(self, part: SequenceSlice, token: SampledToken | None) -> RequestOutput | None:
        seq = self._queues.known.get(part.request_id)
        if (
            seq is None
            or seq.status is not RequestStatus.RUNNING
            or seq.num_computed_tokens != part.start
        ):
            # The blocks of this sequence turned out to be invalid in this step, so the tokens
            # computed from the blocks do not count.
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

    # -- connector reports --

    def _take_transfers(self, connector_output: KVConnectorOutput) -> list[RequestOutput]:
        # Failures before ends: `_end_load` looks the failure reason up.
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
        """Fail requests whose load has failed, without waiting until the load has stopped writing.

        Only the client gets the error early. The blocks stay held until `finished_recving` names
        the request, because the transport may still write into the blocks.
        """
        if self._limits.load_failure_policy is not FailurePolicy.FAIL:
            return []
        outputs = []
        for request_id, reason in sorted(given_up.items()):
            seq = self._queues.loading.get(request_id)
            if seq is not None and not seq.status.is_finished:
                outputs.append(self._fail(seq, _fetch_error(reason), _BAD_GATEWAY))
        return outputs

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
        # The last token is computed again for its logits. The block of the last token is published
        # only after that step: a published block may be shared, and a shared block must not be
        # written.
        seq.num_computed_tokens = min(loaded, seq.num_tokens - 1)
        self._allocator.publish(seq)
        self._queues.make_ready(seq)

    def _fail_or_recompute(self, seq: Sequence, failure: str) -> list[RequestOutput]:
        """Return an error for the client or queue the request for local computation.

        The failure policy decides. A load that was only meant to save computation never fails the
        request.
        """
        is_optional = seq.request_id in self._optional_failures
        if self._limits.load_failure_policy is FailurePolicy.FAIL and not is_optional:
            return [self._fail(seq, _fetch_error(failure), _BAD_GATEWAY)]
        self._warnings.append(
            f"request={seq.request_id} is computed here, because fetching its KV failed: {failure}"
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
        """Drop blocks that a load did not fill, and all tokens computed from these blocks."""
        block_ids = {block for block in block_ids if 0 <= block < self._limits.num_blocks}
        if not block_ids:
            return []
        for block in block_ids:
            self._pool.forget(block)
        reason = f"the connector reported {len(block_ids)} blocks as not loaded"
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
            "ignoring it"
        )


def _fetch_error(reason: str) -> str:
    return f"the KV cache of this request could not be fetched: {reason}"
