"""Tests that settings become typed values, or are refused with one sentence that names the key."""

import json
import os
import pickle
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.config import (
    ClusterSecret,
    FreeExtraConfig,
    KVTransferConfig,
    MooncakeTierConfig,
    MultiExtraConfig,
    NixlExtraConfig,
    OffloadingExtraConfig,
    P2pNcclExtraConfig,
    SideChannelConfig,
    fault_spec_from_environment,
    ignored_variables,
    is_loopback,
    kv_cache_layout_from_environment,
)
from kvferry.errors import ConfigError
from kvferry.protocol.heartbeats import heartbeat_interval_s
from kvferry.types import Address, FailurePolicy, KVLayout

PULL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
SECRET = "0123456789abcdef0123456789abcdef"


def nixl(**extra: Any) -> NixlExtraConfig:
    config = KVTransferConfig.from_mapping({**PULL, "kv_connector_extra_config": extra})
    assert isinstance(config.extra, NixlExtraConfig)
    return config.extra


def refusal(mapping: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        KVTransferConfig.from_mapping(mapping)
    return str(caught.value)


def outcome(load: Callable[[dict[str, Any]], object], settings: dict[str, Any]) -> str:
    """Return the refusal, or "" if the settings are accepted. Any other exception fails the
    test.
    """
    try:
        load(settings)
    except ConfigError as error:
        return str(error)
    return ""


# -- KVTransferConfig --


def test_defaults_are_those_of_the_seeds() -> None:
    config = KVTransferConfig.from_mapping(PULL)
    assert config.kv_load_failure_policy is FailurePolicy.FAIL
    assert (config.kv_buffer_device, config.kv_port, config.enable_permute_local_kv) == (
        "auto",
        14579,
        False,
    )
    extra = nixl()
    assert (extra.backends, extra.num_threads, extra.kv_lease_duration) == (("UCX",), 4, 30.0)
    assert (
        extra.decoder_kv_blocks_ttl,
        extra.kv_recompute_threshold,
        extra.bidirectional_kv_xfer,
    ) == (480.0, 64, False)


def test_every_engine_gets_its_own_id() -> None:
    assert (
        KVTransferConfig.from_mapping(PULL).engine_id
        != KVTransferConfig.from_mapping(PULL).engine_id
    )


@pytest.mark.parametrize(
    ("role", "is_producer", "is_consumer"),
    [("kv_producer", True, False), ("kv_consumer", False, True), ("kv_both", True, True)],
)
def test_the_role_says_who_may_produce_and_consume(
    role: str, is_producer: bool, is_consumer: bool
) -> None:
    config = KVTransferConfig.from_mapping({**PULL, "kv_role": role})
    assert (config.is_kv_producer, config.is_kv_consumer) == (is_producer, is_consumer)


@pytest.mark.parametrize("text", ["True", "true", True])
def test_flags_may_be_written_as_text_because_the_seeds_do(text: object) -> None:
    assert (
        KVTransferConfig.from_mapping(
            {**PULL, "enable_permute_local_kv": text}
        ).enable_permute_local_kv
        is True
    )
    assert nixl(enable_cross_layers_blocks=text).enable_cross_layers_blocks is True
    assert nixl(enable_permute_local_kv=text).enable_permute_local_kv is True


def test_a_config_survives_the_way_into_a_worker_process() -> None:
    config = KVTransferConfig.from_mapping(
        {**PULL, "kv_connector_extra_config": {"transports": ["shm"], "kv_lease_duration": 3}}
    )
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config
    assert copy.extra == config.extra


@pytest.mark.parametrize(
    ("lease", "interval", "extension"),
    [
        (30, 5.0, 20.0),
        (60, 10.0, 40.0),
        (20, 3.0, 13.0),
        (6, 1.0, 4.0),
        (3, 0.5, 2.0),
        (1.5, 0.25, 1.0),
    ],
)
def test_heartbeats_follow_from_the_lease(lease: float, interval: float, extension: float) -> None:
    extra = nixl(kv_lease_duration=lease)
    assert (heartbeat_interval_s(lease), extra.lease_extension_s) == (interval, extension)


@given(st.floats(min_value=0.5, max_value=1e6))
def test_a_lease_outlives_several_lost_heartbeats(lease: float) -> None:
    extra = NixlExtraConfig(kv_lease_duration=lease)
    assert 0 < heartbeat_interval_s(lease) * 3 <= extra.lease_extension_s <= lease


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"kv_rol": "kv_both"},
            "kv_rol is not a setting of --kv-transfer-config; did you mean kv_role?",
        ),
        (
            {"kv_role": "kv_bth"},
            'kv_role must be one of kv_producer, kv_consumer, kv_both, got "kv_bth"; did you mean '
            "kv_both?",
        ),
        (
            {"kv_load_failure_policy": "retry"},
            'kv_load_failure_policy must be one of fail, recompute, got "retry"',
        ),
        (
            {"kv_buffer_device": "disk"},
            'kv_buffer_device must be one of auto, cuda, cpu, got "disk"',
        ),
        (
            {"engine_id": 7},
            "engine_id must be a text that is not empty and has no NUL character, got 7",
        ),
        (
            {"engine_id": ""},
            'engine_id must be a text that is not empty and has no NUL character, got ""',
        ),
        ({"kv_port": True}, "kv_port must be a port number from 0 to 65535, got true"),
        ({"enable_permute_local_kv": 1}, "enable_permute_local_kv must be true or false, got 1"),
        ({"kv_port": None}, "kv_port must be a port number from 0 to 65535, got null"),
        (
            {"KV_ROLE": "kv_both"},
            "KV_ROLE is not a setting of --kv-transfer-config; did you mean kv_role?",
        ),
        (
            {"zzz": 1},
            "zzz is not a setting of --kv-transfer-config; remove it, or use one of the 13 in "
            "docs/configuration.md",
        ),
        (
            {"engine_id": "a b"},
            'engine_id is "a b", which has spaces or unprintable characters; remove them',
        ),
        (
            {"engine_id": "a\x7f"},
            'engine_id is "a\\u007f", which has spaces or unprintable characters; remove them',
        ),
        (
            {"engine_id": "a\n"},
            'engine_id is "a\\n", which has spaces or unprintable characters; remove them',
        ),
        (
            {"kv_connector_extra_config": [1]},
            "kv_connector_extra_config must be an object, got [1]",
        ),
    ],
)
def test_a_wrong_setting_is_named_with_the_fix(change: dict[str, Any], sentence: str) -> None:
    assert refusal({**PULL, **change}) == sentence


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        ({"planes": ["shm"]}, "planes of NixlConnector is now called transports; rename it"),
        (
            {"staging_ring_bytes": 1},
            "staging_ring_bytes of NixlConnector is now called bounce_buffer_bytes; rename it",
        ),
        (
            {"interop": "vllm-0.32"},
            "interop of NixlConnector no longer exists; run kvferry on both P and D",
        ),
        (
            {"interop_port": 5700},
            "interop_port of NixlConnector no longer exists; run kvferry on both P and D",
        ),
        (
            {"kv_lease_duraton": 60},
            "kv_lease_duraton is not a setting of NixlConnector; did you mean kv_lease_duration?",
        ),
        (
            {"kv_lease_duration": 0},
            "kv_lease_duration must be a number of seconds of at least 0.5, got 0",
        ),
        (
            {"kv_lease_duration": 0.49},
            "kv_lease_duration must be a number of seconds of at least 0.5, got 0.49",
        ),
        ({"read_timeout": 0}, "read_timeout must be a number of seconds above 0, got 0"),
        (
            {"kv_lease_duration": -1},
            "kv_lease_duration must be a number of seconds of at least 0.5, got -1",
        ),
        (
            {"kv_lease_duration": "60"},
            'kv_lease_duration must be a number of seconds of at least 0.5, got "60"',
        ),
        (
            {"kv_lease_duration": float("nan")},
            "kv_lease_duration must be a number of seconds of at least 0.5, got NaN",
        ),
        (
            {"kv_lease_duration": float("inf")},
            "kv_lease_duration must be a number of seconds of at least 0.5, got Infinity",
        ),
        ({"num_threads": True}, "num_threads must be a whole number of at least 1, got true"),
        ({"num_threads": "4"}, 'num_threads must be a whole number of at least 1, got "4"'),
        ({"backends": "UCX"}, 'backends must be a list of texts, got "UCX"'),
        ({"backends": []}, 'backends must name at least one NIXL backend, for example ["UCX"]'),
        (
            {"transports": ["smh"]},
            'transports has "smh", which is not a data transport; did you mean shm?',
        ),
        (
            {"peers": ["10.0.0.7"]},
            'peers has "10.0.0.7", which is not an address; write host:port, for example '
            "10.0.0.7:5600",
        ),
    ],
)
def test_a_wrong_extra_setting_is_named_by_its_dotted_key(
    extra: dict[str, Any], sentence: str
) -> None:
    assert (
        refusal({**PULL, "kv_connector_extra_config": extra})
        == f"kv_connector_extra_config.{sentence}"
    )


