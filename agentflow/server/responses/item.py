"""Items of stored conversations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from agentflow.protocol.bounds.sized import sized
from agentflow.protocol.chat import CalledTool, Message


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning, which belongs to the assistant's next message or call."""

    text: str


Step: TypeAlias = Message | CalledTool | Reasoning
"""An item's part of the conversation. The name in a tool's message is filled in from the call."""


@dataclass(frozen=True, slots=True)
class Item:
    """An item of a conversation."""

    id: str
    shown: bytes  # the item in lists, as JSON
    step: Step
    num_bytes: int  # its memory

    @classmethod
    def made(cls, item_id: str, shown: object, step: Step) -> Item:
        """An item that lists show as ``shown``."""
        data = msgspec.json.encode(shown)
        return cls(item_id, data, step, item_bytes(item_id, data, step))


_ITEM_BYTES = 400
"""The memory of an item's object and its entry in the store's index."""


def item_bytes(item_id: str, shown: bytes, step: Step) -> int:
    """The memory of an item."""
    return sized(item_id, shown, step) + _ITEM_BYTES


Find: TypeAlias = Callable[[str], Item | None]
"""Finds an item of a stored response by its id."""
