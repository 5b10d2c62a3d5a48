"""Clients of a chaos run. Each sends one request after another over HTTP, streamed or not; some
disconnect early.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp
from tests.chaos.judge import VIOLATIONS, Attempt, Outcome, judge
from tests.e2e.harness import Prompt

LEAVING = 0.15
STREAMED = 0.7
LONGEST_STAY_S = 1.0
SHORT_SLEEP_S = 0.5
"""Pause after an error, so that a dead engine does not get a thousand requests per second."""


@dataclass(frozen=True, slots=True)
class Question:
    prompt: Prompt
    right: tuple[int, ...]


@dataclass
class Load:
    """Sends random `questions` to the router at `url` until `is_stopping`. Counts the outcomes and
    records every violation.
    """

    url: str
    questions: Sequence[Question]
    seed: int
    bound_s: float
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)
    """Errors by their first words, without the words that contain digits."""
    is_stopping: bool = False

    async def run(self, streams: int) -> None:
        """Run the clients until `is_stopping` is set and every request has ended."""
        async with self._session() as session:
            await asyncio.gather(*(self._client(session, number) for number in range(streams)))

    async def ask_once(self, question: Question) -> Outcome:
        """Send one request and read its response to the end."""
        async with self._session() as session:
            attempt = Attempt()
            await exchange(session, self.url, {**question.prompt.body(), "stream": False}, attempt)
            return self._note(question, attempt)

    def _session(self) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=self.bound_s)
        return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))

    async def _client(self, session: aiohttp.ClientSession, number: int) -> None:
        rng = random.Random(f"client {self.seed} {number}")
        while not self.is_stopping:
            question = rng.choice(self.questions)
            if (
                self._note(question, await self._ask(session, question.prompt, rng))
                is not Outcome.RIGHT
            ):
                await asyncio.sleep(SHORT_SLEEP_S)

    def _note(self, question: Question, attempt: Attempt) -> Outcome:
        outcome = judge(attempt, question.right)
        self.outcomes[outcome] += 1
        if attempt.error:
            self.refusals[_gist(attempt.error)] += 1
        if outcome in VIOLATIONS:
            self.violations.append(
                f"{outcome}: prompt of {len(question.prompt.token_ids)} tokens, {attempt}, right: "
                f"{question.right}"
            )
        return outcome

    async def _ask(
        self, session: aiohttp.ClientSession, prompt: Prompt, rng: random.Random
    ) -> Attempt:
        attempt = Attempt()
        stay_s = rng.random() * LONGEST_STAY_S if rng.random() < LEAVING else None
        is_streamed = rng.random() < STREAMED
        asking = asyncio.create_task(
            exchange(session, self.url, {**prompt.body(), "stream": is_streamed}, attempt)
        )
        _, waiting = await asyncio.wait([asking], timeout=stay_s)
        if waiting:
            attempt.has_left = True
            asking.cancel()
            await asyncio.wait([asking])
        else:
            asking.result()
        return attempt


async def exchange(
    session: aiohttp.ClientSession, url: str, body: Mapping[str, object], attempt: Attempt
) -> None:
    """Send one request and read its response; record the result in `attempt`."""
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            attempt.status = response.status
            if response.status != 200 or not body["stream"]:
                _take_whole(await response.read(), attempt)
                return
            async for line in response.content:
                _take_line(line.decode().strip(), attempt)
    except TimeoutError:
        attempt.is_overdue = True
    except (aiohttp.ClientError, ConnectionError) as error:
        attempt.error = attempt.error or f"{type(error).__name__}: {error}"


def _take_whole(raw: bytes, attempt: Attempt) -> None:
    _take(raw.decode(errors="replace"), attempt)
    attempt.is_whole = True


def _take_line(line: str, attempt: Attempt) -> None:
    if line == "data: [DONE]":
        attempt.is_whole = True
    elif line.startswith("data: "):
        _take(line.removeprefix("data: "), attempt)


def _take(text: str, attempt: Attempt) -> None:
    try:
        found = json.loads(text)
        if "error" in found:
            attempt.error = str(found["error"]["message"])
        else:
            attempt.tokens += found["choices"][0]["token_ids"] or []
    except (ValueError, KeyError, TypeError):
        attempt.status, attempt.error = 0, f"neither an answer nor an error: {text[:200]}"


def _gist(error: str) -> str:
    """Return the error without words that contain digits, which differ from request to request."""
    words = [word for word in error.split() if not any(letter.isdigit() for letter in word)]
    return " ".join(words)[:110]
