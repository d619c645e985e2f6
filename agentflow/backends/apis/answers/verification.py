"""Checks of finished answers against constraints that the API did not enforce."""

from __future__ import annotations

import json
from typing import Any, Final, Literal

import msgspec

from agentflow.errors import BadArgument, NotSupported
from agentflow.language.typed.tags import matches_whole, split_at_tags
from agentflow.protocol.constraint import Constraint, ConstraintKind

OnUnsupported = Literal["error", "retry"]
"""How a backend treats a constraint that its API cannot enforce: refuse it, or check the answers."""
CHECKED_KINDS: Final[tuple[ConstraintKind, ...]] = ("regex", "schema", "choices", "tags")
"""The kinds of constraints that can be checked here."""
MAX_SHOWN_CHARS = 2_000
"""The length of a constraint's source in a prompt."""


def fault_of(constraint: Constraint, text: str) -> str | None:
    """How ``text`` violates the constraint, for the model; None if it does not. ``NotSupported`` for a
    grammar, which cannot be checked here.

    >>> fault_of(Constraint("choices", choices=("yes", "no")), "maybe")
    "'maybe' is none of the choices"
    >>> fault_of(Constraint("regex", "[0-9]+"), "12")
    """
    found = _fault_of(constraint, text)
    if found is None or constraint.instead is None:
        return found
    return None if _fault_of(constraint.instead, text) is None else found


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


def _fault_of(constraint: Constraint, text: str) -> str | None:
    match constraint.kind:
        case "choices":
            return None if text in constraint.choices else f"{text!r:.200} is none of the choices"
        case "regex":
            try:
                matches = matches_whole(constraint.source, text)
            except BadArgument:
                raise
            except ValueError as error:
                return str(error)
            return None if matches else "it does not match the regular expression"
        case "schema":
            return _fault_of_json(msgspec.json.decode(constraint.source), text)
        case "tags":
            try:
                split_at_tags(text, constraint.tags())
            except BadArgument:
                raise
            except (ValueError, RecursionError) as error:
                return str(error)
            return None
        case "grammar":
            raise NotSupported(
                "answers cannot be checked against a grammar here: use a regex or a schema, or a server that "
                "enforces grammars"
            )


def _fault_of_json(schema: Any, text: str) -> str | None:
    try:
        from jsonschema import Draft202012Validator
        from jsonschema.exceptions import best_match
    except ImportError as error:
        raise NotSupported(
            f"checks of schemas need the package {error.name!r}: pip install 'agentflow-lm[api]'"
        ) from None
    try:
        value = json.loads(text)
        fault = best_match(Draft202012Validator(schema).iter_errors(value))
    except ValueError as error:
        return f"it is not JSON ({error})"
    except RecursionError:
        return "it is nested too deeply"
    return None if fault is None else f"{fault.json_path}: {fault.message:.500}"
