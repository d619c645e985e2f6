"""The length of the common prefix of two texts, lists of token ids or conversations."""

from __future__ import annotations

from typing import TypeVar

from agentflow.protocol.chat import Message

SequenceT = TypeVar("SequenceT", str, list[int], tuple[Message, ...])

# Elements that one comparison covers.
_COMPARED = 1024


def common_prefix(a: SequenceT, b: SequenceT) -> int:
    """Returns the length of the common prefix; fast if it is long."""
    if b[: len(a)] == a:
        return len(a)
    shorter = min(len(a), len(b))
    for low in range(0, shorter, _COMPARED):
        high = min(low + _COMPARED, shorter)
        if a[low:high] != b[low:high]:
            break
    else:
        return shorter
    while high - low > 1:  # a[:low] is common, a[:high] is not
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
