import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.connectors.stats import TransferStats
from kvferry.engine.api.metrics import ApiMetrics
from kvferry.engine.messages import CoreStatus, TransferSummary
from kvferry.router.fleet.instance_metrics import (
    MAX_PAGE_BYTES,
    InstanceReading,
    MetricsDelta,
    MetricsWatcher,
    read_metrics,
)

VLLM_PAGE = b"""\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m/x"} 3.0
vllm:num_requests_running{engine="1",model_name="m/x"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m/x"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m/x",reason="capacity"} 99.0
vllm:kv_cache_usage_perc{engine="0",model_name="m/x"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m/x"} 0.5
vllm:generation_tokens_total{engine="0",model_name="m/x"} 1e+03
vllm:generation_tokens_created{engine="0",model_name="m/x"} 1.7e+09
vllm:nixl_bytes_transferred_bucket{engine="0",le="2048.0",model_name="m/x"} 0.0
vllm:nixl_bytes_transferred_sum{engine="0",model_name="m/x"} 4096.0
vllm:nixl_xfer_time_seconds_count{engine="0",model_name="m/x"} 5.0
vllm:nixl_num_failed_transfers_total{engine="0",model_name="m/x"} 1.0
"""


def test_the_page_of_a_vllm_with_its_own_connector() -> None:
    reading = read_metrics(VLLM_PAGE)
    assert (reading.load.running, reading.load.waiting, reading.load.cache_usage) == (7, 2, 0.5)
    assert reading.load.generated_tokens == 1000
    assert (reading.kv.moved_bytes, reading.kv.transfers, reading.kv.failures) == (4096, 5, 1)
    assert (reading.kv.leases, reading.kv.active_transfers, reading.mode) == (None, None, "")
    assert reading.model == "m/x"


def test_the_page_of_the_embedded_engine() -> None:
    stats = TransferStats()
    for level, value in (("num_leases", 3), ("num_held_blocks", 17), ("num_transfers", 2)):
        stats.set_level(level, "tp0", value)
    stats.count("failed_transfers", 4)
    transports = [
        TransferSummary("shm", transfers=5, total_bytes=1000),
        TransferSummary("tcp", transfers=1, total_bytes=24),
    ]
    status = CoreStatus(
        nonce=1,
        num_running=2,
        num_waiting=1,
        num_blocks=10,
        num_used_blocks=4,
        transfers=transports,
        connector_stats=stats.to_dict(),
    )
    reading = read_metrics(
        ApiMetrics('odd "name" \\ with } and\nmore', transfer_mode="push").render(status)
    )
    assert (reading.load.running, reading.load.waiting, reading.load.cache_usage) == (2, 1, 0.4)
    assert (reading.kv.leases, reading.kv.held_blocks, reading.kv.active_transfers) == (3, 17, 2)
    assert (reading.kv.transfers, reading.kv.moved_bytes, reading.kv.failures) == (6, 1024, 4)
    assert reading.is_push
    assert reading.model == 'odd "name" \\ with } and\nmore'


@pytest.mark.parametrize(
    "odd", [b"NaN", b"-1", b"+Inf", b"1_0", b"x", b"", b"1e300", b"1e309", "１".encode()]
)
def test_a_value_that_no_level_can_have_is_not_shown(odd: bytes) -> None:
    assert read_metrics(b"vllm:num_requests_running " + odd + b"\n") == InstanceReading()
    assert read_metrics(b'vllm:num_requests_running{a="b"} ' + odd + b"\n").load.running is None


def test_a_line_without_labels_or_with_a_time_stamp_is_read() -> None:
    assert (
        read_metrics(
            b"vllm:num_requests_running 3 1700000000000\nkvferry:num_leases 2"
        ).load.running
        == 3
    )
    assert (
        read_metrics(b'kvferry:side_channel{address="10.0.0.7:5600"} 1.0').side_channel
        == "10.0.0.7:5600"
    )


def test_a_page_is_read_to_its_bound_and_not_in_half_lines() -> None:
    line = b'vllm:num_requests_running{model_name="m"} 1\n'
    filler = b"# " + b"x" * 1021 + b"\n"
    assert read_metrics(filler * (MAX_PAGE_BYTES // 1024 - 1) + line).load.running == 1
    assert read_metrics(filler * (MAX_PAGE_BYTES // 1024 + 1) + line).load.running is None
    cut = b"x" * (MAX_PAGE_BYTES - len(line) + 5) + b"\n"
    assert (
        read_metrics(cut + b'vllm:num_requests_running{model_name="m"} 123456789\n').load.running
        is None
    )


def test_a_line_made_to_take_for_ever_does_not() -> None:
    """The test runner's time limit is the check: each of these lines would take hours if the parser
    searched from every position again.
    """
    for labels in (
        b"a" * 3_000_000,
        b'a="' * 1_000_000,
        b'a="' + b"\\" * 3_000_000,
        b",,," * 1_000_000,
    ):
        assert read_metrics(b"kvferry:transfer_mode{" + labels + b"} 1\n").mode == ""


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=80),
            st.sampled_from(VLLM_PAGE.splitlines()),
            st.just(b"kvferry:transfer_mode{mode="),
        ),
        max_size=30,
    )
)
def test_any_bytes_are_read_without_an_error(lines: list[bytes]) -> None:
    reading = read_metrics(b"\n".join(lines))
    assert reading.load.cache_usage is None or 0 <= reading.load.cache_usage <= 1
    assert reading.load.running is None or reading.load.running >= 0


def page(tokens: int, moved: int) -> InstanceReading:
    return read_metrics(
        b"vllm:generation_tokens_total %d\nkvferry:transfer_bytes_total %d\n" % (tokens, moved)
    )


def test_growth_between_two_readings_and_its_rate() -> None:
    watcher = MetricsWatcher()
    assert watcher.note(page(100, 1000), now=10.0) == MetricsDelta()
    assert watcher.note(page(140, 3000), now=12.0) == MetricsDelta(40, 2000, over_s=2.0)
    assert (watcher.tokens_per_s, watcher.moved_bytes_per_s) == (20.0, 1000.0)


def test_counters_of_another_life_have_grown_by_nothing() -> None:
    watcher = MetricsWatcher()
    watcher.note(page(1000, 1000), now=10.0)
    assert watcher.note(page(5, 7), now=12.0) == MetricsDelta(0, 0, over_s=2.0)
    assert watcher.note(page(6, 9), now=14.0) == MetricsDelta(1, 2, over_s=2.0)


def test_an_instance_that_does_not_answer_has_no_figures() -> None:
    watcher = MetricsWatcher()
    watcher.note(page(1000, 1000), now=10.0)
    watcher.forget()
    assert (watcher.reading, watcher.read_at, watcher.tokens_per_s) == (None, None, None)
    assert watcher.note(page(2000, 2000), now=12.0) == MetricsDelta()
