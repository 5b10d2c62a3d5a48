"""Tests that the command reports an error in one sentence and exits with the right code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry import __version__
from kvferry.cli.main import COMMANDS, CommandEntry, main, make_parser

PULL = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The error for a wrong setting: one line on stderr, and nothing on stdout."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err.strip()


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvferry {__version__}\n"


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in COMMANDS)


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help_with_examples(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert f"usage: kvferry {command}" in out
    assert f"examples:\n  kvferry {command}" in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["sreve"], "kvferry: sreve is not a command of kvferry; did you mean serve?"),
        (["up", "--planes", "shm"], "kvferry: --planes of `kvferry up` is now called --transports"),
        (
            ["serve", "m", "--prot", "1"],
            "kvferry: --prot is not an argument of `kvferry serve`; did you mean --port?",
        ),
        (
            ["serve", "m", "--max_model_le=1"],
            "kvferry: --max-model-le is not an argument of `kvferry serve`; did you mean "
            "--max-model-len?",
        ),
        (
            ["serve", "m", "--port", "x"],
            'kvferry: --port must be a port number from 0 to 65535, got "x"; see `kvferry serve '
            "--help`",
        ),
        (
            ["serve", "m", "--port", "99999"],
            "kvferry: --port must be a port number from 0 to 65535, got 99999",
        ),
        (
            ["serve", "m", "--port", "-1"],
            "kvferry: --port must be a port number from 0 to 65535, got -1",
        ),
        (["proxy", "--port", "99999"], "kvferry: --port must be a port number from 0 to 65535"),
        (["up", "--port", "99999"], "kvferry: --port must be a port number from 0 to 65535"),
        (
            ["serve", "m", "--device", "tpu"],
            "kvferry: --device must be cpu, cuda or cuda:N, got 'tpu'; see `kvferry serve --help`",
        ),
        (
            ["serve", "m", "--device=cuda:-1"],
            "kvferry: --device must be cpu, cuda or cuda:N, got 'cuda:-1'",
        ),
        (["up", "--device", "gpu"], "kvferry: --device must be cpu, cuda or cuda:N, got 'gpu'"),
        (
            ["serve", "m", "--data_parallel_size", "2"],
            "kvferry: --data-parallel-size is not supported yet; start several engines",
        ),
        (["serve", "m", "-dp=2"], "kvferry: -dp is not supported yet; start several engines"),
        (
            ["serve", "m", "--pipeline-parallel-size=2"],
            "kvferry: --pipeline-parallel-size is not supported yet; use --tensor-parallel-size",
        ),
        (
            ["serve", "m", "--zzz"],
            "kvferry: --zzz is not an argument of `kvferry serve`; remove it, or use one of the ",
        ),
        (["up", "--mode", "both"], "kvferry: --mode: invalid choice: 'both'"),
        (
            ["doctor", "--backends", "../x"],
            "kvferry: --backends: '../x' is not the name of a NIXL plugin",
        ),
        (
            ["make-model", "m", "--heads", "0"],
            "kvferry: --heads must be a whole number of at least 1, got 0",
        ),
        (
            ["register", "--router", "r:1", "--role", "decode", "--url", "d:1", "--ttl", "nan"],
            'kvferry: --ttl must be a number of seconds from 1 to 3600, got "nan"; see `kvferry '
            "register --help`",
        ),
        (
            ["drain", "--url", "http://d:1", "--idle", "inf"],
            'kvferry: --idle must be a number of seconds from 0 to 86400, got "inf"; see `kvferry',
        ),
        (["SERVE"], "kvferry: SERVE is not a command of kvferry; did you mean serve?"),
        (
            ["serve"],
            "kvferry: the following arguments are required: MODEL; see `kvferry serve --help`",
        ),
        (["serve", "m", "n"], "kvferry: n is an unexpected argument of `kvferry serve`; remove it"),
        (["serve", "m", "--kv-transfer-config", "{"], "kvferry: --kv-transfer-config is not JSON"),
        (
            ["serve", "m", "--kv-transfer-config.kv_rol", "kv_both"],
            "kvferry: kv_rol is not a setting of --kv-transfer-config; did you mean",
        ),
        (
            ["serve", "no/such/model", "--kv-transfer-config", PULL],
            'kvferry: MODEL is "no/such/model", which is neither a folder nor',
        ),
        (
            ["serve", "m", "--kv-cache-memory-bytes", "lots"],
            "kvferry: --kv-cache-memory-bytes must be a number like 4096, 8k or 1G, of at ",
        ),
        (["serve", "m", "--dtype", "int3"], "kvferry: --dtype: invalid choice: 'int3'"),
        (
            ["proxy", "--prefiller-hosts", "a", "b", "--prefiller-ports", "1"],
            "kvferry: there are 2 prefill hosts but 1 prefill ports",
        ),
        (
            ["proxy", "--kv-transfer-config", "{}"],
            "kvferry: --kv-transfer-config is not an argument of `kvferry proxy`",
        ),
        (["make-model"], "kvferry: the following arguments are required: DIR"),
        (
            ["doctor", "--jsn"],
            "kvferry: --jsn is not an argument of `kvferry doctor`; did you mean --json?",
        ),
        (
            ["bench", "vllm-handovr"],
            "kvferry: vllm-handovr is not a benchmark of kvferry; did you mean vllm-handover?",
        ),
        (
            ["bench", "soak", "--json"],
            "kvferry: soak is not among the benchmarks that are installed; in a clone of kvferry's "
            "repository, run `python -m benchmarks soak`",
        ),
        (
            ["bench", "vllm-handover", "--jsn"],
            "kvferry: --jsn is not an argument of `kvferry bench vllm-handover`; did you mean "
            "--json?",
        ),
        (
            ["bench", "vllm-handover", "--samples", "0"],
            "kvferry: --samples must be a whole number from 1 to 99999, got 0",
        ),
        (
            ["bench", "vllm-handover", "--prompt-tokens", "128,x"],
            "kvferry: --prompt-tokens must be a whole number from 2 to 100000, got",
        ),
        (
            ["bench", "vllm-handover", "--prompt_tokens=9999"],
            "kvferry: --prompt-tokens: 9999 is too long on cpu; at most 2000",
        ),
        (
            ["bench", "vllm-handover", "--vllm-python", sys.executable],
            f"kvferry: {sys.executable} has no vLLM; run `make setup-vllm`",
        ),
        (["bench"], "kvferry: the following arguments are required: BENCHMARK"),
        (
            ["up", "--prefil", "2"],
            "kvferry: --prefil is not an argument of `kvferry up`; did you mean --prefill?",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert complaint(capsys, *arguments).startswith(sentence)


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        (["proxy"], "--config"),
        (["proxy"], "--host"),
        (["proxy"], "--api-key-file"),
        (["proxy"], "--admin-key-file"),
        (["proxy"], "--instance-key-file"),
        (["proxy"], "--instance-ca-file"),
        (["proxy"], "--ssl-certfile"),
        (["proxy"], "--ssl-keyfile"),
        (["proxy"], "--prefiller-hosts"),
        (["serve", "m"], "--host"),
        (["serve", "m"], "--router"),
    ],
)
def test_an_empty_value_is_not_taken_for_a_flag_that_was_not_given(
    command: list[str], flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The value is empty when a variable in a script is not set. Without the key or the address
    that its user meant, the server would be open.
    """
    sentence = f"kvferry: {flag} is empty; give it a value or leave it out"
    assert complaint(capsys, *command, flag, "") == sentence
    assert complaint(capsys, *command, f"{flag}=") == sentence


