"""Statistics of connectors: counters of one rank between two steps, their sum over ranks and time,
and the Prometheus metrics.

Plain data, without I/O. `KVConnectorStats` and `KVConnectorPromMetrics` are vLLM's names; each
connector brings its own subclasses.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Self

COUNTERS: Mapping[str, str] = {
    "transfers": "Transfers that succeeded.",
    "failed_transfers": "Transfers that a transport could not finish or that were cancelled.",
    "failed_handshakes": "Peers that could not be reached or were lost.",
    "incompatible_peers": "Handshakes with peers that were refused because their model, cache or "
    "version differs.",
    "finished_loads": "Requests whose KV arrived and was confirmed.",
    "failed_loads": "Requests whose KV did not arrive or was not confirmed.",
    "pushed_tokens": "Prompt tokens that a pushing prefill side computed for requests that already "
    "had blocks here.",
    "pushed_tokens_left": "Pushed tokens whose KV had not arrived when the prefill side computed "
    "the last token of the prompt.",
    "pushed_bytes_early": "Bytes of pushed KV that had arrived when the prefill side computed the "
    "last token of the prompt.",
    "retained_turns": "Finished turns whose blocks were retained for the next turn.",
    "retained_turns_evicted": "Retained turns that were evicted because the engine needed blocks.",
    "retained_turns_expired": "Retained turns that expired before a peer fetched the blocks.",
    "reuse_loads": "Prefills that loaded a retained turn from a decode side.",
    "reuse_loaded_tokens": "Tokens whose KV was loaded from retained turns instead of computed.",
    "reuse_loaded_bytes": "Bytes that were loaded from retained turns.",
    "reuse_failed_loads": "Prefills that computed the prompt because loading a retained turn "
    "failed.",
    "reuse_skipped_off": "Retained turns not loaded because this engine does not load from decode "
    "sides.",
    "reuse_skipped_own": "Retained turns not loaded because this engine itself retains the turn.",
    "reuse_skipped_invalid": "Retained turns not loaded because the ticket was forged or damaged.",
    "reuse_skipped_other_tokens": "Retained turns not loaded because no token of the prompt could "
    "be loaded from the turn.",
    "reuse_skipped_few_tokens": "Retained turns not loaded because too few tokens were missing "
    "here.",
    "reuse_skipped_refused": "Retained turns not loaded because the decode side no longer had the "
    "turn or did not answer.",
    "kv_expired_reqs": "Leases that expired before a peer confirmed a read.",
    "dropped_messages": "Messages from peers that were malformed or unexpected.",
    "rejected_params": "Requests whose kv_transfer_params this engine could not use.",
    "unmatched_tickets": "Tickets with which no token of the request's prompt could be loaded, so "
    "that this engine computed the prompt.",
}

LEVELS: Mapping[str, str] = {
    "num_leases": "Leases held for peers, over all ranks.",
    "num_held_blocks": "Blocks of finished requests that are held for peers.",
    "num_retained_turns": "Finished turns whose blocks are retained for the next turn.",
    "num_retained_blocks": "Blocks of retained turns; a block that several turns share counts once "
    "per turn.",
    "num_transfers": "Requests that wait for KV from a peer, over all ranks.",
    "num_peers": "Known peers, over all ranks.",
    "num_registrations": "Registrations of decode sides that wait for a prefill leg of this "
    "engine, over all ranks.",
}
"""Levels are shown as gauges. Each reporter (a rank, the scheduler) reports its own value when the
value has changed; the gauge shows the sum of all reporters' latest values.
"""

SIDE_CHANNEL_METRIC = "side_channel"
SIDE_CHANNEL_HELP = "1 for the address at which routers can ask this engine for retained turns."
MODE_METRIC = "transfer_mode"
MODE_HELP = "1 for the mode, pull or push, of this engine's connector. Routers read it."

NIXL_COUNTERS: Mapping[str, tuple[str, ...]] = {
    "num_failed_transfers": ("failed_transfers", "failed_handshakes"),
    "num_kv_expired_reqs": ("kv_expired_reqs",),
}
"""vLLM's metric names, and the counters of kvferry that each one sums."""

_MILLISECONDS = (0.1, 0.5, 1, 5, 10, 25, 50, 75, 100, 200, 300, 500, 750, 1000, 5000)
_SECONDS = tuple(ms / 1000 for ms in _MILLISECONDS)
_COUNTS = (10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10_000, 20_000, 50_000)
HISTOGRAMS: Mapping[str, tuple[float, ...]] = {
    "xfer_time_seconds": _SECONDS,
    "post_time_seconds": _SECONDS,
    "bytes_transferred": tuple(float(2**power) for power in range(11, 34, 2)),
    "num_descriptors": tuple(map(float, _COUNTS)),
}
"""The upper bounds of the buckets: vLLM's bounds, with finer bounds below for same-host transports.
"""


