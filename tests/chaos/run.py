"""A chaos run from start to end: load, faults, recovery, and the checks after it."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.cluster import ROUTER, ChaosCluster
from tests.chaos.ending import PROGRESS_S, busy, expect, family_of, left_behind, say
from tests.chaos.judge import Outcome
from tests.chaos.load import Load, Question
from tests.chaos.mode import Mode
from tests.chaos.plan import Fault, Kind, make_plan
from tests.e2e.harness import Cluster, Prompt, ask_all, metrics, new_session
from tests.e2e.hung_engine import hung

RESERVE = 40
MOST_AT_ONCE = 2
COUNTED = (
    "finished_loads",
    "failed_loads",
    "kv_expired_reqs",
    "failed_handshakes",
    "pushed_tokens",
)
SHOWN = tuple(f"kvferry:{name}_total" for name in COUNTED)
AT_ONCE = "kvferry:router_legs_at_once_total"


@dataclass(frozen=True)
class Settings:
    seed: int
    duration_s: float = 300.0
    streams: int = 24
    prefill: int = 2
    decode: int = 2
    prompts: int = 300
    bound_s: float = 60.0
    """Above every deadline that can apply to a request, pauses included."""
    mode: Mode = Mode.BOTH


@dataclass
class Report:
    settings: Settings
    hosts: str = ""
    injected: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    engines: dict[str, dict[str, float]] = field(default_factory=dict)
    """Metrics of each engine's last incarnation."""
    violations: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not self.violations

    def as_json(self) -> dict[str, Any]:
        counts = {
            name: {str(key): number for key, number in getattr(self, name).items()}
            for name in ("injected", "outcomes", "errors")
        }
        rest = {
            "hosts": self.hosts,
            "engines": self.engines,
            "violations": self.violations,
            "is_clean": self.is_clean,
        }
        return {"settings": asdict(self.settings), **counts, **rest}


def run(settings: Settings, directory: Path, model: Path) -> Report:
    report = Report(settings)
    say(f"seed {settings.seed}: computing {settings.prompts} right answers")
    questions = asyncio.run(_questions(settings, directory / "reference", model))
    with ChaosCluster.opened(
        directory / "yard", model, settings.prefill, settings.decode, settings.mode
    ) as chaos_cluster:
        report.hosts = (
            "network namespaces" if chaos_cluster.hosts_are_namespaces else "fault proxies"
        )
        say(
            f"{settings.prefill} prefill and {settings.decode} decode engines are up, hosts are "
            f"{report.hosts}"
        )
        asyncio.run(_Run(settings, chaos_cluster, questions, report).whole())
        family = family_of([*chaos_cluster.engines.values(), chaos_cluster.router])
    report.violations += left_behind(family)
    return report


