import asyncio
from dataclasses import fields
from types import NoneType

import pytest
from tests.router.stubs import RecordedReleases

from kvferry.errors import ConfigError
from kvferry.router.app import RouterApp
from kvferry.router.config_file import read_config_file
from kvferry.router.options import RouterOptions
from kvferry.types import FailurePolicy

WHOLE = """
host = "0.0.0.0"
port = 8192
prefillers = ["http://10.0.0.1:8000", "10.0.0.2:8001"]
decoders = ["https://10.0.0.3:8443"]
access_log = true
[timeouts]
connect = 1
[limits]
max_body_bytes = 1024
[admission]
max_running = 7
tenant_running = 2
[routing]
prefill_policy = "round_robin"
without_prefill = "fail"
[health]
probe_interval_s = 1.5
[conversations]
ttl = 60
[access]
api_key_file = "keys"
admin_key_file = "admin"
cors_origins = ["https://app.example"]
"""
FILES = {"keys": "team-a sk-1\nsk-2\n", "admin": "sk-admin\n", "empty": " \n"}
UNFIT_KEYS = ["sk-1\nsk-2", "Bearer sk-1", "sk-\u00e9", "\ufeffsk-1", "sk-\x00"]


def test_a_file_says_everything() -> None:
    options = read_config_file(WHOLE, FILES.__getitem__)
    assert [instance.url for instance in (*options.prefillers, *options.decoders)] == [
        "http://10.0.0.1:8000",
        "http://10.0.0.2:8001",
        "https://10.0.0.3:8443",
    ]
    assert (options.host, options.port, options.access_log) == ("0.0.0.0", 8192, True)
    assert (
        options.timeouts.connect,
        options.limits.max_body_bytes,
        options.admission.max_running,
    ) == (1.0, 1024, 7)
    assert (options.routing.prefill_policy, options.routing.without_prefill) == (
        "round_robin",
        FailurePolicy.FAIL,
    )
    assert (options.health.probe_interval_s, options.conversations.ttl) == (1.5, 60.0)
    assert (options.access.api_keys[0], options.access.admin_key) == (
        ("team-a", "sk-1"),
        "sk-admin",
    )
    assert "sk-" not in repr(options).replace(repr(options.access.api_keys), "")


def test_an_empty_file_is_a_router_whose_instances_come_by_themselves() -> None:
    options = read_config_file("", FILES.__getitem__)
    assert (options.prefillers, options.decoders) == ((), ())


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("port = ", "not valid TOML"),
        (
            "[health]\nill_probes = 3",
            "health.ill_probes in the configuration file is now called health.max_failed_probes",
        ),
        ("prot = 1", "prot, which is not a setting; did you mean port?"),
        (
            "[timeouts]\nconect = 1",
            "timeouts.conect, which is not a setting; did you mean timeouts.connect?",
        ),
        ("[timeouts]\nconnect = 0", "timeouts.connect must be a number of seconds above 0"),
        ('[timeouts]\nconnect = "x"', "timeouts.connect must be a number of seconds above 0"),
        ("timeouts = 3", "timeouts must be an object, got 3"),
        ('prefillers = ["ftp://x"]', "not the address of a prefill instance"),
        ('prefillers = "http://a:1"', "prefillers must be a list of texts"),
        (
            '[routing]\nwithout_prefill = "pray"',
            "routing.without_prefill must be one of fail, recompute",
        ),
        ('[access]\nadmin_key_file = "empty"', "access.admin_key_file holds no key"),
        ('[access]\nssl_keyfile = "k"', "without ssl_certfile"),
        ('[access]\napi_key_file = ""', "access.api_key_file is empty"),
        ('[access]\nadmin_key_file = ""', "access.admin_key_file is empty"),
        ('[access]\ninstance_key_file = ""', "access.instance_key_file is empty"),
        ('[access]\ninstance_ca_file = ""', "access.instance_ca_file is empty"),
        ('[access]\nssl_certfile = ""', "access.ssl_certfile is empty"),
        ("[access]\napi_key_file = false", "access.api_key_file must be a text"),
        *(
            (
                f'[access]\n{name} = "a\\u0000b"',
                f"access.{name} must be a text that is not empty and has no NUL",
            )
            for name in ("api_key_file", "instance_ca_file", "ssl_certfile")
        ),
        ('host = ""', "host must be a text that is not empty"),
        ("port = 70000", "port must be a port number from 0 to 65535"),
    ],
)
def test_what_is_wrong_is_named(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config_file(text, FILES.__getitem__)
    assert sentence in str(caught.value)


NUMBERS = [
    ("", "port"),
    *(
        (table, entry.name)
        for table in ("timeouts", "limits", "admission", "routing", "health", "conversations")
        for entry in fields(getattr(RouterOptions(), table))
        if type(getattr(getattr(RouterOptions(), table), entry.name)) in (int, float, NoneType)
    ),
]


@pytest.mark.parametrize(("table", "name"), NUMBERS)
def test_every_number_of_the_file_has_a_range(table: str, name: str) -> None:
    for value in ("nan", "-nan", "inf", "-inf", "1e309", "-1", f"1{'0' * 400}", '"5"', "true"):
        with pytest.raises(ConfigError, match=rf"{name} must be a .*, got "):
            read_config_file(f"[{table}]\n{name} = {value}" if table else f"{name} = {value}", str)


@pytest.mark.parametrize("key", UNFIT_KEYS)
@pytest.mark.parametrize("setting", ["admin_key_file", "instance_key_file"])
def test_a_key_that_no_header_can_carry_is_found_at_the_start(setting: str, key: str) -> None:
    """With such a key every request would fail, or no client would get in, and the operator would
    not know why.
    """
    with pytest.raises(ConfigError, match=f"access.{setting} must be one word of printable ASCII"):
        read_config_file(f'[access]\n{setting} = "key"', {"key": f"{key}\n"}.__getitem__)


@pytest.mark.parametrize("key", UNFIT_KEYS[2:])
def test_so_is_an_unfit_key_among_those_of_clients(key: str) -> None:
    with pytest.raises(ConfigError, match=r"API key of .* must be one word of printable ASCII"):
        read_config_file('[access]\napi_key_file = "keys"', {"keys": f"{key}\n"}.__getitem__)


def test_an_authority_that_cannot_be_loaded_is_found_at_the_start() -> None:
    async def scene() -> None:
        options = read_config_file(
            '[access]\ninstance_ca_file = "/nowhere/ca.pem"', FILES.__getitem__
        )
        with pytest.raises(ConfigError, match=r"/nowhere/ca\.pem cannot be loaded"):
            RouterApp(options, RecordedReleases())

    asyncio.run(scene())