@pytest.mark.parametrize("key", ["kv_connector", "kv_role"])
def test_connector_and_role_must_be_given(key: str) -> None:
    assert refusal({name: value for name, value in PULL.items() if name != key}).startswith(
        f"{key} is missing; set it"
    )


def test_keys_that_only_vllm_uses_are_accepted() -> None:
    theirs = {
        "kv_rank": 0,
        "kv_parallel_size": 2,
        "kv_buffer_size": 5e9,
        "kv_ip": "10.0.0.1",
        "kv_port": 14579,
    }
    config = KVTransferConfig.from_mapping({**PULL, **theirs})
    assert {key: getattr(config, key) for key in theirs} == theirs
    assert KVTransferConfig.from_mapping({**PULL, "kv_buffer_size": "1e9"}).kv_buffer_size == "1e9"
    assert refusal({**PULL, "kv_rank": -1}).startswith("kv_rank must be")


@pytest.mark.parametrize("connector", ["NixlConnector", "NixlPushConnector"])
def test_both_ways_of_handing_over_have_a_way_back(connector: str) -> None:
    KVTransferConfig.from_mapping(
        {
            **PULL,
            "kv_connector": connector,
            "kv_connector_extra_config": {"bidirectional_kv_xfer": True},
        }
    )


def test_connectors_from_elsewhere_check_their_own_settings() -> None:
    config = KVTransferConfig.from_mapping(
        {
            **PULL,
            "kv_connector_module_path": "their.module",
            "kv_connector_extra_config": {"any": 1},
        }
    )
    assert config.extra == FreeExtraConfig({"any": 1})
    ours = {
        **PULL,
        "kv_connector_module_path": "kvferry.vllm",
        "kv_connector_extra_config": {"any": 1},
    }
    assert "any is not a setting" in refusal(ours)


