"""The fields for constraints that servers with OpenAI's API have.

A request may have one of them. ``regex`` and ``grammar`` are agentflow's, ``guided_*`` and
``structured_outputs`` vLLM's, and ``ebnf`` SGLang's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from agentflow.errors import BadArgument
from agentflow.protocol.bounds.json_bounds import schema_constraint
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.grammars.gbnf import read_gbnf, rule_names
from agentflow.server.compatible.fields import is_given
from agentflow.server.errors import invalid_field

ANY_OBJECT = Constraint("schema", '{"type":"object"}')
MAX_EBNF_CHARS = 20_000
"""Reading a grammar holds up the server's other requests."""


def only_form(found: Sequence[tuple[str, Constraint]], default: str) -> tuple[str, Constraint | None]:
    """Returns the only constraint and its field; ``default`` and None without one. ``ApiError`` if there are
    several."""
    if len(found) > 1:
        raise invalid_field(found[-1][0], f"it excludes {found[0][0]}: give one of them")
    return found[0] if found else (default, None)


def read_forms(
    prefix: str,
    *,
    json: msgspec.Raw | None = None,
    json_schema: msgspec.Raw | None = None,
    regex: str | None = None,
    choice: list[str] | None = None,
    grammar: str | None = None,
    ebnf: str | None = None,
) -> Iterator[tuple[str, Constraint]]:
    """The constraint of each field that has a value, with the field's name.

    Args:
        prefix: the beginning of the fields' names.
        json: a JSON schema, or its text.
        json_schema: another name for ``json``.
        regex: a pattern.
        choice: the allowed answers.
        grammar: a grammar in Lark's notation, or in EBNF.
        ebnf: a grammar in EBNF.
    """
    for name, schema in (("json", json), ("json_schema", json_schema)):
        if schema is not None and is_given(schema):
            yield f"{prefix}{name}", _schema(schema, f"{prefix}{name}")
    if regex is not None:
        yield f"{prefix}regex", Constraint("regex", regex)
    if choice is not None:
        yield f"{prefix}choice", Constraint("choices", choices=tuple(choice))
    if grammar is not None:
        yield f"{prefix}grammar", _grammar(grammar, f"{prefix}grammar")
    if ebnf is not None:
        yield f"{prefix}ebnf", _ebnf(ebnf, f"{prefix}ebnf")


def _schema(given: msgspec.Raw, param: str) -> Constraint:
    """The constraint of a JSON schema, given as an object or as its text."""
    if bytes(memoryview(given)[:1]) == b'"':
        given = msgspec.Raw(msgspec.json.decode(given, type=str).strip().encode())
    return schema_constraint(given, param)


def _grammar(source: str, param: str) -> Constraint:
    """A grammar in Lark's notation, or in EBNF, which writes rules with ``::=``."""
    return _ebnf(source, param) if rule_names(source) else Constraint("grammar", source)


def _ebnf(source: str, param: str) -> Constraint:
    if len(source) > MAX_EBNF_CHARS:
        raise invalid_field(param, f"an EBNF grammar has at most {MAX_EBNF_CHARS:,} characters")
    try:
        read_gbnf(source)
    except BadArgument as error:
        raise invalid_field(param, f"the EBNF grammar is not valid: {error}") from None
    return Constraint("grammar", source)
