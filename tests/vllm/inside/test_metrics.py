"""What vLLM's `/metrics` show of our connectors from the start on."""

from functools import partial
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from tests.vllm.inside.engines import vllm_config

from kvferry.router.instance_metrics import read_metrics
from kvferry.vllm.connector import KVFerryConnector, KVFerryPushConnector


@pytest.mark.parametrize(("connector", "is_push"), [(KVFerryPushConnector, True), (KVFerryConnector, False)])
def test_routers_read_the_mode_from_the_page(model: Path, connector: type[KVFerryConnector], is_push: bool) -> None:
    registry = CollectorRegistry()
    types = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    connector.build_prom_metrics(vllm_config(str(model), "p", "{}"), types, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})
    page = generate_latest(registry)
    assert read_metrics(page).is_push is is_push
    assert page.count(b"\nkvferry:transfer_mode{") == 2
