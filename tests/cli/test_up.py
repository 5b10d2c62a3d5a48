import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from tests.cli.test_processes import eventually, is_alive, stub

from kvferry.cli.checkpoints import DEFAULT_MODEL
from kvferry.cli.cluster.http_client import (
    Completion,
    TransportTotals,
    complete,
    is_healthy,
    read_transport_totals,
    sum_transport_totals,
)
from kvferry.cli.cluster.local_cluster import LocalLaunch, UpOptions, child_environment
from kvferry.cli.cluster.processes import ChildProcess, ProcessGroup
from kvferry.cli.main import main
from kvferry.cli.up import sample_request
from kvferry.engine.model.config import read_model_config
from kvferry.errors import TransportError
from kvferry.types import Address

ROOT = Path(__file__).parents[2]
KEY_FILE = Path("/run/admin-key")


def value_of(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


# -- options and the commands of the processes --


def test_engines_take_free_ports_and_name_the_transport_that_was_asked_for(tmp_path: Path) -> None:
    command = LocalLaunch(
        UpOptions(model=tmp_path, transports=("nixl",), tensor_parallel_size=2), KEY_FILE
    ).engine()
    assert command[:5] == [sys.executable, "-m", "kvferry", "serve", str(tmp_path)]
    assert value_of(command, "--port") == "0"
    assert value_of(command, "--tensor-parallel-size") == "2"
    assert json.loads(value_of(command, "--kv-transfer-config")) == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"transports": ["nixl"]},
    }


def test_the_transport_is_left_to_the_engines_when_none_was_asked_for() -> None:
    assert "transports" not in value_of(
        LocalLaunch(UpOptions(), KEY_FILE).engine(), "--kv-transfer-config"
    )


def test_engines_on_a_gpu_leave_room_for_each_other() -> None:
    command = LocalLaunch(UpOptions(device="cuda:1"), KEY_FILE).engine()
    assert value_of(command, "--device") == "cuda:1"
    assert value_of(command, "--kv-cache-memory-bytes") == "1G"
    assert "--device" not in LocalLaunch(UpOptions(), KEY_FILE).engine()


def test_push_is_another_connector() -> None:
    command = LocalLaunch(UpOptions(mode="push"), KEY_FILE).engine()
    assert (
        json.loads(value_of(command, "--kv-transfer-config"))["kv_connector"] == "NixlPushConnector"
    )


def test_the_router_is_told_of_every_engine() -> None:
    addresses = [Address("127.0.0.1", port) for port in (1, 2, 3)]
    command = LocalLaunch(UpOptions(port=99), KEY_FILE).router(addresses[:2], addresses[2:])
    assert command[3:] == [
        *("proxy", "--host", "127.0.0.1", "--port", "99", "--admin-key-file", str(KEY_FILE)),
        *("--prefiller-hosts", "127.0.0.1", "127.0.0.1", "--prefiller-ports", "1", "2"),
        *("--decoder-hosts", "127.0.0.1", "--decoder-ports", "3"),
    ]


def test_a_cluster_has_its_own_secret_unless_the_operator_gave_one(tmp_path: Path) -> None:
    own = child_environment({"A": "b"}, tmp_path / "secret")
    assert own["KVFERRY_SECRET_FILE"] == str(tmp_path / "secret")
    assert (own["A"], own["KVFERRY_SIDE_CHANNEL_PORT"]) == ("b", "0")
    assert child_environment({"KVFERRY_SECRET_FILE": "x"}, tmp_path)["KVFERRY_SECRET_FILE"] == "x"
    assert "KVFERRY_SECRET_FILE" not in child_environment({"KVFERRY_SECRET": "x"}, tmp_path)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_default_model_can_be_split(ranks: int) -> None:
    read_model_config(UpOptions().model).check_tensor_parallel(ranks)


def test_the_first_request_is_a_chat_if_the_model_has_chats(tmp_path: Path) -> None:
    request = sample_request(UpOptions(), "Be brief.", "Who are you?")
    assert request["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who are you?"},
    ]
    request = sample_request(UpOptions(model=tmp_path), "Be brief.", "Who are you?")
    assert request["prompt"] == "Be brief. Who are you?"
    (tmp_path / "chat_template.jinja").touch()
    assert "messages" in sample_request(UpOptions(model=tmp_path), "Who are you?")


def test_a_port_that_is_taken_is_one_sentence_and_exit_code_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["up", "--port", str(port)]) == 2
    assert capsys.readouterr().err == (
        f"kvferry: port {port} cannot be used (Address already in use); stop the process that "
        "listens there or choose another --port\n"
    )


def test_a_temporary_directory_that_cannot_be_written_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/proc")
    assert main(["up", "--port", "0"]) == 2
    assert "no file can be written to /proc/kvferry-up-" in capsys.readouterr().err


# -- reading instances over HTTP --


