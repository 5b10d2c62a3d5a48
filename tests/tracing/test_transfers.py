"""Tests the spans of transfers, loads and leases, with the SDK's exporter in memory."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvferry.events import TransferTimes
from kvferry.tracing.context import TraceContext
from kvferry.tracing.spans import SpanWriter
from kvferry.tracing.transfers import TransferTracer

CALLER = TraceContext("1" * 32, "2" * 16, is_sampled=True)
RANKS = [
    TransferTimes(1.0, 2.0, 2.5, 3.0, 5.0, 6.0, total_bytes=10, segments=1, transport="shm"),
    TransferTimes(1.0, 2.5, 2.5, 2.75, 4.0, 7.0, total_bytes=10, segments=2, transport="shm"),
]


@dataclass(frozen=True)
class Written:
    tracer: TransferTracer
    exporter: InMemorySpanExporter

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())

    def lengths(self) -> list[tuple[str, float]]:
        """The names and durations of spans in order of their ends."""
        return [
            (span.name, round(((span.end_time or 0) - (span.start_time or 0)) / 1e9, 6))
            for span in self.spans
        ]


@pytest.fixture
def written() -> Iterator[Written]:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield Written(TransferTracer(SpanWriter(provider.get_tracer("test"))), exporter)
    provider.shutdown()


def test_the_phases_of_all_ranks_follow_each_other(written: Written) -> None:
    written.tracer.add("a", CALLER, now=1.0)
    written.tracer.begin_load("a", now=2.5)
    written.tracer.end_load("a", RANKS, now=8.0)
    assert written.lengths() == [
        ("lease", 1.5),
        ("blocks", 0.25),
        ("transfer", 2.25),
        ("confirm", 2.0),
        ("kv transfer", 6.0),
    ]
    transfer = written.spans[-1]
    assert transfer.parent is not None
    assert f"{transfer.parent.trace_id:032x}-{transfer.parent.span_id:016x}" == (
        f"{CALLER.trace_id}-{CALLER.span_id}"
    )
    assert (transfer.attributes or {})["kvferry.bytes"] == 20


def test_a_failed_transfer_ends_with_its_reason(written: Written) -> None:
    written.tracer.add("a", CALLER, now=1.0)
    written.tracer.begin_load("a", now=2.0)
    written.tracer.end_load("a", [TransferTimes(1.0, 2.0)], now=4.0, failure="P is gone")
    assert written.lengths() == [("lease", 1.0), ("failed", 2.0), ("kv transfer", 3.0)]
    assert [span.status.description for span in written.spans] == [None, "P is gone", "P is gone"]


def test_a_load_without_the_times_of_a_peer_is_one_span(written: Written) -> None:
    written.tracer.add("a", CALLER, now=1.0)
    written.tracer.begin_load("a", now=2.0)
    # A rank on another host has another clock.
    written.tracer.end_load("a", [TransferTimes(1e9, 1e9)], now=4.0)
    written.tracer.end_load("a", [], now=5.0)
    assert written.lengths() == [("kv load", 2.0)]


def test_a_lease_lasts_from_the_end_of_the_request_until_no_peer_may_read(
    written: Written,
) -> None:
    written.tracer.add("a", CALLER, now=1.0)
    written.tracer.end_lease("a", now=2.0)
    written.tracer.finish("a", now=3.0, has_lease=True)
    written.tracer.end_lease("a", now=7.0)
    written.tracer.end_lease("a", now=8.0)
    assert written.lengths() == [("kv lease", 4.0)]


def test_requests_that_are_not_traced_or_have_finished_leave_nothing(written: Written) -> None:
    written.tracer.begin_load("b", now=1.0)
    written.tracer.end_load("b", RANKS, now=2.0)
    written.tracer.add("a", CALLER, now=1.0)
    written.tracer.begin_load("a", now=1.0)
    written.tracer.finish("a", now=2.0, has_lease=False)
    written.tracer.end_load("a", RANKS, now=8.0)
    written.tracer.end_lease("a", now=9.0)
    assert written.spans == []
