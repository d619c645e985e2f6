"""Readers of the parts of a model's answer: list items, an XML element, values of JSON and YAML, a number, a
date, one of several words. ``transform`` applies them.

Each raises ``RunFailed`` if the text has no such part. All take linear time, or limit the length of the text.
They read the same formats as LangChain's output parsers.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from datetime import date, datetime
from functools import cache
from io import StringIO
from typing import Any, Final, Literal, get_args

import msgspec

from agentflow.errors import BadArgument, NotSupported, RunFailed

MAX_JSON_VALUES: Final = 250_000
"""The maximum number of values that ``json`` decodes, counting commas in strings: decoding holds the GIL."""
MAX_INLINE_CHARS: Final = 65_536
"""Longer texts are read in a thread."""
MAX_SEARCHED_CHARS: Final = 1_000_000
"""The longest text in which ``items`` and ``xml`` search."""
MAX_YAML_CHARS: Final = 65_536
MAX_YAML_NODES: Final = 10_000
MAX_YAML_DEPTH: Final = 50
MAX_NUMBER_CHARS: Final = 1000
MAX_DATE_CHARS: Final = 200
MAX_WORDS_CHARS: Final = 65_536

ListKind = Literal["numbered", "bulleted", "comma"]

_LIST_KINDS = get_args(ListKind)
_ITEMS_ARGUMENT = re.compile(rf"({'|'.join(_LIST_KINDS)})(?:\.(-?[0-9]{{1,9}}))?")
# ``\d+\.\s([^\n]+)`` and ``^\s*[-*]\s([^\n]+)$``, which are quadratic, in a linear form.
_ITEM_PATTERNS: Final = {
    "numbered": re.compile(r"(?<!\d)\d++\.\s([^\n]+)"),
    "bulleted": re.compile(r"^[^\S\n]*+[-*]\s([^\n]+)$", re.MULTILINE),
}
_TAG = re.compile(r"[^\W\d][\w.:-]{0,99}")
_FENCED_JSON = re.compile(r"```(?:json)?(.*)", re.DOTALL)
_FENCED_YAML = re.compile(r"^```(?:ya?ml)?([^`]*)", re.MULTILINE)
_DIGIT = re.compile("[0-9]")
_NUMBER = re.compile(r"(?:[0-9]{1,3}(?:,[0-9]{3})++(?![0-9])|[0-9]++)(?:\.[0-9]++)?(?:[eE][-+]?[0-9]++)?")
# Directives that mean the same on every machine, whatever its locale and its time zone.
_DATE_DIRECTIVES: Final = frozenset("aAbBdfGHIjmMpSuUVwWyYz")
_TIME_DIRECTIVES: Final = frozenset("fHIMpSz")


def items(text: str, argument: str) -> str:
    """The items of a list, one per line, or one item (``"numbered.0"``)."""
    kind, index = _items_argument(argument)
    where = f"items({argument!r})"
    _check_length(text, MAX_SEARCHED_CHARS, where)
    found = _comma_separated(text) if kind == "comma" else _ITEM_PATTERNS[kind].findall(text)
    if not found:
        raise RunFailed(f"{where}: there are no items in {shorten_text(text)}")
    if index is None:
        return "\n".join(found)
    try:
        return str(found[index])
    except IndexError:
        raise RunFailed(f"{where}: there are only {len(found)} items in {shorten_text(text)}") from None


def xml(text: str, tag: str) -> str:
    """The text within the first ``<tag>…</tag>``, unchanged. The start tag may have attributes."""
    where, at = f"xml({tag!r})", 0
    _check_length(text, MAX_SEARCHED_CHARS, where)
    while (at := text.find(f"<{tag}", at)) >= 0:
        at += len(tag) + 1
        start = text.find(">", at) if text[at : at + 1].isspace() else at
        if start < 0:
            break
        if text[start : start + 1] == ">":
            end = text.find(f"</{tag}>", start)
            if end < 0:
                break
            return text[start + 1 : end]
    raise RunFailed(f"{where}: there is no <{tag}>…</{tag}> in {shorten_text(text)}")


def json_value(text: str, path: str) -> str:
    """The value at ``path`` in a JSON text, or in a Markdown block of it."""
    where = f"json({path!r})"
    if len(text) > MAX_INLINE_CHARS and sum(map(text.count, ",[{")) > MAX_JSON_VALUES:
        raise RunFailed(f"{where}: the text has more than {MAX_JSON_VALUES:,} values: {shorten_text(text)}")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        fenced = _FENCED_JSON.search(text)
        try:
            if fenced is None:
                raise
            value, _ = json.JSONDecoder().raw_decode(fenced[1].lstrip(" \n\r\t`"))
        except (ValueError, RecursionError):
            raise RunFailed(f"{where}: the text is not JSON ({error}): {shorten_text(text)}") from None
    return _value_at(value, path, where)


def yaml_value(text: str, path: str) -> str:
    """The value at ``path`` in a YAML text, or in its first Markdown block."""
    where = f"yaml({path!r})"
    _check_length(text, MAX_YAML_CHARS, where)
    yaml, loader = _yaml()
    fenced = _FENCED_YAML.search(text.strip())
    source = text if fenced is None else fenced[1]
    try:
        _check_yaml(yaml, source, where)
        # As JSON has it: keys are texts, dates are in ISO's format.
        value = json.loads(json.dumps(yaml.load(source, Loader=loader), default=_iso))
    except (
        yaml.YAMLError,
        ValueError,
        TypeError,
        RecursionError,
        OverflowError,
        AttributeError,
        LookupError,  # of `!!int ""`
    ) as error:
        reason = " ".join(str(error).split())
        raise RunFailed(f"{where}: the text is not YAML ({reason:.200}): {shorten_text(text)}") from None
    return _value_at(value, path, where)


def number(text: str, _: str) -> str:
    """The first decimal number, as JSON writes it: without a plus, commas or leading zeros."""
    for piece in range(0, len(text), MAX_INLINE_CHARS):
        first = _DIGIT.search(text, piece, piece + MAX_INLINE_CHARS)
        if first is not None:
            break
    else:
        raise RunFailed(f"number(): there is no number in {shorten_text(text)}")
    at = first.start()
    before = text[max(0, at - 3) : at]
    is_fraction = before.endswith(".") and not before[-2:-1].isalnum()
    sign = before[: len(before) - is_fraction]
    is_negative = sign.endswith(("-", "\N{MINUS SIGN}")) and not sign[-2:-1].isalnum()
    ahead = text[at : at + MAX_NUMBER_CHARS + 1]
    found = _NUMBER.match(f"0.{ahead}" if is_fraction else ahead)
    assert found is not None
    if len(found[0]) > MAX_NUMBER_CHARS:
        raise RunFailed(
            f"number(): the number has more than {MAX_NUMBER_CHARS} characters: {shorten_text(text)}"
        )
    whole, *rest = re.split("(?=[.eE])", found[0].replace(",", ""), maxsplit=1)
    return f"{'-' * is_negative}{whole.lstrip('0') or '0'}{''.join(rest)}"


def iso_date(text: str, form: str) -> str:
    """The date, or the date and time, in ISO 8601. ``form``: a format of ``strptime``; without it, the text
    is in ISO 8601. The whole text must be the date."""
    stripped = text.strip()
    where = f"date({form!r})" if form else "date()"
    _check_length(stripped, MAX_DATE_CHARS, where)
    try:
        if form:
            found = datetime.strptime(stripped, form)
            has_time = any(directive in _TIME_DIRECTIVES for directive in _directives(form))
            return found.isoformat() if has_time else found.date().isoformat()
        try:
            return date.fromisoformat(stripped).isoformat()
        except ValueError:
            return datetime.fromisoformat(stripped).isoformat()
    except (ValueError, OverflowError, re.error) as error:
        raise RunFailed(f"{where}: {shorten_text(text)} is not such a date: {error}") from None


def one_of(text: str, argument: str) -> str:
    """The text, stripped, if it is one of the words (a JSON list)."""
    words, stripped = _words(argument), text.strip()
    if stripped not in words:
        raise RunFailed(f"enum: {shorten_text(stripped)} is none of {', '.join(map(repr, words)):.200}")
    return stripped


def check_items(argument: str) -> None:
    """Raises ``BadArgument`` unless ``items`` can use it."""
    _items_argument(argument)


def check_tag(tag: str) -> None:
    """Raises ``BadArgument`` unless ``xml`` can use it."""
    if not _TAG.fullmatch(tag):
        raise BadArgument(f"xml: {tag!r:.60} is not the name of a tag", param="tag")


def check_date_format(form: str) -> None:
    """Raises ``BadArgument`` unless ``iso_date`` can use it."""
    directives = _directives(form)
    wrong = [one for one in directives if one not in _DATE_DIRECTIVES or directives.count(one) > 1]
    if wrong or len(form) > MAX_DATE_CHARS:
        reason = (
            f"%{wrong[0]} is unknown, or there twice" if wrong else f"at most {MAX_DATE_CHARS} characters"
        )
        raise BadArgument(f"date: {form!r:.60} is not a format: {reason}", param="format")


def check_words(argument: str) -> None:
    """Raises ``BadArgument`` unless ``one_of`` can use it."""
    _words(argument)


def shorten_text(text: str) -> str:
    """The beginning of a text, for an error's message."""
    return repr(text if len(text) <= 80 else f"{text[:79]}…")


