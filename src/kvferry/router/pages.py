"""Pages served by the router: health, metrics, models, and the dashboard with its data.

Runs on the event loop.
"""

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote

import msgspec

import kvferry
from kvferry.router.access import AccessPolicy
from kvferry.router.conversations.store import Conversations
from kvferry.router.dashboard.files import DATA_HEADERS, DashboardFiles
from kvferry.router.dashboard.request_view import view_request
from kvferry.router.dashboard.state import InstanceFacts, RouterFacts, build_state, encode_state
from kvferry.router.fleet.fleet import Fleet
from kvferry.router.fleet.instances import Instance, Outcome, Role
from kvferry.router.fleet.members import Member, MemberState, RoutingHints
from kvferry.router.fleet.watcher import InstanceWatcher
from kvferry.router.http.messages import Headers, ServerRequest, UpstreamError
from kvferry.router.options import RouterOptions
from kvferry.router.serving.admission import AdmissionController
from kvferry.router.serving.context import HttpResponse, build_error_response, forwarded_headers
from kvferry.router.serving.instance_client import UNAVAILABLE, InstanceClient, describe_error
from kvferry.router.time_series import TimeSeries
from kvferry.router.timeline import RecentRequests, RequestEvent, Timeline
from kvferry.types import FailurePolicy
from kvferry.web.transfer_records import TransferRecord, read_transfer_records

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Page = Callable[[ServerRequest], Awaitable[HttpResponse]]


