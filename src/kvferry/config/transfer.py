"""`KVTransferConfig`: the settings of `--kv-transfer-config`. Pure, except for the random default
of `engine_id`.

The docstrings under the fields are copied into docs/configuration.md and into help texts.
"""

import dataclasses
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Annotated, Any, Self, get_type_hints

from msgspec import Meta

from kvferry.config.extra import (
    ExtraConfig,
    FreeExtraConfig,
    P2pNcclExtraConfig,
    extra_config_class,
    register_extra_config,
)
from kvferry.config.fields import (
    Bytes,
    Count,
    Flag,
    Natural,
    Port,
    Seconds,
    Settings,
    Text,
    check_fields,
    converted,
    refuse_unknown_keys,
    shown,
)
from kvferry.errors import ConfigError
from kvferry.types import FailurePolicy

OWN_PACKAGE = "kvferry"
MAX_ENGINE_ID_CHARS = 256


class KVRole(StrEnum):
    PRODUCER = "kv_producer"
    CONSUMER = "kv_consumer"
    BOTH = "kv_both"


class BufferDevice(StrEnum):
    """Where peers read and write KV."""

    AUTO = "auto"
    """The engine's own device."""
    CUDA = "cuda"
    CPU = "cpu"


@dataclass(frozen=True)
class KVTransferConfig:
    """One engine's part in KV transfer. Picklable; the derived `extra` does not take part in
    comparison.

    The class has more fields than the style allows because the JSON is one flat table, and because
    vLLM has keys that kvferry only accepts.
    """

    kv_connector: Text
    """The connector: NixlConnector (also called NixlPullConnector), NixlPushConnector,
    P2pNcclConnector, MooncakeConnector, MultiConnector, which combines several, or the class name
    of your own connector.
    """
    kv_role: KVRole
    """Whether this engine sends KV, receives KV, or does both."""
    kv_buffer_device: BufferDevice = BufferDevice.AUTO
    """Where peers read and write KV. auto, or the engine's own device: in the engine's cache. cpu
    with a cache on another device: in a host buffer of the same size, pinned if possible.
    """
    kv_connector_extra_config: Settings = field(default_factory=dict)
    """The connector's own settings; those of NixlConnector and MultiConnector are in the tables
    below.
    """
    kv_connector_module_path: Text | None = None
    """The Python module of your own connector."""
    engine_id: Text = field(default_factory=lambda: str(uuid.uuid4()))
    """The name of this engine in tickets, logs and metrics; unique in the cluster, printable,
    without spaces.
    """
    kv_load_failure_policy: FailurePolicy = FailurePolicy.FAIL
    """What to do when KV could not be fetched: fail the request, or recompute its prompt here."""
    enable_permute_local_kv: Flag = False
    """Accepted because vLLM has it; KV from a cache of another layout is always converted to this
    engine's layout.
    """
    kv_port: Port = 14579
    """Accepted because vLLM has it; no effect here."""
    kv_rank: Natural | None = None
    """Accepted because vLLM has it; no effect here."""
    kv_parallel_size: Count = 1
    """Accepted because vLLM has it; no effect here."""
    kv_buffer_size: Bytes | Text = 1e9
    """Accepted because vLLM had it, as a number or a text; no effect here: it is now a setting of
    P2pNcclConnector.
    """
    kv_ip: Text = "127.0.0.1"
    """Accepted because vLLM has it; no effect here: VLLM_NIXL_SIDE_CHANNEL_HOST sets the address of
    this engine.
    """
    extra: ExtraConfig = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_fields(self)
        if len(self.engine_id) > MAX_ENGINE_ID_CHARS:
            raise ConfigError(
                f"engine_id has {len(self.engine_id)} characters; use at most {MAX_ENGINE_ID_CHARS}"
            )
        if not self.engine_id.isprintable() or any(map(str.isspace, self.engine_id)):
            raise ConfigError(
                f"engine_id is {shown(self.engine_id)}, which has spaces or unprintable "
                "characters; remove them"
            )
        with _prefixed("kv_connector_extra_config."):
            extra = self._extra_class().from_mapping(
                self.kv_connector_extra_config, self.kv_connector
            )
        if isinstance(extra, MultiExtraConfig):
            extra = extra.under(self)
        if (
            isinstance(extra, P2pNcclExtraConfig)
            and extra.proxy_ip is not None
            and self.kv_role is KVRole.BOTH
        ):
            raise ConfigError(
                "kv_connector_extra_config.proxy_ip registers this engine with a router for one "
                "role, but kv_role is kv_both; set kv_role to kv_producer or kv_consumer"
            )
        object.__setattr__(self, "extra", extra)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Build the settings from decoded JSON. A `ConfigError` names the dotted key."""
        refuse_unknown_keys(
            mapping, [f.name for f in fields(cls) if f.init], "--kv-transfer-config"
        )
        for key, example in (("kv_connector", "NixlConnector"), ("kv_role", "kv_both")):
            if key not in mapping:
                raise ConfigError(
                    f'{key} is missing; set it in --kv-transfer-config, for example "{key}": '
                    f'"{example}"'
                )
        return cls(**mapping)

    @property
    def is_kv_producer(self) -> bool:
        return self.kv_role in (KVRole.PRODUCER, KVRole.BOTH)

    @property
    def is_kv_consumer(self) -> bool:
        return self.kv_role in (KVRole.CONSUMER, KVRole.BOTH)

    @property
    def connectors(self) -> "tuple[KVTransferConfig, ...]":
        """The connectors of a MultiConnector; otherwise this connector."""
        return self.extra.connectors if isinstance(self.extra, MultiExtraConfig) else (self,)

    def _extra_class(self) -> type[ExtraConfig]:
        """The settings class. A connector from another package checks its own settings, whatever
        its name.
        """
        path = self.kv_connector_module_path
        return (
            extra_config_class(self.kv_connector)
            if path is None or path.split(".")[0] == OWN_PACKAGE
            else FreeExtraConfig
        )


@dataclass(frozen=True)
class MultiExtraConfig(ExtraConfig):
    """Settings of MultiConnector."""

    connectors: Annotated[
        tuple[KVTransferConfig, ...], Meta(description="a list of objects, at least one")
    ] = ()
    """The connectors to combine, in order of preference: objects like --kv-transfer-config itself,
    without engine_id. A name without kv_connector_module_path means kvferry's own connector.
    """
    lookup_timeout: Seconds = 30.0
    """How long a connector may take to say what it can load for a request; then the request does
    not load from that connector.
    """

    def __post_init__(self) -> None:
        timeout_s = converted("lookup_timeout", self.lookup_timeout, Seconds)
        object.__setattr__(self, "lookup_timeout", timeout_s)
        if not self.connectors:
            raise ConfigError(
                "connectors must list at least one connector; add one with its kv_connector and "
                "kv_role"
            )

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], connector: str) -> Self:
        refuse_unknown_keys(mapping, [f.name for f in fields(cls)], connector)
        listed = mapping.get("connectors", ())
        if not isinstance(listed, (list, tuple)):
            raise ConfigError(f"connectors must be a list of objects, got {shown(listed)}")
        children = tuple(_child(index, child) for index, child in enumerate(listed))
        return cls(**{**mapping, "connectors": children})

    def under(self, parent: KVTransferConfig) -> Self:
        """The same settings with the engine id and the failure policy that all connectors of a
        MultiConnector share.
        """
        listed = parent.kv_connector_extra_config["connectors"]
        for index, child in enumerate(self.connectors):
            policy = listed[index].get("kv_load_failure_policy", parent.kv_load_failure_policy)
            if policy != parent.kv_load_failure_policy:
                raise ConfigError(
                    f"kv_connector_extra_config.connectors[{index}].kv_load_failure_policy is "
                    f"{policy}, but an engine has one policy for all loads, and it is "
                    f"{parent.kv_load_failure_policy}; set it beside kv_connector MultiConnector"
                )
            # The engine protects its blocks as its own role demands.
            if child.kv_role not in (parent.kv_role, *_parts_of(parent.kv_role)):
                raise ConfigError(
                    f"kv_connector_extra_config.connectors[{index}].kv_role is {child.kv_role}, "
                    f"but that of the MultiConnector is {parent.kv_role}; give the MultiConnector "
                    "the kv_role kv_both"
                )
        return dataclasses.replace(
            self,
            connectors=tuple(
                dataclasses.replace(
                    child,
                    engine_id=parent.engine_id,
                    kv_load_failure_policy=parent.kv_load_failure_policy,
                )
                for child in self.connectors
            ),
        )


register_extra_config("MultiConnector", MultiExtraConfig)


def kind_of_setting(path: Sequence[str], connector: str) -> Any:
    """The kind of value (see `fields`) that a dotted key takes; None for an unknown key."""
    if len(path) == 2 and path[0] == "kv_connector_extra_config":
        owner: type = extra_config_class(connector)
    elif len(path) == 1:
        owner = KVTransferConfig
    else:
        return None
    is_key = owner is not FreeExtraConfig and any(
        f.name == path[-1] and f.init for f in fields(owner)
    )
    return get_type_hints(owner, include_extras=True)[path[-1]] if is_key else None


def _parts_of(role: KVRole) -> tuple[KVRole, ...]:
    return (KVRole.PRODUCER, KVRole.CONSUMER) if role is KVRole.BOTH else ()


def _child(index: int, child: object) -> KVTransferConfig:
    if not isinstance(child, Mapping):
        raise ConfigError(f"connectors[{index}] must be an object, got {shown(child)}")
    with _prefixed(f"connectors[{index}]."):
        if "engine_id" in child:
            raise ConfigError(
                "engine_id cannot be set here, because all connectors of a MultiConnector share "
                "its engine_id; remove it"
            )
        if child.get("kv_connector") == "MultiConnector":
            raise ConfigError(
                "kv_connector cannot be MultiConnector inside a MultiConnector; list its "
                "connectors here instead"
            )
        return KVTransferConfig.from_mapping(child)


@contextmanager
def _prefixed(path: str) -> Iterator[None]:
    """Put the path in front of the key with which a `ConfigError` from inside starts."""
    try:
        yield
    except ConfigError as error:
        raise type(error)(f"{path}{error}") from None
