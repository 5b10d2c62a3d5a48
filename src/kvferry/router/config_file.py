"""Parses the router's configuration file (TOML) into options. ConfigError names the wrong key.

Pure: text in, options out. Example:

    prefillers = ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
    decoders = ["http://10.0.0.3:8000"]
    [routing]
    prefill_policy = "prefix_affinity"
    [access]
    api_key_file = "/etc/kvferry/keys"
"""

import difflib
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from kvferry.config.fields import RENAMED, Settings, Text, Texts, converted
from kvferry.errors import ConfigError
from kvferry.router.fleet.health import HealthOptions
from kvferry.router.fleet.instances import Instance, Role
from kvferry.router.fleet.services import DiscoveryOptions, ServiceName, parse_member
from kvferry.router.options import (
    AccessOptions,
    ConversationOptions,
    RouterLimits,
    RouterOptions,
    RoutingOptions,
    Timeouts,
)
from kvferry.router.serving.admission import AdmissionOptions
from kvferry.web.api_keys import ApiKeys, check_key, read_key_file

T = TypeVar("T")

_TABLES: Mapping[str, type[Any]] = {
    "timeouts": Timeouts,
    "limits": RouterLimits,
    "admission": AdmissionOptions,
    "routing": RoutingOptions,
    "health": HealthOptions,
    "conversations": ConversationOptions,
    "discovery": DiscoveryOptions,
}
_PLAIN = ("host", "port", "access_log", "otlp_traces_endpoint")
_KEY_FILES = {
    "api_key_file": "api_keys",
    "admin_key_file": "admin_key",
    "instance_key_file": "instance_key",
}
_ACCESS_KEYS = [*_KEY_FILES, "instance_ca_file", "cors_origins", "ssl_certfile", "ssl_keyfile"]


def read_config_file(text: str, read_file: Callable[[str], str]) -> RouterOptions:
    """Parse a configuration file. `read_file` returns the text of a named file."""
    try:
        given = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"the configuration file is not valid TOML: {error}") from None
    known = [*_PLAIN, "prefillers", "decoders", *_TABLES, "access"]
    _check_keys(given, known, "")
    made = {name: given[name] for name in _PLAIN if name in given}
    for name, kind in _TABLES.items():
        if name in given:
            made[name] = _read_table(given[name], kind, name)
    made["services"] = ()
    for name, role in (("prefillers", Role.PREFILL), ("decoders", Role.DECODE)):
        members = [parse_member(role, text) for text in converted(name, given.get(name, []), Texts)]
        made[name] = tuple(entry for entry in members if isinstance(entry, Instance))
        made["services"] += tuple(entry for entry in members if isinstance(entry, ServiceName))
    made["access"] = read_access(converted("access", given.get("access", {}), Settings), read_file)
    return RouterOptions(**made)


def read_access(given: Mapping[str, Any], read_file: Callable[[str], str]) -> AccessOptions:
    """Parse the access table. Keys are in separate files, not on a command line or in the
    configuration file.
    """
    _check_keys(given, _ACCESS_KEYS, "access.")
    for name, value in given.items():
        # The router would start without the key or certificate that the operator wanted.
        if value == "":
            raise ConfigError(f"access.{name} is empty; give it a value or remove it")
    made: dict[str, Any] = {
        name: converted(f"access.{name}", given[name], Text)
        for name in ("instance_ca_file", "ssl_certfile", "ssl_keyfile")
        if name in given
    }
    if "cors_origins" in given:
        made["cors_origins"] = converted("access.cors_origins", given["cors_origins"], Texts)
    for name, option in _KEY_FILES.items():
        if name not in given:
            continue
        text = read_file(converted(f"access.{name}", given[name], Text))
        made[option] = _read_keys(text) if option == "api_keys" else text.strip()
        if not made[option]:
            raise ConfigError(f"the file of access.{name} holds no key")
        if option != "api_keys":
            check_key(made[option], f"the key in the file of access.{name}")
    return AccessOptions(**made)


def _read_keys(text: str) -> tuple[tuple[str, str], ...]:
    pairs = tuple(read_key_file(text))
    # Checks the keys; the result is not needed here.
    ApiKeys.of(pairs)
    return pairs


def _read_table(given: Any, kind: type[T], table: str) -> T:
    known = [entry.name for entry in fields(kind)]  # type: ignore[arg-type]
    _check_keys(converted(table, given, Settings), known, f"{table}.")
    try:
        return kind(**given)
    except ConfigError as error:
        raise ConfigError(f"{table}.{error}") from None


def _check_keys(given: Mapping[str, Any], known: list[str], table: str) -> None:
    for key in given:
        if key not in known:
            if RENAMED.get(key) in known:
                raise ConfigError(
                    f"{table}{key} in the configuration file is now called {table}{RENAMED[key]}; "
                    "rename it"
                )
            near = difflib.get_close_matches(key, known, 1)
            hint = (
                f"did you mean {table}{near[0]}?" if near else f"known settings: {', '.join(known)}"
            )
            raise ConfigError(
                f"the configuration file has {table}{key}, which is not a setting; {hint}"
            )
