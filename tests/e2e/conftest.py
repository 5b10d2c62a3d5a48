"""One generated model for all end-to-end tests, and engines that several tests share, because
starting an engine takes seconds.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.e2e.harness import Cluster, Engine, Prompt
from tests.e2e.hosts import Hosts, skip_unless_possible

from kvferry.engine.make_model.writer import make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_model(directory)
    return directory


SHORT = {
    "kv_lease_duration": 2,
    "handshake_timeout": 2,
    "confirm_timeout": 2,
    "read_timeout": 5,
    "receive_timeout": 10,
}
PATIENT = {
    "kv_lease_duration": 600,
    "handshake_timeout": 60,
    "confirm_timeout": 60,
    "read_timeout": 600,
    "receive_timeout": 600,
}
"""For transfers that must succeed however busy the machine is. With this lease, blocks that become
free soon were released and did not expire.
"""
NETWORKED = {**SHORT, "kv_lease_duration": 10, "read_timeout": 40, "receive_timeout": 60}


@dataclass(frozen=True)
class Fleet:
    """A small P with short leases, and two D: `strict` has the failure policy `fail`, `lenient` has
    `recompute`.
    """

    cluster: Cluster
    p: Engine
    strict: Engine
    lenient: Engine


@dataclass(frozen=True)
class Pair:
    """P, D and the router in front of them."""

    p: Engine
    d: Engine
    router: Engine


@dataclass
class Network:
    """P and two D, one per failure policy, each on its own host; KV moves over TCP, with our `tcp`
    transport or with NIXL.
    """

    hosts: Hosts
    cluster: Cluster
    transport: str
    decoders: dict[str, Engine]
    """The decode engines by failure policy."""
    p: Engine = field(init=False)

    def __post_init__(self) -> None:
        self.p = self.start_p()

    @contextmanager
    def cut(self, host: int = 0) -> Iterator[None]:
        """Cut the cable of a host (by default P's), and reconnect it afterwards."""
        self.hosts.cut(self.hosts[host])
        try:
            yield
        finally:
            self.hosts.heal(self.hosts[host])

    @contextmanager
    def throttled(self, rate: str) -> Iterator[None]:
        """Limit P's sending rate to `rate`."""
        self.hosts[0].throttle(rate)
        try:
            yield
        finally:
            self.hosts[0].hurry()

    def replace_p(self) -> None:
        """Kill P and start a new incarnation on the same host with the same engine id."""
        self.p.kill()
        self.cluster.dismiss(self.p.process)
        self.p = self.start_p(self.p.address.port)

    def start_p(self, port: int = 0) -> Engine:
        """Start P with so few blocks that a few prompts reuse every block."""
        small = ("--num-gpu-blocks-override", "120")
        return self.cluster.serve(
            "prefill",
            *small,
            extra=networked(self.transport),
            engine_id="p",
            port=port,
            at=self.hosts[0],
        ).ready()


def networked(transport: str) -> dict[str, object]:
    return {**NETWORKED, "transports": [transport]}


@contextmanager
def connected(transport: str, directory: Path, model: Path) -> Iterator[Network]:
    with Hosts.opened(3) as hosts, Cluster(directory, model) as cluster:
        starting = {
            policy: cluster.serve(
                f"decode {policy}", extra=networked(transport), policy=policy, at=hosts[number]
            )
            for number, policy in enumerate(("fail", "recompute"), 1)
        }
        yield Network(
            hosts,
            cluster,
            transport,
            {policy: process.ready() for policy, process in starting.items()},
        )


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Network]:
    skip_unless_possible()
    with connected("tcp", tmp_path_factory.mktemp("network"), model) as made:
        yield made


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("shared"), model) as made:
        yield made


@pytest.fixture(scope="session")
def plain(shared: Cluster) -> Engine:
    """A single engine without a connector: its answers are the right ones."""
    return shared.serve("plain", is_plain=True).ready()


@pytest.fixture(scope="session")
def patient(shared: Cluster) -> Pair:
    starting = [shared.serve(f"patient {role}", extra=PATIENT) for role in ("prefill", "decode")]
    p, d = (process.ready() for process in starting)
    return Pair(p, d, shared.proxy([p], [d]).ready())


@pytest.fixture(scope="session")
def fleet(shared: Cluster) -> Fleet:
    starting = [shared.serve("short prefill", "--num-gpu-blocks-override", "40", extra=SHORT)]
    starting += [
        shared.serve(f"short decode {policy}", extra=SHORT, policy=policy)
        for policy in ("fail", "recompute")
    ]
    return Fleet(shared, *(process.ready() for process in starting))


@pytest.fixture
def cluster(tmp_path: Path, model: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, model) as made:
        yield made


def random_prompts(count: int, seed: int, longest: int = 1500) -> list[Prompt]:
    """Make prompts with lengths from 1 to `longest`, many of them short; some share prefixes, some
    are repeated.
    """
    rng = random.Random(seed)
    prompts: list[Prompt] = []
    for _ in range(count):
        length = min(longest, int(longest ** rng.random()) + 1)
        token_ids = tuple(rng.randrange(10, 500) for _ in range(length))
        if prompts and rng.random() < 0.3:
            earlier = rng.choice(prompts).token_ids
            token_ids = (earlier[: rng.randrange(len(earlier) + 1)] + token_ids)[:longest]
        prompts.append(Prompt(token_ids))
    prompts[0] = Prompt(prompts[0].token_ids[:1])
    prompts[1] = Prompt(tuple(rng.randrange(10, 500) for _ in range(longest)))
    return prompts
