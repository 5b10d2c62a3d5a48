"""Router states for the dashboard, made by the router's own builders from invented requests."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvferry.router.dashboard.state import InstanceFacts, RouterFacts
from kvferry.router.fleet.instance_metrics import MetricsWatcher, read_metrics
from kvferry.router.time_series import TimeSeries
from kvferry.router.timeline import RecentRequests, RequestEvent, RequestOutcome
from kvferry.web.transfer_records import TransferRecord

NOW = 10_000.0
HOSTILE = '<img src=x onerror="window.hurt=1"><script>window.hurt=1</script>"\'&\u202e'


@dataclass
class Scene:
    """Everything that a router knows. `now` is fixed unless a test changes it."""

    router: RouterFacts = field(default_factory=lambda: RouterFacts("0.6.0", 7260.0))
    instances: list[InstanceFacts] = field(default_factory=list)
    time_series: TimeSeries = field(default_factory=TimeSeries)
    recent: RecentRequests = field(default_factory=RecentRequests)
    records: dict[str, list[TransferRecord]] = field(default_factory=dict)
    now: float = NOW


def watcher(
    page: bytes,
    moved_per_s: int = 0,
    tokens_per_s: int = 0,
    grown_per_s: Mapping[str, int] | None = None,
) -> MetricsWatcher:
    """Two readings. `grown_per_s`: further counters, which are a million in the first reading."""
    made = MetricsWatcher()
    for at, factor in ((NOW - 2.5, 0), (NOW - 0.5, 2)):
        grown = b"kvferry:transfer_bytes_total %d\nvllm:generation_tokens_total %d\n" % (
            50_000_000_000 + factor * moved_per_s,
            1_000_000 + factor * tokens_per_s,
        )
        for name, per_s in (grown_per_s or {}).items():
            grown += f"{name} {1_000_000 + factor * per_s}\n".encode()
        made.note(read_metrics(page + grown), at)
    return made


LOOKUPS = {
    "kvferry:offload_queried_tokens_total": 6200,
    "kvferry:offload_hit_tokens_total": 3844,
    "kvferry:offload_skipped_tokens_total": 150,
}
TRAFFIC = {
    'kvferry:tier_loaded_bytes_total{tier="cpu"}': 300 << 20,
    'kvferry:tier_loaded_bytes_total{tier="disk"}': 100 << 20,
    'kvferry:tier_stored_bytes_total{tier="cpu"}': 120 << 20,
    'kvferry:tier_stored_bytes_total{tier="disk"}': 120 << 20,
    'kvferry:tier_evictions_total{tier="cpu"}': 60,
}


def tiers_page(**refused: int) -> bytes:
    """A full cpu tier, a disk that is a quarter full, and a bucket."""
    gib = 1 << 30
    lines = [
        f'kvferry:tier_{level}{{tier="{tier}"}} {value}'
        for tier, *values in (
            ("cpu", 32 * gib, 32 * gib, 16384),
            ("disk", 125 * gib, 500 * gib, 64000),
            ("object", 3 * gib, 0, 1536),
        )
        for level, value in zip(("used_bytes", "max_bytes", "objects"), values, strict=True)
    ]
    lines += [f'kvferry:tier_refused_total{{tier="{tier}"}} {n}' for tier, n in refused.items()]
    return "\n".join([*lines, ""]).encode()


def engine_page(
    running: int,
    waiting: int,
    usage: float,
    leases: int,
    blocks: int,
    pulls: int,
    mode: str = "pull",
) -> bytes:
    return (
        f'vllm:num_requests_running{{model_name="tiny"}} {running}\nvllm:num_requests_waiting '
        f"{waiting}\nvllm:kv_cache_usage_perc {usage}\n"
        f"kvferry:num_leases {leases}\nkvferry:num_held_blocks {blocks}\nkvferry:num_transfers "
        f"{pulls}\nkvferry:transfers_total 81723\n"
        "vllm:nixl_num_failed_transfers_total 2\nvllm:nixl_num_kv_expired_reqs_total "
        f'1\nkvferry:transfer_mode{{mode="{mode}"}} 1\n'
    ).encode()


def busy_scene() -> Scene:
    """A fleet under load: one instance ejected, one suspected, one draining."""
    scene = Scene(
        RouterFacts(
            "0.6.0",
            7260.0,
            num_running=41,
            num_queued=3,
            max_running=512,
            max_queued=1024,
            policies={"prefill": "prefix_affinity", "decode": "conversation_affinity"},
            num_conversations=1280,
        )
    )
    scene.instances = [
        InstanceFacts(
            "10.0.0.11:8100",
            "prefill",
            "healthy",
            7,
            watcher=watcher(
                engine_page(6, 2, 0.71, 14, 896, 0) + tiers_page(disk=3),
                grown_per_s=LOOKUPS | TRAFFIC,
            ),
        ),
        InstanceFacts(
            "10.0.0.12:8100",
            "prefill",
            "healthy",
            5,
            watcher=watcher(engine_page(5, 0, 0.44, 9, 512, 0) + tiers_page()),
        ),
        InstanceFacts(
            "10.0.0.13:8100",
            "prefill",
            "ejected",
            0,
            failures=5,
            last_error="prefill instance http://10.0.0.13:8100 failed: it cannot be reached "
            "(Connection refused)",
            returns_in_s=6.2,
        ),
        InstanceFacts(
            "10.0.0.21:8200",
            "decode",
            "healthy",
            15,
            watcher=watcher(engine_page(15, 0, 0.93, 0, 0, 3), 310_000_000, 1510),
        ),
        InstanceFacts(
            "10.0.0.22:8200",
            "decode",
            "half_open",
            1,
            failures=1,
            watcher=watcher(engine_page(1, 0, 0.12, 0, 0, 1), 4_000_000, 60),
        ),
        InstanceFacts(
            "10.0.0.23:8200",
            "decode",
            "draining",
            4,
            watcher=watcher(engine_page(4, 0, 0.31, 0, 0, 0), 0, 240),
        ),
    ]
    _five_minutes(scene.time_series)
    _requests(scene)
    return scene


def _five_minutes(time_series: TimeSeries) -> None:
    for second in range(299):
        at = NOW - 299 + second
        wave = 1 + 0.35 * math.sin(second / 23) + 0.1 * math.sin(second / 3.1)
        is_bad = 190 <= second < 203
        for number in range(int(38 * wave)):
            time_series.note_end(at, 2_200, is_error=is_bad and number % 5 == 0)
        for number in range(24):
            slow = 4.0 if number == 23 and is_bad else 1.6 if number == 23 else 1.0
            time_series.note_ttft(0.085 * wave * slow * (2 if is_bad else 1), at)
            time_series.note_handover(0.011 * wave * slow, at)
        time_series.note_instances(int(1800 * wave), int(314_000_000 * wave), at)


def _requests(scene: Scene) -> None:
    recent = scene.recent
    failed = recent.begin("cmpl-failed", "/v1/completions", NOW - 41)
    failed.mark(RequestEvent.ADMITTED, NOW - 40.9)
    for number in (11, 12):
        failed.mark(RequestEvent.PREFILL_BEGAN, NOW - 40.9 + number / 100, f"10.0.0.{number}:8100")
        failed.mark(
            RequestEvent.PREFILL_FAILED,
            NOW - 40.8 + number / 100,
            "it closed the connection in the middle of an answer",
        )
    recent.end(
        failed,
        RequestOutcome.FAILED,
        502,
        NOW - 40.6,
        "prefill instance http://10.0.0.12:8100 failed: it closed the connection",
    )
    for number in range(37):
        refused = recent.begin(f"cmpl-refused-{number}", "/v1/completions", NOW - 110)
        recent.end(
            refused,
            RequestOutcome.REFUSED,
            503,
            NOW - 110 + number / 10,
            "the queue is full; try again in a second",
        )
    told(scene)
    for number in range(12):
        at = NOW - 3 - number * 0.7
        one = recent.begin(f"chatcmpl-{0xA3F0 + number:08x}", "/v1/chat/completions", at)
        one.conversation = f"conversation-{number}" if number % 3 == 0 else ""
        one.mark(RequestEvent.ADMITTED, at + 0.002)
        one.mark(
            RequestEvent.PREFILL_BEGAN,
            at + 0.002,
            "10.0.0.11:8100" if number % 2 else "10.0.0.12:8100",
        )
        one.mark(RequestEvent.PREFILL_ENDED, at + 0.075)
        one.mark(RequestEvent.DECODE_BEGAN, at + 0.075, "10.0.0.21:8200")
        one.mark(RequestEvent.FIRST_TOKEN, at + 0.089)
        if number > 3:
            one.relayed_bytes = 2_200
            recent.end(one, RequestOutcome.ANSWERED, 200, at + 1.9)
    recent.errors.note(
        0, "prefill instance http://10.0.0.13:8100 was ejected after 5 failures in a row", NOW - 12
    )


def told(scene: Scene) -> None:
    """Add a request whose D reports its transfer, and one whose D does not."""
    for name in ("told", "untold"):
        one = scene.recent.begin(name, "/v1/completions", NOW - 20)
        for mark, after, about in (
            (RequestEvent.ADMITTED, 0.1, None),
            (RequestEvent.PREFILL_BEGAN, 0.1, "10.0.0.11:8100"),
            (RequestEvent.PREFILL_ENDED, 0.4, None),
            (RequestEvent.DECODE_BEGAN, 0.4, "10.0.0.21:8200"),
            (RequestEvent.FIRST_TOKEN, 0.8, None),
        ):
            one.mark(mark, NOW - 20 + after, about)
        one.relayed_bytes = 18_400
        scene.recent.end(one, RequestOutcome.ANSWERED, 200, NOW - 19)
    scene.records["told"] = [
        TransferRecord(
            request_id="cmpl-told-0",
            age_s=19.6,
            attached_s=0.05,
            allocated_s=0.1,
            read_began_s=0.1,
            read_ended_s=0.25,
            confirmed_s=0.3,
            scheduled_s=0.32,
            first_token_s=0.39,
            bytes=12_582_912,
            segments=96,
            transport="shm",
        )
    ]


def hostile_scene() -> Scene:
    """Every value that comes from a client or an engine is HTML markup, or very long."""
    scene = Scene(RouterFacts(HOSTILE, 1.0, policies={HOSTILE: HOSTILE}))
    odd = MetricsWatcher()
    odd.note(
        read_metrics(
            b'vllm:num_requests_running{model_name="<b>m</b>"} 1\n'
            b'kvferry:transfer_mode{mode="<i>x</i>"} 1\n'
            b"kvferry:num_leases 1\n"
            b'kvferry:tier_used_bytes{tier="<u>t</u>"} 9e15\n'
            b'kvferry:tier_max_bytes{tier="<u>t</u>"} 1e-300\n'
            b'kvferry:tier_refused_total{tier="' + b"z" * 5000 + b'"} 9e15\n'
            b'kvferry:tier_objects{tier="__proto__"} NaN\n'
        ),
        NOW,
    )
    scene.instances = [
        InstanceFacts(HOSTILE, HOSTILE, HOSTILE, last_error=HOSTILE * 40, watcher=odd),
        InstanceFacts("x" * 5000, "decode", "healthy", watcher=odd),
        InstanceFacts("x" * 5000, "decode", "healthy"),
    ]
    for name in (HOSTILE, "__proto__", "../../state", "a/b?c#d", "y" * 2000):
        one = scene.recent.begin(name, HOSTILE, NOW - 5)
        one.fallback = one.conversation = HOSTILE
        one.mark(RequestEvent.PREFILL_BEGAN, NOW - 4, HOSTILE)
        one.mark(RequestEvent.PREFILL_FAILED, NOW - 3, HOSTILE)
        scene.recent.end(one, RequestOutcome.FAILED, 502, NOW - 2, HOSTILE + name)
    return scene


def large_scene(num_instances: int = 100) -> Scene:
    scene = busy_scene()
    scene.instances = [
        InstanceFacts(
            f"engine-{number:03d}.very-long-rack-name-{number // 10}"
            f".cluster.internal.example:8{number:03d}",
            "prefill" if number % 3 else "decode",
            ("healthy", "healthy", "healthy", "ejected")[number % 4],
            number,
            watcher=watcher(engine_page(number, 0, number / 100, number, number * 10, 0)),
        )
        for number in range(num_instances)
    ]
    return scene
