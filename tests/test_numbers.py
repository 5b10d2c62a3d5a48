"""Numbers from outside: every flag, setting and body reads them with one parser, which knows the
range of each and refuses what Python's own int() and float() would let through.
"""

import argparse
import math
import re
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
from benchmarks.__main__ import TABLE

from kvferry.cli import bench, main
from kvferry.cli.arguments import NumberOf, Parser
from kvferry.cli.register import check_router_url
from kvferry.config import (
    KVTransferConfig,
    NixlExtraConfig,
    P2pNcclExtraConfig,
    SideChannelConfig,
)
from kvferry.config.extra import DecodeBenchExtraConfig, MooncakeExtraConfig
from kvferry.config.fields import (
    Count,
    Natural,
    Number,
    Port,
    Seconds,
    Share,
    Timeout,
    converted,
    parsed,
    read_size,
)
from kvferry.config.offloading import (
    CpuTierConfig,
    DiskTierConfig,
    MooncakeTierConfig,
    ObjectTierConfig,
    OffloadingExtraConfig,
)
from kvferry.engine.options import EngineOptions
from kvferry.errors import ConfigError
from kvferry.router.fleet.health import HealthOptions
from kvferry.router.fleet.instances import Role, parse_instance
from kvferry.router.fleet.registration import Statement
from kvferry.router.fleet.services import DiscoveryOptions
from kvferry.router.options import (
    ConversationOptions,
    RouterLimits,
    RouterOptions,
    RoutingOptions,
    Timeouts,
)
from kvferry.router.serving.admission import AdmissionOptions
from kvferry.types import Address

HOSTILE_TEXTS = (
    *("", " ", "nan", "NaN", "-nan", "inf", "-inf", "+inf", "Infinity", "infinity", "1e309"),
    *("-1e309", "1e99999", "1" + "0" * 400, "1" * 5000, "0." + "0" * 5000 + "1", "１２", "٣", "²"),
    *("½", "1_000", "1_0.5", " 5", "5 ", " 5 ", "\n5", "5\n", "5\t", "\x005", "5\0", "+5", "--5"),
    *("−5", "- 5", "0x10", "0x1p4", "0b1", "0o7", "1e", "e5", ".", "-", "-.", "1.2.3", "1..2"),
    *("1e5.5", "1e+", "1,000", "5,0", "1/2", "1 000", "1\u00a0000", "true", "null", "None", "5s"),
    *("[]", "[5]", "{}", '"5"', "five"),
)
HOSTILE_VALUES: tuple[object, ...] = (
    *(math.nan, math.inf, -math.inf, 1e300, -1e300, 10**400, -(10**400), 2**64, -(2**64)),
    *(True, False, None, "", "5", "nan", b"5", [], [5], {}, {"a": 5}, 5j),
)
KINDS = (Port, Count, Natural, Seconds, Timeout, Share, Number)
PARSERS = [
    *(main.make_parser(name) for name in main.COMMANDS),
    *(table.make_parser(name) for table in (bench.BENCHMARKS, TABLE) for name in table.entries),
]
NUMERIC = [
    pytest.param(parser, action, id=f"{parser.prog} {action.option_strings[0]}")
    for parser in PARSERS
    for action in parser._actions  # noqa: SLF001
    if isinstance(action.type, NumberOf)
]


@pytest.mark.parametrize("text", HOSTILE_TEXTS)
def test_a_text_that_is_not_a_plain_number_is_refused_by_every_kind(text: str) -> None:
    for kind in KINDS:
        with pytest.raises(ConfigError, match=r"^it must be .*, got "):
            parsed("it", text, kind)


@pytest.mark.parametrize("value", HOSTILE_VALUES, ids=lambda value: repr(value)[:20])
def test_a_value_that_is_no_number_or_out_of_range_is_refused_by_every_kind(value: object) -> None:
    for kind in KINDS:
        with pytest.raises(ConfigError, match=r"^it must be .*, got "):
            converted("it", value, kind)


