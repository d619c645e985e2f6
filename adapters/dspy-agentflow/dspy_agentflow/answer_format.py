"""The text that an adapter reads the output fields of a signature from, as a constraint on what a model says;
and how to bring an answer to its end that was cut off.

Such a text is a row of heads and values, and a tail: ``[[ ## answer ## ]]`` and what follows it, or
``"answer": `` and what follows that.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import dspy
import pydantic

from agentflow.protocol.chat import hoisted
from dspy_agentflow.field_values import (
    FieldValue,
    chat_value,
    escaped,
    json_value,
    quoted,
    schema_of,
    short_schema,
)

_END: Final = "[[ ## completed ## ]]"
_UNCLEAR = (pydantic.PydanticInvalidForJsonSchema, pydantic.PydanticSchemaGenerationError)


@dataclass(frozen=True)
class AnswerFormat:
    """``heads[i]`` stands before ``values[i]``, ``tail`` after the last one. ``schema``: of all of it,
    where it is JSON."""

    heads: tuple[str, ...]
    values: tuple[FieldValue, ...]
    tail: str
    schema: dict[str, Any] | None = None

    def constraint(self) -> dict[str, Any]:
        """The argument of ``af.reply`` that says so."""
        if self.schema is not None:
            return {"schema": self.schema}
        return _constraint([*_pairs(self.heads, self.values), (self.tail, None)])

    def rest(self, text: str) -> Rest | None:
        """What a text lacks that was cut off. None where it lacks nothing, or is none of this format."""
        return _Reader(self, text).rest()

    def num_certain(self, text: str) -> int:
        """So many characters of a text that grows stay, wherever it is cut off: half of a value that is no
        free text would be said again."""
        rest = self.rest(text)
        return len(text) if rest is None else len(rest.kept)


@dataclass(frozen=True)
class Rest:
    """``kept``: so much of the text stays. ``constraint``: of what has to follow, the argument of
    ``af.reply``; where free text stood open, it ends there."""

    kept: str
    constraint: dict[str, Any]


class _Reader:
    """Reads a text that was cut off, up to its end."""

    def __init__(self, answer_format: AnswerFormat, text: str) -> None:
        self._format = answer_format
        self._text = text
        self._place = 0

    def rest(self) -> Rest | None:
        found = self._format
        for index, value in enumerate(found.values):
            begins = self._place
            if not self._text.startswith(found.heads[index], begins):
                return self._from(index, found.heads[index], self._text) if self._is_cut_in(index) else None
            self._place += len(found.heads[index])
            literal = found.heads[index + 1] if index + 1 < len(found.heads) else found.tail
            if self._skip(value, literal):
                continue
            if not value.is_text:  # half of a number or of a list is no value: it is said again
                return self._from(index, found.heads[index], self._text[:begins], is_whole=True)
            return self._closed(index + 1, literal)
        if self._text.startswith(found.tail, self._place):
            return None
        return self._from(len(found.values), found.tail, self._text)

    def _is_cut_in(self, index: int) -> bool:
        return self._format.heads[index].startswith(self._text[self._place :])

    def _skip(self, value: FieldValue, literal: str) -> bool:
        """Over the value, if it is all there."""
        if self._format.schema is None:
            end = self._text.find(literal, self._place)
            self._place = self._place if end < 0 else end
            return end >= 0
        try:
            _, end = json.JSONDecoder().raw_decode(self._text, self._place)
        except ValueError:
            return False
        if not value.is_text and end == len(self._text):
            return False  # more digits might have followed
        self._place = end
        return True

    def _closed(self, index: int, literal: str) -> Rest:
        """Free text stands open: it ends here."""
        closing = "" if self._format.schema is None else _end_of_string(self._text)
        return self._from(index, literal, self._text, closing=closing)

    def _from(
        self, index: int, literal: str, kept: str, *, closing: str = "", is_whole: bool = False
    ) -> Rest:
        """What follows ``kept``: the head of a value (or the tail), the value, and so on."""
        found = self._format
        done = 0 if is_whole or closing else _common(kept, literal)
        heads = (closing + literal[done:], *found.heads[index + 1 :], found.tail)
        values = [_shortened(value) for value in found.values[index:]]
        return Rest(kept, _constraint([*zip(heads, values, strict=False), (heads[len(values)], None)]))


def _shortened(value: FieldValue) -> FieldValue:
    if value.is_text:
        return FieldValue(regex=value.short)
    return value if value.schema is None else FieldValue(schema=short_schema(value.schema))


def _common(text: str, literal: str) -> int:
    """So many characters at the end of the text begin the literal."""
    sizes = range(min(len(text), len(literal)), 0, -1)
    return next((size for size in sizes if text.endswith(literal[:size])), 0)


def _end_of_string(text: str) -> str:
    """What ends the JSON string that the text ends in; first an escape that stands half."""
    half = re.search(r"(?<!\\)(?:\\\\)*(\\u[0-9a-fA-F]{0,3}|\\)$", text)
    if half is None:
        return '"'
    return "\\" + '"' if half[1] == "\\" else "0" * (6 - len(half[1])) + '"'


Part = tuple[str, FieldValue | None]


def _pairs(heads: Sequence[str], values: Sequence[FieldValue]) -> list[Part]:
    return list(zip(heads, values, strict=True))


def _constraint(parts: Sequence[Part]) -> dict[str, Any]:
    """A regular expression where all of it is one; else a grammar of those that stand between JSON values."""
    runs: list[str] = [""]
    schemas: list[dict[str, Any]] = []
    for head, value in parts:
        runs[-1] += escaped(head)
        if value is not None and value.schema is not None:
            schemas.append(value.schema)
            runs.append("")
        elif value is not None:
            runs[-1] += value.regex
    if not schemas:
        return {"regex": runs[0]}
    lines = [
        "start: " + " ".join([f"RUN_{n} value_{n}" for n in range(len(schemas))]) + f" RUN_{len(schemas)}"
    ]
    lines += [f"RUN_{n}: /{run.replace('/', chr(92) + '/')}/" for n, run in enumerate(runs)]
    lines += [f"value_{n}: %json {_compact(schema)}" for n, schema in enumerate(schemas)]
    return {"grammar": "\n".join(lines)}


def _compact(schema: dict[str, Any]) -> str:
    layout = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return json.dumps({**schema, "x-guidance": layout})


def format_of(adapter: Any, signature: Any) -> AnswerFormat | None:
    """Of the answers that the adapter reads; None for adapters whose format is not known here."""
    fields = {name: field.annotation for name, field in signature.output_fields.items()}
    try:
        if fields and _reads_as(adapter, dspy.ChatAdapter):
            return _chat_format(fields)
        if fields and _reads_as(adapter, dspy.JSONAdapter):
            return _json_format(fields)
    except _UNCLEAR:
        pass  # a type that has no schema: the adapter has to do with what comes
    return None


def _reads_as(adapter: Any, known: Any) -> bool:
    """DSPy makes subclasses that only ask differently."""
    return inspect.unwrap(type(adapter).parse) is inspect.unwrap(known.parse)


def _chat_format(fields: dict[str, Any]) -> AnswerFormat:
    heads = [f"[[ ## {name} ## ]]\n" for name in fields]
    return AnswerFormat(
        (heads[0], *["\n\n" + head for head in heads[1:]]),
        tuple([chat_value(annotation) for annotation in fields.values()]),
        f"\n\n{_END}",
    )


def _json_format(fields: dict[str, Any]) -> AnswerFormat:
    heads = [f"{quoted(name)}: " for name in fields]
    schemas: dict[str, Any] = {}
    definitions: dict[str, Any] = {}
    for name, annotation in fields.items():
        schemas[name] = hoisted(name, schema_of(annotation), definitions)  # classes may have one name
    schema = {
        "type": "object",
        "properties": schemas,
        "required": list(fields),
        "additionalProperties": False,
        **({"$defs": definitions} if definitions else {}),
    }
    return AnswerFormat(
        ("{" + heads[0], *[", " + head for head in heads[1:]]),
        tuple([json_value(annotation) for annotation in fields.values()]),
        "}",
        schema,
    )
