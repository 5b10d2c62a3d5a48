"""The files under deploy/: they parse, fit Kubernetes' schemas, and name flags, variables, settings
and paths that exist.
"""

import itertools
import json
import re
import shlex
import shutil
import subprocess
import tomllib
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from tests.e2e.harness import Cluster

from kvferry.cli.arguments import dashed, split_transfer_arguments
from kvferry.cli.main import COMMANDS, make_parser
from kvferry.config import KVTransferConfig
from kvferry.engine.make_model.writer import make_model
from kvferry.router.config_file import read_config_file
from kvferry.router.fleet.services import ServiceName

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
BASE = KUBERNETES / "base"
KUSTOMIZATIONS = ["base", "overlays/cpu-trial"]
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
SCHEMA_VERSION = "1.32"
ROUTER_TOML = (BASE / "router.toml").read_text()


@cache
def rendered(name: str) -> tuple[dict[str, Any], ...]:
    """The resources that `kubectl apply -k` would send."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed; it renders the manifests")
    command = ["kubectl", "kustomize", str(KUBERNETES / name)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def documented(folder: Path) -> list[dict[str, Any]]:
    """What the kustomization.yaml in docs/deployment.md makes of the base."""
    shutil.copytree(KUBERNETES, folder / "kvferry" / "deploy" / "kubernetes")
    page = (ROOT / "docs" / "deployment.md").read_text()
    (folder / "kustomization.yaml").write_text(page.split("```yaml\n")[1].split("```")[0])
    command = ["kubectl", "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def deployments(name: str) -> dict[str, dict[str, Any]]:
    """The pod specs of the deployments by name."""
    return {
        found["metadata"]["name"]: found["spec"]["template"]["spec"]
        for found in rendered(name)
        if found["kind"] == "Deployment"
    }


def containers(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for deployment, spec in deployments(name).items():
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            yield deployment, container


def kvferry_commands() -> list[list[str]]:
    """Every command line of kvferry in manifests, units and image files, without `kvferry`."""
    found: list[list[str]] = []
    for name in KUSTOMIZATIONS:
        for _, container in containers(name):
            words = [*container.get("command", ["kvferry"]), *container["args"]]
            hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {})
            found += [words, list(hook.get("command", ()))]
    for unit in UNITS:
        text = unit.read_text().replace("\\\n", " ").replace("%i", "prefill")
        text = text.replace("${PORT}", "8000").replace("${URL}", "http://h:1")
        text = text.replace("$ROUTER", "http://h:1 http://h:2")
        lines = re.findall(r"^Exec(?:Start|Stop)=/\S+/(.*)$", text, re.MULTILINE)
        found += [shlex.split(line) for line in lines]
    for image in ("router", "engine"):
        text = (DEPLOY / "docker" / f"Dockerfile.{image}").read_text()
        found.append(["kvferry", *json.loads(text.rpartition("CMD ")[2])])
    return [words[1:] for words in found if words and words[0] == "kvferry"]


@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_every_resource_fits_the_schema_of_kubernetes(name: str) -> None:
    validate = pytest.importorskip(
        "kubernetes_validate", reason="needs kubernetes-validate, from the extra [dev]"
    )
    kinds = [found["kind"] for found in rendered(name)]
    assert {"Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"} <= set(kinds)
    for resource in rendered(name):
        validate.validate(resource, SCHEMA_VERSION, strict=True)


def test_the_documented_kustomization_adds_rdma_replicas_and_a_registry(tmp_path: Path) -> None:
    rendered("base")
    found = {
        resource["metadata"]["name"]: resource["spec"]
        for resource in documented(tmp_path)
        if resource["kind"] == "Deployment"
    }
    specs = {name: spec["template"]["spec"]["containers"][0] for name, spec in found.items()}
    assert {spec["image"] for spec in specs.values()} == {
        "REGISTRY/kvferry-router",
        "REGISTRY/kvferry-vllm",
    }
    for name in ("prefill", "decode"):
        assert found[name]["replicas"] == 3
        assert specs[name]["resources"]["limits"]["rdma/hca"] == "1"
        security = specs[name]["securityContext"]
        assert security["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
        # A process of another user would have no capability at all (kubernetes/kubernetes#56374).
        assert (security["runAsUser"], security["runAsNonRoot"]) == (0, False)
        assert not security["allowPrivilegeEscalation"]
    assert "add" not in specs["router"]["securityContext"]["capabilities"]


def test_every_command_of_kvferry_is_one_that_the_cli_accepts() -> None:
    commands = kvferry_commands()
    assert {words[0] for words in commands} == {
        *("proxy", "serve", "drain", "register", "make-model")
    }
    for name, *rest in commands:
        if COMMANDS[name].takes_transfer_config:
            split = split_transfer_arguments(rest)
            if "--help" in rest:
                continue
            KVTransferConfig.from_mapping(split.mapping or {})
            make_parser(name).parse(split.rest)
        else:
            make_parser(name).parse([dashed(word) for word in rest])


def test_settings_of_vllm_are_those_of_our_connector() -> None:
    texts = [path.read_text() for path in (*BASE.glob("*.yaml"), *UNITS)]
    found = [
        json.loads(text)
        for whole in texts
        for text in re.findall(r"--kv-transfer-config[= ]'?(\{.*?\})'?$", whole, re.MULTILINE)
    ]
    assert [config.get("kv_connector_module_path") for config in found].count("kvferry.vllm") == 3
    for config in found:
        assert KVTransferConfig.from_mapping(config).kv_connector == "NixlConnector"


def test_the_file_of_the_router_names_the_two_services() -> None:
    options = read_config_file(ROUTER_TOML, lambda path: "a-key")
    services = {
        found["metadata"]["name"]: found["spec"]
        for found in map(yaml.safe_load, _documents(BASE))
        if found["kind"] == "Service"
    }
    assert {service.role: service.name for service in options.services} == {
        "prefill": "prefill",
        "decode": "decode",
    }
    for service in options.services:
        assert isinstance(service, ServiceName)
        assert services[service.name]["clusterIP"] == "None"
        assert services[service.name]["ports"][0]["port"] == service.port


def _documents(folder: Path) -> list[str]:
    return [text for path in folder.glob("*.yaml") for text in path.read_text().split("\n---\n")]


def test_variables_in_manifests_and_units_are_those_that_kvferry_reads() -> None:
    named = set[str]()
    for path in (*KUBERNETES.rglob("*.yaml"), *UNITS):
        named |= set(re.findall(r"\bKVFERRY_[A-Z_]+\b", path.read_text()))
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    assert {"KVFERRY_SECRET_FILE", "KVFERRY_SIDE_CHANNEL_HOST"} <= named
    assert [name for name in sorted(named) if f'"{name}"' not in source] == []


def test_the_documented_secret_has_every_key_that_pods_read() -> None:
    page = (ROOT / "docs" / "deployment.md").read_text()
    command = next(line for line in page.splitlines() if "create secret generic" in line)
    texts = [ROUTER_TOML, *(path.read_text() for path in BASE.glob("*.yaml"))]
    read = {name for text in texts for name in re.findall(r"/etc/kvferry/keys/([\w-]+)", text)}
    assert set(re.findall(r"--from-file=(\S+)", command)) == read
    named = {name for text in texts for name in re.findall(r"secretName: ([\w-]+)", text)}
    assert named == {command.split()[4]}


def test_the_documented_jobs_of_prometheus_find_every_router_once_and_have_the_key() -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text()
    documented_jobs = yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])["scrape_configs"]
    jobs = {job["job_name"]: job for job in documented_jobs}
    example = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    assert set(jobs) == {job["job_name"] for job in example["scrape_configs"]}
    services = {
        f"{found['metadata']['name']}.{found['metadata']['namespace']}.svc": found["spec"]
        for found in rendered("base")
        if found["kind"] == "Service"
    }
    (pods,) = jobs["kvferry-router"]["dns_sd_configs"]
    (name,) = pods["names"]
    assert services[name]["clusterIP"] == "None"
    assert services[name]["publishNotReadyAddresses"]
    assert services[name]["selector"]["app.kubernetes.io/name"] == "router"
    assert pods["port"] == tomllib.loads(ROUTER_TOML)["port"]
    (listed,) = jobs["kvferry-engine"]["http_sd_configs"]
    host = urllib.parse.urlsplit(listed["url"])
    assert services[host.hostname or ""]["ports"][0]["port"] == (host.port or 80)
    key = "/etc/prometheus/kvferry/admin-key"
    for asks in (jobs["kvferry-router"], listed):
        assert asks["authorization"]["credentials_file"] == key
    # A job that follows annotations would have no key, and would scrape the engines twice.
    for found in rendered("base"):
        if found["kind"] == "Deployment":
            annotations = found["spec"]["template"]["metadata"].get("annotations", {})
            assert not [key for key in annotations if key.startswith("prometheus.io/")]


@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_a_pod_may_live_longer_than_its_drain(name: str) -> None:
    """SIGKILL comes after the grace period, which the preStop hook is part of."""
    shutdown_s = tomllib.loads(ROUTER_TOML)["timeouts"]["shutdown"]
    for deployment, container in containers(name):
        if "make-model" in container["args"]:
            continue
        words = [*container["args"], *_hook(container)]
        limits = [
            float(value)
            for flag in ("--timeout", "--shutdown-timeout", "--drain-timeout")
            for value in _values(words, flag)
        ]
        if deployment == "router":
            limits += [shutdown_s, float(_hook(container)[1])]
        grace_s = deployments(name)[deployment]["terminationGracePeriodSeconds"]
        assert 0 < sum(limits) < grace_s, deployment


@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_a_rollout_may_take_as_long_as_a_pod_needs_to_end_and_to_start(name: str) -> None:
    """The new pod waits for the GPU of the old one."""
    for found in rendered(name):
        if found["kind"] == "Deployment":
            spec = found["spec"]["template"]["spec"]
            probe = spec["containers"][0].get("startupProbe", {})
            start_s = probe.get("periodSeconds", 0) * probe.get("failureThreshold", 0)
            most_s = spec["terminationGracePeriodSeconds"] + start_s
            assert found["spec"]["progressDeadlineSeconds"] > most_s


@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_pods_have_the_keys_that_they_read_and_no_others(name: str) -> None:
    for deployment, spec in deployments(name).items():
        (keys,) = [volume["secret"] for volume in spec["volumes"] if "secret" in volume]
        mounted = {item["key"] for item in keys.get("items", [])}
        assert all(item["key"] == item["path"] for item in keys.get("items", []))
        # A volume without `items` has all keys of the secret.
        assert mounted == (set() if deployment == "router" else {"cluster-secret"}), deployment


def _hook(container: dict[str, Any]) -> list[str]:
    hook = container.get("lifecycle", {}).get("preStop", {})
    return list(hook.get("exec", {}).get("command", ()))


def _values(words: list[str], flag: str) -> list[str]:
    joined = [word.removeprefix(f"{flag}=") for word in words if word.startswith(f"{flag}=")]
    after = itertools.pairwise(words)
    return joined + [value for word, value in after if word == flag]


@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_no_container_has_more_rights_than_it_needs(name: str) -> None:
    for deployment, container in containers(name):
        security = container["securityContext"]
        assert not security["allowPrivilegeEscalation"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        if "vllm" not in container.get("command", ()):
            assert security["readOnlyRootFilesystem"], deployment
    for spec in deployments(name).values():
        assert spec["securityContext"]["runAsNonRoot"]
        assert not spec["automountServiceAccountToken"]


@pytest.mark.slow
def test_paths_of_probes_exist_on_real_processes(tmp_path: Path) -> None:
    make_model(tmp_path / "tiny")
    with Cluster(tmp_path, tmp_path / "tiny") as cluster:
        engine = cluster.serve("engine", is_plain=True).ready()
        for name, text in (("api-keys", "tenant key-of-tenant"), ("admin-keys", "key-of-admin")):
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o600)
        flags = [f"--{name}-file={tmp_path / f'{name}s'}" for name in ("api-key", "admin-key")]
        router = cluster.proxy([], [engine], *flags).ready()
        for name in KUSTOMIZATIONS:
            for deployment, container in containers(name):
                server = router if deployment == "router" else engine
                for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                    if kind in container:
                        path = container[kind]["httpGet"]["path"]
                        assert _status(server.url + path) in (200, 503), (deployment, path)


def _status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_image_files_copy_what_exists_and_install_extras_that_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    installed = set[str]()
    for path in (DEPLOY / "docker").glob("Dockerfile.*"):
        text = path.read_text()
        for source in re.findall(r"^COPY (?!--from)(\S+) ", text, re.MULTILINE):
            assert (ROOT / source).exists(), (path.name, source)
        installed |= set(re.findall(r"\$wheel\[(\w+)\]", text))
    assert installed == {"router", "engine"} & set(extras)


def test_an_image_gets_what_the_wheel_needs_and_nothing_else_of_the_checkout() -> None:
    """Keys, which docs/deployment.md makes in the working directory, must not get into an image."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    allowed = {rule[1:] for rule in rules if rule.startswith("!")}
    assert all((ROOT / name).exists() for name in allowed)
    assert allowed == {
        *("src", "CHANGELOG.md", "LICENSE", "MANIFEST.in", "README.md"),
        *("constraints.txt", "pyproject.toml", "setup.py"),
    }