def test_a_completion_and_what_the_transports_carried_are_read_over_http(tmp_path: Path) -> None:
    with ProcessGroup(tmp_path / "scratch") as group:
        child = ChildProcess("stub", stub("serve"), os.environ)
        child.start(group.id)
        eventually(lambda: child.poll_address() is not None)
        address = child.poll_address()
        assert address is not None
        assert is_healthy(address)
        assert complete(address, {"prompt": "x"}, timeout_s=60) == Completion("hello", 1)
        assert complete(address, {"messages": []}, timeout_s=60) == Completion("Hm.", 1)
        assert read_transport_totals(address) == [
            TransportTotals("shm", transfers=2, total_bytes=3145728, seconds=0.5)
        ]
        child.close()
        assert not is_healthy(address)
        with pytest.raises(TransportError, match="did not answer POST"):
            complete(address, {"prompt": "x"}, timeout_s=60)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e309", "-1", "true", '"5"', "9" * 400])
def test_a_server_whose_numbers_are_none_has_failed(number: str) -> None:
    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(f'kvferry:transfer_bytes_total{{transport="shm"}} {number}\n')

        def do_POST(self) -> None:
            usage = f'"usage": {{"completion_tokens": {number}}}'
            self._answer(f'{{"choices": [{{"text": "hello"}}], {usage}}}')

        def _answer(self, text: str) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

    with HTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            address = Address("127.0.0.1", server.server_port)
            with pytest.raises(TransportError, match="cannot be parsed"):
                read_transport_totals(address)
            with pytest.raises(TransportError, match="answered the sample request"):
                complete(address, {"prompt": "x"}, timeout_s=60)
        finally:
            server.shutdown()
            thread.join()


def test_what_several_instances_carried_is_added_up_by_transport() -> None:
    parts = [
        TransportTotals("shm", 1, 100, 1.0),
        TransportTotals("nixl", 1, 500, 1.0),
        TransportTotals("shm", 2, 200, 0.5),
        TransportTotals("memory"),
    ]
    assert sum_transport_totals(parts) == [
        TransportTotals("nixl", 1, 500, 1.0),
        TransportTotals("shm", 3, 300, 1.5),
    ]
    assert sum_transport_totals(parts)[1].bytes_per_s == 200
    assert TransportTotals("shm").bytes_per_s == 0


# -- the whole command --


def up(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    """Starts `kvferry up` with an empty temporary directory of its own, so that a test can see the
    files it leaves behind.
    """
    environment = os.environ | {
        "TMPDIR": str(tmp_path),
        "XDG_RUNTIME_DIR": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "kvferry", "up", "--port", "0", *arguments]
    return subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )


def shared_memory() -> set[str]:
    """The names in /dev/shm, except those that vLLM and Python's own pools create: tests with real
    vLLM may run at the same time, and kvferry creates neither kind.
    """
    return {
        name for name in os.listdir("/dev/shm") if not name.startswith(("vllm_", "psm_", "sem.mp-"))
    }


def descendants(pid: int) -> set[int]:
    """The processes that descend from `pid`."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parents[int(entry.name)] = int(
                    (entry / "stat").read_text().rpartition(")")[2].split()[1]
                )
            except OSError:
                continue
    found: set[int] = set()
    while more := {child for child, parent in parents.items() if parent in found | {pid}} - found:
        found |= more
    return found


@pytest.mark.slow
def test_up_once_shows_an_answer_and_the_transport_and_leaves_nothing_behind(
    tmp_path: Path,
) -> None:
    before = shared_memory()
    with up(tmp_path, "--once", "--transports", "nixl") as process:
        output, _ = process.communicate()
    assert process.returncode == 0, output
    assert "answer: A KV cache holds the keys and values" in output
    assert "of KV cache by nixl in 1 transfer(s) at " in output
    assert list(tmp_path.iterdir()) == []
    eventually(lambda: shared_memory() <= before)


@pytest.mark.slow
def test_up_serves_a_model_whose_chats_have_no_system_message(tmp_path: Path) -> None:
    model, scratch = tmp_path / "model", tmp_path / "scratch"
    shutil.copytree(DEFAULT_MODEL, model)
    scratch.mkdir()
    settings = json.loads((model / "tokenizer_config.json").read_text())
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('refused') }}{% endif %}"
    settings["chat_template"] = refusal + settings["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    with up(scratch, "--once", "--model", str(model)) as process:
        output, _ = process.communicate()
    assert process.returncode == 0, output
    assert "of KV cache by shm in 1 transfer(s) at " in output


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_up_serves_until_it_is_stopped_or_killed_and_leaves_nothing_behind(
    number: signal.Signals, tmp_path: Path
) -> None:
    before = shared_memory()
    with up(tmp_path) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("serving on "):
                break
        else:
            pytest.fail("it ended instead of serving:\n" + "".join(lines))
        assert any("of KV cache by shm in 1 transfer(s) at " in line for line in lines)
        port = int(lines[-1].split(";")[0].rsplit(":", 1)[1])
        assert is_healthy(Address("127.0.0.1", port))
        pids = descendants(process.pid)
        assert len(pids) >= 4
        process.send_signal(number)
        code = process.wait(60)
        assert code == (0 if number == signal.SIGINT else -signal.SIGKILL)
        eventually(lambda: not any(map(is_alive, pids)), within_s=30)
        eventually(lambda: list(tmp_path.iterdir()) == [])
    with socket.create_server(("127.0.0.1", port)):
        pass
    eventually(lambda: shared_memory() <= before)
