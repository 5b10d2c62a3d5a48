import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.connectors.offloading.metadata import OffloadStats
from kvferry.engine.api.metrics import ApiMetrics
from kvferry.engine.messages import CoreStatus
from kvferry.router.dashboard.state import InstanceFacts, RouterFacts, build_state, encode_state
from kvferry.router.fleet.instance_metrics import MAX_TIERS, MetricsWatcher, read_metrics
from kvferry.router.fleet.tier_metrics import (
    MAX_READINGS,
    LookupCounters,
    OffloadGrowth,
    OffloadReading,
    TierCounters,
    TierLevels,
)
from kvferry.router.time_series import TimeSeries
from kvferry.router.timeline import RecentRequests
from kvferry.tiers.base import TierUsage

VLLM_PAGE = b"""\
kvferry:offload_queried_tokens_total{engine="0",model_name="m/x"} 1000.0
kvferry:offload_queried_tokens_total{engine="1",model_name="m/x"} 500.0
kvferry:offload_queried_tokens_created{engine="0",model_name="m/x"} 1.7e+09
kvferry:offload_hit_tokens_total{engine="0",model_name="m/x"} 600.0
kvferry:tier_loaded_bytes_total{engine="0",model_name="m/x",tier="cpu"} 4096.0
kvferry:tier_loaded_bytes_total{engine="1",model_name="m/x",tier="cpu"} 1.0
kvferry:tier_refused_total{engine="0",model_name="m/x",tier="disk"} 2.0
kvferry:tier_used_bytes{engine="0",model_name="m/x",tier="disk"} 1e+06
kvferry:tier_max_bytes{engine="0",model_name="m/x",tier="disk"} 4e+06
kvferry:tier_objects{engine="0",model_name="m/x",tier="disk"} 7.0
"""


def offload(page: bytes) -> OffloadReading:
    reading = read_metrics(page).offload
    assert reading is not None
    return reading


def test_the_page_of_a_vllm_with_tiers() -> None:
    """Counters of data-parallel engines are summed; a counter without a line is None."""
    reading = offload(VLLM_PAGE)
    assert reading.lookups == LookupCounters(queried_tokens=1500, hit_tokens=600)
    assert list(reading.tiers) == ["cpu", "disk"]
    assert reading.tiers["cpu"].counters == TierCounters(loaded_bytes=4097)
    assert reading.tiers["cpu"].levels == TierLevels()
    assert reading.tiers["disk"].counters == TierCounters(refused=2)
    assert reading.tiers["disk"].levels == TierLevels(1e6, 4e6, 7)


def test_the_page_of_an_embedded_engine_with_tiers() -> None:
    stats = OffloadStats()
    stats.count("queried_tokens", 90)
    stats.count("hit_tokens", 30)
    stats.add_tiers({"cpu": {"loaded_bytes": 5, "stored_bytes": 6, "dropped_stores": 1}})
    stats.set_usage("tp0", "cpu", TierUsage(used_bytes=10, num_entries=2, max_bytes=40))
    stats.set_usage("tp1", "cpu", TierUsage(used_bytes=10, num_entries=2, max_bytes=40))
    stats.set_usage("tp0", "object", TierUsage(used_bytes=3, num_entries=1, max_bytes=None))
    status = CoreStatus(nonce=1, connector_stats=stats.to_dict())
    reading = offload(ApiMetrics("tiny").render(status))
    assert reading.lookups == LookupCounters(90, 30, 0)
    assert reading.tiers["cpu"].levels == TierLevels(20, 80, 4)
    assert reading.tiers["cpu"].counters == TierCounters(5, 6, 0, 0, 0, 0, 1)
    assert reading.tiers["object"].levels == TierLevels(3, 0, 1)


def test_an_engine_without_tiers_has_none() -> None:
    page = ApiMetrics("tiny").render(CoreStatus(nonce=1))
    assert offload(page) == OffloadReading(LookupCounters(), {})


def test_the_tiers_of_an_engine_whose_core_does_not_answer_are_not_known() -> None:
    assert read_metrics(ApiMetrics("tiny").render(None)).offload is None


@pytest.mark.parametrize("odd", [b"NaN", b"-1", b"+Inf", b"1_0", b"x", b"", b"1e300"])
def test_a_value_that_no_tier_can_have_is_not_read(odd: bytes) -> None:
    assert read_metrics(b'kvferry:tier_used_bytes{tier="cpu"} ' + odd + b"\n").offload is None
    assert read_metrics(b"kvferry:offload_hit_tokens_total " + odd + b"\n").offload is None


def test_tiers_without_a_name_are_not_read_and_a_flood_of_tiers_is_cut() -> None:
    lines = [b"kvferry:tier_used_bytes 5", b'kvferry:tier_used_bytes{tier=""} 5']
    lines += [b'kvferry:tier_used_bytes{tier="%05d"} 5' % number for number in range(50_000)]
    lines += [b'kvferry:tier_objects{tier="00000"} 1']
    tiers = offload(b"\n".join(lines)).tiers
    assert list(tiers) == [f"{number:05d}" for number in range(MAX_TIERS)]
    assert tiers["00000"].levels.objects == 1


def page(
    queried: int = 0, hit: int = 0, cpu_loaded: int = 0, disk_loaded: int | None = None
) -> bytes:
    text = (
        f"kvferry:offload_queried_tokens_total {queried}\n"
        f"kvferry:offload_hit_tokens_total {hit}\n"
        f'kvferry:tier_loaded_bytes_total{{tier="cpu"}} {cpu_loaded}\n'
    )
    if disk_loaded is not None:
        text += f'kvferry:tier_loaded_bytes_total{{tier="disk"}} {disk_loaded}\n'
    return text.encode()


