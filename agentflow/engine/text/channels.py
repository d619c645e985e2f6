r"""The notation of models that write an answer in channels: as messages, each with a head.

A head names the message's channel, and the recipient of one that calls a tool::

    <|channel|>analysis<|message|>It is 3 o'clock.<|end|><|start|>assistant<|channel|>final<|message|>Hello

``analysis`` is thoughts, ``final`` the answer, ``commentary`` an announcement before calls, and a message to
``functions.NAME`` the arguments of a call. ``channel_output`` reads it.
"""

from __future__ import annotations

CHANNEL_TOKENS = frozenset(
    {"<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"}
)
THOUGHTS_HEAD = "<|channel|>analysis<|message|>"
ANSWER_HEAD = "<|channel|>final<|message|>"
CALL_MARK = "<|channel|>commentary"
"""The beginning of every head of a call."""
NEXT_MESSAGE = "<|end|><|start|>assistant"
"""What stands between two messages of an answer."""


def has_channels(source: str) -> bool:
    """Whether the chat template ``source`` writes answers in channels.

    >>> has_channels("<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>")
    True
    """
    return "<|channel|>" in source and "<|message|>" in source and "<|start|>" in source


def call_head(name: str) -> str:
    """The head of a call of the tool, as models generate it."""
    return f"{CALL_MARK} to=functions.{name} <|constrain|>json<|message|>"
