"""Tests log lines: formats that cannot be forged, settings, and repeats that are held back."""

import io
import json
import logging
import subprocess
import sys
from collections.abc import Callable

import pytest

from kvferry.errors import ConfigError
from kvferry.logs import (
    ForwardingHandler,
    JsonFormatter,
    LogSettings,
    RepeatFilter,
    TextFormatter,
    repeats_of,
)

FORGED = "x\n2026-01-01 00:00:00,000 INFO kvferry: all is well\r\x1b[2K\x85\u2028end"


class Log:
    """A logger with a handler of its own; the handler writes into memory."""

    def __init__(self, formatter: logging.Formatter, clock: Callable[[], float] = lambda: 0.0):
        self._out = io.StringIO()
        handler = logging.StreamHandler(self._out)
        handler.setFormatter(formatter)
        handler.addFilter(RepeatFilter(interval_s=10, clock=clock))
        self.logger = logging.Logger("kvferry.test", logging.DEBUG)
        self.logger.addHandler(handler)

    @property
    def lines(self) -> list[str]:
        return self._out.getvalue().split("\n")[:-1]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(clock: Clock) -> Log:
    return Log(logging.Formatter("%(message)s"), clock)


def test_a_text_record_is_one_line_whatever_it_contains() -> None:
    log = Log(TextFormatter("core"))
    log.logger.info("model=%s", FORGED, extra={"path": FORGED, "empty": "", "missing": None})
    (line,) = log.lines
    assert line.isprintable()
    assert " INFO core kvferry.test: model=x\\n2026" in line
    assert line.endswith('\\u2028end"')
    assert "empty" not in line
    assert "missing" not in line


def test_a_text_field_cannot_look_like_another_field() -> None:
    log = Log(TextFormatter())
    log.logger.info("request", extra={"model": "m status=200", "status": 500, "ids": ["a", "b"]})
    assert log.lines[0].endswith('request model="m status=200" status=500 ids=a,b')


def test_no_line_of_a_traceback_looks_like_a_line_of_the_log() -> None:
    log = Log(TextFormatter())
    try:
        raise ValueError(FORGED)
    except ValueError:
        log.logger.exception("failed")
    assert log.lines[0].endswith("ERROR kvferry.test: failed")
    assert len(log.lines) > 3
    assert all(line.startswith("    ") for line in log.lines[1:])


def test_a_json_record_is_one_object_in_one_line() -> None:
    log = Log(JsonFormatter("rank0"))
    log.logger.warning("model=%s", FORGED, extra={"seconds": 0.5, "ids": ["a"], "empty": ""})
    (line,) = log.lines
    shown = json.loads(line)
    assert line.isascii()
    assert shown.pop("time").endswith("+00:00")
    assert shown == {
        "level": "warning",
        "process": "rank0",
        "logger": "kvferry.test",
        "message": f"model={FORGED}",
        "seconds": 0.5,
        "ids": ["a"],
    }


def test_repeated_warnings_are_held_back_and_counted(log: Log, clock: Clock) -> None:
    for number in range(5):
        log.logger.warning("load failed request=%s block=%d: disk full", f"abc{number}", number)
    assert log.lines == ["load failed request=abc0 block=0: disk full"]
    clock.now = 9.9
    log.logger.warning("load failed request=%s block=%d: disk full", "z", 9)
    assert len(log.lines) == 1
    clock.now = 10.0
    log.logger.warning("load failed request=%s block=%d: disk full", "y", 8)
    assert log.lines[1:] == ["load failed request=y block=8: disk full (and 5 more)"]


def test_another_reason_another_level_or_another_error_is_no_repeat(log: Log) -> None:
    log.logger.warning("load failed: %s", "disk full")
    log.logger.warning("load failed: %s", "timeout")
    log.logger.error("load failed: %s", "timeout")
    log.logger.error("load failed: %s", "timeout", exc_info=(ValueError, ValueError(), None))
    assert sum(line.startswith("load failed") for line in log.lines) == 4


def test_a_subject_decides_what_repeats(log: Log) -> None:
    for peer in ("p", "q", "p"):
        for reason in ("gone", "late"):
            log.logger.info("lost peer=%s: %s", peer, reason, extra=repeats_of(peer))
    assert log.lines == ["lost peer=p: gone", "lost peer=q: gone"]


def test_information_without_a_subject_is_never_held_back(log: Log) -> None:
    for _ in range(3):
        log.logger.info("request")
    assert log.lines == ["request"] * 3


def test_the_filter_forgets_the_oldest_kinds(log: Log) -> None:
    for number in range(2000):
        log.logger.warning(f"lost {number}:x")
    log.logger.warning("lost 0:x")
    log.logger.warning("lost 1999:x")
    assert len(log.lines) == 2001


