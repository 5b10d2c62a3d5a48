"""Tests `kvferry up --vllm` without vLLM: which commands, GPUs and cores servers get, and what the
operator reads when something is wrong.
"""

import json
import os
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from tests.vllm.documented import documented

from kvferry.cli.cluster.vllm_servers import (
    Machine,
    VllmFleet,
    VllmProcess,
    explain,
    place_servers,
    probe_vllm,
    stage,
)
from kvferry.cli.main import main, make_parser
from kvferry.errors import ConfigError

PYTHON = Path("/opt/vllm/bin/python")
STUB = Path(__file__).parent / "stub_vllm.py"
GIB = 1 << 30
CPU = Machine((), tuple(range(8)), 64 * GIB)


def gpus(count: int) -> Machine:
    return Machine(tuple(map(str, range(count))), tuple(range(8)), 64 * GIB)


def placed(fleet: VllmFleet, machine: Machine, **environ: str) -> list[VllmProcess]:
    return place_servers(fleet, machine, PYTHON, environ)


def value_of(server: VllmProcess, flag: str) -> str:
    return dict(pairwise(server.command))[flag]


# -- places --


def test_each_server_gets_gpus_of_its_own_while_there_are_enough() -> None:
    fleet = VllmFleet("org/m", prefill=2, decode=1, prefill_tp=1, decode_tp=2)
    servers = placed(fleet, gpus(4))
    assert [server.name for server in servers] == ["prefill-0", "prefill-1", "decode-0"]
    visible = [server.environment["CUDA_VISIBLE_DEVICES"] for server in servers]
    assert visible == ["0", "1", "2,3"]
    assert [value_of(server, "--tensor-parallel-size") for server in servers] == ["1", "1", "2"]
    assert not any("--gpu-memory-utilization" in server.command for server in servers)
    assert not any(server.waits_for_previous for server in servers)


def test_servers_share_one_gpu_one_after_the_other_and_the_operator_reads_it() -> None:
    servers = placed(VllmFleet("org/m", prefill=2, decode=1), gpus(1))
    assert {server.environment["CUDA_VISIBLE_DEVICES"] for server in servers} == {"0"}
    assert [value_of(server, "--gpu-memory-utilization") for server in servers] == ["0.30"] * 3
    assert [server.waits_for_previous for server in servers] == [False, True, True]
    assert servers[0].place == "GPU 0, shared by 3 servers, 0.30 of its memory"


def test_a_gpu_with_one_server_is_not_divided_where_others_are_shared() -> None:
    servers = placed(VllmFleet("org/m", prefill=2, decode=1), gpus(2))
    shares = [value_of(server, "--gpu-memory-utilization") for server in servers]
    assert shares == ["0.45", "0.90", "0.45"]


def test_ranks_never_share_gpus() -> None:
    with pytest.raises(ConfigError, match="2 servers need 4 GPUs, but 3 are visible"):
        placed(VllmFleet("org/m", prefill_tp=2, decode_tp=2), gpus(3))


def test_on_a_cpu_each_rank_has_cores_of_its_own_and_a_part_of_the_memory() -> None:
    servers = placed(VllmFleet("org/m", prefill_tp=2, decode_tp=2), CPU)
    bound = [server.environment["VLLM_CPU_OMP_THREADS_BIND"] for server in servers]
    assert bound == ["0,1|2,3", "4,5|6,7"]
    assert {server.environment["VLLM_CPU_KVCACHE_SPACE"] for server in servers} == {"4"}
    many = placed(VllmFleet("org/m", prefill=2), Machine((), (3, 5), GIB))
    assert [server.environment["VLLM_CPU_OMP_THREADS_BIND"] for server in many] == ["3", "5", "3"]
    assert many[0].environment["VLLM_CPU_KVCACHE_SPACE"] == "1"


def test_variables_and_flags_of_the_operator_win() -> None:
    fleet = VllmFleet("org/m", flags=("--gpu-memory-utilization", "0.2"))
    assert (
        "VLLM_CPU_KVCACHE_SPACE"
        not in placed(fleet, CPU, VLLM_CPU_KVCACHE_SPACE="9")[0].environment
    )
    assert value_of(placed(fleet, gpus(1))[0], "--gpu-memory-utilization") == "0.2"


@pytest.mark.parametrize(
    ("flags", "revision", "tokenizer_revision"),
    [
        ([], "main", None),
        (["--revision", "v1"], "v1", "v1"),
        (["--revision=v1"], "v1", "v1"),
        (["--revision", "v1", "--revision=v2"], "v2", "v2"),
        (["--revision=v1", "--tokenizer-revision", "v2"], "v1", "v2"),
        (["--tokenizer_revision=v2", "--code-revision=v3"], "main", "v2"),
        (["--revision"], "main", None),
    ],
    ids=str,
)
def test_the_revision_of_the_servers_is_that_of_the_files_that_kvferry_reads(
    flags: list[str], revision: str, tokenizer_revision: str | None
) -> None:
    fleet = VllmFleet("owner/name", flags=tuple(flags))
    assert fleet.hub_revision({}) == revision
    assert fleet.tokenizer_revision == tokenizer_revision


