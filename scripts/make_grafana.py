"""Writes deploy/grafana/kvferry.json, the Grafana dashboard, from the table of panels below.

    python scripts/make_grafana.py            write the file
    python scripts/make_grafana.py --check    exit with 1 if the file is not current

The metrics of engines are those that embedded engines and vLLM have in common. Prometheus renames
the routers' label `instance` to `exported_instance`, because a target has a label of that name.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent.parent / "deploy" / "grafana" / "kvferry.json"
WIDTH, HEIGHT, PER_ROW = 8, 8, 3
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
ENGINE = '{job="kvferry-engine"}'
RATE = "[$__rate_interval]"


@dataclass(frozen=True)
class Panel:
    """A graph; `queries` has a legend for each expression."""

    title: str
    unit: str
    queries: dict[str, str]
    help: str = ""


def per_second(metric: str, *labels: str) -> str:
    return f"sum by ({', '.join(labels)}) (rate({metric}{RATE}))"


def quantiles(metric: str, *labels: str) -> dict[str, str]:
    """Half of the values, and all but one in a hundred, stay below."""
    prefix = " ".join(f"{{{{{label}}}}}" for label in labels)
    return {
        f"{prefix} p{share}".strip(): f"histogram_quantile({share / 100:g}, "
        f"{per_second(f'{metric}_bucket', *labels, 'le')})"
        for share in (50, 99)
    }


ROWS: dict[str, list[Panel]] = {
    "Requests": [
        Panel(
            "Requests by outcome",
            "reqps",
            {"{{outcome}}": per_second("kvferry:router_outcomes_total", "outcome")},
        ),
        Panel(
            "Share of requests that fail",
            "percentunit",
            {
                "failed or aborted": "(sum(rate(kvferry:router_outcomes_total"
                f'{{outcome=~"failed|aborted"}}{RATE})) or vector(0)) '
                f"/ sum(rate(kvferry:router_outcomes_total{RATE}))"
            },
            "Without the requests that clients got wrong, and those refused for load.",
        ),
        Panel(
            "Answers by route and status",
            "reqps",
            {
                "{{route}} {{status}}": per_second(
                    "kvferry:router_requests_total", "route", "status"
                )
            },
        ),
        Panel(
            "Time to first token",
            "s",
            quantiles("kvferry:router_time_to_first_token_seconds"),
            "From the arrival of a request to the first bytes of its answer.",
        ),
        Panel(
            "Handover",
            "s",
            quantiles("kvferry:router_handover_seconds"),
            "From P's answer to the first bytes of D's answer.",
        ),
        Panel(
            "Running and waiting",
            "short",
            {
                "running {{instance}}": "kvferry:router_active_requests",
                "waiting {{instance}}": "kvferry:router_queued_requests",
            },
        ),
        Panel(
            "Retries, fallbacks, aborts",
            "ops",
            {
                "retries after {{role}}": per_second("kvferry:router_retries_total", "role"),
                "prompts computed by D": per_second("kvferry:router_fallbacks_total", "job"),
                "prefills without blocks": per_second(
                    "kvferry:router_prefills_without_blocks_total", "job"
                ),
                "clients that left": per_second("kvferry:router_client_aborts_total", "job"),
                "prefills released unread": per_second("kvferry:router_releases_total", "job"),
            },
        ),
        Panel(
            "Turns of conversations",
            "ops",
            {"blocks offered: {{found}}": per_second("kvferry:router_turns_total", "found")},
        ),
    ],
    "Instances": [
        Panel(
            "Usable instances",
            "short",
            {"{{role}} at {{instance}}": "kvferry:router_usable_instances"},
        ),
        Panel(
            "State of each instance",
            "short",
            {"{{role}} {{exported_instance}} {{state}}": "kvferry:router_instance"},
        ),
        Panel(
            "Legs in flight",
            "short",
            {"{{role}} {{exported_instance}}": "kvferry:router_instance_legs"},
        ),
        Panel(
            "Legs by outcome",
            "ops",
            {
                "{{role}} {{exported_instance}} {{outcome}}": per_second(
                    "kvferry:router_legs_total", "role", "exported_instance", "outcome"
                )
            },
        ),
        Panel(
            "Legs that failed",
            "ops",
            {
                "{{role}} {{exported_instance}}": per_second(
                    "kvferry:router_instance_failures_total", "role", "exported_instance"
                )
            },
        ),
        Panel(
            "Targets that cannot be scraped",
            "short",
            {"{{job}}": 'sum by (job) (1 - up{job=~"kvferry-.*"})'},
        ),
    ],
    "Engines": [
        Panel(
            "Running and waiting",
            "short",
            {
                "running {{instance}}": f"vllm:num_requests_running{ENGINE}",
                "waiting {{instance}}": f"vllm:num_requests_waiting{ENGINE}",
            },
        ),
        Panel(
            "KV cache in use",
            "percentunit",
            {"{{role}} {{instance}}": f"vllm:kv_cache_usage_perc{ENGINE}"},
        ),
        Panel(
            "Tokens",
            "ops",
            {
                "prompt {{instance}}": per_second("vllm:prompt_tokens_total", "instance"),
                "generated {{instance}}": per_second("vllm:generation_tokens_total", "instance"),
            },
        ),
    ],
    "Transfers": [
        Panel(
            "Leases and blocks held for peers",
            "short",
            {
                "leases {{instance}}": "kvferry:num_leases",
                "blocks {{instance}}": "kvferry:num_held_blocks",
            },
        ),
        Panel(
            "Leases that expired",
            "ops",
            {"{{instance}}": per_second("kvferry:kv_expired_reqs_total", "instance")},
            "Blocks that no D had read when their lease ran out.",
        ),
        Panel(
            "Loads",
            "ops",
            {
                "finished {{instance}}": per_second("kvferry:finished_loads_total", "instance"),
                "failed {{instance}}": per_second("kvferry:failed_loads_total", "instance"),
            },
        ),
        Panel(
            "Bytes moved",
            "Bps",
            {
                "{{instance}} {{transport}}": per_second(
                    "kvferry:transfer_bytes_total", "instance", "transport"
                )
            },
        ),
        Panel(
            "Time of a transfer",
            "s",
            quantiles("vllm:nixl_xfer_time_seconds", "instance"),
        ),
        Panel(
            "Refusals and lost peers",
            "ops",
            {
                "wrong peer {{instance}}": per_second(
                    "kvferry:incompatible_peers_total", "instance"
                ),
                "ticket refused {{instance}}": per_second(
                    "kvferry:rejected_params_total", "instance"
                ),
                "peer lost {{instance}}": per_second("kvferry:failed_handshakes_total", "instance"),
                "message dropped {{instance}}": per_second(
                    "kvferry:dropped_messages_total", "instance"
                ),
            },
        ),
    ],
    "Tiers": [
        Panel(
            "Fill",
            "percentunit",
            {
                "{{instance}} {{tier}}": "kvferry:tier_used_bytes / (kvferry:tier_max_bytes > 0)",
            },
        ),
        Panel(
            "Prompt tokens from tiers",
            "percentunit",
            {
                "{{instance}}": f"{per_second('kvferry:offload_hit_tokens_total', 'instance')} / "
                f"{per_second('kvferry:offload_queried_tokens_total', 'instance')}",
            },
        ),
        Panel(
            "Bytes stored and loaded",
            "Bps",
            {
                "stored {{instance}} {{tier}}": per_second(
                    "kvferry:tier_stored_bytes_total", "instance", "tier"
                ),
                "loaded {{instance}} {{tier}}": per_second(
                    "kvferry:tier_loaded_bytes_total", "instance", "tier"
                ),
            },
        ),
        Panel(
            "Evicted and dropped",
            "ops",
            {
                "evicted {{instance}} {{tier}}": per_second(
                    "kvferry:tier_evictions_total", "instance", "tier"
                ),
                "not stored {{instance}} {{tier}}": per_second(
                    "kvferry:tier_dropped_stores_total", "instance", "tier"
                ),
            },
        ),
        Panel(
            "Failures",
            "ops",
            {
                f"{what} {{{{instance}}}} {{{{tier}}}}": per_second(
                    f"kvferry:tier_{name}_total", "instance", "tier"
                )
                for what, name in (
                    ("load", "failed_loads"),
                    ("store", "failed_stores"),
                    ("lookup", "failed_lookups"),
                    ("damaged", "refused"),
                )
            },
        ),
    ],
}


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    top = 0
    for name, row in ROWS.items():
        panels.append(
            {"type": "row", "title": name, "collapsed": False, "gridPos": _place(0, top, 24, 1)}
        )
        top += 1
        for number, panel in enumerate(row):
            line, column = divmod(number, PER_ROW)
            panels.append(_graph(panel, _place(column * WIDTH, top + line * HEIGHT, WIDTH, HEIGHT)))
        top += -(-len(row) // PER_ROW) * HEIGHT
    for number, shown in enumerate(panels, 1):
        shown["id"] = number
    return {
        "title": "kvferry",
        "uid": "kvferry",
        "tags": ["kvferry", "vllm"],
        "schemaVersion": 38,
        "version": 1,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}]
        },
        "panels": panels,
    }


def _graph(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.help,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {"refId": chr(ord("A") + number), "expr": expr, "legendFormat": legend}
            for number, (legend, expr) in enumerate(panel.queries.items())
        ],
    }


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def main() -> int:
    text = json.dumps(dashboard(), indent=2) + "\n"
    if "--check" not in sys.argv:
        FILE.write_text(text)
    elif FILE.read_text() != text:
        print(f"{FILE.name} is not current: run python scripts/make_grafana.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
