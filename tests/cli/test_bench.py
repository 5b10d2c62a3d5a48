"""Tests how `kvferry bench` finds benchmarks by name and passes them their arguments."""

import pytest
from benchmarks.__main__ import TABLE as CLONE_BENCHMARKS

from kvferry.cli.bench import BENCHMARKS, ONLY_IN_A_CLONE, BenchmarkTable
from kvferry.cli.main import main

ALL = [(table, name) for table in (BENCHMARKS, CLONE_BENCHMARKS) for name in table.entries]


@pytest.mark.parametrize(("table", "name"), ALL, ids=[name for _, name in ALL])
def test_every_benchmark_has_help_with_examples(
    table: BenchmarkTable, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        table.run(name, ["--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert f"usage: {table.command} {name}" in out
    assert f"examples:\n  {table.command} {name}" in out


@pytest.mark.parametrize(("table", "name"), ALL, ids=[name for _, name in ALL])
def test_every_benchmark_can_answer_in_json_and_every_flag_says_what_it_does(
    table: BenchmarkTable, name: str
) -> None:
    rows = table.make_parser(name).flag_rows()
    assert ("--json",) in [row.names for row in rows]
    assert [row.names for row in rows if not row.meaning] == []


def test_help_lists_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in BENCHMARKS.entries)


def test_a_benchmark_that_is_not_installed_says_where_it_is() -> None:
    assert sorted(ONLY_IN_A_CLONE) == sorted(CLONE_BENCHMARKS.entries)


def test_arguments_become_what_a_benchmark_asks_for() -> None:
    arguments = BENCHMARKS.make_parser("vllm-handover").parse(
        ["--prompt-tokens", "512,128,512", "--samples", "7"]
    )
    assert (arguments.prompt_tokens, arguments.samples, arguments.json) == ([512, 128], 7, False)
    assert BENCHMARKS.make_parser("vllm-handover").parse(["--device", "cuda"]).device == "cuda"
