"""A router chaos run from start to end, and the checks after it."""

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.ending import PROGRESS_S, busy, expect, family_of, left_behind, say
from tests.chaos.load import Question
from tests.chaos.mode import Mode
from tests.chaos.router.clients import Clients, Conversation, make_right_answers
from tests.chaos.router.fleet import Member, RouterChaosCluster
from tests.chaos.router.plan import FaultKind, PlannedFault, make_plan
from tests.chaos.router.verdict import FAULTS, Verdict
from tests.e2e.harness import Cluster, metrics, new_session
from tests.e2e.hung_engine import hung

from kvferry.errors import KVFerryError

PROBES = 6
"""Requests sent together right after a kill. With three instances per role, some would have gone to
the dead one.
"""
SHOWN = ("retries", "fallbacks", "client_aborts", "releases", "turns")


@dataclass(frozen=True)
class Settings:
    seed: int
    duration_s: float = 120.0
    streams: int = 50
    size: int = 3
    """Number of instances in each role."""
    questions: int = 120
    conversations: int = 60
    bound_s: float = 60.0
    mode: Mode = Mode.PULL


@dataclass
class Report:
    settings: Settings
    done: Counter[str] = field(default_factory=Counter)
    verdicts: Counter[str] = field(default_factory=Counter)
    router: dict[str, float] = field(default_factory=dict)
    undisturbed_s: float = 0.0
    """How long `PROBES` requests take under the same load before the first fault."""
    until_answered_elsewhere_s: list[float] = field(default_factory=list)
    """Seconds from each kill until all `PROBES` requests that were sent right after it were
    answered.
    """
    until_serving_again_s: list[float] = field(default_factory=list)
    """Seconds from when a restarted instance listens until it has answered a leg."""
    violations: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not self.violations

    def as_json(self) -> dict[str, Any]:
        plain = {
            name: getattr(self, name)
            for name in ("router", "undisturbed_s", "violations", "is_clean")
        }
        counts = {
            name: {str(key): number for key, number in getattr(self, name).items()}
            for name in ("done", "verdicts")
        }
        times = {
            name: spread(getattr(self, name))
            for name in ("until_answered_elsewhere_s", "until_serving_again_s")
        }
        return {"settings": asdict(self.settings), **counts, **times, **plain}

    def line(self) -> str:
        """Return the summary as one line of text."""
        counts = ", ".join(f"{number} {name}" for name, number in self.verdicts.items())
        away, back = spread(self.until_answered_elsewhere_s), spread(self.until_serving_again_s)
        return (
            f"router chaos, seed {self.settings.seed}, {self.settings.duration_s:g} s, "
            f"{self.settings.streams} streams: "
            f"{self.done.total()} faults; {counts}; after a kill {PROBES} new requests answered "
            "elsewhere in "
            f"{away['median']:.2f} s (at most {away['max']:.2f} s; undisturbed "
            f"{self.undisturbed_s:.2f} s); "
            f"a restarted instance served again after {back['median']:.2f} s (at most "
            f"{back['max']:.2f} s); "
            f"{'clean' if self.is_clean else f'BROKEN: {len(self.violations)} violations'}"
        )


def spread(values: list[float]) -> dict[str, float]:
    found = sorted(values) or [0.0]
    return {
        "count": len(values),
        "median": round(statistics.median(found), 3),
        "max": round(found[-1], 3),
    }


def run(settings: Settings, directory: Path, model: Path) -> Report:
    report = Report(settings)
    for name in ("reference", "yard"):
        (directory / name).mkdir()
    say(f"seed {settings.seed}: computing right answers")
    with Cluster(directory / "reference", model) as cluster:
        questions, conversations = asyncio.run(
            make_right_answers(cluster, settings.seed, settings.questions, settings.conversations)
        )
    with RouterChaosCluster.opened(
        directory / "yard", model, settings.size, settings.mode
    ) as chaos_cluster:
        say(f"{settings.size} prefill and {settings.size} decode engines and the router are up")
        asyncio.run(_Run(settings, chaos_cluster, questions, conversations, report).whole())
        family = family_of(
            [chaos_cluster.router, *(member.live for member in chaos_cluster.members.values())]
        )
    report.violations += left_behind(family)
    return report


