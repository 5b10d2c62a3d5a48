"""The handover benchmark on a GPU: rows for JSON, a table, and a plot as SVG. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from kvferry.bench.figures import quantile, rounded


@dataclass(slots=True)
class GpuSamples:
    """The measurements of one contender and one prompt length."""

    handover_s: list[float] = field(default_factory=list)
    """The time from P's answer to D's first token."""
    floor_s: list[float] = field(default_factory=list)
    """The time to D's first token for a prompt that is completely in D's own cache."""
    transfer_s: list[float] = field(default_factory=list)
    """The time to move the bytes alone, as D measures."""
    descriptors: list[float] = field(default_factory=list)
    """The number of descriptors or copies of a transfer, as D counts."""


@dataclass(slots=True)
class AtOnce:
    """Many requests, several at a time."""

    handover_s: list[float]
    total_s: float


@dataclass(slots=True)
class Measured:
    """All measurements of one contender, and the error that ended them early, if any."""

    samples: dict[int, GpuSamples]
    at_once: AtOnce | None = None
    failure: str | None = None
    first_contact: list[tuple[float, float]] = field(default_factory=list)
    """The first requests after the start of P and D: seconds of P's answer and of the handover."""


def make_rows(
    measured: Mapping[str, Measured], num_at_once: int, at_once_tokens: int
) -> dict[str, Any]:
    """Return a row per length and contender, and one per contender for requests at once."""
    rows = [
        {
            "prompt_tokens": length,
            "connector": name,
            "handover_ms_p50": milliseconds(samples.handover_s),
            "handover_ms_max": milliseconds(samples.handover_s, 1.0),
            "floor_ms_p50": milliseconds(samples.floor_s),
            "over_floor_ms": _difference(
                milliseconds(samples.handover_s), milliseconds(samples.floor_s)
            ),
            "transfer_ms_p50": milliseconds(samples.transfer_s),
            "descriptors_p50": rounded(quantile(samples.descriptors, 0.5), 0),
            "num_samples": len(samples.handover_s),
            "num_transfers": len(samples.transfer_s),
        }
        for length in next(iter(measured.values())).samples
        for name, samples in ((name, of.samples[length]) for name, of in measured.items())
    ]
    at_once = [
        {
            "connector": name,
            "num_requests": len(of.at_once.handover_s),
            "num_at_once": num_at_once,
            "prompt_tokens": at_once_tokens,
            "total_s": rounded(of.at_once.total_s, 2),
            "handover_ms_p50": milliseconds(of.at_once.handover_s),
            "handover_ms_max": milliseconds(of.at_once.handover_s, 1.0),
        }
        for name, of in measured.items()
        if of.at_once is not None
    ]
    first_contact = [
        {
            "connector": name,
            "prompt_tokens": at_once_tokens,
            "request": number,
            "prefill_ms": rounded(prefill_s * 1000),
            "handover_ms": rounded(handover_s * 1000),
        }
        for name, of in measured.items()
        for number, (prefill_s, handover_s) in enumerate(of.first_contact, start=1)
    ]
    return {
        "rows": rows,
        "first_contact": first_contact,
        "at_once": at_once,
        "failures": {name: of.failure for name, of in measured.items() if of.failure},
    }


def table(result: Mapping[str, Any]) -> str:
    """Return the result for a terminal."""
    lines = _columns(
        result["rows"],
        {
            "prompt": "prompt_tokens",
            "connector": "connector",
            "p50": "handover_ms_p50",
            "worst": "handover_ms_max",
            "floor": "floor_ms_p50",
            "over floor": "over_floor_ms",
            "transfer": "transfer_ms_p50",
            "descriptors": "descriptors_p50",
        },
    )
    lines += ["", "milliseconds from P's answer to D's first token; floor: D's time for a prompt"]
    lines += ["wholly in its own cache", ""]
    lines += _columns(
        result["at_once"],
        {
            "prompt": "prompt_tokens",
            "connector": "connector",
            "requests": "num_requests",
            "at a time": "num_at_once",
            "total s": "total_s",
            "p50": "handover_ms_p50",
            "worst": "handover_ms_max",
        },
    )
    lines += ["", "the first requests after P and D have started, with empty compiler caches", ""]
    lines += _columns(
        result["first_contact"],
        {
            "prompt": "prompt_tokens",
            "connector": "connector",
            "request": "request",
            "prefill": "prefill_ms",
            "handover": "handover_ms",
        },
    )
    lines += [f"{name} failed: {reason}" for name, reason in result["failures"].items()]
    return "\n".join(lines)