@pytest.mark.parametrize(
    ("text", "kind", "number"),
    [
        *(("5", Seconds, 5.0), (".5", Share, 0.5), ("1.", Share, 1.0), ("1e3", Seconds, 1000.0)),
        *(("-0", Timeout, 0.0), ("-1.5", Number, -1.5), ("007", Count, 7), ("0", Port, 0)),
    ],
)
def test_a_plain_number_is_read(text: str, kind: Any, number: float) -> None:
    assert parsed("it", text, kind) == number
    assert type(parsed("it", text, kind)) is type(number)


@pytest.mark.parametrize(
    ("text", "kind", "error"),
    [
        ("65536", Port, "it must be a port number from 0 to 65535, got 65536"),
        ("-1", Timeout, "it must be a number of seconds from 0 to 86400, got -1"),
        ("nan", Timeout, 'it must be a number of seconds from 0 to 86400, got "nan"'),
        ("1.0", Count, "it must be a whole number of at least 1, got 1.0"),
        ("1.1", Share, "it must be a number from 0 to 1, got 1.1"),
    ],
)
def test_the_error_names_the_range(text: str, kind: Any, error: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(error)}$"):
        parsed("it", text, kind)


@pytest.mark.parametrize(("parser", "action"), NUMERIC)
def test_every_flag_with_a_number_refuses_what_is_none(
    parser: Parser, action: argparse.Action
) -> None:
    flag = action.option_strings[0]
    for text in HOSTILE_TEXTS:
        with pytest.raises(ConfigError, match=rf"^{flag}\S* must be .*, got .*--help`$"):
            parser.parse([f"{flag}={text}"])


def test_no_flag_reads_a_number_in_another_way() -> None:
    others = {
        f"{parser.prog} {action.option_strings[0]}"
        for parser in PARSERS
        for action in parser._actions  # noqa: SLF001
        if action.type in (int, float)
    }
    assert others == set()
    assert len(NUMERIC) > 50


SETTINGS = (
    *(KVTransferConfig, NixlExtraConfig, MooncakeExtraConfig, P2pNcclExtraConfig),
    *(OffloadingExtraConfig, CpuTierConfig, DiskTierConfig, MooncakeTierConfig, ObjectTierConfig),
    *(DecodeBenchExtraConfig, SideChannelConfig, EngineOptions, RouterOptions, Timeouts),
    *(RouterLimits, RoutingOptions, ConversationOptions, HealthOptions, AdmissionOptions),
    *(DiscoveryOptions, Statement),
)


@pytest.mark.parametrize("settings", SETTINGS)
def test_every_setting_that_is_a_number_has_a_range(settings: type) -> None:
    for name, hint in get_type_hints(settings, include_extras=True).items():
        assert not {int, float} & {hint, *get_args(hint)} or get_origin(hint) is Annotated, name


@pytest.mark.parametrize("port", HOSTILE_TEXTS)
def test_an_address_with_a_port_that_is_no_number_is_refused(port: str) -> None:
    assert Address.parse(f"host:{port}") is None
    # Python removes space around an address, as our variables allow space around a value.
    if port.strip() == port != "":
        with pytest.raises(ConfigError, match="SIDE_CHANNEL_PORT must be a port number from 0 to"):
            SideChannelConfig.from_environment({"KVFERRY_SIDE_CHANNEL_PORT": port})
        with pytest.raises(ConfigError):
            parse_instance(Role.DECODE, f"http://host:{port}")
        with pytest.raises(ConfigError):
            check_router_url(f"http://host:{port}")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *(("0", 0), ("4096", 4096), ("8k", 8000), ("1K", 1024), ("1.5G", 3 * 2**29)),
        *(("512Mi", 2**29), ("8GiB", 2**33), ("8 GiB", 2**33), ("2GB", 2 * 10**9), ("5B", 5)),
        *(("0.3GiB", 322_122_547), ("999999999999999999k", 999_999_999_999_999_999_000)),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert read_size(text) == size


@pytest.mark.parametrize("text", [*HOSTILE_TEXTS, "1e9", "1.5", "G", "i", "5iB", "9" * 30, "5GG"])
def test_other_sizes_are_refused(text: str) -> None:
    assert read_size(text) == text
