"""What a router counts, in its own registry, so that several routers in one process do not mix."""

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

__all__ = ["RouterMetrics"]


class RouterMetrics:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "kvferry:router_requests", "Requests answered, by route and HTTP status.", ["route", "status"], registry=self._registry
        )
        self.active = Gauge("kvferry:router_active_requests", "Requests being served.", registry=self._registry)
        self.failures = Counter(
            "kvferry:router_instance_failures", "Legs that failed, by role and instance.", ["role", "instance"], registry=self._registry
        )
        self.refusals = Counter(
            "kvferry:router_instance_refusals",
            "Legs answered with 503, by role and instance.",
            ["role", "instance"],
            registry=self._registry,
        )
        self.aborts = Counter("kvferry:router_client_aborts", "Requests whose client left early.", registry=self._registry)
        self.releases = Counter("kvferry:router_releases", "Prefills whose blocks were given back unread.", registry=self._registry)
        self.without_blocks = Counter(
            "kvferry:router_prefills_without_blocks", "Prefill answers that offered no blocks, so that D computed.", registry=self._registry
        )

        self.at_once = Counter(
            "kvferry:router_legs_at_once", "Requests whose two legs were started together (push).", registry=self._registry
        )

    def text(self) -> bytes:
        return generate_latest(self._registry)
