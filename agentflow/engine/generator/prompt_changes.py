"""Finds why the prompt of a conversation differs from an earlier one: other tools, another system message, or
a template that rewrote earlier turns. The engine reports the reason if the cache misses."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from agentflow.protocol.chat import Message
from agentflow.protocol.images import medium_key

MAX_CONVERSATIONS = 4096
"""The conversations that are remembered, about 300 bytes each."""


class Outline(NamedTuple):
    """The parts of a conversation, as keys and a hash. The hash differs between processes."""

    first: int  # a hash of the first message that is not a system message: identifies a conversation
    tools: bytes
    system: bytes  # of the tools and the messages before the first
    keys: Sequence[bytes]  # of the conversation up to each message


class _Seen(NamedTuple):
    tools: bytes
    system: bytes
    num_messages: int
    key: bytes  # of its last message
    text_key: bytes  # of its rendered text


def outline(messages: Sequence[Message], tools: bytes, salt: str, keys: Sequence[bytes]) -> Outline | None:
    """Returns the outline of a conversation; None if it has only system messages.

    Args:
        messages: the conversation.
        tools: the key of its tools.
        salt: conversations with other salts are never compared.
        keys: of the conversation up to each message, tools included.
    """
    for number, message in enumerate(messages):
        if message.role not in _SYSTEM_ROLES:
            media = [medium_key(placed.medium) for placed in message.images] if message.images else ()
            system = keys[number - 1] if number else tools
            return Outline(hash((salt, message.content, *media)), tools, system, keys)
    return None


class PromptChanges:
    """The latest prompts of one tenant's recent conversations with one model. A conversation is recognised by
    its first message. The least recently used one is dropped first."""

    def __init__(self, max_conversations: int = MAX_CONVERSATIONS) -> None:
        self._max_conversations = max_conversations
        self._seen: OrderedDict[int, _Seen] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def reason(self, now: Outline, text_keys: Sequence[bytes]) -> str:
        """Returns why a prompt differs from the last one of its conversation, as in ``Usage.miss_reason``;
        empty if it only continues that one, or is the first. Remembers the prompt.

        Args:
            now: the conversation.
            text_keys: of its rendered text, as in ``TokenState``.
        """
        first, tools, system, keys = now
        seen, reason = self._seen.get(first), ""
        if seen is not None:
            self._seen.move_to_end(first)
            if seen.tools != tools:
                reason = "tools_changed"
            elif seen.system != system:
                reason = "system_changed"
            elif seen.text_key and text_keys and _continues(seen, keys) and seen.text_key not in text_keys:
                reason = "rerendered"
        # The last place is the end of the markup that opens the assistant's turn. Templates write other
        # markup before an answer that they show.
        text_key = text_keys[-2] if len(text_keys) > 1 else b""
        self._seen[first] = _Seen(tools, system, len(keys), keys[-1], text_key)
        if len(self._seen) > self._max_conversations:
            self._seen.popitem(last=False)
        return reason


_SYSTEM_ROLES = ("system", "developer")


def _continues(seen: _Seen, keys: Sequence[bytes]) -> bool:
    return seen.num_messages <= len(keys) and keys[seen.num_messages - 1] == seen.key
