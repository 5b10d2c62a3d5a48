"""The figures of `kvferry bench transfer`: what was measured, as rows for programs and as a table for people. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.bench.figures import quantile, ratio, rounded
from kvferry.bench.transfer_moves import Move, Pattern

__all__ = [
    "MEMCPY",
    "RAW_NIXL",
    "RAW_NIXL_ONE",
    "RAW_NIXL_WRITE",
    "Cell",
    "largest",
    "make_baselines",
    "make_device_rows",
    "make_rows",
    "table",
]

MEMCPY = "memcpy"
RAW_NIXL = "raw nixl"
RAW_NIXL_WRITE = "raw nixl write"
RAW_NIXL_ONE = "raw nixl contiguous"
"""What moves without a plane of ours: plain copy; NIXL READ and WRITE, a descriptor for each block; NIXL READ of one long piece."""
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Cell:
    """What was measured for one size of pieces and one pattern: seconds by way, and how many copies or descriptors each plane used."""

    move: Move
    pattern: Pattern
    seconds: Mapping[str, Sequence[float]]
    copies: Mapping[str, int]
    parts: Mapping[str, Move] = field(default_factory=dict)
    """Ways that moved only a part of it, and which."""
    device_seconds: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Of those that know it: how long the device was at it."""

    def part(self, way: str) -> Move:
        return self.parts.get(way, self.move)

    def gbps(self, way: str) -> float | None:
        median = quantile(self.seconds.get(way, ()), 0.5)
        return self.part(way).total_bytes / median / 1e9 if median else None


def make_rows(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """One for each plane, size and pattern."""
    return [
        {
            "plane": plane,
            "piece_bytes": cell.move.blocks.piece_bytes,
            "pattern": str(cell.pattern),
            "gbps": rounded(cell.gbps(plane), 2),
            "of_memcpy": ratio(cell.gbps(plane), cell.gbps(MEMCPY)),
            "of_raw_nixl": ratio(cell.gbps(plane), cell.gbps(RAW_NIXL)),
            "pieces": len(cell.part(plane).local_blocks),
            "copies": copies,
        }
        for cell in cells
        for plane, copies in cell.copies.items()
    ]


def make_device_rows(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """The same, with what else matters on a GPU."""
    more = [
        {
            "moved_bytes": cell.move.total_bytes,
            "timed_bytes": cell.part(plane).total_bytes,
            "median_us": _microseconds(cell, plane),
            "of_contiguous_nixl": ratio(cell.gbps(plane), cell.gbps(RAW_NIXL_ONE)),
            "device_us": _device_microseconds(cell, plane),
            "device_of_memcpy": ratio(_microseconds(cell, MEMCPY), _device_microseconds(cell, plane)),
        }
        for cell in cells
        for plane in cell.copies
    ]
    return [row | extra for row, extra in zip(make_rows(cells), more, strict=True)]


def make_baselines(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    return [
        {
            "piece_bytes": cell.move.blocks.piece_bytes,
            "pattern": str(cell.pattern),
            "memcpy_gbps": rounded(cell.gbps(MEMCPY), 2),
            "raw_nixl_gbps": rounded(cell.gbps(RAW_NIXL), 2),
        }
        | (_device_baseline(cell) if RAW_NIXL_ONE in cell.seconds else {})
        for cell in cells
    ]


def table(rows: Sequence[Mapping[str, Any]], cells: Sequence[Cell], facts: Mapping[str, Any]) -> str:
    lines = [
        f"{facts['moved_mib']} MiB a move in {facts['regions']} regions, spread {facts['spread']}, median of {facts['rounds']}; "
        f"{facts['processor']}, {facts['cores']} cores, copied by {facts['copied_by']}",
        f"{'piece':>9}  {'pattern':<10}{'way':<20}{'GB/s':>8}{'÷ memcpy':>10}{'÷ raw NIXL':>12}{'copies':>9}",
    ]
    size_bytes = cells[0].move.total_bytes
    for cell in cells:
        if cell.move.total_bytes < size_bytes:
            size_bytes = cell.move.total_bytes
            lines.append(f"{size_bytes // MIB} MiB a move")
        for way in (MEMCPY, RAW_NIXL, RAW_NIXL_WRITE, RAW_NIXL_ONE):
            if cell.gbps(way) is not None:
                lines.append(_line(cell, way, rounded(cell.gbps(way), 2), ratio(cell.gbps(way), cell.gbps(MEMCPY))))
        for row in rows:
            if (row["piece_bytes"], row["pattern"], row.get("moved_bytes", cell.move.total_bytes)) == _key(cell):
                lines.append(_line(cell, row["plane"], row["gbps"], row["of_memcpy"], row["of_raw_nixl"], row["copies"]))
    return "\n".join(lines)


def largest(cells: Sequence[Cell]) -> list[Cell]:
    """Those of the largest move."""
    most = max(cell.move.total_bytes for cell in cells)
    return [cell for cell in cells if cell.move.total_bytes == most]


def _device_baseline(cell: Cell) -> dict[str, Any]:
    return {
        "moved_bytes": cell.move.total_bytes,
        "raw_nixl_timed_bytes": cell.part(RAW_NIXL).total_bytes,
        "memcpy_median_us": _microseconds(cell, MEMCPY),
        "raw_nixl_write_gbps": rounded(cell.gbps(RAW_NIXL_WRITE), 2),
        "contiguous_nixl_gbps": rounded(cell.gbps(RAW_NIXL_ONE), 2),
        "contiguous_nixl_median_us": _microseconds(cell, RAW_NIXL_ONE),
    }


def _line(cell: Cell, way: str, *figures: float | None) -> str:
    shown = ["-" if figure is None else str(figure) for figure in figures] + ["", ""]
    piece = f"{cell.move.blocks.piece_bytes // 1024} KiB"
    return f"{piece:>9}  {cell.pattern:<10}{way:<20}{shown[0]:>8}{shown[1]:>10}{shown[2]:>12}{shown[3]:>9}".rstrip()


def _device_microseconds(cell: Cell, way: str) -> float | None:
    median = quantile(cell.device_seconds.get(way, ()), 0.5)
    return None if median is None else rounded(1e6 * median, 1)


def _key(cell: Cell) -> tuple[int, Pattern, int]:
    return cell.move.blocks.piece_bytes, cell.pattern, cell.move.total_bytes


def _microseconds(cell: Cell, way: str) -> float | None:
    median = quantile(cell.seconds.get(way, ()), 0.5)
    return None if median is None else rounded(1e6 * median, 1)
