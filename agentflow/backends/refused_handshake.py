"""What it means when a server answers a websocket's handshake with another HTTP status than 101."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from websockets.http11 import Response

from agentflow.errors import NotAuthorized, Overloaded, RateLimited, ServerError, ServerUnreachable

MAX_REASON_CHARS = 500
# What servers and proxies call it, in a body of JSON.
REASON_FIELDS = ("reason", "error", "message", "detail")


def refusal_of(url: str, response: Response) -> ServerError:
    """The error for it, with the reason that the server gives: ``NotAuthorized`` for 401 and 403,
    ``RateLimited`` for 429 and ``Overloaded`` for 503 (both with the seconds of ``Retry-After``), and
    ``ServerUnreachable`` for any other. So too for a 403 without a reason: that is what servers say of
    websockets at a path that they don't have."""
    status, reason = response.status_code, _reason(response)
    why = reason or "it gives no reason"
    if status == 401:
        return NotAuthorized(f"{url} wants an API key that it knows (HTTP 401): {why}")
    if status == 403 and reason:
        return NotAuthorized(f"{url} does not allow this (HTTP 403): {why}")
    if status not in (429, 503):
        return no_server(url, f"HTTP {status}")
    kind = RateLimited if status == 429 else Overloaded
    error = kind(f"{url} takes nobody in now (HTTP {status}): {why}")
    error.retry_after_s = _retry_after_s(response)
    return error


def no_server(url: str, answer: str) -> ServerUnreachable:
    """Somebody is there, but no server of ours."""
    return ServerUnreachable(f"{url} answers, but not as an agentflow server ({answer}): check the address")


def _retry_after_s(response: Response) -> float | None:
    """Not of a date, which would need clocks that agree."""
    values = response.headers.get_all("Retry-After")
    if len(values) == 1 and re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", values[0].strip()):
        return float(values[0])
    return None


def _reason(response: Response) -> str:
    """What a body of JSON or of plain text says, in one line of printable characters."""
    content_type = ",".join(response.headers.get_all("Content-Type")).lower()
    said = ""
    if "json" in content_type:
        said = _said_in_json(response.body)
    elif content_type.startswith("text/plain"):
        said = bytes(response.body).decode(errors="replace")
    printable = "".join(char if char.isprintable() else " " for char in said[: 2 * MAX_REASON_CHARS])
    return " ".join(printable.split())[:MAX_REASON_CHARS]


def _said_in_json(body: bytes | bytearray) -> str:
    try:
        said: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return ""
    for _ in range(2):  # an error may be an object with a message
        if isinstance(said, dict):
            said = next((said[field] for field in REASON_FIELDS if field in said), "")
    return said if isinstance(said, str) else ""
