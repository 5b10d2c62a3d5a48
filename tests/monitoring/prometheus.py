"""Debian's Prometheus for tests: where its programs are, and a server that scrapes a fleet."""

import json
import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from tests.ports import reserve_port

ROOT = Path(__file__).parent.parent.parent
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
CONFIG = ROOT / "deploy" / "prometheus" / "prometheus.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "kvferry.json"
DEADLINE_S = 60.0
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


def program(name: str) -> str:
    """The path of `prometheus` or `promtool`; skips the test if there is none."""
    local = ROOT / ".prometheus" / "usr" / "bin" / name
    found = str(local) if local.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} here; `make setup-prometheus` fetches it where it can")
    return found


def promtool(*arguments: str) -> str:
    """Run promtool, and return what it prints."""
    done = subprocess.run(
        [program("promtool"), *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def expressions(dashboard: Path = DASHBOARD) -> dict[str, str]:
    """The expressions of the dashboard, by the title of the panel and the legend."""
    panels = json.loads(dashboard.read_text())["panels"]
    return {
        f"{panel['title']}: {target['legendFormat']}": target["expr"]
        for panel in panels
        for target in panel.get("targets", ())
    }


class Server:
    """A running Prometheus."""

    def __init__(self, url: str, log: Path) -> None:
        self._url = url
        self._log = log

    def get(self, path: str, **parameters: str) -> Any:
        query = f"?{urlencode(parameters)}" if parameters else ""
        with _open(f"{self._url}/api/v1/{path}{query}", timeout=60) as answer:
            return json.load(answer)["data"]

    def values(self, expression: str) -> list[float]:
        """The present values of an expression, without those that are not a number."""
        found = self.get("query", query=expression)["result"]
        values = [float(entry["value"][1]) for entry in found]
        return [value for value in values if value == value]

    def firing(self) -> set[str]:
        return {
            alert["labels"]["alertname"]
            for alert in self.get("alerts")["alerts"]
            if alert["state"] == "firing"
        }

    def until(self, what: object, condition: Callable[[], object], timeout_s: float) -> None:
        """Wait for the condition; `what` is shown if it does not come true."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"{what}\n{self._log.read_text()[-4000:]}"
            time.sleep(0.2)


@contextmanager
def prometheus(config: Path, directory: Path) -> Iterator[Server]:
    """Run Prometheus with a configuration, on a free port of the loopback address."""
    port = reserve_port()
    log = directory / "log"
    command = [program("prometheus"), f"--config.file={config}", "--storage.tsdb.retention.time=1h"]
    command += [f"--storage.tsdb.path={directory}", f"--web.listen-address=127.0.0.1:{port}"]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ})
    server = Server(f"http://127.0.0.1:{port}", log)
    try:
        server.until("Prometheus is ready", lambda: _is_ready(port, process), DEADLINE_S)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(DEADLINE_S)
        finally:
            process.kill()


def _is_ready(port: int, process: "subprocess.Popen[bytes]") -> bool:
    assert process.poll() is None, "Prometheus has ended"
    try:
        with _open(f"http://127.0.0.1:{port}/-/ready", timeout=60) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
