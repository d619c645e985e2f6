"""What models wrote in conversations that may go on: each answer's tokens, by the conversation up to it.

A client of an HTTP API sends the whole conversation again with each turn, answers as text. Encoded anew, an
answer may become other tokens than those that were generated, and from there on nothing is cached. So the
answer of a conversation that the server has had is taken as it was generated, as sessions have it.

Only the very same conversation counts: what a conversation is given does not depend on what others said.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress

from agentflow.protocol.chat import Message

# Four bytes each.
MAX_TOKENS = 500_000
# An entry takes so much memory beside its tokens, counted in tokens.
TOKENS_PER_ENTRY = 64
_NOTHING = b"\xff" * 8


class AnswerMemory:
    """Of one tenant and model. The answers that were last asked for are kept: ``max_tokens`` in all, where
    each counts ``TOKENS_PER_ENTRY`` more than it has."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._answers: OrderedDict[bytes, array[int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def remember(self, conversation: bytes, token_ids: Sequence[int]) -> None:
        """``conversation``: the key of the conversation that ends with this answer. An empty one is
        not worth its place."""
        self._forget(conversation)
        if not token_ids or _size(token_ids) > self._max_tokens:
            return
        self._answers[conversation] = array("i", token_ids)
        self._num_tokens += _size(token_ids)
        while self._num_tokens > self._max_tokens:
            self._forget(next(iter(self._answers)))

    def recall(self, conversation: bytes) -> Sequence[int] | None:
        """The tokens of the answer that the conversation ends with, if it is known."""
        token_ids = self._answers.get(conversation)
        if token_ids is not None:
            with suppress(KeyError):  # forgotten meanwhile: conversations are also filled in threads
                self._answers.move_to_end(conversation)
        return token_ids

    def _forget(self, conversation: bytes) -> None:
        forgotten = self._answers.pop(conversation, None)
        if forgotten is not None:
            self._num_tokens -= _size(forgotten)


def _size(token_ids: Sequence[int]) -> int:
    return len(token_ids) + TOKENS_PER_ENTRY


def conversation_keys(messages: Iterable[Message], start: bytes = b"") -> list[bytes]:
    """For each message the key of the conversation up to it; ``start``: of what comes before them."""
    keys: list[bytes] = []
    key = start
    for message in messages:
        said = [message.role, message.content, message.tool_call_id, message.name]
        for call in message.tool_calls:
            said += [call.name, call.arguments]
        digest = hashlib.blake2b(key, digest_size=16)
        for text in said:
            data = b"" if text is None else text.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "little", signed=False) if text is not None else _NOTHING)
            digest.update(data)
        key = digest.digest()
        keys.append(key)
    return keys
