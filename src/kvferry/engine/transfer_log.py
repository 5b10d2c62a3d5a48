"""Transfer log and totals: how long each phase of recent transfers took, and sums of all transfers.

Only for observation; no decision depends on this module.

Pure: the core passes `now` (local monotonic seconds, the same clock as in its ranks). The log is
bounded by count. A step pays only for the requests that wait for their first token.
"""

import re
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.connectors.stats import HISTOGRAMS, KVConnectorStats, add_up, merge_stats
from kvferry.engine.messages import AddRequest, RequestOutput, SequenceSlice, TransferSummary
from kvferry.events import TransferTimes
from kvferry.web.transfer_records import TransferRecord, make_transfer_record

MAX_RECORDS = 256
MAX_REPORTED = 64
_MAX_FAILURE_CHARS = 400
_NAME = re.compile(r"(?:[a-z]+-)?(?P<stem>.*?)(?:-(?P<index>[0-9]+))?-[0-9a-f]{8}", re.DOTALL)
"""Pattern of the ids that the front-end makes of a client's X-Request-Id: `cmpl-ID-0-1a2b3c4d`."""


@dataclass(slots=True)
class _TransferEntry:
    """The timestamps of one request whose KV comes from a peer."""

    request_id: str
    arrived: float
    pulls: Sequence[TransferTimes] = ()
    scheduled: float | None = None
    first_token: float | None = None
    failure: str = ""


@dataclass(slots=True)
class TransferLog:
    """The last requests whose KV came, or was to come, from a peer."""

    max_records: int = MAX_RECORDS
    _entries: OrderedDict[str, _TransferEntry] = field(default_factory=OrderedDict, init=False)
    _watched: dict[str, _TransferEntry] = field(default_factory=dict, init=False)
    """Entries of requests that have no first token yet."""

    @property
    def is_watching(self) -> bool:
        return bool(self._watched)

    @property
    def watched(self) -> Collection[str]:
        """The requests that have no first token yet."""
        return self._watched.keys()

    def note_arrival(self, request: AddRequest, now: float) -> None:
        """Add an entry if the KV of the request is to come from a peer."""
        if not request.kv_transfer_params or not request.kv_transfer_params.get(
            "do_remote_prefill"
        ):
            return
        entry = _TransferEntry(request.request_id, now)
        self._entries[entry.request_id] = self._watched[entry.request_id] = entry
        if len(self._entries) > self.max_records:
            oldest, _ = self._entries.popitem(last=False)
            self._watched.pop(oldest, None)

    def note_receives(self, times: Mapping[str, Sequence[TransferTimes]]) -> None:
        """Add the times of receives that have ended on some or all ranks."""
        for request_id, pulls in times.items():
            entry = self._entries.get(request_id)
            if entry is not None:
                entry.pulls = [*entry.pulls, *pulls]

    def note_plan(self, slices: Iterable[SequenceSlice], now: float) -> None:
        """Record when each watched request is first scheduled."""
        for part in slices:
            entry = self._watched.get(part.request_id)
            if entry is not None and entry.scheduled is None:
                entry.scheduled = now

    def note_outputs(self, outputs: Iterable[RequestOutput], now: float) -> list[str]:
        """Record first tokens and failures; return the requests whose records are complete now."""
        ended = []
        for output in outputs:
            entry = self._watched.pop(output.request_id, None)
            if entry is None:
                continue
            if output.tokens:
                entry.first_token = now
            if output.error is not None:
                entry.failure = output.error[:_MAX_FAILURE_CHARS]
            ended.append(output.request_id)
        return ended

    def forget(self, request_id: str) -> None:
        """Stop watching an aborted request, which gets no first token; the entry stays."""
        self._watched.pop(request_id, None)

    def record_of(self, request_id: str, now: float) -> TransferRecord | None:
        """The record of an engine's request id."""
        entry = self._entries.get(request_id)
        return None if entry is None else _record(entry, now)

    def records(self, name: str, now: float) -> list[TransferRecord]:
        """Return the records of a client's or an engine's request id, newest first.

        An empty name selects all requests. At most `MAX_REPORTED` records are returned.
        """
        newest = reversed(self._entries.values())
        return [
            _record(entry, now) for entry in newest if not name or _is_named(entry.request_id, name)
        ][:MAX_REPORTED]


def _is_named(request_id: str, name: str) -> bool:
    if request_id == name:
        return True
    found = _NAME.fullmatch(request_id)
    if found is None:
        return False
    stem, index = found["stem"], found["index"]
    # A client's own id may end like our index.
    return name in (stem, f"{stem}-{index}", request_id.rpartition("-")[0])


def _record(entry: _TransferEntry, now: float) -> TransferRecord:
    return make_transfer_record(
        entry.request_id,
        entry.arrived,
        now,
        entry.pulls,
        scheduled=entry.scheduled,
        first_token=entry.first_token,
        failure=entry.failure,
    )


# -- totals --
# Sums over all steps and ranks since the engine started.


class ConnectorTotals:
    """Sums of the connectors' statistics, and the transfer log.

    Numbers are added at any depth. Samples become histograms: {name: {"sum": float, "buckets":
    {index of the upper bound: count}}}.
    """

    def __init__(self) -> None:
        self.transfer_log = TransferLog()
        self._data: dict[str, Any] = {}

    def add(self, stats: KVConnectorStats | None) -> None:
        if stats is not None and not stats.is_empty():
            data = stats.to_dict()
            samples = data.pop("samples", {})
            merge_stats(self._data, data)
            # A connector of another package may collect samples under names of its own.
            for name in HISTOGRAMS.keys() & samples.keys():
                for value in samples[name]:
                    # The keys are text because the histogram crosses to the API process in a
                    # message.
                    bucket = str(bisect_left(HISTOGRAMS[name], value))
                    add_up(
                        self._data, {"histograms": {name: {"sum": value, "buckets": {bucket: 1}}}}
                    )

    def to_dict(self) -> dict[str, Any]:
        return dict(self._data)

    def summaries(self) -> list[TransferSummary]:
        """Return one summary per transport, if the connector distinguishes transports."""
        transports = self._data.get("transports", {})
        return [
            TransferSummary(
                transport=name,
                transfers=int(row.get("transfers", 0)),
                total_bytes=int(row.get("bytes", 0)),
                seconds=float(row.get("seconds", 0.0)),
                segments=int(row.get("segments", 0)),
                planned_segments=int(row.get("planned", 0)),
            )
            for name, row in sorted(transports.items())
        ]
