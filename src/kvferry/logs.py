"""Log lines of kvferry's processes: level and format, one line per record, repeats held back.

Every process that kvferry starts calls `configure_logs` once. Inside vLLM, a `ForwardingHandler`
passes kvferry's records to vLLM's handlers. Log lines contain text that clients, peers and engines
wrote. Such a text must never look like a line of its own, so formatters write control characters as
escapes. Handlers, formatters and filters are used by all threads.
"""

import json
import logging
import re
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TextIO

from kvferry.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
LEVEL_VARIABLE, FORMAT_VARIABLE = "KVFERRY_LOG_LEVEL", "KVFERRY_LOG_FORMAT"
REPEAT_INTERVAL_S = 60.0
MAX_VARIANTS = 20
"""Different messages that one place of the code may write in an interval."""
MAX_COMPARED_CHARS = 500
MAX_KINDS = 1024
"""Kinds of messages that a filter remembers. Peers can cause new kinds, so this is bounded."""
_SUBJECT = "repeat_subject"
"""The attribute of a record that holds the subject of `repeats_of`."""
_WORD = re.compile(r"\S+")
# The attributes of every log record; all other attributes came from `extra`.
_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName", _SUBJECT}


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Level and format of a process' log."""

    level: str = "info"
    format: str = "text"

    @classmethod
    def of(cls, level: str | None, format: str | None, environ: Mapping[str, str]) -> "LogSettings":
        """The settings of the flags; where a flag is None, the variable or the default applies."""
        return cls(
            level or _from_environment(environ, LEVEL_VARIABLE, LEVELS) or cls().level,
            format or _from_environment(environ, FORMAT_VARIABLE, FORMATS) or cls().format,
        )

    @property
    def environment(self) -> dict[str, str]:
        """The variables that give these settings to a child process."""
        return {LEVEL_VARIABLE: self.level, FORMAT_VARIABLE: self.format}

    @property
    def level_number(self) -> int:
        return logging.getLevelNamesMapping()[self.level.upper()]


