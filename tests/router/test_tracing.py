"""Tests the names of the router's spans; tests/e2e/test_tracing.py tests whole traces."""

import aiohttp
import pytest
import uvloop
from tests.router.stubs import RecordedReleases, changed, instance, serving
from tests.tracing.collector import Collector

from kvferry.router.fleet.instances import Role
from kvferry.router.options import RouterOptions
from kvferry.router.tracing import RouterTracer
from kvferry.tracing.exporter import TraceExporter

UNUSED_PORT = 1


@pytest.mark.parametrize(
    ("method", "path", "pattern"),
    [
        ("GET", "/v1/responses/resp_1", "/v1/responses/*"),
        ("POST", "/v1/responses/resp_1/cancel", "/v1/responses/*/cancel"),
    ],
)
def test_a_span_is_named_by_method_and_pattern_and_does_not_contain_the_clients_path(
    method: str, path: str, pattern: str
) -> None:
    async def scene(tracer: RouterTracer) -> None:
        # The router itself answers: no instance stores the response.
        options = RouterOptions(
            (instance(Role.PREFILL, UNUSED_PORT),), (instance(Role.DECODE, UNUSED_PORT),)
        )
        async with (
            serving(changed(options, {}), RecordedReleases(), tracer=tracer) as port,
            aiohttp.ClientSession() as session,
            session.request(method, f"http://127.0.0.1:{port}{path}") as answer,
        ):
            assert answer.status == 404

    with Collector() as collector:
        tracer = RouterTracer(TraceExporter(collector.endpoint, "kvferry-router", {}))
        try:
            uvloop.run(scene(tracer))
        finally:
            tracer.close()
        span = collector.find(lambda span: not span.parent_id)
    assert span.name == f"{method} {pattern}"
    assert span.attributes["http.request.method"] == method
    assert span.attributes["http.route"] == pattern
    assert not [value for value in span.attributes.values() if "resp_1" in str(value)]
