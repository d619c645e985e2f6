"""The vocabulary of a GGUF file: its tokens, and the ids of those with a role."""

from __future__ import annotations

from functools import cached_property
from typing import Final

from agentflow.engine.store.gguf.metadata import Metadata

CONTROL, USER_DEFINED, UNUSED = 3, 4, 5
"""The types of tokens that are no plain text."""

_ENDS: Final = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<｜end▁of▁sentence｜>",
    }
)
"""Markers that end a text. A file names one or two ends, a model may have more."""


class Vocabulary:
    """The tokens by id, and the metadata of the tokenizer."""

    def __init__(self, data: Metadata) -> None:
        self.data = data

    @cached_property
    def tokens(self) -> list[str]:
        return self.data.texts("tokenizer.ggml.tokens")

    @cached_property
    def types(self) -> list[int]:
        """The type of each token."""
        return self.data.numbers("tokenizer.ggml.token_type") or [1] * len(self.tokens)

    @property
    def bos_id(self) -> int | None:
        return self._id("bos")

    @property
    def eos_id(self) -> int | None:
        return self._id("eos")

    @property
    def pad_id(self) -> int | None:
        return self._id("padding")

    @property
    def unk_id(self) -> int | None:
        return self._id("unknown")

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end a text, the most usual one first."""
        named = [self._id(role) for role in ("eos", "eot", "eom")]
        marks = {
            self.tokens[i]: i
            for i, kind in enumerate(self.types)
            if kind == CONTROL and self.tokens[i] in _ENDS
        }
        if "<|return|>" in marks:  # the format in which <|end|> ends a message, not the answer
            marks.pop("<|end|>", None)
        found = dict.fromkeys([token for token in named if token is not None] + sorted(marks.values()))
        return tuple(found)

    def _id(self, role: str) -> int | None:
        key = f"tokenizer.ggml.{role}_token_id"
        return self.data.whole(key) if key in self.data else None
