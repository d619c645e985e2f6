"""What the log says of HTTP requests: who asked for what and how it went, and what was said only where the
operator wants that."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass

logger = logging.getLogger("agentflow.requests")


@dataclass(slots=True)
class RequestRecord:
    """One request. ``error``: the code of its refusal, or ``client_gone``. ``asked`` and ``answered``: the
    bodies, where they are to be logged."""

    id: str
    method: str
    path: str
    status: int = 0
    took_s: float = 0.0
    tenant: str = ""
    model: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    is_streamed: bool = False
    error: str | None = None
    asked: bytes | None = None
    answered: bytes | None = None


def log_request(record: RequestRecord) -> None:
    """One line, with all fields as ``extra`` for a structured format."""
    if logger.isEnabledFor(logging.INFO):
        fields = {name: _text(value) for name, value in asdict(record).items() if value is not None}
        said = [f" {name}={fields[name]}" for name in ("error", "asked", "answered") if name in fields]
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
            "".join(said),
            extra={"request": fields},
        )


def _text(value: object) -> object:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
