"""The vocabulary of a GGUF file: its tokens, and the ids of tokens with roles such as eos."""

from __future__ import annotations

import logging
from functools import cached_property
from typing import Final

from agentflow.engine.store.gguf.metadata import GgufMetadata

logger = logging.getLogger(__name__)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Types of tokens."""

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
"""Markers that end a text. A file lists one or two of them; a model may have more."""
_MARKS: Final = _ENDS | {
    "<|im_start|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<start_of_turn>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
}
"""Markers that do not occur in ordinary text. Some files give them the type of ordinary text."""


class GgufVocabulary:
    """The tokens by id, and the metadata about them. Raises ``BadModelFolder`` for a role whose token does
    not exist, and for tokens without types."""

    def __init__(self, data: GgufMetadata) -> None:
        self.data = data

    @cached_property
    def tokens(self) -> list[str]:
        found = self.data.texts("tokenizer.ggml.tokens")
        return [text or f"[EMPTY_{i}]" for i, text in enumerate(found)]

    @cached_property
    def types(self) -> list[int]:
        """The type of each token."""
        types = self.data.numbers("tokenizer.ggml.token_type") or [NORMAL] * len(self.tokens)
        if len(types) != len(self.tokens):
            raise self.data.reject("tokenizer.ggml.token_type", "must have a type for each token")
        wrong = [i for i, kind in enumerate(types) if kind == NORMAL and self.tokens[i] in _MARKS]
        if wrong:
            shown = ", ".join([self.tokens[i] for i in wrong])
            logger.warning("the file has %s as ordinary text: treated as control tokens", shown)
            types = [*types]
            for i in wrong:
                types[i] = CONTROL
        return types

    @property
    def named_tokens(self) -> dict[str, str]:
        """Tokens by role, such as ``{"bos_token": "<s>"}``."""
        if not self.tokens:
            raise self.data.reject("tokenizer.ggml.tokens", "is missing: the file has no vocabulary")
        roles = {"bos": self.bos_id, "eos": self.eos_id, "unk": self.unk_id, "pad": self.pad_id}
        return {f"{role}_token": self.tokens[i] for role, i in roles.items() if i is not None}

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the chat template."""
        key = "tokenizer.chat_template"
        return self.data.text(key) if key in self.data else None

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
        """The tokens that end a text: eos, eot and eom of the file, then known markers."""
        named = [self._id(role) for role in ("eos", "eot", "eom")]
        marks = {
            self.tokens[i]: i
            for i, kind in enumerate(self.types)
            if kind in (CONTROL, USER_DEFINED) and self.tokens[i] in _ENDS
        }
        if "<|return|>" in marks:  # in the Harmony format, <|end|> ends a message, not the answer
            marks.pop("<|end|>", None)
        found = dict.fromkeys([token for token in named if token is not None] + sorted(marks.values()))
        return tuple(found)

    def _id(self, role: str) -> int | None:
        key = f"tokenizer.ggml.{role}_token_id"
        if key not in self.data:
            return None
        token = self.data.integer(key)
        if self.tokens and not 0 <= token < len(self.tokens):
            raise self.data.reject(key, f"is {token}, but there are {len(self.tokens)} tokens")
        return token
