r"""The notation of models that write an answer in channels: as messages, each with a head.

A head has the message's channel and, for a call of a tool, its recipient::

    <|channel|>analysis<|message|>It is 3 o'clock.<|end|><|start|>assistant<|channel|>final<|message|>Hello

``analysis`` is reasoning, ``final`` the answer, ``commentary`` an announcement before calls, and a message to
``functions.NAME`` has the arguments of a call. ``channel_output`` reads this notation.
"""

from __future__ import annotations

CHANNEL_TOKENS = frozenset(
    {"<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"}
)
REASONING_HEAD = "<|channel|>analysis<|message|>"
ANSWER_HEAD = "<|channel|>final<|message|>"
CALL_MARK = "<|channel|>commentary"
"""The beginning of every head of a call."""
MESSAGE_END = "<|end|>"
"""The end of a message that another one of the same answer may follow."""
NEXT_MESSAGE = f"{MESSAGE_END}<|start|>assistant"
"""The text between two messages of an answer."""
ANSWER_ENDS = ("<|return|>", "<|call|>")
"""The ends of an answer's last message, which is a text or a call."""


def has_channels(source: str) -> bool:
    """Whether the chat template ``source`` writes answers in channels.

    >>> has_channels("<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>")
    True
    """
    return "<|channel|>" in source and "<|message|>" in source and "<|start|>" in source


def call_head(name: str) -> str:
    """Returns the head of a call of the tool, as models generate it."""
    return f"{CALL_MARK} to=functions.{name} <|constrain|>json<|message|>"
