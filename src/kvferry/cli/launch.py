"""Which processes make a cluster on one machine: their command lines and environments. Pure."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvferry.errors import ConfigError
from kvferry.types import Address

__all__ = ["CONNECTORS", "Launch", "LocalLaunch", "UpOptions", "child_environment"]

LOOPBACK = "127.0.0.1"
TINY = "tiny"
CONNECTORS = {"pull": "NixlConnector", "push": "NixlPushConnector"}
"""By `--mode`."""
GPU_CACHE_BYTES = "1G"


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What `kvferry up` was asked for."""

    prefill: int = 1
    decode: int = 1
    model: Path | None = None
    """None: a tiny one is made for the occasion."""
    port: int = 8000
    transports: tuple[str, ...] = ()
    """Empty: the best that works here."""
    tensor_parallel_size: int = 1
    mode: str = "pull"
    device: str = "cpu"

    def __post_init__(self) -> None:
        for flag, value in (("--prefill", self.prefill), ("--decode", self.decode), ("--tensor-parallel-size", self.tensor_parallel_size)):
            if value < 1:
                raise ConfigError(f"{flag} must be at least 1, got {value}")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"--port must be from 0 to 65535, got {self.port}")
        if self.model is not None and not self.model.is_dir():
            raise ConfigError(f"--model {self.model} is not a directory; name a folder with config.json and safetensors, or leave it out")

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        return TINY if self.model is None else self.model.resolve().name


class Launch(Protocol):
    """The command lines of one cluster."""

    def engine(self) -> Sequence[str]: ...

    def router(self, prefillers: Sequence[Address], decoders: Sequence[Address]) -> Sequence[str]: ...


@dataclass(frozen=True, slots=True)
class LocalLaunch:
    """Embedded engines that take any free port, and a router on the one the user asked for."""

    options: UpOptions
    model: Path

    def engine(self) -> list[str]:
        extra = {"kv_connector_extra_config": {"transports": list(self.options.transports)}} if self.options.transports else {}
        transfer = {"kv_connector": CONNECTORS[self.options.mode], "kv_role": "kv_both", **extra}
        return [
            *_kvferry("serve", str(self.model), "--host", LOOPBACK, "--port", "0"),
            *("--served-model-name", self.options.model_name),
            *("--tensor-parallel-size", str(self.options.tensor_parallel_size)),
            *self._device(),
            # Peers that could fetch what an engine keeps end together with it.
            *("--drain-timeout", "0"),
            *("--kv-transfer-config", json.dumps(transfer)),
        ]

    def _device(self) -> list[str]:
        """Engines that share a GPU must not each take what is left of it."""
        device = self.options.device
        return [] if device == "cpu" else ["--device", device, "--kv-cache-memory-bytes", GPU_CACHE_BYTES]

    def router(self, prefillers: Sequence[Address], decoders: Sequence[Address]) -> list[str]:
        command = _kvferry("proxy", "--host", LOOPBACK, "--port", str(self.options.port))
        for name, addresses in (("prefiller", prefillers), ("decoder", decoders)):
            command += [f"--{name}-hosts", *(address.host for address in addresses)]
            command += [f"--{name}-ports", *(str(address.port) for address in addresses)]
        return command

    def make_model(self) -> list[str]:
        """With as many KV heads as there are ranks, where the usual two are too few."""
        ranks = self.options.tensor_parallel_size
        return _kvferry("make-model", str(self.model), *(("--heads", str(2 * ranks)) if ranks > 2 else ()))


def child_environment(environ: Mapping[str, str], secret_file: Path) -> dict[str, str]:
    """Side channels take any free port of the loopback; the secret is the operator's, or one for this cluster alone."""
    own = {
        "KVFERRY_SIDE_CHANNEL_HOST": LOOPBACK,
        "KVFERRY_SIDE_CHANNEL_BIND": LOOPBACK,
        "KVFERRY_SIDE_CHANNEL_PORT": "0",
        "PYTHONUNBUFFERED": "1",
    }
    if not environ.get("KVFERRY_SECRET") and not environ.get("KVFERRY_SECRET_FILE"):
        own["KVFERRY_SECRET_FILE"] = str(secret_file)
    return {**environ, **own}


def _kvferry(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvferry", *arguments]