async def _questions(settings: Settings, directory: Path, model: Path) -> list[Question]:
    """Make prompts of many lengths, some with common prefixes, and the answers of an engine that
    has no connector.
    """
    rng = random.Random(f"prompts {settings.seed}")
    prompts: list[Prompt] = []
    for _ in range(settings.prompts + RESERVE):
        tokens = tuple(rng.randrange(10, 500) for _ in range(rng.randrange(1, 400)))
        if prompts and rng.random() < 0.2:
            tokens = rng.choice(prompts).token_ids[:200] + tokens
        prompts.append(Prompt(tokens, max_tokens=rng.randrange(2, 50)))
    with Cluster(directory, model) as cluster:
        answers = await ask_all(
            cluster.serve("reference", is_plain=True).ready(), prompts, timeout_s=300
        )
    return [
        Question(prompt, answer.token_ids[0])
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


class _Run:
    def __init__(
        self,
        settings: Settings,
        chaos_cluster: ChaosCluster,
        questions: list[Question],
        report: Report,
    ) -> None:
        self._settings = settings
        self._chaos_cluster = chaos_cluster
        self._report = report
        self._load = Load(
            chaos_cluster.router.url, questions[:-RESERVE], settings.seed, settings.bound_s
        )
        self._unasked = questions[-RESERVE:]
        """These prompts are not used under load, so no prefix cache holds them."""
        self._locks = {name: asyncio.Lock() for name in (*chaos_cluster.engines, ROUTER)}
        self._began = time.monotonic()

    async def whole(self) -> None:
        chaos_cluster, settings = self._chaos_cluster, self._settings
        plan = make_plan(
            settings.seed, settings.duration_s, chaos_cluster.prefill, chaos_cluster.decode, ROUTER
        )
        load = asyncio.create_task(self._load.run(settings.streams))
        progress = asyncio.create_task(self._show_progress())
        try:
            await asyncio.gather(self._inject_all(plan), asyncio.sleep(settings.duration_s))
            self._load.is_stopping = True
            await load
        finally:
            progress.cancel()
            self._load.is_stopping = True
            load.cancel()
            await asyncio.gather(progress, load, return_exceptions=True)
        await self._check_end()
        self._report.outcomes = Counter(
            {str(outcome): self._load.outcomes[outcome] for outcome in Outcome}
        )
        self._report.errors = self._load.refusals
        self._report.violations += self._load.violations

    async def _inject_all(self, plan: list[Fault]) -> None:
        """Inject the faults in order, at most `MOST_AT_ONCE` at a time. On a slow machine, where a
        restart takes long, this injects fewer faults, so that some engines always keep running.
        """
        gate = asyncio.Semaphore(MOST_AT_ONCE)
        tasks = []
        for fault in plan:
            await asyncio.sleep(max(0.0, self._began + fault.at_s - time.monotonic()))
            await gate.acquire()
            if time.monotonic() > self._began + self._settings.duration_s:
                break
            tasks.append(asyncio.create_task(self._inject(fault)))
            tasks[-1].add_done_callback(lambda _: gate.release())
        await asyncio.gather(*tasks)

    async def _inject(self, fault: Fault) -> None:
        async with self._locks[fault.target]:
            self._report.violations += await asyncio.to_thread(
                self._chaos_cluster.replace_if_dead, fault.target
            )
            match fault.kind:
                case Kind.KILL_PREFILL | Kind.KILL_DECODE | Kind.KILL_ROUTER:
                    await asyncio.to_thread(self._chaos_cluster.restart, fault.target)
                case Kind.SHORT_PAUSE | Kind.LONG_PAUSE:
                    engine = self._chaos_cluster.engines[fault.target]
                    engine.pause()
                    await asyncio.sleep(fault.length_s)
                    engine.resume()
                case Kind.HANG:
                    # The thread that stops an engine must be the one that lets it go on.
                    with hung(self._chaos_cluster.engines[fault.target]):
                        await asyncio.sleep(fault.length_s)
                case Kind.SHORT_CUT | Kind.LONG_CUT:
                    self._chaos_cluster.cut(fault.target)
                    await asyncio.sleep(fault.length_s)
                    self._chaos_cluster.heal(fault.target)
        self._report.injected[fault.kind] += 1

    async def _check_end(self) -> None:
        """Check, after all faults are undone and without a restart, that all blocks are free and
        that every D fetches KV from P again.
        """
        for name in self._locks:
            self._report.violations += await asyncio.to_thread(
                self._chaos_cluster.replace_if_dead, name
            )
        say("load and faults are over; waiting until every block is free")
        await self._expect("all blocks free, no lease, nothing waiting", self._is_quiet)
        before, at_once = await self._pulled(), await self._at_once()

        async def is_working() -> bool:
            if not self._unasked:
                return False
            await self._load.ask_once(self._unasked.pop())
            await asyncio.sleep(0.3)  # D tries an unreachable peer again only after a short while
            after = await self._pulled()
            has_pushed = self._settings.mode is not Mode.PUSH or await self._at_once() > at_once
            return has_pushed and all(after[name] > before[name] for name in after)

        await self._expect(
            "every decode engine fetches KV again, in push with both legs at once", is_working
        )
        await self._expect("all blocks free once more", self._is_quiet)
        async with new_session() as session:
            for name, engine in self._chaos_cluster.engines.items():
                found = await metrics(session, engine)
                transports = {
                    key: value
                    for key, value in found.items()
                    if key.startswith("kvferry:transfers_total/")
                }
                self._report.engines[name] = {
                    key: found.get(key, 0.0) for key in SHOWN
                } | transports
        self._report.engines[ROUTER] = {AT_ONCE: await self._at_once()}

    async def _expect(self, what: str, condition: Callable[[], Awaitable[bool]]) -> None:
        await expect(what, condition, self._state, self._report.violations)

    async def _state(self) -> dict[str, dict[str, float]]:
        return await busy(self._chaos_cluster.engines)

    async def _is_quiet(self) -> bool:
        return not any((await self._state()).values())

    async def _pulled(self) -> dict[str, float]:
        async with new_session() as session:
            engines = {
                name: self._chaos_cluster.engines[name] for name in self._chaos_cluster.decode
            }
            return {
                name: (await metrics(session, engine)).get("kvferry:finished_loads_total", 0.0)
                for name, engine in engines.items()
            }

    async def _at_once(self) -> float:
        """Return how many requests this incarnation of the router has sent to P and D at the same
        time.
        """
        async with new_session() as session:
            return (await metrics(session, self._chaos_cluster.router))[AT_ONCE]

    async def _show_progress(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            counts = self._load.outcomes
            say(
                f"{time.monotonic() - self._began:5.0f} s  {sum(counts.values())} requests: "
                f"{counts[Outcome.RIGHT]} right, "
                f"{counts[Outcome.REFUSED]} refused, {counts[Outcome.BROKEN]} aborted, "
                f"{counts[Outcome.LEFT]} left, "
                f"{len(self._load.violations)} violations; {self._report.injected.total()} faults"
            )
