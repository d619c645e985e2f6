"""Checks a finished call, or answer, against the schema of the client, where the grammar does not enforce it.

The ``jsonschema`` package checks, since its work can be counted: each keyword spends steps, patterns a time,
and a check that needs more is given up. A compiled validator is faster, but nothing can interrupt it, and a
schema of 1 kB can cost hours. References are not fetched.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, TypeAlias
from urllib.parse import quote

import anyio.to_thread
from jsonschema import (
    Draft4Validator,
    Draft6Validator,
    Draft7Validator,
    Draft201909Validator,
    Draft202012Validator,
    ValidationError,
    validators,
)
from referencing import Registry
from referencing.jsonschema import DRAFT4, DRAFT6, DRAFT7, DRAFT201909, DRAFT202012

from agentflow.engine.generator.generator import EngineGenerator
from agentflow.engine.messages import Finished
from agentflow.protocol.bounds.client_pattern import compiled
from agentflow.server.completion.request import Check, CompletionRequest

Path: TypeAlias = tuple[str, ...]

MOST_STEPS: Final = 20_000
"""The steps of one check, which take about a tenth of a second."""
MOST_PATTERN_S: Final = 0.1
MOST_VIOLATIONS: Final = 5
"""The most violations that one check reports."""
_CHARS_OF_A_STEP: Final = 1_000
_MOST_HEADER_CHARS: Final = 900


class _CannotCheck(Exception):
    """The check would take too long, or the schema cannot be read."""


def violations(schema: dict[str, Any], text: str) -> list[Path] | None:
    """The places in the schema of the keywords that the JSON text violates, at most ``MOST_VIOLATIONS``. None
    if it cannot be checked within the limits.

    >>> violations({"type": "object", "properties": {"a": {"uniqueItems": True}}}, '{"a": [1, 1]}')
    [('properties', 'a', 'uniqueItems')]
    """
    try:
        value = json.loads(text)
    except ValueError:
        return [()]
    except RecursionError:
        return None
    try:
        work = _Work()
        work.measure(value)
        token = _work.set(work)
        try:
            errors = itertools.islice(_validator(schema).iter_errors(value), MOST_VIOLATIONS)
            return [tuple(map(str, error.absolute_schema_path)) for error in errors]
        finally:
            _work.reset(token)
    # The library raises many kinds of errors for invalid schemas, and the regex package for patterns.
    except Exception:
        return None


@dataclass(slots=True)
class _Work:
    """The rest of a check's limits. ``sizes``: the characters of each container, by its id."""

    steps: int = MOST_STEPS
    pattern_s: float = MOST_PATTERN_S
    sizes: dict[int, int] = field(default_factory=dict)

    def measure(self, value: Any) -> int:
        """The characters of a value, and of all values in it."""
        if isinstance(value, str):
            return len(value)
        if not isinstance(value, dict | list):
            return 1
        parts = itertools.chain(value, value.values()) if isinstance(value, dict) else value
        size = self.sizes[id(value)] = 1 + sum([self.measure(part) for part in parts])
        return size

    def spend(self, keyword: Any, instance: Any) -> None:
        """Counts one keyword with its value, on one instance, which an error would quote."""
        if isinstance(keyword, dict):
            self.steps -= sum([1 + (len(one) if isinstance(one, list) else 0) for one in keyword.values()])
        elif isinstance(keyword, list):
            self.steps -= len(keyword)
        size = len(instance) if isinstance(instance, str) else self.sizes.get(id(instance), 1)
        self.steps -= 1 + size // _CHARS_OF_A_STEP
        if isinstance(instance, dict | list):
            self.steps -= len(instance)
        if self.steps < 0:
            raise _CannotCheck

    def matches(self, pattern: str, text: str) -> bool:
        """Whether a pattern matches some part of the text."""
        self.spend(None, text)
        if self.pattern_s <= 0:
            raise _CannotCheck
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
        yield ValidationError("the pattern does not match")


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
            yield ValidationError("a member is not allowed")
        elif isinstance(allowed, dict):
            yield from validator.descend(value, allowed, path=name)


def _unique(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if wanted and isinstance(instance, list):
        texts = [json.dumps(_comparable(item), sort_keys=True) for item in instance]
        if len(set(texts)) < len(texts):
            yield ValidationError("two items are equal")


def _comparable(value: Any) -> Any:
    """The value with one form for equal numbers."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_comparable(item) for item in value]
    return {key: _comparable(item) for key, item in value.items()} if isinstance(value, dict) else value


_OWN: Final[dict[str, Keyword]] = {
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional,
    "uniqueItems": _unique,
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


def _validator(schema: dict[str, Any]) -> Any:
    named = validators.validator_for(schema, default=Draft202012Validator)
    draft, specification = _DRAFTS.get(named, _LATEST)
    plain = _plain(schema, is_draft_4=draft is Draft4Validator)
    if {"unevaluatedProperties", "patternProperties"} <= _keys(plain):
        raise _CannotCheck  # here the library itself searches names with patterns
    resource: Any = specification.create_resource(plain)
    uri = resource.id() or ""
    # Read once: an incomplete registry would be read at each reference.
    registry: Any = Registry().with_resource(uri, resource).crawl()
    return _counting(draft)(plain, registry=registry, _resolver=registry.resolver(uri))


def _plain(schema: Any, *, is_draft_4: bool) -> Any:
    """A copy in which no inner schema names a draft, as it would get a validator that does not count. Limits
    in the form of draft 4 get the form of later drafts."""
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


async def check_answer(
    generator: EngineGenerator,
    request: CompletionRequest,
    end: Finished,
    outputs: Sequence[tuple[str, str]],
    unkept: Collection[str],
) -> tuple[Check, ...]:
    """Checks an answer in a thread of the tenant.

    Args:
        generator: the tenant's generator.
        request: the request with the schemas.
        end: the end of the answer.
        outputs: the names of the called tools, with the arguments; or the text, without a name.
        unkept: the names of the schemas that were relaxed.
    """
    schemas = {tool.name: tool.parameters for tool in request.tools}
    if request.constraint is not None and "" in unkept:
        source = request.constraint.source
        schemas[""] = await generator.requests.encode_beside(len(source), json.loads, source)
    checks: list[Check] = []
    # The last one of a truncated answer is not complete.
    for name, text in outputs[:-1] if end.finish_reason == "length" else outputs:
        if name in unkept:
            limiter = generator.requests.threads
            found = await anyio.to_thread.run_sync(violations, schemas[name], text, limiter=limiter)
            checks.append(Check(name, None if found is None else tuple(found)))
    return tuple(checks)


def shown(places: Sequence[tuple[str, Path]]) -> str:
    """Places in the schemas of tools as the value of a header: JSON pointers as fragments of URIs, after the
    name of the tool. Places in the form of an answer have no name.

    >>> shown([("find", ("properties", "a/b", "uniqueItems"))])
    'find#/properties/a~1b/uniqueItems'
    """
    texts: list[str] = []
    num_chars = 0
    for name, path in places:
        keys = [key.replace("~", "~0").replace("/", "~1") for key in path]
        texts.append(quote(name, safe="") + "#" + "".join([f"/{quote(key, safe='$~')}" for key in keys]))
        num_chars += len(texts[-1]) + 2
        if num_chars > _MOST_HEADER_CHARS:
            rest = len(places) - len(texts)
            return ", ".join(texts)[:_MOST_HEADER_CHARS] + f", and {rest} more"
    return ", ".join(texts)
