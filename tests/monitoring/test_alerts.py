"""The alert rules, by Prometheus' own tool: each alert fires when it should, and only then."""

import re
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from tests.monitoring.prometheus import ALERTS, CONFIG, ROOT, expressions, promtool

from kvferry.connectors.offloading.metadata import LOOKUP_COUNTERS, TIER_COUNTERS, TIER_LEVELS
from kvferry.connectors.stats import COUNTERS, HISTOGRAMS, LEVELS

Series = dict[str, str]
"""Values of each series, one every 15 s, in the notation of promtool: `0+2x50` grows by 2."""

ROUTER, ENGINE = 'job="kvferry-router",instance="r"', 'job="kvferry-engine",instance="e"'
TIER, TIER_2 = f'{ENGINE},tier="disk"', f'{ENGINE},tier="cpu"'
IN = f'{ROUTER},role="decode",exported_instance="http://d"'


def router(name: str, **labels: str) -> str:
    return f"kvferry:router_{name}{{{_labels(ROUTER, labels)}}}"


def engine(name: str, **labels: str) -> str:
    return f"{name}{{{_labels(ENGINE, labels)}}}"


def tier(name: str) -> str:
    return f"kvferry:tier_{name}{{{TIER}}}"


def outcomes(**rates: float) -> Series:
    return {router("outcomes_total", outcome=name): f"0+{rate}x50" for name, rate in rates.items()}


def latency(name: str, fast: int, slow: int) -> Series:
    """So many values per 15 s that stay below 1 s, and so many of about 25 s."""
    bounds = {"1.0": fast, "10.0": fast, "30.0": fast + slow, "+Inf": fast + slow}
    return {router(f"{name}_bucket", le=le): f"0+{count}x50" for le, count in bounds.items()}


def _labels(given: str, more: dict[str, str]) -> str:
    return ",".join([given, *(f'{name}="{value}"' for name, value in more.items())])


CASES: dict[str, tuple[Series, Series]] = {
    "KvferryRouterDown": (
        {f"up{{{ROUTER}}}": "1x40 0x10"},
        {f"up{{{ROUTER}}}": "1x48 0x2", f"up{{{ENGINE}}}": "0x50"},
    ),
    "KvferryEngineDown": (
        {f"up{{{ENGINE}}}": "1x40 0x10"},
        {f"up{{{ENGINE}}}": "1x48 0x2", f"up{{{ROUTER}}}": "0x50"},
    ),
    "KvferryNoInstance": (
        {router("usable_instances", role="decode"): "1x40 0x10"},
        {router("usable_instances", role="decode"): "1x50"},
    ),
    # An instance that goes from one failing state to another is still ejected.
    "KvferryInstanceEjected": (
        {
            f'kvferry:router_instance{{{IN},state="ejected"}}': "_x46 1x2 stale",
            f'kvferry:router_instance{{{IN},state="half_open"}}': "_x49 1x2",
        },
        {f'kvferry:router_instance{{{IN},state="{s}"}}': "1x50" for s in ("healthy", "cooldown")},
    ),
    "KvferryInstanceRefuses": (
        {
            f"kvferry:router_instance_refusals_total{{{IN}}}": "0+2x50",
            f'kvferry:router_legs_total{{{IN},outcome="answered"}}': "0+10x50",
        },
        {
            f"kvferry:router_instance_refusals_total{{{IN}}}": "0+1x50",
            f'kvferry:router_legs_total{{{IN},outcome="answered"}}': "0+20x50",
        },
    ),
    "KvferryErrors": (
        outcomes(answered=100, failed=2, aborted=2),
        outcomes(answered=100, failed=1, refused=50, invalid=50),
    ),
    "KvferryOverloaded": (
        outcomes(answered=100, refused=8),
        outcomes(answered=100, refused=2, failed=50),
    ),
    "KvferryQueueNeverEmpty": (
        {router("queued_requests"): "3x50"},
        {router("queued_requests"): "9x40 0 9x10"},
    ),
    "KvferryFirstTokenSlow": (
        latency("time_to_first_token_seconds", fast=90, slow=10),
        latency("time_to_first_token_seconds", fast=1000, slow=1),
    ),
    "KvferryHandoverSlow": (
        latency("handover_seconds", fast=90, slow=10),
        latency("handover_seconds", fast=1000, slow=1),
    ),
    "KvferryPromptsOnDecode": (
        {
            **outcomes(answered=10),
            router("fallbacks_total"): "0+1x50",
            router("prefills_without_blocks_total"): "0+1x50",
        },
        {
            **outcomes(answered=100),
            router("fallbacks_total"): "0+1x50",
            router("prefills_without_blocks_total"): "0+1x50",
        },
    ),
    "KvferryLeasesExpire": (
        {engine("kvferry:kv_expired_reqs_total"): "0x45 1x5"},
        {engine("kvferry:kv_expired_reqs_total"): "0x5 7x45"},
    ),
    "KvferryHeldBlocksFillCache": (
        {engine("vllm:kv_cache_usage_perc"): "0.95x50", engine("kvferry:num_held_blocks"): "9x50"},
        {engine("vllm:kv_cache_usage_perc"): "0.95x50", engine("kvferry:num_held_blocks"): "0x50"},
    ),
    "KvferryLoadsFail": (
        {
            engine("kvferry:failed_loads_total"): "0+1x50",
            engine("kvferry:finished_loads_total"): "0+20x50",
        },
        {
            engine("kvferry:failed_loads_total"): "0+1x50",
            engine("kvferry:finished_loads_total"): "0+100x50",
        },
    ),
    "KvferryPeersLost": (
        {engine("kvferry:failed_handshakes_total"): "0x30 0+1x20"},
        {engine("kvferry:failed_handshakes_total"): "0x40 2x10"},
    ),
    "KvferryWrongPeer": (
        {engine("kvferry:incompatible_peers_total"): "0x45 1x5"},
        {
            engine("kvferry:incompatible_peers_total"): "0x50",
            engine("kvferry:failed_handshakes_total"): "0+1x50",
        },
    ),
    "KvferryTicketsRefused": (
        {engine("kvferry:rejected_params_total"): "0x45 1x5"},
        {engine("kvferry:rejected_params_total"): "5x50"},
    ),
    "KvferryMalformedMessages": (
        {engine("kvferry:dropped_messages_total"): "0x30 0+1x20"},
        {engine("kvferry:dropped_messages_total"): "0x40 3x10"},
    ),
    # Tiers evict, so a tier that is full and stores everything is as it should be.
    "KvferryTierFull": (
        {tier("used_bytes"): "99x50", tier("max_bytes"): "100x50"}
        | {tier("dropped_stores_total"): "0+1x50"},
        {
            tier("used_bytes"): "99x50",
            tier("max_bytes"): "100x50",
            tier("dropped_stores_total"): "0x50",
            f"kvferry:tier_used_bytes{{{TIER_2}}}": "99x50",
            f"kvferry:tier_max_bytes{{{TIER_2}}}": "0x50",
            f"kvferry:tier_dropped_stores_total{{{TIER_2}}}": "0+1x50",
        },
    ),
    "KvferryTierFails": (
        {
            tier("failed_loads_total"): "0x50",
            tier("failed_stores_total"): "0x50",
            tier("failed_lookups_total"): "0+1x50",
        },
        {
            tier("failed_loads_total"): "5x50",
            tier("failed_stores_total"): "0x50",
            tier("failed_lookups_total"): "0x50",
        },
    ),
    "KvferryTierDamaged": (
        {tier("refused_total"): "0x45 1x5"},
        {tier("refused_total"): "3x50"},
    ),
}


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_the_rules_and_the_example_of_a_configuration_are_valid(tmp_path: Path) -> None:
    assert "SUCCESS" in promtool("check", "rules", str(ALERTS))
    (tmp_path / "admin-key").touch()
    for file in (ALERTS, CONFIG):
        (tmp_path / file.name).write_text(file.read_text())
    assert "SUCCESS" in promtool("check", "config", str(tmp_path / CONFIG.name))


