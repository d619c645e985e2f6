"""Checks of finished answers against their constraints: of those that the API does not enforce, and of those
that it claims to enforce, since servers ignore constraints or read them differently.

Clients choose constraints and models write texts, so a check has limits. A short one begins on the event loop
with a small limit, and goes on in a thread with a larger one. Beyond that it is given up (``CannotCheck``).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import anyio.to_thread
import msgspec

from agentflow.backends.apis.grammars.gbnf import read_pattern
from agentflow.backends.apis.grammars.lark_grammar import read_grammar
from agentflow.errors import BadArgument, NotSupported
from agentflow.language.typed.tags import InTag, split_at_tags
from agentflow.protocol.bounds.client_pattern import CannotCheck, InvalidPattern, compiled
from agentflow.protocol.constraint import Constraint, ConstraintKind
from agentflow.protocol.grammars.recognition import START, Recognizer
from agentflow.protocol.sampling import GenParams

if TYPE_CHECKING:
    from agentflow.protocol.bounds.schema_check import SchemaCheck

OnUnsupported = Literal["error", "retry"]
"""How a backend treats a constraint that its API cannot enforce: refuse it, or check the answers."""
CHECKED_KINDS: Final[tuple[ConstraintKind, ...]] = ("regex", "schema", "choices", "tags")
"""The kinds of constraints that a backend may leave to the checks: some grammars cannot be checked."""
MAX_SHOWN_CHARS = 2_000
"""The length of a constraint's source in a prompt."""
MAX_REMEMBERED_CHARS: Final = 20_000
"""The longest source whose compiled check is kept."""
_SMALL_CHARS: Final = 2_000
"""The longest source and text whose check begins on the event loop."""
_SCHEMA_CHECK: Final = "agentflow.protocol.bounds.schema_check"


@dataclass(frozen=True, slots=True)
class CheckLimits:
    """The limits of one check.

    Attributes:
        steps: The steps for a schema or grammar, each a few microseconds at most.
        steps_of_a_char: Further steps for each character of the text.
        seconds: The time for patterns.
    """

    steps: int
    steps_of_a_char: int
    seconds: float

    def for_text(self, text: str) -> int:
        """The steps for one text."""
        return self.steps + self.steps_of_a_char * len(text)


INLINE: Final = CheckLimits(300, 0, 0.002)
"""About two milliseconds of the event loop."""
FULL: Final = CheckLimits(50_000, 40, 0.2)

TextCheck: TypeAlias = Callable[[str, CheckLimits, "Sequence[str]"], "str | None"]
"""Takes a text, the limits, and for a text that a stop has ended the texts with which it may have gone on.
Returns how it violates the constraint, or None."""


async def found_fault(constraint: Constraint, text: str, cut_by: Sequence[str] = ()) -> str | None:
    """``find_fault`` for an event loop.

    Raises:
        CannotCheck: The check takes too long, or the constraint cannot be checked.
        BadArgument: The constraint is invalid.
    """
    if constraint.kind == "choices" and constraint.instead is None:
        return find_fault(constraint, text, cut_by)
    # Small grammars may be large automata, and the first schema imports a package of 60 ms.
    begins_here = constraint.kind == "regex" or (constraint.kind == "schema" and _SCHEMA_CHECK in sys.modules)
    if begins_here and len(constraint.source) + len(text) <= _SMALL_CHARS:
        try:
            return find_fault(constraint, text, cut_by, INLINE)
        except CannotCheck:
            pass
    # Through a list, so that the thread keeps no error, whose frames hold the text.
    outcome: list[str | Exception | None] = []
    await anyio.to_thread.run_sync(_check_into, outcome, constraint, text, cut_by)
    found = outcome.pop()
    if isinstance(found, Exception):
        raise found
    return found


def _check_into(
    outcome: list[str | Exception | None], constraint: Constraint, text: str, cut_by: Sequence[str]
) -> None:
    try:
        outcome.append(find_fault(constraint, text, cut_by))
    except Exception as error:
        outcome.append(error)


def find_fault(
    constraint: Constraint, text: str, cut_by: Sequence[str] = (), limits: CheckLimits = FULL
) -> str | None:
    """How ``text`` violates the constraint, for the model; None if it does not.

    Args:
        constraint: The constraint.
        text: The text of the answer.
        cut_by: If a stop may have ended the text, the texts with which it may have gone on: it is then valid
            as the beginning of a valid one.
        limits: The limits of the check.

    Raises:
        CannotCheck: The check takes too long, or the constraint cannot be checked.
        BadArgument: The constraint is invalid.

    >>> find_fault(Constraint("choices", choices=("yes", "no")), "maybe")
    "'maybe' is none of the choices"
    >>> find_fault(Constraint("regex", "[0-9]+;"), "12", cut_by=[";"])
    """
    found = _find_fault(constraint, text, cut_by, limits)
    if found is None or constraint.instead is None:
        return found
    return None if _find_fault(constraint.instead, text, cut_by, limits) is None else found


