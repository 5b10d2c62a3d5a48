"""Tests random actions as in the pull fuzz test, with both legs of a request: in any order, with
any delay between them, and sometimes with one leg missing.

Every seed is a separate test; the name of a failed test contains its seed.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from tests.sampling import seeds
from tests.vllm.inside.conftest import StartEngine
from tests.vllm.inside.engines import Engine
from tests.vllm.inside.legs import push_ticket
from tests.vllm.inside.test_fuzz import ACTIONS, World


class PushWorld(World):
    """Two engines that push, and the legs that a router is about to send. Some requests are pulled:
    D gets P's parameters.
    """

    connector = "NixlPushConnector"

    def __init__(
        self, start_engine: StartEngine, seed: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        super().__init__(start_engine, seed, monkeypatch)
        self.legs: list[Callable[[], None]] = []
        self.source: dict[str, Any] = self.p.prefill("asked first", [1, 2, 3])
        self.prompts["asked first"] = [1, 2, 3]
        self.pushed: set[str] = set()
        self.num_pairs = 0

    def _start(self, name: str, num_blocks: int, **more: Any) -> Engine:
        """P prefills in chunks, so that each chunk moves while P computes the next."""
        chunks = {"max_num_batched_tokens": 48, "max_num_seqs": 4} if name == "p" else {}
        return super()._start(name, num_blocks, **chunks, **more)

    def actions(self) -> dict[Callable[[], None], float]:
        return {
            **super().actions(),
            self.add_to_p: 1,
            self.add_to_d: 1,
            self.add_pair: 3,
            self.send_leg: 7,
            self.preempt: 1,
        }

    def preempt(self) -> None:
        engine = self.rng.choice([self.p, self.p, self.d])
        if engine.scheduler.running:
            engine.preempt(self.rng.choice(engine.scheduler.running).request_id)

    def add_pair(self) -> None:
        """Create both legs: half of the time one is sent now; the rest is sent later, or in a few
        cases never.
        """
        self.num_pairs += 1
        tokens, ticket = self.new_prompt(), push_ticket(self.source, f"handover {self.num_pairs}")
        for_d = (
            tokens
            if self.rng.random() < 0.9
            else tokens[: self.rng.randrange(len(tokens)) + 1] + self.new_prompt()[:20]
        )
        num_choices = self.rng.choice([1, 1, 1, 3])
        legs = [
            partial(self.ask_p, tokens, ticket),
            partial(self.ask_d, for_d, ticket, num_choices),
        ]
        self.rng.shuffle(legs)
        if self.rng.random() < 0.5:
            legs.pop()()
        if self.rng.random() < 0.9:
            self.legs += legs

    def send_leg(self) -> None:
        if self.legs:
            self.legs.pop(self.rng.randrange(len(self.legs)))()

    def ask_p(self, tokens: list[int], ticket: str) -> None:
        name = self.name()
        self.prompts[name] = tokens
        self.pushed.add(name)
        self.p.add(name, tokens, {"do_remote_decode": True, "push_ticket": ticket}, max_tokens=1)

    def ask_d(self, tokens: list[int], ticket: str, num_choices: int) -> None:
        for _ in range(num_choices):
            self._ask_d(tokens, {"do_remote_prefill": True, "push_ticket": ticket})

    def collect(self) -> None:
        for name, answer in self.p.answers.items():
            if answer.params is not None:
                self.source = answer.params
                # A router that has sent both legs sends no third one.
                answer.params = None if name in self.pushed else answer.params
        super().collect()

    def end(self) -> None:
        while self.legs:
            self.send_leg()
        super().end()


@pytest.mark.parametrize("seed", seeds(5, exhaustively=12))
def test_whatever_happens_to_both_legs_nothing_is_left(
    start_engine: StartEngine, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = PushWorld(start_engine, seed, monkeypatch)
    for _ in range(ACTIONS):
        world.act()
    world.end()
    served = world.check_answers()
    print(
        f"{world.policy} {world.faults} is_async={world.is_async} deaths={world.deaths} "
        f"served={served} loaded={world.d.loaded_tokens}"
    )
