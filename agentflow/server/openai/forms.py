"""The form of an answer, in any of the spellings that servers of OpenAI's API have for it.

Each field that asks for a form becomes a constraint, and a request may have one of them. ``regex`` and
``grammar`` are the server's own, ``guided_*`` and ``structured_outputs`` vLLM's, ``ebnf`` SGLang's.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from agentflow.engine.grammar.ebnf import lark_of_ebnf
from agentflow.errors import BadArgument
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.json_bounds import schema_constraint
from agentflow.server.http.errors import invalid_field
from agentflow.server.openai.types import SharedFields, StructuredOutputs, is_given

ANY_OBJECT = Constraint("schema", '{"type":"object"}')


def constraint_of(
    request: SharedFields, response_format: Constraint | None = None
) -> tuple[str, Constraint | None]:
    """The field that asks for a form, and its constraint. ``ApiError`` if there are several, ``BadArgument``
    for a schema or a grammar that is not valid."""
    found = [*_forms(request)]
    if response_format is not None:
        found.append(("response_format", response_format))
    if len(found) > 1:
        raise invalid_field(found[-1][0], f"it excludes {found[0][0]}: give one of them")
    return found[0] if found else ("response_format", None)


def _forms(request: SharedFields) -> Iterator[tuple[str, Constraint]]:
    if request.regex is not None:
        yield "regex", Constraint("regex", request.regex)
    if request.grammar is not None:
        yield "grammar", _grammar(request.grammar, "grammar")
    if request.ebnf is not None:
        yield "ebnf", _ebnf(request.ebnf, "ebnf")
    if request.guided_json is not None and is_given(request.guided_json):
        yield "guided_json", schema_of(request.guided_json, "guided_json")
    if request.guided_regex is not None:
        yield "guided_regex", Constraint("regex", request.guided_regex)
    if request.guided_choice is not None:
        yield "guided_choice", _choices(request.guided_choice, "guided_choice")
    if request.guided_grammar is not None:
        yield "guided_grammar", _grammar(request.guided_grammar, "guided_grammar")
    if request.structured_outputs is not None:
        yield from _structured(request.structured_outputs)


def _structured(asked: StructuredOutputs) -> Iterator[tuple[str, Constraint]]:
    at = "structured_outputs"
    found: list[tuple[str, Constraint]] = []
    if asked.json is not None and is_given(asked.json):
        found.append((f"{at}.json", schema_of(asked.json, f"{at}.json")))
    if asked.regex is not None:
        found.append((f"{at}.regex", Constraint("regex", asked.regex)))
    if asked.choice is not None:
        found.append((f"{at}.choice", _choices(asked.choice, f"{at}.choice")))
    if asked.grammar is not None:
        found.append((f"{at}.grammar", _grammar(asked.grammar, f"{at}.grammar")))
    if asked.json_object:
        found.append((f"{at}.json_object", ANY_OBJECT))
    if not found:
        raise invalid_field(at, "it needs one of json, regex, choice, grammar and json_object")
    yield from found


def schema_of(given: msgspec.Raw, param: str) -> Constraint:
    """The constraint of a JSON schema, given as an object or as its text."""
    if bytes(memoryview(given)[:1]) == b'"':
        given = msgspec.Raw(msgspec.json.decode(given, type=str).strip().encode())
    return schema_constraint(given, param)


def _choices(choices: list[str], param: str) -> Constraint:
    constraint = Constraint("choices", choices=tuple(choices))
    try:
        return constraint.check()
    except BadArgument as error:
        raise invalid_field(param, str(error)) from None


def _grammar(source: str, param: str) -> Constraint:
    """A grammar in Lark's notation, or in EBNF, which writes rules with ``::=``."""
    return _ebnf(source, param) if "::=" in source else Constraint("grammar", source)


def _ebnf(source: str, param: str) -> Constraint:
    try:
        return Constraint("grammar", lark_of_ebnf(source))
    except BadArgument as error:
        raise invalid_field(param, str(error)) from None
