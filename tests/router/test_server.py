import signal
import socket
import subprocess
import sys
from urllib.request import ProxyHandler, build_opener

import pytest

from kvferry.errors import ConfigError
from kvferry.router.app import RouterApp
from kvferry.router.options import RouterOptions
from kvferry.router.server import run_router
from kvferry.types import Address

SCRIPT = """
from tests.router.stubs import RecordedReleases
from kvferry.router.app import RouterApp
from kvferry.router.fleet.instances import Role, pair_instances
from kvferry.router.options import RouterOptions
from kvferry.router.server import run_router

options = RouterOptions(pair_instances(Role.PREFILL, ["127.0.0.1"], [1]), pair_instances(Role.DECODE, ["127.0.0.1"], [2]), port=0)
run_router(options, lambda: RouterApp(options, RecordedReleases()), lambda address: print(address.port, flush=True))
"""  # noqa: E501


UNFINISHED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n"
)


def never_ready(address: Address) -> None:
    raise AssertionError("it must not start")


def never_made() -> RouterApp:
    raise AssertionError("it must not be made")


def test_a_port_that_is_taken_is_an_error_of_the_operator() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError,
            match=f"port {port} on 127.0.0.1 is in use; stop the process that listens there or "
            "choose another --port",
        ):
            run_router(RouterOptions(host="127.0.0.1", port=port), never_made, never_ready)


@pytest.mark.parametrize(
    ("host", "sentence"),
    [
        ("192.0.2.1", "cannot listen on 192.0.2.1:0"),
        ("a" * 300, "cannot be resolved"),
    ],
)
def test_a_host_that_is_not_this_machine_is_an_error_of_the_operator(
    host: str, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        run_router(RouterOptions(host=host, port=0), never_made, never_ready)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_router_on_any_free_port_serves_and_ends_quietly_when_told(
    number: signal.Signals,
) -> None:
    """It ends before `timeouts.shutdown`, because it does not wait for an unfinished upload."""
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        with build_opener(ProxyHandler({})).open(
            f"http://127.0.0.1:{port}/health", timeout=60
        ) as answer:
            assert answer.status == 200
        with socket.create_connection(("127.0.0.1", port), timeout=60) as upload:
            upload.sendall(UNFINISHED)
            assert upload.recv(4096).startswith(b"HTTP/1.1 100 ")
            process.send_signal(number)
            assert upload.recv(4096).startswith(b"HTTP/1.1 503 ")
        _, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")
