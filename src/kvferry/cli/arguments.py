"""The argument parser of all commands, `--kv-transfer-config`, and the values of flags. Pure.

All errors are ConfigErrors: one sentence, with the nearest known flag where a flag is unknown.
"""

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

from kvferry.config import kind_of_setting
from kvferry.config.fields import (
    LARGEST_INT,
    RENAMED_FLAGS,
    described,
    is_list,
    is_text,
    list_takes_text,
    may_be_null,
    nearest,
    parsed,
    shown,
    sized,
    span,
)
from kvferry.engine.options import first_gpu
from kvferry.errors import ConfigError

# -- parser --


DEFAULT = re.compile(r"\s*\(default: (.*?)\)")


@dataclass(frozen=True, slots=True)
class FlagRow:
    """One argument, as a row of a table in the documentation."""

    names: tuple[str, ...]
    values: str
    default: str
    meaning: str


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises instead of exiting and never accepts an abbreviated flag."""

    def __init__(self, prog: str, description: str, examples: str = "") -> None:
        self.unknown_advice = ""
        """Added to the error message for an unknown flag."""
        self._flags: list[str] = []
        self._unsupported: dict[tuple[str, str], str] = {}
        super().__init__(
            prog=prog,
            description=description,
            epilog=f"examples:\n{examples}" if examples else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def add_argument(self, *names: str, **settings: Any) -> argparse.Action:
        action = super().add_argument(*names, **settings)
        self._flags += action.option_strings
        return action

    def add_switch(self, name: str, *, default: bool, meaning: str) -> None:
        """Add a flag with a `--no-` form.

        Python's BooleanOptionalAction writes the default into the help text only in some Python
        versions, so the help text is set here.
        """
        action = self.add_argument(name, action=argparse.BooleanOptionalAction, default=default)
        action.help = f"{meaning} (default: {'on' if default else 'off'})"

    def add_unsupported(self, name: str, value: str = "", *, advice: str) -> None:
        """Refuse a flag, or one value of a flag, that users know from vLLM and that is not
        supported yet.

        Without this entry the error would suggest the nearest flag, which would mislead the user.
        """
        self._unsupported[name, value] = advice

    def flag_rows(self) -> list[FlagRow]:
        """Return the arguments as rows for the documentation, without `--help`."""
        return [_row(action) for action in self._actions if action.dest != "help"]

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse the arguments; raise ConfigError for a bad value, a missing or an unknown
        argument.
        """
        self._refuse_unsupported(arguments)
        found, unknown = self.parse_known_args(arguments)
        if unknown:
            word = unknown[0].partition("=")[0]
            if RENAMED_FLAGS.get(word) in self._flags:
                raise ConfigError(f"{word} of `{self.prog}` is now called {RENAMED_FLAGS[word]}")
            if word.startswith("-"):
                guess = nearest(word, self._flags, f"`{self.prog} --help`")
                raise ConfigError(
                    f"{show_argument(word)} is not an argument of `{self.prog}`; {guess}"
                    f"{self.unknown_advice}"
                )
            raise ConfigError(
                f"{show_argument(word)} is an unexpected argument of `{self.prog}`; remove it"
            )
        self._refuse_unusable(found)
        return found

    def _refuse_unusable(self, found: argparse.Namespace) -> None:
        """Refuse a NUL character, which no path has, and an empty value of a flag: it comes from a
        shell variable that is not set, and the command would run without the key, certificate or
        address that the user meant.
        """
        for action in self._actions:
            value = getattr(found, action.dest, None)
            values = value if isinstance(value, list) else [value]
            name = (*action.option_strings, str(action.metavar))[0]
            if any("\0" in str(each) for each in values):
                raise ConfigError(f"{name} has a NUL character; remove it")
            if action.option_strings and value != action.default and "" in values:
                raise ConfigError(f"{name} is empty; give it a value or leave it out")

    def _refuse_unsupported(self, arguments: Sequence[str]) -> None:
        for word, following in zip(arguments, [*arguments[1:], ""], strict=False):
            if word == "--":
                return
            flag, equals, inline = word.partition("=")
            for value in ("", inline if equals else following):
                if (flag, value) in self._unsupported:
                    raise ConfigError(
                        f"{f'{flag} {value}'.strip()} is not supported yet; "
                        f"{self._unsupported[flag, value]}"
                    )

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ").replace(": must be ", " must be ", 1)
        raise ConfigError(f"{message}; see `{self.prog} --help`")


def show_argument(word: str) -> str:
    return word if word.isprintable() and len(word) <= 80 else shown(word)


