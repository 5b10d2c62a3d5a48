"""Spans of the embedded engine: `llm_request` for each request, with names and attributes as in
vLLM, and below it the spans of the KV that moves.

Runs on the main thread of the engine core. A request whose trace is not recorded costs one dict
lookup per output.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvferry.connectors.contract import KVConnectorOutput
from kvferry.engine.messages import AddRequest, RequestOutput
from kvferry.tracing.exporter import TraceExporter
from kvferry.tracing.spans import Attributes, Span, SpanKind
from kvferry.tracing.transfers import REQUEST_ID, TransferTracer
from kvferry.web.transfer_records import TransferRecord

REQUEST_SPAN = "llm_request"


@dataclass(slots=True)
class _OpenRequest:
    request: AddRequest
    span: Span
    arrived: float
    num_tokens: int = 0
    first_token: float | None = None


@dataclass(slots=True)
class EngineTracer:
    """Writes the spans of one engine core."""

    exporter: TraceExporter
    _open: dict[str, _OpenRequest] = field(default_factory=dict, init=False)
    _transfers: TransferTracer = field(init=False)

    def __post_init__(self) -> None:
        self._transfers = TransferTracer(self.exporter.spans)

    def note_arrival(self, request: AddRequest, now: float) -> None:
        span = self.exporter.spans.begin(REQUEST_SPAN, request.trace, now, kind=SpanKind.SERVER)
        if span.is_recording():
            self._open[request.request_id] = _OpenRequest(request, span, now)
            self._transfers.add(request.request_id, span, now, caller=request.trace)

    def note_loads(self, request_ids: Iterable[str], now: float) -> None:
        """Loads of these requests have begun."""
        for request_id in request_ids:
            self._transfers.begin_load(request_id, now)

    def note_connector_output(
        self, output: KVConnectorOutput, logged: Iterable[str], now: float
    ) -> None:
        """Loads and leases have ended. `logged`: the requests of which `note_outputs` gets a record
        when they have their first token.
        """
        for request_id in output.finished_recving.difference(logged):
            reason = output.failure_reasons.get(request_id, "")
            is_failed = request_id in output.failed_recving
            failure = reason or ("the load failed" if is_failed else "")
            times = output.recving_times.get(request_id, ())
            self._transfers.end_load(request_id, times, now, failure)
        for request_id in output.finished_sending:
            self._transfers.end_lease(request_id, now)

    def note_outputs(
        self, outputs: Iterable[RequestOutput], records: Iterable[TransferRecord], now: float
    ) -> None:
        """Requests have new tokens, or have ended. `records`: those of transfers that are complete
        now.
        """
        for record in records:
            self._transfers.write_transfer(record)
        for output in outputs:
            entry = self._open.get(output.request_id)
            if entry is None:
                continue
            entry.num_tokens += len(output.tokens)
            if entry.first_token is None and output.tokens:
                entry.first_token = now
            if output.finish_reason is not None:
                params = output.kv_transfer_params
                has_lease = bool(params and params.get("do_remote_prefill"))
                self._end(entry, output.finish_reason, now, output.error or "", has_lease)

    def note_abort(self, request_id: str, record: TransferRecord | None, now: float) -> None:
        """A request has ended without an output, for example because its client is gone."""
        entry = self._open.get(request_id)
        if entry is None:
            return
        if record is not None and entry.first_token is None:
            self._transfers.write_transfer(record)
        self._end(entry, "abort", now)

    def close(self) -> None:
        """Export the last spans, for a bounded time."""
        self.exporter.close()

    def _end(
        self,
        entry: _OpenRequest,
        finish_reason: str,
        now: float,
        error: str = "",
        has_lease: bool = False,
    ) -> None:
        del self._open[entry.request.request_id]
        self._transfers.finish(entry.request.request_id, now, has_lease=has_lease)
        self.exporter.spans.end(entry.span, now, _attributes(entry, finish_reason, now), error)


def _attributes(entry: _OpenRequest, finish_reason: str, now: float) -> Attributes:
    request, sampling = entry.request, entry.request.sampling
    attributes: dict[str, str | int | float | bool] = {
        REQUEST_ID: request.request_id,
        "gen_ai.usage.prompt_tokens": len(request.prompt_token_ids),
        "gen_ai.usage.completion_tokens": entry.num_tokens,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.latency.e2e": now - entry.arrived,
        "kvferry.outcome": finish_reason,
    }
    if entry.first_token is not None:
        attributes["gen_ai.latency.time_to_first_token"] = entry.first_token - entry.arrived
    return attributes
