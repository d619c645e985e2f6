"""Finds why the prompt of a conversation differs from an earlier one: other tools, another system message, or
a template that rewrote earlier turns. The engine reports the reason if the cache misses."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from agentflow.protocol.chat import Message
from agentflow.protocol.images import medium_key

MAX_CONVERSATIONS = 4096
"""The conversations that are remembered, about 300 bytes each."""


@dataclass(frozen=True, slots=True)
class Outline:
    """The parts of a conversation, as hashes, which differ from process to process."""

    first: int  # of the salt and the first message that is not of the system: identifies a conversation
    tools: int
    system: int
    keys: Sequence[bytes]  # of the conversation up to each message


@dataclass(frozen=True, slots=True)
class _Seen:
    tools: int
    system: int
    num_messages: int
    key: bytes  # of its last message
    text_key: bytes  # of its rendered text


def outline(messages: Sequence[Message], tools: str, salt: str, keys: Sequence[bytes]) -> Outline | None:
    """Returns the outline of a conversation; None if it has only system messages."""
    first = next((n for n, message in enumerate(messages) if message.role not in _SYSTEM_ROLES), None)
    if first is None:
        return None
    system = tuple([message.content for message in messages[:first]])
    media = [medium_key(placed.medium) for placed in messages[first].images]
    begin = (salt, messages[first].content, *media)
    return Outline(hash(begin), hash(tools), hash(system), keys)


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
        empty if it continues it, or is the first one. Remembers the prompt.

        Args:
            now: the conversation.
            text_keys: of its rendered text, as of ``TokenState``.
        """
        seen, reason = self._seen.get(now.first), ""
        if seen is not None:
            if seen.tools != now.tools:
                reason = "tools_changed"
            elif seen.system != now.system:
                reason = "system_changed"
            elif _continues(seen, now) and seen.text_key and text_keys and seen.text_key not in text_keys:
                reason = "rerendered"
        # The last place is the end of the markup that opens the assistant's turn. Templates write other
        # markup before an answer that they show.
        text_key = text_keys[-2] if len(text_keys) > 1 else b""
        self._seen[now.first] = _Seen(now.tools, now.system, len(now.keys), now.keys[-1], text_key)
        self._seen.move_to_end(now.first)
        if len(self._seen) > self._max_conversations:
            self._seen.popitem(last=False)
        return reason


_SYSTEM_ROLES = ("system", "developer")


def _continues(seen: _Seen, now: Outline) -> bool:
    return seen.num_messages <= len(now.keys) and now.keys[seen.num_messages - 1] == seen.key
