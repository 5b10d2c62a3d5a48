"""The figures of `kvferry bench transfer`: what was measured, as rows for programs and as a table for people. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.bench.figures import quantile, ratio, rounded
from kvferry.bench.transfer_moves import Move, Pattern

__all__ = [
    "MEMCPY",
    "RAW_NIXL",
    "RAW_NIXL_CONTIGUOUS",
    "RAW_NIXL_WRITE",
    "TransferCell",
    "largest",
    "make_baselines",
    "make_device_rows",
    "make_rows",
    "table",
]

MEMCPY = "memcpy"
RAW_NIXL = "raw nixl"
RAW_NIXL_WRITE = "raw nixl write"
RAW_NIXL_CONTIGUOUS = "raw nixl contiguous"
"""What moves without a transport of ours: plain copy; NIXL READ and WRITE, a descriptor for each block; NIXL READ of one long segment."""
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class TransferCell:
    """What was measured for one size of segments and one pattern: seconds by way, and how many copies or descriptors each transport
    used.
    """

    move: Move
    pattern: Pattern
    seconds: Mapping[str, Sequence[float]]
    copies: Mapping[str, int]
    parts: Mapping[str, Move] = field(default_factory=dict)
    """Ways that moved only a part of it, and which."""
    device_seconds: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Of those that know it: how long the device was at it."""

    def part(self, method: str) -> Move:
        return self.parts.get(method, self.move)

    def gbps(self, method: str) -> float | None:
        median = quantile(self.seconds.get(method, ()), 0.5)
        return self.part(method).total_bytes / median / 1e9 if median else None


def make_rows(cells: Sequence[TransferCell]) -> list[dict[str, Any]]:
    """One for each transport, size and pattern."""
    return [
        {
            "transport": transport,
            "segment_bytes": cell.move.blocks.segment_bytes,
            "pattern": str(cell.pattern),
            "gbps": rounded(cell.gbps(transport), 2),
            "of_memcpy": ratio(cell.gbps(transport), cell.gbps(MEMCPY)),
            "of_raw_nixl": ratio(cell.gbps(transport), cell.gbps(RAW_NIXL)),
            "segments": len(cell.part(transport).local_blocks),
            "copies": copies,
        }
        for cell in cells
        for transport, copies in cell.copies.items()
    ]


def make_device_rows(cells: Sequence[TransferCell]) -> list[dict[str, Any]]:
    """The same, with what else matters on a GPU."""
    more = [
        {
            "moved_bytes": cell.move.total_bytes,
            "timed_bytes": cell.part(transport).total_bytes,
            "median_us": _microseconds(cell, transport),
            "of_contiguous_nixl": ratio(cell.gbps(transport), cell.gbps(RAW_NIXL_CONTIGUOUS)),
            "device_us": _device_microseconds(cell, transport),
            "device_of_memcpy": ratio(_microseconds(cell, MEMCPY), _device_microseconds(cell, transport)),
        }
        for cell in cells
        for transport in cell.copies
    ]
    return [row | extra for row, extra in zip(make_rows(cells), more, strict=True)]


def make_baselines(cells: Sequence[TransferCell]) -> list[dict[str, Any]]:
    return [
        {
            "segment_bytes": cell.move.blocks.segment_bytes,
            "pattern": str(cell.pattern),
            "memcpy_gbps": rounded(cell.gbps(MEMCPY), 2),
            "raw_nixl_gbps": rounded(cell.gbps(RAW_NIXL), 2),
        }
        | (_device_baseline(cell) if RAW_NIXL_CONTIGUOUS in cell.seconds else {})
        for cell in cells
    ]


def table(rows: Sequence[Mapping[str, Any]], cells: Sequence[TransferCell], facts: Mapping[str, Any]) -> str:
    lines = [
        f"{facts['moved_mib']} MiB a move in {facts['regions']} regions, spread {facts['spread']}, median of {facts['rounds']}; "
        f"{facts['processor']}, {facts['cores']} cores, copied by {facts['copied_by']}",
        f"{'segment':>9}  {'pattern':<10}{'way':<20}{'GB/s':>8}{'÷ memcpy':>10}{'÷ raw NIXL':>12}{'copies':>9}",
    ]
    size_bytes = cells[0].move.total_bytes
    for cell in cells:
        if cell.move.total_bytes < size_bytes:
            size_bytes = cell.move.total_bytes
            lines.append(f"{size_bytes // MIB} MiB a move")
        for method in (MEMCPY, RAW_NIXL, RAW_NIXL_WRITE, RAW_NIXL_CONTIGUOUS):
            if cell.gbps(method) is not None:
                lines.append(_line(cell, method, rounded(cell.gbps(method), 2), ratio(cell.gbps(method), cell.gbps(MEMCPY))))
        for row in rows:
            if (row["segment_bytes"], row["pattern"], row.get("moved_bytes", cell.move.total_bytes)) == _key(cell):
                lines.append(_line(cell, row["transport"], row["gbps"], row["of_memcpy"], row["of_raw_nixl"], row["copies"]))
    return "\n".join(lines)


def largest(cells: Sequence[TransferCell]) -> list[TransferCell]:
    """Those of the largest move."""
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
    segment = f"{cell.move.blocks.segment_bytes // 1024} KiB"
    return f"{segment:>9}  {cell.pattern:<10}{method:<20}{shown[0]:>8}{shown[1]:>10}{shown[2]:>12}{shown[3]:>9}".rstrip()


def _device_microseconds(cell: TransferCell, method: str) -> float | None:
    median = quantile(cell.device_seconds.get(method, ()), 0.5)
    return None if median is None else rounded(1e6 * median, 1)


def _key(cell: TransferCell) -> tuple[int, Pattern, int]:
    return cell.move.blocks.segment_bytes, cell.pattern, cell.move.total_bytes


def _microseconds(cell: TransferCell, method: str) -> float | None:
    median = quantile(cell.seconds.get(method, ()), 0.5)
    return None if median is None else rounded(1e6 * median, 1)
