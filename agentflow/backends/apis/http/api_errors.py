"""The errors of agentflow for an API's errors: one sentence with the model, the parameter and the
remedy.

``ErrorMapping`` reads the bodies of OpenAI's API and of the servers that imitate it. ``is_transient``
recognises errors that another attempt may cure, ``is_endpoint_fault`` errors that another endpoint may cure.
"""

from __future__ import annotations

import email.utils
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from agentflow.errors import (
    AgentflowError,
    BadArgument,
    EngineFailed,
    NotAuthorized,
    NotSupported,
    Overloaded,
    PromptTooLong,
    ProtocolError,
    RateLimited,
    RequestRefused,
    ServerLost,
    ServerUnreachable,
    UnknownModel,
)
from agentflow.protocol.unreadable import UNREADABLE

MAX_QUOTED_CHARS = 300
"""The length of a server's own message in an error."""

_TOO_LONG = re.compile(
    r"context.{0,20}(length|size|window)|maximum.{0,20}(context|tokens? limit|prompt)|too (long|many tokens)|"
    r"exceed\w* (the )?(available|maximum|model'?s?) |too large to process",
    re.IGNORECASE,
)
_FILTERED = (
    "content_filter",
    "content_policy_violation",
    "moderation_blocked",
    "ResponsibleAIPolicyViolation",
)
_UNKNOWN_MODEL = re.compile(
    r"model.{0,200}(not (exist|found)|does ?n[o']t exist|unknown|not loaded)", re.I | re.S
)
_QUOTA = ("insufficient_quota", "billing_hard_limit_reached", "billing_not_active")


def is_transient(error: AgentflowError) -> bool:
    """Whether the same request may succeed a little later."""
    return isinstance(error, Overloaded | ServerLost | ServerUnreachable | EngineFailed)


def is_endpoint_fault(error: AgentflowError) -> bool:
    """Whether another endpoint may answer the same request: this one fails, or refuses its key,
    model or address. A request that is refused for its content or its parameters is at fault itself."""
    is_wrong_place = isinstance(error, BadArgument) and error.param == "url"
    kinds = (ProtocolError, NotAuthorized, UnknownModel)
    return is_transient(error) or isinstance(error, kinds) or is_wrong_place


@dataclass(frozen=True)
class ErrorMapping:
    """Makes the errors of one backend.

    Attributes:
        server: The server's name in messages, such as ``OpenAI`` or its address.
        model: The model's name.
        key_source: Where the API key comes from, such as ``OPENAI_API_KEY``.
        secret: The API key, which is removed from messages that the server sends.
        params: The parameters of ``GenParams`` by the fields in which the API receives them.
        max_context: The tokens of the model's context; None: unknown.
    """

    server: str
    model: str
    key_source: str = "api_key="
    secret: str | None = field(default=None, repr=False)
    params: Mapping[str, str] = field(default_factory=dict)
    max_context: int | None = None

    def of_response(self, status: int, headers: Mapping[str, str], body: bytes) -> AgentflowError:
        """The error for a response with a status other than 200."""
        if 300 <= status < 400:
            place = headers.get("location", "another address")
            return BadArgument(f"{self.server} redirects to {place!r:.200}: give that address", param="url")
        error = self._of(status, _detail(body))
        if isinstance(error, Overloaded):
            error.retry_after_s = retry_after_s(headers)
        return error

    def of_event(self, detail: Any) -> AgentflowError:
        """The exception for an error that is reported within a stream, as the value of ``error``."""
        found = _read_detail(detail)
        return self._of(found.status or _STATUS_OF_TYPE.get(found.kind, 500), found)

    def lost(self, why: str, remedy: str = "run it again") -> ServerLost:
        """The error for an answer that does not end as it should."""
        return ServerLost(f"the answer of {self.model} from {self.server} was cut ({why}): {remedy}")

    def filtered(self) -> RequestRefused:
        """The error for an answer that the provider's content filter ended."""
        return RequestRefused(
            f"the content filter of {self.server} blocked the answer of {self.model}: change the prompt"
        )

    def refused(self, words: str) -> RequestRefused:
        """The error for a model that declines to answer."""
        said = self._quoted(words)
        return RequestRefused(
            f"{self.model} refuses to answer: change the prompt{f': {said}' if said else ''}"
        )

    def _of(self, status: int, detail: _Detail) -> AgentflowError:
        words = self._quoted(detail.message)
        said = f": {words}" if words else ""
        at = f"{self.model} at {self.server}"
        match status:
            case 401:
                return NotAuthorized(
                    f"{self.server} rejects the API key for {self.model} ({self.key_source}): give a valid "
                    f"one{said}"
                )
            case 403:
                return NotAuthorized(
                    f"the API key ({self.key_source}) does not permit this request to {at}: give another "
                    f"key{said}"
                )
            case 402 | 429 if status == 402 or detail.code in _QUOTA or detail.kind in _QUOTA:
                return NotAuthorized(
                    f"the account of the API key ({self.key_source}) has no quota left for {at}: add credit, "
                    f"or raise its limit{said}"
                )
            case 429:
                return RateLimited(
                    f"the rate limit for {at} is reached: wait, or lower the concurrency{said}"
                )
            case 503 | 529:
                return Overloaded(f"{at} is overloaded: try again later{said}")
            case 408 | 409 | 425:
                return Overloaded(f"{at} asks to repeat the request (status {status}): try again{said}")
            # llama.cpp's answer to a text that is too long to be embedded has the status 500.
            case _ if status >= 500 and status != 501 and "too large to process" not in detail.message:
                return EngineFailed(f"{at} failed (status {status}): try again later{said}")
        if detail.code in _FILTERED or detail.kind in _FILTERED:
            return RequestRefused(
                f"the content filter of {self.server} blocked the prompt for {self.model}: change it{said}",
                param="messages",
            )
        if (
            detail.code == "context_length_exceeded"
            or detail.kind == "exceed_context_size_error"
            or status == 413
            or _TOO_LONG.search(detail.message)
        ):
            size = "" if self.max_context is None else f" ({self.max_context:,} tokens)"
            return PromptTooLong(f"the prompt and max_tokens exceed the context of {self.model}{size}{said}")
        if detail.code == "model_not_found" or (
            status in (400, 404) and _UNKNOWN_MODEL.search(detail.message)
        ):
            return UnknownModel(
                f"{self.server} has no model {self.model!r}: give another name{said}", param="model"
            )
        if status in (404, 405, 501):
            return BadArgument(
                f"{self.server} has no such endpoint (status {status}): addresses usually end in /v1{said}",
                param="url",
            )
        return self._refused_request(status, detail, at, said)

    def _refused_request(self, status: int, detail: _Detail, at: str, said: str) -> AgentflowError:
        name = detail.param and self.params.get(detail.param, detail.param)
        if name is None:
            return RequestRefused(f"{at} refuses the request (status {status}){said}")
        if detail.code in ("unsupported_parameter", "unsupported_value"):
            remedy = (
                "leave it out"
                if detail.code == "unsupported_parameter"
                else "give another value, or leave it out"
            )
            return NotSupported(f"{at} does not support this {name}: {remedy}{said}", param=name)
        return RequestRefused(f"{at} refuses {name} (status {status}): change it{said}", param=name)

    def _quoted(self, message: str) -> str:
        words = " ".join(message.split())
        if self.secret:
            words = words.replace(self.secret, "…")
        return words if len(words) <= MAX_QUOTED_CHARS else words[: MAX_QUOTED_CHARS - 1] + "…"


