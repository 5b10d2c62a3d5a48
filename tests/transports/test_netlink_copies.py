"""Tests that a process that has used NIXL exits with the intended code, even where the
distribution's libefa loads a second libnl into it.

The tests create this condition with stubs of three rdma-core libraries, because most machines
without RDMA lack them: `libefa.so.1`, which UCX's EFA module loads, needs `libibverbs.so.1`, which
needs `libnl-route-3.so.200`. The stub of the last library does what libnl does: its constructor
registers a queueing discipline by name, and its destructor removes it from the list without
checking that it is on the list.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.cli.doctor import probe_nixl
from kvferry.cli.findings import NixlReport, Severity, nixl_findings

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
NETLINK = """
#include <stddef.h>
struct list { struct list *next, *previous; };
struct tc_ops { const char *kind; int type; size_t size; void *callbacks[8]; struct list list; };
static struct list head = {&head, &head};
int rtnl_tc_register(struct tc_ops *ops) {
    ops->list.next = &head; ops->list.previous = head.previous;
    head.previous->next = &ops->list; head.previous = &ops->list;
    return 0;
}
void rtnl_tc_unregister(struct tc_ops *ops) {
    ops->list.next->previous = ops->list.previous; ops->list.previous->next = ops->list.next;
}
static struct tc_ops pfifo = {"pfifo", 0, 8, {0}, {0, 0}};
__attribute__((constructor)) static void start(void) { rtnl_tc_register(&pfifo); }
__attribute__((destructor)) static void end(void) { rtnl_tc_unregister(&pfifo); }
"""
BARE = """
from nixl import nixl_agent, nixl_agent_config
agent = nixl_agent("x", nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
"""
OURS = "from tests.transports.sides import nixl_side\nside = nixl_side()\n"


@pytest.fixture(scope="module")
def second_netlink(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that loads the stubs."""
    folder = tmp_path_factory.mktemp("rdma-core")
    (folder / "netlink.c").write_text(NETLINK)
    (folder / "empty.c").write_text("")
    _compile(folder, "netlink.c", "libnl-route-3.so.200")
    _compile(folder, "empty.c", "libibverbs.so.1", "-L.", "-l:libnl-route-3.so.200")
    _compile(folder, "empty.c", "libefa.so.1", "-L.", "-l:libibverbs.so.1")
    return {**os.environ, "LD_LIBRARY_PATH": str(folder)}


def _compile(folder: Path, source: str, name: str, *flags: str) -> None:
    command = [
        "cc",
        "-shared",
        "-fPIC",
        "-Wl,--no-as-needed",
        source,
        "-o",
        name,
        f"-Wl,-soname,{name}",
        *flags,
    ]
    subprocess.run(command, cwd=folder, check=True)


def _run(program: str, environment: dict[str, str]) -> int:
    command = [sys.executable, "-c", program]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, check=False
    ).returncode


def test_a_bare_agent_of_nixl_crashes_at_exit_where_a_second_libnl_is_loaded(
    second_netlink: dict[str, str],
) -> None:
    """The negative control of the tests below. If it fails with a newer NIXL,
    `load_distribution_netlink` can be removed (docs/decisions/042).
    """
    assert _run(BARE, second_netlink) == -signal.SIGSEGV


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("side.close()", 0),
        ("pass", 0),
        ("raise SystemExit(7)", 7),
        ("raise ValueError", 1),
        (
            "import os, signal; signal.signal(2, signal.default_int_handler); "
            "os.kill(os.getpid(), 2)",
            -signal.SIGINT,
        ),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    ],
)
def test_a_process_of_ours_ends_with_the_exit_code_that_it_means(
    ending: str, code: int, second_netlink: dict[str, str]
) -> None:
    assert _run(OURS + ending, second_netlink) == code


def test_the_doctor_warns_of_a_second_libnl(second_netlink: dict[str, str]) -> None:
    report, _ = probe_nixl(second_netlink, ["UCX"])
    assert isinstance(report, NixlReport)
    assert (report.started, report.exit_signals, report.netlink_copies) == (["UCX"], {}, 2)
    exits = [finding for finding in nixl_findings(report) if finding.topic == "NIXL exit"]
    assert [finding.level for finding in exits] == [Severity.ADVICE]
    assert "other programs that use NIXL exit with SIGSEGV" in exits[0].text


def test_a_crash_at_exit_is_a_problem_to_the_doctor() -> None:
    finding = nixl_findings(NixlReport("1.5", ["UCX"], ["UCX"], {"UCX": 11}, 2))[1]
    assert (finding.level, finding.topic) == (Severity.PROBLEM, "NIXL exit")
    assert "signal 11" in finding.text