def multi(*connectors: object) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


def test_the_connectors_of_a_multi_connector_share_its_engine_id() -> None:
    config = KVTransferConfig.from_mapping({**multi(PULL, PULL), "engine_id": "p0"})
    assert isinstance(config.extra, MultiExtraConfig)
    assert [child.engine_id for child in config.extra.connectors] == ["p0", "p0"]


@pytest.mark.parametrize(
    ("child", "sentence"),
    [
        ({**PULL, "kv_role": 3}, "connectors[1].kv_role must be one of"),
        (
            {**PULL, "kv_connector_extra_config": {"backnds": 1}},
            "connectors[1].kv_connector_extra_config.backnds is not a setting of",
        ),
        ({**PULL, "engine_id": "x"}, "connectors[1].engine_id cannot be set"),
        (
            multi(PULL),
            "connectors[1].kv_connector cannot be MultiConnector inside a MultiConnector",
        ),
        (3, "connectors[1] must be an object, got 3"),
    ],
)
def test_a_wrong_setting_inside_a_multi_connector_is_named_by_its_whole_path(
    child: object, sentence: str
) -> None:
    assert refusal(multi(PULL, child)).startswith(f"kv_connector_extra_config.{sentence}")


def test_a_multi_connector_takes_every_part_that_its_connectors_take() -> None:
    consumer = {**multi({**PULL, "kv_role": "kv_consumer"}), "kv_role": "kv_consumer"}
    assert KVTransferConfig.from_mapping(consumer).is_kv_consumer
    KVTransferConfig.from_mapping(multi({**PULL, "kv_role": "kv_consumer"}))
    wrong = refusal({**multi(PULL), "kv_role": "kv_consumer"})
    assert "connectors[0].kv_role is kv_both, but that of the MultiConnector is kv_cons" in wrong


def test_the_failure_policy_and_the_lookup_timeout_hold_for_all_connectors() -> None:
    config = KVTransferConfig.from_mapping({**multi(PULL), "kv_load_failure_policy": "recompute"})
    assert [child.kv_load_failure_policy for child in config.connectors] == ["recompute"]
    assert "kv_load_failure_policy is recompute, but an engine has one policy" in refusal(
        multi({**PULL, "kv_load_failure_policy": "recompute"})
    )
    KVTransferConfig.from_mapping(multi({**PULL, "kv_load_failure_policy": "fail"}))
    timed = multi(PULL)
    timed["kv_connector_extra_config"]["lookup_timeout"] = 0
    assert "lookup_timeout must be a number of seconds above 0" in refusal(timed)


def test_offloading_needs_to_know_how_much_memory() -> None:
    config = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    assert refusal(config).startswith("kv_connector_extra_config.tiers is missing")
    assert offloading_extra(cpu_bytes_to_use=1).cpu_bytes(100) == 1


