"""Tests the checks before any process starts: settings that cannot work are named, and the printed
curl command can be copied into a shell.
"""

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.cli.cluster.addresses import check_listenable, curl_command, dialable
from kvferry.cli.main import main
from kvferry.cli.serve import check_before_start
from kvferry.config import KVTransferConfig
from kvferry.engine.make_model.writer import make_model
from kvferry.engine.model.config import read_model_config
from kvferry.engine.options import EngineOptions
from kvferry.errors import ConfigError
from kvferry.types import Address

ANY_PORT = Address("localhost", 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_model(directory)
    return directory


def transfer(**changes: str) -> KVTransferConfig:
    return KVTransferConfig.from_mapping(
        {"kv_connector": "NixlConnector", "kv_role": "kv_both", **changes}
    )


def test_what_can_be_started_passes(model: Path) -> None:
    check_before_start(
        EngineOptions(model, tensor_parallel_size=2, max_model_len=64, kv_transfer=transfer()),
        ANY_PORT,
    )


def test_what_cannot_be_started_is_named(model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    wrong = {
        "architectures must be": EngineOptions(tmp_path),
        "does not divide the model's num_attention_heads": EngineOptions(
            model, tensor_parallel_size=3
        ),
        "is more than the model's 4096 positions": EngineOptions(model, max_model_len=5000),
        "MoRIIOConnector is a connector of vLLM": EngineOptions(
            model, kv_transfer=transfer(kv_connector="MoRIIOConnector")
        ),
        "cannot be imported": EngineOptions(
            model, kv_transfer=transfer(kv_connector="X", kv_connector_module_path="no.such")
        ),
    }
    for words, options in wrong.items():
        with pytest.raises(ConfigError, match=words):
            check_before_start(options, ANY_PORT)


def test_serve_says_it_at_once_and_loads_no_torch(model: Path) -> None:
    code = (
        "import sys; from kvferry.cli.main import main; code = main(sys.argv[1:]); print(code, "
        "'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, "serve", str(model), "-tp", "3", "--port", "0"]
    environ = os.environ | {"VLLM_NIXL_ABORT_REQUEST_TIMEOUT": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environ)
    assert done.stdout == "2 False\n"
    assert "does not divide" in done.stderr


def test_a_port_that_is_taken_is_said_before_the_start(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(model), "--port", str(port)]) == 2
        with pytest.raises(ConfigError, match=f"port {port} cannot be used"):
            check_listenable(Address("0.0.0.0", port))
    assert f"port {port} cannot be used (Address already in use)" in capsys.readouterr().err
    check_listenable(Address("127.0.0.1", port))
    check_listenable(Address("localhost", port))


@pytest.mark.parametrize(
    ("host", "words"),
    [("192.0.2.1", "is not an address of this machine"), ("no host", "cannot be resolved")],
)
def test_a_host_that_is_not_ours_is_named(host: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_listenable(Address(host, 8000))


@pytest.mark.parametrize(
    ("host", "dialled"),
    [
        ("0.0.0.0", "127.0.0.1:80"),
        ("::", "[::1]:80"),
        ("localhost", "localhost:80"),
        ("10.0.0.1", "10.0.0.1:80"),
    ],
)
def test_every_interface_is_dialled_on_this_machine(host: str, dialled: str) -> None:
    assert str(dialable(Address(host, 80))) == dialled


def test_the_curl_line_survives_the_shell_whatever_the_model_is_called() -> None:
    request = {"model": "it's $HOME", "prompt": ""}
    words = shlex.split(curl_command(Address("0.0.0.0", 80), request))
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:80/v1/completions"]
    assert json.loads(words[-1]) == request


def test_a_chat_has_a_path_of_its_own() -> None:
    words = shlex.split(curl_command(Address("::1", 80), {"messages": []}))
    assert words[2] == "http://[::1]:80/v1/chat/completions"


@pytest.mark.parametrize(
    ("heads", "ranks"),
    [(1, [1]), (2, [1, 2]), (3, [1, 3]), (6, [1, 3, 6]), (8, [1, 2, 4, 8]), (16, [1, 2, 4, 8, 16])],
)
def test_a_model_made_with_more_heads_can_be_split_over_more_ranks(
    tmp_path: Path, heads: int, ranks: list[int]
) -> None:
    assert main(["make-model", str(tmp_path), "--heads", str(heads)]) == 0
    config = read_model_config(tmp_path)
    assert config.attention.num_heads == heads
    for number in ranks:
        config.check_tensor_parallel(number)
    with pytest.raises(ConfigError, match="does not divide"):
        config.check_tensor_parallel(2 * ranks[-1])


def test_without_heads_the_model_is_the_one_it_always_was(model: Path, tmp_path: Path) -> None:
    make_model(tmp_path, heads=4)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / name).read_bytes() == (model / name).read_bytes()
