"""Tests what vLLM's `/metrics` show of our connectors from the start."""

from functools import partial
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from tests.vllm.inside.engines import Engine, vllm_config
from vllm.v1.outputs import ModelRunnerOutput

from kvferry.connectors.offloading.metadata import TIER_COUNTERS, OffloadStats
from kvferry.router.fleet.instance_metrics import read_metrics
from kvferry.router.fleet.tier_metrics import LookupCounters, TierCounters, TierLevels
from kvferry.tiers.base import TierUsage
from kvferry.vllm import KVFerryConnector, KVFerryPushConnector
from kvferry.vllm.metrics.tiers import OffloadPromMetrics


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


def test_routers_read_the_tiers_of_all_engines_from_the_page(model: Path) -> None:
    registry = CollectorRegistry()
    types = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    labels: dict[int, list[object]] = {0: ["m", "0"], 1: ["m", "1"]}
    config = vllm_config(str(model), "p", "{}")
    shown = OffloadPromMetrics(config, types, ["model_name", "engine"], labels)
    stats = OffloadStats()
    stats.count("queried_tokens", 90)
    stats.add_tiers({"disk": {"loaded_bytes": 5, "refused": 1}})
    stats.set_usage("tp0", "disk", TierUsage(used_bytes=10, num_entries=2, max_bytes=40))
    for engine in labels:
        shown.observe(stats.to_dict(), engine)
    reading = read_metrics(generate_latest(registry)).offload
    assert reading is not None
    assert reading.lookups == LookupCounters(180, 0, 0)
    counters = reading.tiers["disk"].counters
    assert counters == TierCounters(*[0] * len(counters))._replace(loaded_bytes=10, refused=2)
    assert reading.tiers["disk"].levels == TierLevels(20, 80, 4)


def test_counters_of_a_tier_show_0_before_anything_happens_to_it(model: Path) -> None:
    """An alert compares a counter with its value before, so the counter must have one."""
    registry = CollectorRegistry()
    types = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    config = vllm_config(str(model), "p", "{}")
    shown = OffloadPromMetrics(config, types, ["model_name", "engine"], {0: ["m", "0"]})
    labels = {"model_name": "m", "engine": "0", "tier": "disk"}
    assert registry.get_sample_value("kvferry:tier_refused_total", labels) is None
    stats = OffloadStats()
    stats.set_usage("tp0", "disk", TierUsage(used_bytes=0, num_entries=0, max_bytes=40))
    shown.observe(stats.to_dict())
    for name in TIER_COUNTERS:
        assert registry.get_sample_value(f"kvferry:tier_{name}_total", labels) == 0, name


def test_dashboards_find_vllms_own_names_for_the_figures_of_tiers(model: Path) -> None:
    registry = CollectorRegistry()
    types = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    config = vllm_config(str(model), "p", "{}")
    shown = OffloadPromMetrics(config, types, ["model_name", "engine"], {0: ["m", "0"]})
    stats = OffloadStats()
    stats.add_tiers(
        {
            "cpu": {"loaded_bytes": 3, "stored_bytes": 5, "dropped_stores": 7},
            "disk": {"loaded_bytes": 11, "loads": 13, "failed_stores": 17},
        }
    )
    shown.observe(stats.to_dict())
    own, disk = (
        {"model_name": "m", "engine": "0"},
        {"model_name": "m", "engine": "0", "tier": "disk"},
    )
    for name, labels, value in [
        ("load_bytes", own, 3),
        ("store_bytes", own, 5),
        ("allocation_failure", own, 7),
        ("tiering_read_bytes", disk, 11),
        ("tiering_chunk_hits", disk, 13),
        ("tiering_cascade_job_failures", disk, 17),
    ]:
        assert registry.get_sample_value(f"vllm:kv_offload_{name}_total", labels) == value, name
