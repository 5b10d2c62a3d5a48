"""Tests the traces of real processes (router, P and D), as a real OTLP collector receives them."""

import asyncio
import json
import random
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from tests.e2e.conftest import PATIENT
from tests.e2e.harness import (
    Cluster,
    Engine,
    Host,
    Prompt,
    ask,
    assert_quiescent,
    is_alive,
    new_session,
)
from tests.e2e.test_tiers import until_counted
from tests.tracing.collector import Collector, ReceivedSpan

pytestmark = pytest.mark.slow

EXIT_S = 60.0
ROUTER_PHASES = ["queued", "prefill", "decode", "streaming"]
TRANSFER_PHASES = ["lease", "blocks", "transfer", "confirm", "scheduled", "first token"]
ALL = sorted(
    ["POST /v1/completions", *ROUTER_PHASES, "kv transfer", *TRANSFER_PHASES, "kv lease"]
    + ["llm_request"] * 2
)
ADMIN_KEY = "admin-key-of-the-tests-of-traces"
SECRET_HEADER = "Bearer-kept-secret"


def variables(**more: str) -> dict[str, str]:
    return {
        "KVFERRY_SIDE_CHANNEL_HOST": "127.0.0.1",
        "OTEL_BSP_SCHEDULE_DELAY": "50",
        "OTEL_EXPORTER_OTLP_HEADERS": f"authorization={SECRET_HEADER}",
        **more,
    }


@dataclass(frozen=True)
class TracedFleet:
    """P, D and two routers that send their spans to one collector; the second router samples no
    trace.
    """

    collector: Collector
    p: Engine
    d: Engine
    router: Engine
    silent_router: Engine


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[TracedFleet]:
    directory = tmp_path_factory.mktemp("traced")
    key_file = directory / "admin-key"
    key_file.touch(0o600)
    key_file.write_text(ADMIN_KEY)
    with Collector() as collector, Cluster(directory, model) as cluster:
        flag = ("--otlp-traces-endpoint", collector.endpoint)
        starting = [
            cluster.serve(
                name, *flag, extra=PATIENT, engine_id=name, at=Host(variables=variables())
            )
            for name in ("p", "d")
        ]
        p, d = (process.ready() for process in starting)
        routers = [
            cluster.proxy(
                [p], [d], "--admin-key-file", str(key_file), *flag, at=Host(variables=settings)
            )
            # The second one finds the collector by the standard variable.
            for flag, settings in (
                (flag, variables()),
                (
                    (),
                    variables(
                        OTEL_EXPORTER_OTLP_ENDPOINT=collector.endpoint.removesuffix("/v1/traces"),
                        OTEL_TRACES_SAMPLER="parentbased_always_off",
                    ),
                ),
            )
        ]
        yield TracedFleet(collector, p, d, *(router.ready() for router in routers))


def prompt(seed: str) -> Prompt:
    rng = random.Random(f"tracing {seed}")
    return Prompt(tuple(rng.randrange(10, 500) for _ in range(100)))


async def send(router: Engine, name: str, **headers: str) -> None:
    """Send a request with the id `name`, and wait until it is answered and its lease released."""
    async with (
        new_session() as session,
        session.post(
            f"{router.url}/v1/completions",
            data=json.dumps(prompt(name).body()),
            headers={"X-Request-Id": name, **headers},
        ) as answer,
    ):
        assert answer.status == 200, await answer.text()
        await answer.read()


def is_complete(spans: Sequence[ReceivedSpan]) -> bool:
    return len(spans) >= len(ALL)


