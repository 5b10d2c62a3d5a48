"""Tests what vLLM's `/metrics` show of our connectors from the start."""

from functools import partial
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from tests.vllm.inside.engines import Engine, vllm_config
from vllm.v1.outputs import ModelRunnerOutput

from kvferry.router.fleet.instance_metrics import read_metrics
from kvferry.vllm.connector import KVFerryConnector, KVFerryPushConnector


@pytest.mark.parametrize(
    ("connector", "is_push"), [(KVFerryPushConnector, True), (KVFerryConnector, False)]
)
def test_routers_read_the_mode_from_the_page(
    model: Path, connector: type[KVFerryConnector], is_push: bool
) -> None:
    registry = CollectorRegistry()
    types = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    connector.build_prom_metrics(
        vllm_config(str(model), "p", "{}"),
        types,
        ["model_name", "engine"],
        {0: ["m", "0"], 1: ["m", "1"]},
    )
    page = generate_latest(registry)
    assert read_metrics(page).is_push is is_push
    assert page.count(b"\nkvferry:transfer_mode{") == 2


def test_routers_find_the_side_channel_on_the_page_once_an_engine_has_told_of_it(
    model: Path,
) -> None:
    """vLLM's front-end cannot know the address: the engine may have any port."""
    registry = CollectorRegistry()
    types = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    shown = KVFerryConnector.build_prom_metrics(
        vllm_config(str(model), "p", "{}"), types, ["model_name", "engine"], {0: ["m", "0"]}
    )
    assert read_metrics(generate_latest(registry)).side_channel == ""
    engine = Engine(model, "p")
    try:
        assert engine.scheduler.has_requests()
        output = engine.scheduler.schedule()
        told = engine.scheduler.update_from_output(output, ModelRunnerOutput([], {}))
        shown.observe(told[0].scheduler_stats.kv_connector_stats)
        assert read_metrics(generate_latest(registry)).side_channel.startswith("127.0.0.1:")
        # After this report the scheduler has no more work.
        assert not engine.scheduler.has_requests()
    finally:
        engine.close()
