"""How OpenAI's API writes errors: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import msgspec

from agentflow.server.http.errors import ApiError

# An unknown key or model is an invalid request there; the code tells which.
_TYPES = {403: "permission_error", 429: "rate_limit_error"}


class OpenAIError(msgspec.Struct, kw_only=True):
    """``param``: the field of the request that is wrong, where it is one; ``code``: the cause."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIErrorBody(msgspec.Struct):
    """The body of an answer that is an error."""

    error: OpenAIError


class OpenAIErrorFormat:
    """An ``ErrorFormat``."""

    request_id_header = b"x-request-id"
    keepalive = b": keep-alive\n\n"
    body_type: type[msgspec.Struct] = OpenAIErrorBody

    def status(self, refusal: ApiError) -> int:
        return refusal.status

    def body(self, refusal: ApiError, request_id: str) -> bytes:
        error = OpenAIError(
            message=refusal.message,
            type=_type(refusal.status),
            param=refusal.param,
            code=refusal.code,
        )
        return msgspec.json.encode(OpenAIErrorBody(error))

    def event(self, refusal: ApiError, request_id: str) -> bytes:
        return b"data: " + self.body(refusal, request_id) + b"\n\n"


def _type(status: int) -> str:
    return "server_error" if status >= 500 else _TYPES.get(status, "invalid_request_error")
