"""Real vLLM servers of a fleet on this machine: their interpreter, their command lines, their GPUs
or cores, and what their log lines mean.

`kvferry up --vllm` and the benchmarks with real vLLM start servers with this module. Everything is
pure, except `probe_vllm`, which asks the interpreter of vLLM, and `free_ports`.
"""

import json
import os
import random
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.config.fields import shown
from kvferry.errors import ConfigError, KVFerryError
from kvferry.host_memory import available_bytes
from kvferry.types import Address

LOOPBACK = "127.0.0.1"
EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
LINUX_EPHEMERAL_PORTS = 32_768, 60_999
FIRST_PORT = 10_000
PROBE_S = 120.0


def free_ports(count: int) -> list[int]:
    """Return different ports that are free now; raise KVFerryError if there are not enough."""
    found: list[int] = []
    candidates = non_ephemeral_ports()
    for port in random.SystemRandom().sample(candidates, len(candidates)):
        if len(found) == count:
            return found
        with suppress(OSError), socket.create_server((LOOPBACK, port)):
            found.append(port)
    raise KVFerryError(
        f"{count} ports between {candidates.start} and {candidates.stop} are needed, but too few "
        "are free; stop the processes that listen there"
    )


def non_ephemeral_ports() -> range:
    """Return the ports outside the range from which this machine takes ports for outgoing
    connections: a port in that range could be taken between the check and its use.
    """
    try:
        first, last = map(int, EPHEMERAL_PORTS.read_text().split())
    except OSError:  # a sandbox may hide it
        first, last = LINUX_EPHEMERAL_PORTS
    below, above = range(FIRST_PORT, first), range(last + 1, 65_536)
    return max(below, above, key=len) or range(FIRST_PORT, 65_536)


def server_command(
    python: Path,
    model: str,
    served_name: str,
    port: int,
    flags: Sequence[str],
    transfer: Mapping[str, Any] | None,
) -> list[str]:
    """Return the command of one server on loopback; `transfer` None: without a connector."""
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--served-model-name", served_name, "--host", LOOPBACK, "--port", str(port), *flags]
    if transfer is not None:
        command += ["--kv-transfer-config", json.dumps(dict(transfer))]
    return command


def server_variables() -> dict[str, str]:
    """Return variables that every server gets."""
    return {"VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}


SOCKET_DIRECTORY_VARIABLE = "VLLM_RPC_BASE_PATH"
MAX_SOCKET_DIRECTORY_CHARS = 64
"""The kernel limits the path of a socket to 107 characters, and vLLM adds a UUID."""


def with_socket_directory(environ: Mapping[str, str], directory: Path) -> dict[str, str]:
    """Let vLLM make the sockets between its processes in this directory: vLLM does not remove them.

    The operator's own setting is kept. If the path is too long, vLLM uses the temporary directory.
    """
    if len(str(directory)) > MAX_SOCKET_DIRECTORY_CHARS:
        return dict(environ)
    return {SOCKET_DIRECTORY_VARIABLE: str(directory), **environ}


# -- the machine --


@dataclass(frozen=True, slots=True)
class Machine:
    """What vLLM's interpreter can use: GPUs, by the names that `CUDA_VISIBLE_DEVICES` takes, or the
    cores and the free memory of this machine.
    """

    gpus: tuple[str, ...]
    cores: tuple[int, ...]
    memory_bytes: int


_PROBE = """\
import importlib.util as util, json
specs = {name: util.find_spec(name) for name in ("vllm", "kvferry")}
# A folder of that name in the working directory is no package: it has no origin.
found = {name: bool(spec and spec.origin) for name, spec in specs.items()}
if all(found.values()):
    import torch
    found["gpus"] = torch.cuda.device_count()
print(json.dumps(found))
"""


def probe_vllm(python: Path, visible_devices: str | None) -> Machine:
    """Return this machine, with the GPUs that vLLM's interpreter sees.

    Raises ConfigError if the interpreter cannot be run, or has no vLLM or no kvferry.
    `visible_devices` is the operator's `CUDA_VISIBLE_DEVICES`.
    """
    advised = "name an interpreter that has vLLM and kvferry with --vllm-python"
    try:
        done = subprocess.run(
            [str(python), "-c", _PROBE], capture_output=True, timeout=PROBE_S, check=False
        )
    except OSError as error:
        raise ConfigError(
            f"--vllm-python {shown(str(python))} cannot be run as a Python interpreter "
            f"({error.strerror}); {advised}"
        ) from error
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"--vllm-python {python} did not report its packages within {PROBE_S:g} s; {advised}"
        ) from None
    try:
        # Packages may print lines of their own while they are imported.
        found = json.loads(_last_line(done.stdout))
    except ValueError:
        reason = _last_line(done.stderr) or f"exit code {done.returncode}"
        raise ConfigError(
            f"--vllm-python {python} did not report its packages ({reason}); {advised}"
        ) from None
    for package in ("vllm", "kvferry"):
        if not found[package]:
            raise ConfigError(
                f"{python} has no {package}; install it with `{python} -m pip install {package}`, "
                f"or {advised}"
            )
    names = [name.strip() for name in (visible_devices or "").split(",") if name.strip()]
    gpus = (names or [str(number) for number in range(found["gpus"])])[: found["gpus"]]
    return Machine(tuple(gpus), tuple(sorted(os.sched_getaffinity(0))), available_bytes())


