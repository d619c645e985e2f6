"""Contents of ops in words, short enough for an error message."""

from __future__ import annotations

from typing import Any

from agentflow.recording.places import DERIVED, Content, VariablePlace

MAX_CHARS = 60
CHARS_BEFORE = 20


def shortened(text: str, around: int = 0, max_chars: int = MAX_CHARS) -> str:
    """``text`` in quotes, on one line; of a long one the part around that character."""
    start = max(0, around - CHARS_BEFORE) if len(text) > max_chars else 0
    part = text[start : start + max_chars]
    return repr(("…" if start else "") + part + ("…" if start + max_chars < len(text) else ""))


def describe(content: Content) -> str:
    """The op in a few words: ``gen 'answer'``, ``text 'Is it about…'``."""
    fields = dict(content.fields)
    match content.kind:
        case "text":
            return f"text {shortened(_text(fields['parts']))}"
        case "fork":
            return f"a fork of {fields['children']}"
        case "taskgroup":
            return f"a task group of the states {', '.join(map(str, fields['children']))}"
    words = [content.kind]
    words += [shortened(value) for value in fields.values() if isinstance(value, str)][:1]
    return " ".join(words)


def difference(recorded: Content, came: Content) -> tuple[str, str]:
    """The two in words that show where they differ."""
    if recorded.kind != came.kind:
        return describe(recorded), describe(came)
    one, other = dict(recorded.fields), dict(came.fields)
    if recorded.kind == "text":
        texts = _text(one["parts"]), _text(other["parts"])
        at = _first_difference(*texts)
        if texts[0] != texts[1]:
            return f"text {shortened(texts[0], at)}", f"text {shortened(texts[1], at)}"
    left, right = _flat(one), _flat(other)
    names = [name for name in left | right if left.get(name) != right.get(name)]
    if not names or set(names) & {"children", "name", "role"}:
        return describe(recorded), describe(came)
    return _with(recorded, left, names), _with(came, right, names)


def _with(content: Content, fields: dict[str, Any], names: list[str]) -> str:
    listed = ", ".join(f"{name.replace('.', ' ')} {_value(fields.get(name))}" for name in names)
    return f"{describe(content)} with {listed}"


def _flat(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of structs within get the names of these fields."""
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        flat |= _flat(dict(value.fields)) if isinstance(value, Content) else {name: value}
    return flat


def _text(parts: tuple[str | VariablePlace, ...]) -> str:
    return "".join(part if isinstance(part, str) else _variable(part) for part in parts)


def _variable(place: VariablePlace) -> str:
    run = "" if place.run is None else f" of run {place.run}"
    return f"{{{place.name!r} of {place.path}{run}}}"


def _value(value: Any) -> str:
    if value == DERIVED:
        return "from the session"
    if isinstance(value, VariablePlace):
        return _variable(value)
    return shortened(value) if isinstance(value, str) else shortened(repr(value))[1:-1]


def _first_difference(one: str, other: str) -> int:
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