def test_every_alert_has_a_case() -> None:
    assert {rule["alert"] for rule in rules()} == set(CASES)


def test_each_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    """All cases are series of one test, each with a target of its own."""
    series, checks = [], []
    for alert, cases in CASES.items():
        for is_firing, given in zip((True, False), cases, strict=True):
            target = f'instance="{alert} {is_firing}"'
            for name, values in given.items():
                named = re.sub(r'\binstance="[re]"', target, name)
                assert named != name
                series.append({"series": named, "values": values})
            shown = f'ALERTS{{alertname="{alert}",alertstate="firing",{target}}}'
            checks.append(
                {
                    "eval_time": "12m30s",
                    "expr": f"count({shown}) or vector(0)",
                    "exp_samples": [{"labels": "{}", "value": float(is_firing)}],
                }
            )
    test = {"interval": "15s", "input_series": series, "promql_expr_test": checks}
    file = tmp_path / "cases.yml"
    file.write_text(
        yaml.safe_dump({"rule_files": [str(ALERTS)], "evaluation_interval": "15s", "tests": [test]})
    )
    assert "SUCCESS" in promtool("test", "rules", str(file))


# -- names --


SHARED = {f"vllm:nixl_{name}_bucket" for name in HISTOGRAMS}
SHARED |= {f"kvferry:{name}_total" for name in COUNTERS} | {f"kvferry:{name}" for name in LEVELS}
SHARED |= {f"kvferry:tier_{name}_total" for name in TIER_COUNTERS}
SHARED |= {f"kvferry:tier_{name}" for name in TIER_LEVELS}
SHARED |= {f"kvferry:offload_{name}_total" for name in LOOKUP_COUNTERS}
SHARED |= {"kvferry:transfer_bytes_total"}
"""Metrics that an embedded engine and kvferry's connectors in vLLM have."""
OF_VLLM = {
    f"vllm:{name}"
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prompt_tokens_total",
        "generation_tokens_total",
    )
}


def metric_names(expression: str) -> set[str]:
    return set(re.findall(r"(?:kvferry|vllm):[a-z_]+", expression))


def test_dashboard_and_alerts_use_only_metrics_that_vllm_has_too() -> None:
    used = {name for text in expressions().values() for name in metric_names(text)}
    used |= {name for rule in rules() for name in metric_names(rule["expr"])}
    assert len(used) > 40
    assert {name for name in used if ":router_" not in name} <= SHARED | OF_VLLM


def test_every_alert_is_explained() -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text()
    assert [rule["alert"] for rule in rules() if f"| `{rule['alert']}` |" not in page] == []


def test_every_alert_says_what_is_wrong_and_how_bad_it_is() -> None:
    for rule in rules():
        assert rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in ("warning", "critical")
