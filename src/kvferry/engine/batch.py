"""Batcher: decides which sequences compute how many tokens in the next step, and allocates blocks.

Running sequences come first, then sequences whose remote KV has arrived, then new sequences, each
in order of arrival. If no block is free for a running sequence, the batcher preempts the youngest
sequence; a new sequence waits instead. The batcher also starts loads by the connector; a load uses
no token budget of the step.

Pure except for the calls to the connector's scheduler role.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from kvferry.connectors.contract import RequestStatus, SchedulerSide
from kvferry.engine.cache.allocator import BlockAllocation, BlockAllocator
from kvferry.engine.cache.blocks import BlockTable
from kvferry.engine.cache.prefix import CachedPrefix
from kvferry.engine.limits import SchedulerLimits, banned_token_ids
from kvferry.engine.messages import SequenceSlice
from kvferry.engine.sequence import Counters, KVSource, Match, Sequence, SequenceQueues


@dataclass(slots=True)
class StepBatch:
    """The slices collected for one step, and the token budget already used."""

    limits: SchedulerLimits
    slices: list[SequenceSlice] = field(default_factory=list)
    num_tokens: int = 0
    preempted_req_ids: set[str] = field(default_factory=set)
    is_lookup_pending: bool = False
    """True if the connector could not answer a lookup yet; the core asks again soon."""
    begun_loads: list[str] = field(default_factory=list)
    """The requests whose loads begin in this step."""

    def share(self, wanted: int) -> int:
        """Return how many of `wanted` tokens still fit into this step."""
        left = self.limits.max_num_batched_tokens - self.num_tokens
        if self.limits.enable_chunked_prefill or wanted <= left:
            return min(wanted, left)
        # Chunked prefill is off: a prompt that is longer than the token budget gets a step of its
        # own.
        return 0 if self.slices else wanted

    def add(self, seq: Sequence, count: int) -> None:
        end = seq.num_computed_tokens + count
        is_last = end == seq.num_tokens
        self.num_tokens += count
        self.slices.append(
            SequenceSlice(
                request_id=seq.request_id,
                token_ids=tuple(seq.token_ids[seq.num_computed_tokens : end]),
                start=seq.num_computed_tokens,
                block_ids=tuple(tuple(table.block_ids) for table in seq.tables),
                sampling=seq.sampling if is_last else None,
                draw_seed=seq.draw_seed,
                draw_index=seq.num_output_tokens,
                banned_token_ids=banned_token_ids(seq, self.limits) if is_last else (),
            )
        )


class _Outcome(Enum):
    """The result of an attempt to admit a waiting sequence."""

    ADMITTED = auto()
    SKIPPED = auto()
    """The sequence waits, but sequences behind it may be admitted."""
    BLOCKED = auto()
    """The sequence waits, and every sequence behind it waits too."""


@dataclass(frozen=True, slots=True)
class _ExternalTokens:
    """The number of tokens that the connector would load after the local prefix."""

    num_tokens: int = 0
    is_async: bool = False


@dataclass(slots=True)
class Batcher:
    """Builds one `StepBatch` per step from the scheduler's queues."""

    limits: SchedulerLimits
    allocator: BlockAllocator
    queues: SequenceQueues
    counters: Counters
    connector: SchedulerSide | None

    def build(self) -> StepBatch:
        batch = StepBatch(self.limits)
        self._continue_running(batch)
        self._admit_ready(batch)
        if not batch.preempted_req_ids:
            self._admit_waiting(batch)
        return batch

    # -- running --

    def _continue_running(self, batch: StepBatch) -> None:
        if self.limits.windowed_groups:
            # Free the unseen blocks of all running sequences before any sequence asks for blocks;
            # otherwise a sequence could be preempted although idle blocks exist.
            for seq in self.queues.running:
                self.allocator.free_unseen_blocks(seq, seq.num_computed_tokens)
        for seq in list(self.queues.running):
            count = batch.share(seq.num_uncomputed_tokens)
            # An older sequence may have preempted this sequence earlier in this loop.
            if count and seq.status is RequestStatus.RUNNING and self._make_room(seq, count, batch):
                batch.add(seq, count)

    def _make_room(self, seq: Sequence, count: int, batch: StepBatch) -> bool:
        """Give a running sequence its blocks, preempting younger sequences if necessary."""
        while not self.allocator.extend(seq, seq.num_computed_tokens + count):
            self._request_blocks(
                self.allocator.num_missing_blocks(seq, seq.num_computed_tokens + count)
            )
            victim = self.queues.youngest_holder()
            if self._is_waiting_better(victim is seq):
                return False
            self._preempt(victim)
            batch.preempted_req_ids.add(victim.request_id)
            if victim is seq:
                return False
        return True

    def _is_waiting_better(self, is_own_victim: bool) -> bool:
        """True if blocks will be freed soon anyway; a preemption would lose computed tokens."""
        if not self.queues.has_blocks_in_transfer:
            return False
        is_alone = is_own_victim and self.queues.num_holders == 1
        return is_alone or (self.connector is not None and self.connector.has_pending_block_frees())

    def _request_blocks(self, num_blocks: int) -> None:
        """Ask the connector to free `num_blocks` blocks retained for no particular request."""
        if self.connector is not None:
            self.connector.reclaim_blocks(num_blocks)

    def _preempt(self, seq: Sequence) -> None:
        """Take all blocks of a sequence; the sequence restarts from its cached prefix."""
        self.counters.preemptions += 1
        self.queues.leave(seq)
        self.withdraw(seq)
        self.queues.wait(seq, RequestStatus.PREEMPTED)

    def withdraw(self, seq: Sequence) -> None:
        """Free the blocks of a sequence that has to start again."""
        self.allocator.release(seq)
        seq.num_computed_tokens = 0
        if seq.source is KVSource.LOADED:
            seq.source = KVSource.MAY_ASK

    # -- ready --

    def _admit_ready(self, batch: StepBatch) -> None:
        while self.queues.ready:
            seq = self.queues.ready[0]
            count = batch.share(seq.num_uncomputed_tokens)
            if not count or self._is_full() or not self._claim(seq, count, batch):
                return
            self.queues.leave(seq)
            self._start(seq, count, 0, batch)

    def _claim(self, seq: Sequence, count: int, batch: StepBatch) -> bool:
        """Give a ready sequence the blocks that it still lacks.

        While other sequences run, the ready sequence waits for the blocks of the running sequences.
        If no sequence runs, ready sequences could block each other forever, so the youngest ready
        sequence is preempted.
        """
        while not self.allocator.extend(seq, seq.num_computed_tokens + count):
            self._request_blocks(
                self.allocator.num_missing_blocks(seq, seq.num_computed_tokens + count)
            )
            if (
                self.queues.running
                or self.queues.ready[-1] is seq
                or self._is_waiting_better(is_own_victim=False)
            ):
                return False
            victim = self.queues.ready[-1]
            self._preempt(victim)
            batch.preempted_req_ids.add(victim.request_id)
        return True

    # -- waiting --

    def _admit_waiting(self, batch: StepBatch) -> None:
        index = 0
        while index < len(self.queues.waiting) and not self._is_full():
            outcome = self._admit(self.queues.waiting[index], batch)
            if outcome is _Outcome.BLOCKED:
                return
            index += outcome is _Outcome.SKIPPED

    def _admit(self, seq: Sequence, batch: StepBatch) -> _Outcome:
        """Try to admit a waiting sequence; on ADMITTED the sequence has left `waiting`."""
        cached = self.allocator.find_cached(seq)
        num_local_tokens = cached.num_blocks * self.limits.block_size
        # If the whole prompt is cached, the connector must offer nothing, although the last token
        # is computed again.
        offer = self._ask(seq, seq.num_tokens if cached.is_whole else num_local_tokens)
        if offer is None:
            batch.is_lookup_pending = True
            return _Outcome.SKIPPED
        match = Match(num_local_tokens, offer.num_tokens)
        return (
            self._begin_load(seq, cached, match, batch)
            if offer.is_async
            else self._begin(seq, cached, match, batch)
        )

    def _ask(self, seq: Sequence, num_local_tokens: int) -> _ExternalTokens | None:
        if self.connector is None or seq.source is KVSource.LOCAL_ONLY:
            return _ExternalTokens()
        count, is_async = self.connector.get_num_new_matched_tokens(seq, num_local_tokens)
        if count is None:
            return None
        count = max(0, min(count, seq.num_tokens - num_local_tokens))
        return _ExternalTokens(count, is_async and count > 0)

    def _begin_load(
        self, seq: Sequence, cached: CachedPrefix, match: Match, batch: StepBatch
    ) -> _Outcome:
        """Hold blocks for the local prefix and for the tokens that the connector loads.

        The blocks are published only when the load has succeeded.
        """
        assert self.connector is not None
        allocation = self.allocator.plan_allocation(seq, cached, match, match.total_tokens)
        # A load cannot be preempted, so a load must leave enough blocks for the sequences that
        # compute.
        num_missing = self._reserved_blocks() - self.allocator.num_left(allocation)
        if num_missing > 0:
            self._request_blocks(num_missing)
            return _Outcome.BLOCKED
        self._occupy(seq, allocation)
        seq.num_computed_tokens = match.local_tokens
        self.queues.load(seq)
        self.connector.update_state_after_alloc(seq, BlockTable(seq.tables), match.external_tokens)
        batch.begun_loads.append(seq.request_id)
        return _Outcome.ADMITTED

    def _reserved_blocks(self) -> int:
        return sum(
            self.allocator.num_still_needed(seq)
            for seq in (*self.queues.running, *self.queues.ready)
        )

    def _begin(
        self, seq: Sequence, cached: CachedPrefix, match: Match, batch: StepBatch
    ) -> _Outcome:
        # At least the last token is computed: sampling needs its logits.
        computed = min(match.total_tokens, seq.num_tokens - 1)
        count = batch.share(seq.num_tokens - computed)
        if not count:
            return _Outcome.BLOCKED
        allocation = self.allocator.plan_allocation(
            seq, cached, match, max(computed + count, match.total_tokens)
        )
        num_missing = -self.allocator.num_left(allocation)
        if num_missing > 0:
            self._request_blocks(num_missing)
            return _Outcome.BLOCKED
        self._occupy(seq, allocation)
        seq.num_computed_tokens = computed
        self._start(seq, count, match.external_tokens, batch)
        return _Outcome.ADMITTED

    def _occupy(self, seq: Sequence, allocation: BlockAllocation) -> None:
        self.allocator.allocate(seq, allocation)
        self.queues.leave(seq)

    def _start(self, seq: Sequence, count: int, num_external_tokens: int, batch: StepBatch) -> None:
        self.queues.run(seq)
        if self.connector is not None:
            self.connector.update_state_after_alloc(
                seq, BlockTable(seq.tables), num_external_tokens
            )
        seq.source = KVSource.MAY_ASK if seq.source is KVSource.LOADED else seq.source
        batch.add(seq, count)

    def _is_full(self) -> bool:
        return len(self.queues.running) >= self.limits.max_num_seqs
