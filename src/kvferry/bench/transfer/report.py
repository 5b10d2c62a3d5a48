"""The results of `kvferry bench transfer`: rows for programs, a table and a plot for people.
Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from kvferry.bench.figures import quantile, ratio, rounded
from kvferry.bench.transfer.moves import Move, Pattern

MEMCPY = "memcpy"
RAW_NIXL = "raw nixl"
RAW_NIXL_WRITE = "raw nixl write"
RAW_NIXL_CONTIGUOUS = "raw nixl contiguous"
"""The methods without a transport of ours.

These are a plain copy, NIXL READ and WRITE with one descriptor per block, and NIXL READ of one
contiguous segment.
"""
BASELINES = (MEMCPY, RAW_NIXL, RAW_NIXL_WRITE, RAW_NIXL_CONTIGUOUS)
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class TransferCell:
    """The measurements for one segment size and pattern: seconds by method, and copies by
    transport.

    `copies` is the number of copies or descriptors that a transport used.
    """

    move: Move
    pattern: Pattern
    seconds: Mapping[str, Sequence[float]]
    copies: Mapping[str, int]
    parts: Mapping[str, Move] = field(default_factory=dict)
    """The methods that moved only a part of the move, and the part."""
    device_seconds: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """The device time of each move, for methods that can measure device time."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """The methods that failed in this cell or before, with the reason."""

    @property
    def transports(self) -> list[str]:
        """The transports that were measured, then those that failed."""
        return [*self.copies, *(name for name in self.failures if name not in BASELINES)]

    def part(self, method: str) -> Move:
        return self.parts.get(method, self.move)

    def gbps(self, method: str) -> float | None:
        median = quantile(self.seconds.get(method, ()), 0.5)
        return self.part(method).total_bytes / median / 1e9 if median else None


def make_rows(cells: Sequence[TransferCell]) -> list[dict[str, Any]]:
    """Return one row per transport, segment size and pattern."""
    return [
        {
            "transport": transport,
            "segment_bytes": cell.move.blocks.segment_bytes,
            "pattern": str(cell.pattern),
            "gbps": rounded(cell.gbps(transport), 2),
            "of_memcpy": ratio(cell.gbps(transport), cell.gbps(MEMCPY)),
            "of_raw_nixl": ratio(cell.gbps(transport), cell.gbps(RAW_NIXL)),
            "segments": len(cell.part(transport).local_blocks),
            "copies": cell.copies.get(transport),
            "failed": cell.failures.get(transport),
        }
        for cell in cells
        for transport in cell.transports
    ]


def make_device_rows(cells: Sequence[TransferCell]) -> list[dict[str, Any]]:
    """Return the same rows with more columns for GPUs."""
    more = [
        {
            "moved_bytes": cell.move.total_bytes,
            "timed_bytes": cell.part(transport).total_bytes,
            "median_us": _microseconds(cell, transport),
            "of_contiguous_nixl": ratio(cell.gbps(transport), cell.gbps(RAW_NIXL_CONTIGUOUS)),
            "device_us": _device_microseconds(cell, transport),
            "device_of_memcpy": ratio(
                _microseconds(cell, MEMCPY), _device_microseconds(cell, transport)
            ),
        }
        for cell in cells
        for transport in cell.transports
    ]
    return [row | extra for row, extra in zip(make_rows(cells), more, strict=True)]


def make_baselines(cells: Sequence[TransferCell]) -> list[dict[str, Any]]:
    """Return the speeds of the methods without a transport of ours."""
    return [
        {
            "segment_bytes": cell.move.blocks.segment_bytes,
            "pattern": str(cell.pattern),
            "memcpy_gbps": rounded(cell.gbps(MEMCPY), 2),
            "raw_nixl_gbps": rounded(cell.gbps(RAW_NIXL), 2),
            "failed": {name: cell.failures[name] for name in BASELINES if name in cell.failures},
        }
        | (_device_baseline(cell) if RAW_NIXL_CONTIGUOUS in cell.seconds else {})
        for cell in cells
    ]


def table(
    rows: Sequence[Mapping[str, Any]], cells: Sequence[TransferCell], facts: Mapping[str, Any]
) -> str:
    lines = [
        f"{facts['moved_mib']} MiB a move in {facts['regions']} regions, spread "
        f"{facts['spread']}, median of {facts['rounds']}; "
        f"{facts['processor']}, {facts['cores']} cores, copied by {facts['copied_by']}",
        f"{'segment':>9}  "
        f"{'pattern':<10}{'way':<20}{'GB/s':>8}{'÷ memcpy':>10}{'÷ raw NIXL':>12}{'copies':>9}",
    ]
    size_bytes = cells[0].move.total_bytes
    for cell in cells:
        if cell.move.total_bytes < size_bytes:
            size_bytes = cell.move.total_bytes
            lines.append(f"{size_bytes // MIB} MiB a move")
        for method in BASELINES:
            if method in cell.failures:
                lines.append(_failure_line(cell, method))
            elif cell.gbps(method) is not None:
                lines.append(
                    _line(
                        cell,
                        method,
                        rounded(cell.gbps(method), 2),
                        ratio(cell.gbps(method), cell.gbps(MEMCPY)),
                    )
                )
        for row in rows:
            if (
                row["segment_bytes"],
                row["pattern"],
                row.get("moved_bytes", cell.move.total_bytes),
            ) == _key(cell):
                lines.append(
                    _failure_line(cell, row["transport"])
                    if row["failed"]
                    else _line(
                        cell,
                        row["transport"],
                        row["gbps"],
                        row["of_memcpy"],
                        row["of_raw_nixl"],
                        row["copies"],
                    )
                )
    return "\n".join(lines)


def largest(cells: Sequence[TransferCell]) -> list[TransferCell]:
    """Return the cells of the largest move."""
    most = max(cell.move.total_bytes for cell in cells)
    return [cell for cell in cells if cell.move.total_bytes == most]


def _device_baseline(cell: TransferCell) -> dict[str, Any]:
    return {
        "moved_bytes": cell.move.total_bytes,
        "raw_nixl_timed_bytes": cell.part(RAW_NIXL).total_bytes,
        "memcpy_median_us": _microseconds(cell, MEMCPY),
        "raw_nixl_write_gbps": rounded(cell.gbps(RAW_NIXL_WRITE), 2),
        "contiguous_nixl_gbps": rounded(cell.gbps(RAW_NIXL_CONTIGUOUS), 2),
        "contiguous_nixl_median_us": _microseconds(cell, RAW_NIXL_CONTIGUOUS),
    }


def _line(cell: TransferCell, method: str, *figures: float | None) -> str:
    shown = ["-" if figure is None else str(figure) for figure in figures] + ["", ""]
    figures_shown = f"{shown[0]:>8}{shown[1]:>10}{shown[2]:>12}{shown[3]:>9}"
    return f"{_line_start(cell, method)}{figures_shown}".rstrip()


def _failure_line(cell: TransferCell, method: str) -> str:
    return f"{_line_start(cell, method)}  failed: {cell.failures[method]}"


def _line_start(cell: TransferCell, method: str) -> str:
    segment = f"{cell.move.blocks.segment_bytes // 1024} KiB"
    return f"{segment:>9}  {cell.pattern:<10}{method:<20}"


def _device_microseconds(cell: TransferCell, method: str) -> float | None:
    median = quantile(cell.device_seconds.get(method, ()), 0.5)
    return None if median is None else rounded(1e6 * median, 1)


def _key(cell: TransferCell) -> tuple[int, Pattern, int]:
    return cell.move.blocks.segment_bytes, cell.pattern, cell.move.total_bytes


def _microseconds(cell: TransferCell, method: str) -> float | None:
    median = quantile(cell.seconds.get(method, ()), 0.5)
    return None if median is None else rounded(1e6 * median, 1)


# -- plot --
# The plot as SVG, written without a plotting library, because a drawing of four lines does not need
# one.


WIDTH, HEIGHT = 720, 300
PANEL_WIDTH, PANEL_HEIGHT = 280, 180
LEFT, TOP, GAP = 56, 56, 64
COLOURS = ("#0b6e99", "#d9730d", "#6940a5", "#0f7b6c")
PATTERNS = ("scattered", "runs")
TICKS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


def draw(rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> str:
    """Draw the share of memcpy speed by segment size: one panel per pattern, one line per
    transport.
    """
    transports = list(dict.fromkeys(row["transport"] for row in rows))
    sizes = sorted({row["segment_bytes"] for row in rows})
    top = max([1.0, *(row["of_memcpy"] or 0.0 for row in rows)])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="11" fill="#37352f">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(
            LEFT,
            20,
            "KV between two processes, ÷ memcpy of the same bytes",
            'font-size="14" font-weight="bold"',
        ),
        _text(
            LEFT,
            36,
            f"{facts['processor']}, {facts['cores']} cores, {facts['moved_mib']} MiB a move, "
            f"spread {facts['spread']}",
        ),
    ]
    for number, pattern in enumerate(PATTERNS):
        left = LEFT + number * (PANEL_WIDTH + GAP)
        parts += _panel(left, pattern, sizes, top)
        for transport, colour in zip(transports, COLOURS, strict=False):
            found = {
                row["segment_bytes"]: row["of_memcpy"]
                for row in rows
                if (row["transport"], row["pattern"]) == (transport, pattern)
            }
            parts += _curve(
                left,
                [
                    (_x(left, sizes, size), _y(top, found[size]))
                    for size in sizes
                    if found.get(size) is not None
                ],
                colour,
            )
    for number, (transport, colour) in enumerate(zip(transports, COLOURS, strict=False)):
        at = LEFT + number * 90
        parts.append(f'<rect x="{at}" y="{HEIGHT - 20}" width="14" height="4" fill="{colour}"/>')
        parts.append(_text(at + 20, HEIGHT - 14, transport))
    return "\n".join([*parts, "</svg>", ""])


def _panel(left: int, pattern: str, sizes: Sequence[int], top: float) -> list[str]:
    parts = [
        _text(left + PANEL_WIDTH / 2, TOP - 4, pattern, 'text-anchor="middle" font-weight="bold"')
    ]
    for tick in TICKS:
        y = _y(top, tick)
        dashes = ' stroke-dasharray="4 3"' if tick == 0.8 else ""
        parts.append(
            f'<line x1="{left}" y1="{y:.1f}" x2="{left + PANEL_WIDTH}" y2="{y:.1f}" '
            f'stroke="#d3d1cb"{dashes}/>'
        )
        parts.append(_text(left - 6, y + 4, f"{tick:.1f}", 'text-anchor="end"'))
    for size in sizes:
        label = f"{size // 1024} KiB" if size < 1024 * 1024 else f"{size // (1024 * 1024)} MiB"
        parts.append(
            _text(_x(left, sizes, size), TOP + PANEL_HEIGHT + 16, label, 'text-anchor="middle"')
        )
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
