"""Tests the wheel in empty environments: the connector alone, then the router and the engine, each
with only its extra.

The environments have no torch unless the engine's extra installs it. NIXL's own requirements name
torch, so NIXL is installed without them: the connector must not need torch itself.
"""

import email
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from kvferry import __version__

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BUILD_FILES = ("CHANGELOG.md", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py")
NIXL = ("nixl", "nixl-cu12")  # in an environment without CUDA, one of its two builds is enough
COMMANDS = ("up", "serve", "proxy", "register", "make-model", "doctor", "plan", "bench")
COMMAND_S = 120.0
START_S = 120.0


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that `python -m build` fills: an sdist, and a wheel built from the
    sdist.
    """
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in BUILD_FILES:
        shutil.copy(ROOT / name, source)
    leftovers = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
    shutil.copytree(ROOT / "src", source / "src", ignore=leftovers)
    shutil.copytree(ROOT / "tests" / "packaging", source / "tests", ignore=leftovers)
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(built), str(source)]
    subprocess.run(build, env=outer_environment(), check=True)
    return built


@pytest.fixture(scope="module")
def wheel(distributions: Path) -> Path:
    (path,) = distributions.glob("*.whl")
    return path


@dataclass(frozen=True)
class Installation:
    """An environment with the wheel and a few requirements only."""

    directory: Path

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment and wait for its end."""
        return subprocess.run(
            [self.program(arguments[0]), *arguments[1:]],
            env=self.environment(),
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )

    def program(self, name: str) -> str:
        return str(self.directory / "bin" / name)

    def environment(self) -> dict[str, str]:
        """Return an environment without the variables of this process that could change the
        output.
        """
        home = str(self.directory)
        return {"PATH": os.environ["PATH"], "HOME": home, "XDG_RUNTIME_DIR": home}

    def complaint(self, *arguments: str) -> str:
        """Return the one sentence that `kvferry` prints on stderr about a wrong setting; checks
        exit code 2.
        """
        done = self.run("kvferry", *arguments)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done
        return done.stderr.strip()


@contextmanager
def installed(wheel: Path, extra: str, *packages: str) -> Iterator[Installation]:
    """Make an environment with the wheel, with `packages` (without their requirements), and with
    the requirements of the wheel and this extra, except NIXL. Remove it at the end: NIXL or torch
    takes hundreds of megabytes.
    """
    with tempfile.TemporaryDirectory(prefix="kvferry-wheel-") as name:
        directory = Path(name)
        # The new environment has no pip; the pip of the test's environment installs into it.
        venv = [sys.executable, "-m", "venv", "--without-pip", name]
        subprocess.run(venv, check=True, timeout=COMMAND_S)
        _pip_install(directory, "--no-deps", str(wheel), *packages)
        wanted = [line for line in requirements(wheel, extra) if Requirement(line).name not in NIXL]
        _pip_install(directory, *wanted)
        yield Installation(directory)


def requirements(wheel: Path, extra: str) -> list[str]:
    """Return the requirements in the wheel's metadata: the base, and one extra ("": none)."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    found = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    return [
        f"{requirement.name}{requirement.specifier}"
        for requirement in found
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra})
    ]


def outer_environment() -> dict[str, str]:
    """Return this process's environment without PYTHONPATH, which would lead Python to other
    sources.
    """
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def _pip_install(directory: Path, *what: str) -> None:
    pip = [sys.executable, "-m", "pip", "--python", str(directory / "bin" / "python"), "install"]
    options = ["--quiet", "--no-compile", "--constraint", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, *options, *what], env=outer_environment(), check=True)


@contextmanager
def serving(installation: Installation, arguments: Sequence[str], listens: str) -> Iterator[str]:
    """Run a server and yield the address that it prints after `listens`. SIGTERM must end the
    server with exit code 0.
    """
    with subprocess.Popen(
        [installation.program("kvferry"), *arguments],
        env=installation.environment(),
        cwd=installation.directory,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            lines = (re.search(f"{listens} (http://[^\\s;]+)", line) for line in process.stdout)
            yield next(found[1] for found in lines if found)
            process.send_signal(signal.SIGTERM)
            assert process.wait(START_S) == 0
        finally:
            process.kill()


def get(url: str) -> bytes:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=START_S) as answer:
        body: bytes = answer.read()
    return body


# -- the built files --


def test_one_wheel_serves_all_versions_of_python_and_has_the_compiled_module(wheel: Path) -> None:
    assert f"kvferry-{__version__}-cp311-abi3-" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {
        "kvferry/py.typed",
        "kvferry/transports/copy/_copy.abi3.so",
        "kvferry/transports/copy/_copy.pyi",
        "kvferry/router/dashboard/index.html",
        "kvferry/router/dashboard/dashboard.js",
        "kvferry/router/dashboard/style.css",
        "kvferry/engine/default_model/config.json",
        "kvferry/engine/default_model/generation_config.json",
        "kvferry/engine/default_model/model.safetensors",
        "kvferry/engine/default_model/tokenizer.json",
        "kvferry/engine/default_model/tokenizer_config.json",
    } <= names
    assert [name for name in names if name.endswith(".c") or name.startswith("tests")] == []


def test_the_sdist_has_the_c_source_and_the_changelog_but_no_tests(distributions: Path) -> None:
    (path,) = distributions.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CHANGELOG.md", "LICENSE", "src/kvferry/transports/copy/_copy.c"} <= names
    assert [name for name in names if name.startswith("tests")] == []


# -- the connector alone --


@pytest.fixture(scope="module")
def connector(wheel: Path) -> Iterator[Installation]:
    with installed(wheel, "", *NIXL) as installation:
        yield installation


IMPORTS = """
import sys
from importlib.metadata import distributions, entry_points
import kvferry.connectors.nixl, kvferry.transports.registry, kvferry.vllm
from kvferry.transports.nixl.agent import load_nixl
from kvferry.types import MemoryKind
(plugin,) = entry_points(group="vllm.general_plugins", name="kvferry")
plugin.load()
load_nixl(MemoryKind.DRAM)
print(*sorted(distribution.name.lower() for distribution in distributions()))
"""


def test_the_connector_and_nixl_load_with_the_base_install(connector: Installation) -> None:
    done = connector.run("python", "-c", IMPORTS)
    assert done.stderr == ""
    installed = set(done.stdout.split()) - {"typing_extensions"}  # of blake3, on Python 3.11
    assert installed == {"blake3", "kvferry", "msgspec", "numpy", "pyzmq", *NIXL}


def test_the_version_is_that_of_the_package(connector: Installation) -> None:
    done = connector.run("kvferry", "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"kvferry {__version__}\n", "")


def test_the_doctor_reports_findings_with_the_base_install(connector: Installation) -> None:
    done = connector.run("kvferry", "doctor", "--json")
    assert done.stderr == ""
    findings = {finding["topic"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert findings["torch"]["level"] == "advice"
    assert findings["C module"]["level"] == "ok"
    assert "kvferry[router,engine,object,mooncake,tracing,all]" in findings["extras"]["text"]
    assert {"NIXL", "shared memory", "side channel", "secret"} <= set(findings)


def test_plan_runs_with_the_base_install(connector: Installation) -> None:
    done = connector.run(
        "kvferry", "plan", "--layers", "80", "--kv-heads", "8", "--head-dim", "128"
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_the_base_install(
    connector: Installation, command: str
) -> None:
    done = connector.run("kvferry", command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"usage: kvferry {command}" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (["proxy"], "router"),
        (["serve", "tiny"], "engine"),
        (["make-model", "tiny"], "engine"),
        (["up", "--once"], "all"),
        (["bench", "router"], "router"),
    ],
)
def test_a_missing_extra_is_one_sentence_with_the_command(
    connector: Installation, arguments: list[str], extra: str
) -> None:
    sentence = connector.complaint(*arguments)
    assert re.match(r"kvferry: `kvferry [a-z -]+` needs the packages ", sentence)
    assert sentence.endswith(f"install them with: pip install 'kvferry[{extra}]'")


# -- the router alone --


def test_the_router_serves_with_its_extra_alone(wheel: Path) -> None:
    with installed(wheel, "router") as router:
        with serving(router, ["proxy", "--port", "0"], "listens on") as address:
            assert json.loads(get(f"{address}/health"))["status"] == "ok"
            assert b"kvferry" in get(f"{address}/metrics")
            assert b"<html" in get(f"{address}/dashboard")
        assert "'kvferry[engine]'" in router.complaint("serve", "tiny")


# -- the engine alone --


@pytest.mark.exhaustive
def test_the_engine_serves_with_its_extra_alone(wheel: Path) -> None:
    with installed(wheel, "engine") as engine:
        assert engine.run("kvferry", "make-model", "tiny").returncode == 0
        with serving(engine, ["serve", "tiny", "--port", "0"], "serving tiny on") as address:
            assert json.loads(get(f"{address}/v1/models"))["data"][0]["id"] == "tiny"
            assert b"kvferry" in get(f"{address}/metrics")
        assert "'kvferry[all]'" in engine.complaint("up", "--once")
