"""Tests the parts of the transfer benchmark that need no second process."""

import argparse
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.bench.transfer.command import parse_device, parse_plot
from kvferry.bench.transfer.memory import HostAllocator
from kvferry.bench.transfer.moves import RUN_BLOCKS, Blocks, Pattern, plan_move
from kvferry.bench.transfer.report import (
    MEMCPY,
    RAW_NIXL,
    TransferCell,
    draw,
    make_baselines,
    make_device_rows,
    make_rows,
    table,
)
from kvferry.errors import ConfigError
from kvferry.protocol.planning.plan import Segments
from kvferry.transports.copy.segments import coalesce

FACTS = {"processor": "a <fast> one", "cores": 2, "moved_mib": 256, "spread": 1}
SVG = "{http://www.w3.org/2000/svg}"


def num_descriptors(part: Segments) -> int:
    return len(coalesce(part))


@given(
    st.integers(1, 3),
    st.integers(4, 40),
    st.sampled_from(Pattern),
    st.integers(1, 4),
    st.integers(0, 5),
)
def test_a_move_takes_its_share_of_every_region_once_on_both_sides(
    regions: int, runs: int, pattern: Pattern, spread: int, seed: int
) -> None:
    blocks = Blocks(4096, regions, runs * RUN_BLOCKS)
    move = plan_move(blocks, pattern, spread, seed)
    run = RUN_BLOCKS if pattern is Pattern.RUNS else 1
    for side in (move.local_blocks, move.remote_blocks):
        assert (
            len(np.unique(side))
            == len(side)
            == regions * (blocks.per_region // run // spread) * run
        )
    parts = move.segments()
    assert [(part.local_region, part.remote_region) for part in parts] == [
        (n, n) for n in range(regions)
    ]
    assert sum(part.total_bytes for part in parts) == move.total_bytes
    for part in parts:
        assert (
            0
            <= part.local_offsets.min()
            <= part.local_offsets.max()
            <= blocks.region_bytes - blocks.segment_bytes
        )
        assert num_descriptors(part) <= len(part.local_offsets) / run


def test_scattered_blocks_hardly_join_and_runs_always_do() -> None:
    blocks = Blocks(4096, 2, 1024)
    joined = {
        pattern: sum(map(num_descriptors, plan_move(blocks, pattern, 1, 0).segments()))
        for pattern in Pattern
    }
    assert joined[Pattern.SCATTERED] > 0.99 * blocks.count
    assert joined[Pattern.RUNS] <= blocks.count / RUN_BLOCKS


def test_a_region_too_small_for_a_run_is_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        plan_move(Blocks(4096, 1, 7), Pattern.RUNS, 1, 0)


@given(st.integers(1, 3), st.integers(1, 40), st.sampled_from(Pattern), st.integers(1, 600))
def test_a_part_of_a_move_has_whole_runs_in_every_region(
    regions: int, runs: int, pattern: Pattern, most: int
) -> None:
    move = plan_move(Blocks(4096, regions, runs * RUN_BLOCKS), pattern, 1, 0)
    part = move.part(most)
    assert len(part.local_blocks) % (regions * RUN_BLOCKS) == 0
    assert len(part.local_blocks) <= max(most, regions * RUN_BLOCKS)
    whole = set(zip(move.local_blocks.tolist(), move.remote_blocks.tolist(), strict=True))
    assert set(zip(part.local_blocks.tolist(), part.remote_blocks.tolist(), strict=True)) <= whole
    assert sum(each.total_bytes for each in part.segments()) == part.total_bytes
    assert move.joined().total_bytes == move.total_bytes


def cell(**seconds: list[float]) -> TransferCell:
    move = plan_move(Blocks(1000, 1, 1000), Pattern.SCATTERED, 1, 0)
    named = {name.replace("_", " "): values for name, values in seconds.items()}
    return TransferCell(
        move,
        Pattern.SCATTERED,
        named,
        {name: 7 for name in named if name != MEMCPY and not name.startswith(RAW_NIXL)},
    )


def test_rows_tell_medians_and_ratios() -> None:
    [row] = make_rows(
        [cell(memcpy=[0.001, 0.5, 0.001], raw_nixl=[0.004] * 3, shm=[9.0, 0.002, 0.002])]
    )
    assert row == {
        "transport": "shm",
        "segment_bytes": 1000,
        "pattern": "scattered",
        "gbps": 0.5,
        "of_memcpy": 0.5,
        "of_raw_nixl": 2.0,
        "segments": 1000,
        "copies": 7,
        "failed": None,
    }


def test_rows_of_a_gpu_tell_how_much_was_timed_and_compare_with_one_long_segment() -> None:
    measured = cell(
        memcpy=[0.001],
        raw_nixl=[0.01],
        raw_nixl_contiguous=[0.002],
        raw_nixl_write=[0.02],
        nixl=[0.004],
    )
    part = measured.move.part(80)
    measured = TransferCell(
        measured.move,
        measured.pattern,
        measured.seconds,
        {"nixl": 7},
        {"nixl": part, "raw nixl": part},
    )
    [row] = make_device_rows([measured])
    told = {
        name: row[name]
        for name in (
            "moved_bytes",
            "timed_bytes",
            "segments",
            "median_us",
            "of_contiguous_nixl",
            "gbps",
            "of_memcpy",
        )
    }
    assert told == {
        "moved_bytes": 1_000_000,
        "timed_bytes": 80_000,
        "segments": 80,
        "median_us": 4000.0,
        "of_contiguous_nixl": 0.04,
        "gbps": 0.02,
        "of_memcpy": 0.02,
    }
    [baseline] = make_baselines([measured])
    assert (
        baseline["contiguous_nixl_gbps"],
        baseline["raw_nixl_write_gbps"],
        baseline["raw_nixl_timed_bytes"],
    ) == (0.5, 0.05, 80_000)


def test_the_table_tells_sizes_of_moves_apart() -> None:
    large = cell(
        memcpy=[0.001],
        raw_nixl=[0.01],
        raw_nixl_contiguous=[0.002],
        raw_nixl_write=[0.02],
        nixl=[0.004],
    )
    part = large.move.part(80)
    small = TransferCell(part, large.pattern, {"memcpy": [0.001], "nixl": [0.008]}, {"nixl": 7})
    facts = FACTS | {"regions": 1, "rounds": 1, "copied_by": "torch"}
    lines = table(make_device_rows([large, small]), [large, small], facts).splitlines()
    assert [line.split()[-3:] for line in lines if " nixl  " in line and "raw" not in line] == [
        ["0.25", "2.5", "7"],
        ["0.125", "-", "7"],
    ]
    assert sum("MiB a move" in line for line in lines) == 2


@pytest.mark.parametrize("text", ["gpu", "cuda:", "cuda:-1", "cuda:x", "CPU"])
def test_a_device_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="cpu, cuda or cuda:N"):
        parse_device(text)
    assert parse_device("cpu") == HostAllocator()