def test_every_flag_says_what_it_does() -> None:
    rows = [row for name in COMMANDS for row in make_parser(name).flag_rows()]
    assert rows
    assert [row.names for row in rows if not row.meaning] == []


def test_a_wrong_setting_in_the_environment_is_said_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "0.0.0.0")
    sentence = complaint(capsys, "serve", str(tmp_path), "--kv-transfer-config", PULL)
    assert sentence.startswith(
        "kvferry: VLLM_NIXL_SIDE_CHANNEL_HOST is 0.0.0.0, which no peer can dial"
    )


def test_other_machines_need_the_operators_secret(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "10.0.0.1")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name in ("KVFERRY_SECRET", "KVFERRY_SECRET_FILE", "KVFERRY_SIDE_CHANNEL_HOST"):
        monkeypatch.delenv(name, raising=False)
    sentence = complaint(capsys, "serve", str(tmp_path), "--kv-transfer-config", PULL)
    assert sentence.startswith("kvferry: KVFERRY_SECRET_FILE must be set to the file with the")


def test_start_up_is_light() -> None:
    """Help and errors must not wait for the import of torch or aiohttp."""
    code = (
        "import sys; from kvferry.cli.main import main; main(['--help']); print(sorted({'torch', "
        "'aiohttp', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_output_nobody_reads_is_no_reason_for_a_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-u", "-m", "kvferry", "--help"],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


STUB = """
DESCRIPTION = EXAMPLES = ""
def add_arguments(parser): pass
def run(arguments):
    from kvferry.errors import ConfigError, TransportError
    raise {error}
"""


@pytest.mark.parametrize(
    ("error", "code", "err"),
    [
        ("TransportError('the wire broke')", 1, "kvferry: the wire broke\n"),
        ("ConfigError('x is wrong')", 2, "kvferry: x is wrong\n"),
        ("KeyboardInterrupt", 130, ""),
    ],
)
def test_each_kind_of_failure_has_its_exit_code(
    error: str,
    code: int,
    err: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = f"kvferry_stub_command_{code}"
    (tmp_path / f"{module}.py").write_text(STUB.format(error=error))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(COMMANDS, "stub", CommandEntry(module, "fails"))
    assert main(["stub"]) == code
    assert capsys.readouterr().err == err
