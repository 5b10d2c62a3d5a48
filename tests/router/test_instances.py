import pytest

from kvferry.errors import ConfigError
from kvferry.router.instances import REST_S, Instance, InstancePool, Outcome, Role, pair_instances
from kvferry.router.options import RouterOptions

PREFILL = pair_instances(Role.PREFILL, ["a", "b", "c"], [1, 2, 3])
DECODE = pair_instances(Role.DECODE, ["d", "e"], [4, 5])


def turns(pool: InstancePool, role: Role, count: int, now: float = 0.0) -> str:
    """Who is chosen, one letter each."""
    chosen = [pool.choose(role, now) for _ in range(count)]
    return "".join(instance.address.host for instance in chosen if instance is not None)


def test_instances_of_a_role_take_turns() -> None:
    assert turns(InstancePool(PREFILL, DECODE), Role.PREFILL, 7) == "abcabca"


def test_a_turn_of_one_role_is_no_turn_of_the_other() -> None:
    pool = InstancePool(PREFILL, DECODE)
    turns(pool, Role.PREFILL, 1)
    assert turns(pool, Role.DECODE, 3) == "ded"


def test_an_instance_that_refused_is_passed_over_for_a_moment() -> None:
    pool = InstancePool(PREFILL, DECODE)
    pool.note_refusal(PREFILL[1], now=10.0)
    assert turns(pool, Role.PREFILL, 4, now=10.0) == "acac"
    assert turns(pool, Role.PREFILL, 2, now=10.0 + 0.9 * REST_S) == "ac"
    assert turns(pool, Role.PREFILL, 3, now=10.0 + REST_S) == "abc"


def test_an_answer_to_what_it_had_taken_before_does_not_bring_a_refusing_instance_back() -> None:
    pool = InstancePool(PREFILL, DECODE)
    pool.note_refusal(PREFILL[0], now=0.0)
    assert (pool.count(Role.PREFILL, Outcome.REFUSED), pool.count(Role.PREFILL, Outcome.ANSWERED)) == (1, 0)
    pool.note(PREFILL[0], Outcome.ANSWERED)
    assert turns(pool, Role.PREFILL, 4) == "bcbc"


def test_when_all_refused_they_take_turns_as_ever() -> None:
    pool = InstancePool(PREFILL, DECODE)
    for instance in DECODE:
        pool.note_refusal(instance, now=0.0)
    assert turns(pool, Role.DECODE, 3) == "ded"


def test_each_instance_is_tried_once_and_the_resting_ones_last() -> None:
    pool = InstancePool(PREFILL, DECODE)
    pool.note_refusal(PREFILL[0], now=0.0)
    tried: list[Instance] = []
    while (instance := pool.choose(Role.PREFILL, 0.0, tried)) is not None:
        tried.append(instance)
    assert tried == [PREFILL[1], PREFILL[2], PREFILL[0]]


def test_an_instance_named_twice_is_tried_once() -> None:
    pool = InstancePool(PREFILL[:1] * 2, DECODE)
    assert pool.choose(Role.PREFILL, 0.0, [PREFILL[0]]) is None


def test_one_host_stands_for_several_ports() -> None:
    assert [str(i.address) for i in pair_instances(Role.PREFILL, ["h"], [1, 2])] == ["h:1", "h:2"]


def test_an_ipv6_host_becomes_a_url_that_can_be_dialled() -> None:
    assert pair_instances(Role.DECODE, ["::1"], [8000])[0].url == "http://[::1]:8000"


@pytest.mark.parametrize(
    ("hosts", "ports", "sentence"),
    [
        (["a", "b"], [1], "2 prefill hosts and 1 prefill ports were given; give one port per host"),
        (["a"], [], "0 prefill ports"),
        (["a"], [65536], "'a' port 65536 is no address"),
        ([""], [1], "'' port 1 is no address"),
    ],
)
def test_hosts_and_ports_that_make_no_address_are_refused_in_one_sentence(hosts: list[str], ports: list[int], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        pair_instances(Role.PREFILL, hosts, ports)
    assert sentence in str(caught.value)


def test_a_pool_without_decoders_is_refused() -> None:
    with pytest.raises(ConfigError, match="no decode instance"):
        InstancePool(PREFILL, ())


@pytest.mark.parametrize("setting", ["connect_timeout_s", "answer_timeout_s", "idle_timeout_s", "max_body_bytes"])
def test_limits_must_be_positive(setting: str) -> None:
    with pytest.raises(ConfigError, match=setting):
        RouterOptions(PREFILL, DECODE, **{setting: 0})  # type: ignore[arg-type]


def test_a_port_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="port must be from 0 to 65535, got 70000"):
        RouterOptions(PREFILL, DECODE, port=70000)