def _row(action: argparse.Action) -> FlagRow:
    text = (action.help or "").replace("%(default)s", str(action.default))
    default = DEFAULT.search(text)
    names = tuple(action.option_strings) or (str(action.metavar or action.dest),)
    return FlagRow(
        names, _values(action), default[1] if default else "", DEFAULT.sub("", text).strip()
    )


def _values(action: argparse.Action) -> str:
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        return ""
    if action.choices is not None:
        return ", ".join(map(str, action.choices))
    if isinstance(action.type, NumberOf):
        name = described(action.type.kind)
    else:
        name = KINDS.get(getattr(action.type, "__name__", ""), "text")
    return f"{name} …" if action.nargs == "+" else name


KINDS = {
    "parse_device": "device",
    "Path": "folder",
    "parse_backend": "name",
    "parse_path": "path",
}


# -- transfer config --
# `--kv-transfer-config` in two spellings, merged into one mapping:
#
#     --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'
#     --kv-transfer-config.kv_role kv_both
#     --kv-transfer-config.kv_connector_extra_config.backends+ LIBFABRIC      (appends to a list)
#
# A value that is valid JSON is decoded, any other value is text; a key of type text always gets
# text. Where both spellings name a key, the dotted spelling wins.


TRANSFER_CONFIG_FLAG = "--kv-transfer-config"
DOTTED_PATH = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*\+?")
MAX_PATH_PARTS = 8


@dataclass(frozen=True, slots=True)
class TransferArguments:
    """The merged transfer config of an argument list, and the remaining arguments."""

    mapping: dict[str, Any] | None
    """The merged config; None if no argument was about KV transfer."""
    rest: tuple[str, ...]


def split_transfer_arguments(arguments: Sequence[str]) -> TransferArguments:
    """Take every `--kv-transfer-config…` out of an argument list and merge the values.

    Raise ConfigError for values that contradict each other or are malformed.
    """
    found: list[tuple[str, str]] = []
    rest: list[str] = []
    waiting = list(reversed(arguments))
    while waiting:
        flag, equals, inline = dashed(waiting.pop()).partition("=")
        if flag == "--":
            rest += [flag, *reversed(waiting)]
            break
        if flag == TRANSFER_CONFIG_FLAG or flag.startswith(f"{TRANSFER_CONFIG_FLAG}."):
            found.append((flag, inline if equals else _next_value(flag, waiting)))
        else:
            rest.append(f"{flag}{equals}{inline}")
    return TransferArguments(_merged(found) if found else None, tuple(rest))


def dashed(argument: str) -> str:
    """Return the flag with dashes: `--max_model_len=8` becomes `--max-model-len=8`.

    Users may write flags either way, as with vLLM. The text after a dot or `=` is unchanged.
    """
    if not argument.startswith("--"):
        return argument
    name = re.split(r"[.=]", argument, maxsplit=1)[0]
    return name.replace("_", "-") + argument[len(name) :]


def _next_value(flag: str, waiting: list[str]) -> str:
    if not waiting or waiting[-1].startswith("--"):
        raise ConfigError(f"{shown_flag(flag)} needs a value; write it after the flag")
    return waiting.pop()


