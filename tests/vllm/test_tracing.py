"""Tests that the spans of real vLLM servers, of kvferry's connector inside them and of kvferry's
router join one trace.
"""

import asyncio
import json
import random
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.harness import Engine, Prompt, new_session
from tests.tracing.collector import Collector, ReceivedSpan
from tests.vllm.fleet import BY_MODULE_PATH, Fleet, ready
from tests.vllm.test_tiers import num_chunks, until_stored

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TRANSFER_PHASES = ["lease", "blocks", "transfer", "confirm"]


def peers_and_tier(pool: Path) -> dict[str, Any]:
    """The settings of a P that also keeps KV in host memory."""
    tier = {
        **BY_MODULE_PATH,
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {
            "tiers": [{"cpu": "64MiB"}],
            "pool_path": str(pool),
            # The test must load what was stored, also where this model computes faster.
            "break_even": False,
        },
    }
    return {
        **BY_MODULE_PATH,
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": [BY_MODULE_PATH, tier]},
    }


@dataclass(frozen=True)
class TracedServers:
    collector: Collector
    p: Engine
    d: Engine
    router: Engine


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[TracedServers]:
    with (
        Collector() as collector,
        Fleet(tmp_path_factory.mktemp("traced"), model) as fleet,
    ):
        settings = {
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "OTEL_BSP_SCHEDULE_DELAY": "50",
        }
        flag = ("--otlp-traces-endpoint", collector.endpoint)
        p = fleet.vllm(
            "p",
            *flag,
            # So that a prompt that is sent twice comes from the tier.
            "--no-enable-prefix-caching",
            transfer=peers_and_tier(tmp_path_factory.mktemp("pool")),
            environment={**settings, "OTEL_SERVICE_NAME": "p"},
        )
        d = fleet.vllm("d", *flag, cores="1", environment={**settings, "OTEL_SERVICE_NAME": "d"})
        router = fleet.kvferry_router(
            [p], [d], {**settings, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": collector.endpoint}
        )
        ready(p, d, router)
        yield TracedServers(collector, p, d, router)


def prompt(seed: str) -> Prompt:
    rng = random.Random(f"vllm tracing {seed}")
    return Prompt(tuple(rng.randrange(10, 500) for _ in range(100)))


async def send(to: Engine, asked: Prompt, header: str) -> None:
    async with (
        new_session() as session,
        session.post(
            f"{to.url}/v1/completions",
            data=json.dumps(asked.body()),
            headers={"traceparent": header, "Content-Type": "application/json"},
        ) as answer,
    ):
        assert answer.status == 200, await answer.text()


def client_context() -> tuple[str, str, str]:
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    return trace_id, span_id, f"00-{trace_id}-{span_id}-01"


def test_spans_of_vllm_and_of_the_connector_join_the_routers_trace(traced: TracedServers) -> None:
    trace_id, span_id, header = client_context()
    asyncio.run(send(traced.router, prompt("joined"), header))
    wanted = sorted(
        [("kvferry-router", name) for name in ("queued", "prefill", "decode", "streaming")]
        + [("kvferry-router", "POST /v1/completions")]
        + [("p", "llm_request"), ("d", "llm_request"), ("p", "kv lease"), ("d", "kv transfer")]
        + [("d", name) for name in TRANSFER_PHASES]
    )

    def is_complete(spans: Sequence[ReceivedSpan]) -> bool:
        return len(spans) >= len(wanted)

    spans = traced.collector.wait_for(trace_id, is_complete)
    assert sorted((span.service, span.name) for span in spans) == wanted
    by_id = {span.span_id: span for span in spans}
    (root,) = [span for span in spans if span.parent_id == span_id]
    (transfer,) = [span for span in spans if span.name == "kv transfer"]
    assert root.name == "POST /v1/completions"
    for span in spans:
        if span is root:
            continue
        is_phase = span.name in TRANSFER_PHASES
        assert by_id[span.parent_id] is (transfer if is_phase else root), span.name
        assert by_id[span.parent_id].began_ns <= span.began_ns, span.name
        # vLLM ends its own span, and P learns of the end of its lease, perhaps a moment after the
        # client has its answer.
        if span.name not in ("llm_request", "kv lease"):
            assert span.ended_ns <= by_id[span.parent_id].ended_ns, span.name
    assert [span.name for span in spans if span.parent_id == transfer.span_id] == TRANSFER_PHASES
    assert transfer.attributes["kvferry.bytes"] > 0
    assert transfer.attributes["kvferry.transport"] == "nixl"
    assert transfer.attributes["kvferry.outcome"] == "loaded"


def test_a_load_from_a_tier_has_a_span(traced: TracedServers) -> None:
    asked = prompt("tier")
    first, _, first_header = client_context()
    second, second_span, second_header = client_context()

    async def send_twice() -> None:
        await send(traced.p, asked, first_header)
        await until_stored(traced.p, "cpu", num_chunks(asked))
        await send(traced.p, asked, second_header)

    asyncio.run(send_twice())
    spans = traced.collector.wait_for(second, lambda spans: len(spans) >= 2)
    assert sorted(span.name for span in spans) == ["kv load", "llm_request"]
    assert {span.parent_id for span in spans} == {second_span}
    assert all(span.error is None for span in spans)
    assert [span.name for span in traced.collector.trace(first)] == ["llm_request"]
