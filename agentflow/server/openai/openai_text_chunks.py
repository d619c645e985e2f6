"""Log-probabilities in the form of ``/v1/completions``, and the chunks of its streams."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from agentflow.server.completion.request import AnswerEnded, CompletionDelta, TextDelta, ToldToken
from agentflow.server.openai.openai_completion_types import TextLogprobs
from agentflow.server.openai.stream import AnswerIdentity, encode_json
from agentflow.server.openai.usage import UsageBody

KIND = "text_completion"


class OffsetLogprobs:
    """Tells the tokens of one answer, and where in its text each begins."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def push(self, tokens: Sequence[ToldToken]) -> TextLogprobs:
        """Of the tokens that come next."""
        offsets: list[int] = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(token.raw))
        return TextLogprobs(
            tokens=[_written(token) for token in tokens],
            token_logprobs=[token.logprob for token in tokens],
            top_logprobs=[_top(token) for token in tokens],
            text_offset=offsets,
        )


def _top(token: ToldToken) -> dict[str, float | None]:
    """The likeliest, and always the token itself."""
    top = {_written(one): one.logprob for one in token.top}
    top.setdefault(_written(token), token.logprob)
    return top


def _written(token: ToldToken) -> str:
    if "\ufffd" not in token.text or not token.raw:
        return token.text
    return "bytes:" + "".join([f"\\x{byte:02x}" for byte in token.raw])


class TextChunks:
    """Those of one request with ``num_answers`` in all. ``include_usage``: chunks say that their own usage
    is null."""

    def __init__(self, identity: AnswerIdentity, num_answers: int, *, include_usage: bool) -> None:
        self._identity = identity
        front = identity.event_head(KIND)
        self._fronts = [front + b'"choices":[{"index":%d,"text":' % index for index in range(num_answers)]
        self._end = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"
        self._goes_on = b',"logprobs":null,"finish_reason":null' + self._end
        self._logprobs = [OffsetLogprobs() for _ in range(num_answers)]

    def write(self, deltas: Sequence[CompletionDelta]) -> bytes:
        """The events of these deltas."""
        parts: list[bytes] = []
        for delta in deltas:
            front = self._fronts[delta.index]
            if isinstance(delta, TextDelta):
                parts += (front, encode_json(delta.text))
                if delta.tokens:
                    told = encode_json(self._logprobs[delta.index].push(delta.tokens))
                    parts += (b',"logprobs":', told, b',"finish_reason":null', self._end)
                else:
                    parts.append(self._goes_on)
            elif isinstance(delta, AnswerEnded):
                reason = encode_json(delta.finish_reason)
                parts += (front, b'"","logprobs":null,"finish_reason":', reason, self._end)
        return b"".join(parts)

    def usage(self, usage: UsageBody) -> bytes:
        """The event that tells the tokens."""
        return self._identity.event(KIND, {"choices": [], "usage": usage})
