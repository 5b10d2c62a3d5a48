from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric

from kvferry.engine.api.metrics import ApiMetrics
from kvferry.engine.messages import CoreStatus, TransferSummary
from kvferry.router.fleet.instance_metrics import read_metrics


def carried_bytes(status: CoreStatus, model_name: str) -> Iterator[Metric]:
    family = CounterMetricFamily(
        "kvferry:transfer_bytes", "Bytes carried, by transport.", labels=["model_name", "transport"]
    )
    for transfer in status.transfers:
        family.add_metric([model_name, transfer.transport], transfer.total_bytes)
    yield family


def test_another_part_can_add_its_own_families() -> None:
    metrics = ApiMetrics("tiny", [carried_bytes])
    lines = (
        metrics.render(CoreStatus(nonce=1, transfers=[TransferSummary("shm", total_bytes=64)]))
        .decode()
        .splitlines()
    )
    assert 'kvferry:transfer_bytes_total{model_name="tiny",transport="shm"} 64.0' in lines
    assert not any(
        "transfer_bytes" in line
        for line in ApiMetrics("tiny").render(CoreStatus(nonce=1)).decode().splitlines()
    )


def test_an_empty_cache_has_no_usage() -> None:
    assert (
        'vllm:kv_cache_usage_perc{model_name="tiny"} 0.0'
        in ApiMetrics("tiny").render(CoreStatus(nonce=1)).decode()
    )


def test_routers_read_the_mode_from_the_page_also_when_the_core_does_not_answer() -> None:
    assert read_metrics(ApiMetrics("tiny", transfer_mode="push").render(None)).is_push
    assert read_metrics(
        ApiMetrics('a ", mode', transfer_mode="push").render(CoreStatus(nonce=1))
    ).is_push
    assert not read_metrics(
        ApiMetrics('mode="push"', transfer_mode="pull").render(CoreStatus(nonce=1))
    ).is_push
    assert "transfer_mode" not in ApiMetrics("tiny").render(CoreStatus(nonce=1)).decode()


def test_routers_find_the_side_channel_on_the_page() -> None:
    page = (
        ApiMetrics("tiny")
        .render(CoreStatus(nonce=1, connector_stats={"side_channel": "10.0.0.7:5600"}))
        .decode()
    )
    assert 'kvferry:side_channel{address="10.0.0.7:5600",model_name="tiny"} 1.0' in page
    assert (
        "side_channel"
        not in ApiMetrics("tiny")
        .render(CoreStatus(nonce=1, connector_stats={"transfers": 1}))
        .decode()
    )
