"""OpenAI's format of errors, which paths outside of all APIs also have."""

from __future__ import annotations

import msgspec

from agentflow.server.errors import ApiError
from agentflow.server.event_stream import CONTENT_TYPE, comment, event
from agentflow.server.stores.fronts import ForwardedAnswer
from agentflow.server.tenants.limit_headers import openai_limit_headers
from agentflow.server.tenants.rate_limit import LimitState

# An unknown key or model is an invalid request in this API; the code has the cause.
_ERROR_TYPES = {403: "permission_error", 429: "rate_limit_error"}


class OpenAIError(msgspec.Struct, kw_only=True):
    """``param``: the field of the request that is wrong, if any. ``code``: the cause."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIErrorBody(msgspec.Struct):
    """The body of an error."""

    error: OpenAIError


class OpenAIErrorFormat:
    """The ``ErrorFormat`` of OpenAI's API."""

    request_id_header = b"x-request-id"
    processing_header = b"openai-processing-ms"
    stream_type = CONTENT_TYPE
    keepalive = comment(b"keep-alive")
    body_type: type[msgspec.Struct] = OpenAIErrorBody

    def status(self, error: ApiError) -> int:
        return error.status

    def body(self, error: ApiError, request_id: str) -> bytes:
        shown = OpenAIError(
            message=error.message,
            type="server_error"
            if error.status >= 500
            else _ERROR_TYPES.get(error.status, "invalid_request_error"),
            param=error.param,
            code=error.code,
        )
        return msgspec.json.encode(OpenAIErrorBody(shown))

    def limit_headers(self, limits: LimitState) -> dict[bytes, bytes]:
        return openai_limit_headers(limits)

    def in_stream(self, body: bytes) -> bytes:
        return event(body)


OPENAI = OpenAIErrorFormat()


def read_error(answered: ForwardedAnswer) -> ApiError:
    """The error in another server's answer."""
    error = msgspec.json.decode(answered.body, type=OpenAIErrorBody).error
    retry_after = dict(answered.headers).get(b"retry-after")
    retry_after_s = None if retry_after is None else float(retry_after)
    return ApiError(answered.status, error.code or "invalid_value", error.message, error.param, retry_after_s)