def client_context(is_sampled: bool = True) -> tuple[str, str, str]:
    """A trace id, a span id, and the header with both."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    return trace_id, span_id, f"00-{trace_id}-{span_id}-{int(is_sampled):02x}"


def check_tree(spans: Sequence[ReceivedSpan], client_span: str) -> None:
    """Check names, parents, processes and times of the spans of one request."""
    assert sorted(span.name for span in spans) == ALL
    by_id = {span.span_id: span for span in spans}
    (root,) = [span for span in spans if span.service == "kvferry-router" and "POST" in span.name]
    assert root.parent_id == client_span
    tree = [
        (
            span.process["service.instance.id"] if span.service == "kvferry-engine" else "",
            by_id[span.parent_id].name,
            span.name,
        )
        for span in spans
        if span is not root
    ]
    assert sorted(tree) == sorted(
        [("", root.name, name) for name in ROUTER_PHASES]
        + [(engine, root.name, "llm_request") for engine in ("p", "d")]
        + [("p", root.name, "kv lease"), ("d", "llm_request", "kv transfer")]
        + [("d", "kv transfer", name) for name in TRANSFER_PHASES]
    )
    for span in spans:
        assert span.began_ns <= span.ended_ns
        # The lease ends when P has been told, perhaps after the client has its answer.
        if span is not root and span.name != "kv lease":
            parent = by_id[span.parent_id]
            assert parent.began_ns <= span.began_ns, (parent.name, span.name)
            assert span.ended_ns <= parent.ended_ns, (parent.name, span.name)
        assert span.error is None


def names_in_order(spans: Sequence[ReceivedSpan], parent: str) -> list[str]:
    (holder,) = [span for span in spans if span.name == parent]
    return [span.name for span in spans if span.parent_id == holder.span_id]


def test_the_spans_of_router_and_engines_join_the_clients_trace(traced: TracedFleet) -> None:
    trace_id, span_id, header = client_context()
    asyncio.run(send(traced.router, "joined", traceparent=header, tracestate="vendor=1"))
    spans = traced.collector.wait_for(trace_id, is_complete)
    check_tree(spans, span_id)
    (root,) = [span for span in spans if span.parent_id == span_id]
    (transfer,) = [span for span in spans if span.name == "kv transfer"]
    (of_d,) = [span for span in spans if span.span_id == transfer.parent_id]
    assert root.attributes["gen_ai.request.id"] == "joined"
    assert root.attributes["http.response.status_code"] == 200
    assert root.attributes["kvferry.outcome"] == "answered"
    assert transfer.attributes["kvferry.transport"] == "shm"
    assert transfer.attributes["kvferry.bytes"] > 0
    assert "joined" in of_d.attributes["gen_ai.request.id"]
    assert of_d.attributes["gen_ai.usage.prompt_tokens"] == 100
    assert of_d.attributes["gen_ai.usage.completion_tokens"] == 16
    legs = {span.name: span.attributes.get("kvferry.instance", "") for span in spans}
    assert str(traced.p.address.port) in legs["prefill"]
    assert str(traced.d.address.port) in legs["decode"]


def test_the_dashboard_shows_the_phases_of_the_trace(traced: TracedFleet) -> None:
    trace_id, _, header = client_context()

    async def shown() -> list[str]:
        await send(traced.router, "compared", traceparent=header)
        async with (
            new_session() as session,
            session.get(
                f"{traced.router.url}/dashboard/requests/compared",
                headers={"Authorization": f"Bearer {ADMIN_KEY}"},
            ) as answer,
        ):
            assert answer.status == 200
            detail = await answer.json()
        # D received the request a little later than the router sent it, which only the dashboard
        # shows, because only there D's times are fitted into the router's.
        return [phase["name"] for phase in detail["phases"] if phase["name"] != "received"]

    phases = asyncio.run(shown())
    spans = traced.collector.wait_for(trace_id, is_complete)
    of_router = [
        name
        for name in names_in_order(spans, "POST /v1/completions")
        if name not in ("llm_request", "kv lease")
    ]
    at = of_router.index("decode")
    of_router[at : at + 1] = names_in_order(spans, "kv transfer")
    assert phases == of_router


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-extra"},
        {"traceparent": "00-00000000000000000000000000000000-00f067aa0ba902b7-01"},
    ],
    ids=["none", "malformed", "zeros"],
)
def test_without_a_valid_context_the_router_begins_a_trace(
    traced: TracedFleet, headers: dict[str, str]
) -> None:
    name = f"begun-{secrets.token_hex(4)}"
    asyncio.run(send(traced.router, name, **headers))
    root = traced.collector.find(lambda span: span.attributes.get("gen_ai.request.id") == name)
    assert root.trace_id not in headers.get("traceparent", "")
    check_tree(traced.collector.wait_for(root.trace_id, is_complete), client_span="")


def test_the_callers_decision_not_to_sample_holds_for_all_processes(traced: TracedFleet) -> None:
    unsampled, _, quiet_header = client_context(is_sampled=False)
    later, _, header = client_context()
    asyncio.run(send(traced.router, "unsampled", traceparent=quiet_header))
    asyncio.run(send(traced.router, "sampled", traceparent=header))
    # Each process exports its spans in order, so those of the first request would be here.
    traced.collector.wait_for(later, is_complete)
    assert traced.collector.trace(unsampled) == []


def test_a_router_that_samples_nothing_also_silences_the_engines(traced: TracedFleet) -> None:
    later, span_id, header = client_context()
    asyncio.run(send(traced.silent_router, "silent"))
    asyncio.run(send(traced.silent_router, "spoken", traceparent=header))
    check_tree(traced.collector.wait_for(later, is_complete), span_id)
    ids = [span.attributes.get("gen_ai.request.id", "") for span in traced.collector.spans]
    assert any("spoken" in request_id for request_id in ids)
    assert not any("silent" in request_id for request_id in ids)


def test_a_failed_transfer_is_an_error_in_the_trace(traced: TracedFleet) -> None:
    trace_id, _, header = client_context()

    async def fail() -> None:
        forged = {"do_remote_prefill": True, "do_remote_decode": False, "ticket": "forged"}
        body = {**prompt("failing").body(), "kv_transfer_params": forged}
        async with (
            new_session() as session,
            session.post(
                f"{traced.d.url}/v1/completions",
                data=json.dumps(body),
                headers={"traceparent": header},
            ) as answer,
        ):
            assert answer.status == 502

    asyncio.run(fail())
    spans = traced.collector.wait_for(trace_id, lambda spans: len(spans) >= 3)
    assert sorted(span.name for span in spans) == ["failed", "kv transfer", "llm_request"]
    assert all("could not be fetched" in (span.error or "") for span in spans)


def test_a_load_from_a_tier_has_a_span(
    traced: TracedFleet, cluster: Cluster, tmp_path: Path
) -> None:
    engine = cluster.serve(
        "tiered",
        "--otlp-traces-endpoint",
        traced.collector.endpoint,
        # So that a prompt that is sent twice comes from the tier.
        "--no-enable-prefix-caching",
        connector="OffloadingConnector",
        extra={"tiers": [{"cpu": "64MiB"}], "pool_path": str(tmp_path), "break_even": False},
        at=Host(variables=variables()),
    ).ready()
    trace_id, span_id, header = client_context()

    async def send_twice() -> None:
        await send(engine, "tier")
        await until_counted(engine, "kvferry:tier_stores_total/cpu", 100 // 16)
        await send(engine, "tier", traceparent=header)

    asyncio.run(send_twice())
    loading, of_request = traced.collector.wait_for(trace_id, lambda spans: len(spans) >= 2)[::-1]
    assert (of_request.name, of_request.parent_id) == ("llm_request", span_id)
    assert (loading.name, loading.parent_id) == ("kv load", of_request.span_id)
    assert loading.error is None


def test_the_headers_for_the_collector_are_sent_and_never_logged(traced: TracedFleet) -> None:
    trace_id, _, header = client_context()
    asyncio.run(send(traced.router, "secret", traceparent=header))
    traced.collector.wait_for(trace_id, is_complete)
    assert {sent.get("authorization") for sent in traced.collector.headers} == {SECRET_HEADER}
    for engine in (traced.p, traced.d, traced.router):
        assert not [line for line in engine.process.tail(1000) if SECRET_HEADER in line]


# -- a collector that does not work --


@contextmanager
def silent_collector() -> Iterator[str]:
    """A port that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/{SECRET_HEADER}"


