import pytest

from kvferry.errors import ConfigError
from kvferry.router.instances import InstancePool, Role, pair_instances
from kvferry.router.options import RouterOptions

PREFILL = pair_instances(Role.PREFILL, ["a", "b", "c"], [1, 2, 3])
DECODE = pair_instances(Role.DECODE, ["d", "e"], [4, 5])


def test_instances_of_a_role_take_turns() -> None:
    pool = InstancePool(PREFILL, DECODE)
    assert [pool.choose(Role.PREFILL).address.host for _ in range(7)] == list("abcabca")


def test_a_turn_of_one_role_is_no_turn_of_the_other() -> None:
    pool = InstancePool(PREFILL, DECODE)
    pool.choose(Role.PREFILL)
    assert [pool.choose(Role.DECODE).address.host for _ in range(3)] == list("ded")


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