class _Run:
    def __init__(
        self,
        settings: Settings,
        chaos_cluster: RouterChaosCluster,
        questions: list[Question],
        conversations: list[Conversation],
        report: Report,
    ) -> None:
        self._settings = settings
        self._chaos_cluster = chaos_cluster
        self._report = report
        self._probes = questions[:PROBES]
        self._clients = Clients(
            chaos_cluster.router.url,
            questions[PROBES:],
            conversations,
            settings.seed,
            settings.bound_s,
            chaos_cluster.happened,
        )
        self._began = time.monotonic()

    async def whole(self) -> None:
        chaos_cluster, settings = self._chaos_cluster, self._settings
        await chaos_cluster.join()
        leased = [name for name, member in chaos_cluster.members.items() if member.is_leased]
        plan = make_plan(
            settings.seed,
            settings.duration_s,
            chaos_cluster.names("prefill"),
            chaos_cluster.names("decode"),
            leased,
        )
        self._began = time.monotonic()
        load = asyncio.create_task(self._clients.run(settings.streams))
        progress = asyncio.create_task(self._show_progress())
        try:
            self._report.undisturbed_s = await self._answered_after(time.monotonic())
            await asyncio.gather(
                *(self._act(planned) for planned in plan), asyncio.sleep(settings.duration_s)
            )
            self._clients.is_stopping = True
            await load
        finally:
            progress.cancel()
            self._clients.is_stopping = True
            load.cancel()
            await asyncio.gather(load, progress, return_exceptions=True)
        await self._check_end()
        self._report.verdicts.update(
            {str(verdict): number for verdict, number in self._clients.verdicts.items()}
        )
        self._report.violations += self._clients.faults

    async def _act(self, planned: PlannedFault) -> None:
        await asyncio.sleep(planned.at_s)
        member = self._chaos_cluster.members[planned.target]
        async with self._chaos_cluster.taken(member):
            if time.monotonic() - self._began > self._settings.duration_s:
                return
            try:
                await self._do(planned, member)
            except (AssertionError, KVFerryError) as error:
                self._report.violations.append(f"{planned.fault_kind} {planned.target}: {error}")
            self._report.done[planned.fault_kind] += 1

    async def _do(self, planned: PlannedFault, member: Member) -> None:
        chaos_cluster = self._chaos_cluster
        match planned.fault_kind:
            case FaultKind.KILL_PREFILL | FaultKind.KILL_DECODE:
                killed_at = time.monotonic()
                family = chaos_cluster.kill(member)
                self._report.until_answered_elsewhere_s.append(
                    await self._answered_after(killed_at)
                )
                await asyncio.to_thread(chaos_cluster.restart, member, family)
                await self._serves_again(member)
            case FaultKind.PAUSE:
                await chaos_cluster.pause(member, planned.length_s)
            case FaultKind.HANG:
                with hung(member.live):
                    await asyncio.sleep(planned.length_s)
            case FaultKind.DRAIN:
                await chaos_cluster.drain(member)
                await chaos_cluster.add(member)
                await chaos_cluster.wait_until_it_serves(member)
            case FaultKind.REPLACE:
                await chaos_cluster.drain(member)
                await asyncio.to_thread(chaos_cluster.replace, member)
                await chaos_cluster.add(member)
                await chaos_cluster.wait_until_it_serves(member)

    async def _answered_after(self, since: float) -> float:
        await self._clients.ask_all(self._probes)
        return time.monotonic() - since

    async def _serves_again(self, member: Member) -> None:
        since = time.monotonic()
        await self._chaos_cluster.wait_until_it_serves(member)
        self._report.until_serving_again_s.append(time.monotonic() - since)

    async def _check_end(self) -> None:
        """Check that all processes are alive and have no traceback in their logs, that all blocks
        are free, that the router has no request running or queued, and that good requests are
        served.
        """
        say("load and faults are over; waiting until every block is free")
        for name, engine in [
            ("router", self._chaos_cluster.router),
            *((m.name, m.live) for m in self._chaos_cluster.members.values()),
        ]:
            try:
                engine.process.check_alive()
            except KVFerryError as error:
                self._report.violations.append(f"{error}, by itself: {engine.process.tail(40)}")
            if any("Traceback" in line for line in engine.process.tail(10_000)):
                self._report.violations.append(
                    f"{name} has a traceback in its log: {engine.process.tail(60)}"
                )
        await self._expect("all blocks free, no lease, nothing waiting", self._is_quiet)
        if await self._clients.ask_all(self._probes) != [Verdict.RIGHT] * PROBES:
            self._report.violations.append("after all is over, good requests are not served")
        await self._expect("all blocks free once more", self._is_quiet)
        async with new_session() as session:
            found = await metrics(session, self._chaos_cluster.router)
        self._report.router = {
            name: found.get(f"kvferry:router_{name}_total", 0.0) for name in SHOWN
        }

    async def _expect(self, what: str, condition: Callable[[], Awaitable[bool]]) -> None:
        await expect(what, condition, self._state, self._report.violations)

    async def _state(self) -> dict[str, dict[str, float]]:
        states = await busy(
            {member.name: member.live for member in self._chaos_cluster.members.values()}
        )
        async with new_session() as session:
            router = await metrics(session, self._chaos_cluster.router)
        names = ("kvferry:router_queued_requests", "kvferry:router_instance_legs")
        return {**states, "router": {name: router[name] for name in names if router.get(name)}}

    async def _is_quiet(self) -> bool:
        return not any((await self._state()).values())

    async def _show_progress(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            counts = self._clients.verdicts
            say(
                f"{time.monotonic() - self._began:5.0f} s  {counts.total()} requests: "
                f"{counts[Verdict.RIGHT]} right, "
                f"{counts[Verdict.BROKEN]} aborted, {counts[Verdict.LEFT]} left, "
                f"{sum(counts[each] for each in FAULTS)} faults; "
                f"{self._report.done.total()} faults"
            )