def offloading(**extra: object) -> dict[str, object]:
    connector = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    return {**connector, "kv_connector_extra_config": extra}


def offloading_extra(**settings: object) -> OffloadingExtraConfig:
    extra = KVTransferConfig.from_mapping(offloading(**settings)).extra
    assert isinstance(extra, OffloadingExtraConfig)
    return extra


@pytest.mark.parametrize(
    ("settings", "cpu_bytes"),
    [
        ({"cpu_bytes_to_use": 4096}, 4096),
        ({"cpu_bytes_to_use": "2MiB"}, 2 * 2**20),
        ({"num_cpu_blocks": 3}, 3 * 100),
        ({"tiers": [{"cpu": "2MiB"}]}, 2 * 2**20),
    ],
)
def test_vllms_names_set_the_size_of_the_tier_cpu(
    settings: dict[str, object], cpu_bytes: int
) -> None:
    """The engine has blocks of 100 bytes."""
    extra = offloading_extra(**settings)
    assert extra.cpu_bytes(100) == cpu_bytes
    assert extra.store_after() == {"cpu": 1}


def test_vllms_settings_that_are_off_are_accepted() -> None:
    off = {"secondary_tiers": [], "canonical_layout": "False", "sync_load_budget_bytes": 0}
    KVTransferConfig.from_mapping(offloading(cpu_bytes_to_use=1, **off))


def test_block_size_sets_the_tokens_of_a_chunk() -> None:
    extra = offloading_extra(cpu_bytes_to_use=1, block_size=48)
    assert extra.blocks_of_chunk(16) == 3
    with pytest.raises(ConfigError, match=r"block_size is 48, which is not a multiple .* of 32 "):
        extra.blocks_of_chunk(32)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"block_size": 32, "blocks_per_chunk": 2}, "block_size and blocks_per_chunk both set"),
        ({"block_size": -16}, "block_size must be "),
        ({"block_size": "16"}, "block_size must be "),
        ({"eviction_policy": "lur"}, 'eviction_policy is "lur"; '),
        ({"spec_name": "MySpec"}, 'spec_name is "MySpec"; only vLLM\'s own OffloadingConnector'),
        ({"secondary_tiers": [{"type": "fs"}]}, "secondary_tiers is for vLLM's own "),
        ({"backpressure": {"failure_threshold": 3}}, "backpressure is for vLLM's own "),
        ({"tier_poll_interval_s": 0.01}, "tier_poll_interval_s is for vLLM's own "),
        ({"canonical_layout": True}, "canonical_layout is not supported: "),
        ({"sync_load_budget_bytes": 4096}, "sync_load_budget_bytes is not supported: "),
        ({"num_cpu_blocks": 1}, "cpu_bytes_to_use and num_cpu_blocks both set the size"),
        ({"tiers": [{"cpu": "1MiB"}]}, "tiers has a tier cpu, and cpu_bytes_to_use or "),
        ({"cpu_bytes_to_use": "much"}, "cpu_bytes_to_use must be a number of bytes or a text like"),
        ({"cpu_bytes_to_use": 0}, "tiers is missing"),
        ({"num_cpu_blocks": -1}, "num_cpu_blocks must be "),
        ({"pool_path": "/a\0b"}, "pool_path must be a text that is not empty and has no NUL "),
        ({"pool_path": "/a\ud800b"}, "pool_path must be a text"),
        (
            {"tiers": [{"disk": {"path": "/a\0b", "size": 1}}]},
            "tiers[0].disk.path must be a text that is not empty and has no NUL character",
        ),
    ],
)
def test_a_wrong_setting_of_offloading_is_named(settings: dict[str, object], sentence: str) -> None:
    found = refusal(offloading(**{"cpu_bytes_to_use": 4096, **settings}))
    assert f"kv_connector_extra_config.{sentence}" in found, found


def mooncake(**settings: object) -> dict[str, object]:
    return offloading(tiers=[{"mooncake": settings}])


