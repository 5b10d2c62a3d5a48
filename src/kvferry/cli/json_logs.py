"""Log lines as JSON objects, one per line, for machines to read."""

import json
import logging
from datetime import UTC, datetime

__all__ = ["JsonFormatter", "configure_logs"]

_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class JsonFormatter(logging.Formatter):
    """Time, level, logger and message, and whatever else the line was given as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        shown: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        shown |= {name: value for name, value in vars(record).items() if name not in _PLAIN}
        if record.exc_info:
            shown["exception"] = self.formatException(record.exc_info)
        return json.dumps(shown, default=str)


class _TextFormatter(logging.Formatter):
    """The same for people: what was given as `extra` follows the message."""

    def format(self, record: logging.LogRecord) -> str:
        extra = " ".join(f"{name}={value}" for name, value in vars(record).items() if name not in _PLAIN and value != "")
        return f"{super().format(record)} {extra}".rstrip()


def configure_logs(is_json: bool) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if is_json else _TextFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
