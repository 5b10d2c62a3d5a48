"""Single keys of a config.json, read strictly: what is there and makes no sense is a ConfigError that names the key. Pure."""

from collections.abc import Mapping
from reprlib import repr as short_repr
from typing import Any

from kvferry.errors import ConfigError

__all__ = ["MAX_HEADS", "MAX_LAYERS", "list_for_layers", "section", "short", "switch", "whole_number", "whole_numbers"]

MAX_LAYERS = 10_000
MAX_HEADS = 4_096
"""Far above any model; a number beyond is a slip, and would only keep the planner busy."""
_MAX_NUMBER = 10**9


def whole_number(config: Mapping[str, Any], key: str, least: int = 1, most: int = _MAX_NUMBER) -> int | None:
    """None where the key is missing or null. ConfigError when it is no whole number of that size."""
    value = config.get(key)
    if value is None:
        return None
    if not is_whole(value, least, most):
        raise ConfigError(f"config.json says {key} is {short(value)}, which must be a whole number from {least} to {most:,}; correct it")
    return int(value)


def switch(config: Mapping[str, Any], key: str) -> bool | None:
    """None where the key is missing or null. 0 and 1 are read as false and true."""
    value = config.get(key)
    if value is None:
        return None
    if not isinstance(value, bool) and not is_whole(value, 0, 1):
        raise ConfigError(f"config.json says {key} is {short(value)}, which must be true or false; correct it")
    return bool(value)


def section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Empty where the key is missing or null."""
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"config.json says {key} is {short(value)}, which must be an object; correct it")
    return value


def list_for_layers(config: Mapping[str, Any], key: str, layers: int) -> list[Any] | None:
    """One value for each layer. None where the key is missing, null or an empty list."""
    value = config.get(key)
    if value is None or value == []:
        return None
    if not isinstance(value, list) or len(value) != layers:
        raise ConfigError(f"config.json has {layers} layers, but {key} does not list as many; correct one of them")
    return value


def whole_numbers(config: Mapping[str, Any], key: str, least: int, most: int) -> list[int] | None:
    """A list of them, however long. None where the key is missing or null."""
    value = config.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or not all(is_whole(number, least, most) for number in value):
        raise ConfigError(f"config.json says {key} is {short(value)}, which must list whole numbers from {least} to {most:,}; correct it")
    return value


def short(value: object) -> str:
    """For a sentence: the beginning of it, however long or deep it is."""
    return short_repr(value)[:40]


def is_whole(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