def test_a_mooncake_tier_lends_nothing_unless_told() -> None:
    extra = offloading_extra(tiers=[{"mooncake": {"master": "[::1]:50051"}}])
    tier = extra.tier(MooncakeTierConfig)
    assert tier is not None
    assert tier.master_address == Address("::1", 50051)
    assert tier.size == 0
    KVTransferConfig.from_mapping(mooncake(master="host:1", size="8GiB", protocol="rdma"))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, "master is missing; the tier mooncake needs it"),
        ({"master": "host"}, 'master is "host", which is not an address; write host:port'),
        ({"master": "host:0"}, 'master is "host:0", which is not an address'),
        ({"master": ":5"}, 'master is ":5", which is not an address'),
        ({"master": "[::1"}, 'master is "[::1", which is not an address'),
        ({"master": "http://host:5"}, 'master is "http://host:5", which is not an address'),
        ({"master": "a..b:5"}, 'master is "a..b:5", which is not an address'),
        ({"master": "host:5:6"}, 'master is "host:5:6", which is not an address'),
        ({"master": "host:1", "protocol": "tpc"}, 'protocol is "tpc"; '),
        ({"master": "host:1", "size": "much"}, "size must be a number of bytes or a text like"),
        ({"master": "host:1", "size": -1}, "size must be a number of bytes"),
        ({"master": "host:1", "segment": 1}, "segment is not a setting"),
    ],
)
def test_a_wrong_setting_of_a_mooncake_tier_is_named(
    settings: dict[str, object], sentence: str
) -> None:
    found = refusal(mooncake(**settings))
    assert f"tiers[0].mooncake.{sentence}" in found, found


def test_the_order_of_tiers_is_local_first() -> None:
    config = mooncake(master="host:1")
    config["kv_connector_extra_config"] = {
        "tiers": [{"mooncake": {"master": "host:1"}}, {"cpu": "1GiB"}]
    }
    assert "in the order cpu, disk, mooncake, object" in refusal(config)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
extra_keys = (
    st.sampled_from([*NixlExtraConfig.__dataclass_fields__, "connectors", "cpu_bytes_to_use"])
    | st.text()
)
likely_mappings = st.fixed_dictionaries(
    {},
    optional={
        "kv_connector": st.sampled_from(
            ["NixlConnector", "NixlPushConnector", "MultiConnector", "OffloadingConnector", "X"]
        )
        | json_values,
        "kv_role": st.sampled_from(["kv_both", "kv_producer"]) | json_values,
        "kv_connector_extra_config": st.dictionaries(extra_keys, json_values) | json_values,
        "kv_connector_module_path": json_values,
        "engine_id": json_values,
        "kv_load_failure_policy": json_values,
        "enable_permute_local_kv": json_values,
        "kv_buffer_device": json_values,
        "kv_port": json_values,
    },
)


@given(likely_mappings | st.dictionaries(st.text(), json_values))
def test_any_json_becomes_settings_or_one_sentence(mapping: dict[str, Any]) -> None:
    sentence = outcome(KVTransferConfig.from_mapping, mapping)
    assert sentence.isprintable()
    assert len(sentence) < 1000


# -- environment --


def test_the_side_channel_is_on_this_machine_unless_told_otherwise() -> None:
    channel = SideChannelConfig.from_environment({})
    assert (channel.bind_host, channel.advertised_host, channel.port) == (
        "127.0.0.1",
        "127.0.0.1",
        5600,
    )
    assert channel.is_local


def test_a_variable_that_does_nothing_here_is_answered_with_the_setting_that_does() -> None:
    (sentence,) = ignored_variables({"VLLM_NIXL_ABORT_REQUEST_TIMEOUT": "480"})
    assert sentence.startswith(
        "VLLM_NIXL_ABORT_REQUEST_TIMEOUT has no effect here; set kv_lease_duration"
    )
    assert ignored_variables({"VLLM_NIXL_ABORT_REQUEST_TIMEOUT": ""}) == []


def test_a_kvferry_variable_wins_over_the_one_of_vllm() -> None:
    environ = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": "5601"}
    assert SideChannelConfig.from_environment(environ) == SideChannelConfig(
        "10.0.0.1", "10.0.0.1", 5601
    )
    environ |= {
        "KVFERRY_SIDE_CHANNEL_HOST": "10.0.0.2",
        "KVFERRY_SIDE_CHANNEL_PORT": "0",
        "KVFERRY_SIDE_CHANNEL_BIND": "0.0.0.0",
    }
    assert SideChannelConfig.from_environment(environ) == SideChannelConfig(
        "0.0.0.0", "10.0.0.2", 0
    )


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*", "0", "[::]", "0:0:0:0:0:0:0:0"])
def test_a_wildcard_is_never_advertised(host: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"VLLM_NIXL_SIDE_CHANNEL_HOST is .* set it to this machine's address and "
        r"KVFERRY_SIDE_CHANNEL_BIND",
    ):
        SideChannelConfig.from_environment({"VLLM_NIXL_SIDE_CHANNEL_HOST": host})
    with pytest.raises(ConfigError, match="no peer can dial"):
        SideChannelConfig(advertised_host=host)


