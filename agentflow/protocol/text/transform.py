"""Transforms of a variable's text in references.

They run in the backend, so a value is passed from one state to another without a round trip to the client.
Python functions (``Variable.map``) run in the client, never on a server."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import anyio.to_thread
import msgspec

from agentflow.errors import BadArgument, RunFailed
from agentflow.protocol.bounds import client_pattern
from agentflow.protocol.bounds.client_pattern import InvalidPattern
from agentflow.protocol.text import text_parts
from agentflow.protocol.text.text_parts import MAX_INLINE_CHARS, shorten_text

if TYPE_CHECKING:
    import regex

TransformName = Literal[
    "strip",
    "lower",
    "upper",
    "first_line",
    "json",
    "regex",
    "items",
    "xml",
    "yaml",
    "number",
    "date",
    "enum",
]

MAX_TRANSFORMS = 16
MAX_PATTERN_CHARS = 1000
_SLOW = ("regex", "yaml")
REGEX_TIMEOUT_S = 0.2
"""A search that takes longer fails its state, so that other states are not delayed."""


class Transform(msgspec.Struct, frozen=True, array_like=True):
    """One transform. ``argument``: the path of ``json`` and ``yaml`` (``a.b.0``), the pattern of ``regex``,
    the kind of list and an index for ``items`` (``numbered.0``), the tag of ``xml``, the format of ``date``,
    the values of ``enum`` as a JSON list."""

    name: TransformName
    argument: str = ""


def check_written(transforms: tuple[Transform, ...]) -> None:
    """Raises ``BadArgument`` if there are too many, or if an argument is wrong. Compiles no pattern."""
    if len(transforms) > MAX_TRANSFORMS:
        raise BadArgument(f"a reference may have at most {MAX_TRANSFORMS} transforms, not {len(transforms)}")
    for transform in transforms:
        if transform.name != "regex" and not isinstance(transform.argument, str):
            raise BadArgument(f"{transform.name}: the argument must be text, not {transform.argument!r:.60}")
        if transform.name in _CHECKS:
            _CHECKS[transform.name](transform.argument)


def check_transforms(transforms: tuple[Transform, ...]) -> None:
    """Raises ``BadArgument`` for transforms that cannot be applied. Compiles the patterns, which may take
    long, so a server only uses ``apply_in_turn``."""
    check_written(transforms)
    for transform in transforms:
        if transform.name == "regex":
            compiled(transform.argument)


def compiled(pattern: str) -> regex.Pattern[str]:
    """The compiled pattern. ``BadArgument`` if it is not a regular expression."""
    if not isinstance(pattern, str) or not 0 < len(pattern) <= MAX_PATTERN_CHARS:
        raise BadArgument(
            f"a pattern must be a string of 1 to {MAX_PATTERN_CHARS} characters, not {pattern!r:.60}",
            param="pattern",
        )
    try:
        return client_pattern.compiled(pattern)
    except InvalidPattern as error:
        shown = f"{pattern!r:.60}"
        raise BadArgument(f"{shown} is not a regular expression: {error}", param="pattern") from None


def apply_transforms(text: str, transforms: tuple[Transform, ...]) -> str:
    """The result of all transforms of ``text``. ``RunFailed`` if one of them does not find its target,
    ``BadArgument`` for an invalid pattern."""
    for transform in transforms:
        text = _STEPS[transform.name](text, transform.argument)
    return text


async def apply_in_turn(
    text: str, transforms: tuple[Transform, ...], limiter: anyio.CapacityLimiter | None = None
) -> str:
    """``apply_transforms`` for an event loop: searches, and all transforms of long texts, run in a thread."""
    if transforms and (len(text) > MAX_INLINE_CHARS or any(one.name in _SLOW for one in transforms)):
        # Through a list that is emptied here: a thread still holds its result for a moment after it has given
        # it, and an error that is raised here would hold all frames of the caller for as long.
        outcome: list[str | Exception] = []
        await anyio.to_thread.run_sync(_attempt, outcome, text, transforms, limiter=limiter)
        found = outcome.pop()
        if isinstance(found, Exception):
            try:
                raise found
            finally:
                del found
        return found
    return apply_transforms(text, transforms)


def _attempt(outcome: list[str | Exception], text: str, transforms: tuple[Transform, ...]) -> None:
    """Appends the result, or the error."""
    try:
        outcome.append(apply_transforms(text, transforms))
    except Exception as error:
        outcome.append(error)


def _regex(text: str, pattern: str) -> str:
    try:
        found = compiled(pattern).search(text, timeout=REGEX_TIMEOUT_S)
    except TimeoutError:
        raise RunFailed(f"regex({pattern!r}): the search takes too long; simplify the pattern") from None
    if found is None:
        raise RunFailed(f"regex({pattern!r}) finds nothing in {shorten_text(text)}")
    return str(found.group(1) or "") if compiled(pattern).groups else str(found.group())


def _in_pieces(convert: Callable[[str], str], text: str) -> str:
    """``convert(text)``, in pieces between which other threads run: ``str.upper`` holds the GIL.

    A text is cut after a character that is neither cased nor ignored when Python looks for cased ones: only
    the lower case of a sigma depends on the characters around it.
    """
    pieces, start = [], 0
    while len(text) - start > MAX_INLINE_CHARS:
        end = start + MAX_INLINE_CHARS
        while end > start and not (text[end - 1].isspace() or text[end - 1].isdigit()):
            end -= 1
        if end == start:
            end = start + MAX_INLINE_CHARS if "Σ" not in text else len(text)
        pieces.append(convert(text[start:end]))
        start = end
    return "".join([*pieces, convert(text[start:])])


_STEPS: dict[str, Callable[[str, str], str]] = {
    "strip": lambda text, _: text.strip(),
    "lower": lambda text, _: _in_pieces(str.lower, text),
    "upper": lambda text, _: _in_pieces(str.upper, text),
    "first_line": lambda text, _: text.strip().partition("\n")[0].strip(),
    "json": text_parts.json_value,
    "regex": _regex,
    "items": text_parts.items,
    "xml": text_parts.xml,
    "yaml": text_parts.yaml_value,
    "number": text_parts.number,
    "date": text_parts.iso_date,
    "enum": text_parts.one_of,
}
_CHECKS: dict[str, Callable[[str], None]] = {
    "items": text_parts.check_items,
    "xml": text_parts.check_tag,
    "date": text_parts.check_date_format,
    "enum": text_parts.check_words,
}
