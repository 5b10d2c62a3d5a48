"""How one setting is checked: the kinds of values, and the sentence for each that is wrong. Pure.

A settings class is a frozen dataclass whose annotations are the kinds below; `check_fields` in its `__post_init__` does the rest.
"""

import dataclasses
import difflib
from collections.abc import Iterable
from enum import Enum
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from kvferry.errors import ConfigError

__all__ = [
    "Count",
    "Flag",
    "Natural",
    "Number",
    "Port",
    "Seconds",
    "Settings",
    "Text",
    "Texts",
    "check_fields",
    "nearest",
    "refuse_unknown_keys",
    "shown",
]

LARGEST_INT = 2**62
LARGEST_SECONDS = 1e9

Flag = Annotated[bool, Meta(description="true or false")]
Count = Annotated[int, Meta(ge=1, le=LARGEST_INT, description="a whole number of at least 1")]
Natural = Annotated[int, Meta(ge=0, le=LARGEST_INT, description="a whole number of at least 0")]
Port = Annotated[int, Meta(ge=0, le=65535, description="a port number from 0 to 65535")]
Number = Annotated[float, Meta(ge=-LARGEST_SECONDS, le=LARGEST_SECONDS, description="a number")]
Seconds = Annotated[float, Meta(gt=0, le=LARGEST_SECONDS, description="a number of seconds above 0")]
Text = Annotated[str, Meta(min_length=1, max_length=4096, description="a text that is not empty")]
Texts = Annotated[tuple[Text, ...], Meta(description="a list of texts")]
Settings = Annotated[dict[str, Any], Meta(description="an object")]

# The seeds write these flags as text, and so does a dotted argument.
FLAG_TEXTS = {"True": True, "true": True, "False": False, "false": False}


def check_fields(settings: Any) -> None:
    """Check and normalise every field of a frozen dataclass in place; ConfigError names the first that is wrong."""
    hints = get_type_hints(type(settings), include_extras=True)
    for field in dataclasses.fields(settings):
        if not field.init:
            continue
        value = _converted(field.name, getattr(settings, field.name), hints[field.name])
        object.__setattr__(settings, field.name, value)


def refuse_unknown_keys(keys: Iterable[object], known: Iterable[str], owner: str) -> None:
    """ConfigError for the first key that `owner` does not have, with the nearest that it has."""
    known = list(known)
    for key in keys:
        if key not in known:
            raise ConfigError(f"{shown_key(key)} is not a setting of {owner}; {nearest(str(key), known)}")


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown word: a guess, or all there is."""
    known = sorted(known)
    close = difflib.get_close_matches(word[:200], known, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]}?"
    return f"remove it, or use one of {', '.join(known)}" if known else "remove it"


def shown(value: object) -> str:
    """A value as it appears in a sentence: one line, bounded."""
    text = ascii(value) if isinstance(value, (str, int, float, bool, list, tuple, dict, type(None))) else type(value).__name__
    return text if len(text) <= 80 else text[:77] + "..."


def shown_key(key: object) -> str:
    return key if isinstance(key, str) and key.isidentifier() and len(key) <= 80 else shown(key)


def _converted(name: str, value: Any, hint: Any) -> Any:
    if hint is Flag and isinstance(value, str):
        value = FLAG_TEXTS.get(value, value)
    try:
        if isinstance(value, float) and value != value:
            raise ValueError("not a number")
        return msgspec.convert(value, hint)
    except (msgspec.ValidationError, ValueError, OverflowError):
        raise ConfigError(f"{name} must be {_described(hint)}, got {shown(value)}{_typo(value, hint)}") from None


def _described(hint: Any) -> str:
    if get_origin(hint) is Annotated:
        return str(next(meta.description for meta in get_args(hint)[1:] if meta.description))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "one of " + ", ".join(str(member.value) for member in hint)
    if get_args(hint):
        return " or ".join("null" if part is type(None) else _described(part) for part in get_args(hint))
    return str(getattr(hint, "__name__", hint))


def _typo(value: object, hint: Any) -> str:
    if not (isinstance(hint, type) and issubclass(hint, Enum) and isinstance(value, str)):
        return ""
    close = difflib.get_close_matches(value[:200], [str(member.value) for member in hint], n=1)
    return f"; did you mean {close[0]}?" if close else ""