def milliseconds(values: Sequence[float], share: float = 0.5) -> float | None:
    """Return the median, or another quantile, of values in seconds."""
    found = quantile(values, share)
    return None if found is None else rounded(found * 1000)


def _difference(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else rounded(one - other)


def _columns(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> list[str]:
    def line(values: Sequence[object]) -> str:
        return "".join(f"{value:>{18 if n == 1 else 12}}" for n, value in enumerate(values))

    cells = [["-" if row[key] is None else row[key] for key in columns.values()] for row in rows]
    return [line(list(columns)), *map(line, cells)]


# -- plot --
# Both axes have equal steps for equal factors: vLLM's own connector as shipped takes a hundred
# times as long as the others.


WIDTH, HEIGHT = 640, 360
LEFT, TOP, PLOT_WIDTH, PLOT_HEIGHT = 64, 48, 400, 250
COLOURS = ("#0b6e99", "#0f7b6c", "#d9730d", "#6940a5")
FLOOR_COLOUR = "#9b9a97"
TICKS_MS = (20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000)


def draw(result: Mapping[str, Any]) -> str:
    """Draw the median handover by prompt length: a line for each connector, and the floor of the
    first.
    """
    names = list(dict.fromkeys(row["connector"] for row in result["rows"]))
    rows = [row for row in result["rows"] if row["handover_ms_p50"] is not None]
    lines = {
        name: [
            (row["prompt_tokens"], row["handover_ms_p50"])
            for row in rows
            if row["connector"] == name
        ]
        for name in names
    }
    floor = [
        (row["prompt_tokens"], row["floor_ms_p50"]) for row in rows if row["connector"] == names[0]
    ]
    lengths = sorted({row["prompt_tokens"] for row in rows})
    values = [value for points in (*lines.values(), floor) for _, value in points]
    x, y = _Scale(lengths, LEFT, PLOT_WIDTH), _Scale(values, TOP + PLOT_HEIGHT, -PLOT_HEIGHT)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="11" fill="#37352f">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(LEFT, 22, "P's answer to D's first token, ms", 'font-size="14" font-weight="bold"'),
        _text(LEFT + PLOT_WIDTH / 2, HEIGHT - 18, "prompt tokens", 'text-anchor="middle"'),
    ]
    for tick in (tick for tick in TICKS_MS if min(values) <= tick <= max(values)):
        at = y(tick)
        parts.append(f'<path d="M{LEFT} {at:.1f}h{PLOT_WIDTH}" stroke="#e3e2e0"/>')
        parts.append(_text(LEFT - 8, at + 4, f"{tick:,}", 'text-anchor="end"'))
    for length in lengths:
        at = TOP + PLOT_HEIGHT + 20
        parts.append(_text(x(length), at, f"{length:,}", 'text-anchor="middle"'))
    drawn = [*zip(lines.items(), COLOURS, strict=False), (("floor", floor), FLOOR_COLOUR)]
    for number, ((name, points), colour) in enumerate(drawn):
        path = " ".join(f"{x(length):.1f},{y(value):.1f}" for length, value in points)
        style = 'stroke-dasharray="4 3"' if name == "floor" else ""
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" {style}/>'
        )
        at = TOP + 20 * number
        parts.append(
            f'<rect x="{LEFT + PLOT_WIDTH + 20}" y="{at}" width="14" height="4" fill="{colour}"/>'
        )
        parts.append(_text(LEFT + PLOT_WIDTH + 40, at + 6, name))
    return "\n".join([*parts, "</svg>", ""])


class _Scale:
    """Places values on an axis that begins at `start` and is `length` long."""

    def __init__(self, values: Sequence[float], start: float, length: float) -> None:
        self._low = math.log(min(values))
        self._span = (math.log(max(values)) - self._low) or 1.0
        self._start, self._length = start, length

    def __call__(self, value: float) -> float:
        return self._start + self._length * (math.log(value) - self._low) / self._span


def _text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(words)}</text>'
