"""Tests that `kvferry doctor` turns probe answers into findings, survives probes that do not
answer, and changes nothing.
"""

import json
import os
import socket
from pathlib import Path

import pytest

from kvferry.cli.doctor import (
    ProbeOutput,
    can_share_memory,
    examine,
    host_pool_findings,
    is_port_free,
    probe_nixl,
    run_probe,
)
from kvferry.cli.findings import (
    NixlReport,
    NotInstalled,
    ProbeFailed,
    Severity,
    TorchReport,
    compiled_finding,
    core_finding,
    descriptor_finding,
    enabled_transports,
    extras_finding,
    gpu_finding,
    nixl_findings,
    pool_findings,
    port_finding,
    python_finding,
    torch_finding,
    transport_finding,
)
from kvferry.cli.main import main
from kvferry.tiers.keys import Namespace
from kvferry.tiers.pool.host_pool import HostPool
from kvferry.tiers.pool.policies import LruPolicy

TABLE = """
[vm:1 :0]   | Type       | Component | Transport | Device (System device)  |
[vm:1 :0]   | network    | tcp       | + tcp     | + eth0  + lo            |
[vm:1 :0]   |            | ib        | - rc_mlx5 | - mlx5_0                |
[vm:1 :0]   | intra-node | sysv      | + sysv    | + memory                |
[vm:1 :0]   |            | cma       | + cma     | + memory                |
[vm:1 :0]   | Legend: + = enabled, - = disabled                           |
"""


def test_only_enabled_transports_are_read_from_the_table() -> None:
    assert enabled_transports(TABLE) == ["cma", "sysv", "tcp"]
    assert enabled_transports("") == []


@pytest.mark.parametrize(
    ("transports", "level", "words"),
    [
        (["cma", "tcp"], Severity.OK, "over TCP"),
        (["cma", "rc_mlx5", "tcp"], Severity.OK, "rc_mlx5"),
        (["tcp"], Severity.ADVICE, "without cma"),
        ([], Severity.ADVICE, "reported no transports"),
    ],
)
def test_transports_decide_what_is_advised(
    transports: list[str], level: Severity, words: str
) -> None:
    finding = transport_finding(transports, {"UCX_TLS": "tcp"})
    assert finding.level is level
    assert words in finding.text
    assert "UCX_TLS=tcp" in finding.text


def test_what_is_missing_is_a_problem_or_advice() -> None:
    failed = ProbeFailed("cannot be used")
    assert torch_finding(failed).level is Severity.PROBLEM
    assert torch_finding(TorchReport("2.13.0")).level is Severity.OK
    assert torch_finding(NotInstalled("not installed")).level is Severity.ADVICE
    assert "[router]" in extras_finding({"router": ["uvloop"], "engine": []}).text
    assert "[" not in extras_finding({"router": [], "engine": []}).text
    assert nixl_findings(failed)[0].level is Severity.PROBLEM
    assert nixl_findings(NixlReport("1.5", ["POSIX"]))[0].level is Severity.PROBLEM
    assert nixl_findings(NixlReport("1.5", ["UCX"], ["UCX"]))[0].level is Severity.OK
    assert gpu_finding(failed, []).level is Severity.ADVICE
    assert "cannot use them" in gpu_finding(TorchReport("2.13.0+cpu"), ["GPU 0"]).text
    assert gpu_finding(TorchReport("2.13.0", ["H200"], "13.0"), []).level is Severity.OK
    assert [python_finding(version).level for version in ((3, 10, 9), (3, 11, 0), (3, 14, 1))] == [
        Severity.PROBLEM,
        Severity.OK,
        Severity.OK,
    ]
    assert [compiled_finding(missing).level for missing in ([], ["copy_segments"])] == [
        Severity.OK,
        Severity.ADVICE,
    ]
    assert (
        "copy_segments, linger not compiled" in compiled_finding(["copy_segments", "linger"]).text
    )
    assert [core_finding(cores).level for cores in (2, 8)] == [Severity.ADVICE, Severity.OK]
    assert [descriptor_finding(limit).level for limit in (1024, 65536)] == [
        Severity.ADVICE,
        Severity.OK,
    ]


