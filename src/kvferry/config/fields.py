"""How one setting is checked: the kinds of values, and the error message for each wrong value.
Pure.

A settings class is a frozen dataclass whose annotations are the kinds below; the class calls
`check_fields` in its `__post_init__`.
"""

import dataclasses
import difflib
import json
import math
import re
from collections.abc import Callable, Iterable
from enum import Enum
from fractions import Fraction
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from kvferry.errors import ConfigError

LARGEST_INT = 2**62
LARGEST_SECONDS = 1e9
MIN_LEASE_SECONDS = 0.5
"""With a shorter lease, a heartbeat that is late because the process was not scheduled would end
the lease.
"""
MAX_LISTED_NAMES = 8
"""With more names than this, an error message refers to the documentation instead of listing the
names.
"""
SIZED = "a size"
REFERENCE = "docs/configuration.md"
RENAMED = {
    "planes": "transports",
    "staging_piece_bytes": "bounce_max_segment_bytes",
    "staging_ring_bytes": "bounce_buffer_bytes",
    "ill_probes": "max_failed_probes",
    "forgive_s": "backoff_reset_s",
}
"""Settings of earlier versions, in connectors and in the router's file, with their present names.
"""
REMOVED = dict.fromkeys(("interop", "interop_port"), "run kvferry on both P and D")
"""Settings of earlier versions that no longer exist, with what to do instead."""
RENAMED_FLAGS = {"--planes": "--transports", "--plane": "--transport", "--pieces": "--segments"}

HOST_NAME = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
"""Names with labels of other lengths cannot be resolved: Python raises UnicodeError."""


def span(what: str, low: float, high: float) -> Meta:
    """The limits of a kind of number, and its description with them."""
    return Meta(ge=low, le=high, description=f"{what} from {low} to {high}")


def at_least(what: str, low: float, high: float = LARGEST_INT) -> Meta:
    return Meta(ge=low, le=high, description=f"{what} of at least {low}")


def sized(what: str, low: int, high: int = LARGEST_INT) -> Meta:
    """The limits of a kind of number that may be written with a unit: see `read_size`."""
    ends = f"from {low} to {high}" if high < LARGEST_INT else f"of at least {low}"
    return Meta(ge=low, le=high, description=f"{what}, {ends}", title=SIZED)


Flag = Annotated[bool, Meta(description="true or false")]
Count = Annotated[int, at_least("a whole number", 1)]
Natural = Annotated[int, at_least("a whole number", 0)]
Port = Annotated[int, span("a port number", 0, 65535)]
Share = Annotated[float, span("a number", 0, 1)]
Number = Annotated[float, Meta(ge=-LARGEST_SECONDS, le=LARGEST_SECONDS, description="a number")]
Amount = Annotated[float, at_least("a number", 0, LARGEST_SECONDS)]
Seconds = Annotated[
    float, Meta(gt=0, le=LARGEST_SECONDS, description="a number of seconds above 0")
]
Timeout = Annotated[float, span("a number of seconds", 0, 86_400)]
"""Event loops accept no timers that are much longer."""
Bytes = Annotated[float, Meta(ge=0, le=LARGEST_INT, description="a number of bytes")]
LeaseSeconds = Annotated[float, at_least("a number of seconds", MIN_LEASE_SECONDS, LARGEST_SECONDS)]
Text = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=4096,
        # No path, name or address has a NUL, or a surrogate that is no byte of a file name.
        pattern=r"^[^\0\ud800-\udc7f\udd00-\udfff]*$",
        description="a text that is not empty and has no NUL character",
    ),
]
Texts = Annotated[tuple[Text, ...], Meta(description="a list of texts")]
Settings = Annotated[dict[str, Any], Meta(description="an object")]

# Text is accepted for flags because a dotted command-line argument is text, as are the flags in
# existing configurations.
FLAG_TEXTS = {"True": True, "true": True, "False": False, "false": False}


def check_fields(settings: Any, name_of: Callable[[str], str] = str) -> None:
    """Check and normalise every field of a frozen dataclass in place; `ConfigError` names the first
    wrong field, as `name_of` says.
    """
    hints = get_type_hints(type(settings), include_extras=True)
    for field in dataclasses.fields(settings):
        if not field.init:
            continue
        value = converted(name_of(field.name), getattr(settings, field.name), hints[field.name])
        object.__setattr__(settings, field.name, value)


def refuse_unknown_keys(keys: Iterable[object], known: Iterable[str], owner: str) -> None:
    """Raise `ConfigError` for the first key that `owner` does not have, and suggest the nearest key
    that it has.
    """
    known = list(known)
    for key in keys:
        if key not in known:
            if RENAMED.get(str(key)) in known:
                raise ConfigError(f"{key} of {owner} is now called {RENAMED[str(key)]}; rename it")
            if key in REMOVED:
                raise ConfigError(f"{key} of {owner} no longer exists; {REMOVED[str(key)]}")
            raise ConfigError(
                f"{shown_key(key)} is not a setting of {owner}; {nearest(str(key), known)}"
            )


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {shown(value)}; {nearest(value, choices)}")


