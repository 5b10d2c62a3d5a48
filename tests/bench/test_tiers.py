"""Tests the benchmark of the storage tiers: small runs with real parts, and how it compares. No
test asserts a time.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from kvferry.bench.tiers.command import report
from kvferry.bench.tiers.first_token import FirstTokenTimes, prompt_tokens
from kvferry.bench.tiers.memory import HostCache
from kvferry.bench.tiers.rounds import Comparison, Contestant, take_turns
from kvferry.cli.main import main
from kvferry.cli.runtime import StopRequest
from kvferry.engine.make_model.writer import make_model
from kvferry.errors import ConfigError, KVFerryError


def measured(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["bench", "tiers", "--quick", "--json", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


# -- comparison --


def test_contestants_take_turns_and_warm_up_first() -> None:
    calls: list[str] = []
    contestants = [
        Contestant(
            name,
            lambda name=name: calls.append(name),  # type: ignore[misc]
            lambda name=name: calls.append(f"prepare {name}"),  # type: ignore[misc]
            lambda name=name: calls.append(f"clean {name}"),  # type: ignore[misc]
        )
        for name in "ab"
    ]
    seconds = take_turns(contestants, 3, StopRequest())
    assert {name: len(times) for name, times in seconds.items()} == {"a": 3, "b": 3}
    assert [call for call in calls if len(call) == 1] == ["b", "a", "a", "b", "b", "a", "a", "b"]
    assert calls[:3] == ["prepare b", "b", "clean b"]


def test_a_stop_request_ends_the_rounds() -> None:
    stop = StopRequest()
    with pytest.raises(KeyboardInterrupt):
        take_turns([Contestant("a", stop.request), Contestant("b", stop.request)], 1000, stop)


def test_a_row_has_medians_worst_and_the_ratio() -> None:
    seconds = {"ours": [2.0, 4.0, 8.0], "plain": [1.0, 2.0, 3.0], "other": [1.0, 1.0, 1.0]}
    row = Comparison("disk", "load", 4096, 8 * 10**9, seconds, "ours", "plain").as_json()
    assert (row["gbps"], row["worst_gbps"]) == (2.0, 1.0)
    assert (row["baseline_gbps"], row["of_baseline"]) == (4.0, 0.5)
    assert row["others_gbps"] == {"other": 8.0}


def test_first_tokens_are_compared_with_an_engine_without_tiers() -> None:
    plain = FirstTokenTimes("compute", 4001, [0.4, 0.5, 0.6])
    row = FirstTokenTimes("disk", 4001, [0.6, 0.55, 0.7], [0.1, 0.05, 0.2]).as_json(plain)
    assert (row["loaded_ms"], row["loaded_worst_ms"], row["loaded_of_computing"]) == (100, 200, 0.2)
    assert (row["computed_ms"], row["computed_of_no_tiers"]) == (600.0, 1.2)
    assert plain.as_json(plain)["loaded_ms"] is None


def test_a_prompt_has_whole_blocks_and_fits_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 4096}')
    assert prompt_tokens(tmp_path, 4000) == 249 * 16 + 1
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 512}')
    assert prompt_tokens(tmp_path, 4000) == 31 * 16 + 1
    for bad in ("{}", "[", '{"max_position_embeddings": 16}'):
        (tmp_path / "config.json").write_text(bad)
        with pytest.raises(ConfigError, match="--model"):
            prompt_tokens(tmp_path, 4000)


def test_a_copy_of_other_bytes_is_noticed() -> None:
    cache = HostCache(4096, 2, 1 << 20)
    with pytest.raises(KVFerryError, match="other bytes"):
        cache.check()
    cache.copier.save(cache.rows)
    cache.check()


# -- small runs --


def test_copies_disks_and_steps_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = measured(capsys, "--only", "memory", "disk", "steps", "--disk", str(tmp_path))
    assert [(row["part"], row["work"], row["size_bytes"] >> 10) for row in found["rows"]] == [
        *(("memory", work, kib) for kib in (4, 16, 64) for work in ("save", "load")),
        *(("disk", work, kib) for kib in (256, 2048) for work in ("store", "load")),
    ]
    for row in found["rows"]:
        assert row["rounds"] == 2
        assert row["gbps"] >= row["worst_gbps"]
        assert row["moved_bytes"] % row["size_bytes"] == 0
    assert {(cost["pool_blocks"], cost["calls"]) for cost in found["steps"]} == {
        (500, 3),
        (1000, 3),
    }
    assert len(found["steps"]) == 2 * 2 * 8
    assert list(tmp_path.iterdir()) == []
    text = "\n".join(report(found))
    assert "plain files" in text
    assert "step that stores" in text


@pytest.mark.slow
def test_the_object_tier_is_measured_on_a_server_of_the_benchmark(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "bench")
    found = measured(capsys, "--only", "object")
    assert [(row["work"], row["size_bytes"] >> 10, row["baseline"]) for row in found["rows"]] == [
        (work, kib, "plain obstore") for kib in (256, 2048) for work in ("store", "load")
    ]
    assert found["skipped"] == []


@pytest.mark.slow
def test_first_tokens_come_from_every_tier(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run itself checks that engines give equal tokens, and that all chunks were loaded."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "bench")
    make_model(tmp_path / "model")
    found = measured(
        capsys, "--only", "model", "--model", str(tmp_path / "model"), "--disk", str(tmp_path)
    )
    assert [row["tier"] for row in found["first_token"]] == ["compute", "cpu", "disk", "object"]
    assert {row["tokens"] for row in found["first_token"]} == {12 * 16 + 1}
    loaded = [row["loaded_ms"] for row in found["first_token"]]
    assert loaded[0] is None
    assert None not in loaded[1:]
    assert "÷ computing without tiers" in "\n".join(report(found))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "model"], "name its folder with --model"),
        (["--only", "disk", "--disk", "/proc/nowhere"], "--disk /proc/nowhere"),
        (["--only", "tapes"], "invalid choice"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "tiers", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
