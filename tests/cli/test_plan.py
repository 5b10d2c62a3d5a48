"""Tests `kvferry plan`: it reproduces the published table, and one sentence reports a configuration
that it cannot plan.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.sizing import configs

from kvferry.cli.main import main

SIZES = ["--layers", "80", "--kv-heads", "8", "--head-dim", "128"]
KNOWN_TABLE = [
    ["Prompt Length", "KV Cache Size", "IB HDR × 1 (200 Gbps, ~25 GB/s)"],
    ["1K tokens", "0.32 GB", "~13 ms"],
    ["4K tokens", "1.28 GB", "~51 ms"],
    ["8K tokens", "2.56 GB", "~102 ms"],
    ["32K tokens", "10.24 GB", "~410 ms"],
    ["128K tokens", "40.96 GB", "~1,638 ms"],
]
"""The table for Llama-3.1-70B in bfloat16, as published for NIXL's users."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return written(tmp_path, configs.LLAMA_70B)


def written(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def first_table(text: str) -> list[list[str]]:
    lines = text.split("\n\n")[1].splitlines()
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("|") and not line.startswith("| --")
    ]


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    found = json.loads(printed(capsys, *arguments, "--json"))
    assert isinstance(found, dict)
    return found


def test_the_published_table_of_llama_70b_is_reproduced_exactly(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, str(model))
    assert first_table(text) == KNOWN_TABLE
    assert "Per token = 80 × 2 × 8 × 128 × 2 = 327,680 bytes ≈ 320 KB" in text


