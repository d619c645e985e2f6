"""How a model writes tool calls, asked of its chat template and not read from its source.

An assistant's turn is rendered with calls whose names and arguments nobody could have guessed, and what is
written around them is the model's notation. A template that does not show tools, calls and results knows
of no tools: then the notation is ``FALLBACK``, and ``tool_messages`` puts tools and calls into contents.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.errors import NotSupported
from agentflow.protocol.chat import CalledTool, Message, ToolSpec
from agentflow.protocol.constraint import Whitespace


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A call is ``begin``, a JSON object, ``end``; where ``is_list``, a JSON list of such objects stands
    between the two. The object has the members ``name_key`` and ``arguments_key``, the name first where
    ``name_first``, and before them the ``constants``.

    ``before`` stands between prose and the first ``begin``, ``between`` from one ``end`` to the next
    ``begin``; None where there is never a second call. ``whitespace``: inside the JSON, as of ``Constraint``.
    ``is_native``: it is the template's own.
    """

    begin: str
    end: str
    name_key: str = "name"
    arguments_key: str = "arguments"
    name_first: bool = True
    constants: tuple[tuple[str, str], ...] = ()
    is_list: bool = False
    before: str = "\n"
    between: str | None = "\n"
    whitespace: Whitespace = "compact"
    is_native: bool = True

    @property
    def mark(self) -> str:
        """What a reader looks for: ``begin`` without white space around it. Empty where a call has no mark
        and can only be a whole turn."""
        return self.begin.strip()

    @property
    def allows_several(self) -> bool:
        """Whether one turn can hold several calls."""
        return self.is_list or self.between is not None


FALLBACK = ToolFormat("<tool_call>", "</tool_call>", is_native=False)
"""For templates that know of no tools."""


@lru_cache(maxsize=64)
def tool_format(template: ChatTemplate) -> ToolFormat:
    """The template's notation, or ``FALLBACK``. Found once for a template, by some ten renderings."""
    if not template.has_template or not _knows_tools(template):
        return FALLBACK
    return _native(template) or FALLBACK


def _nonce() -> str:
    return f"n{secrets.token_hex(8)}"


def _call() -> CalledTool:
    return CalledTool(_nonce(), _nonce(), json.dumps({_nonce(): _nonce()}))


def _knows_tools(template: ChatTemplate) -> bool:
    """Whether it shows what tools there are, what was called, and what came of it."""
    tool = ToolSpec(_nonce(), _nonce(), {"type": "object", "properties": {_nonce(): {"type": "string"}}})
    call, result, question = _call(), _nonce(), _nonce()
    messages = [
        Message("user", question),
        Message("assistant", "", tool_calls=(call,)),
        Message("tool", result, tool_call_id=call.id, name=call.name),
    ]
    try:
        told = template.render(messages[:1], tools=[tool], add_generation_prompt=True)
        called = template.render(messages, tools=[tool])
    except NotSupported:
        return False
    (parameter,) = tool.parameters["properties"]
    in_tools = all(said in told for said in (tool.name, tool.description, parameter))
    return in_tools and all(said in called for said in (call.name, *_words(call), result))


def _words(call: CalledTool) -> tuple[str, str]:
    ((key, value),) = json.loads(call.arguments).items()
    return key, value


def _native(template: ChatTemplate) -> ToolFormat | None:
    """None where a call is not written as a JSON object."""
    call, more, prose = _call(), _call(), _nonce()
    alone = _after_prompt(template, Message("assistant", "", tool_calls=(call,)))
    plain = _after_prompt(template, Message("assistant", prose))
    if alone is None or plain is None or prose not in plain:
        return None
    found = _json_with(alone, call)
    if found is None:
        return None
    start, stop, members = found
    head, tail = alone[:start], alone[stop:].removesuffix(plain.partition(prose)[2])
    form = _members(alone[start:stop], members, call)
    if form is None:
        return None
    between = _between(template, call, more)
    is_list = head.endswith("[") and tail.startswith("]")
    if is_list:
        head, tail, between = head[:-1], tail[1:], None
    elif between is not None:
        head = _common_end(head, between)  # a first call may come after what opens the turn, as thoughts do
    begin = head.lstrip()
    if between is not None:
        if not between.startswith(tail):
            return None
        between = between[len(tail) : len(between) - len(begin)]
    before = _before(template, call, prose, begin) if begin else ""
    return ToolFormat(begin, tail, **form, is_list=is_list, before=before, between=between)


def _after_prompt(template: ChatTemplate, *turns: Message) -> str | None:
    """What is written for turns of an assistant, behind the prompt for it."""
    question = Message("user", _nonce())
    try:
        prompt = template.render([question], add_generation_prompt=True)
        text = template.render([question, *turns])
    except NotSupported:
        return None
    if text.startswith(prompt):
        return text[len(prompt) :]
    shorter = prompt.rstrip()  # some have a line break in the prompt that belongs to a content
    return text[len(shorter) :] if text.startswith(shorter) else None


def _json_with(text: str, call: CalledTool) -> tuple[int, int, dict[str, Any]] | None:
    """From where to where the object is written that the call is a member's value of, and the object."""
    decoder = json.JSONDecoder()
    at = text.find("{")
    while at >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
        except ValueError:
            end, value = at, None
        if isinstance(value, dict) and call.name in value.values():
            return at, end, value
        at = text.find("{", at + 1)
    return None


def _members(written: str, members: dict[str, Any], call: CalledTool) -> dict[str, Any] | None:
    """Which member is what, and how they are written."""
    arguments = json.loads(call.arguments)
    names = [key for key, value in members.items() if value == call.name]
    holders = [key for key, value in members.items() if value == arguments]
    if len(names) != 1 or len(holders) != 1:
        return None
    keys = list(members)
    constants = {
        key: value
        for key, value in members.items()
        if isinstance(value, str) and key not in (names[0], holders[0]) and call.id not in value
    }
    # A short id is one that the template was given in place of the call's.
    constants = {key: value for key, value in constants.items() if key != "id"}
    layouts: dict[Whitespace, tuple[str, str]] = {"compact": (", ", ": "), "tight": (",", ":")}
    # How the arguments are written follows from their own text, so only what stands around is looked at.
    shown = written.replace(call.arguments, '""')
    outline = {key: "" if key == holders[0] else value for key, value in members.items()}
    whitespace = next(
        (name for name, separators in layouts.items() if json.dumps(outline, separators=separators) == shown),
        "free",
    )
    return {
        "name_key": names[0],
        "arguments_key": holders[0],
        "name_first": keys.index(names[0]) < keys.index(holders[0]),
        "constants": tuple(constants.items()),
        "whitespace": whitespace,
    }


def _between(template: ChatTemplate, one: CalledTool, other: CalledTool) -> str | None:
    """What is written between the objects of two calls; None where there may be only one."""
    text = _after_prompt(template, Message("assistant", "", tool_calls=(one, other)))
    first = _json_with(text, one) if text is not None else None
    if text is None or first is None:
        return None
    second = _json_with(text[first[1] :], other)
    return None if second is None else text[first[1] : first[1] + second[0]]


def _before(template: ChatTemplate, call: CalledTool, prose: str, begin: str) -> str:
    """What is written between prose and the calls after it."""
    text = _after_prompt(template, Message("assistant", prose, tool_calls=(call,)))
    written = "" if text is None else text.partition(prose)[2].partition(begin)[0]
    return written if not written.strip() else ""


def _common_end(a: str, b: str) -> str:
    length = 0
    while length < min(len(a), len(b)) and a[-1 - length] == b[-1 - length]:
        length += 1
    return a[len(a) - length :]
