"""What a router counts, in its own registry, so that several routers in one process do not mix."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvferry.router.instances import Instance, Outcome

__all__ = ["RouterMetrics"]

_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)


class RouterMetrics:
    def __init__(self, policies: str = "") -> None:
        """`policies`: that choose instances, for a label."""
        self.policies = policies
        self._registry = registry = CollectorRegistry()
        by_instance = ["role", "instance"]
        self.requests = Counter(
            "kvferry:router_requests", "Requests answered, by route and HTTP status.", ["route", "status"], registry=registry
        )
        self.outcomes = Counter(
            "kvferry:router_outcomes",
            "Generations, by how they ended and by the policies that chose.",
            ["outcome", "policies"],
            registry=registry,
        )
        self.active = Gauge("kvferry:router_active_requests", "Requests being served.", registry=registry)
        self.queued = Gauge("kvferry:router_queued_requests", "Requests that wait for their turn.", registry=registry)
        self.failures = Counter(
            "kvferry:router_instance_failures", "Legs that failed, by role and instance.", by_instance, registry=registry
        )
        self.refusals = Counter(
            "kvferry:router_instance_refusals", "Legs answered with 503, by role and instance.", by_instance, registry=registry
        )
        self.legs = Counter(
            "kvferry:router_legs", "Legs that ended, by role, instance and outcome.", [*by_instance, "outcome"], registry=registry
        )
        self.retries = Counter(
            "kvferry:router_retries", "Legs tried again elsewhere, by the role that failed.", ["role"], registry=registry
        )
        self.fallbacks = Counter(
            "kvferry:router_fallbacks", "Prompts that a decode instance computed for want of a prefill instance.", registry=registry
        )
        self.aborts = Counter("kvferry:router_client_aborts", "Requests whose client left early.", registry=registry)
        self.releases = Counter("kvferry:router_releases", "Prefills whose blocks were given back unread.", registry=registry)
        self.without_blocks = Counter(
            "kvferry:router_prefills_without_blocks", "Prefill answers that offered no blocks, so that D computed.", registry=registry
        )
        self.at_once = Counter("kvferry:router_legs_at_once", "Requests whose two legs were started together (push).", registry=registry)
        self.turns = Counter(
            "kvferry:router_turns",
            "Turns of conversations, by whether the last turn's blocks were offered to P.",
            ["found"],
            registry=registry,
        )
        self.ttft = Histogram(
            "kvferry:router_time_to_first_token_seconds",
            "From a request's arrival to the first bytes of its answer.",
            buckets=_BUCKETS,
            registry=registry,
        )
        self.handover = Histogram(
            "kvferry:router_handover_seconds", "From P's answer to the first bytes of D's.", buckets=_BUCKETS, registry=registry
        )
        self.instances = Gauge("kvferry:router_instance", "1 for each instance and its state.", [*by_instance, "state"], registry=registry)
        self.running = Gauge("kvferry:router_instance_legs", "Legs that an instance works on.", by_instance, registry=registry)
        self._legs: dict[tuple[Instance, Outcome], Counter] = {}
        self._outcomes: dict[str, Counter] = {}

    def leg(self, instance: Instance, outcome: Outcome) -> None:
        """One leg has ended."""
        counter = self._legs.get((instance, outcome))
        if counter is None:
            counter = self._legs[instance, outcome] = self.legs.labels(instance.role, instance.url, outcome)
        counter.inc()

    def outcome(self, ending: str) -> None:
        """One generation has ended."""
        counter = self._outcomes.get(ending)
        if counter is None:
            counter = self._outcomes[ending] = self.outcomes.labels(ending, self.policies)
        counter.inc()

    def show_fleet(self, members: Iterable[tuple[Instance, str, int]]) -> None:
        """Instance, state and legs under way of everybody there is now."""
        self.instances.clear()
        self.running.clear()
        for instance, state, num_running in members:
            self.instances.labels(instance.role, instance.url, state).set(1)
            self.running.labels(instance.role, instance.url).set(num_running)

    def text(self) -> bytes:
        return generate_latest(self._registry)