@contextmanager
def dead_collector() -> Iterator[str]:
    """A port that refuses connections, because it is bound and does not listen."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}/{SECRET_HEADER}"


def test_a_broken_collector_delays_neither_requests_nor_the_end(
    cluster: Cluster, plain: Engine
) -> None:
    # A queue of two spans is full at once.
    settings = variables(OTEL_BSP_MAX_QUEUE_SIZE="2", OTEL_BSP_MAX_EXPORT_BATCH_SIZE="1")

    async def same_answers(router: Engine, p: Engine, d: Engine) -> None:
        async with new_session() as session:
            for number in range(10):
                asked = prompt(f"broken {number}")
                answer = await ask(session, router, asked)
                assert answer == await ask(session, plain, asked)
            await assert_quiescent(session, p, d)

    with silent_collector() as silent, dead_collector() as dead:
        flag, at = "--otlp-traces-endpoint", Host(variables=settings)
        starting = [
            cluster.serve(name, flag, endpoint, extra=PATIENT, at=at)
            for name, endpoint in (("p", silent), ("d", dead))
        ]
        p, d = (process.ready() for process in starting)
        router = cluster.proxy([p], [d], flag, silent, at=at).ready()
        asyncio.run(same_answers(router, p, d))
        processes = [member for engine in (router, p, d) for member in engine.family()]
        for engine in (router, p, d):
            engine.process.terminate()
        for engine in (router, p, d):
            engine.process.wait(EXIT_S)
        _, alive = psutil.wait_procs(processes, timeout=EXIT_S)
        assert not any(map(is_alive, alive)), alive
    for engine in (router, p, d):
        lines = engine.process.tail(1000)
        assert not [line for line in lines if SECRET_HEADER in line]
        complaints = [line for line in lines if "opentelemetry" in line or "Span" in line]
        # Hundreds of spans were dropped, in less than two minutes.
        assert len(complaints) <= 4, complaints
