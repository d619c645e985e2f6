"""The interface of ``ApiGenerator`` to one kind of API: how a call is written, and how its stream is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from agentflow.backends.apis.answers.answer import Answer
from agentflow.backends.apis.conversation import ApiContext
from agentflow.backends.apis.http.transport import EventSink
from agentflow.backends.apis.prefix_gate import PrefixGate
from agentflow.backends.apis.strict_schema import Unwrap
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.sampling import GenParams


@dataclass(frozen=True)
class Call:
    """One generation.

    Attributes:
        params: The sampling parameters.
        constraint: The constraint that the API must enforce.
        is_reply: Whether the model may call the context's tools.
    """

    params: GenParams
    constraint: Constraint | None = None
    is_reply: bool = False

    @property
    def given(self) -> dict[str, Any]:
        """The parameters that the program gave and that change the text, by name."""
        return {name: getattr(self.params, name) for name in self.params.given}


class Request(NamedTuple):
    """A request.

    Attributes:
        path: Below the base URL.
        body: A JSON object.
        unwrap: Takes the text out of the answer, if the API puts it into an object.
        lead: White space of the context that was not sent, with which the answer is expected to begin.
        gate: Before the requests that share a prefix, if the first one should go ahead.
    """

    path: str
    body: bytes
    unwrap: Unwrap | None = None
    lead: str = ""
    gate: PrefixGate | None = None


class ApiFormat(Protocol):
    """One kind of API.

    Attributes:
        min_tokens: The smallest ``max_tokens`` that it accepts for a text.
        may_stop_reasoning: Whether the model reasons by default, and a call may turn that off.
    """

    min_tokens: int
    may_stop_reasoning: bool

    def request(self, context: ApiContext, call: Call) -> Request:
        """The request for a call. ``NotSupported`` if the API cannot express it."""

    def sink(self, request: Request, answer: Answer) -> EventSink:
        """The reader of a stream, which writes into ``answer``."""