def _merged(found: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Merge the JSON value first, then dotted values, then appends.

    The order on the command line does not matter, except among appends.
    """
    whole = [value for flag, value in found if flag == TRANSFER_CONFIG_FLAG]
    if len(whole) > 1:
        raise ConfigError(f"{TRANSFER_CONFIG_FLAG} is given twice; keep one of them")
    merged = _decoded_object(whole[0]) if whole else {}
    dotted = [(_path(flag), value) for flag, value in found if flag != TRANSFER_CONFIG_FLAG]
    sets = [(path, value) for path, value in dotted if not path[-1].endswith("+")]
    _refuse_overlaps([path for path, _ in sets])
    connector = _connector(merged, dict(sets))
    for path, value in sets:
        _parent(merged, path)[path[-1]] = _decoded_as(value, kind_of_setting(path, connector))
    for path, value in dotted:
        if path[-1].endswith("+"):
            _append(merged, path, value, connector)
    return merged


def _connector(merged: dict[str, Any], sets: dict[tuple[str, ...], str]) -> str:
    """Return the connector whose settings the extra config holds.

    Empty for a connector from another module, because the types of its settings are unknown here.
    """
    if merged.get("kv_connector_module_path") or ("kv_connector_module_path",) in sets:
        return ""
    return sets.get(("kv_connector",)) or str(merged.get("kv_connector", ""))


def _path(flag: str) -> tuple[str, ...]:
    """Split a dotted flag into its parts; raise ConfigError for a malformed key."""
    dotted = flag[len(TRANSFER_CONFIG_FLAG) + 1 :]
    parts = tuple(dotted.split("."))
    if not DOTTED_PATH.fullmatch(dotted) or len(parts) > MAX_PATH_PARTS:
        raise ConfigError(
            f"{shown_flag(flag)} is not a dotted key; write it like "
            f"{TRANSFER_CONFIG_FLAG}.kv_role kv_both"
        )
    return parts


def _refuse_overlaps(paths: Sequence[tuple[str, ...]]) -> None:
    """Raise ConfigError if a key is set twice, or set both as a value and as an object."""
    seen: set[tuple[str, ...]] = set()
    for path in sorted(paths):
        if path in seen:
            raise ConfigError(
                f"{TRANSFER_CONFIG_FLAG}.{'.'.join(path)} is given twice; keep one of them"
            )
        for length in range(1, len(path)):
            if path[:length] in seen:
                raise ConfigError(
                    f"{TRANSFER_CONFIG_FLAG}.{'.'.join(path)} sets a key inside "
                    f"{'.'.join(path[:length])}, which another flag sets as a whole; keep one of "
                    "them"
                )
        seen.add(path)


def _parent(merged: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """Return the object that holds the last part of a path; create missing objects."""
    here = merged
    for depth, part in enumerate(path[:-1]):
        below = here.setdefault(part, {})
        if not isinstance(below, dict):
            raise ConfigError(
                f"{'.'.join(path[: depth + 1])} is {shown(below)}, so {'.'.join(path)} cannot be "
                "set inside it; make it an object"
            )
        here = below
    return here


def _append(merged: dict[str, Any], path: tuple[str, ...], value: str, connector: str) -> None:
    path = (*path[:-1], path[-1].removesuffix("+"))
    kind = kind_of_setting(path, connector)
    if kind is not None and not is_list(kind):
        raise ConfigError(f"{'.'.join(path)} takes one value; remove the +")
    listed = _parent(merged, path).setdefault(path[-1], [])
    if not isinstance(listed, list):
        raise ConfigError(
            f"{'.'.join(path)} is {shown(listed)}, which is not a list, so no item can be "
            "appended to it; make it a list"
        )
    decoded = _decoded_value(value)
    listed.append(value if list_takes_text(kind) and not isinstance(decoded, str) else decoded)


def _decoded_object(text: str) -> dict[str, Any]:
    try:
        decoded = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{TRANSFER_CONFIG_FLAG} is not JSON ({error}); put single quotes around it and "
            "double quotes inside"
        ) from None
    if not isinstance(decoded, dict):
        raise ConfigError(f"{TRANSFER_CONFIG_FLAG} must be a JSON object, got {shown(decoded)}")
    return decoded


def _decoded_as(text: str, kind: Any) -> Any:
    """Decode a value for a setting of type `kind`.

    `engine_id 123` and `engine_id '"123"'` both give the text "123"; null stays None where the
    setting is optional.
    """
    decoded = _decoded_value(text)
    if not is_text(kind) or isinstance(decoded, str):
        return decoded
    return None if decoded is None and may_be_null(kind) else text


def _decoded_value(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError):
        return text


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    decoded = dict(pairs)
    if len(decoded) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(
            f"{TRANSFER_CONFIG_FLAG} has the key {shown(twice)} twice; keep one of them"
        )
    return decoded


def shown_flag(flag: str) -> str:
    return flag if flag.isprintable() and len(flag) <= 120 else shown(flag)


# -- values --
# How the text of a flag becomes a number, a path or a device.


@dataclass(frozen=True, slots=True)
class NumberOf:
    """For argparse: parses a number of one of the kinds in `config/fields.py`."""

    kind: Any

    def __call__(self, text: str) -> Any:
        try:
            return parsed("", text, self.kind)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error).strip()) from None


def whole(low: int, high: int) -> NumberOf:
    return NumberOf(Annotated[int, span("a whole number", low, high)])


def amount(low: int, high: int = LARGEST_INT) -> NumberOf:
    return NumberOf(Annotated[int, sized("a number like 4096, 8k or 1G", low, high)])


def parse_path(text: str) -> Path:
    """For argparse: parse a path and expand `~`: the shell does so only at the start of a word."""
    try:
        if text:
            return Path(text).expanduser()
        reason = "an empty path"
    except RuntimeError:
        reason = "the user has no home directory"
    raise argparse.ArgumentTypeError(f"{shown(text)} is not a path ({reason})")


def parse_model(text: str) -> str:
    """For argparse: parse a folder, with `~` expanded, or a name on the hub."""
    return str(parse_path(text)) if text.startswith("~") else text


def parse_device(text: str) -> str:
    """For argparse: check the name of a device on which an engine can compute."""
    try:
        first_gpu(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("--device ")) from None
    return text