def test_a_plugin_that_was_asked_for_must_start() -> None:
    report = NixlReport("1.5", ["LIBFABRIC", "POSIX", "UCX"], ["UCX", "POSIX"])
    findings = nixl_findings(report, ["POSIX", "LIBFABRIC", "NOPE"])
    assert [finding.level for finding in findings] == [
        Severity.OK,
        Severity.OK,
        Severity.PROBLEM,
        Severity.PROBLEM,
    ]
    assert "POSIX starts" in findings[1].text
    assert "NIXL has the plugin LIBFABRIC, but it does not start" in findings[2].text
    assert "NIXL has no plugin NOPE; available: LIBFABRIC, POSIX, UCX" in findings[3].text
    assert len(nixl_findings(report)) == 1


def test_a_small_memory_file_system_is_reported_before_an_engine_fails() -> None:
    small, large = (pool_findings("/dev/shm/x", size, size, {}) for size in (64 << 20, 16 << 30))
    assert [finding.level for finding in (*small, *large)] == [Severity.ADVICE, Severity.OK]
    assert "--shm-size" in small[0].text


def test_segments_without_an_owner_are_reported_with_the_command_that_removes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "pool"
    living = HostPool.open(folder, Namespace({"model": "a"}), 4096, 4, LruPolicy)
    dead = HostPool.open(folder, Namespace({"model": "b"}), 4096, 4, LruPolicy)
    assert len(host_pool_findings(folder)) == 1
    dead.close()
    _, orphans = host_pool_findings(folder)
    assert orphans.level is Severity.ADVICE
    assert orphans.text.startswith("1 segments ")
    (command,) = (part for part in orphans.text.split("`") if part.startswith("kvferry "))
    assert main(command.split()[1:]) == 0
    capsys.readouterr()
    assert len(host_pool_findings(folder)) == 1
    assert living.path is not None
    assert living.path.exists()
    living.close()


def test_ports_of_the_readme_that_are_taken_are_named_with_what_to_set() -> None:
    ports = [8100, 8200, 8192, 5601]
    assert port_finding([], ports).level is Severity.OK
    assert port_finding([8100, 8192], ports).text == "8100, 8192 in use; choose others with --port"
    assert (
        port_finding([5601], ports).text
        == "5601 in use; set VLLM_NIXL_SIDE_CHANNEL_PORT to another port"
    )
    assert port_finding([5601], ports).level is Severity.ADVICE


@pytest.mark.slow
def test_plugins_are_started_one_by_one_for_the_report() -> None:
    report, log = probe_nixl(os.environ, ["UCX", "NO_SUCH_PLUGIN"])
    assert isinstance(report, NixlReport)
    assert report.started == ["UCX"]
    assert "UCX" in report.plugins
    assert "tcp" in enabled_transports(log)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed by signal 11"),
        ("import no_such_module", "No module named"),
        ("raise SystemExit(3)", "exited with code 3"),
        ("pass", "exited with code 0"),
        ("import time; time.sleep(60)", "no answer within 0.5 s"),
    ],
)
def test_a_probe_that_fails_is_survived(code: str, reason: str) -> None:
    answer = run_probe(code, timeout_s=0.5 if "sleep" in code else 30.0)
    assert isinstance(answer, ProbeFailed)
    assert reason in answer.reason


def test_a_probe_answers_with_its_last_line() -> None:
    assert run_probe("print('noise'); print('word')") == ProbeOutput("word", "noise\nword\n")


def test_memory_can_be_shared_with_another_process_here() -> None:
    assert can_share_memory() is None


def test_a_port_in_use_is_seen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert not is_port_free("127.0.0.1", port)
    assert is_port_free("127.0.0.1", port)


@pytest.mark.slow
def test_the_whole_examination_leaves_no_secret_behind(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KVFERRY_")}
    findings = {
        finding.topic: finding for finding in examine({**environ, "XDG_RUNTIME_DIR": str(tmp_path)})
    }
    assert {
        "machine",
        "Python",
        "C module",
        "extras",
        "torch",
        "vLLM",
        "GPUs",
        "NIXL",
        "UCX",
        "shared memory",
        "host pool",
        "side channel",
        "secret",
        "API port",
        "other ports",
        "open files",
        "cores",
    } == set(findings) - {
        "NIXL exit"
    }  # reported only where the distribution ships a second libnl library
    assert [findings[topic].level for topic in ("torch", "NIXL", "secret")] == [Severity.OK] * 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_problem_is_in_the_json_and_in_the_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("KVFERRY_SECRET", "short")
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["is_ok"] is False
    assert [
        finding["topic"] for finding in report["findings"] if finding["level"] == "problem"
    ] == ["secret"]
