"""Tests the scheduler with random sequences of events: whatever happens, all blocks are accounted
for, outputs are right, and in the end no block is held.

At every computed slice, the rig asserts that all blocks that the slice attends to are present, and
that no block outside a window is kept.
"""

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.engine.scripted import FULL, Rig, Script, make_limits, make_request, predict, window

from kvferry.connectors.contract import KVCacheGroup
from kvferry.engine.limits import SchedulerLimits
from kvferry.types import FailurePolicy

PROMPTS = st.builds(
    lambda stem, tail: [*range(stem), *tail],
    st.integers(0, 14),
    st.lists(st.integers(40, 42), min_size=1, max_size=6),
)
WINDOWS = st.builds(window, st.integers(1, 12))
HYBRIDS = st.one_of(
    st.tuples(st.just(FULL), WINDOWS),
    st.tuples(st.just(FULL), WINDOWS),
    st.tuples(WINDOWS),
    st.tuples(WINDOWS, st.just(FULL), WINDOWS),
    st.tuples(
        st.just(FULL),
        st.builds(lambda size: KVCacheGroup(("chunked",), attention_chunk=size), st.integers(1, 9)),
    ),
)


class EngineIncarnation(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(6, 12),
        budget=st.integers(1, 16),
        seqs=st.integers(1, 4),
        policy=st.sampled_from(FailurePolicy),
        chunked=st.booleans(),
    )
    def build(
        self, num_blocks: int, budget: int, seqs: int, policy: FailurePolicy, chunked: bool
    ) -> None:
        self.begin(Rig(self.limits_of(num_blocks, budget, seqs, policy, chunked)))

    def limits_of(
        self, num_blocks: int, budget: int, seqs: int, policy: FailurePolicy, chunked: bool
    ) -> SchedulerLimits:
        return make_limits(
            num_blocks=num_blocks,
            max_num_batched_tokens=budget,
            max_num_seqs=seqs,
            load_failure_policy=policy,
            enable_chunked_prefill=chunked,
        )

    def begin(self, rig: Rig) -> None:
        self.rig = rig
        self.aborted: set[str] = set()

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 6),
        available=st.one_of(st.none(), st.just(0), st.integers(1, 20)),
        is_delayed=st.booleans(),
        salt=st.sampled_from(["", "", "", "x"]),
    )
    def add(
        self, prompt: list[int], max_tokens: int, available: int | None, is_delayed: bool, salt: str
    ) -> None:
        name = f"r{len(self.rig.requests)}"
        tokens = None if available is None else min(available, len(prompt))
        self.rig.add(
            make_request(name, prompt, max_tokens, salt), Script(tokens, is_delayed=is_delayed)
        )

    @precondition(lambda self: self.rig.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.rig.requests)))
        self.aborted.add(name)
        self.rig.abort(name)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            plan = self.rig.step()
            budget = self.rig.limits.max_num_batched_tokens
            sizes = [len(part.token_ids) for part in plan.slices]
            assert sum(sizes) <= budget or (
                len(sizes) == 1 and not self.rig.limits.enable_chunked_prefill
            )

    @precondition(lambda self: self.rig.connector.loads)
    @rule(data=st.data(), failure=st.sampled_from([None, None, "it broke"]))
    def end_load(self, data: st.DataObject, failure: str | None) -> None:
        self.rig.end_load(data.draw(st.sampled_from(sorted(self.rig.connector.loads))), failure)

    @precondition(lambda self: self.rig.lent)
    @rule(data=st.data())
    def end_sending(self, data: st.DataObject) -> None:
        self.rig.end_sending(data.draw(st.sampled_from(sorted(self.rig.lent))))

    @rule(data=st.data(), is_receive=st.booleans())
    def report_a_stranger(self, data: st.DataObject, is_receive: bool) -> None:
        """The connector reports an id that never existed, or one whose request has ended and whose
        blocks are free.
        """
        gone = [
            name
            for name in self.rig.last
            if name not in self.rig.connector.loads and name not in self.rig.lent
        ]
        name = data.draw(st.sampled_from(["stranger", *gone]))
        (self.rig.news.finished_recving if is_receive else self.rig.news.finished_sending).add(name)

    @invariant()
    def blocks_are_accounted_for(self) -> None:
        self.rig.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.finish_everything()
        status = self.rig.scheduler.status()
        assert (status.num_running, status.num_waiting, status.num_waiting_for_remote_kvs) == (
            0,
            0,
            0,
        )
        assert (status.num_used_blocks, status.num_delayed_frees) == (0, 0)
        for name, request in self.rig.requests.items():
            self.check_end(name, predict(request))

    def finish_everything(self) -> None:
        for script in self.rig.connector.scripts.values():
            script.available_tokens = script.available_tokens or 0
        for _ in range(400):
            self.rig.step()
            for name in list(self.rig.connector.loads):
                self.rig.end_load(name)
            for name in list(self.rig.lent):
                self.rig.end_sending(name)
            if self.rig.is_at_rest:
                return
        raise AssertionError("some request never ends")

    def check_end(self, name: str, predicted: list[int]) -> None:
        connector = self.rig.connector
        assert (
            connector.times("request_finished", name)
            == connector.times("on_new_request", name)
            == 1
        )
        tokens = self.rig.tokens_of(name)
        if self.rig.is_done(name) and self.rig.last[name].finish_reason == "length":
            room = self.rig.limits.max_total_tokens - len(self.rig.requests[name].prompt_token_ids)
            assert tokens == predicted[:room]
        else:
            assert tokens == predicted[: len(tokens)]
            assert name in self.aborted or self.rig.last[name].finish_reason == "error"


class HybridLife(EngineIncarnation):
    """The same with several KV-cache groups, other block sizes, and producers whose block size
    differs from ours.
    """

    @initialize(
        num_blocks=st.integers(8, 24),
        budget=st.integers(1, 16),
        seqs=st.integers(1, 4),
        policy=st.sampled_from(FailurePolicy),
        chunked=st.booleans(),
        groups=HYBRIDS,
        block_size=st.integers(1, 6),
        producer_block_size=st.sampled_from([1, 1, 1, 2, 3, 8]),
    )
    def build(
        self,
        num_blocks: int,
        budget: int,
        seqs: int,
        policy: FailurePolicy,
        chunked: bool,
        groups: tuple[KVCacheGroup, ...],
        block_size: int,
        producer_block_size: int,
    ) -> None:
        limits = replace(
            self.limits_of(num_blocks, budget, seqs, policy, chunked),
            groups=groups,
            block_size=block_size,
        )
        self.begin(Rig(limits, producer_block_size=producer_block_size))


TestEngineLife = EngineIncarnation.TestCase
TestEngineLife.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestHybridLife = HybridLife.TestCase
TestHybridLife.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
