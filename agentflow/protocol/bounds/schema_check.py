"""Checks of JSON texts against JSON schemas of clients, with limited work.

The checks use the ``jsonschema`` package. Keywords are counted as steps and patterns are timed; a check that
exceeds its limits is given up. A compiled validator is faster, but cannot be interrupted, and a schema of
1 kB can take hours. References are not fetched.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from typing import Any, Final, NamedTuple, NoReturn, TypeAlias

from jsonschema import (
    Draft4Validator,
    Draft6Validator,
    Draft7Validator,
    Draft201909Validator,
    Draft202012Validator,
    ValidationError,
    validators,
)
from jsonschema.exceptions import best_match
from referencing import Registry
from referencing.jsonschema import DRAFT4, DRAFT6, DRAFT7, DRAFT201909, DRAFT202012

from agentflow.protocol.bounds.client_pattern import CannotCheck, compiled
from agentflow.protocol.schemas.walk import canonical_text

SchemaPath: TypeAlias = tuple[str, ...]

MOST_STEPS: Final = 20_000
"""The maximum number of steps of one check; they take about a tenth of a second."""
MOST_PATTERN_S: Final = 0.1
MOST_VIOLATIONS: Final = 5
"""The maximum number of violations that one check reports."""
_CHARS_OF_A_STEP: Final = 1_000
_MOST_SHOWN_CHARS: Final = 200


class Violations(NamedTuple):
    """The result of a check.

    Attributes:
        paths: The places in the schema of the violated keywords, at most ``MOST_VIOLATIONS``.
        message: The most relevant violation, with its place in the value; empty if there is none.
    """

    paths: list[SchemaPath]
    message: str = ""


class SchemaCheck:
    """The check of one schema.

    Args:
        schema: The JSON schema.

    Raises:
        CannotCheck: The schema cannot be read.

    >>> check = SchemaCheck({"type": "object", "properties": {"a": {"uniqueItems": True}}})
    >>> check.violations('{"a": [1, 1]}')
    Violations(paths=[('properties', 'a', 'uniqueItems')], message='$.a: two items are equal')
    """

    def __init__(self, schema: Any) -> None:
        try:
            self._validator = _validator(schema)
        except CannotCheck:
            raise
        # The library raises many kinds of errors for invalid schemas.
        except Exception as error:
            raise CannotCheck("the schema cannot be read") from error

    def violations(
        self, text: str, *, most_steps: int = MOST_STEPS, most_pattern_s: float = MOST_PATTERN_S
    ) -> Violations:
        """The violations in a JSON text.

        Args:
            text: The text.
            most_steps: The steps that the check may take.
            most_pattern_s: The seconds that its patterns may take.

        Raises:
            CannotCheck: The check exceeds its limits.
        """
        try:
            value = json.loads(text, parse_constant=_refuse_constant)
        except (json.JSONDecodeError, _NotJson) as error:
            return Violations([()], f"it is not JSON ({error})")
        except (ValueError, RecursionError):  # a number of thousands of digits
            raise CannotCheck("it is nested too deeply, or has a number that is too long") from None
        work = _Work(most_steps, most_pattern_s)
        token = _work.set(work)
        try:
            work.measure(value)
            errors = [*itertools.islice(self._validator.iter_errors(value), MOST_VIOLATIONS)]
        except CannotCheck:
            raise
        # Errors for invalid schemas again, and of the regex package for patterns.
        except Exception as error:
            raise CannotCheck("the schema cannot be read") from error
        finally:
            _work.reset(token)
        worst: Any = best_match(errors)
        shown = "" if worst is None else f"{worst.json_path}: {worst.message}"[: 2 * _MOST_SHOWN_CHARS]
        return Violations([tuple(map(str, error.absolute_schema_path)) for error in errors], shown)


class _NotJson(ValueError):
    pass


def _refuse_constant(name: str) -> NoReturn:
    raise _NotJson(f"{name} is no JSON")


@dataclass(slots=True)
class _Work:
    """The remaining work of a check. ``sizes``: the characters of each container, by its id."""

    steps: int
    pattern_s: float
    sizes: dict[int, int] = field(default_factory=dict)

    def measure(self, value: Any) -> int:
        """The number of characters of a value, including all values in it."""
        if isinstance(value, str):
            return len(value)
        if not isinstance(value, dict | list):
            return 1
        parts = itertools.chain(value, value.values()) if isinstance(value, dict) else value
        size = self.sizes[id(value)] = 1 + sum([self.measure(part) for part in parts])
        return size

    def spend(self, keyword: Any, instance: Any) -> None:
        """Counts one keyword with its value, and the instance, because an error would quote it."""
        if isinstance(keyword, dict):
            self.steps -= sum([1 + (len(one) if isinstance(one, list) else 0) for one in keyword.values()])
        elif isinstance(keyword, list):
            self.steps -= len(keyword)
        size = len(instance) if isinstance(instance, str) else self.sizes.get(id(instance), 1)
        self.steps -= 1 + size // _CHARS_OF_A_STEP
        if isinstance(instance, dict | list):
            self.steps -= len(instance)
        if self.steps < 0:
            raise CannotCheck("it takes too many steps")

    def matches(self, pattern: str, text: str) -> bool:
        """Whether a pattern matches some part of the text."""
        self.spend(None, text)
        if self.pattern_s <= 0:
            raise CannotCheck("its patterns take too long")
        began_s = time.perf_counter()
        found = compiled(pattern).search(text, timeout=self.pattern_s, concurrent=True)
        self.pattern_s -= time.perf_counter() - began_s
        return found is not None


_work: ContextVar[_Work] = ContextVar("work")

Keyword: TypeAlias = Callable[[Any, Any, Any, Any], Iterator[ValidationError] | None]


def _counted(keyword: Keyword) -> Keyword:
    def counted(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError] | None:
        _work.get().spend(value, instance)
        return keyword(validator, value, instance, schema)

    return counted


def _pattern(validator: Any, pattern: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(instance, str) and not _work.get().matches(pattern, instance):
        shown = f"{instance[:_MOST_SHOWN_CHARS]!r} does not match {pattern[:_MOST_SHOWN_CHARS]!r}"
        yield ValidationError(shown)


def _pattern_properties(validator: Any, named: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(instance, dict):
        for pattern, one in named.items():
            for name, value in instance.items():
                if _work.get().matches(pattern, name):
                    yield from validator.descend(value, one, path=name, schema_path=pattern)


def _additional(validator: Any, allowed: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if not isinstance(instance, dict):
        return
    known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    for name, value in instance.items():
        if name in known or any(_work.get().matches(pattern, name) for pattern in patterns):
            continue
        if allowed is False:
            yield ValidationError(f"the member {name[:_MOST_SHOWN_CHARS]!r} is not allowed")
        elif isinstance(allowed, dict):
            yield from validator.descend(value, allowed, path=name)


def _unique(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if wanted and isinstance(instance, list):
        texts = [canonical_text(item) for item in instance]
        if len(set(texts)) < len(texts):
            yield ValidationError("two items are equal")


def _multiple(validator: Any, factor: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    """Compares decimal fractions: in binary, 0.3 is no multiple of 0.1."""
    is_number = isinstance(instance, int | float) and not isinstance(instance, bool)
    if is_number and Fraction(repr(instance)) % Fraction(repr(factor)):
        yield ValidationError(f"{instance!r} is not a multiple of {factor!r}")


_OWN: Final[dict[str, Keyword]] = {
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional,
    "uniqueItems": _unique,
    "multipleOf": _multiple,
}
_DRAFTS: Final[dict[Any, tuple[Any, Any]]] = {
    Draft4Validator: (Draft4Validator, DRAFT4),
    Draft6Validator: (Draft6Validator, DRAFT6),
    Draft7Validator: (Draft7Validator, DRAFT7),
    Draft201909Validator: (Draft201909Validator, DRAFT201909),
}
_LATEST: Final = (Draft202012Validator, DRAFT202012)


@cache
def _counting(draft: Any) -> Any:
    """The validator of a draft whose keywords count their work."""
    extend: Any = validators.extend
    return extend(
        draft, {name: _counted(_OWN.get(name) or keyword) for name, keyword in draft.VALIDATORS.items()}
    )


def _validator(schema: Any) -> Any:
    named = validators.validator_for(schema, default=Draft202012Validator)
    draft, specification = _DRAFTS.get(named, _LATEST)
    plain = _plain(schema, is_draft_4=draft is Draft4Validator)
    if {"unevaluatedProperties", "patternProperties"} <= _keys(plain):
        raise CannotCheck("the library itself would search its names with patterns")
    resource: Any = specification.create_resource(plain)
    uri = resource.id() or ""
    # Read once: an incomplete registry would be read at each reference.
    registry: Any = Registry().with_resource(uri, resource).crawl()
    return _counting(draft)(plain, registry=registry, _resolver=registry.resolver(uri))


def _plain(schema: Any, *, is_draft_4: bool) -> Any:
    """A copy in which inner schemas have no ``$schema``, which would select a validator that does not count.
    Limits in the form of draft 4 are converted to the form of later drafts."""
    if isinstance(schema, list):
        return [_plain(one, is_draft_4=is_draft_4) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {
        key: one if key in ("const", "enum") else _plain(one, is_draft_4=is_draft_4)
        for key, one in schema.items()
        if key != "$schema" or not isinstance(one, str)
    }
    for key, plain in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(kept.get(key), bool) and not is_draft_4 and kept.pop(key) and plain in kept:
            kept[key] = kept.pop(plain)
    return kept


def _keys(schema: Any) -> set[str]:
    inner = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    return set(schema if isinstance(schema, dict) else ()).union(*[_keys(one) for one in inner])
