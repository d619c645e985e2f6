"""The text of tool calls in a model's notation, read whole or up to the arguments."""

from __future__ import annotations

import json
from collections.abc import Collection

import jiter
import msgspec
import regex

from agentflow.engine.text.tool_format import ToolFormat


def read_calls(form: ToolFormat, names: Collection[str], text: str) -> list[tuple[str, str]]:
    """Names and arguments of a call, or of a list of calls, that is the whole ``text``; none where one of
    them is no call of a tool of these ``names``."""
    if not could_be_json(text):  # the same reader's word, whether it comes early or late
        return []
    calls: list[tuple[str, str]] = []
    try:
        if text.startswith("["):
            objects = msgspec.json.decode(text, type=list[dict[str, msgspec.Raw]])
        else:
            objects = [msgspec.json.decode(text, type=dict[str, msgspec.Raw])]
        for members in objects:
            name = msgspec.json.decode(members[form.name_key], type=str)
            arguments = bytes(members[form.arguments_key]).decode()
            msgspec.json.decode(arguments, type=dict[str, msgspec.Raw])
            if name not in names:
                return []
            calls.append((name, arguments))
    except (msgspec.MsgspecError, KeyError, UnicodeError, RecursionError):
        return []
    return calls


def could_be_json(text: str) -> bool:
    """Whether the text can go on to be JSON."""
    try:
        jiter.from_json(text.encode(), partial_mode="trailing-strings")
        return True
    except ValueError:
        return False


def name_of(found: regex.Match[str]) -> str | None:
    """The name in a whole match of ``CallHeads.first`` or ``later``; None where it is no JSON string."""
    try:
        return msgspec.json.decode(found["name"], type=str)
    except msgspec.MsgspecError:
        return None


class CallHeads:
    """What stands around arguments in a format whose calls are told as they grow. ``first``: from the mark to
    the first arguments; ``after``: from arguments to the end of the call, or of the list, or to where the
    list has ``more``; ``later``: from there to the arguments of the next call."""

    def __init__(self, form: ToolFormat) -> None:
        constants = "".join([rf"{_json(key)}\s*:\s*{_json(value)}\s*,\s*" for key, value in form.constants])
        name = rf'{_json(form.name_key)}\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*'
        call = rf"\{{\s*{constants}{name}{_json(form.arguments_key)}\s*:\s*(?=\{{)"
        opening = r"\[\s*" if form.is_list else ""
        self.first = regex.compile(rf"{regex.escape(form.mark)}\s*{opening}{call}")
        self.later = regex.compile(rf"\[\s*{call}")
        end = r"\s*(?:(?P<more>,)|\])" if form.is_list else ""
        self.after = regex.compile(rf"\s*\}}{end}")


def _json(text: str) -> str:
    return regex.escape(json.dumps(text, ensure_ascii=False))
