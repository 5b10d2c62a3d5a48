"""Clients of the router in a chaos run: single requests and conversations of several turns,
streamed or not; some disconnect early.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import aiohttp
from tests.chaos.judge import Attempt
from tests.chaos.load import Question, exchange
from tests.chaos.router.verdict import FAULTS, Happened, Verdict, decide
from tests.e2e.harness import Cluster, Engine, Prompt, ask, new_session

LEAVING = 0.1
STREAMED = 0.7
LONGEST_STAY_S = 1.5
SHORT_SLEEP_S = 0.2

Conversation = Sequence[Question]
"""The turns of one conversation, in order."""


@dataclass
class Clients:
    url: str
    questions: Sequence[Question]
    conversations: Sequence[Conversation]
    seed: int
    bound_s: float
    happened: Happened
    verdicts: Counter[Verdict] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    is_stopping: bool = False
    _names: "count[int]" = field(default_factory=count)

    async def run(self, streams: int) -> None:
        """Run the clients until `is_stopping` is set and every request has ended. Every second
        client holds conversations, the others send single requests.
        """
        async with self._session() as session:
            await asyncio.gather(
                *(
                    (self._converse if number % 2 else self._ask)(session, number)
                    for number in range(streams)
                )
            )

    async def ask_all(self, questions: Sequence[Question]) -> list[Verdict]:
        """Send all requests at once, not streamed, and read each response to the end."""
        async with self._session() as session:
            return list(
                await asyncio.gather(*(self._once(session, question) for question in questions))
            )

    def _session(self) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=self.bound_s)
        return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))

    async def _ask(self, session: aiohttp.ClientSession, number: int) -> None:
        rng = random.Random(f"asks {self.seed} {number}")
        while not self.is_stopping:
            await self._once(session, rng.choice(self.questions), rng)

    async def _converse(self, session: aiohttp.ClientSession, number: int) -> None:
        rng = random.Random(f"talks {self.seed} {number}")
        while not self.is_stopping:
            name = f"talk {next(self._names)}"
            for question in rng.choice(self.conversations):
                # Each turn repeats the whole conversation, so its answer must be right even if the
                # last turn failed.
                await self._once(session, question, rng, name)

    async def _once(
        self,
        session: aiohttp.ClientSession,
        question: Question,
        rng: random.Random | None = None,
        conversation: str | None = None,
    ) -> Verdict:
        body = {**question.prompt.body(), "stream": rng is not None and rng.random() < STREAMED}
        if conversation is not None:
            body["conversation_id"] = conversation
        stay_s = (
            rng.random() * LONGEST_STAY_S if rng is not None and rng.random() < LEAVING else None
        )
        attempt, began = Attempt(), time.monotonic()
        asking = asyncio.create_task(exchange(session, self.url, body, attempt))
        if (await asyncio.wait([asking], timeout=stay_s))[1]:
            attempt.has_left = True
            asking.cancel()
            await asyncio.wait([asking])
        else:
            asking.result()
        verdict = decide(attempt, question.right, began, time.monotonic(), self.happened)
        self._note(verdict, attempt, began, body, question)
        if verdict is not Verdict.RIGHT:
            await asyncio.sleep(SHORT_SLEEP_S)
        return verdict

    def _note(
        self,
        verdict: Verdict,
        attempt: Attempt,
        began: float,
        body: dict[str, object],
        question: Question,
    ) -> None:
        self.verdicts[verdict] += 1
        if verdict in FAULTS:
            took = time.monotonic() - began
            said = {name: body.get(name) for name in ("stream", "conversation_id")}
            self.faults.append(
                f"{verdict}: {attempt} after {took:.1f} s, {said}, "
                f"{len(question.prompt.token_ids)} tokens, {question.right}"
            )


# -- right answers --


def _says(rng: random.Random, longest: int) -> tuple[int, ...]:
    return tuple(rng.randrange(10, 500) for _ in range(rng.randrange(1, longest)))


async def make_questions(engine: Engine, rng: random.Random, number: int) -> list[Question]:
    prompts = [Prompt(_says(rng, 200), max_tokens=rng.randrange(2, 24)) for _ in range(number)]
    async with new_session(300) as session:
        answers = await asyncio.gather(*(ask(session, engine, prompt) for prompt in prompts))
    return [
        Question(prompt, answer.token_ids[0])
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


async def make_conversations(
    engine: Engine, rng: random.Random, number: int, turns: int
) -> list[Conversation]:
    plans = [[(_says(rng, 60), rng.randrange(2, 20)) for _ in range(turns)] for _ in range(number)]

    async def one(
        session: aiohttp.ClientSession, plan: list[tuple[tuple[int, ...], int]]
    ) -> Conversation:
        talk: list[Question] = []
        said: tuple[int, ...] = ()
        for words, max_tokens in plan:
            prompt = Prompt(said + words, max_tokens=max_tokens)
            right = (await ask(session, engine, prompt)).token_ids[0]
            talk.append(Question(prompt, right))
            said = prompt.token_ids + right
        return talk

    async with new_session(300) as session:
        return list(await asyncio.gather(*(one(session, plan) for plan in plans)))


async def make_right_answers(
    cluster: Cluster, seed: int, questions: int, conversations: int
) -> tuple[list[Question], list[Conversation]]:
    """Compute the right answers with an engine that has no connector."""
    rng = random.Random(f"router prompts {seed}")
    reference = cluster.serve("reference", is_plain=True).ready()
    return await make_questions(reference, rng, questions), await make_conversations(
        reference, rng, conversations, 3
    )