def growth(*readings: tuple[float, bytes]) -> OffloadGrowth:
    watcher = MetricsWatcher()
    for now, text in readings:
        watcher.note(read_metrics(text), now)
    return watcher.offload.growth()


def test_hit_rate_loaded_bytes_and_their_shares_are_those_between_the_readings() -> None:
    """The first reading has another hit rate and other shares. The disk was not used before, and
    vLLM shows no counter before its first count.
    """
    found = growth((10.0, page(1000, 1000, 10_000)), (14.0, page(1200, 1050, 10_300, 100)))
    assert found.hit_rate == 0.25
    assert found.per_s(found.of("cpu").loaded_bytes) == 75.0
    assert (found.load_share("cpu"), found.load_share("disk")) == (0.75, 0.25)


def test_the_first_counts_of_an_engine_have_grown_from_zero() -> None:
    """The embedded engine shows no tiers before their first count."""
    idle = b"vllm:num_requests_running 0\n"
    assert growth((10.0, idle), (15.0, page(100, 20))).hit_rate == 0.2


def test_the_window_is_the_last_minute() -> None:
    readings = [(float(now), page(now * 100, min(now, 100) * 100)) for now in range(0, 155, 5)]
    found = growth(*readings)
    # Until second 100 every token was a hit, and then none; the window is from 90 to 150.
    assert found.over_s == 60.0
    assert found.lookups == LookupCounters(6000, 1000)


def test_readings_that_are_further_apart_than_the_window_are_compared() -> None:
    found = growth((0.0, page(0)), (100.0, page(100, 100)), (300.0, page(300, 200)))
    assert (found.over_s, found.hit_rate) == (200.0, 0.5)


def test_the_number_of_kept_readings_is_bounded() -> None:
    found = growth(*((number / 10, page(number)) for number in range(2000)))
    assert found.over_s == pytest.approx((MAX_READINGS - 1) / 10)
    assert found.lookups.queried_tokens == MAX_READINGS - 1


def test_two_readings_at_one_moment_have_no_rate() -> None:
    found = growth((5.0, page(1)), (5.0, page(2, 1, 7)))
    assert found.per_s(found.of("cpu").loaded_bytes) is None


@pytest.mark.parametrize("restarted", [page(5, 0, 500), page(500, 500, 5), page(500, 500, 500, 5)])
def test_a_counter_that_went_back_begins_a_new_window(restarted: bytes) -> None:
    before = (10.0, page(100, 100, 100, 100))
    assert growth(before, (15.0, restarted)) == OffloadGrowth()
    after = page(1000, 600, 600, 600)
    assert growth(before, (15.0, restarted), (20.0, after)).over_s == 5.0


def test_a_page_without_any_figures_is_no_reading_of_zeros() -> None:
    silent = ApiMetrics("tiny").render(None)
    found = growth((10.0, page(1000, 1000)), (15.0, silent), (20.0, page(1100, 1010)))
    assert found.lookups == LookupCounters(100, 10)


def test_an_instance_that_does_not_answer_has_no_window() -> None:
    watcher = MetricsWatcher()
    watcher.note(read_metrics(page(100)), 10.0)
    watcher.forget()
    watcher.note(read_metrics(page(200)), 15.0)
    assert watcher.offload.growth() == OffloadGrowth()


def test_no_share_is_above_one_and_nothing_has_no_share() -> None:
    assert growth((0.0, page()), (5.0, page(10, 30))).hit_rate == 1.0
    idle = growth((0.0, page(9, 9, 9)), (5.0, page(9, 9, 9)))
    assert (idle.hit_rate, idle.load_share("cpu"), idle.load_share("none")) == (None, None, None)


NAMES = [
    *(f"kvferry:offload_{name}_total" for name in LookupCounters._fields),
    *(f"kvferry:tier_{name}_total" for name in TierCounters._fields),
    *(f"kvferry:tier_{name}" for name in TierLevels._fields),
]
VALUES = ["0", "1", "7e15", "9007199254740992", "5e-324", "NaN", "-3", "+Inf", "", "1e400", "x"]
LINES = st.builds(
    lambda name, tier, value: f'{name}{{tier="{tier}"}} {value}'.encode(),
    st.sampled_from(NAMES),
    st.sampled_from(["cpu", "<b>", 'a"', "\\\\", "__proto__", "ü", ""]),
    st.sampled_from(VALUES),
)


@given(st.lists(st.lists(LINES, max_size=12), max_size=6), st.floats(0, 100))
def test_whatever_the_pages_say_the_state_is_finite_json(
    pages: list[list[bytes]], step_s: float
) -> None:
    watcher = MetricsWatcher()
    for number, lines in enumerate(pages):
        watcher.note(read_metrics(b"\n".join(lines)), number * step_s)
    facts = InstanceFacts("p", "prefill", "healthy", watcher=watcher)
    state = build_state(RouterFacts("1", 1.0), [facts], TimeSeries(), RecentRequests(), now=1000.0)
    shown = msgspec.json.decode(encode_state(state))["instances"][0]["offload"]
    if shown is None:
        return
    assert shown["hit_rate"] is None or 0 <= shown["hit_rate"] <= 1
    for tier in shown["tiers"]:
        assert tier["load_share"] is None or 0 <= tier["load_share"] <= 1
        assert all(value is None or value >= 0 for key, value in tier.items() if key != "name")
