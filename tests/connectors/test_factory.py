"""Tests that the factory finds connectors by name, imports them on demand, and refuses unknown ones
with a clear error.
"""

import subprocess
import sys
from dataclasses import replace

import pytest

from kvferry.config import KVTransferConfig, SideChannelConfig
from kvferry.connectors.contract import (
    ConnectorConfig,
    KVCacheBlocks,
    KVCacheConfig,
    KVCacheGroup,
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    ModelIdentity,
    ParallelConfig,
    Request,
    SupportsHMA,
    supports_hma,
)
from kvferry.connectors.factory import KVConnectorFactory
from kvferry.connectors.nixl import NixlConnector
from kvferry.errors import ConfigError
from kvferry.testing.local import LocalTransportKit


def config(name: str, module: str | None = None) -> KVTransferConfig:
    mapping = {"kv_connector": name, "kv_role": "kv_both"}
    return KVTransferConfig.from_mapping(
        mapping | ({"kv_connector_module_path": module} if module else {})
    )


def test_a_name_finds_its_class() -> None:
    assert KVConnectorFactory.get_connector_class(config("NixlConnector")) is NixlConnector
    assert KVConnectorFactory.get_connector_class_by_name("NixlPullConnector") is NixlConnector


def test_a_near_miss_is_named() -> None:
    with pytest.raises(ConfigError, match="did you mean NixlConnector"):
        KVConnectorFactory.get_connector_class(config("NixlConector"))
    with pytest.raises(ConfigError, match="did you mean LMCacheMPConnector"):
        KVConnectorFactory.get_connector_class(config("LMCacheMPConector"))
    with pytest.raises(ConfigError, match="available: "):
        KVConnectorFactory.get_connector_class(config("zzz"))


@pytest.mark.parametrize(
    ("name", "need"),
    [
        ("LMCacheConnectorV1", "pip install lmcache"),
        ("LMCacheMPConnector", "a running lmcache server"),
        ("MoRIIOConnector", "package mori"),
    ],
)
def test_a_connector_that_only_vllm_can_load_says_so(name: str, need: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is a connector of vLLM .*{need}.*use Offload"):
        KVConnectorFactory.get_connector_class(config(name))
    module = "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector"
    with pytest.raises(ConfigError, match=r"cannot be imported .*check the path"):
        KVConnectorFactory.get_connector_class(config(name, module))


def test_a_module_path_wins_and_is_checked() -> None:
    assert (
        KVConnectorFactory.get_connector_class(config("NixlConnector", "kvferry.connectors.nixl"))
        is NixlConnector
    )
    for path in ("no.such.module", "..relative"):
        with pytest.raises(ConfigError, match="cannot be imported"):
            KVConnectorFactory.get_connector_class(config("X", path))
    with pytest.raises(ConfigError, match="has no connector class 'X'"):
        KVConnectorFactory.get_connector_class(config("X", "kvferry.connectors.nixl"))
    with pytest.raises(ConfigError, match="has no connector class 'dataclass'"):
        KVConnectorFactory.get_connector_class(config("dataclass", "dataclasses"))
    with pytest.raises(ConfigError, match=r"must take \(config, role, kv_cache_config\)"):
        KVConnectorFactory.get_connector_class(config("TwoArguments", __name__))


class TwoArguments(NixlConnector):
    def __init__(self, config: object, role: object) -> None:
        raise NotImplementedError


def test_names_are_registered_once() -> None:
    with pytest.raises(ValueError, match="already registered"):
        KVConnectorFactory.register_connector("NixlConnector", "x", "y")


def test_registration_imports_nothing() -> None:
    code = (
        "import sys, kvferry.connectors.factory; sys.exit('kvferry.connectors.nixl' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_several_groups_need_a_connector_that_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KVCacheConfig(
        8, 4, (KVCacheGroup(("a",)), KVCacheGroup(("b",))), "HND", 1, 8, "float32"
    )
    assert supports_hma(NixlConnector)
    assert issubclass(NixlConnector, SupportsHMA)
    monkeypatch.setattr(KVConnectorFactory, "get_connector_class", lambda transfer: OneGroup)
    with pytest.raises(ConfigError, match="several KV-cache groups"):
        KVConnectorFactory.create_connector(connector_config(), KVConnectorRole.SCHEDULER, cache)
    made = KVConnectorFactory.create_connector(
        connector_config(), KVConnectorRole.SCHEDULER, replace(cache, groups=cache.groups[:1])
    )
    assert isinstance(made, OneGroup)


class OneGroup(KVConnectorBase_V1):
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None: ...
    def build_connector_meta(self, scheduler_output: object) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context: object, **kwargs: object) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(
        self, layer_name: str, kv_layer: object, attn_metadata: object, **kwargs: object
    ) -> None: ...
    def wait_for_save(self) -> None: ...


def connector_config() -> ConnectorConfig:
    identity = ModelIdentity("Tiny", "abc", 1, 1, 8, "float32")
    return ConnectorConfig(
        config("NixlConnector"),
        identity,
        ParallelConfig(),
        SideChannelConfig(),
        b"secret",
        "e",
        LocalTransportKit(),
    )
