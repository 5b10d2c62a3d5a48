"""Tests how the benchmarks configure vLLM servers and which settings they refuse, without starting
a server.
"""

import json
import sys
from pathlib import Path

import pytest
import torch

from kvferry.bench.vllm.servers import VllmServer, check_cuda, check_vllm, default_python
from kvferry.cli.cluster.vllm_servers import free_ports
from kvferry.errors import ConfigError

PULL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


def test_a_server_is_what_was_asked_for() -> None:
    server = VllmServer(
        name="p",
        model=Path("model"),
        port=8100,
        transfer=PULL,
        side_channel_port=5600,
        core=1,
        flags=["--tensor-parallel-size", "2"],
        environment={"VLLM_CPU_KVCACHE_SPACE": "2"},
    )
    command = server.command(Path("python"))
    assert command[:2] == ["python", "-m"]
    assert json.loads(command[command.index("--kv-transfer-config") + 1]) == PULL
    assert command[command.index("--tensor-parallel-size") + 1] == "2"
    assert command[command.index("--port") + 1] == "8100"
    variables = server.variables()
    assert variables["VLLM_CPU_OMP_THREADS_BIND"] == "1"
    assert variables["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5600"
    assert variables["VLLM_CPU_KVCACHE_SPACE"] == "2"


def test_a_plain_server_knows_nothing_of_transfers() -> None:
    server = VllmServer(name="plain", model=Path("model"), port=8100)
    assert "--kv-transfer-config" not in server.command(Path("python"))
    assert not {"VLLM_CPU_OMP_THREADS_BIND", "VLLM_NIXL_SIDE_CHANNEL_PORT"} & set(
        server.variables()
    )


def test_an_interpreter_without_vllm_is_refused_with_the_fix() -> None:
    with pytest.raises(ConfigError, match="has no vLLM; run `make setup-vllm`"):
        check_vllm(Path(sys.executable))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_machine_without_a_gpu_is_refused_before_a_server_starts() -> None:
    with pytest.raises(ConfigError, match="finds no GPU; leave the flag out"):
        check_cuda(Path(sys.executable))


def test_a_file_that_cannot_be_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be run"):
        check_vllm(tmp_path / "nothing")


def test_the_environment_beside_us_is_preferred(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert default_python() == Path(sys.executable)
    python = tmp_path / ".venv-vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert default_python() == python


def test_free_ports_are_all_different() -> None:
    assert len(set(free_ports(8))) == 8
