"""Where the server's log goes, and in which shape: lines to read, or one JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

LOGGER = "agentflow"
TEXT_FORMAT = "%(asctime)s %(levelname)s %(message)s"

_KNOWN = {*vars(logging.makeLogRecord({})), "message", "asctime"}


class JsonFormatter(logging.Formatter):
    """An object with ``time`` (UTC), ``level``, ``logger`` and ``message``, with ``exception`` where there is
    one, and with all that was given as ``extra``. A line each, whatever the message holds."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {name: value for name, value in vars(record).items() if name not in _KNOWN}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class TextFormatter(logging.Formatter):
    """Time, level and message. Control characters are escaped: what a client sent can make no line of its
    own."""

    def __init__(self) -> None:
        super().__init__(TEXT_FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        if line.isprintable():
            return line
        return "".join(char if char.isprintable() else repr(char)[1:-1] for char in line)


def set_up_logs(level: str, shape: str, stream: TextIO | None = None) -> None:
    """The log of agentflow alone, on ``stream`` (standard error). ``level``: ``debug`` to ``error``;
    ``shape``: ``text`` or ``json``. May be called again."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if shape == "json" else TextFormatter())
    logger = logging.getLogger(LOGGER)
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(level.upper())
