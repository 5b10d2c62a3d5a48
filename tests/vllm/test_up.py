"""Tests `kvferry up --vllm` with real vLLM servers: the printed request works, the tokens are those
of one vLLM, and no process is left behind.
"""

import asyncio
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.cli.test_processes import eventually, is_alive
from tests.cli.test_up import descendants
from tests.e2e.harness import Answer, ask, new_session
from tests.vllm.fleet import PYTHON, ROOT
from tests.vllm.right import PROMPTS, Right

from kvferry.types import Address

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

FLAGS = ("--enforce-eager", "--dtype", "float32", "--max-model-len", "2048", "--block-size", "32")
NUM_PROMPTS = 8


class Up:
    """A running `kvferry up --vllm`, with a temporary directory of its own."""

    def __init__(self, logs: Path, model: Path, *arguments: str) -> None:
        # Paths of sockets have at most 107 characters, so this path must be short.
        self.temporary = Path(tempfile.mkdtemp(prefix="up-"))
        environment = os.environ | {"TMPDIR": str(self.temporary), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "kvferry", "up", "--vllm", str(model), "--port", "0"]
        command += ["--vllm-python", str(PYTHON), "--log-dir", str(logs), *arguments]
        self.process = subprocess.Popen(
            [*command, "--", *FLAGS],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
        )
        self.lines: list[str] = []

    def __enter__(self) -> "Up":
        return self

    def __exit__(self, *_: object) -> None:
        """End what a failed test has left; the servers end with `up`."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(90)
        if self.process.stdout is not None:
            self.process.stdout.close()
        shutil.rmtree(self.temporary, ignore_errors=True)

    def wait_for(self, start: str) -> str:
        """Return the line that begins with `start`."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if line.startswith(start):
                return line
        pytest.fail(f"it ended before {start!r}:\n" + "".join(self.lines))

    def stop(self, number: signal.Signals) -> int:
        """Send a signal, and return the exit code when no process is left."""
        pids = descendants(self.process.pid)
        assert len(pids) >= 4
        self.process.send_signal(number)
        code = self.process.wait(90)
        eventually(lambda: not any(map(is_alive, pids)), within_s=40)
        return code


def check_tokens(address: Address, model_name: str, right: Right) -> None:
    """Compare the answers of the router with those of one vLLM."""

    async def answers() -> list[Answer]:
        async with new_session(120) as session:
            return [
                await ask(session, _Router(address), prompt, model=model_name)  # type: ignore[arg-type]
                for prompt in PROMPTS[:NUM_PROMPTS]
            ]

    assert asyncio.run(answers()) == right.vllm[:NUM_PROMPTS]


class _Router:
    def __init__(self, address: Address) -> None:
        self.url = f"http://{address}"


def check_up(up: Up, model: Path, right: Right) -> None:
    serving = up.wait_for("serving on ")
    host, _, port = serving.split()[2].removeprefix("http://").rstrip(";").rpartition(":")
    request = up.wait_for("  curl ")
    shown = "".join(up.lines)
    assert "of KV cache by " in shown
    for stage in ("prefill-0: loading weights after ", "prefill-0: ready on 127.0.0.1:"):
        assert stage in shown
    answer = subprocess.run(shlex.split(request), capture_output=True, check=True)
    assert json.loads(answer.stdout)["model"] == model.name
    check_tokens(Address(host, int(port)), model.name, right)


def test_the_printed_request_works_tokens_are_those_of_one_vllm_and_ctrl_c_leaves_nothing(
    tmp_path: Path, model: Path, right: Right
) -> None:
    with Up(tmp_path, model) as up:
        check_up(up, model, right)
        assert up.stop(signal.SIGINT) == 0
        assert [path.name for path in up.temporary.iterdir() if path.is_socket()] == []
        assert list(up.temporary.glob("kvferry-*")) == []
        assert {path.name for path in tmp_path.iterdir()} == {"prefill-0.log", "decode-0.log"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["pull", "push"])
def test_two_prefill_servers_and_a_kill_leave_nothing(
    tmp_path: Path, model: Path, right: Right, mode: str
) -> None:
    with Up(tmp_path, model, "--prefill", "2", "--mode", mode) as up:
        check_up(up, model, right)
        assert up.stop(signal.SIGKILL) == -signal.SIGKILL
        eventually(lambda: list(up.temporary.glob("kvferry-*")) == [], within_s=40)


@pytest.mark.exhaustive
def test_a_model_that_does_not_exist_is_named_with_what_to_do(tmp_path: Path) -> None:
    with Up(tmp_path, Path("nobody/such-model")) as up:
        output, _ = up.process.communicate()
        assert up.process.returncode == 1
        assert "check the model's name" in output
        assert f"the logs are in {tmp_path}" in output
