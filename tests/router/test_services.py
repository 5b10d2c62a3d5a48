"""Tests of services: the fleet follows the addresses of a DNS name."""

import asyncio
import logging
import socket
from collections.abc import Iterator

import pytest
from tests.router.fleet_world import make_fleet

from kvferry.errors import ConfigError
from kvferry.router.fleet.dns import ServiceResolver
from kvferry.router.fleet.fleet import Fleet
from kvferry.router.fleet.instances import Instance, Outcome, Role
from kvferry.router.fleet.members import MemberState, RoutingHints
from kvferry.router.fleet.services import (
    DiscoveredInstances,
    DiscoveryOptions,
    ServiceName,
    parse_member,
)
from kvferry.types import Address

SERVICE = ServiceName(Role.DECODE, "decode.example", 8000)


class World:
    """A fleet and the instances that were removed from it."""

    def __init__(self) -> None:
        self.fleet: Fleet = make_fleet("round_robin", 0)
        self.removed: list[Instance] = []
        self.discovered = DiscoveredInstances(self.fleet, self.removed.append)

    def hosts(self) -> list[str]:
        return [member.instance.address.host for member in self.fleet.members()]

    def state(self, host: str) -> MemberState:
        member = self.fleet.get(at(host))
        assert member is not None
        return member.state(0.0)


def at(host: str) -> Instance:
    return Instance(SERVICE.role, Address(host, SERVICE.port))


def test_an_address_that_appears_joins() -> None:
    world = World()
    assert world.discovered.update(SERVICE, ["10.0.0.2", "10.0.0.1"], 0.0)
    assert world.discovered.update(SERVICE, ["10.0.0.1", "10.0.0.2", "10.0.0.3"], 0.0)
    assert not world.discovered.update(SERVICE, ["10.0.0.3", "10.0.0.2", "10.0.0.1"], 0.0)
    assert world.hosts() == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]


def test_an_address_that_disappears_is_removed_after_its_last_leg() -> None:
    world = World()
    world.discovered.update(SERVICE, ["10.0.0.1", "10.0.0.2"], 0.0)
    leg = world.fleet.begin(at("10.0.0.1"), 0.0)
    world.discovered.update(SERVICE, ["10.0.0.2"], 1.0)
    assert world.state("10.0.0.1") is MemberState.DRAINING
    assert world.fleet.choose(Role.DECODE, RoutingHints(), 1.0) == at("10.0.0.2")
    assert world.discovered.remove_drained() == []
    world.fleet.end(leg, Outcome.ANSWERED, 2.0)
    assert world.discovered.remove_drained() == [at("10.0.0.1")] == world.removed
    assert world.hosts() == ["10.0.0.2"]


def test_no_address_at_all_changes_nothing() -> None:
    world = World()
    world.discovered.update(SERVICE, ["10.0.0.1"], 0.0)
    assert not world.discovered.update(SERVICE, [], 1.0)
    assert world.state("10.0.0.1") is MemberState.NEW


def test_an_address_that_returns_while_it_drains_gets_requests_again() -> None:
    world = World()
    world.discovered.update(SERVICE, ["10.0.0.1", "10.0.0.2"], 0.0)
    world.discovered.update(SERVICE, ["10.0.0.2"], 1.0)
    world.discovered.update(SERVICE, ["10.0.0.1", "10.0.0.2"], 2.0)
    assert world.discovered.remove_drained() == []
    assert world.state("10.0.0.1") is MemberState.NEW


def test_an_address_of_two_services_stays_while_one_lists_it() -> None:
    world, other = World(), ServiceName(Role.DECODE, "other.example", 8000)
    world.discovered.update(SERVICE, ["10.0.0.1", "10.0.0.2"], 0.0)
    world.discovered.update(other, ["10.0.0.1"], 0.0)
    world.discovered.update(SERVICE, ["10.0.0.2"], 1.0)
    assert world.state("10.0.0.1") is MemberState.NEW
    world.discovered.update(other, ["10.0.0.2"], 2.0)
    assert world.state("10.0.0.1") is MemberState.DRAINING


def test_an_instance_that_an_operator_named_or_drained_is_left_alone() -> None:
    world = World()
    world.fleet.add(at("10.0.0.1"), 0.0)
    world.discovered.update(SERVICE, ["10.0.0.1", "10.0.0.2"], 0.0)
    world.fleet.drain(at("10.0.0.2"))
    world.discovered.update(SERVICE, ["10.0.0.2", "10.0.0.3"], 1.0)
    assert world.state("10.0.0.1") is MemberState.NEW
    assert world.state("10.0.0.2") is MemberState.DRAINING
    assert world.discovered.remove_drained() == []