def test_servers_have_different_ports_and_kvferrys_connector(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    fleet = VllmFleet(str(tmp_path), connector="NixlPushConnector", transports=("tcp",))
    servers = placed(fleet, CPU)
    assert len({server.address.port for server in servers}) == 2
    assert [value_of(server, "--port") for server in servers] == [
        str(server.address.port) for server in servers
    ]
    assert servers[0].command[:3] == (str(PYTHON), "-m", "vllm.entrypoints.openai.api_server")
    assert value_of(servers[0], "--model") == str(tmp_path)
    assert value_of(servers[0], "--served-model-name") == tmp_path.name
    assert json.loads(value_of(servers[0], "--kv-transfer-config")) == {
        "kv_connector": "NixlPushConnector",
        "kv_connector_module_path": "kvferry.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"transports": ["tcp"]},
    }


def test_the_key_of_servers_that_the_router_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="VLLM_API_KEY is set, but the router reaches"):
        placed(VllmFleet("org/m"), CPU, VLLM_API_KEY="secret")


def test_a_checkpoint_in_the_layout_of_mistral_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text("{}")
    assert VllmFleet(str(tmp_path)).model_name == tmp_path.name


@pytest.mark.parametrize("model", ["s3://bucket/" + 300 * "x", "gpt2", "org/m:Q4_K_M"])
def test_names_that_vllm_knows_are_left_to_vllm(model: str) -> None:
    assert VllmFleet(model).model_name == model


# -- log lines --


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("", "starting the engine"),
        ("INFO [gpu_model_runner.py:1] Starting to load model Qwen/Qwen3-8B...", "loading weights"),
        ("Loading safetensors checkpoint shards:  50% Completed | 1/2", "loading weights 50%"),
        ("Using cache directory: /c for vLLM's torch.compile", "compiling"),
        ("Capturing CUDA graphs (mixed prefill-decode, PIECEWISE)", "capturing CUDA graphs"),
        ("INFO: GPU KV cache size: 2,048 tokens", "allocating the KV cache"),
        ("INFO:     Application startup complete.", "opening the API"),
    ],
)
def test_the_last_phase_in_the_log_is_shown(line: str, shown: str) -> None:
    assert stage(["Initializing a V1 LLM engine (v0.32.0)", line, "INFO other"]) == shown


def test_before_the_first_phase_vllm_is_imported() -> None:
    assert stage([]) == stage(["INFO other"]) == "importing vLLM"


@pytest.mark.parametrize(
    ("line", "cause", "advised"),
    [
        (
            "(EngineCore) OSError: a/b is not a local folder and is not a valid model identifier",
            "OSError: a/b is not a local folder",
            "check the model's name",
        ),
        ("OSError: [Errno 98] Address already in use", "OSError: [Errno 98]", "start again"),
        ("ValueError: No available memory for the cache blocks.", "ValueError", "too small"),
        ("api_server.py: error: unrecognized arguments: --x", "error: unrec", "after `--`"),
    ],
)
def test_the_cause_in_the_log_and_what_to_do_are_named(line: str, cause: str, advised: str) -> None:
    found = explain(["INFO fine", line, "RuntimeError: Engine core initialization failed"])
    assert found[0].startswith(cause)
    assert advised in found[1]


def test_a_compiler_that_is_switched_off_is_no_phase() -> None:
    assert stage(["Enforce eager set, disabling torch.compile, CUDAGraphs"]) == "importing vLLM"


def test_an_unknown_end_has_no_advice() -> None:
    assert explain(["INFO fine"]) == []


# -- the whole command --


def interpreter(tmp_path: Path, kind: str) -> Path:
    """A link to the stand-in for an interpreter with vLLM."""
    link = tmp_path / kind
    link.symlink_to(STUB)
    return link


@pytest.mark.parametrize("package", ["vllm", "kvferry"])
def test_an_interpreter_without_a_package_is_an_error_that_says_what_to_install(
    package: str, tmp_path: Path
) -> None:
    python = interpreter(tmp_path, f"lacks-{package}")
    with pytest.raises(ConfigError, match=f"-m pip install {package}"):
        probe_vllm(python, None)


