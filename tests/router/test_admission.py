"""Tests admission control: which requests run, wait or are refused. Examples and a state machine
test the pure queue; further tests run the coroutines of the shell.
"""

import asyncio
import gc
import time
import weakref
from collections import Counter, deque
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvferry.errors import ConfigError, LocalProtocolError
from kvferry.router.serving.admission import (
    AdmissionController,
    AdmissionOptions,
    AdmissionQueue,
    AdmissionRefused,
    AdmissionSlot,
    RefusalReason,
)

DEADLINE_S = 60.0
T = TypeVar("T")


def arrive(queue: AdmissionQueue, tenant: str = "ann", now: float = 0.0) -> AdmissionSlot:
    entry = queue.arrive(tenant, now)
    assert isinstance(entry, AdmissionSlot)
    return entry


def refuse(queue: AdmissionQueue, tenant: str = "ann") -> AdmissionRefused:
    refused = queue.arrive(tenant, 0.0)
    assert isinstance(refused, AdmissionRefused)
    return refused


def test_as_many_run_as_may_and_the_next_waits() -> None:
    queue = AdmissionQueue(AdmissionOptions(max_running=2, max_waiting=1))
    one, _, three = (arrive(queue) for _ in range(3))
    assert (queue.num_running, three.is_admitted) == (2, False)
    assert refuse(queue).status == 503
    assert queue.leave(one, 1.0) == [three]
    assert (queue.num_running, queue.num_waiting) == (2, 0)


def test_a_tenant_that_waits_for_itself_is_told_so_and_others_still_have_room() -> None:
    queue = AdmissionQueue(AdmissionOptions(max_running=1, max_waiting=10, tenant_waiting=2))
    for _ in range(3):
        arrive(queue, "greedy")
    refused = refuse(queue, "greedy")
    assert (refused.reason, refused.status) == (RefusalReason.TENANT, 429)
    assert not arrive(queue, "modest").is_admitted


def test_a_tenant_at_its_limit_is_overtaken_by_others_only() -> None:
    queue = AdmissionQueue(AdmissionOptions(max_running=3, max_waiting=10, tenant_running=2))
    first, *_ = [arrive(queue, "greedy") for _ in range(2)]
    waiting = arrive(queue, "greedy")
    assert not waiting.is_admitted
    assert arrive(queue, "modest").is_admitted
    assert queue.leave(first, 1.0) == [waiting]


def test_tenants_take_turns_and_each_is_served_in_its_order() -> None:
    queue = AdmissionQueue(AdmissionOptions(max_running=1, max_waiting=100))
    running, order = arrive(queue, "x"), []
    waiting = {
        arrive(queue, tenant): f"{tenant}{number}" for tenant in "abc" for number in range(3)
    }
    for _ in range(9):
        (running,) = queue.leave(running, 1.0)
        order.append(waiting[running])
    assert order == ["a0", "b0", "c0", "a1", "b1", "c1", "a2", "b2", "c2"]


def test_who_comes_late_with_little_is_not_behind_all_that_came_early_with_much() -> None:
    queue = AdmissionQueue(AdmissionOptions(max_running=1, max_waiting=1000))
    running = arrive(queue, "greedy")
    for _ in range(500):
        arrive(queue, "greedy")
    modest = arrive(queue, "modest")
    for _ in range(2):
        (running,) = queue.leave(running, 1.0)
    assert modest.is_admitted


def test_the_estimate_grows_with_the_queue_and_with_what_a_request_takes() -> None:
    queue = AdmissionQueue(AdmissionOptions(max_running=2, max_waiting=100))
    assert queue.estimate_s(50) == 1
    queue.leave(arrive(queue, now=0.0), now=4.0)
    assert [queue.estimate_s(ahead) for ahead in (0, 4, 9, 10_000)] == [2, 10, 20, 60]


def test_a_tenant_is_told_to_wait_for_its_own_places() -> None:
    queue = AdmissionQueue(AdmissionOptions(max_running=100, tenant_running=1, tenant_waiting=2))
    queue.leave(arrive(queue, now=0.0), now=4.0)
    for _ in range(3):
        arrive(queue)
    assert refuse(queue) == AdmissionRefused(RefusalReason.TENANT, 12)


def test_nobody_leaves_twice() -> None:
    queue = AdmissionQueue(AdmissionOptions())
    entry = arrive(queue)
    queue.leave(entry, 1.0)
    with pytest.raises(LocalProtocolError, match="twice"):
        queue.leave(entry, 1.0)


