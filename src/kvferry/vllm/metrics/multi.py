"""Statistics, Prometheus metrics and KV events of a `MultiConnector` in vLLM's classes. Everything
stays with the name or the index of the child that it belongs to.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_events import KVConnectorKVEvents
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvferry.connectors.multi.stats import CHILD_COUNTERS, OwnCounts
from kvferry.connectors.stats import add_up

_log = logging.getLogger(__name__)


@dataclass
class MultiKVStats(KVConnectorStats):
    """The stats of each child by name; `data` is unused.

    vLLM's front-end rebuilds the stats without the configuration, so each child's class travels
    with them.
    """

    parts: dict[str, Any] = field(default_factory=dict)
    classes: dict[str, str] = field(default_factory=dict)
    """The class of each child, as `module:name`."""
    counts: OwnCounts = field(default_factory=dict)

    def add(self, name: str, connector_class: type, part: Any) -> None:
        self.parts[name] = part
        self.classes[name] = f"{connector_class.__module__}:{connector_class.__qualname__}"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "MultiKVStats":
        """Rebuild what `to_dict` made. A child whose class does not say how is left out."""
        stats = cls(counts={name: dict(rows) for name, rows in data.get("counts", {}).items()})
        for name, row in data.get("children", {}).items():
            found: Any = resolve_name(row["class"])
            part = found.build_kv_connector_stats(data=row["data"])
            if part is not None:
                stats.add(name, found, part)
        return stats

    def to_dict(self) -> dict[str, Any]:
        return {
            "children": {
                name: {"class": self.classes[name], "data": part.to_dict()}
                for name, part in self.parts.items()
            },
            "counts": self.counts,
        }

    def reset(self) -> None:
        self.parts, self.classes, self.counts = {}, {}, {}

    def aggregate(self, other: KVConnectorStats) -> "MultiKVStats":
        assert isinstance(other, MultiKVStats)
        for name, part in other.parts.items():
            known = self.parts.get(name)
            self.parts[name] = part if known is None else known.aggregate(part)
            self.classes[name] = other.classes[name]
        add_up(self.counts, other.counts)
        return self

    def reduce(self) -> dict[str, Any]:
        shown = {
            f"{child}: {name}": value
            for child, part in self.parts.items()
            for name, value in part.reduce().items()
        }
        for name, rows in self.counts.items():
            shown |= {f"{child}: {name}": count for child, count in rows.items()}
        return shown

    def is_empty(self) -> bool:
        return not self.counts and all(part.is_empty() for part in self.parts.values())


class MultiPromMetrics(KVConnectorPromMetrics):
    """The metrics of each child. If several children have the same metrics, these have one more
    label, `child`, so that the children stay apart.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        children: Sequence[tuple[str, Any, Any]],
    ) -> None:
        """`children` lists the name, the class and the configuration of each child."""
        super().__init__(vllm_config, dict(metric_types), labelnames, per_engine_labelvalues)
        self._logged: set[str] = set()
        self._parts: dict[str, Any] = {}
        # Classes that inherit the method, as kvferry's stores do, have the same metrics.
        methods = [_function(found.build_prom_metrics) for _, found, _ in children]
        shared: dict[Any, dict[Any, Callable[..., Any]]] = {}
        for (name, connector_class, child_config), method in zip(children, methods, strict=True):
            types, labels, values = dict(metric_types), labelnames, per_engine_labelvalues
            if methods.count(method) > 1:
                types = shared.setdefault(
                    method, {kind: _MadeOnce(made) for kind, made in metric_types.items()}
                )
                labels = [*labelnames, "child"]
                values = {engine: [*row, name] for engine, row in per_engine_labelvalues.items()}
            part = connector_class.build_prom_metrics(child_config, types, labels, values)
            if part is not None:
                self._parts[name] = part
        self._counters = {
            name: metric_types[Counter](
                name=f"kvferry:{name}", documentation=text, labelnames=[*labelnames, "child"]
            )
            for name, text in CHILD_COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, row in transfer_stats_data.get("children", {}).items():
            part = self._parts.get(name)
            if part is None:
                continue
            try:
                part.observe(row["data"], engine_idx)
            # An exception here would end the task that sends outputs to all clients.
            except Exception:
                if name not in self._logged:
                    self._logged.add(name)
                    _log.exception("metrics of a child connector failed child=%s", name)
        labels = self.per_engine_labelvalues[engine_idx]
        for name, rows in transfer_stats_data.get("counts", {}).items():
            for child, count in rows.items():
                self._counters[name].labels(*labels, child).inc(count)


def _function(method: Any) -> Any:
    """The function of a class method, which is the same for all classes that inherit it."""
    return getattr(method, "__func__", method)


class _MadeOnce:
    """Makes each metric once: Prometheus refuses a second metric of the same name."""

    def __init__(self, metric_class: Callable[..., Any]) -> None:
        self._metric_class = metric_class
        self._made: dict[str, Any] = {}

    def __call__(self, *args: Any, **settings: Any) -> Any:
        name = str(settings.get("name") or args[0])
        if name not in self._made:
            self._made[name] = self._metric_class(*args, **settings)
        return self._made[name]


class MultiKVEvents(KVConnectorKVEvents):
    """The KV events of one rank's children, or of all ranks', by the index of the child.

    vLLM merges the events of ranks with `add_events(other.get_all_events())`; the list holds the
    children's own containers, so that each container is merged by its own rules.
    """

    def __init__(self, parts: dict[int, Any]) -> None:
        self.parts = parts

    def add_events(self, events: list[Any]) -> None:
        for child, part in events:
            if child in self.parts:
                self.parts[child].add_events(part.get_all_events())
                self.parts[child].increment_workers(1)
            else:
                self.parts[child] = part

    def aggregate(self) -> "MultiKVEvents":
        return MultiKVEvents({child: part.aggregate() for child, part in self.parts.items()})

    def increment_workers(self, count: int = 1) -> None:
        """Do nothing: `add_events` has counted the rank for each child that had events."""

    def get_all_events(self) -> list[Any]:
        return list(self.parts.items())

    def get_number_of_workers(self) -> int:
        return max((part.get_number_of_workers() for part in self.parts.values()), default=0)

    def clear_events(self) -> None:
        for part in self.parts.values():
            part.clear_events()
