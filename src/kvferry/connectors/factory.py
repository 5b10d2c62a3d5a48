"""The registry that finds connector classes by name. A connector's module is imported only on
demand.
"""

import difflib
import importlib
import inspect
from dataclasses import dataclass

from kvferry.config import KVTransferConfig
from kvferry.connectors.contract import (
    ConnectorConfig,
    KVCacheConfig,
    KVConnectorBase_V1,
    KVConnectorRole,
    supports_hma,
)
from kvferry.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _RegisteredConnector:
    """Where a registered connector class is defined."""

    module: str
    class_name: str


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
        connector_class = cls.get_connector_class(config.kv_transfer)
        if kv_cache_config.has_states and not connector_class.moves_states:
            raise ConfigError(
                f"{config.kv_transfer.kv_connector} does not support models with state-space or "
                "linear-attention layers; NixlConnector and NixlPushConnector do"
            )
        groups = kv_cache_config.groups
        is_hybrid = len(groups) > 1 or any(group.has_local_attention for group in groups)
        if is_hybrid and not supports_hma(connector_class):
            raise ConfigError(
                f"{config.kv_transfer.kv_connector} does not support models with windows or "
                "several KV-cache groups; choose a connector "
                "that implements SupportsHMA"
            )
        return connector_class(config, role, kv_cache_config)

    @classmethod
    def get_connector_class(cls, transfer: KVTransferConfig) -> type[KVConnectorBase_V1]:
        name = transfer.kv_connector
        if transfer.kv_connector_module_path is not None:
            return _load(
                _RegisteredConnector(transfer.kv_connector_module_path, name),
                "kv_connector_module_path",
            )
        return cls.get_connector_class_by_name(name)

    @classmethod
    def get_connector_class_by_name(cls, name: str) -> type[KVConnectorBase_V1]:
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


def _load(entry: _RegisteredConnector, key: str) -> type[KVConnectorBase_V1]:
    """Import the module and check that the class is a connector with the expected constructor."""
    try:
        module = importlib.import_module(entry.module)
    # TypeError: the path begins with a dot, as if it were relative to a package.
    except (ImportError, TypeError) as error:
        raise ConfigError(
            f"{key}: module {entry.module!r} cannot be imported ({error}); check the path and the "
            "installation"
        ) from None
    found = getattr(module, entry.class_name, None)
    if not isinstance(found, type) or not issubclass(found, KVConnectorBase_V1):
        raise ConfigError(
            f"{key}: {entry.module} has no connector class {entry.class_name!r}; it must subclass "
            "KVConnectorBase_V1"
        )
    if "kv_cache_config" not in inspect.signature(found).parameters:
        raise ConfigError(
            f"{key}: the constructor of {entry.class_name} must take (config, role, "
            "kv_cache_config)"
        )
    return found


KVConnectorFactory.register_connector("NixlConnector", "kvferry.connectors.nixl", "NixlConnector")
KVConnectorFactory.register_connector(
    "NixlPullConnector", "kvferry.connectors.nixl", "NixlConnector"
)
KVConnectorFactory.register_connector(
    "NixlPushConnector", "kvferry.connectors.nixl", "NixlPushConnector"
)
KVConnectorFactory.register_connector(
    "P2pNcclConnector", "kvferry.connectors.nixl", "P2pNcclConnector"
)
KVConnectorFactory.register_connector(
    "MooncakeConnector", "kvferry.connectors.nixl", "MooncakeConnector"
)
KVConnectorFactory.register_connector(
    "OffloadingConnector", "kvferry.connectors.offloading.connector", "OffloadingConnector"
)
KVConnectorFactory.register_connector(
    "MultiConnector", "kvferry.connectors.multi.connector", "MultiConnector"
)
KVConnectorFactory.register_connector(
    "ExampleConnector", "kvferry.connectors.example", "ExampleConnector"
)
KVConnectorFactory.register_connector(
    "DecodeBenchConnector", "kvferry.connectors.decode_bench", "DecodeBenchConnector"
)