def _check_length(text: str, most: int, where: str) -> None:
    if len(text) > most:
        raise RunFailed(f"{where}: the text has more than {most:,} characters: {shorten_text(text)}")


def _items_argument(argument: str) -> tuple[str, int | None]:
    found = _ITEMS_ARGUMENT.fullmatch(argument)
    if found is None:
        raise BadArgument(
            f"items: {argument!r:.60} is not {', '.join(_LIST_KINDS)}, or one of these and an index, "
            "as in 'comma.0'"
        )
    return found[1], None if found[2] is None else int(found[2])


def _comma_separated(text: str) -> list[str]:
    try:
        rows = csv.reader(StringIO(text), quotechar='"', delimiter=",", skipinitialspace=True)
        return [item for row in rows for item in row]
    except csv.Error:
        return [part.strip() for part in text.split(",")]


def _value_at(value: Any, path: str, where: str) -> str:
    for step in path.split(".") if path else ():
        try:
            value = value[int(step)] if isinstance(value, list) else value[step]
        except (KeyError, IndexError, ValueError, TypeError):
            raise RunFailed(f"{where}: there is no {step!r} in {shorten_text(json.dumps(value))}") from None
    found = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    # JSON can escape half a surrogate pair, which is not valid in text.
    return found.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@cache
