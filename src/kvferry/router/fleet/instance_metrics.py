"""Parses an engine's `/metrics` page: load, KV held and in transfer, storage tiers, and the
transfer mode.

Works for the embedded engine and for vLLM. Pure, and safe for untrusted pages: any bytes are read
without an error, in one pass and up to a bound. A value missing from the page is None, so the
dashboard never shows a 0 for a missing value.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kvferry.config.fields import read_number
from kvferry.router.fleet.tier_metrics import (
    LookupCounters,
    OffloadReading,
    OffloadWindow,
    TierCounters,
    TierLevels,
    TierReading,
)

MAX_PAGE_BYTES = 4 * 1024 * 1024
"""Longest page that is read. A vLLM with every optional histogram sends about 300 KB."""
MAX_COUNT = float(2**53)
"""Largest value that a float holds exactly as an integer."""
MAX_TIERS = 8
"""Most tiers of one instance that are read."""
_MAX_WORD_CHARS = 256
_LABEL = re.compile(r'[ ,]*([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")


@dataclass(frozen=True, slots=True)
class LoadMetrics:
    """Scheduler load of an engine."""

    running: float | None = None
    waiting: float | None = None
    cache_usage: float | None = None
    """Used share of the KV cache, 0 to 1; the maximum if the page covers several engines."""
    generated_tokens: float | None = None
    prompt_tokens: float | None = None
    preemptions: float | None = None


@dataclass(frozen=True, slots=True)
class KvMetrics:
    """Leases and KV transfers of an engine."""

    leases: float | None = None
    """Leases held for peers."""
    held_blocks: float | None = None
    active_transfers: float | None = None
    """Requests whose KV is being transferred from a peer."""
    transfers: float | None = None
    moved_bytes: float | None = None
    moving_s: float | None = None
    failures: float | None = None
    """Failed transfers and handshakes."""
    expired: float | None = None
    """Leases that expired without being read."""


@dataclass(frozen=True, slots=True)
class InstanceReading:
    """One reading of an instance's `/metrics` page."""

    load: LoadMetrics = LoadMetrics()
    kv: KvMetrics = KvMetrics()
    mode: str = ""
    """`pull` or `push`; empty if not reported."""
    side_channel: str = ""
    """Side channel as host:port; empty if not reported."""
    model: str = ""
    started_at: float | None = None
    """Start time of the process by its own clock; another value means another incarnation."""
    offload: OffloadReading | None = None
    """Storage tiers; None if the page says nothing about the engine's work, so that the tiers are
    not known.
    """

    @property
    def is_push(self) -> bool:
        return self.mode == "push"


