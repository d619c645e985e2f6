"""The interface of ``ApiGenerator`` to one kind of API: how a call is written, and how its stream is read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from agentflow.backends.apis.answers.answer import CHARS_PER_TOKEN, AnswerCollector
from agentflow.backends.apis.generation.conversation import (
    IMAGE_TOKENS,
    MAX_IMAGE_TOKENS,
    PICTURES_OF_VIDEO,
    ApiContext,
)
from agentflow.backends.apis.generation.prefix_gate import PrefixGate
from agentflow.backends.apis.http.event_stream import EventSink
from agentflow.backends.apis.strict_schema import Unwrap
from agentflow.errors import NotSupported
from agentflow.protocol.chat import ToolChoice
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.images import Image
from agentflow.protocol.sampling import GenParams

MAX_PLAIN_TOP_LOGPROBS = 5
"""The most ``top_logprobs`` that APIs report after plain text."""


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

    @cached_property
    def given(self) -> dict[str, Any]:
        """The parameters that the program gave and that change the text, by name."""
        return {name: getattr(self.params, name) for name in self.params.given}


class ApiRequest(NamedTuple):
    """A request.

    Attributes:
        path: Below the base URL.
        body: A JSON object, with slots (``http/file_slots``) for the files.
        unwrap: Takes the text out of the answer, if the API puts it into an object.
        lead: White space of the context that was not sent, with which the answer is expected to begin.
        gate: Before the requests that share a prefix, if the first one should go ahead.
        images: The files of the slots.
    """

    path: str
    body: bytes
    unwrap: Unwrap | None = None
    lead: str = ""
    gate: PrefixGate | None = None
    images: tuple[Image, ...] = ()

    @property
    def num_chars(self) -> int:
        """About the characters of the prompt, in which an image counts by its tokens."""
        return len(self.body) + self._num_pictures * IMAGE_TOKENS * CHARS_PER_TOKEN

    @property
    def most_tokens(self) -> int:
        """At most the tokens of the prompt: a token has a byte."""
        return len(self.body) + self._num_pictures * MAX_IMAGE_TOKENS

    @property
    def _num_pictures(self) -> int:
        return sum([PICTURES_OF_VIDEO if image.is_video else 1 for image in self.images])


class ApiFormat(Protocol):
    """One kind of API.

    Attributes:
        min_tokens: The smallest ``max_tokens`` that it accepts for a text.
        may_stop_reasoning: Whether the model reasons by default, and a call may turn that off.
    """

    min_tokens: int
    may_stop_reasoning: bool

    def request(self, context: ApiContext, call: Call) -> ApiRequest:
        """The request for a call. ``NotSupported`` if the API cannot express it."""

    def sink(self, request: ApiRequest, answer: AnswerCollector) -> EventSink:
        """The reader of a stream, which writes into ``answer``."""


def turns_only(model: str) -> NotSupported:
    """The error of an API without plain texts."""
    return NotSupported(
        f"{model} answers turns only, and this state has plain text: put the text into af.user(…), and the "
        "gen into af.assistant(…)"
    )


def cannot_continue(model: str, when: str = "") -> NotSupported:
    """The error of an API that begins each turn of the assistant."""
    return NotSupported(
        f"{model} cannot continue a turn that it has begun{when}: put each gen into its own "
        "af.assistant(…), and fixed text into af.user(…)"
    )


def choice_fields(choice: ToolChoice, named: dict[str, Any]) -> dict[str, Any]:
    """The fields of OpenAI's APIs for a choice of tools. ``named``: the members for one tool."""
    fields: dict[str, Any] = {}
    if choice.name is not None:
        fields["tool_choice"] = {"type": "function", **named}
    elif choice.mode != "auto":
        fields["tool_choice"] = choice.mode
    if not choice.parallel and choice.mode != "none":
        fields["parallel_tool_calls"] = False
    return fields