@pytest.mark.parametrize(
    "setting",
    [{"max_running": 0}, {"max_waiting": -1}, {"tenant_running": 0}, {"tenant_waiting": -1}],
)
def test_limits_that_admit_nobody_are_refused(setting: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        AdmissionOptions(**setting)


limits = st.none() | st.integers(1, 4)


class AdmissionMachine(RuleBasedStateMachine):
    """Requests arrive and leave in any order, admitted or not."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[AdmissionSlot] = []
        self.waiting: dict[str, deque[AdmissionSlot]] = {}
        self.admissions_of_others: Counter[str] = Counter()
        """Per tenant that waits and may run: admissions of other tenants since its own last
        admission.
        """

    @initialize(
        max_running=st.integers(1, 5),
        max_waiting=st.integers(0, 8),
        tenant_running=limits,
        tenant_waiting=limits,
    )
    def start(
        self,
        max_running: int,
        max_waiting: int,
        tenant_running: int | None,
        tenant_waiting: int | None,
    ) -> None:
        self.options = AdmissionOptions(max_running, max_waiting, tenant_running, tenant_waiting)
        self.queue = AdmissionQueue(self.options)

    @rule(tenant=st.sampled_from("abc"))
    def come(self, tenant: str) -> None:
        waiting, num_waiting = (
            len(self.waiting.get(tenant, ())),
            sum(map(len, self.waiting.values())),
        )
        entry = self.queue.arrive(tenant, 0.0)
        match entry:
            case AdmissionRefused(reason=RefusalReason.TENANT):
                assert waiting == self.options.tenant_waiting
            case AdmissionRefused(reason=RefusalReason.FULL):
                assert num_waiting == self.options.max_waiting
            case AdmissionSlot(is_admitted=True):
                assert waiting == 0
                self.running.append(entry)
            case AdmissionSlot():
                self.waiting.setdefault(tenant, deque()).append(entry)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.running))
        self.running.remove(entry)
        for admitted in self.queue.leave(entry, 1.0):
            assert self.waiting[admitted.tenant].popleft() is admitted, "overtaken within a tenant"
            self.running.append(admitted)
            self._check_turn(admitted.tenant)

    def _check_turn(self, tenant: str) -> None:
        """While a tenant that may run waits, no other tenant is admitted twice."""
        for other, queue in self.waiting.items():
            may_run = (
                self.options.tenant_running is None
                or self.queue.num_running_of(other) < self.options.tenant_running
            )
            self.admissions_of_others[other] = (
                self.admissions_of_others[other] + 1 if queue and may_run and other != tenant else 0
            )
        assert max(self.admissions_of_others.values(), default=0) <= len(self.waiting)

    @precondition(lambda self: any(self.waiting.values()))
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        entry = data.draw(
            st.sampled_from([entry for queue in self.waiting.values() for entry in queue])
        )
        self.waiting[entry.tenant].remove(entry)
        if not self.waiting[entry.tenant]:
            self.admissions_of_others[entry.tenant] = 0  # a tenant that returns is last in turn
        assert self.queue.leave(entry, 1.0) == []

    @invariant()
    def limits_hold_and_nobody_is_lost(self) -> None:
        assert self.queue.num_running == len(self.running) <= self.options.max_running
        assert (
            self.queue.num_waiting
            == sum(map(len, self.waiting.values()))
            <= self.options.max_waiting
        )
        for tenant in "abc":
            assert self.queue.num_running_of(tenant) == sum(
                entry.tenant == tenant for entry in self.running
            )
            assert self.queue.num_running_of(tenant) <= (
                self.options.tenant_running or self.options.max_running
            )
            assert self.queue.num_waiting_of(tenant) == len(self.waiting.get(tenant, ()))

    @invariant()
    def nobody_waits_beside_a_free_place(self) -> None:
        if len(self.running) < self.options.max_running:
            for tenant, queue in self.waiting.items():
                assert not queue or self.queue.num_running_of(tenant) == self.options.tenant_running

    def teardown(self) -> None:
        """Every waiting request is admitted in the end."""
        while hasattr(self, "queue") and self.running:
            self.running += self.queue.leave(self.running.pop(0), 2.0)
        if hasattr(self, "queue"):
            assert (self.queue.num_running, self.queue.num_waiting) == (0, 0)


TestAdmissionMachine = AdmissionMachine.TestCase


# -- the shell --


def run(story: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(DEADLINE_S):
            return await story

    return asyncio.run(bounded())


def make_admission(**options: int) -> AdmissionController:
    return AdmissionController(AdmissionOptions(**options), clock=lambda: 0.0)


async def enter(admission: AdmissionController, tenant: str = "ann") -> AdmissionSlot:
    entry = await admission.enter(tenant, DEADLINE_S)
    assert isinstance(entry, AdmissionSlot)
    return entry


async def settle() -> None:
    """Let every task that can run proceed to its next wait."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_who_waits_goes_on_when_there_is_room() -> None:
    async def story() -> None:
        admission = make_admission(max_running=1)
        first = await enter(admission)
        second = asyncio.create_task(enter(admission))
        await settle()
        assert (second.done(), admission.queue.num_waiting) == (False, 1)
        admission.leave(first)
        admission.leave(await second)
        assert (admission.queue.num_running, admission.queue.num_waiting) == (0, 0)

    run(story())


def test_a_deadline_ends_the_waiting() -> None:
    async def story() -> None:
        admission = make_admission(max_running=1)
        first = await enter(admission)
        assert await admission.enter("ann", timeout_s=0.001) == AdmissionRefused(
            RefusalReason.LATE, 1
        )
        assert admission.queue.num_waiting == 0
        admission.leave(first)
        admission.leave(await enter(admission))

    run(story())


def test_a_place_that_is_free_in_the_moment_of_the_deadline_is_taken() -> None:
    async def story() -> None:
        admission, loop = make_admission(max_running=1), asyncio.get_running_loop()
        first = await enter(admission)
        waiting = asyncio.create_task(admission.enter("ann", timeout_s=0.6))
        await settle()
        # Block the loop until the leave and the deadline are both due, the leave first; the waiter
        # runs after both.
        loop.call_later(0.05, admission.leave, first)
        loop.call_soon(time.sleep, 0.7)
        entry = await waiting
        assert isinstance(entry, AdmissionSlot)
        admission.leave(entry)
        assert (admission.queue.num_running, admission.queue.num_waiting) == (0, 0)

    run(story())


def test_who_is_cancelled_while_waiting_leaves_nothing_behind() -> None:
    async def story() -> None:
        admission = make_admission(max_running=1)
        first = await enter(admission)
        waiting = asyncio.create_task(enter(admission))
        await settle()
        waiting.cancel()
        await asyncio.wait([waiting])
        assert admission.queue.num_waiting == 0
        admission.leave(first)
        assert admission.queue.num_running == 0

    run(story())


@given(
    events=st.lists(
        st.tuples(st.sampled_from(["cancel", "leave"]), st.integers(0, 5)), max_size=12
    ),
    num_running=st.integers(1, 3),
)
def test_a_cancel_in_the_moment_of_admission_hands_the_place_on(
    events: list[tuple[str, int]], num_running: int
) -> None:
    """Several requests leave and are cancelled without a loop iteration in between, and no place is
    lost.
    """

    async def story() -> None:
        admission = make_admission(max_running=num_running)
        running = [await enter(admission) for _ in range(num_running)]
        waiting = [asyncio.create_task(enter(admission)) for _ in range(6)]
        await settle()
        for event, number in events:
            if event == "cancel":
                waiting[number].cancel()
            elif running:
                admission.leave(running.pop())
        while running:
            admission.leave(running.pop())
        unfinished = set(waiting)
        while unfinished:
            done, unfinished = await asyncio.wait(unfinished, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if not task.cancelled():
                    admission.leave(task.result())
        assert (admission.queue.num_running, admission.queue.num_waiting) == (0, 0)

    run(story())


def test_nothing_is_kept_of_those_who_are_gone() -> None:
    async def story() -> None:
        admission = make_admission(max_running=1)
        gone: list[weakref.ref[asyncio.Task[AdmissionSlot]]] = []
        for _ in range(20):
            first, second = await enter(admission), asyncio.create_task(enter(admission))
            await settle()
            admission.leave(first)
            admission.leave(await second)
            gone.append(weakref.ref(second))
        del first, second
        await settle()
        gc.collect()
        assert [reference() for reference in gone] == [None] * 20

    run(story())


def test_who_closes_serves_those_who_wait_and_nobody_new() -> None:
    async def story() -> None:
        admission = make_admission(max_running=1)
        first = await enter(admission)
        waiting = asyncio.create_task(enter(admission))
        await settle()
        admission.close()
        refused = await admission.enter("ann", DEADLINE_S)
        assert isinstance(refused, AdmissionRefused)
        assert (refused.reason, refused.status) == (RefusalReason.CLOSING, 503)
        admission.leave(first)
        admission.leave(await waiting)

    run(story())
