"""Tests retained turns in the scheduler: they are evicted when a request needs their blocks, no
request is preempted because of them, and nothing hangs.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from tests.engine.scripted import (
    PROMPT,
    Rig,
    Script,
    assert_quiescent,
    make_limits,
    make_request,
    predict,
)
from tests.engine.test_scheduler_machine import PROMPTS, EngineIncarnation, HybridLife

from kvferry.types import FailurePolicy, RequestId


def keep(rig: Rig, *names: str, num_tokens: int = 12) -> None:
    """Run requests whose blocks the connector retains: by default 3 blocks of 4 tokens each."""
    for number, name in enumerate(names):
        rig.add(
            make_request(name, [30 + number] * num_tokens, max_tokens=1),
            Script(is_delayed=True, is_soft=True),
        )
        rig.run()


def test_a_request_that_fits_an_empty_cache_is_served_however_much_is_kept() -> None:
    rig = Rig(make_limits(num_blocks=16))
    keep(rig, "a", "b", "c", "d", "e")
    assert rig.scheduler.status().num_used_blocks == 15
    rig.add(make_request("large", range(40), max_tokens=4))
    rig.run()
    assert not rig.is_done("large")
    gone = []
    while rig.connector.leaving:
        gone += rig.connector.leaving
        for name in list(rig.connector.leaving):
            rig.end_sending(name)
        rig.run()
    assert gone == ["a", "b", "c", "d"], "it needs 11 blocks, and one was free"
    assert rig.tokens_of("large") == predict(rig.requests["large"])
    assert rig.scheduler.status().preemptions_total == 0


def test_only_as_many_are_let_go_as_it_takes_the_oldest_first() -> None:
    rig = Rig(make_limits(num_blocks=16))
    keep(rig, "a", "b", "c", "d", "e")
    rig.add(make_request("small", range(9), max_tokens=1))
    rig.run()
    assert rig.connector.leaving == ["a"]
    rig.end_sending("a")
    rig.run()
    assert rig.is_done("small")


def test_a_running_request_waits_for_a_kept_block_rather_than_take_anothers() -> None:
    rig = Rig(make_limits(num_blocks=8))
    keep(rig, "kept")
    for name, token in (("first", 1), ("second", 2)):
        rig.add(make_request(name, [token] * 8, max_tokens=6))
    rig.run()
    assert rig.connector.leaving == ["kept"]
    assert (rig.scheduler.status().num_running, rig.scheduler.status().preemptions_total) == (2, 0)
    rig.end_sending("kept")
    rig.run()
    assert all(rig.tokens_of(name) == predict(rig.requests[name]) for name in ("first", "second"))
    assert rig.scheduler.status().preemptions_total == 0
    assert_quiescent(rig)


def test_when_nothing_is_kept_the_youngest_is_preempted_as_ever() -> None:
    """The control for the test above."""
    rig = Rig(make_limits(num_blocks=5))
    for name, token in (("first", 1), ("second", 2)):
        rig.add(make_request(name, [token] * 8, max_tokens=6))
    rig.run()
    assert rig.scheduler.status().preemptions_total > 0


def test_a_load_has_its_blocks_when_what_was_kept_is_gone() -> None:
    rig = Rig(make_limits(num_blocks=6))
    keep(rig, "a", "b")
    rig.add(make_request("far", PROMPT), Script(available_tokens=10))
    rig.run()
    assert rig.connector.leaving == ["a"]
    rig.end_sending("a")
    rig.run()
    rig.end_load("far")
    rig.run()
    assert rig.tokens_of("far") == predict(rig.requests["far"])


def test_what_was_loaded_goes_on_when_what_was_kept_meanwhile_is_gone() -> None:
    rig = Rig(make_limits(num_blocks=7))
    rig.add(make_request("far", range(1, 21)), Script(available_tokens=8))
    rig.step()
    keep(rig, "a")
    rig.end_load("far")
    rig.run()
    assert rig.connector.leaving == ["a"]
    rig.end_sending("a")
    rig.run()
    assert rig.tokens_of("far") == predict(rig.requests["far"])


@pytest.mark.parametrize("policy", FailurePolicy)
def test_what_only_saves_computing_is_computed_when_it_cannot_be_loaded(
    policy: FailurePolicy,
) -> None:
    rig = Rig(make_limits(load_failure_policy=policy))
    rig.add(make_request("next", PROMPT), Script(available_tokens=8))
    rig.step()
    rig.end_load("next", failure="D died")
    rig.news.optional_failures.add("next")
    rig.run()
    assert rig.tokens_of("next") == predict(rig.requests["next"])
    assert_quiescent(rig)


def test_an_engine_that_ends_keeps_nothing() -> None:
    rig = Rig(make_limits())
    keep(rig, "a", "b")
    rig.scheduler.evict_retained()
    assert rig.connector.leaving == ["a", "b"]


class PinnedLife(EngineIncarnation):
    """Random sequences of events with many retained turns: the blocks of an evicted turn are freed
    when its readers have detached, and no other retained blocks are freed.
    """

    @rule(prompt=PROMPTS, max_tokens=st.integers(1, 6))
    def add_turn(self, prompt: list[int], max_tokens: int) -> None:
        name = f"r{len(self.rig.requests)}"
        self.rig.add(make_request(name, prompt, max_tokens), Script(is_delayed=True, is_soft=True))

    @precondition(lambda self: not self.rig.lent.keys().isdisjoint(self.rig.connector.leaving))
    @rule(data=st.data(), is_read=st.booleans())
    def tell_of_leaving(self, data: st.DataObject, is_read: bool) -> None:
        name = data.draw(
            st.sampled_from([name for name in self.rig.connector.leaving if name in self.rig.lent])
        )
        if is_read:
            self.rig.connector.kept.note_being_read(RequestId(name))
        else:
            self.rig.end_sending(name)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            before = self.rig.scheduler.status().preemptions_total
            num_kept = len(self.rig.connector.kept)
            super().step(1)
            if self.rig.scheduler.status().preemptions_total > before:
                assert num_kept == 0, (
                    "somebody was preempted for what is kept for nobody in particular"
                )

    def is_kept(self, name: str) -> bool:
        return self.rig.connector.scripts[name].is_soft and name not in self.rig.connector.leaving

    def finish_everything(self) -> None:
        """Retained blocks are freed only when the scheduler asks for them. Every request must end
        although the scheduler does not ask for all of them.
        """
        for script in self.rig.connector.scripts.values():
            script.available_tokens = script.available_tokens or 0
        for _ in range(600):
            self.rig.step()
            for name in list(self.rig.connector.loads):
                self.rig.end_load(name)
            for name in [name for name in self.rig.lent if not self.is_kept(name)]:
                self.rig.end_sending(name)
            if self.rig.is_at_rest:
                break
        status = self.rig.scheduler.status()
        assert (status.num_running, status.num_waiting, status.num_waiting_for_remote_kvs) == (
            0,
            0,
            0,
        ), "some request never ends"
        self.rig.scheduler.evict_retained()
        super().finish_everything()


class PinnedHybridLife(PinnedLife, HybridLife):
    pass


TestPinnedLife = PinnedLife.TestCase
TestPinnedLife.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestPinnedHybridLife = PinnedHybridLife.TestCase
TestPinnedHybridLife.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