def going_on(params: GenParams) -> tuple[str, ...]:
    """The texts with which an answer may have gone on that a stop has ended."""
    is_known = params.stop and params.stop_regex is None and not params.stop_token_ids
    return params.stop if is_known else (*params.stop, "")


def requirement(constraint: Constraint) -> str:
    """The constraint as a sentence for the model."""
    match constraint.kind:
        case "choices":
            return f"It must be exactly one of: {json.dumps(constraint.choices, ensure_ascii=False)}."
        case "regex":
            return f"All of it must match the regular expression {_shown(constraint.source)}"
        case "schema":
            return f"It must be JSON of this schema: {_shown(constraint.source)}"
        case _:
            return "It must have the required form."


def _shown(source: str) -> str:
    return source if len(source) <= MAX_SHOWN_CHARS else source[:MAX_SHOWN_CHARS] + "…"


def _find_fault(constraint: Constraint, text: str, cut_by: Sequence[str], limits: CheckLimits) -> str | None:
    match constraint.kind:
        case "choices":
            is_begun = any(choice.startswith(text + more) for choice in constraint.choices for more in cut_by)
            is_right = text in constraint.choices or is_begun
            return None if is_right else f"{text!r:.200} is none of the choices"
        case "tags":
            return None if cut_by else _fault_of_tags(constraint, text, limits)
        case kind:
            found = _check(kind, constraint.source)(text, limits, cut_by)
    # Servers without patterns, and llama.cpp, write numbers as JSON, which may have spaces around it.
    number = constraint.as_one_of(["schema"])
    if found is not None and number is not None and number is not constraint:
        return None if _check("schema", number.source)(text, limits, cut_by) is None else found
    return found


def _check(kind: ConstraintKind, source: str) -> TextCheck:
    """The check of a constraint, compiled once if its source is short enough to be kept."""
    make = _remembered_check if len(source) <= MAX_REMEMBERED_CHARS else _made_check
    return make(kind, source)


def _made_check(kind: ConstraintKind, source: str) -> TextCheck:
    if kind == "regex":
        return partial(_fault_of_pattern, source)
    if kind == "grammar":
        try:
            return partial(_fault_in, Recognizer(read_grammar(source)), "it is no text of the grammar")
        except NotSupported as error:
            raise CannotCheck(str(error)) from None
    try:
        from agentflow.protocol.bounds.schema_check import SchemaCheck
    except ImportError as error:
        raise CannotCheck(f"it needs the package {error.name!r}: pip install 'agentflow-lm[api]'") from None
    return partial(_fault_of_json, SchemaCheck(msgspec.json.decode(source)))


_remembered_check = lru_cache(maxsize=32)(_made_check)


def _fault_of_pattern(pattern: str, text: str, limits: CheckLimits, cut_by: Sequence[str]) -> str | None:
    wrong = "it does not match the regular expression"
    try:
        matcher = compiled(pattern)
        match = partial(matcher.fullmatch, timeout=limits.seconds, concurrent=True)
        if match(text) is not None:
            return None
        return None if any(match(text + more, partial=True) is not None for more in cut_by) else wrong
    except InvalidPattern as error:
        invalid: Exception | None = BadArgument(f"{pattern!r:.200} is not a regular expression: {error}")
    except (TimeoutError, RecursionError):  # a search that goes back too often: an automaton never does
        invalid = None
    try:
        return _fault_in(_recognizer(pattern), wrong, text, limits, cut_by)
    except NotSupported:
        raise invalid or CannotCheck(f"matching {pattern!r:.200} takes too long") from None


@lru_cache(maxsize=8)
def _recognizer(pattern: str) -> Recognizer:
    return Recognizer({START: read_pattern(pattern)})


def _fault_in(
    recognizer: Recognizer, wrong: str, text: str, limits: CheckLimits, cut_by: Sequence[str]
) -> str | None:
    steps = limits.for_text(text)
    is_right = recognizer.recognize(text, most_steps=steps) == "whole" or any(
        recognizer.recognize(text + more, most_steps=steps) != "none" for more in cut_by
    )
    return None if is_right else wrong


def _fault_of_json(check: SchemaCheck, text: str, limits: CheckLimits, cut_by: Sequence[str]) -> str | None:
    found = check.violations(text, most_steps=limits.for_text(text), most_pattern_s=limits.seconds)
    is_cut = bool(cut_by) and found.paths == [()]  # no whole JSON
    return None if is_cut else found.message or None


def _fault_of_tags(constraint: Constraint, text: str, limits: CheckLimits) -> str | None:
    tags = constraint.tags()
    try:
        pieces = split_at_tags(text, tags)
    except BadArgument:
        raise
    except (ValueError, RecursionError) as error:
        return str(error)
    for piece in pieces:
        if isinstance(piece, InTag):
            tag = tags[piece.index]
            found = find_fault(Constraint(tag.kind, tag.source), piece.text, limits=limits)
            if found is not None:
                return f"after {tag.begin!r}: {found}"
    return None
