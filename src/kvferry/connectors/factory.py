"""The registry that finds connectors by name. A connector's module is imported only on demand.

A name stands for a `ConnectorDescription`, or for a subclass of `KVConnectorBase_V1`.
"""

import difflib
import importlib
import inspect
from dataclasses import dataclass

from kvferry.config import KVTransferConfig
from kvferry.connectors.connector import Connector
from kvferry.connectors.contract import (
    ConnectorConfig,
    ConnectorDescription,
    KVCacheConfig,
    KVConnectorBase_V1,
    KVConnectorRole,
    supports_hma,
)
from kvferry.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _RegisteredConnector:
    """Where a registered connector is defined."""

    module: str
    name: str


class KVConnectorFactory:
    """The registry of connector names. A module path in the configuration takes precedence."""

    _registry: dict[str, _RegisteredConnector] = {}  # noqa: RUF012  shared on purpose

    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None:
        if name in cls._registry:
            raise ValueError(f"connector {name} is already registered")
        cls._registry[name] = _RegisteredConnector(module_path, class_name)

    @classmethod
    def registered_names(cls) -> list[str]:
        return sorted(cls._registry)

    @classmethod
    def create_connector(
        cls, config: ConnectorConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> KVConnectorBase_V1:
        """Build the configured connector; `ConfigError` if it cannot serve this cache."""
        description = cls.describe_for(config.kv_transfer, kv_cache_config)
        found = cls._find(config.kv_transfer)
        if isinstance(found, type):
            return found(config, role, kv_cache_config)
        return Connector(description, config, role, kv_cache_config)

    @classmethod
    def describe(cls, transfer: KVTransferConfig) -> ConnectorDescription:
        """The configured connector."""
        found = cls._find(transfer)
        if isinstance(found, type):
            return _description_of(found)
        return found if found.configured is None else found.configured(transfer)

    @classmethod
    def describe_for(cls, transfer: KVTransferConfig, cache: KVCacheConfig) -> ConnectorDescription:
        """The configured connector; `ConfigError` if it cannot serve this cache."""
        description = cls.describe(transfer)
        check_cache(transfer.kv_connector, description, cache)
        return description

    @classmethod
    def _find(cls, transfer: KVTransferConfig) -> ConnectorDescription | type[KVConnectorBase_V1]:
        name = transfer.kv_connector
        if transfer.kv_connector_module_path is not None:
            return _load(
                _RegisteredConnector(transfer.kv_connector_module_path, name),
                "kv_connector_module_path",
            )
        entry = cls._registry.get(name)
        if name in ONLY_IN_VLLM and entry is None:
            raise ConfigError(
                f"kv_connector {name} is a connector of vLLM and does not run in this engine; "
                f"inside vLLM it needs {ONLY_IN_VLLM[name]}, and kvferry's MultiConnector combines "
                "it with ours (docs/connectors.md); here use OffloadingConnector or NixlConnector"
            )
        if entry is None:
            raise ConfigError(
                f"kv_connector {name!r} is not known; {_suggestion(name, cls.registered_names())}"
            )
        return _load(entry, "kv_connector")


def check_cache(name: str, description: ConnectorDescription, cache: KVCacheConfig) -> None:
    """Raise `ConfigError` if the connector cannot serve this cache."""
    if cache.has_states and not description.moves_states:
        raise ConfigError(
            f"{name} does not support models with state-space or linear-attention layers; "
            "NixlConnector and NixlPushConnector do"
        )
    is_hybrid = len(cache.groups) > 1 or any(group.has_local_attention for group in cache.groups)
    if is_hybrid and not description.supports_hma:
        raise ConfigError(
            f"{name} does not support models with windows or several KV-cache groups; choose a "
            "connector that implements SupportsHMA"
        )


def _description_of(found: type[KVConnectorBase_V1]) -> ConnectorDescription:
    """A connector class as a pair of sides, each of which is an instance of the class."""
    return ConnectorDescription(
        lambda config, cache: found(config, KVConnectorRole.SCHEDULER, cache),
        lambda config, cache: found(config, KVConnectorRole.WORKER, cache),
        honours_token_range=found.honours_token_range,
        loads_are_optional=found.loads_are_optional,
        provides_dummy_kv=found.provides_dummy_kv,
        moves_states=found.moves_states,
        supports_hma=supports_hma(found),
        opens_side_channel=found.opens_side_channel,
        needs_polling=found.set_wakeup is KVConnectorBase_V1.set_wakeup,
        required_layout=found.get_required_kvcache_layout,
    )


ONLY_IN_VLLM = {
    "LMCacheConnectorV1": "the package lmcache (pip install lmcache)",
    "LMCacheMPConnector": "the package lmcache (pip install lmcache) and a running lmcache server",
    "MoRIIOConnector": "AMD GPUs and AMD's package mori",
    "SimpleCPUOffloadConnector": "a GPU",
    "MooncakeStoreConnector": "the package mooncake-transfer-engine and its master",
    "FlexKVConnectorV1": "the package flexkv",
    "HF3FSKVConnector": "the package hf3fs_fuse",
}
"""Connectors that only vLLM can load, with what they need there. An operator who names one of them
has not mistyped a name of ours.
"""


def _suggestion(name: str, names: list[str]) -> str:
    """The end of the error message for an unknown name."""
    near = difflib.get_close_matches(name, [*names, *ONLY_IN_VLLM], n=1)
    hint = f"did you mean {near[0]}?" if near else f"available: {', '.join(names)}"
    return f"{hint} (to load a connector of your own, set kv_connector_module_path)"


def _load(entry: _RegisteredConnector, key: str) -> ConnectorDescription | type[KVConnectorBase_V1]:
    """Import the module and check that it has the connector; a class must have the expected
    constructor.
    """
    try:
        module = importlib.import_module(entry.module)
    # TypeError: the path begins with a dot, as if it were relative to a package.
    except (ImportError, TypeError) as error:
        raise ConfigError(
            f"{key}: module {entry.module!r} cannot be imported ({error}); check the path and the "
            "installation"
        ) from None
    found = getattr(module, entry.name, None)
    if isinstance(found, ConnectorDescription):
        return found
    if not isinstance(found, type) or not issubclass(found, KVConnectorBase_V1):
        raise ConfigError(
            f"{key}: {entry.module} has no connector class {entry.name!r}; it must be a "
            "ConnectorDescription or subclass KVConnectorBase_V1"
        )
    if "kv_cache_config" not in inspect.signature(found).parameters:
        raise ConfigError(
            f"{key}: the constructor of {entry.name} must take (config, role, kv_cache_config)"
        )
    return found


for _name, _module, _attribute in (
    ("NixlConnector", "nixl", "NixlConnector"),
    ("NixlPullConnector", "nixl", "NixlConnector"),
    ("NixlPushConnector", "nixl", "NixlPushConnector"),
    ("P2pNcclConnector", "nixl", "P2pNcclConnector"),
    ("MooncakeConnector", "nixl", "MooncakeConnector"),
    ("OffloadingConnector", "offloading.connector", "OffloadingConnector"),
    ("MultiConnector", "multi.connector", "MultiConnector"),
    ("ExampleConnector", "example", "ExampleConnector"),
    ("DecodeBenchConnector", "decode_bench", "DecodeBenchConnector"),
):
    KVConnectorFactory.register_connector(_name, f"kvferry.connectors.{_module}", _attribute)
