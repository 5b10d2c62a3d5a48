"""Tests how the flags of `kvferry serve` become engine options."""

import argparse
import json
from pathlib import Path

import pytest

from kvferry.cli.arguments import Parser, split_transfer_arguments
from kvferry.cli.serve import (
    add_arguments,
    api_host,
    engine_options,
    open_to_all,
    read_api_keys,
)
from kvferry.config import SideChannelConfig
from kvferry.engine.options import EngineOptions
from kvferry.errors import ConfigError
from kvferry.types import KVLayout
from kvferry.web.api_keys import ApiKeys

PULL = '{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_load_failure_policy":"fail"}'


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def parsed(*arguments: str) -> argparse.Namespace:
    parser = Parser("kvferry serve", "")
    add_arguments(parser)
    split = split_transfer_arguments(arguments)
    found = parser.parse(split.rest)
    found.kv_transfer_config = split.mapping
    return found


def options(*arguments: str) -> EngineOptions:
    return engine_options(parsed(*arguments), {})


def test_without_flags_the_options_have_their_own_defaults(model: Path) -> None:
    assert options(str(model)) == EngineOptions(model=model, served_model_name=str(model))


def test_every_flag_reaches_its_option(model: Path) -> None:
    flags = (
        "--dtype float32 --kv-cache-dtype bfloat16 --block-size 32 --num-gpu-blocks-override 7 "
        "--kv-cache-memory-bytes 1G"
    )
    flags += (
        " --max-model-len 8k --max-num-seqs 3 --max-num-batched-tokens 512 -tp 2 "
        "--no-enable-prefix-caching --enforce-eager"
    )
    flags += (
        " --no-enable-chunked-prefill --served-model-name x --seed 9 --gpu-memory-utilization 0.5 "
        "--num-threads 2 --compute-dtype float64"
        " --shutdown-timeout 1.5 --drain-timeout 0 --device cuda:3"
    )
    assert options(str(model), *flags.split()) == EngineOptions(
        model=model,
        served_model_name="x",
        dtype="float32",
        kv_cache_dtype="bfloat16",
        compute_dtype="float64",
        block_size=32,
        num_blocks=7,
        kv_cache_memory_bytes=2**30,
        gpu_memory_utilization=0.5,
        device="cuda:3",
        max_model_len=8000,
        max_num_seqs=3,
        max_num_batched_tokens=512,
        tensor_parallel_size=2,
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
        num_threads=2,
        seed=9,
        shutdown_timeout_s=1.5,
        drain_timeout_s=0,
    )


def test_commands_written_for_vllm_are_understood(model: Path) -> None:
    first = parsed(str(model), "--port", "8100", "--enforce-eager", "--kv-transfer-config", PULL)
    assert first.port == 8100
    transfer = engine_options(first, {}).kv_transfer
    assert transfer is not None
    assert transfer.kv_connector == "NixlConnector"
    second = options(
        str(model), "--port", "8000", "--tensor-parallel-size", "8", "--kv-transfer-config", PULL
    )
    assert second.tensor_parallel_size == 8


def test_the_layout_comes_from_the_environment(model: Path) -> None:
    assert (
        engine_options(parsed(str(model)), {"VLLM_KV_CACHE_LAYOUT": "NHD"}).kv_cache_layout
        is KVLayout.NHD
    )


def test_cross_layer_blocks_are_asked_for_by_the_connector_s_setting(model: Path) -> None:
    setting = "--kv-transfer-config.kv_connector_extra_config.enable_cross_layers_blocks"
    assert not options(str(model), "--kv-transfer-config", PULL).cross_layer_blocks
    assert not options(
        str(model), "--kv-transfer-config", PULL, setting, "false"
    ).cross_layer_blocks
    assert options(str(model), "--kv-transfer-config", PULL, setting, "true").cross_layer_blocks
    child = json.loads(PULL) | {"kv_connector_extra_config": {"enable_cross_layers_blocks": True}}
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [json.loads(PULL), child]},
    }
    assert options(str(model), "--kv-transfer-config", json.dumps(both)).cross_layer_blocks


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_the_cache_may_be_kept_in_eight_bits_but_not_the_weights(model: Path, name: str) -> None:
    assert options(str(model), "--kv-cache-dtype", name).kv_cache_dtype == name
    with pytest.raises(ConfigError, match="--dtype"):
        options(str(model), "--dtype", name)


def test_a_buffer_on_a_gpu_needs_an_engine_on_a_gpu(model: Path) -> None:
    with pytest.raises(ConfigError, match="kv_buffer_device cannot be cuda with --device cpu"):
        options(
            str(model),
            "--kv-transfer-config",
            PULL,
            "--kv-transfer-config.kv_buffer_device",
            "cuda",
        )
    options(
        str(model), "--kv-transfer-config", PULL, "--kv-transfer-config.kv_buffer_device", "cpu"
    )


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--block-size 0", "--block-size must be a whole number of at least 1, got 0"),
        ("-tp 0", "--tensor-parallel-size/-tp must be a whole number from 1 to 256, got 0"),
        (
            "--num-gpu-blocks-override -1",
            "--num-gpu-blocks-override must be a whole number of at least 0, got -1",
        ),
        (
            "--drain-timeout -1",
            "--drain-timeout must be a number of seconds from 0 to 86400, got -1",
        ),
        (
            "--drain-timeout nan",
            '--drain-timeout must be a number of seconds from 0 to 86400, got "nan"',
        ),
        (
            "--shutdown-timeout inf",
            '--shutdown-timeout must be a number of seconds from 0 to 86400, got "inf"',
        ),
    ],
)
def test_a_wrong_option_is_named_by_its_flag(model: Path, flags: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        options(str(model), *flags.split())
    assert str(caught.value) == f"{sentence}; see `kvferry serve --help`"


def test_the_api_is_as_reachable_as_the_side_channel() -> None:
    local, remote = SideChannelConfig(), SideChannelConfig("10.0.0.1", "10.0.0.1")
    everywhere = SideChannelConfig("*", "10.0.0.1")
    assert [api_host(None, local), api_host(None, remote), api_host(None, everywhere)] == [
        "localhost",
        "10.0.0.1",
        "0.0.0.0",
    ]
    assert api_host("127.0.0.5", remote) == "127.0.0.5"


def test_an_engine_that_other_machines_can_use_without_a_key_warns_about_it() -> None:
    keys = ApiKeys.of([("one", "sk-one")])
    assert "without API keys" in open_to_all("10.0.0.1", ApiKeys())[0]
    assert "without API keys" in open_to_all("0.0.0.0", ApiKeys())[0]
    assert open_to_all("10.0.0.1", keys) == open_to_all("localhost", ApiKeys()) == []


@pytest.mark.parametrize(
    ("text", "mode", "sentence"),
    [
        ("sk-one", 0o644, "which other users may read or write; run `chmod 600 {path}`"),
        ("# none\n", 0o600, "which holds no key"),
        ("a b c", 0o600, "has 3 words"),
    ],
)
def test_a_key_file_that_does_not_protect_the_api_is_refused(
    tmp_path: Path, text: str, mode: int, sentence: str
) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(ConfigError) as caught:
        read_api_keys(str(path))
    assert sentence.format(path=path) in str(caught.value)
