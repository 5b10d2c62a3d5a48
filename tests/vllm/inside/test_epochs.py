"""Tests that each incarnation of an engine has its own epoch, whatever the environment says:
tickets of a dead incarnation are invalid.
"""

import pytest
from tests.vllm.inside.conftest import StartEngine
from tests.vllm.inside.engines import vllm_config
from tests.vllm.inside.legs import PUSH
from tests.vllm.inside.test_life_cycle import prompt

import kvferry.vllm
from kvferry.vllm.plugin import EPOCH_VARIABLE


@pytest.mark.parametrize("word", ["fixed", ""])
def test_an_epoch_that_an_operator_has_fixed_is_another_one_after_a_restart(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    monkeypatch.setenv(EPOCH_VARIABLE, word)
    epochs = []
    for _ in range(2):
        # The next start of vLLM makes a new config.
        vllm_config.cache_clear()
        engine = start_engine(
            "p", kv={**PUSH, "kv_connector_extra_config": {"kv_lease_duration": 0.5}}
        )
        epochs.append(engine.prefill("a", prompt(40))["remote_epoch"])
        engine.close()
    assert len(set(epochs)) == 2


def test_the_pull_connector_has_all_of_vllms_names() -> None:
    assert (
        kvferry.vllm.NixlPullConnector
        is kvferry.vllm.NixlConnector
        is kvferry.vllm.KVFerryConnector
    )
