"""Everything the router answers itself: health, metrics, models, and the dashboard with its data. Runs on the event loop."""

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote

import msgspec

import kvferry
from kvferry.router.admission import Admission
from kvferry.router.calls import UNAVAILABLE, Calls, described
from kvferry.router.conversations import Conversations
from kvferry.router.dashboard_files import DATA_HEADERS, DashboardFiles
from kvferry.router.dashboard_state import InstanceFacts, RouterFacts, build_state, encode_state
from kvferry.router.exchange import Answer, passed_headers
from kvferry.router.failures import error_answer
from kvferry.router.fleet import Fleet, Member, Wish
from kvferry.router.http1.errors import UpstreamError
from kvferry.router.http1.messages import ServerRequest
from kvferry.router.instances import Instance, Outcome, Role
from kvferry.router.members import State
from kvferry.router.options import RouterOptions
from kvferry.router.request_view import view_request
from kvferry.router.timeline import Mark, RecentRequests, Timeline
from kvferry.router.vital_signs import VitalSigns
from kvferry.router.watch import Watch
from kvferry.types import FailurePolicy
from kvferry.web.handover_records import HandoverRecord, read_records

__all__ = ["Pages"]

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Page = Callable[[ServerRequest], Awaitable[Answer]]


@dataclass(slots=True)
class Pages:
    options: RouterOptions
    fleet: Fleet
    watch: Watch
    admission: Admission
    conversations: Conversations
    recent: RecentRequests
    signs: VitalSigns
    calls: Calls
    since: float = field(default_factory=time.monotonic)
    files: DashboardFiles = field(default_factory=DashboardFiles.load)

    def routes(self) -> Mapping[str, Page]:
        """A path that ends with a slash stands for those one step below it, too."""
        return {
            "/health": self.health,
            "/healthcheck": self.health,
            "/healthz": self.health,
            "/readyz": self.ready,
            "/metrics": self.show_metrics,
            "/v1/models": self.models,
            "/dashboard": self.show_file,
            "/dashboard/": self.show_file,
            "/dashboard/state": self.show_state,
            "/dashboard/requests/": self.show_request,
        }

    async def health(self, _: ServerRequest) -> Answer:
        """Of the router: it is well whatever its instances are. Nobody is asked; these are the outcomes of the last legs."""
        counts = {f"{role}_instances": len(self.fleet.members(role)) for role in Role}
        shown = (Outcome.ANSWERED, Outcome.REFUSED, Outcome.FAILED)
        last = {f"{role}_last_{outcome}": self.fleet.count(role, outcome) for role in Role for outcome in shown}
        return _json(200, {"status": "ok", **counts, **last})

    async def ready(self, _: ServerRequest) -> Answer:
        """Whether a request sent now would find instances that can serve it: among those that were reached, where they are looked at."""
        now = time.monotonic()
        usable = {role: sum(member.is_usable(now) for member in self.fleet.members(role)) for role in Role}
        needed = [Role.DECODE] if self.options.routing.without_prefill is FailurePolicy.RECOMPUTE else list(Role)
        missing = [role for role in needed if not usable[role]]
        is_ready = not missing and not self.admission.is_closing
        why = "stopping" if self.admission.is_closing else "ready" if is_ready else f"no {' or '.join(missing)} instance can be had"
        return _json(200 if is_ready else UNAVAILABLE, {"status": why, **{f"{role}_usable": usable[role] for role in Role}})

    async def show_metrics(self, _: ServerRequest) -> Answer:
        now, metrics = time.monotonic(), self.calls.metrics
        metrics.queued.value = self.admission.queue.num_waiting
        metrics.show_fleet((member.instance, member.state(now), member.num_running) for member in self.fleet.members())
        return Answer(200, [("Content-Type", _METRICS_TYPE)], metrics.text())

    async def models(self, request: ServerRequest) -> Answer:
        """Those of a decode instance; of another, if one takes no requests."""
        tried: list[Instance] = []
        said: Answer | None = None
        while (instance := self.fleet.choose(Role.DECODE, Wish(), time.monotonic(), tried)) is not None:
            tried.append(instance)
            try:
                with self.calls.counted(instance, Wish()) as call:
                    # The router's own keys are none of the instances' business.
                    theirs = None if self.options.access.api_keys else request.headers.get("authorization")
                    said = await self._get(instance, request.path, theirs)
                    call.outcome = Outcome.ANSWERED if said.status < 500 else Outcome.FAILED
                    if said.status == UNAVAILABLE:
                        call.outcome = Outcome.REFUSED
                        self.calls.metrics.refusals.add(instance.role, instance.url)
            except UpstreamError as error:
                said = said or error_answer(502, f"{instance} failed: {described(error)}")
                continue
            if said.status < 500:
                return said
        return said or error_answer(UNAVAILABLE, "no decode instance can be had now; try again", 1)

    # -- the dashboard -------------------------------------------------------------------------------------------------

    async def show_file(self, request: ServerRequest) -> Answer:
        if request.path == "/dashboard/":
            return Answer(307, [("Location", "../dashboard")], b"")
        found = self.files.find(request.path)
        if found is None:
            return error_answer(404, "there is no such file in the dashboard")
        if request.headers.get("if-none-match") == found.etag:
            return Answer(304, list(found.headers), b"")
        return Answer(200, list(found.headers), found.body)

    async def show_state(self, _: ServerRequest) -> Answer:
        now, queue = time.monotonic(), self.admission.queue
        facts = RouterFacts(
            version=kvferry.__version__,
            uptime_s=now - self.since,
            num_running=queue.num_running,
            num_queued=queue.num_waiting,
            max_running=queue.options.max_running,
            max_queued=queue.options.max_waiting,
            policies={"prefill": self.options.routing.prefill_policy, "decode": self.options.routing.decode_policy},
            num_conversations=len(self.conversations),
            is_draining=self.admission.is_closing,
        )
        members = [self._facts(member, now) for member in self.fleet.members()]
        state = build_state(facts, members, self.signs, self.recent, now, _shown)
        return Answer(200, list(DATA_HEADERS), encode_state(state))

    async def show_request(self, request: ServerRequest) -> Answer:
        request_id = unquote(request.path.rpartition("/")[2])
        timeline = self.recent.find(request_id)
        if timeline is None:
            return error_answer(404, "this request is not among the recent ones")
        records = await self._ask_records(timeline)
        view = view_request(timeline, records, time.monotonic(), _shown)
        return Answer(200, list(DATA_HEADERS), msgspec.json.encode(view))

    async def _ask_records(self, timeline: Timeline) -> list[HandoverRecord]:
        """When KV moved, as D tells it. Nothing where it does not."""
        decoder = timeline.last_about(Mark.DECODE_BEGAN)
        if not isinstance(decoder, Instance) or self.fleet.get(decoder) is None:
            return []
        try:
            said = await self._get(decoder, f"/kvferry/transfers/{timeline.request_id}", None)
        except UpstreamError:
            return []
        return list(read_records(said.body)) if said.status == 200 else []

    def _facts(self, member: Member, now: float) -> InstanceFacts:
        breaker = member.breaker
        return InstanceFacts(
            name=member.instance.url,
            role=member.instance.role,
            state=member.state(now),
            in_flight=member.num_running,
            failures=breaker.failures_in_a_row,
            last_error=member.record.last_error,
            returns_in_s=max(0.0, breaker.not_before - now) if member.state(now) is State.EJECTED else None,
            watch=self.watch.seen.get(member.instance),
        )

    async def _get(self, instance: Instance, path: str, authorization: str | None) -> Answer:
        key = self.options.access.instance_key
        shown = f"Bearer {key}" if key else authorization
        headers = [("Authorization", shown)] if shown is not None else []
        with await self.calls.get(instance, path, headers) as answer:
            return Answer(answer.status, passed_headers(answer.headers), await self.calls.read(answer))


def _shown(about: object) -> str:
    return about.url if isinstance(about, Instance) else str(about or "")


def _json(status: int, value: object) -> Answer:
    return Answer(status, [("Content-Type", "application/json")], msgspec.json.encode(value))
