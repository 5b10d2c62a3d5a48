"""Typed access to the JSON files of a checkpoint; every complaint is a ConfigError that names file and key. Reads files; otherwise pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.errors import ConfigError

__all__ = ["ConfigKeys", "read_json_object"]


def read_json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; give the folder of a Hugging Face checkpoint") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


@dataclass(frozen=True, slots=True)
class ConfigKeys:
    """One JSON object of a file. `null` counts as left out, except for `has`."""

    path: Path
    values: Mapping[str, Any]

    def fail(self, key: str, problem: str) -> ConfigError:
        return ConfigError(f"{self.path}: {key} {problem}")

    def has(self, key: str) -> bool:
        return key in self.values

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.fail(key, f"must be a whole number of at least {least}, got {value!r}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.fail(key, f"must be a positive number, got {value!r}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.fail(key, f"must be true or false, got {value!r}")
        return default if value is None else value

    def section(self, key: str) -> "ConfigKeys | None":
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(key, f"must be an object, got {value!r}")
        return ConfigKeys(self.path, value)
