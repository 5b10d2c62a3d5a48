"""Log lines of kvferry's processes: level and format, one line per record, repeats held back.

Every process that kvferry starts calls `configure_logs` once. Inside vLLM, vLLM's handlers write
kvferry's lines, through a `ForwardingHandler`. Text that clients, peers and engines wrote appears
in log lines, so a formatter writes control characters as escapes: such a text cannot begin a line
of its own.
"""

import json
import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from kvferry.errors import ConfigError

__all__ = [
    "FORMATS",
    "FORMAT_VARIABLE",
    "LEVELS",
    "LEVEL_VARIABLE",
    "ForwardingHandler",
    "JsonFormatter",
    "LogSettings",
    "RepeatFilter",
    "TextFormatter",
    "configure_logs",
    "current_settings",
    "repeats_of",
]

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
LEVEL_VARIABLE, FORMAT_VARIABLE = "KVFERRY_LOG_LEVEL", "KVFERRY_LOG_FORMAT"
REPEAT_INTERVAL_S = 60.0
MAX_VARIANTS = 20
MAX_KEY_CHARS = 500
MAX_KEYS = 1024
"""Kinds of messages that a filter remembers. Subjects may come from peers, so it is bounded."""
_KEY = "repeat_key"
_WORD = re.compile(r"\S+")
# The attributes of every log record; all other attributes came from `extra`.
_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", _KEY}


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Level and format of a process' log."""

    level: str = "info"
    format: str = "text"

    @classmethod
    def of(cls, level: str | None, format: str | None, environ: Mapping[str, str]) -> "LogSettings":
        """The settings of the flags; a flag that is None gives way to the environment."""
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

    Other libraries are shown from INFO on, whatever the level: kvferry does not know what they
    write into debug lines, and credentials must not get into a log.
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
        words += [f"{name}={_word(value)}" for name, value in _extra_fields(record).items()]
        return " ".join(words)

    def formatException(self, ei: Any) -> str:
        lines = super().formatException(ei).split("\n")
        return "\n".join(f"    {one_line(line)}" for line in lines)


def one_line(text: str) -> str:
    """The text with escapes instead of the characters that no line of a log may contain."""
    if text.isprintable():
        return text
    return "".join(
        sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text
    )


def _extra_fields(record: logging.LogRecord) -> dict[str, object]:
    return {
        name: value
        for name, value in vars(record).items()
        if name not in _PLAIN and value is not None and value != ""
    }


def _word(value: object) -> str:
    """A value without spaces, or quoted: it cannot look like further fields."""
    text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    is_plain = text.isprintable() and not any(sign in text for sign in ' "=')
    return text if is_plain else json.dumps(text)


# -- repeats --


def repeats_of(*subject: object) -> dict[str, object]:
    """`extra` of a message that is held back while it repeats for the same subject (a peer, a
    tier), whatever the rest of it says, at any level. Warnings and errors without a subject are
    repeats if they differ only in request ids and in numbers; addresses are no numbers.
    """
    return {_KEY: subject}


@dataclass(slots=True)
class _Kind:
    """Messages that count as one kind in an interval."""

    since: float
    num_passed: int = 1
    num_held: int = 0


class RepeatFilter(logging.Filter):
    """Passes the first of equal messages, then one every `interval_s` with the number of those
    that were held back. Of messages that differ, `MAX_VARIANTS` from one place of the code pass in
    an interval: a port scan must not fill the log. Used by any thread.
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
        subject = getattr(record, _KEY, None)
        if subject is None and record.levelno < logging.WARNING:
            return True
        try:
            text = record.getMessage()
        except Exception:  # a wrong call of any library: `logging` reports it when it formats
            return True
        place = (record.name, record.levelno, record.msg, record.exc_info and record.exc_info[0])
        varying = _without_numbers(text[:MAX_KEY_CHARS]) if subject is None else subject
        equal, from_this_place = ("equal", place, varying), ("place", place)
        now = self._clock()
        with self._lock:
            # In this order: equal messages must not use up what the place may say besides.
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
        if len(self._kinds) > MAX_KEYS:
            self._kinds.popitem(last=False)
        return 0 if kind is None else kind.num_held


def _without_numbers(text: str) -> str:
    """The text without request ids and words with a digit; addresses have a colon inside."""
    return _WORD.sub(lambda word: "#" if _is_varying(word[0].rstrip(",:;).")) else word[0], text)


def _is_varying(word: str) -> bool:
    return word.startswith("request=") or (
        ":" not in word and any(character.isdigit() for character in word)
    )


class ForwardingHandler(logging.Handler):
    """Passes kvferry's records to the handlers of another logger, which have their own format."""

    def __init__(self, target: logging.Logger) -> None:
        super().__init__()
        self._target = target
        self.addFilter(RepeatFilter())

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._pass_on(record)
        except Exception:  # the thread that logs may be the engine's
            self.handleError(record)

    def _pass_on(self, record: logging.LogRecord) -> None:
        # Not `target.handle`: the level of the target must not hide what KVFERRY_LOG_LEVEL shows.
        shown = copy(record)
        shown.msg, shown.args = one_line(record.getMessage()), ()
        for handler in self._target.handlers:
            handler.handle(shown)