SANDBOX = {
    "CapabilityBoundingSet": "",
    "ProtectSystem": "strict",
    "RestrictAddressFamilies": "AF_UNIX AF_INET AF_INET6 AF_NETLINK",
    "ProtectProc": "invisible",
    "SystemCallArchitectures": "native",
    **dict.fromkeys(
        (
            *("NoNewPrivileges", "ProtectHome", "PrivateTmp", "ProtectControlGroups"),
            *("ProtectKernelLogs", "ProtectKernelModules", "ProtectKernelTunables"),
            *("LockPersonality", "RestrictNamespaces", "RestrictRealtime", "RestrictSUIDSGID"),
        ),
        "yes",
    ),
}
NOT_FOR_ENGINES = {
    *("PrivateDevices", "DeviceAllow", "DevicePolicy", "ProtectClock"),  # GPUs and RDMA
    *("PrivateIPC", "PrivateUsers", "PrivateNetwork", "ProcSubset"),  # memory of other engines
    "MemoryDenyWriteExecute",  # kernels that are compiled
}


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_every_unit_is_sandboxed_as_far_as_its_devices_and_peers_allow(unit: Path) -> None:
    lines = unit.read_text().replace("\\\n", " ").splitlines()
    settings = dict(line.split("=", 1) for line in lines if re.match(r"\w+=", line))
    assert {name: settings.get(name) for name in SANDBOX} == SANDBOX
    if "LimitMEMLOCK" in settings:
        assert not NOT_FOR_ENGINES & settings.keys()
        assert settings["SystemCallFilter"].startswith("~")
        assert f"Environment=HOME=%C/{settings['CacheDirectory']}" in lines
    else:
        assert settings["PrivateDevices"] == settings["ProtectClock"] == "yes"
        assert settings["SystemCallFilter"] == "@system-service"


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    """The paths of the commands do not exist here, so /bin/true takes their place."""
    for unit in UNITS:
        text = re.sub(r"^(Exec\w+=)/\S+", r"\1/bin/true", unit.read_text(), flags=re.MULTILINE)
        (tmp_path / unit.name).write_text(text)
    names = [str(tmp_path / unit.name.replace("@.", "@prefill.")) for unit in UNITS]
    for name, unit in zip(names, UNITS, strict=True):
        if "@" in unit.name:
            Path(name).symlink_to(tmp_path / unit.name)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *names],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
