"""Tests that the transport kit makes the transports that the settings ask for, in this process and
in a worker process.
"""

import pickle
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.config import ClusterSecret, KVTransferConfig, SideChannelConfig
from kvferry.errors import ConfigError
from kvferry.transports.base import CacheMemory, Received
from kvferry.transports.mooncake.transport import MooncakeSettings
from kvferry.transports.registry import ConfiguredTransportKit, nixl_settings

SECRET = ClusterSecret.load({"KVFERRY_SECRET": "0123456789abcdef0123456789abcdef"})
ANY_PORT = SideChannelConfig(port=0)


def transfer(**extra: Any) -> KVTransferConfig:
    return KVTransferConfig.from_mapping(
        {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    )


def kit(environ: dict[str, str] | None = None, **extra: Any) -> ConfiguredTransportKit:
    return ConfiguredTransportKit.from_settings(ANY_PORT, SECRET, transfer(**extra), environ or {})


@pytest.fixture
def memory() -> Iterator[CacheMemory]:
    cache = kit().allocate_cache(1 << 16)
    try:
        yield cache
    finally:
        cache.close()


def names(made: ConfiguredTransportKit, memory: CacheMemory | None) -> list[str]:
    transports = made.data_transports(memory)
    try:
        return [transport.name for transport in transports]
    finally:
        for transport in transports:
            transport.close()


def test_shared_memory_is_preferred_and_the_operator_can_pin(memory: CacheMemory) -> None:
    assert names(kit(), memory) == ["shm", "cuda_ipc", "nixl", "tcp"]
    assert names(kit(transports=["nixl", "shm"]), memory) == ["nixl", "shm"]
    assert names(kit(transports=["nixl"]), memory) == ["nixl"]
    assert names(kit(transports=["shm"]), memory) == ["shm"]
    assert names(kit(transports=["tcp"]), memory) == ["tcp"]
    assert names(kit(transports=["cuda_ipc"]), None) == ["cuda_ipc"]


def test_memory_that_is_not_shared_has_no_shm_transport() -> None:
    assert names(kit(), None) == ["cuda_ipc", "nixl", "tcp"]


def test_a_transport_that_is_known_but_not_here_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match="names memory, which is not supported yet; use shm, cuda_ipc, nixl, tcp",
    ):
        kit(transports=["memory"])


def test_mooncake_is_chosen_by_its_connector_and_carries_shared_memory_only(
    memory: CacheMemory,
) -> None:
    extra = {"num_workers": 3, "device_name": "mlx5_0", "mooncake_protocol": "rdma"}
    settings = KVTransferConfig.from_mapping(
        {
            "kv_connector": "MooncakeConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
    )
    made = ConfiguredTransportKit.from_settings(ANY_PORT, SECRET, settings, {})
    assert names(made, memory) == ["mooncake"]
    assert names(made, None) == []
    assert made.mooncake == MooncakeSettings("rdma", 3, "mlx5_0")


def test_a_kit_survives_the_way_into_a_worker_process_and_hides_its_secret() -> None:
    made = kit(backends=["UCX", "POSIX"], num_threads=2)
    assert pickle.loads(pickle.dumps(made)) == made
    assert (made.backends, made.num_threads) == (("UCX", "POSIX"), 2)
    assert SECRET.key.decode() not in repr(made)


def test_the_settings_of_a_nixl_connector_inside_a_multi_connector_count() -> None:
    inner = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"num_threads": 7},
    }
    outer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [inner]},
    }
    assert nixl_settings(KVTransferConfig.from_mapping(outer)).num_threads == 7
    assert nixl_settings(None).num_threads == 4


def test_faults_are_made_only_on_demand_and_only_known_ones(memory: CacheMemory) -> None:
    faulty = kit({"KVFERRY_FAULTS": "corrupt:every=1"}).data_transports(memory)
    plain = kit().data_transports(memory)
    assert [
        type(transport) is type(other) for transport, other in zip(faulty, plain, strict=True)
    ] == [False] * 4
    for transport in (*faulty, *plain):
        transport.close()
    with pytest.raises(ConfigError):
        kit({"KVFERRY_FAULTS": "no-such-fault"})


def test_transports_of_one_cluster_reach_each_other_and_no_address_is_a_wildcard() -> None:
    made = ConfiguredTransportKit.from_settings(
        SideChannelConfig(bind_host="0.0.0.0", advertised_host="127.0.0.1", port=0),
        SECRET,
        transfer(),
        {},
    )
    side, control = made.side_channel(), made.control_transport()
    try:
        assert side.address != control.address
        assert side.address.startswith("tcp://127.0.0.1:")
        control.send(side.address, b"hello")
        arrived: list[bytes] = []
        deadline = time.monotonic() + 30
        while not arrived and time.monotonic() < deadline:
            control.poll(0)
            arrived += [event.frame for event in side.poll(0.05) if isinstance(event, Received)]
        assert arrived == [b"hello"]
    finally:
        side.close()
        control.close()


def test_without_a_secret_there_is_no_control_transport() -> None:
    with pytest.raises(ConfigError, match="secret"):
        ConfiguredTransportKit.from_settings(ANY_PORT, None, None, {}).control_transport()
