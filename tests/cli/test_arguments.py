"""Tests that both spellings of `--kv-transfer-config` mean the same."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cli.arguments import TRANSFER_CONFIG_FLAG, split_transfer_arguments
from kvferry.config import KVTransferConfig, NixlExtraConfig
from kvferry.errors import ConfigError


def merged(*arguments: str) -> dict[str, Any] | None:
    return split_transfer_arguments(arguments).mapping


def test_the_two_spellings_of_the_seeds_mean_the_same() -> None:
    whole = (
        '{"kv_connector":"NixlConnector","kv_role":"kv_both",'
        '"kv_connector_extra_config":{"backends":["LIBFABRIC"]}}'
    )
    dotted = [
        f"{TRANSFER_CONFIG_FLAG}.kv_connector",
        "NixlConnector",
        f"{TRANSFER_CONFIG_FLAG}.kv_role",
        "kv_both",
    ]
    dotted += [f"{TRANSFER_CONFIG_FLAG}.kv_connector_extra_config.backends+", "LIBFABRIC"]
    mapping = merged(*dotted)
    assert mapping == merged(TRANSFER_CONFIG_FLAG, whole) == json.loads(whole)
    assert mapping is not None
    extra = KVTransferConfig.from_mapping(mapping).extra
    assert isinstance(extra, NixlExtraConfig)
    assert extra.backends == ("LIBFABRIC",)


def test_other_arguments_pass_through_in_order() -> None:
    split = split_transfer_arguments(
        [
            "model",
            "--port",
            "1",
            f"{TRANSFER_CONFIG_FLAG}.kv_role=kv_both",
            "--max_model_len=8",
            "--",
            f"{TRANSFER_CONFIG_FLAG}.x",
        ]
    )
    assert split.rest == (
        "model",
        "--port",
        "1",
        "--max-model-len=8",
        "--",
        f"{TRANSFER_CONFIG_FLAG}.x",
    )
    assert split.mapping == {"kv_role": "kv_both"}


def test_nothing_said_is_not_an_empty_config() -> None:
    assert merged("model", "--port", "1") is None
    assert merged(TRANSFER_CONFIG_FLAG, "{}") == {}


def test_a_dotted_value_wins_over_the_json_whatever_the_order() -> None:
    dotted, whole = (
        [f"{TRANSFER_CONFIG_FLAG}.kv_role", "kv_consumer"],
        [TRANSFER_CONFIG_FLAG, '{"kv_role": "kv_both", "engine_id": "x"}'],
    )
    assert (
        merged(*dotted, *whole)
        == merged(*whole, *dotted)
        == {"kv_role": "kv_consumer", "engine_id": "x"}
    )


def test_appending_adds_to_the_list_of_the_json() -> None:
    whole = '{"kv_connector_extra_config": {"backends": ["UCX"]}}'
    flag = f"{TRANSFER_CONFIG_FLAG}.kv_connector_extra_config.backends+"
    assert merged(flag, "A", TRANSFER_CONFIG_FLAG, whole, f"{flag}=B") == {
        "kv_connector_extra_config": {"backends": ["UCX", "A", "B"]}
    }


LEASE_PLUS = [f"{TRANSFER_CONFIG_FLAG}.kv_connector_extra_config.kv_lease_duration+", "5"]

VALUES: list[tuple[str, object]] = [
    ("60", 60),
    ("-1.5", -1.5),
    ("true", True),
    ("null", None),
    ('["a"]', ["a"]),
    ("kv", "kv"),
    ("True", "True"),
    ("a=b", "a=b"),
]


@pytest.mark.parametrize(("text", "value"), VALUES)
def test_values_are_json_where_they_can_be(text: str, value: object) -> None:
    assert (
        merged(f"{TRANSFER_CONFIG_FLAG}.a.b", text)
        == merged(f"{TRANSFER_CONFIG_FLAG}.a.b={text}")
        == {"a": {"b": value}}
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [("123", "123"), ("true", "true"), ('"123"', "123"), ("null", "null"), ("p0", "p0")],
)
def test_a_key_that_takes_a_text_gets_one(text: str, value: str) -> None:
    assert merged(f"{TRANSFER_CONFIG_FLAG}.engine_id", text) == {"engine_id": value}


def test_what_is_a_text_depends_on_the_connector() -> None:
    extra = f"{TRANSFER_CONFIG_FLAG}.kv_connector_extra_config"
    own = merged(
        f"{TRANSFER_CONFIG_FLAG}.kv_connector",
        "OffloadingConnector",
        f"{extra}.spec_name",
        "7",
        f"{extra}.cpu_bytes_to_use",
        "7",
    )
    assert own == {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {"spec_name": "7", "cpu_bytes_to_use": 7},
    }
    listed = merged(
        TRANSFER_CONFIG_FLAG,
        '{"kv_connector": "NixlConnector"}',
        f"{extra}.backends+",
        "7",
        f"{extra}.num_threads",
        "7",
    )
    assert listed == {
        "kv_connector": "NixlConnector",
        "kv_connector_extra_config": {"backends": ["7"], "num_threads": 7},
    }
    theirs = merged(
        TRANSFER_CONFIG_FLAG,
        '{"kv_connector": "NixlConnector", "kv_connector_module_path": "their.module"}',
        f"{extra}.backends+",
        "7",
    )
    assert theirs is not None
    assert theirs["kv_connector_extra_config"] == {"backends": [7]}


def test_null_stays_null_where_there_may_be_none() -> None:
    assert merged(f"{TRANSFER_CONFIG_FLAG}.kv_connector_module_path", "null") == {
        "kv_connector_module_path": None
    }


def test_underscores_in_the_flag_are_dashes() -> None:
    assert (
        merged("--kv_transfer_config.kv_role", "kv_both")
        == merged('--kv_transfer_config={"kv_role":"kv_both"}')
        == {"kv_role": "kv_both"}
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([TRANSFER_CONFIG_FLAG], "--kv-transfer-config needs a value"),
        (
            [f"{TRANSFER_CONFIG_FLAG}.kv_role", "--port"],
            "--kv-transfer-config.kv_role needs a value",
        ),
        (
            [TRANSFER_CONFIG_FLAG, "{}", TRANSFER_CONFIG_FLAG, "{}"],
            "--kv-transfer-config is given twice",
        ),
        ([TRANSFER_CONFIG_FLAG, "{'kv_role': 1}"], "--kv-transfer-config is not JSON"),
        ([TRANSFER_CONFIG_FLAG, "[" * 100_000], "--kv-transfer-config is not JSON"),
        ([TRANSFER_CONFIG_FLAG, "[]"], "--kv-transfer-config must be a JSON object, got []"),
        ([TRANSFER_CONFIG_FLAG, '{"a": 1, "a": 2}'], '--kv-transfer-config has the key "a" twice'),
        (
            [f"{TRANSFER_CONFIG_FLAG}.a", "1", f"{TRANSFER_CONFIG_FLAG}.a", "2"],
            "--kv-transfer-config.a is given twice",
        ),
        (
            [f"{TRANSFER_CONFIG_FLAG}.a.b", "1", f"{TRANSFER_CONFIG_FLAG}.a", "2"],
            "--kv-transfer-config.a.b sets a key inside a, which another flag sets as a whole",
        ),
        (
            [TRANSFER_CONFIG_FLAG, '{"a": 3}', f"{TRANSFER_CONFIG_FLAG}.a.b", "1"],
            "a is 3, so a.b cannot be set inside it",
        ),
        (
            [TRANSFER_CONFIG_FLAG, '{"a": "UCX"}', f"{TRANSFER_CONFIG_FLAG}.a+", "1"],
            'a is "UCX", which is not a list, so no item can be appended to it',
        ),
        ([f"{TRANSFER_CONFIG_FLAG}.kv_role+", "x"], "kv_role takes one value; remove the +"),
        (
            [f"{TRANSFER_CONFIG_FLAG}.kv_connector", "NixlConnector", *LEASE_PLUS],
            "kv_connector_extra_config.kv_lease_duration takes one value; remove the +",
        ),
        ([f"{TRANSFER_CONFIG_FLAG}.", "1"], "--kv-transfer-config. is not a dotted key"),
        ([f"{TRANSFER_CONFIG_FLAG}.a..b", "1"], "--kv-transfer-config.a..b is not a dotted key"),
        ([f"{TRANSFER_CONFIG_FLAG}.a+.b", "1"], "--kv-transfer-config.a+.b is not a dotted key"),
        ([f"{TRANSFER_CONFIG_FLAG}.{'a.' * 50}b", "1"], '"--kv-transfer-config.a.a'),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        split_transfer_arguments(arguments)
    assert str(caught.value).startswith(sentence)


words = (
    st.sampled_from(
        [
            TRANSFER_CONFIG_FLAG,
            f"{TRANSFER_CONFIG_FLAG}.a",
            f"{TRANSFER_CONFIG_FLAG}.a.b",
            f"{TRANSFER_CONFIG_FLAG}.a+",
            f"{TRANSFER_CONFIG_FLAG}.a.b+=1",
            f"{TRANSFER_CONFIG_FLAG}=",
            "{}",
            '{"a":[]}',
            "--",
            "x",
        ]
    )
    | st.text()
)


@given(st.lists(words))
def test_any_arguments_become_a_mapping_or_one_sentence(arguments: list[str]) -> None:
    try:
        split = split_transfer_arguments(arguments)
    except ConfigError:
        return
    assert len(split.rest) <= len(arguments)
