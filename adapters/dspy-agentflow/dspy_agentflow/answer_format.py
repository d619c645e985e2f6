"""The output format that a DSPy adapter parses, as a constraint on the generated text.

``format_of`` derives an ``AnswerFormat`` from an adapter and a signature: literal heads (``[[ ## answer ##
]]`` or ``"answer": ``), each followed by a value, and a literal tail. ``constraint`` turns it into an
argument of ``af.reply``. For text that ``max_tokens`` truncated, ``rest`` returns the missing part. A
``FieldValue`` describes one value.
"""

from __future__ import annotations

import enum
import inspect
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin

import dspy
import pydantic

from agentflow.integrations import hoisted

_END: Final = "[[ ## completed ## ]]"
_UNCLEAR = (pydantic.PydanticInvalidForJsonSchema, pydantic.PydanticSchemaGenerationError)


@dataclass(frozen=True)
class AnswerFormat:
    """``heads[i]`` precedes ``values[i]``, and ``tail`` follows the last value. ``schema``: the JSON schema
    of the whole answer, if it is JSON."""

    heads: tuple[str, ...]
    values: tuple[FieldValue, ...]
    tail: str
    schema: dict[str, Any] | None = None

    def constraint(self) -> dict[str, Any]:
        """Returns the argument of ``af.reply`` that enforces the format."""
        if self.schema is not None:
            return {"schema": self.schema}
        return _constraint([*_pairs(self.heads, self.values), (self.tail, None)])

    def rest(self, text: str) -> Rest | None:
        """Returns the missing part of a truncated text; None if it is complete, or has another format."""
        return _Reader(self, text).rest()

    def num_certain(self, text: str) -> int:
        """Returns the number of characters of a growing text that are final, wherever it is truncated: an
        unfinished value that is not free text would be generated again."""
        rest = self.rest(text)
        return len(text) if rest is None else len(rest.kept)


@dataclass(frozen=True)
class Rest:
    """The missing part of a truncated text. ``kept``: the part of the text to keep. ``constraint``: the
    argument of ``af.reply`` for the text that must follow; it ends open free text."""

    kept: str
    constraint: dict[str, Any]


class _Reader:
    """Reads a truncated text up to its end."""

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
            if not value.is_text:  # an incomplete number or list is generated again
                return self._from(index, found.heads[index], self._text[:begins], is_whole=True)
            return self._closed(index + 1, literal)
        if self._text.startswith(found.tail, self._place):
            return None
        return self._from(len(found.values), found.tail, self._text)

    def _is_cut_in(self, index: int) -> bool:
        return self._format.heads[index].startswith(self._text[self._place :])

    def _skip(self, value: FieldValue, literal: str) -> bool:
        """Moves past the value, and returns whether it was complete."""
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
        """Ends open free text."""
        closing = "" if self._format.schema is None else _end_of_string(self._text)
        return self._from(index, literal, self._text, closing=closing)

    def _from(
        self, index: int, literal: str, kept: str, *, closing: str = "", is_whole: bool = False
    ) -> Rest:
        """Returns the part after ``kept``: from the head of value ``index`` (or the tail) to the end."""
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
    """Returns the number of characters at the end of the text with which the literal begins."""
    sizes = range(min(len(text), len(literal)), 0, -1)
    return next((size for size in sizes if text.endswith(literal[:size])), 0)


def _end_of_string(text: str) -> str:
    """Returns the characters that close the JSON string at the end of the text, and complete an escape."""
    half = re.search(r"(?<!\\)(?:\\\\)*(\\u[0-9a-fA-F]{0,3}|\\)$", text)
    if half is None:
        return '"'
    return "\\" + '"' if half[1] == "\\" else "0" * (6 - len(half[1])) + '"'


Part = tuple[str, "FieldValue | None"]


def _pairs(heads: Sequence[str], values: Sequence[FieldValue]) -> list[Part]:
    return list(zip(heads, values, strict=True))


def _constraint(parts: Sequence[Part]) -> dict[str, Any]:
    """Returns a regular expression, or if any value has a schema, a grammar with expressions between them."""
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
    """Returns the format that the adapter parses; None if this module does not know the adapter."""
    fields = {name: field.annotation for name, field in signature.output_fields.items()}
    try:
        if fields and _reads_as(adapter, dspy.ChatAdapter):
            return _chat_format(fields)
        if fields and _reads_as(adapter, dspy.JSONAdapter):
            return _json_format(fields)
    except _UNCLEAR:
        pass  # a type without a schema: the answer is not constrained
    return None


def _reads_as(adapter: Any, known: Any) -> bool:
    """DSPy has subclasses that change only the prompt."""
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
        schemas[name] = hoisted(name, schema_of(annotation), definitions)  # two classes may share a name
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