@pytest.mark.parametrize(
    "host", ["a b", "a..b", ".", ".a", "a" * 64, "a." * 127 + "b", "a\0", "\ud800", "http://a"]
)
@pytest.mark.parametrize("name", ["KVFERRY_SIDE_CHANNEL_HOST", "KVFERRY_SIDE_CHANNEL_BIND"])
def test_what_is_no_host_is_named(name: str, host: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} is .*, which is not a host"):
        SideChannelConfig.from_environment({name: host})


@pytest.mark.parametrize("host", ["a", "a.b.", "node_1.example.com", "a" * 63, "[::1]", "fe80::1"])
def test_host_names_and_addresses_are_accepted(host: str) -> None:
    found = SideChannelConfig.from_environment({"KVFERRY_SIDE_CHANNEL_HOST": host})
    assert found.advertised_host == host.strip("[]")


@pytest.mark.parametrize("port", ["-1", "65536", "5600.0", "five", "٣", "9" * 5000])
def test_a_port_is_a_number_up_to_65535(port: str) -> None:
    with pytest.raises(ConfigError, match="VLLM_NIXL_SIDE_CHANNEL_PORT must be a port number"):
        SideChannelConfig.from_environment({"VLLM_NIXL_SIDE_CHANNEL_PORT": port})


@given(st.text(), st.text(), st.text())
def test_any_environment_becomes_a_side_channel_or_one_sentence(
    host: str, port: str, bind: str
) -> None:
    environ = {
        "KVFERRY_SIDE_CHANNEL_HOST": host,
        "KVFERRY_SIDE_CHANNEL_PORT": port,
        "KVFERRY_SIDE_CHANNEL_BIND": bind,
    }
    assert outcome(SideChannelConfig.from_environment, environ).isprintable()


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True),
        ("127.0.0.9", True),
        ("::1", True),
        ("10.0.0.1", False),
        ("localhost.example", False),
    ],
)
def test_only_the_loopback_is_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_the_layout_is_read_from_the_environment() -> None:
    assert kv_cache_layout_from_environment({}) is KVLayout.HND
    assert kv_cache_layout_from_environment({"VLLM_KV_CACHE_LAYOUT": "NHD"}) is KVLayout.NHD
    assert (
        kv_cache_layout_from_environment(
            {"VLLM_KV_CACHE_LAYOUT": "NHD", "KVFERRY_KV_CACHE_LAYOUT": "HND"}
        )
        is KVLayout.HND
    )
    with pytest.raises(
        ConfigError, match='VLLM_KV_CACHE_LAYOUT must be one of HND, NHD, got "DHN"'
    ):
        kv_cache_layout_from_environment({"VLLM_KV_CACHE_LAYOUT": "DHN"})


def test_no_faults_are_made_unless_asked_for() -> None:
    assert fault_spec_from_environment({}) == ""
    assert fault_spec_from_environment({"KVFERRY_FAULTS": " corrupt "}) == "corrupt"


# -- secret --


def test_the_operators_secret_is_taken_from_variable_or_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(f"{SECRET}\n")
    path.chmod(0o600)
    from_file, from_text = (
        ClusterSecret.load({"KVFERRY_SECRET_FILE": str(path)}),
        ClusterSecret.load({"KVFERRY_SECRET": SECRET}),
    )
    assert from_file.key == from_text.key == SECRET.encode()
    assert from_file.is_explicit
    assert from_text.is_explicit


def test_a_secret_is_never_shown() -> None:
    secret = ClusterSecret.load({"KVFERRY_SECRET": SECRET})
    assert SECRET not in f"{secret!r} {secret}"


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ConfigError, match="KVFERRY_SECRET holds a secret of 5 bytes"):
        ClusterSecret.load({"KVFERRY_SECRET": "short"})


def test_two_sources_of_the_secret_are_one_too_many() -> None:
    with pytest.raises(ConfigError, match="both set"):
        ClusterSecret.load({"KVFERRY_SECRET": SECRET, "KVFERRY_SECRET_FILE": "/dev/null"})


@pytest.mark.parametrize("name", ["KVFERRY_SECRET", "KVFERRY_SECRET_FILE"])
@pytest.mark.parametrize("value", ["", " \n"])
def test_an_empty_variable_is_not_taken_for_one_that_is_not_set(
    name: str, value: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"{name} is empty; give it a value or unset it"):
        ClusterSecret.load({name: value, "XDG_RUNTIME_DIR": str(tmp_path)})


def test_a_secret_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(SECRET)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="other users may read or write; run `chmod 600"):
        ClusterSecret.load({"KVFERRY_SECRET_FILE": str(path)})