@dataclass(slots=True)
class Pages:
    """Handlers of the pages."""

    options: RouterOptions
    access_policy: AccessPolicy
    fleet: Fleet
    watcher: InstanceWatcher
    admission: AdmissionController
    conversations: Conversations
    recent: RecentRequests
    time_series: TimeSeries
    instance_client: InstanceClient
    since: float = field(default_factory=time.monotonic)
    files: DashboardFiles = field(default_factory=DashboardFiles.load)

    def routes(self) -> Mapping[str, Page]:
        """Handlers by path; a path with a final slash also covers the level below."""
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

    async def health(self, request: ServerRequest) -> HttpResponse:
        """Health of the router, independent of the instances. No instance is called; the counts
        are the outcomes of the last legs.
        """
        if not self.access_policy.sees_details(request):
            return _json(200, {"status": "ok"})
        counts = {f"{role}_instances": len(self.fleet.members(role)) for role in Role}
        shown = (Outcome.ANSWERED, Outcome.REFUSED, Outcome.FAILED)
        last = {
            f"{role}_last_{outcome}": self.fleet.count(role, outcome)
            for role in Role
            for outcome in shown
        }
        return _json(200, {"status": "ok", **counts, **last})

    async def ready(self, request: ServerRequest) -> HttpResponse:
        """Whether a request sent now would find usable instances. With probes enabled, only
        instances that were reached count.
        """
        now = time.monotonic()
        usable = self._num_usable(now)
        needed = (
            [Role.DECODE]
            if self.options.routing.without_prefill is FailurePolicy.RECOMPUTE
            else list(Role)
        )
        missing = [role for role in needed if not usable[role]]
        is_ready = not missing and not self.admission.is_closing
        why = (
            "stopping"
            if self.admission.is_closing
            else "ready"
            if is_ready
            else f"no {' or '.join(missing)} instance is available"
        )
        counts = {f"{role}_usable": usable[role] for role in Role}
        if not self.access_policy.sees_details(request):
            counts = {}
        return _json(200 if is_ready else UNAVAILABLE, {"status": why, **counts})

    async def show_metrics(self, _: ServerRequest) -> HttpResponse:
        now, metrics = time.monotonic(), self.instance_client.metrics
        metrics.queued.value = self.admission.queue.num_waiting
        metrics.show_fleet(
            (
                (member.instance, member.state(now), member.num_running)
                for member in self.fleet.members()
            ),
            self._num_usable(now),
        )
        return HttpResponse(200, [("Content-Type", _METRICS_TYPE)], metrics.text())

    def _num_usable(self, now: float) -> dict[Role, int]:
        return {
            role: sum(member.is_usable(now) for member in self.fleet.members(role)) for role in Role
        }

    async def models(self, request: ServerRequest) -> HttpResponse:
        """The models of a decode instance, or of another one after a refusal or failure."""
        tried: list[Instance] = []
        response: HttpResponse | None = None
        while (
            instance := self.fleet.choose(Role.DECODE, RoutingHints(), time.monotonic(), tried)
        ) is not None:
            tried.append(instance)
            try:
                with self.instance_client.track_leg(instance, RoutingHints()) as call:
                    # A key for the router must not be sent to instances.
                    theirs = (
                        None
                        if self.options.access.api_keys
                        else request.headers.get("authorization")
                    )
                    response = await self._get(instance, request.path, theirs, request.headers)
                    call.outcome = Outcome.ANSWERED if response.status < 500 else Outcome.FAILED
                    if response.status == UNAVAILABLE:
                        call.outcome = Outcome.REFUSED
                        self.instance_client.metrics.refusals.add(instance.role, instance.url)
            except UpstreamError as error:
                response = response or build_error_response(
                    502, f"{instance} failed: {describe_error(error)}"
                )
                continue
            if response.status < 500:
                return response
        return response or build_error_response(
            UNAVAILABLE, "no decode instance is available; try again", 1
        )

    # -- the dashboard --

    async def show_file(self, request: ServerRequest) -> HttpResponse:
        if request.path == "/dashboard/":
            return HttpResponse(307, [("Location", "../dashboard")], b"")
        found = self.files.find(request.path)
        if found is None:
            return build_error_response(404, "the dashboard has no such file")
        if request.headers.get("if-none-match") == found.etag:
            return HttpResponse(304, list(found.headers), b"")
        return HttpResponse(200, list(found.headers), found.body)

    async def show_state(self, _: ServerRequest) -> HttpResponse:
        now, queue = time.monotonic(), self.admission.queue
        facts = RouterFacts(
            version=kvferry.__version__,
            uptime_s=now - self.since,
            num_running=queue.num_running,
            num_queued=queue.num_waiting,
            max_running=queue.options.max_running,
            max_queued=queue.options.max_waiting,
            policies={
                "prefill": self.options.routing.prefill_policy,
                "decode": self.options.routing.decode_policy,
            },
            num_conversations=len(self.conversations),
            is_draining=self.admission.is_closing,
        )
        members = [self._facts(member, now) for member in self.fleet.members()]
        state = build_state(facts, members, self.time_series, self.recent, now, _shown)
        return HttpResponse(200, list(DATA_HEADERS), encode_state(state))

    async def show_request(self, request: ServerRequest) -> HttpResponse:
        request_id = unquote(request.path.rpartition("/")[2])
        timeline = self.recent.find(request_id)
        if timeline is None:
            return build_error_response(
                404, "this request is not on record; only recent requests are"
            )
        records = await self._ask_records(timeline)
        view = view_request(timeline, records, time.monotonic(), _shown)
        return HttpResponse(200, list(DATA_HEADERS), msgspec.json.encode(view))

    async def _ask_records(self, timeline: Timeline) -> list[TransferRecord]:
        """The times of the KV transfer, from D; empty if D does not report them."""
        decoder = timeline.last_about(RequestEvent.DECODE_BEGAN)
        if not isinstance(decoder, Instance) or self.fleet.get(decoder) is None:
            return []
        try:
            response = await self._get(decoder, f"/kvferry/transfers/{timeline.request_id}", None)
        except UpstreamError:
            return []
        return list(read_transfer_records(response.body)) if response.status == 200 else []

    def _facts(self, member: Member, now: float) -> InstanceFacts:
        breaker = member.breaker
        return InstanceFacts(
            name=member.instance.url,
            role=member.instance.role,
            state=member.state(now),
            in_flight=member.num_running,
            failures=breaker.failures_in_a_row,
            last_error=member.record.last_error,
            returns_in_s=max(0.0, breaker.not_before - now)
            if member.state(now) is MemberState.EJECTED
            else None,
            watcher=self.watcher.latest.get(member.instance),
        )

    async def _get(
        self,
        instance: Instance,
        path: str,
        authorization: str | None,
        client: Headers | None = None,
    ) -> HttpResponse:
        key = self.options.access.instance_key
        shown = f"Bearer {key}" if key else authorization
        headers = [("Authorization", shown)] if shown is not None else []
        with await self.instance_client.get(instance, path, headers, client) as answer:
            return HttpResponse(
                answer.status,
                forwarded_headers(answer.headers),
                await self.instance_client.read(answer),
            )


def _shown(about: object) -> str:
    return about.url if isinstance(about, Instance) else str(about or "")


def _json(status: int, value: object) -> HttpResponse:
    return HttpResponse(status, [("Content-Type", "application/json")], msgspec.json.encode(value))
