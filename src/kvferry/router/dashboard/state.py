"""The answer of `GET /dashboard/state`: everything that the page shows, as one JSON object.

Pure; built for each request. Lists are cut to what a page can show. Times are ages and durations,
because the browser's clock differs from the router's.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from kvferry.router.dashboard.request_view import FormatSubject, state_of
from kvferry.router.fleet.instance_metrics import InstanceReading, MetricsWatcher
from kvferry.router.fleet.tier_metrics import OffloadGrowth, OffloadReading, TierReading
from kvferry.router.time_series import LatencyHistogram, SecondStats, TimeSeries, quantile
from kvferry.router.timeline import ErrorCount, RecentRequests, RequestEvent, Timeline

SHOWN_LIVE = 50
SHOWN_RECENT = 50
SHOWN_FAILED = 20
SHOWN_ERRORS = 30
HEADLINE_S = 60
"""Seconds covered by the headline figures."""


@dataclass(frozen=True, slots=True)
class RouterFacts:
    """Facts about the router, supplied by the shell."""

    version: str
    uptime_s: float
    num_running: int = 0
    num_queued: int = 0
    max_running: int | None = None
    max_queued: int | None = None
    policies: Mapping[str, str] = field(default_factory=dict)
    """Routing policy by role."""
    num_conversations: int | None = None
    is_draining: bool = False


@dataclass(frozen=True, slots=True)
class InstanceFacts:
    """Facts about one member of the fleet."""

    name: str
    role: str
    state: str
    """Name of the member's state: healthy, suspect, ejected, draining …"""
    in_flight: int = 0
    """This router's running legs on the instance."""
    failures: int = 0
    """Consecutive failed legs."""
    last_error: str = ""
    returns_in_s: float | None = None
    """Seconds until the instance is tried again; None if it is not ejected."""
    watcher: MetricsWatcher | None = None
    """Latest figures from the instance's `/metrics` page."""


class TierState(msgspec.Struct, frozen=True, kw_only=True):
    """One storage tier of an instance in the JSON answer. Rates and shares are those of the last
    minute; counts are totals since the engine started.
    """

    name: str
    used_bytes: float | None
    max_bytes: float | None
    """0 if only the storage bounds the tier."""
    objects: float | None
    loaded_bytes_per_s: float | None
    load_share: float | None
    """Share of the bytes loaded from all tiers of the instance, 0 to 1."""
    stored_bytes_per_s: float | None
    evictions_per_s: float | None
    refused: float | None
    failed_loads: float | None
    failed_stores: float | None
    dropped_stores: float | None


class OffloadState(msgspec.Struct, frozen=True, kw_only=True):
    """The storage tiers of an instance in the JSON answer, with its lookups of the last minute."""

    queried_tokens: float | None
    hit_tokens: float | None
    skipped_tokens: float | None
    hit_rate: float | None
    """Share of the looked-up tokens that came from the tiers, 0 to 1."""
    tiers: list[TierState]


class InstanceState(msgspec.Struct, frozen=True, kw_only=True):
    """One instance in the JSON answer."""

    name: str
    role: str
    state: str
    in_flight: int
    failures: int
    last_error: str
    returns_in_s: float | None
    read_age_s: float | None
    """Age of the figures below; None if the `/metrics` page is not available."""
    running: float | None
    waiting: float | None
    cache_usage: float | None
    leases: float | None
    held_blocks: float | None
    active_transfers: float | None
    transfers: float | None
    moved_bytes: float | None
    moved_bytes_per_s: float | None
    tokens_per_s: float | None
    transfer_failures: float | None
    expired: float | None
    mode: str
    model: str
    offload: OffloadState | None
    """None if the instance reports no storage tiers."""


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row in the tables of requests."""

    id: str
    route: str
    state: str
    status: int
    age_s: float
    duration_s: float | None
    ttft_s: float | None
    prefill: str
    decode: str
    retries: int
    fallback: str
    is_conversation: bool


class ErrorRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row in the table of errors."""

    text: str
    status: int
    count: int
    age_s: float
    first_age_s: float
    request_id: str


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """Columns of equal length, one row per second, oldest first."""

    last_index: int | None
    """Index of the last row's second, by which the page aligns two answers."""
    requests: list[int]
    errors: list[int]
    relayed_bytes: list[int]
    tokens: list[int | None]
    """Generated tokens; None if instances have not reported this second yet."""
    moved_bytes: list[int | None]
    ttft_p50: list[float | None]
    ttft_p99: list[float | None]
    handover_p50: list[float | None]
    handover_p99: list[float | None]


