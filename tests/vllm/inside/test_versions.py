"""Tests that an untested vLLM version is reported, and that only a vLLM that lacks something is
refused.
"""

import logging

import pytest
from tests.vllm.inside.conftest import StartEngine
from tests.vllm.inside.engines import run_until
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

import vllm
from kvferry.errors import ConfigError
from kvferry.vllm.release import TESTED, warn_if_untested

WARNING = (
    "kvferry was tested with vLLM 0.31.0, 0.32.0, 0.33.0, but this is 0.99.1: its connector "
    "interface may have changed"
)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage() for record in caplog.records if record.name == "kvferry.vllm.release"
    ]


@pytest.mark.parametrize("version", [*TESTED, "0.32.0+cpu"])
def test_a_tested_version_is_taken_in_silence(
    version: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    warn_if_untested()
    assert said(caplog) == []


def test_the_installed_version_is_a_tested_one() -> None:
    assert str(vllm.__version__).split("+")[0] in TESTED


def test_another_version_is_warned_of_and_serves(
    start_engine: StartEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warning names the tested versions. Each connector logs it once when it is created; vLLM
    creates one connector per process.
    """
    monkeypatch.setattr(vllm, "__version__", "0.99.1+cpu")
    # Inside vLLM our log lines go only to vLLM's handlers.
    monkeypatch.setattr(logging.getLogger("kvferry"), "handlers", [caplog.handler])
    monkeypatch.setattr(logging.getLogger("kvferry"), "propagate", False)
    with caplog.at_level(logging.WARNING, logger="kvferry"):
        engine = start_engine("p")
    assert said(caplog) == [WARNING] * 2
    engine.add("a", [1, 2, 3])
    run_until(lambda: engine.answers["a"].finish is not None, engine)


def test_a_vllm_that_lacks_something_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the release, what it lacks, what for, and the release to install. It comes
    when vLLM looks up the connector's class, before anything is started.
    """
    monkeypatch.setattr(vllm, "__version__", "0.30.0+cpu")
    monkeypatch.delattr("vllm.v1.core.kv_cache_utils.to_event_extra_keys")
    transfer = KVTransferConfig(
        kv_connector="NixlConnector", kv_connector_module_path="kvferry.vllm", kv_role="kv_both"
    )
    with pytest.raises(ConfigError) as caught:
        KVConnectorFactory.get_connector_class(transfer)
    assert str(caught.value) == (
        "vLLM 0.30.0 lacks what kvferry needs: to_event_extra_keys (to publish the KV events of "
        "tiers); install vLLM 0.31 or newer, best 0.33.0"
    )


def test_a_version_that_is_no_version_serves_too(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "__version__", "dev")
    start_engine("p")
