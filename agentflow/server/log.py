"""The server's log: plain lines, or one JSON object per line, with a record of each HTTP request.

Prompts and answers are logged only if the operator enables that.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any, TextIO
from urllib.parse import quote

from agentflow.protocol.events import Usage

logger = logging.getLogger("agentflow.requests")

# The limit of a logged body: long lines are unreadable, and delay the event loop.
MAX_LOGGED_BYTES = 20_000
MAX_PATH_CHARS = 200


def logged_path(path: str) -> str:
    """The beginning of a decoded path, quoted as in a URL so that it has no whitespace.

    >>> logged_path("/v1/models/a b")
    '/v1/models/a%20b'
    """
    shown = quote(path[:MAX_PATH_CHARS], safe="/:@!$&'()*+,;=~", errors="replace")
    return shown if len(path) <= MAX_PATH_CHARS else f"{shown}… ({len(path):,} characters in all)"


class LoggedBody:
    """The beginning of a body and its size.

    >>> body = LoggedBody()
    >>> body.add(b"abc")
    >>> str(body)
    'abc'
    """

    def __init__(self, data: bytes | bytearray = b"") -> None:
        self._kept: list[bytes | bytearray] = []
        self._num_bytes = 0
        self.add(data)

    def add(self, data: bytes | bytearray) -> None:
        """Appends data."""
        if data and self._num_bytes < MAX_LOGGED_BYTES:
            self._kept.append(data[: MAX_LOGGED_BYTES - self._num_bytes])
        self._num_bytes += len(data)

    def __str__(self) -> str:
        text = b"".join(self._kept).decode(errors="replace")
        return text if self._num_bytes <= MAX_LOGGED_BYTES else f"{text}… ({self._num_bytes:,} bytes in all)"


@dataclass(slots=True)
class RequestRecord:
    """One request."""

    id: str
    method: str
    path: str  # from ``logged_path``
    status: int = 0
    took_s: float = 0.0
    tenant: str = ""
    model: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    is_streamed: bool = False
    cost: float | None = None  # in US dollars, of a call to an API whose price is known
    error: str | None = None  # the code of the error, or ``client_gone``
    param: str | None = None  # the field that the error is about
    message: str | None = None  # the error's message
    relaxed: str | None = None  # paths in the request's schemas that the grammar does not enforce
    violated: str | None = None  # the paths among them that the answer violates
    asked: LoggedBody | None = None  # the request's body, if bodies are logged
    answered: LoggedBody | None = None  # the answer's body, if bodies are logged

    def count(self, usage: Usage) -> None:
        """Records the tokens of the request."""
        self.prompt_tokens, self.cached_tokens = usage.prompt_tokens, usage.cached_tokens
        self.output_tokens, self.cost = usage.output_tokens, usage.cost or None


_QUOTED = ("param", "message")
_OPTIONAL = ("cost", "error", "param", "relaxed", "violated", "message", "asked", "answered")


def log_request(record: RequestRecord) -> None:
    """Logs a request as one line, with all fields as ``extra`` for structured formats."""
    if logger.isEnabledFor(logging.INFO):
        values = {field.name: getattr(record, field.name) for field in fields(record)}
        shown = {name: _text(value) for name, value in values.items() if value is not None}
        # These contain text of the client.
        quoted = {name: json.dumps(shown[name], ensure_ascii=False) for name in _QUOTED if name in shown}
        optional = [f" {name}={value}" for name in _OPTIONAL if (value := quoted.get(name, shown.get(name)))]
        logger.info(
            "%s %s %d %.3fs tenant=%s model=%s in=%d cached=%d out=%d id=%s%s",
            record.method,
            record.path,
            record.status,
            record.took_s,
            record.tenant or "-",
            record.model or "-",
            record.prompt_tokens,
            record.cached_tokens,
            record.output_tokens,
            record.id,
            "".join(optional),
            extra={"request": shown},
        )


def _text(value: object) -> object:
    return str(value) if isinstance(value, LoggedBody) else value


LOGGER = "agentflow"
TEXT_FORMAT = "%(asctime)s %(levelname)s %(message)s"

_KNOWN = {*vars(logging.makeLogRecord({})), "message", "asctime"}


class JsonFormatter(logging.Formatter):
    """A JSON object on one line, with ``time`` (UTC), ``level``, ``logger``, ``message``, ``exception`` if
    there is one, and the fields of ``extra``. Attributes that begin with an underscore are left out: they
    come from other packages, such as Ray."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {
            name: value
            for name, value in vars(record).items()
            if name not in _KNOWN and not name.startswith("_")
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class TextFormatter(logging.Formatter):
    """Time, level and message. Control characters are escaped, so that clients cannot forge lines."""

    def __init__(self) -> None:
        super().__init__(TEXT_FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        if line.isprintable():
            return line
        return "".join(char if char.isprintable() else repr(char)[1:-1] for char in line)


def set_up_logs(level: str, shape: str, stream: TextIO | None = None) -> None:
    """Configures agentflow's loggers. Can be called again.

    Args:
        level: ``debug`` to ``error``.
        shape: ``text`` or ``json``.
        stream: standard error by default.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if shape == "json" else TextFormatter())
    logger = logging.getLogger(LOGGER)
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(level.upper())
