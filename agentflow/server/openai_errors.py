"""How OpenAI's API writes errors: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import msgspec

from agentflow.server.http_refusal import Refusal

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class OpenAIErrors:
    """An ``ErrorDialect``."""

    request_id_header = b"x-request-id"

    def status(self, refusal: Refusal) -> int:
        return refusal.status

    def body(self, refusal: Refusal, request_id: str) -> bytes:
        kind = (
            "server_error" if refusal.status >= 500 else _TYPES.get(refusal.status, "invalid_request_error")
        )
        error = {
            "message": refusal.message,
            "type": kind,
            "param": refusal.param,
            "code": refusal.code,
        }
        return msgspec.json.encode({"error": error})

    def event(self, refusal: Refusal, request_id: str) -> bytes:
        return b"data: " + self.body(refusal, request_id) + b"\n\n"