_SUMMED: Mapping[bytes, str] = {
    b"vllm:num_requests_running": "running",
    b"vllm:num_requests_waiting": "waiting",
    b"vllm:generation_tokens_total": "generated_tokens",
    b"vllm:prompt_tokens_total": "prompt_tokens",
    b"vllm:num_preemptions_total": "preemptions",
    b"kvferry:num_leases": "leases",
    b"kvferry:num_held_blocks": "held_blocks",
    b"kvferry:num_transfers": "active_transfers",
    b"kvferry:transfers_total": "transfers",
    b"kvferry:transfer_bytes_total": "moved_bytes",
    b"kvferry:transfer_seconds_total": "moving_s",
    b"vllm:nixl_num_failed_transfers_total": "failures",
    b"vllm:nixl_num_kv_expired_reqs_total": "expired",
    # From vLLM's own NIXL connector, which reports no kvferry transports.
    b"vllm:nixl_xfer_time_seconds_count": "nixl transfers",
    b"vllm:nixl_bytes_transferred_sum": "nixl moved_bytes",
    b"vllm:nixl_xfer_time_seconds_sum": "nixl moving_s",
}
_LOOKUPS: Mapping[bytes, str] = {
    b"kvferry:offload_%s_total" % name.encode(): name for name in LookupCounters._fields
}
_BY_TIER: Mapping[bytes, str] = {
    **{b"kvferry:tier_%s_total" % name.encode(): name for name in TierCounters._fields},
    **{b"kvferry:tier_%s" % name.encode(): name for name in TierLevels._fields},
}
_USAGE = (b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc")
_MODE = b"kvferry:transfer_mode"
_SIDE_CHANNEL = b"kvferry:side_channel"
_STARTED = b"process_start_time_seconds"
_WANTED = frozenset({*_SUMMED, *_LOOKUPS, *_BY_TIER, *_USAGE, _MODE, _SIDE_CHANNEL, _STARTED})


def read_metrics(page: bytes) -> InstanceReading:
    """Parse a page; values of several engines on one page (data-parallel ranks) are summed."""
    sums: dict[str, float] = {}
    usage: float | None = None
    words: dict[bytes, str] = {}
    started_at: float | None = None
    lookups: dict[str, float] = {}
    tiers: dict[str, dict[str, float]] = {}
    for name, labels, value in _samples(page):
        if name in _USAGE:
            usage = max(usage or 0.0, min(value, 1.0))
        elif name == _STARTED:
            started_at = value
        elif name in (_MODE, _SIDE_CHANNEL):
            if value == 1:
                words[name] = _label(labels, "mode" if name == _MODE else "address")
        elif name in _BY_TIER:
            tier = _label(labels, "tier")
            if tier and (tier in tiers or len(tiers) < MAX_TIERS):
                _add(tiers.setdefault(tier, {}), _BY_TIER[name], value)
        elif name in _LOOKUPS:
            _add(lookups, _LOOKUPS[name], value)
        else:
            _add(sums, _SUMMED[name], value)
            if name == b"vllm:num_requests_running":
                words[name] = _label(labels, "model_name")
    get = sums.get
    return InstanceReading(
        LoadMetrics(
            get("running"),
            get("waiting"),
            usage,
            get("generated_tokens"),
            get("prompt_tokens"),
            get("preemptions"),
        ),
        KvMetrics(
            get("leases"),
            get("held_blocks"),
            get("active_transfers"),
            get("transfers", get("nixl transfers")),
            get("moved_bytes", get("nixl moved_bytes")),
            get("moving_s", get("nixl moving_s")),
            get("failures"),
            get("expired"),
        ),
        words.get(_MODE, ""),
        words.get(_SIDE_CHANNEL, ""),
        words.get(b"vllm:num_requests_running", ""),
        started_at,
        _offload(lookups, tiers) if lookups or tiers or "running" in sums else None,
    )


def _add(sums: dict[str, float], name: str, value: float) -> None:
    sums[name] = min(MAX_COUNT, sums.get(name, 0.0) + value)


def _offload(
    lookups: Mapping[str, float], tiers: Mapping[str, Mapping[str, float]]
) -> OffloadReading:
    return OffloadReading(
        LookupCounters(*map(lookups.get, LookupCounters._fields)),
        {
            name: TierReading(
                TierLevels(*map(values.get, TierLevels._fields)),
                TierCounters(*map(values.get, TierCounters._fields)),
            )
            for name, values in sorted(tiers.items())
        },
    )


@dataclass(frozen=True, slots=True)
class MetricsDelta:
    """Growth of an instance's counters between two readings."""

    tokens: int = 0
    moved_bytes: int = 0
    over_s: float = 1.0
    """Seconds between the two readings."""


@dataclass(slots=True)
class MetricsWatcher:
    """The last reading of one instance, and how fast its counters grow."""

    reading: InstanceReading | None = None
    read_at: float | None = None
    tokens_per_s: float | None = None
    moved_bytes_per_s: float | None = None
    offload: OffloadWindow = field(default_factory=OffloadWindow)
    _before: tuple[float, InstanceReading] | None = field(default=None, init=False)

    def note(self, reading: InstanceReading, now: float) -> MetricsDelta:
        """Record a reading; return the growth since the last reading. A counter that went back
        belongs to a new incarnation and counts as no growth.
        """
        before, self._before = self._before, (now, reading)
        self.reading, self.read_at = reading, now
        if reading.offload is not None:
            self.offload.note(reading.offload, now)
        if before is None:
            return MetricsDelta()
        then, earlier = before
        growth = MetricsDelta(
            _grown(earlier.load.generated_tokens, reading.load.generated_tokens),
            _grown(earlier.kv.moved_bytes, reading.kv.moved_bytes),
            now - then,
        )
        if now > then:
            self.tokens_per_s = (
                None if reading.load.generated_tokens is None else growth.tokens / (now - then)
            )
            self.moved_bytes_per_s = (
                None if reading.kv.moved_bytes is None else growth.moved_bytes / (now - then)
            )
        return growth

    def forget(self) -> None:
        """Drop the figures of an instance that does not answer. The figures are out of date, and
        the next answer may come from another incarnation.
        """
        self.reading = self.read_at = self.tokens_per_s = self.moved_bytes_per_s = self._before = (
            None
        )
        self.offload.clear()


def _grown(earlier: float | None, later: float | None) -> int:
    return 0 if earlier is None or later is None else max(0, int(later - earlier))


def _samples(page: bytes) -> Iterator[tuple[bytes, bytes, float]]:
    """Name, labels and value of each wanted line; values impossible for a gauge or counter are
    skipped.
    """
    whole = page[:MAX_PAGE_BYTES]
    if len(page) > MAX_PAGE_BYTES:
        # Drop the line that the bound cuts in two.
        whole = whole[: whole.rfind(b"\n") + 1]
    for line in whole.split(b"\n"):
        name, brace, rest = line.partition(b"{")
        labels = b""
        if brace:
            if name not in _WANTED:
                continue
            labels, closing, rest = rest.rpartition(b"}")
            if not closing:
                continue
        else:
            name, _, rest = line.partition(b" ")
            if name not in _WANTED:
                continue
        value = _number(rest)
        if value is not None:
            yield name, labels, value


def _number(text: bytes) -> float | None:
    """The sample value; a timestamp may follow it."""
    value = read_number(text.strip().partition(b" ")[0].decode(errors="replace"))
    return None if isinstance(value, str) or not 0 <= value <= MAX_COUNT else value


def _label(labels: bytes, wanted: str) -> str:
    text, position = labels.decode(errors="replace"), 0
    # Match labels one after the other from the start. A regex search would retry at every position
    # and take quadratic time on a malicious line.
    while found := _LABEL.match(text, position):
        if found[1] == wanted:
            return _ESCAPED.sub(
                lambda escaped: "\n" if escaped[1] == "n" else escaped[1], found[2]
            )[:_MAX_WORD_CHARS]
        position = found.end()
    return ""
