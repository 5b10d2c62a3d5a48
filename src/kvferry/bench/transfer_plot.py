"""The plot of `kvferry bench transfer`, written as SVG by hand: a drawing of four lines does not deserve a plotting library. Pure."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

__all__ = ["draw"]

WIDTH, HEIGHT = 720, 300
PANEL_WIDTH, PANEL_HEIGHT = 280, 180
LEFT, TOP, GAP = 56, 56, 64
COLOURS = ("#0b6e99", "#d9730d", "#6940a5", "#0f7b6c")
PATTERNS = ("scattered", "runs")
TICKS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


def draw(rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> str:
    """Share of memcpy against the size of segments, a panel for each pattern, a line for each transport."""
    transports = list(dict.fromkeys(row["transport"] for row in rows))
    sizes = sorted({row["segment_bytes"] for row in rows})
    top = max([1.0, *(row["of_memcpy"] or 0.0 for row in rows)])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="11" fill="#37352f">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(LEFT, 20, "KV between two processes, ÷ memcpy of the same bytes", 'font-size="14" font-weight="bold"'),
        _text(LEFT, 36, f"{facts['processor']}, {facts['cores']} cores, {facts['moved_mib']} MiB a move, spread {facts['spread']}"),
    ]
    for number, pattern in enumerate(PATTERNS):
        left = LEFT + number * (PANEL_WIDTH + GAP)
        parts += _panel(left, pattern, sizes, top)
        for transport, colour in zip(transports, COLOURS, strict=False):
            found = {row["segment_bytes"]: row["of_memcpy"] for row in rows if (row["transport"], row["pattern"]) == (transport, pattern)}
            parts += _curve(left, [(_x(left, sizes, size), _y(top, found[size])) for size in sizes if found.get(size) is not None], colour)
    for number, (transport, colour) in enumerate(zip(transports, COLOURS, strict=False)):
        at = LEFT + number * 90
        parts.append(f'<rect x="{at}" y="{HEIGHT - 20}" width="14" height="4" fill="{colour}"/>')
        parts.append(_text(at + 20, HEIGHT - 14, transport))
    return "\n".join([*parts, "</svg>", ""])


def _panel(left: int, pattern: str, sizes: Sequence[int], top: float) -> list[str]:
    parts = [_text(left + PANEL_WIDTH / 2, TOP - 4, pattern, 'text-anchor="middle" font-weight="bold"')]
    for tick in TICKS:
        y = _y(top, tick)
        dashes = ' stroke-dasharray="4 3"' if tick == 0.8 else ""
        parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{left + PANEL_WIDTH}" y2="{y:.1f}" stroke="#d3d1cb"{dashes}/>')
        parts.append(_text(left - 6, y + 4, f"{tick:.1f}", 'text-anchor="end"'))
    for size in sizes:
        label = f"{size // 1024} KiB" if size < 1024 * 1024 else f"{size // (1024 * 1024)} MiB"
        parts.append(_text(_x(left, sizes, size), TOP + PANEL_HEIGHT + 16, label, 'text-anchor="middle"'))
    return parts


def _curve(left: int, points: Sequence[tuple[float, float]], colour: str) -> list[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
    return [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>', *dots]


def _x(left: int, sizes: Sequence[int], size: int) -> float:
    return left + PANEL_WIDTH * (sizes.index(size) + 0.5) / len(sizes)


def _y(top: float, share: float) -> float:
    return TOP + PANEL_HEIGHT * (1 - share / top)


def _text(x: float, y: float, words: object, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(str(words))}</text>'
