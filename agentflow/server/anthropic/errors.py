"""How Anthropic's API writes errors: ``{"type": "error", "error": {"type", "message", …}, "request_id"}``."""

from __future__ import annotations

from typing import Literal

import msgspec

from agentflow.server.http.errors import ApiError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# Where others say that a service is unavailable, this API says that it is overloaded.
_OVERLOADED_STATUS = 529


class AnthropicErrorDetails(msgspec.Struct, kw_only=True):
    """``error_code``: our name for the cause; ``param``: the field of the request that is wrong, where it is
    one."""

    error_code: str
    param: str | None


class AnthropicError(msgspec.Struct, kw_only=True):
    """``type``: what kind of error it is; the client chooses its exception by the status."""

    type: str
    message: str
    details: AnthropicErrorDetails


class AnthropicErrorBody(msgspec.Struct, kw_only=True):
    """The body of an answer that is an error."""

    type: Literal["error"]
    error: AnthropicError
    request_id: str


class AnthropicErrorFormat:
    """An ``ErrorFormat``."""

    request_id_header = b"request-id"
    keepalive = b'event: ping\ndata: {"type":"ping"}\n\n'
    body_type: type[msgspec.Struct] = AnthropicErrorBody

    def status(self, refusal: ApiError) -> int:
        return _OVERLOADED_STATUS if refusal.status == 503 else refusal.status

    def body(self, refusal: ApiError, request_id: str) -> bytes:
        kind = _TYPES.get(refusal.status, "api_error" if refusal.status >= 500 else "invalid_request_error")
        details = AnthropicErrorDetails(error_code=refusal.code, param=refusal.param)
        error = AnthropicError(type=kind, message=refusal.message, details=details)
        return msgspec.json.encode(AnthropicErrorBody(type="error", error=error, request_id=request_id))

    def event(self, refusal: ApiError, request_id: str) -> bytes:
        return b"event: error\ndata: " + self.body(refusal, request_id) + b"\n\n"
