"""Refuses the secondary tiers that kvferry no longer has for vLLM's own OffloadingConnector."""

from typing import NoReturn

from kvferry.errors import ConfigError


def __getattr__(name: str) -> NoReturn:
    """vLLM imports the module that a command names and asks it for the tier's class."""
    if name in ("KVFerryDiskTier", "KVFerryObjectTier"):
        raise ConfigError(
            f"{name} no longer exists: kvferry's own OffloadingConnector replaces it; set "
            'kv_connector_module_path to "kvferry.vllm", and tiers instead of secondary_tiers '
            "(docs/tiers.md)"
        )
    raise AttributeError(name)