def test_an_interpreter_whose_torch_fails_is_an_error_with_the_cause(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\(ImportError: libtorch_cuda\.so: cannot open shared"):
        probe_vllm(interpreter(tmp_path, "lacks-torch"), None)


def test_a_folder_that_has_the_name_of_a_package_is_no_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="has no vllm"):
        probe_vllm(Path(sys.executable), None)


def test_lines_that_packages_print_are_not_the_answer(tmp_path: Path) -> None:
    assert probe_vllm(interpreter(tmp_path, "talks"), None).gpus == ()


def test_only_the_gpus_that_the_operator_made_visible_are_used(tmp_path: Path) -> None:
    python = interpreter(tmp_path, "two-gpus")
    assert probe_vllm(python, None).gpus == ("0", "1")
    # CUDA ignores all GPUs from the first one that does not exist.
    assert probe_vllm(python, "GPU-abc, 3,99,0").gpus == ("GPU-abc", "3")
    machine = probe_vllm(interpreter(tmp_path, "works"), "3,GPU-abc")
    assert machine.gpus == (), "torch sees no GPU"
    assert machine.cores == tuple(sorted(os.sched_getaffinity(0)))


def test_a_server_that_dies_at_start_is_named_with_its_log_and_what_to_do(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logs = tmp_path / "logs"
    arguments = ["--vllm", "org/m", "--vllm-python", str(interpreter(tmp_path, "dies"))]
    assert main(["up", "--port", "0", *arguments, "--log-dir", str(logs)]) == 1
    shown = capfd.readouterr()
    # Both servers die; the one that is noticed first is named.
    [name] = re.findall(r"^kvferry: (\S+) exited with code 1; ", shown.err)
    assert f"last lines of {name}, all in {logs / name}.log:" in shown.out
    assert "Engine core initialization failed" in shown.out
    assert "; OutOfMemoryError: CUDA out of memory." in shown.err
    assert "start fewer servers" in shown.err
    assert f"the logs are in {logs}" in shown.err
    assert "Starting to load model" in (logs / f"{name}.log").read_text()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--vllm", "/nonexistent"], '--vllm "/nonexistent" has no config.json'),
        (["--vllm", "m", "--model", "."], "leave --model and --device out"),
        (["--decode-tp", "2"], "--decode-tp needs --vllm MODEL"),
        (["--revision", "v1"], "--revision needs --model OWNER/NAME"),
        (["--vllm", "m", "--revision", "v1"], "write `-- --revision NAME`"),
        (["--", "--enforce-eager"], "flags after `--` needs --vllm MODEL"),
        (["--vllm", "m", "--vllm-python", "/nonexistent"], "cannot be run as a Python interpreter"),
        (["--vllm", "m", "--prefill", "0"], "--prefill must be a whole number from 1 to 256"),
        (["--decode", "1000000000"], "--decode must be a whole number from 1 to 256"),
        (["--vllm", "m", "--decode-tp", "0"], "--decode-tp must be a whole number from 1 to 256"),
        (["--vllm", 300 * "x"], "cannot be read (File name too long)"),
        (["--vllm", "org/" + 300 * "x"], "is neither a folder nor a name that the hub allows"),
        (["--vllm", "a\0b"], "--vllm has a NUL character"),
        (["--vllm", ""], "--vllm is empty"),
        (["--vllm=~no-such-user/m"], "is not a path (the user has no home directory)"),
        (["--vllm", "m", "--vllm-python=~no-such-user/p"], "the user has no home directory"),
        (["--vllm", "m", "--log-dir", ""], "is not a path (an empty path"),
        (["org/m"], "org/m is an unexpected argument of `kvferry up`; name a model with --model"),
        (["--vllm", "m", "--max-model-len", "9"], "with --vllm, flags for vLLM go after `--`"),
        (["--vllm", "m", "--", "--port", "9"], "--port cannot be given after `--`: each server"),
        (["--vllm", "m", "--", "--api_key=x"], "--api-key cannot be given after `--`: the router"),
        (["--vllm", "m", "--", "-tp", "2"], "-tp cannot be given after `--`: --prefill-tp and"),
        (["--vllm", "m", "--", "--kv-transfer-config.kv_role", "x"], "choose the connector"),
    ],
)
def test_arguments_that_cannot_be_meant_are_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", "--port", "0", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_a_log_file_that_cannot_be_written_is_named_before_a_server_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs" / "decode-0.log").mkdir(parents=True)
    arguments = ["--vllm", "org/m", "--vllm-python", str(interpreter(tmp_path, "dies"))]
    assert main(["up", "--port", "0", *arguments, "--log-dir", str(tmp_path / "logs")]) == 2
    assert f"no file can be written to {tmp_path}/logs (Is a directory)" in capsys.readouterr().err


def test_home_is_expanded_where_the_shell_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ["--vllm=~/m", "--vllm-python=~/python", "--log-dir=~/logs"]
    arguments = make_parser("up").parse(words)
    assert arguments.vllm == str(tmp_path / "m")
    assert arguments.vllm_python == tmp_path / "python"
    assert arguments.log_dir == tmp_path / "logs"


def test_the_documented_command_is_understood() -> None:
    [command] = documented("A fleet with one command")
    arguments = make_parser("up").parse(command.words[2:])
    assert (arguments.vllm, arguments.prefill, arguments.decode) == ("Qwen/Qwen3-0.6B", 2, 1)
    assert arguments.vllm_flags == ["--max-model-len", "16384"]