@pytest.mark.parametrize("name", ["missing", ".", "a\0b"])
def test_a_secret_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="KVFERRY_SECRET_FILE names"):
        ClusterSecret.load({"KVFERRY_SECRET_FILE": f"{tmp_path}/{name}"})


@pytest.mark.parametrize("variable", ["XDG_RUNTIME_DIR", "TMPDIR"])
def test_a_secret_is_made_once_and_only_for_this_user(tmp_path: Path, variable: str) -> None:
    first, second = (
        ClusterSecret.load({variable: str(tmp_path)}),
        ClusterSecret.load({variable: str(tmp_path)}),
    )
    assert first.key == second.key
    assert len(first.key) == 64
    assert not first.is_explicit
    path = Path(first.source)
    assert path.is_relative_to(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert os.listdir(path.parent) == ["secret"]


def test_another_directory_has_another_secret(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    keys = {ClusterSecret.load({"XDG_RUNTIME_DIR": str(tmp_path / name)}).key for name in "ab"}
    assert len(keys) == 2


def test_a_runtime_directory_that_is_not_there_is_not_used(tmp_path: Path) -> None:
    secret = ClusterSecret.load(
        {"XDG_RUNTIME_DIR": str(tmp_path / "missing"), "TMPDIR": str(tmp_path)}
    )
    assert secret.source == str(tmp_path / f"kvferry-{os.geteuid()}" / "secret")


def test_a_made_secret_behind_a_link_or_open_to_others_is_refused(tmp_path: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    path = Path(ClusterSecret.load(environ).source)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="can be opened by other users"):
        ClusterSecret.load(environ)
    path.chmod(0o600)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="cannot be made or read"):
        ClusterSecret.load(environ)


def test_a_directory_that_is_a_link_or_open_to_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kvferry").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="cannot be used for the secret"):
        ClusterSecret.load({"XDG_RUNTIME_DIR": str(tmp_path)})
    (tmp_path / "kvferry").unlink()
    (tmp_path / "kvferry").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="chmod go="):
        ClusterSecret.load({"XDG_RUNTIME_DIR": str(tmp_path)})


def test_an_emptied_secret_file_is_refused_not_used(tmp_path: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    Path(ClusterSecret.load(environ).source).write_text("")
    with pytest.raises(ConfigError, match="delete it and kvferry makes a new one"):
        ClusterSecret.load(environ)


def test_processes_that_start_at_once_agree_on_the_secret(tmp_path: Path) -> None:
    code = (
        "import os; from kvferry.config import ClusterSecret; input(); "
        "print(ClusterSecret.load(os.environ).key.hex())"
    )
    given = ("KVFERRY_SECRET", "KVFERRY_SECRET_FILE")
    environ = {name: value for name, value in os.environ.items() if name not in given}
    environ["XDG_RUNTIME_DIR"] = str(tmp_path)
    starters = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ,
            text=True,
        )
        for _ in range(4)
    ]
    try:
        for starter in starters:
            assert starter.stdin is not None
            starter.stdin.write("\n")
            starter.stdin.flush()
        assert len({starter.communicate()[0] for starter in starters}) == 1
    finally:
        for starter in starters:
            starter.kill()
            starter.wait()
    assert all(starter.returncode == 0 for starter in starters)


def test_without_the_operators_secret_only_this_machine_is_reachable(tmp_path: Path) -> None:
    made, given_one = (
        ClusterSecret.load({"XDG_RUNTIME_DIR": str(tmp_path)}),
        ClusterSecret.load({"KVFERRY_SECRET": SECRET}),
    )
    local, remote = (
        SideChannelConfig(),
        SideChannelConfig(bind_host="0.0.0.0", advertised_host="10.0.0.1"),
    )
    made.check_reach(local)
    given_one.check_reach(local)
    given_one.check_reach(remote)
    with pytest.raises(ConfigError, match="KVFERRY_SECRET_FILE must be set"):
        made.check_reach(remote)
    with pytest.raises(ConfigError, match="KVFERRY_SECRET_FILE must be set"):
        made.check_reach(SideChannelConfig(bind_host="0.0.0.0"))


def test_the_example_of_the_seeds_is_valid() -> None:
    text = (
        '{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_connector_extra_config": '
        '{"kv_lease_duration": 60}}'
    )
    extra = KVTransferConfig.from_mapping(json.loads(text)).extra
    assert isinstance(extra, NixlExtraConfig)
    assert extra.kv_lease_duration == 60.0


def test_peers_are_known_by_one_spelling_of_the_loopback() -> None:
    extra = nixl(peers=["localhost:5600", "10.0.0.7:5601", "[::1]:5602"])
    assert extra.peer_addresses == {"127.0.0.1:5600", "10.0.0.7:5601", "[::1]:5602"}


