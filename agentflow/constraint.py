"""Constraints: what shape the text of a generation must have.

A backend says in its capabilities which kinds it can keep; the others are refused before anything runs.
How a value is made of the text again is the client's business (``value_type``).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from agentflow.errors import BadArgument

ConstraintKind = Literal["regex", "schema", "choices", "grammar"]
CONSTRAINT_KINDS: tuple[ConstraintKind, ...] = ("regex", "schema", "choices", "grammar")

MAX_SOURCE_CHARS = 200_000
MAX_CONSTRAINT_CHOICES = 1000


class Constraint(msgspec.Struct, frozen=True, omit_defaults=True):
    """``source``: the regular expression that all of the text matches, the JSON schema (as JSON), or the
    grammar (Lark's notation). ``choices``: of these one, whole."""

    kind: ConstraintKind
    source: str = ""
    choices: tuple[str, ...] = ()

    def check(self) -> Constraint:
        """Itself, or ``BadArgument`` where it cannot be one."""
        if self.kind == "choices":
            if not all(isinstance(choice, str) and choice for choice in self.choices):
                raise BadArgument("choices: each must be a string, and not an empty one")
            if not 0 < len(set(self.choices)) == len(self.choices) <= MAX_CONSTRAINT_CHOICES:
                raise BadArgument(f"choices: 1 to {MAX_CONSTRAINT_CHOICES} of them, each once")
        elif not isinstance(self.source, str) or not 0 < len(self.source) <= MAX_SOURCE_CHARS:
            raise BadArgument(f"{self.kind}: a string of 1 to {MAX_SOURCE_CHARS} characters is needed")
        return self