_STATUS_OF_TYPE = {
    "invalid_request_error": 400,
    "BadRequestError": 400,
    "exceed_context_size_error": 400,
    "invalid_prompt": 400,
    "bio_policy": 400,
    "misalignment_policy_violation": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "insufficient_quota": 429,
    "tokens": 429,
    "requests": 429,
    "overloaded_error": 529,
    "service_unavailable": 503,
}
"""The status that stands for the type of an error within a stream, whose status was 200."""


@dataclass(frozen=True)
class _Detail:
    """The parts of an error in any of the shapes in which servers send them."""

    message: str = ""
    kind: str = ""
    code: str = ""
    param: str | None = None
    status: int | None = None


def _detail(body: bytes) -> _Detail:
    try:
        found = msgspec.json.decode(body)
    except UNREADABLE:
        return _Detail(body.decode("utf-8", "replace"))
    return _read_detail(found)


def _read_detail(found: Any) -> _Detail:
    if isinstance(found, list) and found:
        found = found[0]
    if not isinstance(found, dict):
        return _Detail(found if isinstance(found, str) else "")
    inner = found.get("error", found.get("detail"))
    if isinstance(inner, str):
        return _Detail(inner)
    if isinstance(inner, dict | list):
        return _read_detail(inner)
    texts = {
        name: value if isinstance(value, str) else ""
        for name in ("message", "msg", "type", "code", "param")
        for value in [found.get(name)]
    }
    number = found.get("code", found.get("status"))
    is_status = isinstance(number, int) and not isinstance(number, bool) and 400 <= number < 600
    return _Detail(
        texts["message"] or texts["msg"],
        texts["type"],
        texts["code"],
        texts["param"] or None,
        number if is_status else None,
    )


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """The seconds after which the server asks for another attempt (``retry-after-ms`` or ``retry-after``);
    None without a valid one.

    >>> retry_after_s({"retry-after-ms": "1500"}), retry_after_s({"retry-after": "2"}), retry_after_s({})
    (1.5, 2.0, None)
    """
    for name, scale in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        value = headers.get(name)
        if value is None:
            continue
        try:
            seconds = float(value) * scale
        except ValueError:
            try:
                seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
            except (ValueError, OverflowError):
                continue
        if math.isfinite(seconds):
            return max(0.0, seconds)
    return None