def _last_line(output: bytes) -> str:
    return (output.decode(errors="replace").strip().splitlines() or [""])[-1]


# -- a fleet --


_CONFIGS = ("config.json", "params.json")
"""The configuration of a checkpoint in the layout of Hugging Face, and of Mistral."""
MAX_HUB_NAME_CHARS = 193
"""An owner and a name of at most 96 characters each."""
_NO_KEYS = "the router reaches the servers on loopback by plain HTTP and without a key"
_ONE_SERVER = "--prefill and --decode say how many servers are started"
_RANKS = "--prefill-tp and --decode-tp say how many GPUs each server gets"
_OTHER_SOURCES = {"--download-dir", "--load-format", "--config"}
"""Flags by which vLLM may load a model from elsewhere than the cache of the Hugging Face client."""
_REFUSED_FLAGS = {
    "--model": "--vllm names the model",
    "--served-model-name": "clients use the name of the model or of its folder",
    "--host": "all servers listen on loopback",
    "--port": "each server gets a free port, and --port is the router's",
    "--kv-transfer-config": "--mode, --connector and --transports choose the connector",
    "--tensor-parallel-size": _RANKS,
    "-tp": _RANKS,
    "--pipeline-parallel-size": _RANKS,
    "-pp": _RANKS,
    "--data-parallel-size": _ONE_SERVER,
    "-dp": _ONE_SERVER,
    "--api-key": _NO_KEYS,
    "--ssl-keyfile": _NO_KEYS,
    "--ssl-certfile": _NO_KEYS,
    "--uds": _NO_KEYS,
}


