import pytest

from kvferry.errors import ConfigError
from kvferry.router.fleet.instances import Role, pair_instances, parse_instance
from kvferry.router.options import RouterLimits, RouterOptions, Timeouts

PREFILL = pair_instances(Role.PREFILL, ["a", "b", "c"], [1, 2, 3])
DECODE = pair_instances(Role.DECODE, ["d", "e"], [4, 5])


def test_one_host_stands_for_several_ports() -> None:
    assert [str(i.address) for i in pair_instances(Role.PREFILL, ["h"], [1, 2])] == ["h:1", "h:2"]


def test_an_ipv6_host_becomes_a_url_that_can_be_dialled() -> None:
    assert pair_instances(Role.DECODE, ["::1"], [8000])[0].url == "http://[::1]:8000"


@pytest.mark.parametrize(
    ("hosts", "ports", "sentence"),
    [
        (["a", "b"], [1], "there are 2 prefill hosts but 1 prefill ports; give one port per host"),
        (["a"], [], "0 prefill ports"),
        (["a"], [65536], "'a' port 65536 is not the address"),
        ([""], [1], "'' port 1 is not the address"),
        (["http://a"], [1], "'http://a' port 1 is not the address"),
        (["a b"], [1], "'a b' port 1 is not the address"),
    ],
)
def test_hosts_and_ports_that_make_no_address_are_refused_in_one_sentence(
    hosts: list[str], ports: list[int], sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        pair_instances(Role.PREFILL, hosts, ports)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://10.0.0.1:8000", "http://10.0.0.1:8000"),
        ("https://d.example:8443/", "https://d.example:8443"),
        ("d:81", "http://d:81"),
        ("http://Node_1.prod.example.:81", "http://node_1.prod.example.:81"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_an_instance_is_named_by_a_url(url: str, shown: str) -> None:
    assert parse_instance(Role.DECODE, url).url == shown


@pytest.mark.parametrize(
    "url",
    [
        *("http://a:0", "http://a:1#x", "http://@a:1"),
        *(
            "",
            "http://",
            "ftp://a:1",
            "http://a:99999",
            "http://a:1/v1",
            "http://u@a:1",
            "http://a:x",
            "http://[::1",
        ),
        *(
            "http://a..b:1",
            "http://.:1",
            "http://a b:1",
            "http://a%00:1",
            "http://\x8c:1",
            f"http://{'a' * 64}:1",
        ),
    ],
)
def test_what_is_no_url_of_an_instance_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="not the address of a decode instance"):
        parse_instance(Role.DECODE, url)


@pytest.mark.parametrize(
    ("table", "setting"),
    [(Timeouts, "connect"), (Timeouts, "idle"), (RouterLimits, "max_body_bytes")],
)
def test_limits_must_be_positive(table: type[Timeouts] | type[RouterLimits], setting: str) -> None:
    with pytest.raises(ConfigError, match=setting):
        table(**{setting: 0})


def test_memory_for_less_than_one_request_is_refused() -> None:
    with pytest.raises(ConfigError, match="the largest request could never arrive"):
        RouterLimits(max_body_bytes=2000, max_unfinished_bytes=1999)


def test_a_port_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="port must be a port number from 0 to 65535, got 70000"):
        RouterOptions(PREFILL, DECODE, port=70000)
