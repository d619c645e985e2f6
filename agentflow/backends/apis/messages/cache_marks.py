"""The places of a prompt after which Anthropic's API is asked to cache it.

A mark costs a quarter more for the tokens that are cached for the first time, and saves nine tenths of their
price in each later request with the same prefix. So marks stand where later requests probably differ: after
the tools and the system prompt, at forks, after long constant messages, and at the end of a conversation that
goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MAX_MARKS = 4
"""The most marks that the API accepts."""
MIN_BYTES = 4096
"""The shortest prefix that is worth a mark: about 1024 tokens, the least that most models cache."""
MARK = b',"cache_control":{"type":"ephemeral"}'
_REASONING = (b'{"type":"thinking"', b'{"type":"redacted_thinking"')


class PromptPart(NamedTuple):
    """A tool, a block of the system prompt, or a message, in the order of the prompt.

    Attributes:
        encoded: Its JSON.
        end: The end of ``encoded`` before which a mark is inserted.
        is_head: It is a tool or a block of the system prompt.
        is_constant: A message that the program wrote.
        is_shared: The state was forked after it.
        is_open: A message that the answer continues.
        media_bytes: The size of a text of as many tokens as its images have.
    """

    encoded: bytes
    end: bytes
    is_head: bool = False
    is_constant: bool = False
    is_shared: bool = False
    is_open: bool = False
    media_bytes: int = 0

    @property
    def is_markable(self) -> bool:
        """Whether a mark can stand here: the API accepts none on reasoning, and text that goes on will be
        another block."""
        last_block = self.encoded[self.encoded.rfind(b'{"type":"') :]
        return not self.is_open and not last_block.startswith(_REASONING)


def marked_parts(parts: Sequence[PromptPart]) -> list[bytes]:
    """The JSON of the parts, with marks.

    Args:
        parts: All parts of the prompt: tools, then the system prompt, then the messages.
    """
    marked = _marked(parts)
    return [
        part.encoded[: -len(part.end)] + MARK + part.end if number in marked else part.encoded
        for number, part in enumerate(parts)
    ]


def _marked(parts: Sequence[PromptPart]) -> set[int]:
    """The numbers of the parts that are marked. The longest prefixes come first."""
    found: list[int] = []
    num_bytes = 0  # of the prefix
    goes_on = False  # the model has written a part of the conversation
    last = max((number for number, part in enumerate(parts) if not part.is_open), default=-1)
    for number, part in enumerate(parts):
        part_bytes = len(part.encoded) + part.media_bytes
        num_bytes += part_bytes
        goes_on = goes_on or not (part.is_head or part.is_constant)
        if num_bytes < MIN_BYTES:
            continue
        ends_head = part.is_head and number + 1 < len(parts) and not parts[number + 1].is_head
        is_long = part.is_constant and number < last and part_bytes >= MIN_BYTES
        is_boundary = part.is_shared or ends_head or is_long or (number == last and goes_on)
        if is_boundary and part.is_markable:
            found.append(number)
    return set(found[-MAX_MARKS:])