def _from_environment(environ: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str:
    value = environ.get(name, "").lower()
    if value and value not in choices:
        raise ConfigError(f"{name} is {value!r:.100}; choose one of {', '.join(choices)}")
    return value


def configure_logs(settings: LogSettings, process: str = "") -> None:
    """Write the log of this process to stderr. `process`: shown in each line, for child processes.

    Debug lines of other libraries are never written: they may contain credentials.
    """
    handler = logging.StreamHandler()
    make = JsonFormatter if settings.format == "json" else TextFormatter
    handler.setFormatter(make(process))
    handler.addFilter(RepeatFilter())
    level = settings.level_number
    logging.basicConfig(level=max(level, logging.INFO), handlers=[handler])
    logging.getLogger("kvferry").setLevel(level)


def current_settings() -> LogSettings:
    """The settings of this process, for its child processes."""
    level = logging.getLogger("kvferry").getEffectiveLevel()
    names = [name for name in LEVELS if LogSettings(name).level_number <= level]
    is_json = any(
        isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers
    )
    return LogSettings(names[-1] if names else LEVELS[0], "json" if is_json else "text")


def show(text: str, level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Print lines for the operator: on `stream`, or on stderr if they are errors, else on stdout. A
    process that logs JSON writes them to its log, whatever its level, so that all lines are JSON.
    """
    if current_settings().format == "json":
        root, message = logging.getLogger(), text.removeprefix("kvferry: ")
        root.handle(root.makeRecord("kvferry", level, "", 0, message, (), None))
    else:
        print(
            text, file=stream or (sys.stderr if level >= logging.ERROR else sys.stdout), flush=True
        )


# -- formats --


class JsonFormatter(logging.Formatter):
    """Formats a record as JSON: time, level, logger, message and the fields of `extra`."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = {"process": process} if process else {}

    def format(self, record: logging.LogRecord) -> str:
        shown: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            **self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **_extra_fields(record),
        }
        if record.exc_info:
            shown["exception"] = self.formatException(record.exc_info)
        return json.dumps(shown, default=str)


class TextFormatter(logging.Formatter):
    """Formats a record as one line; the fields of `extra` follow the message. The lines of a
    traceback are indented, so that none looks like a line of the log.
    """

    def __init__(self, process: str = "") -> None:
        name = f"{process} %(name)s" if process else "%(name)s"
        super().__init__(f"%(asctime)s %(levelname)s {name}: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = one_line(record.message)
        words = [super().formatMessage(record)]
        words += [f"{name}={_quoted(value)}" for name, value in _extra_fields(record).items()]
        return " ".join(words)

    def formatException(self, ei: Any) -> str:
        lines = super().formatException(ei).split("\n")
        return "\n".join(f"    {one_line(line)}" for line in lines)


def one_line(text: str) -> str:
    """The text, with escapes instead of line ends and other control characters."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


def _extra_fields(record: logging.LogRecord) -> dict[str, object]:
    return {
        name: value
        for name, value in vars(record).items()
        if name not in _STANDARD and value is not None and value != ""
    }


def _quoted(value: object) -> str:
    """The text of a value, in quotes if it could look like further fields."""
    text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    is_one_word = text.isprintable() and not any(character in text for character in ' "=')
    return text if is_one_word else json.dumps(text)


# -- repeats --


def repeats_of(*subject: object) -> dict[str, object]:
    """`extra` for a message about a subject (a peer, a tier). At any level, and whatever its text
    says, the message is a repeat if the same place of the code wrote one about the same subject.

    Without a subject, only warnings and errors are held back; they are repeats if they differ only
    in request ids and in numbers. Addresses do not count as numbers.
    """
    return {_SUBJECT: subject}


@dataclass(slots=True)
class _Kind:
    """How many messages of one kind were passed and held back in an interval."""

    since: float
    num_passed: int = 1
    num_held: int = 0


class RepeatFilter(logging.Filter):
    """Passes the first of equal messages, then one every `interval_s` with the number of those that
    were held back. Of different messages from one place of the code, `MAX_VARIANTS` pass in an
    interval: a port scan must not fill the log.
    """

    def __init__(
        self,
        interval_s: float = REPEAT_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._interval_s = interval_s
        self._clock = clock
        self._kinds: OrderedDict[object, _Kind] = OrderedDict()
        # Reentrant: the garbage collector may run a finaliser that logs, at any place.
        self._lock = threading.RLock()

    def filter(self, record: logging.LogRecord) -> bool:
        subject = getattr(record, _SUBJECT, None)
        if subject is None and record.levelno < logging.WARNING:
            return True
        try:
            text = record.getMessage()
        except Exception:  # a wrong call of any library: `logging` reports it when it formats
            return True
        # Libraries may log any object as a message, also one that is not hashable.
        message = str(record.msg)[:MAX_COMPARED_CHARS]
        place = (record.name, record.levelno, message, record.exc_info and record.exc_info[0])
        if subject is None:
            subject = _without_numbers(text[:MAX_COMPARED_CHARS])
        equal, from_this_place = ("equal", place, subject), ("place", place)
        now = self._clock()
        with self._lock:
            # In this order, so that equal messages do not count as different messages of the place.
            if self._holds(equal, 1, now) or self._holds(from_this_place, MAX_VARIANTS, now):
                return False
            num_held = self._pass(equal, now) + self._pass(from_this_place, now)
        if num_held:
            record.msg = f"{text} (and {num_held} more)"
            record.args = ()
        return True

    def _holds(self, key: object, max_passed: int, now: float) -> bool:
        """Whether messages of this kind are held back now; if so, this one is counted."""
        kind = self._kinds.get(key)
        if kind is None or now - kind.since >= self._interval_s or kind.num_passed < max_passed:
            return False
        kind.num_held += 1
        return True

    def _pass(self, key: object, now: float) -> int:
        """Note that a message of this kind passes. Return how many were held back before it."""
        kind = self._kinds.get(key)
        if kind is not None and now - kind.since < self._interval_s:
            kind.num_passed += 1
            return 0
        self._kinds[key] = _Kind(now)
        self._kinds.move_to_end(key)
        if len(self._kinds) > MAX_KINDS:
            self._kinds.popitem(last=False)
        return 0 if kind is None else kind.num_held


def _without_numbers(text: str) -> str:
    """The text with `#` in place of each request id and each word that contains a digit."""
    return _WORD.sub(lambda word: "#" if _is_id_or_number(word[0]) else word[0], text)


def _is_id_or_number(word: str) -> bool:
    is_address = ":" in word.rstrip(",:;).")
    has_digit = any(character.isdigit() for character in word)
    return word.startswith("request=") or (has_digit and not is_address)


# -- inside vLLM --


class ForwardingHandler(logging.Handler):
    """Passes kvferry's records to the handlers of another logger, which write their own format."""

    def __init__(self, target: logging.Logger) -> None:
        super().__init__()
        self._target = target
        self.addFilter(RepeatFilter())

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._pass_on(record)
        except Exception:  # logging must not stop the thread, which may be the engine's
            self.handleError(record)

    def _pass_on(self, record: logging.LogRecord) -> None:
        # Not `target.handle`: the level of the target must not hide what KVFERRY_LOG_LEVEL shows.
        shown = copy(record)
        shown.msg, shown.args = one_line(record.getMessage()), ()
        for handler in self._target.handlers:
            handler.handle(shown)
