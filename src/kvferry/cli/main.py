"""`kvferry` finds a command, runs the command, and turns errors into one sentence and an exit code.

A command is a module with `DESCRIPTION`, `EXAMPLES`, `add_arguments(parser)` and `run(arguments) ->
int`. A command module is imported only when the user asks for the command, so that `kvferry --help`
is fast. Importing the module and reading the arguments needs no extra, so that `--help` of every
command works; packages of an extra are imported by `run`, after the check that they are installed.
"""

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from kvferry import __version__
from kvferry.cli.arguments import (
    TRANSFER_CONFIG_FLAG,
    Parser,
    dashed,
    show_argument,
    split_transfer_arguments,
)
from kvferry.cli.extras import check_extra
from kvferry.cli.runtime import raise_file_limit
from kvferry.config.fields import nearest
from kvferry.errors import ConfigError, KVFerryError
from kvferry.logs import show

EXIT_FAILED, EXIT_CONFIG, EXIT_INTERRUPTED = 1, 2, 130


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """A row of the command table."""

    module: str
    summary: str
    takes_transfer_config: bool = False
    """Whether the command takes `--kv-transfer-config` in both spellings."""
    extra: str | None = None
    """The extra whose packages the command needs; None: the base install is enough."""


COMMANDS = {
    "up": CommandEntry(
        "kvferry.cli.up",
        "runs prefill, decode and router on this machine; shows one request, serves until Ctrl-C",
        extra="all",
    ),
    "serve": CommandEntry(
        "kvferry.cli.serve",
        "runs one engine, with the flags of `vllm serve`",
        takes_transfer_config=True,
        extra="engine",
    ),
    "proxy": CommandEntry(
        "kvferry.cli.proxy",
        "runs the router in front of prefill and decode instances",
        extra="router",
    ),
    "register": CommandEntry(
        "kvferry.cli.register", "keeps an engine registered with routers while it is healthy"
    ),
    "drain": CommandEntry(
        "kvferry.cli.drain", "waits until an engine has no work left and can be stopped"
    ),
    "make-model": CommandEntry(
        "kvferry.cli.make_model", "writes a tiny checkpoint", extra="engine"
    ),
    "doctor": CommandEntry(
        "kvferry.cli.doctor", "reports what this machine supports, and what to set"
    ),
    "plan": CommandEntry(
        "kvferry.cli.plan",
        "computes the size of a model's KV cache, its transfer time, and what to set",
    ),
    "store": CommandEntry(
        "kvferry.cli.store", "lists, checks and clears the KV that storage tiers hold"
    ),
    "bench": CommandEntry("kvferry.cli.bench", "runs a benchmark, beside other software"),
}


class Command(Protocol):
    """The contract of a command module."""

    DESCRIPTION: str
    EXAMPLES: str

    def add_arguments(self, parser: Parser) -> None: ...

    def run(self, arguments: argparse.Namespace) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    return exit_code(lambda: _dispatch(list(sys.argv[1:] if argv is None else argv)))


def exit_code(run: Callable[[], int]) -> int:
    """Return the exit code of a command, and report its error in one sentence.

    The code is 0; 1 if something failed; 2 if a setting is wrong; 130 after Ctrl-C.
    """
    try:
        return run()
    except ConfigError as error:
        return _report_error(error, EXIT_CONFIG)
    except KVFerryError as error:
        return _report_error(error, EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has exited. Pointing stdout at /dev/null keeps the interpreter
        # from reporting the error again when the interpreter flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0 if argv else EXIT_CONFIG
    if argv[0] in ("-V", "--version"):
        print(f"kvferry {__version__}")
        return 0
    if argv[0] not in COMMANDS:
        raise ConfigError(
            f"{show_argument(argv[0])} is not a command of kvferry; {nearest(argv[0], COMMANDS)}"
        )
    return _run(argv[0], argv[1:])


def _run(name: str, rest: list[str]) -> int:
    raise_file_limit()
    command, parser, entry = _command(name), make_parser(name), COMMANDS[name]
    if entry.takes_transfer_config:
        split = split_transfer_arguments(rest)
        arguments = parser.parse(split.rest)
        arguments.kv_transfer_config = split.mapping
    else:
        arguments = parser.parse([dashed(argument) for argument in rest])
    if entry.extra is not None:
        check_extra(f"kvferry {name}", entry.extra)
    return command.run(arguments)


def make_parser(name: str) -> Parser:
    """Return the parser of one command."""
    command = _command(name)
    parser = Parser(f"kvferry {name}", command.DESCRIPTION, command.EXAMPLES)
    command.add_arguments(parser)
    if COMMANDS[name].takes_transfer_config:
        parser.add_argument(
            TRANSFER_CONFIG_FLAG,
            metavar="JSON",
            help=f"KV transfer settings as JSON; single keys as {TRANSFER_CONFIG_FLAG}.KEY VALUE, "
            "lists with KEY+",
        )
    return parser


def _command(name: str) -> Command:
    return cast(Command, importlib.import_module(COMMANDS[name].module))


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {entry.summary}" for name, entry in COMMANDS.items()]
    return "\n".join(
        [
            "usage: kvferry COMMAND [ARGUMENTS]",
            "",
            "Moves the KV cache of a language model from the engine that computed it to the "
            "engine that needs it.",
            "",
            "commands:",
            *lines,
            "",
            "`kvferry COMMAND --help` lists the flags. Start with `kvferry up`.",
        ]
    )


def _report_error(error: KVFerryError, code: int) -> int:
    show(f"kvferry: {error}", logging.ERROR)
    return code


if __name__ == "__main__":
    sys.exit(main())
