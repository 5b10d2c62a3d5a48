"""Settings: frozen, typed and checked on construction. The only package that reads settings from
the environment and from files.

Every `ConfigError` is one sentence that starts with the dotted key and ends with the fix.
"""

from kvferry.config.environment import (
    fault_spec_from_environment,
    ignored_variables,
    kv_cache_layout_from_environment,
)
from kvferry.config.extra import (
    DecodeBenchExtraConfig,
    ExampleExtraConfig,
    ExtraConfig,
    FreeExtraConfig,
    MooncakeExtraConfig,
    NixlExtraConfig,
    P2pNcclExtraConfig,
    register_extra_config,
)
from kvferry.config.offloading import (
    CpuTierConfig,
    DiskTierConfig,
    MooncakeTierConfig,
    ObjectTierConfig,
    OffloadingExtraConfig,
    TierConfig,
)
from kvferry.config.secret import ClusterSecret
from kvferry.config.side_channel import SideChannelConfig, is_loopback
from kvferry.config.transfer import (
    BufferDevice,
    KVRole,
    KVTransferConfig,
    MultiExtraConfig,
    kind_of_setting,
)

__all__ = [
    "BufferDevice",
    "ClusterSecret",
    "CpuTierConfig",
    "DecodeBenchExtraConfig",
    "DiskTierConfig",
    "ExampleExtraConfig",
    "ExtraConfig",
    "FreeExtraConfig",
    "KVRole",
    "KVTransferConfig",
    "MooncakeExtraConfig",
    "MooncakeTierConfig",
    "MultiExtraConfig",
    "NixlExtraConfig",
    "ObjectTierConfig",
    "OffloadingExtraConfig",
    "P2pNcclExtraConfig",
    "SideChannelConfig",
    "TierConfig",
    "fault_spec_from_environment",
    "ignored_variables",
    "is_loopback",
    "kind_of_setting",
    "kv_cache_layout_from_environment",
    "register_extra_config",
]
