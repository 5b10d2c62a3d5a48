"""Spans of a request's KV: its transfer from a peer with the phases, its load from a storage tier,
and the lease under which its blocks wait for a reader.

The embedded engine core and the connector inside vLLM call it on the engine's main thread, so
nothing here may wait. The caller passes `now` (local monotonic seconds).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.events import TransferTimes
from kvferry.tracing.context import TraceContext
from kvferry.tracing.spans import Attributes, Span, SpanWriter
from kvferry.web.transfer_records import TransferRecord, make_transfer_record, transfer_phases

TRANSFER_SPAN = "kv transfer"
"""KV from a peer; its children are the phases of `transfer_phases`."""
LOAD_SPAN = "kv load"
"""KV from a storage tier, or a transfer that ended before its peer was asked."""
LEASE_SPAN = "kv lease"
"""From the end of a prefill leg until no peer may read its blocks any more."""
REQUEST_ID = "gen_ai.request.id"
"""The attribute with the request id, named as in vLLM's own spans."""
_CLOCK_SLACK_S = 1.0
"""Tolerance when the times of a rank are compared with the engine's clock."""


@dataclass(slots=True)
class _TracedRequest:
    """A request whose trace is recorded."""

    arrived: float
    parent: TraceContext | Span
    """The parent of the spans of loads."""
    caller: TraceContext | Span
    """The parent of the lease, which outlives the engine's own span of the request."""
    load_began: float | None = None
    lease_began: float | None = None


@dataclass(slots=True)
class TransferTracer:
    """Writes the spans of transfers for requests whose trace is recorded, and no others."""

    spans: SpanWriter
    _requests: dict[str, _TracedRequest] = field(default_factory=dict, init=False)

    def add(
        self,
        request_id: str,
        parent: TraceContext | Span,
        now: float,
        caller: TraceContext | Span | None = None,
    ) -> None:
        """Trace a request that has arrived. `caller`: the span of the process that sent the
        request, if it is not `parent`.
        """
        self._requests[request_id] = _TracedRequest(now, parent, caller or parent)

    def begin_load(self, request_id: str, now: float) -> None:
        """The engine has allocated blocks, and a connector fills them."""
        if (traced := self._requests.get(request_id)) is not None:
            traced.load_began = now

    def end_load(
        self, request_id: str, times: Sequence[TransferTimes], now: float, failure: str = ""
    ) -> None:
        """A load has ended. `times`: those of each rank, if the KV came from a peer."""
        traced = self._requests.get(request_id)
        if traced is None or traced.load_began is None:
            return
        began, traced.load_began = traced.load_began, None
        # A rank on another host has another clock, so its times cannot be used.
        earliest = traced.arrived - _CLOCK_SLACK_S
        usable = [rank_times for rank_times in times if earliest <= rank_times.tracked_at <= now]
        if usable:
            record = make_transfer_record(request_id, traced.arrived, now, usable, failure=failure)
            self.write_transfer(record)
        else:
            self.spans.write(
                LOAD_SPAN, traced.parent, (began, now), {REQUEST_ID: request_id}, failure
            )

    def write_transfer(self, record: TransferRecord) -> None:
        """Write the span of a transfer that has ended, and its phases."""
        traced = self._requests.get(record.request_id)
        if traced is None:
            return
        attributes: Attributes = {
            REQUEST_ID: record.request_id,
            "kvferry.transport": record.transport,
            "kvferry.bytes": record.bytes,
            "kvferry.segments": record.segments,
            "kvferry.outcome": "failed" if record.failure else "loaded",
        }
        arrived = traced.arrived
        span = self.spans.begin(TRANSFER_SPAN, traced.parent, arrived, attributes)
        ended_s = 0.0
        for phase in transfer_phases(record):
            is_failed = phase.name == "failed"
            if phase.ended_s is None and not is_failed:
                break  # vLLM does not tell the connector when it samples the first token
            ended_s = record.age_s if phase.ended_s is None else phase.ended_s
            times = (arrived + phase.began_s, arrived + ended_s)
            self.spans.write(phase.name, span, times, error=record.failure if is_failed else "")
        self.spans.end(span, arrived + ended_s, error=record.failure)

    def finish(self, request_id: str, now: float, *, has_lease: bool) -> None:
        """A request has finished. `has_lease`: a peer may read its blocks."""
        traced = self._requests.get(request_id)
        if traced is None:
            return
        if has_lease:
            traced.lease_began = now
        else:
            del self._requests[request_id]

    def end_lease(self, request_id: str, now: float) -> None:
        """No peer may read the blocks of a finished request any more."""
        traced = self._requests.get(request_id)
        if traced is not None and traced.lease_began is not None:
            del self._requests[request_id]
            self.spans.write(
                LEASE_SPAN, traced.caller, (traced.lease_began, now), {REQUEST_ID: request_id}
            )