@dataclass(frozen=True, slots=True)
class VllmFleet:
    """The options of a fleet of vLLM servers."""

    model: str
    """A folder with a checkpoint, or a name on the hub."""
    prefill: int = 1
    decode: int = 1
    prefill_tp: int = 1
    decode_tp: int = 1
    connector: str = "NixlConnector"
    transports: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    """More flags for every server."""

    def __post_init__(self) -> None:
        self._check_flags()
        self._check_model()

    def _check_flags(self) -> None:
        """Refuse flags that contradict those of `kvferry up`: the start would fail, or the router
        would not reach the servers.
        """
        for flag in self.flags:
            name = re.split(r"[.=]", flag, maxsplit=1)[0]
            if name in _REFUSED_FLAGS:
                raise ConfigError(f"{name} cannot be given after `--`: {_REFUSED_FLAGS[name]}")

    def _check_model(self) -> None:
        advised = (
            "name a folder with a checkpoint in the layout of Hugging Face, or a model of the hub "
            "such as Qwen/Qwen3-0.6B"
        )
        looks_like_path = self.model.startswith(("/", ".", "~")) or self.model.endswith("/")
        try:
            is_path = looks_like_path or self.directory.exists()
            has_config = any((self.directory / name).is_file() for name in _CONFIGS)
        except OSError as error:
            raise ConfigError(
                f"--vllm {shown(self.model)} cannot be read ({error.strerror}); {advised}"
            ) from None
        if is_path and not has_config:
            raise ConfigError(f"--vllm {shown(self.model)} has no config.json; {advised}")
        is_name = len(self.model) <= MAX_HUB_NAME_CHARS or "://" in self.model
        if "\0" in self.model or not (is_path or is_name):
            raise ConfigError(
                f"--vllm {shown(self.model)} is neither a folder nor a name that the hub allows; "
                f"{advised}"
            )

    @property
    def directory(self) -> Path:
        return Path(self.model)

    @property
    def model_name(self) -> str:
        """The name that clients use for the model."""
        return self.directory.resolve().name if self.directory.is_dir() else self.model

    def hub_revision(self, environ: Mapping[str, str]) -> str | None:
        """The revision that the servers load from the cache of the Hugging Face client; None if a
        flag or a variable lets them load from elsewhere.
        """
        if environ.get("VLLM_USE_MODELSCOPE") or _OTHER_SOURCES & {*self._flag_names}:
            return None
        return self._value_of("--revision") or "main"

    @property
    def tokenizer_revision(self) -> str | None:
        """The revision of the tokenizer and its chat template on the hub; None: main."""
        return self._value_of("--tokenizer-revision") or self._value_of("--revision")

    @property
    def _flag_names(self) -> list[str]:
        # vLLM accepts both spellings.
        return [flag.partition("=")[0].replace("_", "-") for flag in self.flags]

    def _value_of(self, name: str) -> str | None:
        """The value of a flag; as in vLLM, the last one if there are several."""
        found = None
        for position, flag_name in enumerate(self._flag_names):
            if flag_name == name:
                _, has_value, value = self.flags[position].partition("=")
                found = value if has_value else "".join(self.flags[position + 1 : position + 2])
        return found or None

    @property
    def tp_sizes(self) -> dict[str, int]:
        """The TP size of each server by name, prefill servers first."""
        prefill = {f"prefill-{number}": self.prefill_tp for number in range(self.prefill)}
        return prefill | {f"decode-{number}": self.decode_tp for number in range(self.decode)}

    @property
    def transfer(self) -> dict[str, Any]:
        extra = {"transports": list(self.transports)} if self.transports else {}
        return {
            "kv_connector": self.connector,
            "kv_connector_module_path": "kvferry.vllm",
            "kv_role": "kv_both",
            **({"kv_connector_extra_config": extra} if extra else {}),
        }


@dataclass(frozen=True, slots=True)
class VllmProcess:
    """How to start one server of a fleet."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    address: Address
    place: str
    """The GPUs or cores of the server, for the operator."""
    waits_for_previous: bool = False
    """The server must not start before the previous one is ready: vLLM measures the free memory of
    the GPU while it starts.
    """


@dataclass(frozen=True, slots=True)
class _Place:
    text: str
    environment: Mapping[str, str]
    flags: tuple[str, ...] = ()
    is_shared_gpu: bool = False


def place_servers(
    fleet: VllmFleet, machine: Machine, python: Path, environ: Mapping[str, str]
) -> list[VllmProcess]:
    """Return the servers to start, prefill servers first.

    Raises ConfigError if the fleet does not fit onto the GPUs. Variables and flags of the operator
    override ours.
    """
    if environ.get("VLLM_API_KEY"):
        raise ConfigError(f"VLLM_API_KEY is set, but {_NO_KEYS}; unset it")
    sizes = fleet.tp_sizes
    places = (
        _on_gpus(sizes, machine.gpus) if machine.gpus else _on_cores(list(sizes.values()), machine)
    )
    ports = free_ports(len(sizes))
    servers: list[VllmProcess] = []
    for (name, tp_size), place, port in zip(sizes.items(), places, ports, strict=True):
        flags = [*place.flags, "--tensor-parallel-size", str(tp_size), *fleet.flags]
        model = str(fleet.directory) if fleet.directory.is_dir() else fleet.model
        own = {key: value for key, value in place.environment.items() if key not in _kept(environ)}
        servers.append(
            VllmProcess(
                name,
                tuple(server_command(python, model, fleet.model_name, port, flags, fleet.transfer)),
                {**server_variables(), **own},
                Address(LOOPBACK, port),
                place.text,
                waits_for_previous=place.is_shared_gpu and bool(servers),
            )
        )
    return servers


def _kept(environ: Mapping[str, str]) -> set[str]:
    """Variables in which the operator's value holds for every server."""
    return {name for name in environ if name.startswith("VLLM_")}


GPU_SHARE = 0.9
"""The share of a GPU's memory for all servers on it together, as vLLM's own default for one."""


