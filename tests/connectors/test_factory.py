"""Tests that the factory finds connectors by name, imports them on demand, and refuses unknown ones
with a clear error.
"""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from tests.connectors.pair import EngineRequest

from kvferry.config import KVTransferConfig, SideChannelConfig
from kvferry.connectors.contract import (
    ConnectorConfig,
    KVCacheConfig,
    KVCacheGroup,
    KVConnectorBase_V1,
    KVConnectorRole,
    ModelIdentity,
    ParallelConfig,
    Request,
    supports_hma,
)
from kvferry.connectors.factory import KVConnectorFactory
from kvferry.connectors.nixl import NixlConnector
from kvferry.errors import ConfigError, LocalProtocolError
from kvferry.testing.local import LocalTransportKit


def config(name: str, module: str | None = None) -> KVTransferConfig:
    mapping = {"kv_connector": name, "kv_role": "kv_both"}
    return KVTransferConfig.from_mapping(
        mapping | ({"kv_connector_module_path": module} if module else {})
    )


def test_a_name_finds_its_connector() -> None:
    assert KVConnectorFactory.describe(config("NixlConnector")) is NixlConnector
    assert KVConnectorFactory.describe(config("NixlPullConnector")) is NixlConnector


def test_a_near_miss_is_named() -> None:
    with pytest.raises(ConfigError, match="did you mean NixlConnector"):
        KVConnectorFactory.describe(config("NixlConector"))
    with pytest.raises(ConfigError, match="did you mean LMCacheMPConnector"):
        KVConnectorFactory.describe(config("LMCacheMPConector"))
    with pytest.raises(ConfigError, match="available: "):
        KVConnectorFactory.describe(config("zzz"))


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
        KVConnectorFactory.describe(config(name))
    module = "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector"
    with pytest.raises(ConfigError, match=r"cannot be imported .*check the path"):
        KVConnectorFactory.describe(config(name, module))


def test_a_module_path_wins_and_is_checked() -> None:
    assert (
        KVConnectorFactory.describe(config("NixlConnector", "kvferry.connectors.nixl"))
        is NixlConnector
    )
    for path in ("no.such.module", "..relative"):
        with pytest.raises(ConfigError, match="cannot be imported"):
            KVConnectorFactory.describe(config("X", path))
    with pytest.raises(ConfigError, match="has no connector class 'X'"):
        KVConnectorFactory.describe(config("X", "kvferry.connectors.nixl"))
    with pytest.raises(ConfigError, match="has no connector class 'dataclass'"):
        KVConnectorFactory.describe(config("dataclass", "dataclasses"))
    with pytest.raises(ConfigError, match=r"must take \(config, role, kv_cache_config\)"):
        KVConnectorFactory.describe(config("TwoArguments", __name__))


def test_names_are_registered_once() -> None:
    with pytest.raises(ValueError, match="already registered"):
        KVConnectorFactory.register_connector("NixlConnector", "x", "y")


def test_registration_imports_nothing() -> None:
    code = (
        "import sys, kvferry.connectors.factory; sys.exit('kvferry.connectors.nixl' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_several_groups_need_a_connector_that_takes_them() -> None:
    cache = KVCacheConfig(
        8, 4, (KVCacheGroup(("a",)), KVCacheGroup(("b",))), "HND", 1, 8, "float32"
    )
    assert NixlConnector.supports_hma
    assert not supports_hma(OneGroup)
    one_group = connector_config("OneGroup", __name__)
    with pytest.raises(ConfigError, match="several KV-cache groups"):
        KVConnectorFactory.create_connector(one_group, KVConnectorRole.SCHEDULER, cache)
    made = KVConnectorFactory.create_connector(
        one_group, KVConnectorRole.SCHEDULER, replace(cache, groups=cache.groups[:1])
    )
    assert isinstance(made, OneGroup)
    request = EngineRequest("r", [1, 2])
    assert made.request_finished_all_groups(request, ([3, 4],)) == (True, {"blocks": [3, 4]})


def test_a_call_for_the_other_role_says_which_connector_to_create() -> None:
    cache = KVCacheConfig(8, 4, (KVCacheGroup(("a",)),), "HND", 1, 8, "float32")
    made = {
        role: KVConnectorFactory.create_connector(
            connector_config("DecodeBenchConnector"), role, cache
        )
        for role in KVConnectorRole
    }
    with pytest.raises(LocalProtocolError, match=r"with KVConnectorRole\.WORKER"):
        made[KVConnectorRole.SCHEDULER].get_handshake_metadata()
    with pytest.raises(LocalProtocolError, match=r"with KVConnectorRole\.SCHEDULER"):
        made[KVConnectorRole.WORKER].has_pending_block_frees()


class OneGroup(KVConnectorBase_V1):
    """A connector of another package that supports one KV-cache group."""

    get_num_new_matched_tokens: Any = None
    update_state_after_alloc: Any = None
    build_connector_meta: Any = None
    start_load_kv: Any = None
    wait_for_layer_load: Any = None
    save_kv_layer: Any = None
    wait_for_save: Any = None

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return True, {"blocks": block_ids}


class TwoArguments(OneGroup):
    def __init__(self, config: object, role: object) -> None:
        raise NotImplementedError


def connector_config(name: str = "NixlConnector", module: str | None = None) -> ConnectorConfig:
    identity = ModelIdentity("Tiny", "abc", 1, 1, 8, "float32")
    return ConnectorConfig(
        config(name, module),
        identity,
        ParallelConfig(),
        SideChannelConfig(),
        b"secret",
        "e",
        LocalTransportKit(),
    )
