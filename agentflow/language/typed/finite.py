"""The texts that a constraint allows, if they are few: for a gen that is scored like a select.

``finite_texts`` lists the texts of a pattern, of a JSON schema and of choices. It supports the parts of both
that are usual in finite languages and refuses all others, so the list is always complete. JSON is written as
the constraint's ``whitespace`` requires, objects in the order of their properties.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from re import _constants  # type: ignore[attr-defined]
from typing import Any, Final, TypeAlias

from agentflow.errors import BadArgument
from agentflow.protocol.bounds.client_pattern import parsed
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.ops import MAX_CHOICES
from agentflow.protocol.schemas.walk import ANNOTATIONS, has_type

MAX_TEXT_CHARS: Final = 100_000
"""The characters of all texts together."""
_MAX_DEPTH: Final = 40
_SURROGATES: Final = range(0xD800, 0xE000)

_Texts: TypeAlias = "dict[str, None]"
"""Different texts in their order."""


def finite_texts(constraint: Constraint | None) -> tuple[str, ...]:
    """Returns all texts that the constraint allows, at most ``MAX_CHOICES``.

    >>> finite_texts(Constraint("regex", "[1-3]|none"))
    ('1', '2', '3', 'none')

    Raises:
        BadArgument: There are more, the empty text is one of them, or they cannot be listed.
    """
    if constraint is None:
        raise _refused("free text has no end of possible texts: give a schema, for example")
    if constraint.kind == "choices":
        return constraint.choices
    try:
        if constraint.kind == "regex":
            found = _of_pattern(constraint.source)
        elif constraint.kind == "schema":
            found = _SchemaTexts(constraint).of(json.loads(constraint.source))
        else:
            raise _refused(f"the texts of {constraint.kind} are not listed: give a regex or a schema")
    except RecursionError:
        raise _refused("the constraint is nested too deeply") from None
    if not found:
        raise _refused("the constraint allows no text")
    if "" in found:
        raise _refused("the constraint allows the empty text, which has no score")
    return tuple(found)


def _refused(why: str) -> BadArgument:
    return BadArgument(f"gen: scored=True: {why}", param="scored")


def _too_many() -> BadArgument:
    return _refused(
        f"the constraint allows more than {MAX_CHOICES:,} texts, or more than {MAX_TEXT_CHARS:,} characters: "
        "narrow it, or leave scored out"
    )


def _bounded(texts: Iterable[str]) -> _Texts:
    """The texts, each once. ``BadArgument`` if there are too many."""
    found: _Texts = {}
    num_chars = 0
    for text in texts:
        if text not in found:
            found[text] = None
            num_chars += len(text)
            if len(found) > MAX_CHOICES or num_chars > MAX_TEXT_CHARS:
                raise _too_many()
    return found


def _joined(parts: Iterable[_Texts]) -> _Texts:
    """Each text of the first part followed by each of the second, and so on."""
    found: _Texts = {"": None}
    for part in parts:
        found = _bounded(start + end for start in found for end in part)
    return found


def _repeated(part: _Texts, least: int, most: int | None) -> _Texts:
    """The part ``least`` to ``most`` times; None: unlimited."""
    if not part or set(part) == {""}:
        return {"": None} if part or least == 0 else {}
    if most is None:
        raise _too_many()
    if len(part) == 1:
        [text] = part
        if len(text) * most > MAX_TEXT_CHARS:
            raise _too_many()
        return _bounded(text * count for count in range(least, most + 1))
    found = _joined([part] * min(least, MAX_CHOICES))  # n of two texts and more are over n texts
    every: _Texts = dict(found)
    for _ in range(most - least):
        found = _joined([found, part])
        every = _bounded([*every, *found])
    return every


def _of_pattern(pattern: str) -> _Texts:
    try:
        tree = parsed(pattern)
    except (re.error, OverflowError, ValueError) as error:
        raise _refused(f"not a valid Python pattern: {error}") from None
    except RecursionError:
        raise _refused("it is nested too deeply") from None
    _check_flags(tree.state.flags)
    return _of_items(list(tree), at_start=True, at_end=True)


def _of_items(items: Sequence[Any], *, at_start: bool, at_end: bool) -> _Texts:
    """The texts of a sequence, which begins or ends the whole text."""
    last = len(items) - 1
    return _joined(
        _of_item(item, at_start=at_start and n == 0, at_end=at_end and n == last)
        for n, item in enumerate(items)
    )


def _of_item(item: Any, *, at_start: bool, at_end: bool) -> _Texts:
    op, value = item
    if op is _constants.LITERAL:
        return _chars([(value, value)])
    if op is _constants.IN:
        return _chars(_range(*member) for member in value)
    if op is _constants.BRANCH:
        options = [_of_items(list(option), at_start=at_start, at_end=at_end) for option in value[1]]
        return _bounded(text for option in options for text in option)
    if op is _constants.SUBPATTERN:
        _check_flags(value[1])
        return _of_items(list(value[3]), at_start=at_start, at_end=at_end)
    if op in (_constants.MAX_REPEAT, _constants.MIN_REPEAT):
        least, most, part = value
        inner = _of_items(list(part), at_start=False, at_end=False)
        return _repeated(inner, int(least), None if most is _constants.MAXREPEAT else int(most))
    if op is _constants.AT:
        if (at_start and value in _STARTS) or (at_end and value in _ENDS):
            return {"": None}
        raise _refused("anchors and word boundaries inside a pattern are not supported")
    if op in (_constants.ANY, _constants.NOT_LITERAL):
        raise _too_many()
    raise _refused(f"{str(op).lower()} in a pattern is not supported: write the texts out, as in a|b")


_STARTS: Final = (_constants.AT_BEGINNING, _constants.AT_BEGINNING_STRING)
_ENDS: Final = (_constants.AT_END, _constants.AT_END_STRING)


def _range(op: Any, value: Any) -> tuple[int, int]:
    """The first and the last character of a member of a class."""
    if op is _constants.LITERAL:
        return value, value
    if op is _constants.RANGE:
        first, last = value
        return first, last
    if op is _constants.NEGATE:
        raise _too_many()
    raise _refused(r"\d, \w and \s contain the characters of all scripts: write a class, as in [0-9]")


def _chars(ranges: Iterable[tuple[int, int]]) -> _Texts:
    return _bounded(
        chr(point) for first, last in ranges for point in range(first, last + 1) if point not in _SURROGATES
    )


def _check_flags(flags: int) -> None:
    if flags & re.IGNORECASE:
        raise _refused("(?i) is not supported: write both cases, as in [Yy]es")


class _SchemaTexts:
    """Lists the values of a JSON schema as the constraint writes them."""

    def __init__(self, constraint: Constraint) -> None:
        if constraint.whitespace == "free":
            raise _refused('whitespace="free" allows too many texts')
        self._root: Any = json.loads(constraint.source)
        gap = " " if constraint.whitespace == "compact" else ""
        self._comma, self._colon = f",{gap}", f":{gap}"
        self._depth = 0
        self._known: dict[str, _Texts] = {}  # by reference
        self._of_type: dict[Any, Callable[[Mapping[str, Any]], _Texts]] = {
            "null": partial(self._of_literals, [None]),
            "boolean": partial(self._of_literals, [True, False]),
            "integer": self._of_integer,
            "object": self._of_object,
        }

    def of(self, schema: Any) -> _Texts:
        """The texts of a schema. ``BadArgument`` if they cannot be listed."""
        if not isinstance(schema, dict):
            raise _too_many()
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise _refused("the schema is recursive, or nested too deeply")
        said = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
        found = self._of_constrained(said)
        self._depth -= 1
        return found

    def _of_constrained(self, said: dict[str, Any]) -> _Texts:
        for key, of_value in _IN_PLACE.items():
            if key in said:
                if len(said) > 1:
                    raise _refused(f"{key} next to other keywords of a schema is not supported")
                return of_value(self, said[key])
        for key in ("enum", "const"):
            if key in said:
                values = said[key] if key == "enum" else [said[key]]
                self._refuse_others(said, {key, "type"})
                if "type" in said and not all(has_type(value, said["type"]) for value in values):
                    raise _refused(f"{key} has values of another type than {said['type']!r}")
                return self._of_values(values)
        kind = said.pop("type", None)
        if not isinstance(kind, str) or kind not in self._of_type:
            raise _refused(f"a schema of type {kind!r} allows too many texts, or is not supported")
        return self._of_type[kind](said)

    def _of_literals(self, values: Sequence[Any], said: Mapping[str, Any]) -> _Texts:
        self._refuse_others(said, set())
        return self._of_values(values)

    def _of_values(self, values: Sequence[Any]) -> _Texts:
        try:
            return _bounded([self._written(value) for value in values])
        except ValueError as error:
            raise _refused(f"a value cannot be written as JSON: {error}") from None

    def _of_integer(self, said: Mapping[str, Any]) -> _Texts:
        self._refuse_others(said, {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
        if not all(type(limit) is int for limit in said.values()):
            raise _refused("the limits of an integer must be integers")
        least = [said["minimum"]] if "minimum" in said else []
        least += [said["exclusiveMinimum"] + 1] if "exclusiveMinimum" in said else []
        most = [said["maximum"]] if "maximum" in said else []
        most += [said["exclusiveMaximum"] - 1] if "exclusiveMaximum" in said else []
        if not least or not most:
            raise _too_many()
        return _bounded(str(number) for number in range(max(least), min(most) + 1))

    def _of_object(self, said: Mapping[str, Any]) -> _Texts:
        self._refuse_others(said, {"properties", "required", "additionalProperties"})
        properties = said.get("properties", {})
        if said.get("additionalProperties", not properties) is not False:
            raise _too_many()
        required = said.get("required", [])
        if not set(required) <= set(properties):
            raise _refused("an object requires a member that is not among its properties")
        members: _Texts = {"": None}
        for name, schema in properties.items():
            head = f"{self._written(name)}{self._colon}"
            values = [head + text for text in self.of(schema)]
            wanted = [before + (self._comma if before else "") + one for before in members for one in values]
            members = _bounded([*wanted, *([] if name in required else members)])
        return _bounded(f"{{{text}}}" for text in members)

    def _of_reference(self, reference: Any) -> _Texts:
        if not isinstance(reference, str):
            raise _refused(f"the schema has no definition {reference!r}")
        if reference in self._known:
            return self._known[reference]
        target = self._root
        for step in reference.removeprefix("#/").split("/"):
            name = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, dict) or name not in target:
                raise _refused(f"the schema has no definition {reference!r}")
            target = target[name]
        self._known[reference] = self.of(target)
        return self._known[reference]

    def _of_options(self, options: Any) -> _Texts:
        return _bounded(text for option in options for text in self.of(option))

    def _written(self, value: Any) -> str:
        separators = (self._comma, self._colon)
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=separators)

    def _refuse_others(self, said: Mapping[str, Any], known: set[str]) -> None:
        others = sorted(set(said) - known)
        if others:
            raise _refused(f"{others[0]} in a schema is not supported")


_IN_PLACE: Final[dict[str, Callable[[_SchemaTexts, Any], _Texts]]] = {
    "$ref": _SchemaTexts._of_reference,
    "anyOf": _SchemaTexts._of_options,
}