def test_a_gpu_that_is_not_there_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match="--device cpu"):
        parse_device("cuda:999")


def test_without_nixl_there_is_nothing_to_compare_with() -> None:
    cells = [cell(memcpy=[0.001], shm=[0.002])]
    assert make_rows(cells)[0]["of_raw_nixl"] is None
    assert make_baselines(cells) == [
        {
            "segment_bytes": 1000,
            "pattern": "scattered",
            "memcpy_gbps": 1.0,
            "raw_nixl_gbps": None,
            "failed": {},
        }
    ]


def test_a_method_that_failed_has_a_row_and_a_line_with_the_reason() -> None:
    measured = replace(
        cell(memcpy=[0.001], shm=[0.002]), failures={"tcp": "no route", RAW_NIXL: "no memory"}
    )
    rows = make_device_rows([measured])
    assert [(row["transport"], row["gbps"], row["failed"]) for row in rows] == [
        ("shm", 0.5, None),
        ("tcp", None, "no route"),
    ]
    assert make_baselines([measured])[0]["failed"] == {RAW_NIXL: "no memory"}
    facts = FACTS | {"regions": 1, "rounds": 1, "copied_by": "libc"}
    lines = table(rows, [measured], facts).splitlines()
    assert sum(line.endswith("failed: no route") and " tcp " in line for line in lines) == 1
    assert sum(line.endswith("failed: no memory") for line in lines) == 1


def test_the_plot_is_svg_with_a_line_for_each_transport_and_pattern() -> None:
    rows = [
        {"transport": transport, "segment_bytes": size, "pattern": pattern, "of_memcpy": share}
        for transport, share in (("shm", 0.9), ("nixl", 0.2))
        for pattern in ("scattered", "runs")
        for size in (4096, 16384, 1 << 20)
    ]
    root = ElementTree.fromstring(draw(rows, FACTS))
    lines = root.findall(f"{SVG}polyline")
    assert [len(str(line.get("points")).split()) for line in lines] == [3, 3, 3, 3]
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert {"shm", "nixl", "scattered", "runs", "4 KiB", "1 MiB"} <= set(words)
    heights = {
        line.get("stroke"): float(str(line.get("points")).split()[0].split(",")[1])
        for line in lines
    }
    assert len(set(heights.values())) == 2, "both transports are drawn at one height"


@pytest.mark.parametrize("name", ["plot.png", "plot", "nowhere/plot.svg"])
def test_a_plot_that_cannot_be_written_is_refused_before_anything_is_measured(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parse_plot(str(tmp_path / name))
    assert parse_plot(str(tmp_path / "plot.svg")) == tmp_path / "plot.svg"
