"""Tests what each extra installs, which modules import without extras, and the error for a missing
package.
"""

import importlib.util
import re
import subprocess
import sys
import tomllib
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from kvferry.cli.bench import BENCHMARKS
from kvferry.cli.extras import EXTRAS
from kvferry.cli.main import COMMANDS, main

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
IMPORT_NAMES = {
    "mooncake_transfer_engine_non_cuda": "mooncake",
    "opentelemetry_exporter_otlp_proto_http": "opentelemetry.exporter.otlp.proto.http",
    "opentelemetry_sdk": "opentelemetry.sdk",
}
"""Of packages whose names differ from it."""
OPTIONAL = sorted(
    {package.partition(".")[0] for packages in EXTRAS.values() for package in packages}
)


def installed_by(extra: str) -> set[str]:
    """Return the packages that pip installs for an extra, by their import names."""
    requirements = [Requirement(line) for line in PROJECT["optional-dependencies"][extra]]
    return {
        package
        for requirement in requirements
        for package in (
            set().union(*map(installed_by, requirement.extras))
            if requirement.name == "kvferry"
            else {_import_name(requirement)}
        )
    }


def _import_name(requirement: Requirement) -> str:
    name = requirement.name.replace("-", "_")
    return IMPORT_NAMES.get(name, name)


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Packages that the test adds to this set appear not to be installed."""
    names: set[str] = set()
    find = importlib.util.find_spec

    def find_visible(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name in names else find(name, package)

    monkeypatch.setattr("kvferry.cli.extras.find_spec", find_visible)
    return names


def test_the_base_install_asks_for_four_packages() -> None:
    names = [Requirement(line).name for line in PROJECT["dependencies"]]
    assert names == ["blake3", "msgspec", "nixl", "numpy", "pyzmq"]


def test_the_check_knows_the_packages_of_every_extra() -> None:
    assert {extra: set(packages) for extra, packages in EXTRAS.items()} == {
        extra: installed_by(extra) for extra in EXTRAS
    }
    assert "torch" in EXTRAS["engine"]
    assert "torch" not in EXTRAS["router"]
    assert installed_by("dev") >= set(EXTRAS["all"])


def test_commands_and_benchmarks_name_extras_that_exist() -> None:
    named = {entry.extra for entry in COMMANDS.values()}
    named |= {entry.extra for entry in BENCHMARKS.entries.values()}
    # Settings, not commands, need the extras of tiers and of tracing.
    assert named == {None, *EXTRAS} - {"object", "mooncake", "tracing"}


@pytest.mark.parametrize(
    ("arguments", "package", "sentence"),
    [
        (
            ["proxy"],
            "uvloop",
            "kvferry: `kvferry proxy` needs the package uvloop, which is not installed; install "
            "it with: pip install 'kvferry[router]'\n",
        ),
        (
            ["up"],
            "rich",
            "kvferry: `kvferry up` needs the package rich, which is not installed; install it "
            "with: pip install 'kvferry[all]'\n",
        ),
        (
            ["bench", "transfer", "--device", "cuda"],
            "torch",
            "kvferry: `kvferry bench transfer --device cuda` needs the package torch, which is "
            "not installed; install it with: pip install 'kvferry[engine]'\n",
        ),
        (
            ["bench", "router"],
            "prometheus_client",
            "kvferry: `kvferry bench router` needs the package prometheus-client, which is not "
            "installed; install it with: pip install 'kvferry[router]'\n",
        ),
        (
            ["proxy", "--otlp-traces-endpoint", "http://localhost:4318"],
            "opentelemetry.sdk",
            "kvferry: `kvferry proxy --otlp-traces-endpoint` needs the package opentelemetry-sdk, "
            "which is not installed; install it with: pip install 'kvferry[tracing]'\n",
        ),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    arguments: list[str],
    package: str,
    sentence: str,
    hidden: set[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    hidden.add(package)
    assert main(arguments) == 2
    assert capsys.readouterr().err == sentence


def test_several_missing_packages_are_named_in_one_sentence(
    hidden: set[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    hidden |= {"tokenizers", "torch"}
    assert main(["make-model", str(tmp_path / "tiny")]) == 2
    assert capsys.readouterr().err == (
        "kvferry: `kvferry make-model` needs the packages tokenizers, torch, which are not "
        "installed; install them with: pip install 'kvferry[engine]'\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_argument_is_reported_before_a_missing_package(
    hidden: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    hidden.add("uvloop")
    assert main(["proxy", "--prot", "1"]) == 2
    assert "did you mean --port?" in capsys.readouterr().err


# Imports the modules named in the arguments, with a finder in front that refuses optional packages.
IMPORT_WITHOUT = """
import importlib, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {optional!r}:
            raise ModuleNotFoundError(f"import of {{name}}", name=name)
sys.meta_path.insert(0, Refuse())
for module in {modules!r}:
    importlib.import_module(module)
"""


def import_without_extras(*modules: str) -> subprocess.CompletedProcess[str]:
    code = IMPORT_WITHOUT.format(optional=OPTIONAL, modules=modules)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_the_connector_and_all_commands_import_without_any_extra() -> None:
    """The connector inside vLLM, and a command before it checks its extra, must not need any
    optional package.
    """
    connector = [
        "kvferry.vllm.plugin",
        "kvferry.connectors.nixl",
        "kvferry.connectors.factory",
        "kvferry.transports.registry",
        "kvferry.transports.cuda_ipc.transport",
        "kvferry.transports.nixl.bounce.transport",
    ]
    benchmarks = [entry.module for entry in BENCHMARKS.entries.values() if entry.extra is None]
    commands = [entry.module for entry in COMMANDS.values()]
    done = import_without_extras(*connector, *commands, *benchmarks)
    assert (done.returncode, done.stderr) == (0, "")


def test_that_check_sees_an_import_of_an_optional_package() -> None:
    done = import_without_extras("kvferry.router.server")
    assert re.search("import of (uvloop|prometheus_client)", done.stderr)