# -- P2pNcclConnector --


def p2p(**settings: object) -> dict[str, object]:
    return {
        "kv_connector": "P2pNcclConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": settings,
    }


def test_a_configuration_of_vllms_p2p_connector_is_accepted_as_it_was_written() -> None:
    transfer = KVTransferConfig.from_mapping(
        {
            **p2p(
                proxy_ip="10.0.1.1",
                proxy_port="30001",
                http_port="20001",
                send_type="PUT_ASYNC",
                mem_pool_size_gb="0.5",
                nccl_num_channels="16",
                kv_buffer_size="8e9",
            ),
            "kv_buffer_size": "8e9",
            "kv_port": 21001,
        }
    )
    extra = transfer.extra
    assert isinstance(extra, P2pNcclExtraConfig)
    assert (extra.router_url, extra.http_port) == ("http://10.0.1.1:30001", 20001)
    assert (extra.mem_pool_bytes, extra.kv_buffer_size) == (1 << 29, 8e9)
    assert extra.nccl_num_channels == 16
    assert (extra.transfer_mode, extra.transports) == ("push", ())


def test_only_a_backend_moves_the_bytes_in_process_groups() -> None:
    for settings, transports in (
        ({}, ()),
        ({"backend": "gloo"}, ("dist",)),
        ({"backend": "gloo", "transports": ["tcp"]}, ("tcp",)),
    ):
        extra = KVTransferConfig.from_mapping(p2p(**settings)).extra
        assert isinstance(extra, P2pNcclExtraConfig)
        assert extra.transports == transports


@pytest.mark.parametrize(
    ("send_type", "mode"), [("PUT", "push"), ("PUT_ASYNC", "push"), ("GET", "pull")]
)
def test_the_send_type_chooses_push_or_pull(send_type: str, mode: str) -> None:
    extra = KVTransferConfig.from_mapping(p2p(send_type=send_type)).extra
    assert isinstance(extra, P2pNcclExtraConfig)
    assert extra.transfer_mode == mode
    assert extra.router_url is None


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"send_type": "PUT_SYNC"}, 'send_type is "PUT_SYNC"; did you mean PUT_ASYNC?'),
        ({"backend": "mpi"}, 'backend is "mpi"; remove it, or use one of gloo, nccl'),
        ({"proxy_ip": "10.0.0.1"}, "proxy_port is missing"),
        ({"proxy_port": "x"}, 'proxy_port must be a port number from 0 to 65535, got "x"'),
        ({"mem_pool_size_gb": 0}, "mem_pool_size_gb must be a number of GiB above 0"),
        ({"mem_pool_size_gb": "nan"}, "mem_pool_size_gb must be a number of GiB above 0"),
        ({"nccl_num_channels": -1}, "nccl_num_channels must be"),
        ({"sent_type": "GET"}, "did you mean send_type?"),
    ],
)
def test_a_wrong_setting_of_p2p_nccl_is_named(settings: dict[str, object], sentence: str) -> None:
    found = refusal(p2p(**settings))
    assert sentence in found, found


def test_an_engine_of_both_roles_cannot_register_for_one() -> None:
    found = refusal({**p2p(proxy_ip="10.0.0.1", proxy_port=80), "kv_role": "kv_both"})
    assert "set kv_role to kv_producer or kv_consumer" in found


def test_the_buffer_size_must_be_a_number() -> None:
    for size in ("much", "nan", "inf", "-1"):
        assert "extra_config.kv_buffer_size " in refusal(p2p(kv_buffer_size=size))


# -- MooncakeConnector --


@pytest.mark.parametrize(
    ("connector", "settings", "sentence"),
    [
        ("MooncakeConnector", {"mooncake_protocol": "rmda"}, "did you mean rdma?"),
        ("MooncakeConnector", {"num_workers": 0}, "num_workers"),
        ("MooncakeConnector", {"num_workers": 257}, "num_workers"),
        ("MooncakeConnector", {"transports": ["tcp"]}, "remove it, or use NixlConnector"),
        (
            "NixlConnector",
            {"transports": ["mooncake"]},
            "belongs to kv_connector MooncakeConnector",
        ),
        ("NixlConnector", {"num_workers": 2}, "num_workers"),
    ],
)
def test_a_wrong_setting_of_the_mooncake_connector_is_named(
    connector: str, settings: dict[str, object], sentence: str
) -> None:
    mapping = {
        "kv_connector": connector,
        "kv_role": "kv_both",
        "kv_connector_extra_config": settings,
    }
    assert sentence in refusal(mapping)
