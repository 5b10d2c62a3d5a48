"""An argument parser whose complaints are `ConfigError`s: one sentence, with the nearest flag there is. Pure."""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from kvferry.config.fields import nearest, shown
from kvferry.errors import ConfigError

__all__ = ["Parser"]


class Parser(argparse.ArgumentParser):
    """Like its base, but it raises instead of exiting, and a long flag is never abbreviated."""

    def __init__(self, prog: str, description: str, examples: str = "") -> None:
        self._flags: list[str] = []
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

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """ConfigError for a value that does not fit, a missing or an unknown argument."""
        found, unknown = self.parse_known_args(arguments)
        if unknown:
            word = unknown[0].partition("=")[0]
            if word.startswith("-"):
                raise ConfigError(f"{shown_word(word)} is not an argument of `{self.prog}`; {nearest(word, self._flags)}")
            raise ConfigError(f"{shown_word(word)} is one argument too many for `{self.prog}`; remove it")
        return found

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.removeprefix('argument ')}; see `{self.prog} --help`")


def shown_word(word: str) -> str:
    return word if word.isprintable() and len(word) <= 80 else shown(word)
