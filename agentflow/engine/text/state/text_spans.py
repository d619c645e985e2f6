"""Spans of a state's text, which are encoded one by one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """Text that is encoded independently of the text around it."""

    text: str
    is_markup: bool
    ids: tuple[int, ...] | None = None  # of generated text, or of a medium
    medium: str = ""  # the identity of the image or video that the span is; its text is a short mark then


@dataclass(frozen=True, slots=True)
class Segment:
    """A span with its ids."""

    span: Span
    continues: bool  # as in ``Tokenizer.encode``
    ids: tuple[int, ...]