@dataclass
class KVConnectorStats:
    """Numbers that can be summed over ranks and steps."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: "KVConnectorStats") -> "KVConnectorStats":
        """Add another rank's or step's numbers to this object, and return it."""
        merge_stats(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """The few numbers that a log line shows."""
        raise NotImplementedError

    def is_empty(self) -> bool:
        return not self.data

    def drain(self) -> Self | None:
        """Return the numbers as another object, and reset this one; None if there are none."""
        if self.is_empty():
            return None
        drained = copy(self)
        self.reset()
        return drained

    def to_dict(self) -> dict[str, Any]:
        return dict(self.data)


class KVConnectorPromMetrics:
    """Registers metrics once and observes stats. Subclasses define the metrics."""

    def __init__(
        self,
        metric_types: Mapping[type, type],
        labelnames: Sequence[str],
        per_engine_labelvalues: Mapping[int, Sequence[object]],
    ) -> None:
        self._metric_types = metric_types
        self._labelnames = labelnames
        self._per_engine_labelvalues = per_engine_labelvalues

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        raise NotImplementedError


@dataclass
class TransferStats(KVConnectorStats):
    """Counters, the totals of each transport, and samples for histograms.

    The data are numbers and lists in nested dicts, which `merge_stats` sums:

        data: {counter: int, "side_channel": its address,
               "levels": {level: {reporter: value}},
               "samples": {histogram: [value, ...]},
               "transports": {transport: {"transfers", "bytes", "seconds",
                                          "segments" (really used),
                                          "planned" (before adjacent segments were joined)}}}
    """

    def count(self, counter: str, by: int = 1) -> None:
        assert counter in COUNTERS
        self.data[counter] = self.data.get(counter, 0) + by

    def set_level(self, level: str, reporter: str, value: int) -> None:
        assert level in LEVELS
        self.data.setdefault("levels", {}).setdefault(level, {})[reporter] = value

    def record_transfer(
        self,
        transport: str,
        total_bytes: int,
        segments: int,
        planned: int,
        post_s: float,
        transfer_s: float,
    ) -> None:
        row = {
            "transfers": 1,
            "bytes": total_bytes,
            "seconds": transfer_s,
            "segments": segments,
            "planned": planned,
        }
        samples = {
            "xfer_time_seconds": [transfer_s],
            "post_time_seconds": [post_s],
            "bytes_transferred": [total_bytes],
            "num_descriptors": [segments],
        }
        add_up(self.data, {"transfers": 1, "transports": {transport: row}, "samples": samples})

    def reduce(self) -> dict[str, int | float]:
        samples: dict[str, list[float]] = self.data.get("samples", {})
        seconds, moved = (
            samples.get("xfer_time_seconds", []),
            [size / 2**20 for size in samples.get("bytes_transferred", [])],
        )
        posts, segments = samples.get("post_time_seconds", []), samples.get("num_descriptors", [])
        return {
            "Num successful transfers": self.data.get("transfers", 0),
            "Avg xfer time (ms)": round(1e3 * _mean(seconds), 3),
            "P90 xfer time (ms)": round(1e3 * _p90(seconds), 3),
            "Avg post time (ms)": round(1e3 * _mean(posts), 3),
            "P90 post time (ms)": round(1e3 * _p90(posts), 3),
            "Avg MB per transfer": round(_mean(moved), 3),
            "Throughput (MB/s)": round(sum(moved) / sum(seconds), 3) if sum(seconds) else 0,
            "Avg number of descriptors": round(_mean(segments), 1),
            "Num failed transfers": sum(
                self.data.get(name, 0) for name in NIXL_COUNTERS["num_failed_transfers"]
            ),
            "Num KV expired reqs": self.data.get("kv_expired_reqs", 0),
        }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _p90(values: Sequence[float]) -> float:
    """The smallest value that nine in ten values do not exceed."""
    return sorted(values)[-(-len(values) * 9 // 10) - 1] if values else 0.0


def merge_stats(into: dict[str, Any], later: Mapping[str, Any]) -> None:
    """Add the data of a later `TransferStats` to the data of another. Levels are replaced, not
    summed.
    """
    add_up(into, {name: value for name, value in later.items() if name != "levels"})
    for level, values in later.get("levels", {}).items():
        into.setdefault("levels", {}).setdefault(level, {}).update(values)


def add_up(into: dict[str, Any], row: Mapping[str, Any]) -> None:
    """Add numbers to numbers and lists to lists of the same name, at any depth. A value of any
    other type, or of another type than the old value, replaces the old value.
    """
    for name, value in row.items():
        old = into.get(name)
        if isinstance(value, Mapping):
            if not isinstance(old, dict):
                old = into[name] = {}
            add_up(old, value)
        elif isinstance(value, list):
            into[name] = [*(old if isinstance(old, list) else ()), *value]
        elif _is_number(value):
            into[name] = (old if _is_number(old) else 0) + value
        else:
            into[name] = value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