# Free text before a header: any text without ``[[ ##``. After a bracket, the expression reads on until the
# text cannot be a header, which may be after further brackets.
_BRACKETS: Final = r"(?:\[\[+ #?)*\[(?:[^\[]|\[+(?:[^\[ ]| (?:[^\[#]|#[^\[#])))"
_PROSE: Final = rf"(?:[^\s\[]|{_BRACKETS})(?:[^\[]|{_BRACKETS})*"
_SHORT_PROSE: Final = r"[^\s\[](?:[^\[]){0,80}"
_STRING_CHAR: Final = r'(?:[^"\\\x00-\x1f\x7f]|\\["\\/bfnrt])'
_NUMBERS: Final = {
    int: r"-?(?:0|[1-9][0-9]{0,17})",
    float: r"-?(?:0|[1-9][0-9]{0,14})(?:\.[0-9]{1,9})?",
}
_SHORT_STRING: Final = 30
_TEXT_TYPES: Final = ("Reasoning", "Code")


@dataclass(frozen=True)
class FieldValue:
    """A value with a JSON ``schema`` or a ``regex``. ``is_text``: free text, which may end anywhere;
    ``short``: a regular expression for a short one."""

    schema: dict[str, Any] | None = None
    regex: str = ""
    short: str = ""
    is_text: bool = False


def chat_value(annotation: Any) -> FieldValue:
    """Returns the format that ``dspy.ChatAdapter`` parses: text, words and numbers without quotes, everything
    else as JSON."""
    if _is_text(annotation) or _may_be_text(annotation):
        return FieldValue(regex=_PROSE, short=_SHORT_PROSE, is_text=True)
    words = _words(annotation)
    if words is not None:
        return FieldValue(regex="(?:" + "|".join([re.escape(word) for word in words]) + ")")
    if annotation in _NUMBERS:
        return FieldValue(regex=_NUMBERS[annotation])
    return FieldValue(schema=schema_of(annotation))


def json_value(annotation: Any) -> FieldValue:
    """Returns the format that ``dspy.JSONAdapter`` parses."""
    if _is_text(annotation):
        return FieldValue(regex=f'"{_STRING_CHAR}*"', short=f'"{_STRING_CHAR}{{0,80}}"', is_text=True)
    return FieldValue(schema=schema_of(annotation))


def schema_of(annotation: Any) -> dict[str, Any]:
    """Returns the JSON schema of a field. Raises pydantic's errors for a type without one."""
    if _is_text(annotation):
        return {"type": "string"}
    if inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
        return {"enum": _words(annotation)}
    return dict(_closed(pydantic.TypeAdapter(annotation).json_schema()))


def _closed(schema: Any) -> Any:
    """Forbids undeclared members, because a model might never stop generating them."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _closed(part) for key, part in schema.items()}
    if schema.get("type") == "object" and isinstance(schema.get("properties"), dict):
        found.setdefault("additionalProperties", False)
    return found


def short_schema(schema: Any) -> Any:
    """Returns a schema with short values: short strings, short lists, no undeclared members."""
    if not isinstance(schema, dict) or not schema:
        return {"type": "string", "maxLength": _SHORT_STRING} if schema in (True, {}) else schema
    if schema.keys() & {"enum", "const"}:
        return schema
    found = dict(schema)
    for key in ("properties", "$defs"):
        if key in schema:
            found[key] = {name: short_schema(part) for name, part in schema[key].items()}
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if key in schema:
            found[key] = [short_schema(part) for part in schema[key]]
    if "items" in schema:
        found["items"] = short_schema(schema["items"])
    match schema.get("type"):
        case "string" if not schema.keys() & {"pattern", "format", "minLength"}:
            found.setdefault("maxLength", _SHORT_STRING)
        case "array":
            found.setdefault("maxItems", max(2, schema.get("minItems", 0)))
        case "object" if "properties" not in schema:
            found |= {"properties": {}, "additionalProperties": False}
    return found


def _is_text(annotation: Any) -> bool:
    if annotation is str:
        return True
    named = [getattr(dspy, name, None) for name in _TEXT_TYPES]
    return inspect.isclass(annotation) and annotation in named


def _may_be_text(annotation: Any) -> bool:
    """Whether DSPy accepts any text for the type, as for ``str | None``."""
    return get_origin(annotation) in (Union, UnionType) and {str, NoneType} <= set(get_args(annotation))


def _words(annotation: Any) -> list[str] | None:
    """Returns the values of a type with few values, as text."""
    if annotation is bool:
        return ["True", "False"]
    if inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
        return [member.value if isinstance(member.value, str) else member.name for member in annotation]
    if get_origin(annotation) is Literal:
        values = get_args(annotation)
        return [str(value) for value in values] if all(isinstance(value, str) for value in values) else None
    return None


def escaped(literal: str) -> str:
    """Escapes a literal for a regular expression."""
    return "".join(
        [r"\n" if char == "\n" else char if char in '" #' else re.escape(char) for char in literal]
    )


def quoted(text: str) -> str:
    """Returns a text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)
