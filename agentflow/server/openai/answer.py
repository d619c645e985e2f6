"""The common parts of the answers of OpenAI's API: usage, and the fields of chunks."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from agentflow.protocol.events import Usage
from agentflow.server.completion.completion import Completion
from agentflow.server.completion.request import Answer, AnswerToken
from agentflow.server.completion.streaming import CommentedEvents
from agentflow.server.event_stream import EVENT_END, event, event_head
from agentflow.server.openai.types import (
    CompletionDetails,
    PromptDetails,
    PromptLogprob,
    PromptLogprobs,
    SharedFields,
    UsageBody,
)
from agentflow.version import __version__

encode_json = msgspec.json.Encoder().encode
DONE = event(b"[DONE]")


def usage_body(usage: Usage) -> UsageBody:
    """The usage in the API's form."""
    return UsageBody(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.output_tokens,
        total_tokens=usage.prompt_tokens + usage.output_tokens,
        prompt_tokens_details=PromptDetails(usage.cached_tokens),
        completion_tokens_details=CompletionDetails(usage.reasoning_tokens),
    )


def make_prompt_logprobs(answer: Answer, num_top: int | None) -> PromptLogprobs | msgspec.UnsetType:
    """The log-probabilities of the prompt, with ``num_top`` alternatives. ``num_top`` None: they were not
    requested."""
    if answer.prompt is None or num_top is None:
        return msgspec.UNSET
    return [None, *[_prompt_logprob(token, num_top) for token in answer.prompt.tokens[1:]]]


def _prompt_logprob(token: AnswerToken, num_top: int) -> dict[str, PromptLogprob]:
    found = {
        str(top.token_id): PromptLogprob(logprob=top.logprob, rank=rank, decoded_token=top.text)
        for rank, top in enumerate(token.top[:num_top], 1)
    }
    assert token.rank is not None, "of a scored token"
    own = PromptLogprob(logprob=token.logprob, rank=token.rank, decoded_token=token.text)
    found.setdefault(str(token.token_id), own)
    return found


def list_prompt_ids(answer: Answer) -> list[int]:
    """The token ids of the prompt."""
    return [] if answer.prompt is None else [*answer.prompt.token_ids]


@dataclass(frozen=True, slots=True)
class UsageChunks:
    """Where a stream has the usage. ``at_end``: in a last chunk. ``so_far``: also in each chunk."""

    at_end: bool
    so_far: Callable[[], Usage] | None = None

    @classmethod
    def of(cls, request: SharedFields, completion: Completion) -> UsageChunks:
        """The usage that the request asks for."""
        options = request.stream_options
        if options is None or not options.include_usage:
            return cls(False)
        return cls(True, completion.usage_so_far if options.continuous_usage_stats else None)


@dataclass(frozen=True, slots=True)
class AnswerIdentity:
    """The fields that all chunks of an answer share."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    @classmethod
    def new(cls, prefix: str, model: str) -> AnswerIdentity:
        """The identity of a new answer."""
        made_of = f"{__version__} {model}".encode()
        fingerprint = f"fp_{hashlib.sha256(made_of).hexdigest()[:10]}"
        return cls(f"{prefix}-{secrets.token_hex(12)}", int(time.time()), model, fingerprint)


class ChunkWriter(CommentedEvents):
    """The chunks of one request. Subclasses write the deltas.

    Thousands of chunks are written per second, so all but the content is encoded in advance: ``fronts`` (one
    for each answer) precede the content, and ``rest`` follows it. After log-probabilities or a finish reason,
    only ``tail`` follows.

    Args:
        identity: the fields that all chunks share.
        kind: the ``object`` of the chunks.
        content: the field of a choice for its content.
        num_answers: the number of choices.
        usage: the chunks that have the usage. In the other chunks it is null, if it was requested.
    """

    def __init__(
        self, identity: AnswerIdentity, kind: str, content: str, num_answers: int, *, usage: UsageChunks
    ) -> None:
        fields = {
            "id": identity.id,
            "object": kind,
            "created": identity.created,
            "model": identity.model,
            "system_fingerprint": identity.system_fingerprint,
        }
        self._head = event_head() + encode_json(fields)[:-1] + b',"choices":['
        self._usage = usage
        self.fronts = [
            self._head + b'{"index":%d,"%b":' % (index, content.encode()) for index in range(num_answers)
        ]
        self.prepare(b',"usage":null' if usage.at_end else b"")

    def show_usage(self) -> None:
        """Puts the usage so far into the next chunks, if it was requested."""
        if self._usage.so_far is not None:
            self.prepare(b',"usage":' + encode_json(usage_body(self._usage.so_far())))

    def prepare(self, usage: bytes) -> None:
        """Encodes the JSON after the content of the next chunks, with this member for the usage."""
        self.tail = b"}]" + usage + b"}" + EVENT_END
        self.rest = b',"logprobs":null,"finish_reason":null' + self.tail

    def start(self, prompt_tokens: int) -> bytes:
        """Returns no bytes: each answer begins with its first delta."""
        return b""

    def end(self, usage: Usage) -> bytes:
        """The chunk with the usage, if it was requested, and the end of the stream."""
        if not self._usage.at_end:
            return DONE
        return self._head + b'],"usage":%b}' % encode_json(usage_body(usage)) + EVENT_END + DONE