class Headline(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of the last minute."""

    requests_per_s: float
    errors_per_s: float
    tokens_per_s: float
    moved_bytes_per_s: float
    ttft_p50: float | None
    ttft_p99: float | None
    handover_p50: float | None
    handover_p99: float | None


class RouterState(msgspec.Struct, frozen=True, kw_only=True):
    """The router in the JSON answer."""

    version: str
    uptime_s: float
    running: int
    queued: int
    max_running: int | None
    max_queued: int | None
    policies: Mapping[str, str]
    conversations: int | None
    is_draining: bool


class DashboardState(msgspec.Struct, frozen=True, kw_only=True):
    """The whole JSON answer."""

    router: RouterState
    headline: Headline
    instances: list[InstanceState]
    live: list[RequestRow]
    """The oldest running requests, which may hang."""
    num_live: int
    recent: list[RequestRow]
    failed: list[RequestRow]
    errors: list[ErrorRow]
    series: Series


def build_state(
    router: RouterFacts,
    instances: Iterable[InstanceFacts],
    time_series: TimeSeries,
    recent: RecentRequests,
    now: float,
    shown: FormatSubject = str,
) -> DashboardState:
    """Build the answer. `shown` formats the instance of an event as in `InstanceFacts.name`."""
    seconds = time_series.seconds(now)
    return DashboardState(
        router=_router(router),
        headline=_headline(time_series, seconds[-HEADLINE_S:], now),
        instances=[_instance(facts, now) for facts in instances],
        live=_rows(recent.live(), SHOWN_LIVE, now, shown),
        num_live=recent.num_live,
        recent=_rows(recent.newest_first(), SHOWN_RECENT, now, shown),
        failed=_rows(recent.failed_newest_first(), SHOWN_FAILED, now, shown),
        errors=[_error(entry, now) for entry in islice(recent.errors.newest_first(), SHOWN_ERRORS)],
        series=_series(seconds, time_series.num_reported(seconds)),
    )


def encode_state(state: DashboardState) -> bytes:
    return msgspec.json.encode(state)


def _router(facts: RouterFacts) -> RouterState:
    return RouterState(
        version=facts.version,
        uptime_s=facts.uptime_s,
        running=facts.num_running,
        queued=facts.num_queued,
        max_running=facts.max_running,
        max_queued=facts.max_queued,
        policies=facts.policies,
        conversations=facts.num_conversations,
        is_draining=facts.is_draining,
    )


def _instance(facts: InstanceFacts, now: float) -> InstanceState:
    watcher = facts.watcher or MetricsWatcher()
    reading = watcher.reading or InstanceReading()
    load, kv = reading.load, reading.kv
    return InstanceState(
        name=facts.name,
        role=facts.role,
        state=facts.state,
        in_flight=facts.in_flight,
        failures=facts.failures,
        last_error=facts.last_error,
        returns_in_s=facts.returns_in_s,
        read_age_s=None if watcher.read_at is None else max(0.0, now - watcher.read_at),
        running=load.running,
        waiting=load.waiting,
        cache_usage=load.cache_usage,
        leases=kv.leases,
        held_blocks=kv.held_blocks,
        active_transfers=kv.active_transfers,
        transfers=kv.transfers,
        moved_bytes=kv.moved_bytes,
        moved_bytes_per_s=watcher.moved_bytes_per_s,
        tokens_per_s=watcher.tokens_per_s,
        transfer_failures=kv.failures,
        expired=kv.expired,
        mode=reading.mode,
        model=reading.model,
        offload=_offload(reading.offload, watcher.offload.growth()),
    )


def _offload(reading: OffloadReading | None, growth: OffloadGrowth) -> OffloadState | None:
    if reading is None or not reading.tiers:
        return None
    return OffloadState(
        queried_tokens=growth.lookups.queried_tokens,
        hit_tokens=growth.lookups.hit_tokens,
        skipped_tokens=growth.lookups.skipped_tokens,
        hit_rate=growth.hit_rate,
        tiers=[_tier(name, tier, growth) for name, tier in reading.tiers.items()],
    )


def _tier(name: str, tier: TierReading, growth: OffloadGrowth) -> TierState:
    levels, counters, grown = tier.levels, tier.counters, growth.of(name)
    return TierState(
        name=name,
        used_bytes=levels.used_bytes,
        max_bytes=levels.max_bytes,
        objects=levels.objects,
        loaded_bytes_per_s=growth.per_s(grown.loaded_bytes),
        load_share=growth.load_share(name),
        stored_bytes_per_s=growth.per_s(grown.stored_bytes),
        evictions_per_s=growth.per_s(grown.evictions),
        refused=counters.refused,
        failed_loads=counters.failed_loads,
        failed_stores=counters.failed_stores,
        dropped_stores=counters.dropped_stores,
    )


def _rows(
    timelines: Iterable[Timeline], limit: int, now: float, shown: FormatSubject
) -> list[RequestRow]:
    return [_row(timeline, now, shown) for timeline in islice(timelines, limit)]


def _row(timeline: Timeline, now: float, shown: FormatSubject) -> RequestRow:
    first = timeline.time_of(RequestEvent.FIRST_TOKEN)
    prefill, decode = (
        timeline.last_about(RequestEvent.PREFILL_BEGAN),
        timeline.last_about(RequestEvent.DECODE_BEGAN),
    )
    return RequestRow(
        id=timeline.request_id,
        route=timeline.route,
        state=state_of(timeline),
        status=timeline.status,
        age_s=now - timeline.arrived,
        duration_s=None if timeline.ended is None else timeline.ended - timeline.arrived,
        ttft_s=None if first is None else first - timeline.arrived,
        prefill="" if prefill is None else shown(prefill),
        decode="" if decode is None else shown(decode),
        retries=timeline.num_retries,
        fallback=timeline.fallback,
        is_conversation=bool(timeline.conversation),
    )


def _error(entry: ErrorCount, now: float) -> ErrorRow:
    return ErrorRow(
        text=entry.text,
        status=entry.status,
        count=entry.count,
        age_s=now - entry.last_at,
        first_age_s=now - entry.first_at,
        request_id=entry.request_id,
    )


def _series(seconds: Sequence[SecondStats], num_reported: int) -> Series:
    unreported = [None] * (len(seconds) - num_reported)
    quantiles = [second.quantiles or (None, None, None, None) for second in seconds]
    return Series(
        last_index=seconds[-1].index if seconds else None,
        requests=[second.requests for second in seconds],
        errors=[second.errors for second in seconds],
        relayed_bytes=[second.relayed_bytes for second in seconds],
        tokens=[*(second.tokens for second in seconds[:num_reported]), *unreported],
        moved_bytes=[*(second.moved_bytes for second in seconds[:num_reported]), *unreported],
        ttft_p50=[row[0] for row in quantiles],
        ttft_p99=[row[1] for row in quantiles],
        handover_p50=[row[2] for row in quantiles],
        handover_p99=[row[3] for row in quantiles],
    )


def _headline(time_series: TimeSeries, minute: Sequence[SecondStats], now: float) -> Headline:
    def per_s(count_of: Callable[[SecondStats], int]) -> float:
        return sum(map(count_of, minute)) / len(minute) if minute else 0.0

    def over(
        histogram_of: Callable[[SecondStats], LatencyHistogram],
    ) -> tuple[float | None, float | None]:
        histogram = time_series.over_last(HEADLINE_S, now, histogram_of)
        return quantile(histogram, 0.5), quantile(histogram, 0.99)

    ttft, handover = over(lambda second: second.ttft), over(lambda second: second.handover)
    return Headline(
        requests_per_s=per_s(lambda second: second.requests),
        errors_per_s=per_s(lambda second: second.errors),
        tokens_per_s=per_s(lambda second: second.tokens),
        moved_bytes_per_s=per_s(lambda second: second.moved_bytes),
        ttft_p50=ttft[0],
        ttft_p99=ttft[1],
        handover_p50=handover[0],
        handover_p99=handover[1],
    )