def test_warnings_about_two_addresses_are_no_repeats(log: Log) -> None:
    for port in (8000, 8001, 8000):
        log.logger.warning("no answer in %d s from http://10.0.0.1:%d, asked again", port, port)
    assert len(log.lines) == 2


def test_one_place_of_the_code_writes_at_most_20_warnings_in_an_interval(
    log: Log, clock: Clock
) -> None:
    for port in range(40000, 41000):
        log.logger.warning("malformed frame from 127.0.0.1:%d", port)
    assert len(log.lines) == 20
    log.logger.warning("another message")
    assert len(log.lines) == 21
    clock.now = 10.0
    log.logger.warning("malformed frame from 127.0.0.1:%d", 7)
    assert log.lines[-1].endswith("(and 980 more)")


def test_equal_messages_do_not_hide_another_message_from_the_same_place(
    log: Log, clock: Clock
) -> None:
    for number in range(1000):
        log.logger.warning("load failed request=%s: %s", number, "the client has left")
    log.logger.warning("load failed request=%s: %s", "x", "disk full")
    assert len(log.lines) == 2
    assert log.lines[1].endswith("disk full")
    clock.now = 10.0
    log.logger.warning("load failed request=%s: %s", "y", "disk full")
    log.logger.warning("load failed request=%s: %s", "y", "the client has left")
    assert log.lines[2:] == [
        "load failed request=y: disk full",
        "load failed request=y: the client has left (and 999 more)",
    ]


def test_a_finaliser_may_log_while_a_record_is_filtered(log: Log) -> None:
    class Subject:
        def __hash__(self) -> int:
            log.logger.error("from a finaliser")
            return 1

        def __eq__(self, other: object) -> bool:
            return self is other

    log.logger.warning("lost", extra=repeats_of(Subject()))
    assert sorted(log.lines) == ["from a finaliser", "lost"]


def test_a_wrong_call_raises_nothing_where_it_logs(
    log: Log, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # NIXL's package turns these reports off for the whole process.
    monkeypatch.setattr(logging, "raiseExceptions", True)
    log.logger.warning("bad %d", "x")
    forwarding = logging.Logger("ours")
    forwarding.addHandler(ForwardingHandler(log.logger))
    forwarding.warning("bad %d", "x")
    assert capsys.readouterr().err.count("--- Logging error ---") == 2


def test_a_process_that_logs_json_writes_its_address_as_json_whatever_the_level() -> None:
    code = "import kvferry.logs as l; l.configure_logs(l.LogSettings('error', 'json')); "
    code += "l.show('kvferry: serving on http://127.0.0.1:1')"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    written = json.loads(ran.stderr)
    assert (ran.stdout, written["message"]) == ("", "serving on http://127.0.0.1:1")


def test_a_message_may_be_any_object(log: Log) -> None:
    for _ in range(2):
        log.logger.warning({"tried": [1, 2]})
    assert log.lines == ["{'tried': [1, 2]}"]


def test_records_forwarded_to_another_logger_keep_its_format() -> None:
    target = Log(logging.Formatter("theirs: %(message)s"))
    ours = logging.Logger("kvferry", logging.DEBUG)
    ours.addHandler(ForwardingHandler(target.logger))
    target.logger.setLevel(logging.ERROR)
    ours.debug("model=%s", "a\nb")
    ours.warning("load failed: %d", 1)
    ours.warning("load failed: %d", 2)
    assert target.lines == ["theirs: model=a\\nb", "theirs: load failed: 1"]


def test_a_flag_overrides_the_environment() -> None:
    environ = {"KVFERRY_LOG_LEVEL": "DEBUG", "KVFERRY_LOG_FORMAT": "json"}
    assert LogSettings.of(None, None, {}) == LogSettings("info", "text")
    assert LogSettings.of(None, None, environ) == LogSettings("debug", "json")
    assert LogSettings.of("error", "text", environ) == LogSettings("error", "text")


@pytest.mark.parametrize("name", ["KVFERRY_LOG_LEVEL", "KVFERRY_LOG_FORMAT"])
def test_a_wrong_variable_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 'loud'; choose one of"):
        LogSettings.of(None, None, {name: "loud"})


def test_debug_lines_of_other_libraries_are_not_shown() -> None:
    """In a process of its own, because the settings are those of the whole process."""
    code = (
        "import logging\n"
        "from kvferry.logs import LogSettings, configure_logs, current_settings\n"
        "configure_logs(LogSettings('debug', 'json'), 'core')\n"
        "assert current_settings() == LogSettings('debug', 'json')\n"
        "logging.getLogger('botocore').debug('signed with canary')\n"
        "logging.getLogger('botocore').info('theirs')\n"
        "logging.getLogger('kvferry.tiers').debug('ours')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    shown = [json.loads(line) for line in done.stderr.splitlines()]
    assert [(line["process"], line["message"]) for line in shown] == [
        ("core", "theirs"),
        ("core", "ours"),
    ]