def _on_gpus(sizes: Mapping[str, int], gpus: Sequence[str]) -> list[_Place]:
    """Give each server GPUs of its own; if there are too few, servers without TP share GPUs."""
    needed = sum(sizes.values())
    if needed > len(gpus) and max(sizes.values()) > 1:
        raise ConfigError(
            f"{len(sizes)} servers need {needed} GPUs, but {len(gpus)} are visible; start fewer "
            "servers, or use a smaller --tensor-parallel-size"
        )
    places: list[_Place] = []
    for number, tp_size in enumerate(sizes.values()):
        if needed <= len(gpus):
            first = sum(list(sizes.values())[:number])
            names = gpus[first : first + tp_size]
            places.append(_Place(f"GPU {','.join(names)}", _visible(names)))
            continue
        gpu = number % len(gpus)
        num_sharing = len(range(gpu, len(sizes), len(gpus)))
        share = f"{GPU_SHARE / num_sharing:.2f}"
        text = f"GPU {gpus[gpu]}, shared by {num_sharing} servers, {share} of its memory"
        flags = ("--gpu-memory-utilization", share)
        places.append(_Place(text, _visible(gpus[gpu : gpu + 1]), flags, num_sharing > 1))
    return places


def _visible(gpus: Sequence[str]) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}


MAX_CPU_CACHE_GIB = 4


def _on_cores(sizes: Sequence[int], machine: Machine) -> list[_Place]:
    """Give each rank cores of its own; if there are too few, ranks share cores."""
    cores, num_ranks = machine.cores, sum(sizes)
    each = max(1, len(cores) // num_ranks)
    gib = max(1, min(MAX_CPU_CACHE_GIB, machine.memory_bytes // (4 * num_ranks) >> 30))
    places, rank = [], 0
    for tp_size in sizes:
        lists = []
        for _ in range(tp_size):
            mine = [cores[(rank * each + number) % len(cores)] for number in range(each)]
            lists.append(",".join(map(str, mine)))
            rank += 1
        environment = {
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(lists),
            "VLLM_CPU_KVCACHE_SPACE": str(gib),
        }
        places.append(_Place(f"cores {'|'.join(lists)}, {gib} GiB of KV cache", environment))
    return places


# -- log lines --


_STAGES = (
    (r"Application startup complete|Started server process", "opening the API"),
    (r"Capturing CUDA graph|[Gg]raph capturing", "capturing CUDA graphs"),
    (r"KV cache size|init engine", "allocating the KV cache"),
    (r"vLLM's torch\.compile|Compiling a graph|Dynamo bytecode|[Ww]arming up", "compiling"),
    (r"Loading weights took|Model loading took", "loaded the weights"),
    (r"Loading \w+ checkpoint shards:\s*(\d+%)", "loading weights"),
    (r"[Ss]tarting to load model|[Ll]oading (?:model )?weights", "loading weights"),
    (r"Downloading|Fetching \d+ files", "downloading the model"),
    (r"Initializing a V1 LLM engine", "starting the engine"),
)


def stage(lines: Sequence[str]) -> str:
    """Return the phase that a starting server is in, from its last log lines."""
    for line in reversed(lines):
        for pattern, name in _STAGES:
            found = re.search(pattern, line)
            if found:
                return f"{name} {found[1]}" if found.groups() else name
    return "importing vLLM"


_ADVICE = (
    (
        r"is not a valid model identifier|Repo id must|RepositoryNotFound|LocalEntryNotFound"
        r"|outgoing traffic has been disabled|couldn't connect to|gated repo",
        "check the model's name; a gated model needs HF_TOKEN, a machine without the hub a folder",
    ),
    (r"[Aa]ddress already in use", "another process took the server's port; start again"),
    (
        r"out of memory|No available memory for the cache|less than desired GPU memory"
        r"|larger than the maximum number of tokens|KV cache is needed",
        "the memory is too small; start fewer servers, or pass for example "
        "`-- --max-model-len 8192`, --gpu-memory-utilization or VLLM_CPU_KVCACHE_SPACE",
    ),
    (r"unrecognized arguments|error: argument", "vLLM does not accept a flag after `--`"),
)


def explain(lines: Sequence[str]) -> list[str]:
    """Return why a server has ended, and what the operator can do; each only if it is known."""
    # The engine process reports the cause; the API process only reports that the engine failed.
    causes = (re.search(r"\b(?:\w+Error|error): .+", line) for line in lines)
    cause = next((found[0] for found in causes if found), "")
    text = "\n".join(lines)
    advice = next((words for pattern, words in _ADVICE if re.search(pattern, text)), "")
    return [words for words in (cause, advice) if words]