@pytest.mark.parametrize("is_drained_first", [True, False])
def test_an_operators_drain_outlasts_an_address_that_disappears_and_returns(
    is_drained_first: bool,
) -> None:
    world = World()
    world.discovered.update(SERVICE, ["10.0.0.1", "10.0.0.2"], 0.0)
    if is_drained_first:
        world.fleet.drain(at("10.0.0.1"))
    world.discovered.update(SERVICE, ["10.0.0.2"], 1.0)
    world.fleet.drain(at("10.0.0.1"))
    assert world.discovered.remove_drained() == []
    world.discovered.update(SERVICE, ["10.0.0.1", "10.0.0.2"], 2.0)
    assert world.state("10.0.0.1") is MemberState.DRAINING


def test_an_address_that_returned_while_an_operator_drained_it_is_no_longer_leaving() -> None:
    world = World()
    world.discovered.update(SERVICE, ["10.0.0.1", "10.0.0.2"], 0.0)
    world.fleet.drain(at("10.0.0.1"))
    world.discovered.update(SERVICE, ["10.0.0.2"], 1.0)
    world.discovered.update(SERVICE, ["10.0.0.1", "10.0.0.2"], 2.0)
    world.fleet.add(at("10.0.0.1"), 3.0)  # the operator undoes the drain
    world.fleet.leave(at("10.0.0.1"))  # the engine restarts, and DNS still lists it
    assert world.discovered.remove_drained() == []
    world.discovered.update(SERVICE, ["10.0.0.2"], 4.0)
    assert world.discovered.remove_drained() == [at("10.0.0.1")]


def test_a_registered_instance_that_an_operator_drained_keeps_draining_when_dns_lists_it() -> None:
    world = World()
    world.fleet.renew(at("10.0.0.1"), 30.0, 0.0)
    world.fleet.drain(at("10.0.0.1"))
    world.discovered.update(SERVICE, ["10.0.0.1"], 1.0)
    assert world.state("10.0.0.1") is MemberState.DRAINING


def test_a_service_is_named_by_a_dns_url() -> None:
    named = parse_member(Role.PREFILL, "dns://Prefill.kvferry.svc:8000")
    assert named == ServiceName(Role.PREFILL, "prefill.kvferry.svc", 8000)
    assert str(named) == "dns://prefill.kvferry.svc:8000"
    assert parse_member(Role.DECODE, "http://10.0.0.1:8000") == at("10.0.0.1")


@pytest.mark.parametrize(
    "url",
    ["dns://", "dns://name", "dns://name:0", "dns://name:99999", "dns://a b:1", "dns://n:1/x"],
)
def test_a_wrong_name_of_a_service_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is not the name of a decode service; give dns://NAME"):
        parse_member(Role.DECODE, url)


@pytest.mark.parametrize("name", ["interval_s", "timeout_s"])
def test_times_of_discovery_are_positive(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} must be a number of seconds above 0"):
        DiscoveryOptions(**{name: 0})


async def until_one_host(world: World, options: DiscoveryOptions) -> None:
    """Look the service up until the router knows the host 10.0.0.1, and no other."""
    resolver = ServiceResolver([SERVICE], options, world.discovered, lambda: None)
    running = asyncio.create_task(resolver.run())
    async with asyncio.timeout(60):
        while world.hosts() != ["10.0.0.1"]:
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("first", [MemoryError(), ValueError("embedded null character"), []])
def test_a_name_is_looked_up_again_whatever_a_lookup_raises(
    first: Exception | list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: Iterator[Exception | list[str]] = iter([first, ["10.0.0.1"]])

    def lookup(*_: object, **__: object) -> list[tuple[object, ...]]:
        answer = next(answers, ["10.0.0.1"])
        if isinstance(answer, Exception):
            raise answer
        return [(socket.AF_INET, 1, 6, "", (host, 0)) for host in answer]

    async def scene() -> None:
        world = World()
        monkeypatch.setattr(socket, "getaddrinfo", lookup)
        options = DiscoveryOptions(interval_s=0.01, timeout_s=0.1)
        await until_one_host(world, options)

    asyncio.run(scene())


def test_the_routers_own_address_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = [(socket.AF_INET, 1, 6, "", (host, 0)) for host in ("127.0.0.1", "10.0.0.1")]

    async def scene() -> None:
        world = World()
        world.fleet.listening = Address("0.0.0.0", SERVICE.port)
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        options = DiscoveryOptions(interval_s=0.01)
        await until_one_host(world, options)

    with caplog.at_level(logging.WARNING):
        asyncio.run(scene())
    assert "has this router's own address" in caplog.text