def test_a_folder_a_file_and_size_flags_give_the_same_plan(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [
        printed(capsys, *arguments)
        for arguments in ([str(model)], [str(model / "config.json")], SIZES)
    ]
    assert [first_table(text) for text in texts] == [KNOWN_TABLE] * 3
    assert first_table(printed(capsys, *SIZES, "--dtype", "fp8")) != KNOWN_TABLE


def test_exact_units_count_a_thousand_million_bytes_in_a_gigabyte(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert first_table(printed(capsys, str(model), "--exact"))[-1] == [
        "128K tokens",
        "41.94 GB",
        "~1,678 ms",
    ]


def test_json_has_all_that_the_text_has(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, str(model), "--tp", "4")
    assert found["bytes_per_token"] == 327_680
    assert found["bytes_per_block"] == 16 * 327_680
    assert (found["bytes_per_token_per_rank"], found["bytes_per_block_per_rank"]) == (
        81_920,
        16 * 81_920,
    )
    last = found["prompts"][-1]
    assert (last["tokens"], last["bytes"], last["bytes_per_rank"]) == (
        128_000,
        128_000 * 327_680,
        128_000 * 81_920,
    )
    assert last["times"][0]["ms"] == pytest.approx(1638.4)
    assert last["times"][0]["exact_ms"] == pytest.approx(1677.7216)
    assert {row["layout"] for row in found["segments"]} == {"HND", "NHD", "cross-layer"}
    assert set(found["advice"]) == {"kv_lease_duration", "read_timeout", "block_size"}


def test_links_and_prompt_lengths_are_those_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--link",
        "Ethernet=100",
        "--link",
        "IB NDR=400",
        "--tokens",
        "2K",
        "--tokens",
        "100",
        "--tokens",
        "1M",
    ]
    table = first_table(printed(capsys, *SIZES, *arguments))
    assert table[0][2:] == ["Ethernet (100 Gbps, ~12.5 GB/s)", "IB NDR (400 Gbps, ~50 GB/s)"]
    assert [row[0] for row in table[1:]] == ["2K tokens", "100 tokens", "1M tokens"]
    assert table[1][1:] == ["0.64 GB", "~51 ms", "~13 ms"]
    assert table[2][1:] == ["32.00 MB", "~2.6 ms", "~0.6 ms"]


def test_a_prompt_beyond_the_windows_is_less_than_its_tokens_times_a_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = as_json(capsys, str(written(tmp_path, configs.GEMMA3_27B)))
    layer = 2 * 16 * 128 * 2
    assert found["prompts"][0]["bytes"] == 1_000 * found["bytes_per_token"]
    assert (
        found["prompts"][-1]["bytes"]
        == layer * (10 * 128_000 + 52 * 1024)
        < 128_000 * found["bytes_per_token"]
    )
    assert found["bytes_per_token_beyond_windows"] == 10 * layer
    assert any("window" in note for note in found["notes"])
    assert {row["layout"] for row in found["segments"]} == {"HND", "NHD"}, (
        "blocks of all layers need layers that are alike"
    )


def test_a_latent_cache_is_counted_once_whatever_the_tp(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(tmp_path, configs.DEEPSEEK_V3)
    alone, many = as_json(capsys, str(folder)), as_json(capsys, str(folder), "--tp", "8")
    assert (
        alone["bytes_per_token"]
        == many["bytes_per_token"]
        == many["bytes_per_token_per_rank"]
        == 70_272
    )
    assert "Per token = 61 × 576 × 2 = 70,272 bytes" in printed(capsys, str(folder))


def test_the_lease_follows_the_slowest_link(capsys: pytest.CaptureFixture[str]) -> None:
    fast, slow = (
        as_json(capsys, *SIZES)["advice"],
        as_json(capsys, *SIZES, "--link", "fast=400", "--link", "slow=10")["advice"],
    )
    assert (fast["kv_lease_duration"]["value"], fast["read_timeout"]["value"]) == (30, 30)
    seconds = 128_000 * 327_680 * 8 / 10e9
    assert slow["kv_lease_duration"]["value"] == -(-2 * seconds // 1)
    assert slow["read_timeout"]["value"] == -(-4 * seconds // 1)
    assert "over slow, and D renews the lease every 11 s" in slow["kv_lease_duration"]["reason"]


@pytest.mark.parametrize(("tp", "size"), [(1, 16), (8, 32), (4, 16)])
def test_the_block_size_grows_until_a_segment_is_worth_its_cost(
    tp: int, size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert as_json(capsys, *SIZES, "--tp", str(tp))["advice"]["block_size"]["value"] == size


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            [],
            "MODEL is missing; name a folder or a config.json, or give --layers, --kv-heads, "
            "--head-dim",
        ),
        (["--layers", "4"], "MODEL is missing"),
        ([*SIZES, "--revision", "v1"], "--revision needs MODEL"),
        (
            ["nowhere"],
            'MODEL is "nowhere", which is neither a folder nor owner/name on the Hugging Face hub',
        ),
        (["{folder}", "--layers", "4"], "both describe a model"),
        (
            ["{folder}", "--tp", "3"],
            "--tp 3 does not fit 8 KV heads; use a divisor or a multiple of 8",
        ),
        (["{folder}", "--peer-tp", "3"], "--peer-tp 3 does not fit 8 KV heads"),
        (
            ["{folder}", "--peer-block-size", "24"],
            "--peer-block-size 24 does not fit --block-size 16; one must divide the other",
        ),
        (
            ["{folder}", "--dtype", "posit16"],
            "'posit16' is not a known cache dtype; use --dtype with one of",
        ),
        (
            ["{folder}", "--link", "fast"],
            "--link: 'fast' is not a link; write it like 'Ethernet=100'",
        ),
        (["{folder}", "--link", "x=0"], "--link: 'x=0' is not a link"),
        (["{folder}", "--link", "x=nan"], "--link: 'x=nan' is not a link"),
        (
            ["{folder}", "--tokens", "many"],
            "--tokens: 'many' is not a prompt length; write it like 4000 or 4K",
        ),
        (["{folder}", "--tokens", "0"], "--tokens: '0' is not a prompt length"),
        (
            ["{folder}", "--tp", "0"],
            "--tp/--tensor-parallel-size must be a whole number from 1 to 1024, got 0",
        ),
        (
            ["{folder}", "--tp", "9999999"],
            "--tp/--tensor-parallel-size must be a whole number from 1 to 1024, got 9999999",
        ),
        (["{folder}", "--peer-tp", "1025"], "--peer-tp must be a whole number from 1 to 1024"),
        (
            ["--layers", "9999999", "--kv-heads", "8", "--head-dim", "128"],
            "--layers must be a whole number from 1 to 10000, got 9999999",
        ),
        (
            ["--layers", "80", "--kv-heads", "4097", "--head-dim", "128"],
            "--kv-heads must be a whole number from 1 to 4096",
        ),
        (
            ["{folder}", "--tokens", "1001M"],
            "--tokens: a prompt of '1001M' is too long to plan; the limit is 1,000M",
        ),
        (["{folder}", "--tokens", "9" * 17], "is too long to plan; the limit is 1,000M"),
        (
            ["{folder}", "--block-size", "8193"],
            "--block-size must be a whole number from 1 to 8192",
        ),
        (
            ["{folder}", "--block-size", "8", "--peer-block-size", "8192"],
            "are too far apart to plan; the larger may be at most 256 times the smaller",
        ),
        (["{folder}", "--link", "x=1e-320"], "--link: 'x=1e-320' is not a link"),
        (
            ["{folder}/huge.json"],
            "num_hidden_layers is 900000000, which must be a whole number from 1 to 10,000; "
            "correct it",
        ),
        (["{folder}/notes.txt"], "is not JSON; name a model's config.json"),
        (["{folder}/list.json"], "is not a JSON object; name a model's config.json"),
        (
            ["{folder}/empty.json"],
            "config.json does not give the number of layers (num_hidden_layers); give --layers",
        ),
    ],
)
def test_a_model_that_cannot_be_planned_is_refused_in_one_sentence_with_a_fix(
    arguments: list[str], sentence: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "notes.txt").write_text("no JSON")
    (model / "list.json").write_text("[1]")
    (model / "huge.json").write_text(
        json.dumps({**configs.LLAMA_70B, "num_hidden_layers": 900_000_000})
    )
    (model / "empty.json").write_text("{}")
    assert main(["plan", *(argument.format(folder=model) for argument in arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert sentence in captured.err


def test_the_other_side_has_the_same_tp_by_default_if_twice_the_tp_cannot_divide_the_heads(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = as_json(capsys, "--layers", "2", "--kv-heads", "5", "--head-dim", "64")
    assert {(row["p_tp"], row["d_tp"]) for row in found["segments"]} == {(1, 1)}


def test_the_longest_prompt_the_most_layers_and_the_most_ranks_are_still_planned(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [
        "--layers",
        "10000",
        "--kv-heads",
        "1024",
        "--head-dim",
        "128",
        "--tp",
        "1024",
        "--tokens",
        "1000M",
        "--link",
        "x=1e-6",
    ]
    found = as_json(capsys, *arguments)
    alike = next(row for row in found["segments"] if row["layout"] == "HND")
    assert (alike["segments"], alike["segment_bytes"]) == (10_000 * 10**9 // 16, 16 * 2 * 128 * 2)


def test_a_plan_loads_neither_torch_nor_a_transport(model: Path) -> None:
    program = (
        "import sys; from kvferry.cli.main import main; main(['plan', sys.argv[1]]);"
        "print([name for name in ('torch', 'zmq', 'nixl', 'aiohttp') if name in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, str(model)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.splitlines()[-1] == "[]"


# -- tiers --


def test_every_tier_has_the_prefill_speed_below_which_loading_wins(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = as_json(capsys, str(model))
    assert [row["name"] for row in found["tiers"]] == [
        "cpu",
        "disk",
        "object, 10 Gbit",
        "object, 25 Gbit",
        "object, 100 Gbit",
    ]
    assert {row["is_given"] for row in found["tiers"]} == {False}
    assert {row["from_tokens"] for row in found["tiers"]} == {None}
    for row in found["tiers"]:
        expected = 1e9 * row["gigabytes_per_s"] / found["bytes_per_token"]
        assert row["even_prefill_tokens_per_s"] == pytest.approx(expected)
    assert "(assumed)" in printed(capsys, str(model))


def test_measured_speeds_give_the_number_of_tokens(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--prefill", "4000", "--tier", "disk=6.8:1", "--tier", "slow=0.5", "--tier-gib", "1"]
    found = as_json(capsys, str(model), *flags)
    disk, slow = found["tiers"]
    # 250 µs to compute a token, 327,680 B / 6.8 GB/s = 48 µs to load it, after 1 ms.
    assert (disk["name"], disk["from_tokens"], slow["from_tokens"]) == ("disk", 16, None)
    chunk_bytes = 16 * found["bytes_per_token"] + 4096
    assert disk["tokens_held"] == 2**30 // chunk_bytes * 16
    text = printed(capsys, str(model), *flags)
    assert "16 tokens on" in text
    assert "never" in text
    assert "(assumed)" not in text


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--tier", "disk"),
        ("--tier", "disk=fast"),
        ("--tier", "=5"),
        ("--tier", "disk=0"),
        ("--tier", "disk=5:-1"),
        ("--tier", "disk=nan"),
        ("--prefill", "0"),
        ("--prefill", "inf"),
        ("--tier-gib", "0"),
    ],
)
def test_a_tier_that_cannot_be_planned_is_refused_in_one_sentence(
    model: Path, flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(model), flag, value]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert flag in line
