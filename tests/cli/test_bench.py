"""Tests how `kvferry bench` finds benchmarks by name and passes them their arguments."""

import pytest

from kvferry.cli.bench import BENCHMARKS, make_parser
from kvferry.cli.main import main


@pytest.mark.parametrize("name", sorted(BENCHMARKS))
def test_every_benchmark_has_help_with_examples(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", name, "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert f"usage: kvferry bench {name}" in out
    assert f"examples:\n  kvferry bench {name}" in out


@pytest.mark.parametrize("name", sorted(BENCHMARKS))
def test_every_benchmark_can_answer_in_json_and_every_flag_says_what_it_does(name: str) -> None:
    rows = make_parser(name).flag_rows()
    assert ("--json",) in [row.names for row in rows]
    assert [row.names for row in rows if not row.meaning] == []


def test_help_lists_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in BENCHMARKS)


def test_arguments_become_what_a_benchmark_asks_for() -> None:
    arguments = make_parser("vllm-handover").parse(
        ["--prompt-tokens", "512,128,512", "--samples", "7"]
    )
    assert (arguments.prompt_tokens, arguments.samples, arguments.json) == ([512, 128], 7, False)
    assert make_parser("vllm-handover").parse(["--device", "cuda"]).device == "cuda"
