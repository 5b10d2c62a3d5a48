"""The results of the router benchmark: medians of the rounds, with ratios to other routers.
Pure.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvferry.bench.figures import quantile, ratio, rounded

FAILURES_SHOWN = 5
COLUMNS = {
    "requests/s": "rps",
    "÷ direct": "of_direct",
    "÷ toy": "of_toy",
    "p50 ms": "ttfb_p50_ms",
    "p99 ms": "ttfb_p99_ms",
    "CPU s/1k": "cpu_s_per_1k",
    "MB": "rss_mb",
    "client CPU": "client_share",
    "waited": "waited_share",
    "failed": "failed",
}
LEGEND = """\
p50, p99: to the first byte of the body. CPU s/1k: of the router, for 1,000 requests. client CPU: share of their core that the client and
the stubs took; near 1 they are the limit. waited: share of the time in which the router or the client could have run and others had the
core; near 0 on a quiet machine."""  # noqa: E501


class Router(StrEnum):
    """The routers under test."""

    DIRECT = "direct"
    """No router: the client sends requests to P and D itself."""
    KVFERRY = "kvferry"
    AIOHTTP = "aiohttp"
    """A minimal proxy on plain aiohttp."""
    TOY = "toy"
    VLLM_ROUTER = "vllm-router"


@dataclass(frozen=True, slots=True)
class Sample:
    """The measurements of one router in one round."""

    rps: float
    ttfb_p50_ms: float | None
    ttfb_p99_ms: float | None
    client_share: float
    waited_share: float
    verified: int
    failures: Mapping[str, int]
    cpu_s_per_1k: float | None = None
    """The router's CPU seconds per 1,000 requests; None without a router process."""
    rss_mb: float | None = None


@dataclass(slots=True)
class RouterCell:
    """All samples of one prompt length and concurrency."""

    prompt_bytes: int
    concurrency: int
    samples: dict[Router, list[Sample]] = field(default_factory=dict)

    def median(self, router: Router, name: str) -> float | None:
        return quantile(
            [
                value
                for sample in self.samples.get(router, [])
                if (value := getattr(sample, name)) is not None
            ],
            0.5,
        )


def make_rows(cells: Sequence[RouterCell]) -> list[dict[str, Any]]:
    return [_row(cell, router) for cell in cells for router in cell.samples]


def _row(cell: RouterCell, router: Router) -> dict[str, Any]:
    samples = cell.samples[router]
    failures = sum((Counter(sample.failures) for sample in samples), Counter[str]())
    rps = cell.median(router, "rps")
    return {
        "router": str(router),
        "prompt_bytes": cell.prompt_bytes,
        "concurrency": cell.concurrency,
        "rps": rounded(rps),
        "rps_min": rounded(min((sample.rps for sample in samples), default=None)),
        "rps_max": rounded(max((sample.rps for sample in samples), default=None)),
        "ttfb_p50_ms": rounded(cell.median(router, "ttfb_p50_ms"), 3),
        "ttfb_p99_ms": rounded(cell.median(router, "ttfb_p99_ms"), 3),
        "added_p50_ms": _added(cell, router, "ttfb_p50_ms"),
        "added_p99_ms": _added(cell, router, "ttfb_p99_ms"),
        "cpu_s_per_1k": rounded(cell.median(router, "cpu_s_per_1k"), 3),
        "of_direct": ratio(rps, cell.median(Router.DIRECT, "rps")),
        "of_toy": ratio(rps, cell.median(Router.TOY, "rps")),
        "of_vllm_router": ratio(rps, cell.median(Router.VLLM_ROUTER, "rps")),
        "rss_mb": rounded(cell.median(router, "rss_mb")),
        "client_share": rounded(cell.median(router, "client_share"), 2),
        "waited_share": rounded(cell.median(router, "waited_share"), 3),
        "requests": sum(sample.verified for sample in samples),
        "failed": sum(failures.values()),
        "failures": dict(failures.most_common(FAILURES_SHOWN)),
    }


def _added(cell: RouterCell, router: Router, name: str) -> float | None:
    with_router, without = cell.median(router, name), cell.median(Router.DIRECT, name)
    return (
        None
        if with_router is None or without is None or router is Router.DIRECT
        else rounded(with_router - without, 3)
    )


def table(rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> str:
    lines = [
        f"{'prompt':>8}{'at once':>9}  {'router':<12}"
        + "".join(f"{title:>12}" for title in COLUMNS)
    ]
    for row in rows:
        figures = "".join(
            f"{'-' if row[key] is None else row[key]:>12}" for key in COLUMNS.values()
        )
        lines.append(
            f"{row['prompt_bytes']:>8}{row['concurrency']:>9}  {row['router']:<12}{figures}"
        )
        lines += [f"{'':>19}{count} × {why}" for why, count in row["failures"].items()]
    each = f"{facts['seconds']:g} s" if facts["seconds"] else f"{facts['requests']} requests"
    return "\n".join(
        [
            *lines,
            "",
            f"Medians of {facts['repeats']} rounds of {each}. {LEGEND}",
            *facts["skipped"].values(),
        ]
    )


def progress(cell: RouterCell) -> str:
    summary = ", ".join(
        f"{router} {cell.median(router, 'rps') or 0:.0f}/s" for router in cell.samples
    )
    return f"{cell.prompt_bytes} bytes, {cell.concurrency} at once: {summary}"