def _yaml() -> tuple[Any, Any]:
    """The package, and a loader that limits the length of numbers: parsing base 60 takes quadratic time."""
    try:
        import yaml
    except ImportError as error:
        raise NotSupported(
            f"the transform yaml needs the package {error.name!r}: pip install 'agentflow-lm[yaml]'"
        ) from None

    # Not by a class statement, which type checkers refuse where they have no types of the package.
    Loader: Any = type("Loader", (yaml.CSafeLoader,), {})

    def short(construct: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def constructed(loader: Any, node: Any) -> Any:
            if len(node.value) > MAX_NUMBER_CHARS:
                raise ValueError(f"a number has more than {MAX_NUMBER_CHARS} characters")
            return construct(loader, node)

        return constructed

    for kind in ("int", "float"):
        tag = f"tag:yaml.org,2002:{kind}"
        Loader.add_constructor(tag, short(yaml.CSafeLoader.yaml_constructors[tag]))
    return yaml, Loader


def _check_yaml(yaml: Any, source: str, where: str) -> None:
    """Raises ``RunFailed`` for aliases, which expand short texts to large values, and beyond the bounds."""
    depth = num_nodes = 0
    for event in yaml.parse(source, Loader=yaml.CSafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise RunFailed(f"{where}: aliases (*{event.anchor:.60}) are not supported")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        num_nodes += isinstance(event, yaml.NodeEvent)
        if depth > MAX_YAML_DEPTH or num_nodes > MAX_YAML_NODES:
            raise RunFailed(
                f"{where}: the text has more than {MAX_YAML_NODES:,} values, or more than {MAX_YAML_DEPTH} "
                "inside each other"
            )


def _iso(value: object) -> str:
    if isinstance(value, date):  # or a datetime
        return value.isoformat()
    raise TypeError(f"a value of type {type(value).__name__} is not a value of JSON")


def _directives(form: str) -> list[str]:
    return [one for one in re.findall("%(.?)", form, re.DOTALL) if one != "%"]


def _words(argument: str) -> tuple[str, ...]:
    if len(argument) > MAX_WORDS_CHARS:
        raise BadArgument(f"enum: the values have more than {MAX_WORDS_CHARS:,} characters", param="values")
    try:
        words = msgspec.json.decode(argument.encode(errors="replace"), type=tuple[str, ...])
    except msgspec.DecodeError:
        words = ()
    if not words or any(not word or word != word.strip() for word in words):
        raise BadArgument(
            "enum: give one or more values, texts without white space at their ends, as a JSON list, not "
            f"{argument!r:.60}",
            param="values",
        )
    return words
