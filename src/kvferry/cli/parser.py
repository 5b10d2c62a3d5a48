"""An argument parser whose complaints are `ConfigError`s: one sentence, with the nearest flag there is. Pure."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from kvferry.config.fields import RENAMED_FLAGS, nearest, shown
from kvferry.errors import ConfigError

__all__ = ["FlagRow", "Parser"]

DEFAULT = re.compile(r"\s*\(default: (.*?)\)")


@dataclass(frozen=True, slots=True)
class FlagRow:
    """One argument, for a table in the documentation."""

    names: tuple[str, ...]
    values: str
    default: str
    meaning: str


class Parser(argparse.ArgumentParser):
    """Like its base, but it raises instead of exiting, and a long flag is never abbreviated."""

    def __init__(self, prog: str, description: str, examples: str = "") -> None:
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
        """A flag with a `--no-` twin. Python's own action writes its default into the help in some versions only."""
        action = self.add_argument(name, action=argparse.BooleanOptionalAction, default=default)
        action.help = f"{meaning} (default: {'on' if default else 'off'})"

    def add_unsupported(self, name: str, value: str = "", *, advice: str) -> None:
        """A flag, or one value of a flag, that people know from elsewhere and that is not built yet: a guess would lead them astray."""
        self._unsupported[name, value] = advice

    def flag_rows(self) -> list[FlagRow]:
        return [_row(action) for action in self._actions if action.dest != "help"]

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """ConfigError for a value that does not fit, a missing or an unknown argument."""
        self._refuse_unsupported(arguments)
        found, unknown = self.parse_known_args(arguments)
        if unknown:
            word = unknown[0].partition("=")[0]
            if RENAMED_FLAGS.get(word) in self._flags:
                raise ConfigError(f"{word} of `{self.prog}` is now called {RENAMED_FLAGS[word]}")
            if word.startswith("-"):
                guess = nearest(word, self._flags, f"`{self.prog} --help`")
                raise ConfigError(f"{show_argument(word)} is not an argument of `{self.prog}`; {guess}")
            raise ConfigError(f"{show_argument(word)} is one argument too many for `{self.prog}`; remove it")
        return found

    def _refuse_unsupported(self, arguments: Sequence[str]) -> None:
        for word, following in zip(arguments, [*arguments[1:], ""], strict=False):
            if word == "--":
                return
            flag, equals, inline = word.partition("=")
            for value in ("", inline if equals else following):
                if (flag, value) in self._unsupported:
                    raise ConfigError(f"{f'{flag} {value}'.strip()} is not supported yet; {self._unsupported[flag, value]}")

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.removeprefix('argument ')}; see `{self.prog} --help`")


def show_argument(word: str) -> str:
    return word if word.isprintable() and len(word) <= 80 else shown(word)


def _row(action: argparse.Action) -> FlagRow:
    text = (action.help or "").replace("%(default)s", str(action.default))
    default = DEFAULT.search(text)
    names = tuple(action.option_strings) or (str(action.metavar or action.dest),)
    return FlagRow(names, _values(action), default[1] if default else "", DEFAULT.sub("", text).strip())


def _values(action: argparse.Action) -> str:
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        return ""
    if action.choices is not None:
        return ", ".join(map(str, action.choices))
    name = "number" if action.type in (int, float) else KINDS.get(getattr(action.type, "__name__", ""), "text")
    return f"{name} …" if action.nargs == "+" else name


KINDS = {"parse_size": "size", "parse_device": "device", "parse_port": "port", "Path": "folder", "parse_backend": "name"}