def nearest(word: str, known: Iterable[str], reference: str = REFERENCE) -> str:
    """The end of an error message about an unknown word: a suggestion, the list of names, or where
    the names are documented.
    """
    folded = {name.casefold(): name for name in sorted(known)}
    close = difflib.get_close_matches(word[:200].casefold(), folded, n=1, cutoff=0.6)
    if close:
        return f"did you mean {folded[close[0]]}?"
    if len(folded) > MAX_LISTED_NAMES:
        return f"remove it, or use one of the {len(folded)} in {reference}"
    return f"remove it, or use one of {', '.join(folded.values())}" if folded else "remove it"


def is_text(hint: Any) -> bool:
    """Whether a kind is a text, or a text or null."""
    return hint == Text or Text in get_args(hint)


def is_list(hint: Any) -> bool:
    return get_origin(_bare(hint)) is tuple


def list_takes_text(hint: Any) -> bool:
    return is_list(hint) and is_text(get_args(_bare(hint))[0])


def may_be_null(hint: Any) -> bool:
    return type(None) in get_args(hint)


def described(hint: Any) -> str:
    """A kind in words."""
    if get_origin(hint) is Annotated:
        return str(next(meta.description for meta in get_args(hint)[1:] if meta.description))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "one of " + ", ".join(str(member.value) for member in hint)
    if get_args(hint):
        return " or ".join(
            "null" if part is type(None) else described(part) for part in get_args(hint)
        )
    return str(getattr(hint, "__name__", hint))


def shown(value: object) -> str:
    """A value as it appears in an error message: as JSON, which is how users write values, in one
    line of bounded length.
    """
    try:
        text = json.dumps(value).replace("\x7f", "\\u007f")
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= 80 else text[:77] + "..."


def shown_key(key: object) -> str:
    return key if isinstance(key, str) and key.isidentifier() and len(key) <= 80 else shown(key)


def parsed(name: str, text: str, hint: Any) -> Any:
    """A number of some kind that is written as text: in a flag or a variable."""
    return converted(name, text if is_size(hint) else read_number(text), hint)


def converted(name: str, value: Any, hint: Any) -> Any:
    """A value of some kind, as it comes from JSON, TOML or our own code; `ConfigError` with the
    limits of the kind for any other value.
    """
    if hint is Flag and isinstance(value, str):
        value = FLAG_TEXTS.get(value, value)
    if is_size(hint) and isinstance(value, str):
        value = read_size(value)
    try:
        # NaN is never a valid setting.
        if isinstance(value, float) and value != value:
            raise ValueError("not a number")
        return msgspec.convert(value, hint)
    except (msgspec.ValidationError, ValueError, OverflowError):
        raise ConfigError(
            f"{name} must be {described(hint)}, got {shown(value)}{_typo(value, hint)}"
        ) from None


# -- numbers in texts --
# Python's int() and float() also read "nan", "1_000", " 5 ", digits of other scripts, and numbers
# of thousands of digits.


NUMBER = re.compile(r"-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?", re.ASCII)
MAX_NUMBER_CHARS = 40
SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,6}(?=.*[A-Za-z]))?)(?: ?([kKmMgGtT])(i?B?)| ?B)?")


def read_number(text: str) -> int | float | str:
    """The number that a text is, or the text itself if it is none: no kind of number allows it."""
    if len(text) > MAX_NUMBER_CHARS or not NUMBER.fullmatch(text):
        return text
    number = float(text) if re.search("[.eE]", text) else int(text)
    return number if math.isfinite(number) else text


def read_size(text: str) -> int | str:
    """The number that a text such as `4096`, `8k` or `1.5GiB` is, or the text itself if it is none.

    As in `vllm serve`, k, m, g and t are powers of 1,000, and K, M, G and T powers of 1,024. With
    a B at the end, only those with an i are powers of 1,024.
    """
    found = SIZE.fullmatch(text)
    if found is None:
        return text
    number, unit, suffix = found[1], found[2] or "", found[3] or ""
    base = 1024 if "i" in suffix or (unit.isupper() and not suffix) else 1000
    return int(Fraction(number) * base ** " kmgt".index(unit.lower() or " "))


def is_size(hint: Any) -> bool:
    return any(isinstance(meta, Meta) and meta.title == SIZED for meta in get_args(hint))


def _bare(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _typo(value: object, hint: Any) -> str:
    if not (isinstance(hint, type) and issubclass(hint, Enum) and isinstance(value, str)):
        return ""
    close = difflib.get_close_matches(value[:200], [str(member.value) for member in hint], n=1)
    return f"; did you mean {close[0]}?" if close else ""
